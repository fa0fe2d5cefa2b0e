"""Classes of full parameters that no forward or backward uses: freed ones raise on use, kept ones stand for their shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam

# ---- Classes of full parameters while no forward or backward uses them; ``__class__`` of the parameter is swapped.
# FreedParameter: the memory is back in the pool, and reading it raises an error with the parameter's name instead of
# crashing the process.  KeptParameter: the full parameter stays registered between passes, where user code finds it.  Its
# ``.grad`` is the shard's, and writes to it, and reads of stale values, raise.

TO_WRITE = "To write, call reshard() on the module, then write to the shards under torch.no_grad()"
# Keys in ``__dict__``, which all forms of a parameter share and which also has the attributes that users set.
_KEPT, _SUB = "shardwise_kept", "shardwise_sub"
_ATTRIBUTES = ("__get__", "__set__", "__delete__")
# Names of functions that read no values.
_FACTS = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "storage_offset",
        "data_ptr",
        "untyped_storage",
        "__len__",
        "__hash__",
        "type",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "get_device",
        "retain_grad",
        "is_shared",
    ]
)


class FreedParameter(nn.Parameter):
    """The class of a full parameter between reshard and the next unshard.

    Autograd may save such a tensor for backward, which unshards it again first; user code must not use it.
    """

    shardwise_fqn: str
    shardwise_has_memory: bool

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow reads and writes of attributes, and queries of the address if the memory is kept; refuse all else."""
        name = getattr(func, "__name__", "")
        if name in _ATTRIBUTES or (name in _FACTS and isinstance(args[0], cls) and args[0].shardwise_has_memory):
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        names = sorted(
            {tensor.shardwise_fqn for tensor in _idle_in(FreedParameter, (args, list((kwargs or {}).values())))}
        )
        raise StateError(
            f"{names} was resharded: the unsharded memory of a parameter is freed after forward and backward. Read the "
            "parameter from its module inside forward, or call unshard() on the module first"
        )


class _Standing(torch.Tensor):
    """Base of tensors that are registered in the place of a shard: gradient, hooks and ``requires_grad`` are the shard's."""

    __slots__ = ()

    @property
    def kept(self) -> _StandsFor:
        raise NotImplementedError

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradient of the shard."""
        return self.kept.sharded().grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.kept.sharded().grad = value

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.kept.sharded().grad = None

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """``requires_grad`` of the shard."""
        return self.kept.sharded().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.kept.sharded().requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> _Standing:  # pyright: ignore
        """Set ``requires_grad`` of the shard; return this tensor."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:  # pyright: ignore
        """Register ``hook`` on the shard, so that it receives the reduced gradient."""
        return self.kept.sharded().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Register ``hook`` on the shard, so that it runs after the reduced gradient was accumulated."""
        return self.kept.sharded().register_post_accumulate_grad_hook(hook)

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raises: StateError, since torch does not count writes to what this returns."""
        raise StateError(f".data was read of {self.kept.in_words}: read detach() instead. {TO_WRITE}")

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise StateError(f".data was assigned to {self.kept.in_words}. {TO_WRITE}")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class _Idle(_Standing):
    """Base of the classes of a full parameter that stays registered while no forward or backward runs.

    It may be read.  Writes to it would not reach the shards, so :mod:`shardwise.fsdp.user_writes` refuses them.
    """

    __slots__ = ()

    @property
    def kept(self) -> _Kept:
        return vars(self)[_KEPT]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse reads of values that are older than the shards, and operations with shards."""
        name = getattr(func, "__name__", "")
        if name not in _ATTRIBUTES and name not in _FACTS:
            given = (args, list(kwargs.values())) if kwargs else args
            states = [tensor.kept for tensor in _idle_in(_Idle, given)]
            for state in states:
                state.check()
            if any(not isinstance(each, _Idle) for each in _idle_in(DTensor, given)):
                raise StateError(
                    f"{name} was given {states[0].in_words}, and shards. Call reshard() on its module first. Shards are not in "
                    "the graph, so autograd has no gradient for them: call loss.backward() without inputs, and read .grad"
                )
        with torch_private.without_torch_function():
            return func(*args, **(kwargs or {}))


class NoFullTensorError(StateError, AttributeError):
    """``full_tensor`` of a parameter that is unsharded; ``hasattr`` is False, so that code for both kinds works."""


class KeptParameter(_Idle, nn.Parameter):  # pyright: ignore
    """The class of a kept full parameter that is a plain tensor."""

    @property
    def full_tensor(self) -> NoReturn:
        """Raise an error that is an AttributeError, too: between forward and backward the parameter itself has all values."""
        raise NoFullTensorError(
            f"{self.kept.fqn} is unsharded until its backward, so it has no full_tensor(): it is the full tensor. Read it "
            "after unshard() on its module, which works at any time, or call full_tensor() after backward"
        )


class KeptDTensor(_Idle, DTensor):  # pyright: ignore
    """The class of a kept full parameter that is itself a DTensor (tensor parallelism)."""


class SubShard(_Standing, DTensor):  # pyright: ignore
    """The class of a shard on the smaller mesh of ``reshard_after_forward``, registered between forward and backward."""

    @property
    def kept(self) -> _StandsFor:
        return vars(self)[_SUB]


class _StandsFor:
    """The sharded parameter in whose place a tensor is registered."""

    __slots__ = ("_param", "fqn")

    def __init__(self, param: ShardedParam) -> None:
        self._param, self.fqn = weakref.ref(param), param.fqn

    @property
    def in_words(self) -> str:
        """The registered tensor, for messages."""
        return f"the sub-sharded form of {self.fqn}, which stays registered until its backward"

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        return set, ()  # copies and files get an empty set, which torch.load(weights_only=True) reads

    def sharded(self) -> nn.Parameter:
        """Return the sharded parameter, which optimizers have."""
        param = self._param()
        if param is None:
            raise StateError(f"{self.fqn} belongs to a model that is gone")
        return param.sharded


class _Kept(_StandsFor):
    """The state of a kept parameter: its sharded parameter, and the version of that when it was gathered."""

    __slots__ = ("_version",)

    def __init__(self, param: ShardedParam) -> None:
        super().__init__(param)
        self._version = param.version

    @property
    def in_words(self) -> str:
        """The registered tensor, for messages."""
        return f"the full form of {self.fqn}, which stays registered after a forward or unshard()"

    def check(self) -> None:
        """Raise StateError if the shard was written to after the full parameter was gathered."""
        param = self._param()
        if param is not None and param.version != self._version and not param.is_its_full_form:
            raise StateError(
                f"the full form of {self.fqn} is older than its shards, which were written to since. Call reshard() "
                "on its module, then read the shards, or unshard() on every rank"
            )


def _idle_in(kind: type[Any], args: Any) -> list[Any]:
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, kind):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _idle_in(kind, arg)
    return found


def mark_freed(params: Iterable[ShardedParam], has_memory: bool = False) -> None:
    """Refuse uses of the full parameters of ``params`` until :func:`mark_full`; ``has_memory``: their memory stays."""
    for param in params:
        full = param.full
        if type(full) in _KINDS and (type(full) is not FreedParameter or full.shardwise_has_memory is not has_memory):
            assert full is not None
            full.__class__ = FreedParameter
            full.shardwise_fqn = param.fqn  # pyright: ignore[reportAttributeAccessIssue]  of FreedParameter
            full.shardwise_has_memory = has_memory  # pyright: ignore[reportAttributeAccessIssue]


def mark_kept(param: ShardedParam) -> None:
    """Watch the full parameter of ``param`` until it is freed or in use again."""
    full = param.full
    idle = _IDLE.get(type(full))
    if full is not None and idle is not None:
        vars(full)[_KEPT] = _Kept(param)
        full.__class__ = idle  # pyright: ignore[reportAttributeAccessIssue]


def is_kept(full: torch.Tensor) -> bool:
    """Return True if ``full`` was marked by :func:`mark_kept` and is not in use again."""
    return isinstance(full, _Idle)


def mark_sub(param: ShardedParam) -> None:
    """Redirect gradients, hooks and ``requires_grad`` of the sub-sharded form of ``param`` to its shard."""
    sub = param.subsharded
    assert sub is not None
    vars(sub)[_SUB] = _StandsFor(param)
    sub.__class__ = SubShard  # pyright: ignore[reportAttributeAccessIssue]


def mark_full(params: Iterable[ShardedParam]) -> None:
    """Make the full parameters of ``params`` ordinary parameters again."""
    for param in params:
        used = _USED.get(type(param.full))
        if used is not None:
            param.full.__class__ = used  # pyright: ignore


_IDLE: dict[type[Any], type[_Idle]] = {nn.Parameter: KeptParameter, DTensor: KeptDTensor}
_USED: dict[type[Any], type[torch.Tensor]] = {
    FreedParameter: nn.Parameter,
    KeptParameter: nn.Parameter,
    KeptDTensor: DTensor,
}
_KINDS = (nn.Parameter, FreedParameter, KeptParameter)
