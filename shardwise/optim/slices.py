"""Parameters of any kind as slices: the plain local tensors that a rank updates, and their place in the full parameter."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.errors import ConfigError, StateError
from shardwise.torch_private import ShardedTensor, state_dict_hooks

# ---- Users' state-dict hooks of an optimizer; torch calls them only in its own methods, so the APIs here call them
# too.


def call_hooks(optimizer: Optimizer, when: str, found: dict[str, Any] | None = None) -> Any:
    """Call the hooks of ``when`` ("state_dict_pre", ...); return the state dict ``found``, or what a hook has returned."""
    for hook in state_dict_hooks(optimizer, when):
        found = hook(optimizer, *([] if found is None else [found])) or found
    return found


# ---- Update rules: which optimizers can run over shards. The class decides; nothing is guessed.

UpdateRule = Literal["elementwise", "whole_matrix"]
RULES: tuple[UpdateRule, ...] = ("elementwise", "whole_matrix")

# Every element is updated from its own gradient and state only (and from numbers that are equal for all elements).
_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
# Every parameter is updated from its own gradient and state, as a whole: norms, factors, orthogonalization.
_WHOLE_MATRIX: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
_REFUSED: tuple[tuple[type[Optimizer], str], ...] = (
    (
        torch.optim.LBFGS,
        "its line search and history take inner products over all parameters at once, so each rank would take another "
        "step; no sharding of parameters makes it right",
    ),
    (
        torch.optim.SparseAdam,
        "it takes sparse gradients only and gradients of shards are dense; give it the plain embeddings in an optimizer "
        "of their own and the shards to Adam",
    ),
)


def update_rule(optimizer_class: type[Optimizer], declared: UpdateRule | None = None) -> UpdateRule:
    """Return how ``optimizer_class`` may run over shards.

    The rule is known for classes of torch.optim, and for subclasses that override no method but ``__init__``.  Others
    declare it:
    by ``declared``, or a class attribute ``sharded_update = "elementwise"`` or ``"whole_matrix"``.

    Raises: ConfigError for a class that cannot be right on shards, for an unknown class without a declaration (a wrong
    guess
        would silently train something else), and for a declaration that contradicts the known rule.

    Example:
        >>> update_rule(torch.optim.AdamW), update_rule(torch.optim.Muon)
        ('elementwise', 'whole_matrix')
    """
    name = optimizer_class.__name__
    reason = reason_for_refusal(optimizer_class)
    if reason is not None:
        raise ConfigError(f"{name} cannot be run over sharded parameters: {reason}")
    rule = declared if declared is not None else getattr(optimizer_class, "sharded_update", None)
    if rule is not None and rule not in RULES:
        raise ConfigError(f"{name}: the update rule is {rule!r}, expected one of {RULES}")
    base = known_base(optimizer_class)
    known: UpdateRule | None = base and ("elementwise" if base in _ELEMENTWISE else "whole_matrix")
    if rule == "elementwise" and known == "whole_matrix":
        raise ConfigError(
            f"{name} is declared 'elementwise' but updates matrices as a whole; leave the declaration out"
        )
    found = rule or known
    if found is None:
        raise ConfigError(
            f"{name} is not a known class, and nothing shows whether it can run on shards. Pass update='elementwise' if "
            "it updates every element from its own gradient and state only, update='whole_matrix' if it updates every "
            "parameter separately but as a whole (norms, factors); or set the class attribute sharded_update to that"
        )
    return found


def reason_for_refusal(optimizer_class: type[Optimizer]) -> str | None:
    """Return why ``optimizer_class`` can never be right over shards; None if it can, or if it is unknown."""
    return next((reason for refused, reason in _REFUSED if issubclass(optimizer_class, refused)), None)


def step_cost(optimizer_class: type[Optimizer], shape: tuple[int, ...]) -> int:
    """Return the relative cost of updating one full parameter: for Muon the multiplications of its products, else elements."""
    numel = math.prod(shape)
    return numel * min(shape) if issubclass(optimizer_class, torch.optim.Muon) and shape else numel


def known_base(optimizer_class: type[Optimizer]) -> type[Optimizer] | None:
    """Return the class of torch.optim whose methods ``optimizer_class`` has; None for other classes."""
    for known in optimizer_class.__mro__:
        if known in _ELEMENTWISE or known in _WHOLE_MATRIX:
            return None if _overrides(optimizer_class, known) else known
    return None


def _overrides(derived: type[Any], known: type[Any]) -> bool:
    between = derived.__mro__[: derived.__mro__.index(known)]
    names = {name for owner in between for name, value in vars(owner).items() if callable(value)}
    names -= {"__init__", "__new__"}
    return any(_without_hooks(getattr(derived, n)) is not _without_hooks(getattr(known, n, None)) for n in names)


def _without_hooks(method: Any) -> Any:
    # torch wraps ``step`` of every instantiated optimizer class to run the step hooks.
    return method.__wrapped__ if getattr(method, "hooked", False) else method


# ---- The parameters of each param group.


class Members:
    """The parameters of param groups at the time an optimizer laid out its state.

    A later change of the lists in ``optimizer.param_groups`` changes what a plain optimizer updates; here it would have
    no effect.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._ids = _ids_in(groups)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise StateError if ``groups`` contain other parameters."""
        found = _ids_in(groups)
        if found == self._ids:
            return
        counts = [len(ids) for ids in found]
        raise StateError(
            f"optimizer.param_groups hold other parameters than those that the optimizer shards: groups of {counts}, "
            f"where it has groups of {[len(ids) for ids in self._ids]}. Add parameters with add_param_group(); to update "
            "fewer, freeze them (requires_grad_(False)) or build a new optimizer"
        )


def _ids_in(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A rectangular part of a tensor: offsets and sizes, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def meet(self, other: Window) -> Window | None:
        """Return the intersection, None if it has no elements.

        Example:
            >>> Window((0, 0), (4, 3)).meet(Window((2, 0), (4, 3)))
            Window(offsets=(2, 0), sizes=(2, 3))
        """
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = [
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Window(starts, sizes) if all(size > 0 for size in sizes) else None

    def cut(self, tensor: torch.Tensor, of: Window | None = None) -> torch.Tensor:
        """Return the view of ``tensor`` that the window covers; ``of``: the window of ``tensor`` itself (default: all)."""
        firsts = (0,) * len(self.sizes) if of is None else of.offsets
        for dim, (start, size, first) in enumerate(zip(self.offsets, self.sizes, firsts, strict=True)):
            if size != tensor.size(dim):
                tensor = tensor.narrow(dim, min(start - first, tensor.size(dim)), size)
        return tensor


def whole(shape: Sequence[int]) -> Window:
    """Return the window that covers a tensor."""
    return Window((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True, eq=False)
class ParamSlice:
    """One local tensor of a parameter.

    Attributes:
        shard: index of the local shard of a ShardedTensor; 0 for other kinds.
        box: its place in the full parameter.
        stand_in: an empty tensor if this rank has no shard of a ShardedTensor, so that every parameter has state on
            every rank; None for real slices.
    """

    name: str
    param: torch.Tensor
    shard: int
    box: Window
    stand_in: torch.Tensor | None = None


class PerSlice(tuple[torch.Tensor, ...]):
    """A state value with a number per element of the parameter: one tensor per slice, in slice order."""

    __slots__ = ()


def copied(value: Any) -> Any:
    """Return a copy of a state value; copy a tensor subclass, which need not support ``clone``, through pickle."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if type(value) is torch.Tensor else pickle.loads(pickle.dumps(value))


def in_order_of(param: torch.Tensor, value: Any) -> Any:
    """Return ``value`` with the strides of ``param`` if shapes match: fused optimizers pair elements in memory order."""
    if type(value) is not torch.Tensor or value.shape != param.shape:
        return value
    if value.stride() == torch.empty_like(param, device="meta").stride():
        return value
    return torch.empty_like(param, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def state_of_slice(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the state of slice ``index``; copy values that slices share, because the optimizer updates them per tensor."""
    return {key: value[index] if isinstance(value, PerSlice) else copied(value) for key, value in values.items()}


def is_sharded_tensor(param: torch.Tensor) -> TypeGuard[ShardedTensor]:
    """Return True for torch's older kind of sharded tensor."""
    return isinstance(param, ShardedTensor)


def is_sharded(param: torch.Tensor) -> bool:
    """Return True if ranks have different parts of ``param``; the same answer on every rank."""
    if isinstance(param, ShardedTensor):
        return torch_private.process_group_of(param).size() > 1
    if not isinstance(param, DTensor):
        return False
    return any(
        not isinstance(placement, Replicate) and param.device_mesh.size(axis) > 1
        for axis, placement in enumerate(param.placements)
    )


def local_boxes(tensor: ShardedTensor) -> list[Window]:
    """Return the boxes of the local shards; an empty shard's box starts at the end of the tensor at most."""
    shape = tuple(tensor.size())
    return [
        Window(
            tuple(min(start, size) for start, size in zip(shard.metadata.shard_offsets, shape, strict=True)),
            tuple(shard.metadata.shard_sizes),
        )
        for shard in tensor.local_shards()
    ]


def slices_of(name: str, param: torch.Tensor) -> list[ParamSlice]:
    """Return this rank's slices of ``param``, at least one.

    Raises: ConfigError for a DTensor with partial sums, which has no values to update.
    """
    if isinstance(param, ShardedTensor):
        boxes = local_boxes(param)
        if boxes:
            return [ParamSlice(name, param, index, box) for index, box in enumerate(boxes)]
        shape = (0, *param.shape[1:])
        device = torch.device("cpu") if not torch.cuda.is_available() else param.device
        stand_in = torch.empty(shape, dtype=param.dtype, device=device)
        return [ParamSlice(name, param, 0, whole(shape), stand_in)]
    if isinstance(param, DTensor):
        if any(isinstance(placement, Partial) for placement in param.placements):
            raise ConfigError(
                f"{name}: placements {param.placements} hold partial sums; redistribute to Replicate or Shard first"
            )
        part = param.__create_chunk_list__()[0]
        return [ParamSlice(name, param, 0, Window(tuple(part.offsets), tuple(part.sizes)))]
    return [ParamSlice(name, param, 0, whole(param.shape))]


def local_of(param_slice: ParamSlice) -> torch.Tensor:
    """Return the slice's current tensor; user code may have replaced an earlier one."""
    param = param_slice.param
    if isinstance(param, DTensor):
        return torch_private.local_of(param)
    if isinstance(param, ShardedTensor):
        return param.local_shards()[param_slice.shard].tensor if param_slice.stand_in is None else param_slice.stand_in
    return param


def gradient_of(param_slice: ParamSlice) -> torch.Tensor | None:
    """Return the gradient of the slice, placed like the slice; None if there is none.

    A DTensor gradient whose placements differ from its parameter's is redistributed; a step on its local values would
    be silently wrong.
    """
    param = param_slice.param
    if isinstance(param, DTensor):
        gradient = param.grad
        if gradient is None:
            return None
        if not isinstance(gradient, DTensor):
            raise ConfigError(
                f"{param_slice.name}: the gradient is a plain tensor, expected a DTensor like the parameter"
            )
        spec, wanted = torch_private.spec_of(gradient), torch_private.spec_of(param)
        if spec is not wanted and spec.placements != wanted.placements:
            gradient = gradient.redistribute(placements=param.placements)
        local = torch_private.local_of(gradient)
        return local if type(local) is torch.Tensor else torch_private.wait_tensor(local)
    if isinstance(param, ShardedTensor):
        if param_slice.stand_in is not None:
            return torch.empty_like(param_slice.stand_in)
        return param.local_shards()[param_slice.shard].tensor.grad
    return param.grad


def clear_gradient(slices: Sequence[ParamSlice], set_to_none: bool) -> None:
    """Set the gradients of one parameter's slices to None, or to zero."""
    param = slices[0].param
    holders = [local_of(param_slice) for param_slice in slices] if isinstance(param, ShardedTensor) else [param]
    for holder in holders:
        gradient = None if set_to_none or holder.grad is None else holder.grad.detach()
        if gradient is None or (holder.grad is not None and holder.grad.grad_fn is not None):
            holder.grad = gradient
        if gradient is not None:
            torch_private.local_of(gradient).zero_()


# ---- The interface of all optimizer backends, and the types of parameters and state that they take.

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
Closure = Callable[[], Any]
Params = Sequence[Sequence[ParamSlice]]  # the slices of each parameter of a group
Groups = Sequence[tuple[Params, Mapping[str, Any]]]  # the parameters and options of each group
Options = Sequence[Mapping[str, Any]]  # of each group
Values = Mapping[str, Mapping[str, Any]]  # parameter name -> state key -> PerSlice, or one value for the parameter


class OptimizerBackend(Protocol):
    """Run the inner ``optimizer``; exchange state by parameter name."""

    optimizer: Optimizer
    is_elementwise: bool

    def step(self, closure: Closure | None = None) -> Any:
        """Update all parameters; return the loss of ``closure``."""
        ...

    def mark(self) -> Callable[[], None]:
        """Return a function that undoes a step for everything but the optimizer's state and groups."""
        ...

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group."""
        ...

    def states(self, blank: bool = False) -> Values:
        """Return the state of all parameters, or with ``blank`` its names, shapes and dtypes; may be collective."""
        ...

    def local_states(self) -> Values:
        """Return the state on this rank; never collective."""
        ...

    def load(self, values: Values, options: Sequence[Mapping[str, Any]], adopt: bool = False) -> None:
        """Replace all state, by values of any layout, and options; may be collective.  ``adopt``: keep tensors that fit."""
        ...


@runtime_checkable
class Offload(Protocol):
    """Where the state of an optimizer lives, and when it updates: :class:`shardwise.OptimizerOffload`."""

    def over(self, backend: OptimizerBackend, groups: Groups, options: Callable[[], Options]) -> OptimizerBackend:
        """Return the backend that runs in place of ``backend``, over the slices and options of ``groups``.

        ``options``: returns the param groups of the user, whose options the next update has.
        """
        ...


def as_they_are(things: Iterable[object], *names: str) -> Callable[[], None]:
    """Return a function that restores the attributes ``names`` of ``things``."""
    was = [(thing, name, getattr(thing, name)) for thing in things for name in names]

    def restore() -> None:
        for thing, name, value in was:
            setattr(thing, name, value)

    return restore


def loss_of(closure: Closure | None) -> Any:
    """Run ``closure`` with gradients enabled and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
