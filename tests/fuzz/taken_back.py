"""Fixes of wrong numbers, each taken back: what the engine did before it knew better, to see that the fuzzer finds that.

They replace functions in the ranks of a runner, and nowhere else; the names in :data:`FIXES` are the rules that then hold
no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from shardwise import torch_private
from shardwise.checkpoint.state import BufferCheck
from shardwise.checks import root
from shardwise.collectives.local_peers import take_shareable
from shardwise.fsdp import build
from shardwise.fsdp import build as copying
from shardwise.fsdp import module as api_module
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.flat_buffer import FlatBucket, ParamStorage
from shardwise.fsdp.gradients import Reduction
from shardwise.fsdp.hooks import Hooks
from shardwise.fsdp.local_gradients import EarlierGradients
from shardwise.fsdp.param import Registration, ShardedParam
from shardwise.fsdp.unit import Unit
from shardwise.optim.elementwise import ElementwiseStep
from shardwise.optim.sharded_optimizer import ShardedOptimizer
from shardwise.optim.state_dict import Probe, copy_options
from shardwise.torch_private import parameters_of
from shardwise.zero import optimizer as backend
from shardwise.zero import overlap
from shardwise.zero.optimizer import ZeroBackend
from shardwise.zero.partition import LocalOptimizer

# What the functions of these modules look up by name.
_IN_BUILD = cast(Any, build)
_IN_COPYING = cast(Any, copying)
_IN_BACKEND_OF_ZERO = cast(Any, backend)
_IN_OVERLAP = cast(Any, overlap)
_IN_API_MODULE = cast(Any, api_module)


def _read_buckets_row_major() -> None:
    _IN_OVERLAP._gradient_views = lambda bucket: bucket.gradients()


def _tell_no_module() -> None:
    cast(Any, Registration).of = lambda module, name: Registration(parameters_of(module), name)


def _end_at_every_module() -> None:
    watch = Engine.before_forward

    def begins(self: Engine, unit: Unit, module: Any) -> None:
        watch(self, unit, module)
        unit.forward.begun_by = id(module)

    cast(Any, Engine).before_forward = begins


def _end_before_the_tied_unit() -> None:
    adopt = Engine.adopt

    def without_owners(self: Engine, units: Any) -> None:
        adopt(self, units)
        cast(Any, self)._owners = set()

    cast(Any, Engine).adopt = without_owners


def _clip_by_own_norm() -> None:
    cast(Any, ZeroBackend).sum_over_ranks = lambda self, value, is_max=False: value


def _trust_every_gather() -> None:
    cast(Any, Unit)._is_from_now = lambda self, pass_number: True
    cast(Any, Engine).reshard_stepped = lambda self, stepped: None


def _overwrite_partial_sums() -> None:
    take = EarlierGradients.take
    cast(Any, EarlierGradients).take = lambda self, params: (take(self, params)[0], {})


def _write_names_into_groups() -> None:
    named_dict = cast(Any, ShardedOptimizer)._named_dict

    def with_names(self: ShardedOptimizer, states: object) -> dict[str, Any]:
        found: dict[str, Any] = named_dict(self, states)
        for group in found["param_groups"]:
            group["param_names"] = list(group["params"])
        return found

    cast(Any, ShardedOptimizer)._named_dict = with_names


def _send_nothing() -> None:
    make, make_bucket = Reduction.__init__, ParamStorage.bucket

    def made(self: Reduction, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.has_elements = True

    def bucket(
        self: ParamStorage, params: list[ShardedParam], full_dtype: torch.dtype, is_collective: bool
    ) -> FlatBucket:
        found = make_bucket(self, params, full_dtype, is_collective)
        found.travels |= is_collective
        return found

    cast(Any, Reduction).__init__ = made
    cast(Any, ParamStorage).bucket = bucket


def _take_what_nobody_averaged() -> None:
    _IN_BACKEND_OF_ZERO.are_same = lambda *_, **__: True


def _cut_blocks() -> None:
    cast(Any, Probe).why_not_cut = lambda _: None
    cast(Any, ElementwiseStep)._check_state = lambda self, group: None


def _ask_for_an_accelerator() -> None:
    def on_stream(hook: Callable[[torch.Tensor], None], stream: torch.Stream) -> Callable[[torch.Tensor], None]:
        stream.wait_stream(torch.accelerator.current_stream())
        return hook

    _IN_API_MODULE._on_stream = on_stream


def _trace_hooks() -> None:
    for name in ("before_forward", "after_forward", "before_backward", "reach"):
        setattr(Hooks, name, getattr(Hooks, name).__wrapped__)


def _share_memory_of_meta() -> None:
    allocate = ParamStorage.allocate

    def take(
        self: ParamStorage, numel: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, object | None]:
        shares = self.is_shared and numel and device.type == "meta"
        found = take_shareable(numel * dtype.itemsize) if shares else None
        return allocate(self, numel, dtype, device) if found is None else (found[0].view(dtype), found[1])

    cast(Any, ParamStorage).allocate = take


def _lose_attributes() -> None:
    _IN_BUILD._hand_on = torch_private.move_hooks
    cast(Any, ShardedParam).hand_on_attributes = lambda self: None


def _forget_what_copies_ignore() -> None:
    complete = _IN_COPYING._complete

    def without(old: Any, new: Any, memo: Any) -> None:
        complete(old, new, memo)
        new.ignored = ()

    _IN_COPYING._complete = without


def _lose_options() -> None:
    add = LocalOptimizer.with_last_group

    def pulling(self: LocalOptimizer) -> LocalOptimizer:
        copy_options(self.optim.param_groups, self.groups[:-1])
        return add(self)

    cast(Any, LocalOptimizer).with_last_group = pulling


def _receive_row_major() -> None:
    receive = _IN_BACKEND_OF_ZERO._receive
    _IN_BACKEND_OF_ZERO._receive = lambda *args: {
        piece: tensor.contiguous() for piece, tensor in receive(*args).items()
    }


def _begin_apart() -> None:
    setattr(root, "compare_beginnings", lambda *_: None)  # noqa: B010
    setattr(backend, "check_same_params", lambda *_: None)  # noqa: B010


def _set(target: object, name: str, value: object) -> Callable[[], None]:
    """Return what gives ``target`` another ``name``."""
    return lambda: setattr(target, name, value)


FIXES: dict[str, Callable[[], None]] = {
    "buckets of DDP lie in the parameters' memory order": _read_buckets_row_major,
    "modules that follow a parameter are told": _tell_no_module,
    "a unit ends when backward has left all its modules": _end_at_every_module,
    "a unit that lends a weight ends after the borrower": _end_before_the_tied_unit,
    "owned gradients are clipped by the norm of all": _clip_by_own_norm,
    "nothing gathered is read after its shards have changed": _trust_every_gather,
    "partial sums of deferred backwards count": _overwrite_partial_sums,
    "names of parameters are no entry of param groups": _write_names_into_groups,
    "what has no elements is not sent": _send_nothing,
    "gradients that nobody has averaged are refused": _take_what_nobody_averaged,
    "optimizers with state per block see whole blocks": _cut_blocks,
    "hooks on streams need no accelerator": _ask_for_an_accelerator,
    "hooks are not traced where blocks are compiled": _trace_hooks,
    "shards that one seed has drawn are refused": _set(root, "bytes_of", lambda _: (None, 0)),
    "what has no values is refused": _set(root, "unwritten_in", lambda *_, **__: []),
    "what is on meta shares no memory": _share_memory_of_meta,
    "graphs within transforms count": _set(torch_private, "graphs_of", lambda tensor: [tensor]),
    "weights that hooks hold stay": _set(Unit, "count_aliases", lambda self: 0),
    "torch's replicate leaves units alone": _set(torch_private, "show_to_tools", lambda *_: None),
    "attributes follow": _lose_attributes,
    "buffers that differ are not saved": _set(BufferCheck, "compare", lambda *_: None),
    "ranks begin alike": _begin_apart,
    "options reach the step beside another group": _lose_options,
    "gradients of joined ranks lie as parameters do": _receive_row_major,
    "copies ignore what the model ignores": _forget_what_copies_ignore,
    "a recomputed unit ends with its checkpoint": _set(Engine, "nested_backward_ended", lambda *_: None),
}
