"""Forwards and backwards."""

from __future__ import annotations

from dataclasses import dataclass

from fuzz.actions.page import Action, Page


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
class LossOf(Action):
    """A loss over the next batch of a kind that :mod:`fuzz.losses` has, perhaps of a parameter."""

    form: str = "by address"
    param: int = 0

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        number = page.number()
        page.write(f"loss{number} = loss_of(s, {self.form!r}, {number}, {page.param(self.param)!r})")
        page.losses.append(f"loss{number}")
        page.mark(f"forward {number}", f"loss{number}")


@dataclass(frozen=True, slots=True)
class Grow(Action):
    """Let the graph of every later forward have ``extra`` nodes more."""

    extra: int = 0

    def write(self, page: Page) -> None:
        page.write(f"s.net.extra = {self.extra!r}")


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
