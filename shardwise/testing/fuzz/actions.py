"""What a program does, one frozen value per action, and how each is written down as Python.

The text is what every contender runs: ``s`` is its side of the comparison (:mod:`shardwise.testing.fuzz.sides`), each
``yield`` is a moment at which all that can be seen is recorded and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Page:
    """The text of a program as it grows.

    Attributes:
        params: names of the model's parameters.  units: paths of units' first modules, the root's last.
        gates: paths of modules that can be switched off.
        losses: names of variables whose graph has not been freed.  kept: names under which aliases are kept.
    """

    params: Sequence[str]
    units: Sequence[str]
    gates: Sequence[str]
    lines: list[str] = field(default_factory=list[str])
    losses: list[str] = field(default_factory=list[str])
    kept: list[str] = field(default_factory=list[str])
    handles: list[str] = field(default_factory=list[str])
    serial: int = 0

    def begin(self) -> None:
        """Start another program, in which nothing of the one before is known."""
        for names in (self.lines, self.losses, self.kept, self.handles):
            names.clear()

    def number(self) -> int:
        """Return a number that no variable has yet."""
        self.serial += 1
        return self.serial - 1

    def write(self, *lines: str) -> None:
        """Add lines."""
        self.lines += lines

    def mark(self, label: str, loss: str = "") -> None:
        """Add a moment of comparison, perhaps with a loss."""
        self.lines.append(f"yield {label!r}, {loss}" if loss else f"yield {label!r}")

    def param(self, index: int) -> str:
        """Return the name of a parameter."""
        return self.params[index % len(self.params)]

    def unit(self, index: int) -> str:
        """Return an expression for the first module of a unit."""
        return f"s.unit({self.units[index % len(self.units)]!r})"


@dataclass(frozen=True, slots=True)
class Action:
    """Something that a program does."""

    @property
    def is_engines(self) -> bool:
        """True if only the engine's doors can do it."""
        return False

    def write(self, page: Page) -> None:
        """Add its lines to ``page``; nothing if what it refers to is not there any more."""
        raise NotImplementedError


# ---- forward and backward ----


@dataclass(frozen=True, slots=True)
class Forward(Action):
    """A forward over the next batch.

    Attributes:
        mode: "train", "eval" (with gradients), "no_grad", "inference".
        watched: the gradient of the inputs is asked for and compared.
    """

    mode: str = "train"
    watched: bool = False

    def write(self, page: Page) -> None:
        number = page.number()
        name = f"loss{number}"
        call = f"{name} = s.loss(s.model(s.batch({number}{', watched=True' if self.watched else ''})))"
        if self.mode == "eval":
            page.write("s.net.eval()", call, "s.net.train()")
        elif self.mode in ("no_grad", "inference"):
            mode = "torch.no_grad()" if self.mode == "no_grad" else "torch.inference_mode()"
            page.write(f"with {mode}:", f"    {call}")
        else:
            page.write(call)
        if self.mode in ("train", "eval"):
            page.losses.append(name)
        page.mark(f"forward {number}", name)


@dataclass(frozen=True, slots=True)
class Backward(Action):
    """A backward of one loss, or of the sum of all.

    Attributes:
        of: which of the losses whose graphs are alive, the latest by default.  retain: keep the graph for another backward.
        together: the sum of all of them.
    """

    of: int = -1
    retain: bool = False
    together: bool = False

    def write(self, page: Page) -> None:
        if not page.losses:
            return
        names = list(page.losses) if self.together else [page.losses[self.of % len(page.losses)]]
        page.write(f"s.backward({' + '.join(names)}{', retain_graph=True' if self.retain else ''})")
        if not self.retain:
            page.losses = [name for name in page.losses if name not in names]
        page.mark(f"backward of {' + '.join(names)}")


@dataclass(frozen=True, slots=True)
class CallUnit(Action):
    """A forward of one unit's first module by itself, then its backward."""

    unit: int = 0

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        number = page.number()
        page.write(f"part{number} = s.loss({page.unit(self.unit)}(s.batch({number})))", f"s.backward(part{number})")
        page.mark(f"part {number}", f"part{number}")


@dataclass(frozen=True, slots=True)
class InputGradient(Action):
    """Ask for the gradient of the inputs alone, by ``torch.autograd.grad``."""

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        number = page.number()
        page.write(
            f"inputs{number} = s.batch({number}, watched=True)",
            f"(gradient{number},) = torch.autograd.grad(s.loss(s.model(inputs{number})), inputs{number})",
        )
        page.mark(f"gradient of inputs {number}", f"gradient{number}")


@dataclass(frozen=True, slots=True)
class Blow(Action):
    """A forward that raises in a gate, on every rank; the program catches it and goes on."""

    gate: int = 0

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        if not page.gates:
            return
        gate, number = f"s.net.get_submodule({page.gates[self.gate % len(page.gates)]!r})", page.number()
        page.write(
            f"before{number} = {gate}.on",
            f"{gate}.on = 'raise'",
            "try:",
            f"    s.model(s.batch({number}))",
            "except ValueError:",
            "    pass",
            f"{gate}.on = before{number}",
        )
        page.mark(f"forward {number} that raised")


@dataclass(frozen=True, slots=True)
class JoinLoop(Action):
    """Steps over as many batches as each rank has, in torch's ``Join``: ``counts`` per rank, in turn."""

    counts: tuple[int, ...] = (2, 1)

    def write(self, page: Page) -> None:
        numbers = [page.number() for _ in range(max(self.counts))]
        page.write(f"s.join_loop({numbers[0]}, {self.counts!r})", "s.zero_grad()")
        page.losses.clear()
        page.mark("step of all that had inputs")


@dataclass(frozen=True, slots=True)
class Switch(Action):
    """Turn a gate on or off; ``on`` may be "first" (on the first rank only)."""

    gate: int = 0
    on: str = "no"

    def write(self, page: Page) -> None:
        if page.gates:
            value = {"no": "False", "yes": "True"}.get(self.on, "s.rank == 0")
            page.write(f"s.net.get_submodule({page.gates[self.gate % len(page.gates)]!r}).on = {value}")


# ---- steps ----


@dataclass(frozen=True, slots=True)
class Step(Action):
    """A step of the optimizer; with a ``closure`` it computes the gradients itself."""

    closure: bool = False

    def write(self, page: Page) -> None:
        number = page.number()
        if self.closure:
            page.write(
                f"def closure{number}():",
                "    s.zero_grad()",
                f"    loss = s.loss(s.model(s.batch({number})))",
                "    s.backward(loss)",
                "    return loss",
                f"loss{number} = s.step(closure{number})",
            )
            page.mark(f"step {number} with closure", f"loss{number}")
        else:
            page.write("s.step()")
            page.mark(f"step {number}")


@dataclass(frozen=True, slots=True)
class ZeroGrad(Action):
    """Drop gradients or make them zero, by the optimizer or by the model."""

    to_none: bool = True
    by_model: bool = False

    def write(self, page: Page) -> None:
        page.write(f"{'s.net' if self.by_model else 's'}.zero_grad({'' if self.to_none else 'set_to_none=False'})")
        page.mark("zero_grad")


@dataclass(frozen=True, slots=True)
class Clip(Action):
    """Clip gradients by their norm (``max_norm``; ``how``: "norm", "inf") or by value ("value")."""

    how: str = "norm"
    bound: float = 1.0

    def write(self, page: Page) -> None:
        number = page.number()
        page.write(f"norm{number} = s.clip({self.how!r}, {self.bound!r})")
        page.mark(f"clip {number}", f"norm{number}")


@dataclass(frozen=True, slots=True)
class Rate(Action):
    """Change the learning rate of all groups."""

    factor: float = 0.5

    def write(self, page: Page) -> None:
        page.write("for group in s.optimizer.param_groups:", f"    group['lr'] *= {self.factor!r}")


@dataclass(frozen=True, slots=True)
class Remake(Action):
    """Make a new optimizer over the parameters as they are registered now."""

    def write(self, page: Page) -> None:
        page.write("s.remake_optimizer()")


# ---- parameters, changed from outside ----

CHANGES: dict[str, tuple[str, ...]] = {
    "add": ("with torch.no_grad():", "    {p}.add_(1)"),
    "zero": ("with torch.no_grad():", "    {p}.zero_()"),
    "copy": ("with torch.no_grad():", "    {p}.copy_(1 - {p})"),
    "data_add": ("{p}.data.add_(1)",),
    "data_copy": ("{p}.data.copy_(1 - {p}.data)",),
    "data_set": ("{p}.data = {p}.data + 1",),
    "detach": ("{p}.detach().neg_()",),
    "local": ("s.local({p}).detach().sub_(1)",),
    "fill": ("torch.nn.init.constant_({p}, 2)",),
    "state": ("s.net.state_dict()[{name}].add_(1)",),
    "load": ("s.net.load_state_dict(s.changed(s.net.state_dict()))",),
    "assign": ("s.assign(s.changed(s.net.state_dict()))", "s.remake_optimizer()"),
    "convert": ("s.net.to(torch.float64)", "s.net.to(s.dtype)"),
    "empty": (
        "values = {name: tensor.clone() for name, tensor in s.net.state_dict().items()}",
        "s.zero_grad()",
        "s.net.to_empty(device='cpu')",
        "s.net.load_state_dict(values)",
    ),
}
WHOLE_MODEL = ("load", "assign", "convert", "empty")


@dataclass(frozen=True, slots=True)
class Change(Action):
    """Change one parameter, or all, behind the back of everybody: ``how`` is a key of :data:`CHANGES`."""

    how: str = "add"
    param: int = 0

    def write(self, page: Page) -> None:
        name = repr(page.param(self.param))
        page.write(
            *(line.replace("{p}", f"s.param({name})").replace("[{name}]", f"[{name}]") for line in CHANGES[self.how])
        )
        page.mark(f"change {self.how}")


@dataclass(frozen=True, slots=True)
class ChangeKept(Action):
    """Change a parameter through an alias that was taken before."""

    param: int = 0
    alias: int = 0

    def write(self, page: Page) -> None:
        if page.kept:
            alias = page.kept[self.alias % len(page.kept)]
            page.write("with torch.no_grad():", f"    s.kept[{alias!r}][{page.param(self.param)!r}].add_(1)")
            page.mark(f"change through {alias}")


@dataclass(frozen=True, slots=True)
class Freeze(Action):
    """Freeze or thaw one parameter, or all parameters of a unit."""

    index: int = 0
    on: bool = True
    whole_unit: bool = False

    def write(self, page: Page) -> None:
        target = f"s.param({page.param(self.index)!r})"
        if self.whole_unit:
            path = page.units[self.index % len(page.units)]
            target = f"s.net.get_submodule({path!r})" if path else "s.net"
        page.write(f"{target}.requires_grad_({not self.on})")


# ---- tensors that users keep ----

TAKES: dict[str, str] = {
    "state_dict": "s.net.state_dict()",
    "params": "dict(s.net.named_parameters())",
    "data": "{name: param.data for name, param in s.net.named_parameters()}",
    "detach": "{name: param.detach() for name, param in s.net.named_parameters()}",
    "local": "s.locals()",
    "grads": "s.gradients()",
    "optim": "s.optimizer_tensors()",
}
COPIES: dict[str, str] = {
    "deepcopy": "copy.deepcopy({it})",
    "pickle": "pickle.loads(pickle.dumps({it}))",
    "save": "s.saved_and_loaded({it})",
}


@dataclass(frozen=True, slots=True)
class Take(Action):
    """Keep tensors that share memory with parameters, gradients or optimizer state; compared at every later moment."""

    what: str = "state_dict"

    def write(self, page: Page) -> None:
        name = f"{self.what}{page.number()}"
        page.write(f"s.kept[{name!r}] = {TAKES[self.what]}")
        if self.what not in ("grads", "optim", "local"):
            page.kept.append(name)
        page.mark(f"take {name}")


@dataclass(frozen=True, slots=True)
class Copy(Action):
    """Copy tensors; what came out is kept too, and must not change any more."""

    what: str = "state_dict"
    how: str = "deepcopy"

    def write(self, page: Page) -> None:
        name = f"copy{page.number()}"
        page.write(f"s.kept[{name!r}] = {COPIES[self.how].format(it=TAKES[self.what])}")
        page.mark(f"{self.how} of {self.what}")


@dataclass(frozen=True, slots=True)
class Weigh(Action):
    """Check that shards look like any tensors: offset 0, a storage of exactly their own bytes."""

    what: str = "state_dict"

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        page.write(f"s.weigh({TAKES[self.what]})")


@dataclass(frozen=True, slots=True)
class CopyModel(Action):
    """Go on with a deep copy of the model and a new optimizer; the old ones stay alive if ``keeps_old``."""

    keeps_old: bool = False

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        number = page.number()
        if self.keeps_old:
            page.write(f"old{number} = s.model")
        page.write("s.adopt(copy.deepcopy(s.model))")
        page.losses.clear()
        page.handles.clear()
        page.mark(f"copy of the model {number}")


@dataclass(frozen=True, slots=True)
class Save(Action):
    """Remember model and optimizer as a checkpoint would."""

    def write(self, page: Page) -> None:
        page.write("saved = s.save()")


@dataclass(frozen=True, slots=True)
class Load(Action):
    """Go back to what the last :class:`Save` remembered."""

    def write(self, page: Page) -> None:
        if "saved = s.save()" in page.lines:
            page.write("s.load(saved)")
            page.mark("load")


@dataclass(frozen=True, slots=True)
class Restart(Action):
    """Save everything, end all ranks, and go on with ``num_ranks`` of them behind another door.

    Attributes:
        how: "full" (whole tensors through a file) or "dcp" (``torch.distributed.checkpoint``).
        door, update: of the contender that goes on; "" for the same.
    """

    num_ranks: int = 1
    how: str = "full"
    door: str = ""
    update: str = ""

    def write(self, page: Page) -> None:
        """Write nothing: programs end and begin here."""


# ---- methods of the engine's doors ----


@dataclass(frozen=True, slots=True)
class Set(Action):
    """Call a ``set_*`` method of a unit's module.

    Attributes:
        method: without "set_".  value: what it is given; a number for a divide factor.
        recurse: passed on where the method has that argument.
    """

    method: str = "requires_gradient_sync"
    value: float = 0
    unit: int = -1
    recurse: bool = True

    @property
    def is_engines(self) -> bool:
        return not (self.method == "requires_gradient_sync" and self.recurse and self.unit == -1)

    def write(self, page: Page) -> None:
        has_recurse = self.method not in ("is_last_backward", "unshard_in_backward", "gradient_divide_factor")
        value = repr(self.value) if self.method == "gradient_divide_factor" else repr(bool(self.value))
        page.write(
            f"{page.unit(self.unit)}.set_{self.method}({value}{'' if self.recurse or not has_recurse else ', recurse=False'})"
        )


@dataclass(frozen=True, slots=True)
class Unshard(Action):
    """Unshard a unit by hand; ``waits``: now, or with the next :class:`Wait`."""

    unit: int = 0
    waits: bool = True

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        if self.waits:
            page.write(f"{page.unit(self.unit)}.unshard()")
            return
        name = f"handle{page.number()}"
        page.handles.append(name)
        page.write(f"{name} = {page.unit(self.unit)}.unshard(async_op=True)")


@dataclass(frozen=True, slots=True)
class Wait(Action):
    """Wait for unshards that were launched by hand."""

    def write(self, page: Page) -> None:
        for name in page.handles:
            page.write(f"if {name} is not None:", f"    {name}.wait()")
        page.handles.clear()


@dataclass(frozen=True, slots=True)
class Reshard(Action):
    """Reshard a unit by hand."""

    unit: int = 0

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        page.write(f"{page.unit(self.unit)}.reshard()")


@dataclass(frozen=True, slots=True)
class Prefetch(Action):
    """Name the units that are to be unshard ahead of one in forward or backward."""

    unit: int = 0
    targets: tuple[int, ...] = ()
    backward: bool = False

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        targets = ", ".join(dict.fromkeys(page.unit(target) for target in self.targets))
        which = "backward" if self.backward else "forward"
        page.write(f"{page.unit(self.unit)}.set_modules_to_{which}_prefetch([{targets}])")


_ALL: tuple[type[Action], ...] = (
    *(Forward, Backward, CallUnit, InputGradient, Blow, JoinLoop, Switch),
    *(Step, ZeroGrad, Clip, Rate, Remake, Change, ChangeKept, Freeze),
    *(Take, Copy, Weigh, CopyModel, Save, Load, Restart),
    *(Set, Unshard, Wait, Reshard, Prefetch),
)
ACTIONS: dict[str, type[Action]] = {each.__name__: each for each in _ALL}
