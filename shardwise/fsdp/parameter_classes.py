"""The class of full parameters whose memory is freed: a use of one raises an error with its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam

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
    """The class of a full parameter between reshard and the next unshard; ``__class__`` of the parameter is swapped.

    Autograd may save such a tensor for backward, which unshards it again first; user code must not use it.  Without this
    class a read would crash the process.
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
        leaves = torch_private.leaves_of((args, kwargs))
        names = sorted({each.shardwise_fqn for each in leaves if isinstance(each, FreedParameter)})
        raise StateError(
            f"{names} was resharded: the unsharded memory of a parameter is freed after forward and backward. Read the "
            "parameter from its module inside forward, or call unshard() on the module first"
        )


def mark_freed(params: Iterable[ShardedParam], has_memory: bool = False) -> None:
    """Refuse uses of the full parameters of ``params`` until :func:`mark_full`; ``has_memory``: their memory stays."""
    for param in params:
        full = param.full
        if type(full) is nn.Parameter or (type(full) is FreedParameter and full.shardwise_has_memory is not has_memory):
            full.__class__ = FreedParameter
            full.shardwise_fqn = param.fqn  # pyright: ignore[reportAttributeAccessIssue]  of FreedParameter
            full.shardwise_has_memory = has_memory  # pyright: ignore[reportAttributeAccessIssue]


def mark_full(params: Iterable[ShardedParam]) -> None:
    """Make the full parameters of ``params`` ordinary parameters again."""
    for param in params:
        if type(param.full) is FreedParameter:
            param.full.__class__ = nn.Parameter  # pyright: ignore
