"""Classes of full parameters that no forward or backward uses: freed ones raise on use, kept ones stand for their shards."""

from __future__ import annotations

import sys
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
# ``.grad`` is the shard's, writes to it are detected, and a read of stale values raises.

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
    def is_leaf(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True.  Raises: StateError in the constructor of an optimizer, whose steps would not reach the model."""
        if sys._getframe(1).f_code.co_name == "add_param_group":  # pyright: ignore[reportPrivateUsage]
            raise StateError(
                f"an optimizer was given the {self.kept.form} form of {self.kept.fqn}, which stays registered after a "
                "forward; its steps would not reach the model. Build the optimizer before the first forward, or call "
                "reshard() on the module first"
            )
        return True


class _Idle(_Standing):
    """Base of the classes of a full parameter that stays registered while no forward or backward runs."""

    __slots__ = ()

    @property
    def kept(self) -> _Kept:
        return vars(self)[_KEPT]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse reads of values that are older than the shards; copy writes to the shards."""
        name = getattr(func, "__name__", "")
        if name in _ATTRIBUTES or name in _FACTS:
            with torch_private.without_torch_function():
                result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):  # .T, .real
                _guard(result, args[:1])
            return result
        given = (args, list(kwargs.values())) if kwargs else args
        kept = _idle_in(_Idle, given)
        has_shards = any(not isinstance(each, _Idle) for each in _idle_in(DTensor, given))
        if has_shards and name in ("backward", "grad"):
            raise StateError(
                f"autograd was asked for the gradient of {kept[0].kept.fqn} and of shards, but shards are not in the graph: "
                "forward uses the unsharded parameters, and shards get .grad when gradients are reduced. Call loss.backward() "
                "without inputs; for one gradient per loss, clone .grad and call zero_grad() between the losses"
            )
        if has_shards:
            # In an operation with other shards (an average of weights is updated, for example) use the shard instead.
            for tensor in kept:
                tensor.kept.follow()
            with torch_private.without_torch_function():
                result = func(
                    *_with_shards(args), **{key: _with_shards(value) for key, value in (kwargs or {}).items()}
                )
            if name.endswith("_"):  # torch's multi-tensor functions count no writes to DTensors
                torch.autograd.graph.increment_version([tensor.kept.sharded() for tensor in kept])
            return result
        states = [tensor.kept for tensor in kept]
        for state in states:
            state.check()
        with torch_private.without_torch_function():
            result = func(*args, **(kwargs or {}))
        for state in states:
            state.follow()
        _guard(result, [tensor for tensor in kept if isinstance(tensor, _Idle)])  # a backward has resharded the others
        return result

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tensor's values.  User code may write to them, and torch does not count that, so the access is recorded."""
        self.kept.check()
        self.kept.is_touched = True
        data = torch_private.data_of(self)
        _guard(data, [self])
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.kept.is_touched = True
        torch_private.set_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(torch_private.data_of(self).clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch_private.without_torch_function():
            plain = nn.Parameter(torch_private.data_of(self), self.requires_grad)
        return plain.__reduce_ex__(protocol)


class _Alias(torch.Tensor):
    """An alias of a kept full parameter, made by user code between passes; the alias may outlive the memory."""

    kept: _Kept

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise StateError on a read of memory that was freed; the read would crash the process."""
        aliases = _idle_in(_Alias, (args, list(kwargs.values())) if kwargs else args)
        if getattr(func, "__name__", "") not in _FACTS and func not in _SHAPES:
            for alias in aliases:
                with torch_private.without_torch_function():
                    is_gone = alias.numel() > 0 and not alias.untyped_storage().nbytes()
                if is_gone:
                    raise StateError(
                        f"this tensor shared memory with the full form of {alias.kept.fqn}, which was freed since. Keep "
                        "clone() of it, or an alias of the shard: call reshard() on the module first"
                    )
        with torch_private.without_torch_function():
            result = func(*args, **(kwargs or {}))
        _guard(result, aliases)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


_SHAPES = frozenset({torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__})  # pyright: ignore


def _guard(result: Any, sources: Iterable[Any]) -> None:
    """Make tensors in ``result`` that share memory with one of ``sources`` an :class:`_Alias`."""
    found = result if isinstance(result, (list, tuple)) else (result,)
    for each in found:  # pyright: ignore[reportUnknownVariableType]
        if type(each) is torch.Tensor:  # pyright: ignore[reportUnknownArgumentType]
            for source in sources:
                if torch_private.storage_id(each) == torch_private.storage_id(source):
                    kept = source.kept
                    each.__class__ = _Alias
                    each.kept = kept  # pyright: ignore[reportAttributeAccessIssue]  of _Alias
                    break


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

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class _StandsFor:
    """The sharded parameter in whose place a tensor is registered; ``form`` is the tensor's form of it, for messages."""

    __slots__ = ("_param", "form", "fqn")

    def __init__(self, param: ShardedParam, form: str) -> None:
        self._param, self.fqn, self.form = weakref.ref(param), param.fqn, form

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        return set, ()  # copies and files get an empty set, which torch.load(weights_only=True) reads

    def sharded(self) -> nn.Parameter:
        """Return the sharded parameter, which optimizers have."""
        param = self._param()
        if param is None:
            raise StateError(f"{self.fqn} belongs to a model that is gone")
        return param.sharded


class _Kept(_StandsFor):
    """The state of a kept parameter: its sharded parameter, its version, and whether user code may have written to it.

    ``take``: copies writes to the full parameter into this rank's shard.
    """

    __slots__ = ("_before", "_take", "_version", "is_touched")

    def __init__(self, param: ShardedParam, take: Callable[[ShardedParam], None]) -> None:
        super().__init__(param, "full")
        self.renew(param, take)

    def renew(self, param: ShardedParam, take: Callable[[ShardedParam], None]) -> None:
        """Start watching ``param``, whose full parameter has the values of the shards now."""
        self._take = take
        self._version = param.version
        self.fqn = param.fqn
        self.is_touched = False
        # A rank with an empty shard has no rows to compare with it, so it needs a copy to detect writes.
        full = param.full
        self._before: torch.Tensor | None = None
        if full is not None and not param.local.numel():
            self._before = torch_private.local_of(full).detach().clone()

    def check(self) -> None:
        """Raise StateError if the shard was written to after the full parameter was gathered."""
        param = self._param()
        if param is not None and param.version != self._version and not param.is_its_full_form:
            raise StateError(
                f"the full form of {self.fqn} is older than its shards, which were written to since. Call reshard() "
                "on its module, then read the shards, or unshard() on every rank"
            )

    def follow(self) -> None:
        """Copy a write to the full parameter into the shard, if there was one."""
        param = self._param()
        if param is not None and param.full is not None and param.full._version != param.full_version:
            self._take(param)

    def is_as_before(self, full: torch.Tensor) -> bool:
        """Return True if nothing was written; only for a rank with an empty shard."""
        return self._before is not None and torch.equal(
            torch_private.data_of(torch_private.local_of(full)), self._before
        )


def _idle_in(kind: type[Any], args: Any) -> list[Any]:
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, kind):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _idle_in(kind, arg)
    return found


def _with_shards(value: Any) -> Any:
    if isinstance(value, _Idle):
        return value.kept.sharded()
    return type(value)(map(_with_shards, value)) if type(value) in (list, tuple) else value


def mark_freed(params: Iterable[ShardedParam], has_memory: bool = False) -> None:
    """Refuse uses of the full parameters of ``params`` until :func:`mark_full`; ``has_memory``: their memory stays."""
    for param in params:
        full = param.full
        if type(full) in _KINDS and (type(full) is not FreedParameter or full.shardwise_has_memory is not has_memory):
            assert full is not None
            full.__class__ = FreedParameter
            full.shardwise_fqn = param.fqn  # pyright: ignore[reportAttributeAccessIssue]  of FreedParameter
            full.shardwise_has_memory = has_memory  # pyright: ignore[reportAttributeAccessIssue]


def mark_kept(param: ShardedParam, take: Callable[[ShardedParam], None]) -> None:
    """Watch the full parameter of ``param`` until it is freed or in use again; ``take``: see :class:`_Kept`."""
    full = param.full
    idle = _IDLE.get(type(full))
    if full is not None and idle is not None:
        kept = vars(full).get(_KEPT)
        if isinstance(kept, _Kept):
            kept.renew(param, take)
        else:
            vars(full)[_KEPT] = _Kept(param, take)
        full.__class__ = idle  # pyright: ignore[reportAttributeAccessIssue]


def mark_sub(param: ShardedParam) -> None:
    """Redirect gradients, hooks and ``requires_grad`` of the sub-sharded form of ``param`` to its shard."""
    sub = param.subsharded
    assert sub is not None
    vars(sub)[_SUB] = _StandsFor(param, "sub-sharded")
    sub.__class__ = SubShard  # pyright: ignore[reportAttributeAccessIssue]


def may_be_written(parameter: nn.Parameter) -> bool:
    """Return True if user code may have written to ``parameter`` through ``.data`` since :func:`mark_kept`."""
    if not isinstance(parameter, _Idle) or not parameter.kept.is_touched:
        return False
    return not parameter.kept.is_as_before(parameter)


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
