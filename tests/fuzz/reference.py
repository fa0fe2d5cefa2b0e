"""One process on the whole batch: plain torch, the ranks' microbatches side by side, their gradients averaged in fp64.

Ranks are threads with a model each, so that buffers and control flow of a rank stay its own; what data parallelism adds
is one exchange after each backward.  The ``set_*`` methods of units are emulated where they change numbers.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.phases import Play, Seat
from fuzz.record import Raised, Tale
from fuzz.sides import Side

EXCHANGE_S = 30.0
_NUDGE = 64  # rounding errors, about what a step of a small model makes


@dataclass(frozen=True, slots=True)
class Rules:
    """How the gradients of one unit are treated, as ``set_*`` methods have it."""

    sync: bool = True
    all_reduce: bool = True
    divide: float = 0.0
    factor: float = 1.0
    sends_unused: bool = False


class LeftBehind(RuntimeError):
    """Another rank has failed and will not come to this exchange."""


class Exchange:
    """Where the threads meet: each brings its gradients, each gets everybody's."""

    def __init__(self, num_ranks: int) -> None:
        self._changed = threading.Condition()
        self._brought: list[list[dict[str, Tensor]]] = [[] for _ in range(num_ranks)]
        self._gone: set[int] = set()

    def all_gather(self, rank: int, mine: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return what every rank has brought to this exchange, its own in the order of its calls.

        Raises: LeftBehind if a rank has left, or does not come.
        """
        with self._changed:
            number = len(self._brought[rank])
            self._brought[rank].append(mine)
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(self._is_settled(each, number) for each in self.ranks), EXCHANGE_S)
            missing = [each for each in self.ranks if len(self._brought[each]) <= number]
            if missing:
                raise LeftBehind(f"ranks {missing} do not come to exchange {number}")
            return [brought[number] for brought in self._brought]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self._brought))

    def _is_settled(self, rank: int, number: int) -> bool:
        return rank in self._gone or len(self._brought[rank]) > number

    def leave(self, rank: int) -> None:
        """Let the others know that ``rank`` will not come any more."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


class ReferenceSide(Side):
    """A rank of plain torch.

    Gradients are held back, counted and averaged as the engine's APIs do it: a unit that does not sync holds what came
    until a backward in which it does.
    """

    def __init__(self, play: Play, seat: Seat, model: nn.Module, exchange: Exchange) -> None:
        super().__init__(play, seat)
        self.model = self.net = model
        self._exchange = exchange
        self._rules = [Rules() for _ in play.units]
        self._held: dict[str, Tensor] = {}
        self._late: dict[str, Tensor] = {}
        self._is_last = True
        self._unit_of = self._find_units()
        self._hooks: list[tuple[nn.Parameter, float, bool]] = []
        self.hooked(model)
        self._buffers_differ = True  # as DDP takes it: the last forward was one of training
        if self.settings.sync_buffers:
            model.register_forward_pre_hook(self._take_first_buffers)
        self.remake_optimizer()

    def _take_first_buffers(self, module: nn.Module, _: Any) -> None:
        if self._buffers_differ:
            self._share_buffers(module)
        self._buffers_differ = torch.is_grad_enabled() and all(rules.sync for rules in self._rules)

    @torch.no_grad()
    def _share_buffers(self, module: nn.Module) -> None:
        mine = {name: buffer.clone() for name, buffer in module.named_buffers()}
        everybody = self._exchange.all_gather(self.seat.rank, mine)
        for name, buffer in module.named_buffers():
            buffer.copy_(everybody[0][name])

    def _find_units(self) -> dict[str, int]:
        """Return the number of the unit that owns each parameter: the first one that contains it."""
        owner: dict[nn.Parameter, int] = {}
        for number, paths in enumerate(self.play.units):
            for path in paths:
                for param in self.net.get_submodule(path).parameters():
                    owner.setdefault(param, number)
        return {name: owner[param] for name, param in self.net.named_parameters() if param in owner}

    # ---- gradients ----

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        params = {name: param for name, param in self.net.named_parameters() if name not in self.ignored}
        before = {name: param.grad for name, param in params.items()}
        for param in params.values():
            param.grad = None
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            fresh = {name: param.grad for name, param in params.items() if param.grad is not None}
            for name, param in params.items():
                param.grad = before[name]
        self._reduce(fresh)

    def _reduce(self, fresh: dict[str, Tensor]) -> None:
        mine = dict(self._held)
        for name, gradient in fresh.items():
            mine[name] = mine[name] + gradient.detach() if name in mine else gradient.detach().clone()
        due = {name: mine.pop(name) for name in list(mine) if self._is_due(name)}
        self._held = mine
        everybody = self._exchange.all_gather(self.seat.rank, due)
        for name, param in self.net.named_parameters():
            if name in self.ignored:
                continue
            rules = self._rules_of(name)
            found = [each[name] for each in everybody if name in each]
            if not found and not (rules.sends_unused and param.requires_grad and self._is_due(name)):
                continue
            total = torch.zeros(param.shape, dtype=torch.float64)
            for gradient in found:
                total += gradient
            total = total / (rules.divide or self.seat.num_data_ranks) * rules.factor
            self._late[name] = self._late[name] + total if name in self._late else total
        if self._is_last:
            late, self._late = self._late, {}
            for name, total in late.items():
                self._set(name, total)
        self.hidden = frozenset() if self._is_last else frozenset({"grad"})

    def _set(self, name: str, total: Tensor) -> None:
        param = self.net.get_parameter(name)
        hooks = [(factor, follows) for each, factor, follows in self._hooks if each is param]
        for factor in (factor for factor, follows in hooks if not follows):
            total = total * factor
        if param.grad is None:
            # In the parameter's order in memory, as autograd does it: torch's fused optimizers go by memory alone.
            param.grad = torch.empty_like(param).copy_(total)
        else:
            param.grad.add_(total.to(param.dtype))
        for factor in (factor for factor, follows in hooks if follows):
            param.grad.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        cleared = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        self._forget({name for name, param in self.net.named_parameters() if id(param) in cleared})

    def zero_model(self, set_to_none: bool = True) -> None:
        super().zero_model(set_to_none)
        self._forget()

    def assign(self, state: Mapping[str, Tensor]) -> None:
        super().assign(state)
        self._forget()  # new parameters begin without the gradients of the old ones

    def _forget(self, names: Container[str] | None = None) -> None:
        """Drop what is held back of ``names`` (None: all), as DDP and one process do when gradients are cleared."""
        for held in (self._held, self._late):
            for name in [name for name in held if names is None or name in names]:
                del held[name]

    def _rules_of(self, name: str) -> Rules:
        return self._rules[self._unit_of[name]]

    def _is_due(self, name: str) -> bool:
        rules = self._rules_of(name)
        return rules.sync and (rules.all_reduce or self.settings.mesh != "hybrid")

    def join_loop(self, first: int, counts: tuple[int, ...]) -> None:
        for number in range(max(counts[rank % len(counts)] for rank in range(self.seat.num_data_ranks))):
            if number < counts[self.rank % len(counts)]:
                self.backward(self.loss(self.model(self.batch(first + number))))
            else:
                self._reduce({})
            self.step()
            self.zero_grad()

    def leave(self) -> None:
        """Let the other ranks know that this one has failed."""
        self._exchange.leave(self.seat.rank)

    # ---- methods of units ----

    def unit(self, path: str) -> Any:
        return PlainUnit(self, path)

    def change_rules(self, path: str, recurse: bool, **changes: Any) -> None:
        """Replace rules of the unit of the module at ``path``, and of those below."""
        for number, paths in enumerate(self.play.units):
            below = any(not path or each == path or each.startswith(f"{path}.") for each in paths)
            if path in paths or (recurse and below):
                self._rules[number] = replace(self._rules[number], **changes)

    def hook_reductions(self, path: str, factor: float, streamed: bool) -> None:
        self.change_rules(path, False, factor=factor)

    def hook_gradient(self, name: str, factor: float, follows: bool) -> None:
        param = self.net.get_parameter(name)
        if param.requires_grad:
            self._hooks.append((param, factor, follows))

    def set_last(self, is_last: bool) -> None:
        """Say whether the next backward ends the step: only then gradients are seen."""
        self._is_last = is_last

    def adopt(self, model: nn.Module) -> None:
        super().adopt(model)
        self._unit_of = self._find_units()
        self._forget()  # a copy begins without the gradients of earlier backwards
        self.hidden = frozenset()


@dataclass(frozen=True, slots=True)
class PlainUnit:
    """The methods of a unit's module on a side that has no units."""

    side: ReferenceSide
    path: str

    def __call__(self, *args: Any) -> Any:
        """Call the module."""
        return self.side.net.get_submodule(self.path)(*args)

    def set_requires_gradient_sync(self, value: bool, *, recurse: bool = True) -> None:
        """Hold gradients back, or not."""
        self.side.change_rules(self.path, recurse, sync=value, all_reduce=value)

    def set_requires_all_reduce(self, value: bool, *, recurse: bool = True) -> None:
        """Hold gradients back where there are replicas."""
        self.side.change_rules(self.path, recurse, all_reduce=value)

    def set_reduce_scatter_unused_params(self, value: bool, *, recurse: bool = True) -> None:
        """Take parameters without a gradient for ones whose gradient is zero."""
        self.side.change_rules(self.path, recurse, sends_unused=value)

    def set_gradient_divide_factor(self, value: float) -> None:
        """Divide by ``value`` instead of the number of ranks."""
        self.side.change_rules(self.path, False, divide=value)

    def set_is_last_backward(self, value: bool) -> None:
        """Let gradients be seen, or not yet."""
        self.side.set_last(value)

    def unshard(self, async_op: bool = False) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in NOTHING:
            return lambda *_, **__: None
        raise AttributeError(name)


NOTHING = (
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "reshard",
)


def run_reference(play: Play, is_nudged: bool = False) -> list[list[Tale]]:
    """Return what each rank that has batches of its own shows in plain torch, phase by phase.

    ``is_nudged``: with parameters that begin some rounding errors away, to see what these become.
    """
    told: list[list[Tale]] = []
    saved: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a program warns is no difference
        for phase in play.phases:
            sides = _seat_all(play, phase.num_ranks, saved, is_nudged)
            told.append(_run_threads(sides, phase.program, is_resumed=saved is not None))
            if any(tale.raised for tale in told[-1]):
                break
            saved = sides[0].save()
    return told


def _seat_all(play: Play, num_ranks: int, saved: Any, is_nudged: bool) -> list[ReferenceSide]:
    num_data_ranks = Seat.of(0, num_ranks, play.settings.mesh).num_data_ranks
    exchange = Exchange(num_data_ranks)
    sides: list[ReferenceSide] = []
    for rank in range(num_data_ranks):
        model = play.build()
        if is_nudged:
            _nudge(model)
        side = ReferenceSide(play, Seat(rank, num_data_ranks, rank, num_data_ranks), model, exchange)
        if saved is not None:
            side.load(copy.deepcopy(saved))
        sides.append(side)
    return sides


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)  # alike on all ranks
    for param in model.parameters():
        if type(param) is nn.Parameter and param.is_floating_point():  # codes stay what they stand for
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
            param.addcmul_(param, noise, value=_NUDGE * torch.finfo(param.dtype).eps)


def _run_threads(sides: Sequence[ReferenceSide], program: Callable[[Any], Any], is_resumed: bool) -> list[Tale]:
    tales = [Tale() for _ in sides]

    def run(side: ReferenceSide, tale: Tale) -> None:
        try:
            if is_resumed:
                tale.records.append(side.record("loaded"))
            for moment in program(side):
                tale.records.append(side.record(moment))
        except Exception as error:
            tale.raised = Raised.of(error)
            side.leave()

    threads = [threading.Thread(target=run, args=pair) for pair in zip(sides, tales, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tales
