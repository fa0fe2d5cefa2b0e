"""``FSDPModule``: the methods that sharding adds to a module.

The module changes its class, as with FSDP2, instead of being wrapped: its attributes, its paths in state dicts and its
``isinstance`` stay.  Methods only set policies and settings, or tell the engine; what they set counts from the next forward or
backward on. Source: FSDP2's ``FSDPModule`` (torch 2.13), whose methods these are, with their names and arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from shardwise import torch_private
from shardwise.arguments import check_whole
from shardwise.collectives.compressed import Compression, Meter, own_part, sum_at_owners
from shardwise.collectives.owned import sum_of
from shardwise.collectives.routes import CustomCollective, Transport, check_transport
from shardwise.consistency.process_groups import group_of
from shardwise.errors import ConfigError, StateError, UsageError, did_you_mean
from shardwise.fsdp.attachment import ATTACHMENT, Attachment, attachment_of, roots_to_come, units_in
from shardwise.fsdp.build import copy_module
from shardwise.fsdp.divergence import ServeHook, refuse_manual
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.flat_buffer import as_gradient
from shardwise.fsdp.init_parameters import materializing
from shardwise.fsdp.mesh import cut_shard
from shardwise.fsdp.param import ShardedParam, refuse_gradients
from shardwise.fsdp.roots import bind_units, live_engine, provisional_engine, set_divergence, set_limits
from shardwise.fsdp.unit import NONE, Unit
from shardwise.fsdp.waiting_gradients import withdrawn
from shardwise.plan.schedule import UnitPolicy

# ---- Change the policy of sharded modules inside a ``with`` block.


@contextmanager
def policy(module: nn.Module, *, recurse: bool = True, **changes: bool | int | float | None) -> Generator[None]:
    """Replace fields of the policy of ``module``'s units; restore the old values at the end, also after an exception.

    Args:
        module: a module that is a unit or contains units.
        recurse: change all units below ``module`` too.
        changes: fields of :class:`shardwise.plan.schedule.UnitPolicy` and their new values.  ``sync=False`` leaves gradients
            unsynced, over shards and replicas.

    Raises: ConfigError for an unknown field, or a module without units.

    Example:
        >>> import shardwise
        >>> with shardwise.policy(model, sync=False):  # doctest: +SKIP
        ...     loss.backward()
    """
    known = [each.name for each in fields(UnitPolicy)]
    if unknown := sorted(changes.keys() - {*known}):
        raise ConfigError(f"a unit policy has no field {unknown}.{did_you_mean(unknown[0], known)} It has {known}")
    attachments = _attachments_in(module, recurse)
    units = [unit for each in attachments for unit in each.units]
    if not units:
        raise ConfigError(f"{type(module).__name__} contains no sharded module; call fully_shard or replicate first")
    for each in attachments if "sync" in changes else ():
        each.asked_sync = None  # an explicit choice wins over ``require_backward_grad_sync``, which waits for a forward
    before = [unit.policy for unit in units]
    for unit in units:
        unit.policy = replace(unit.policy, **changes)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for unit, old in zip(units, before, strict=True):
            unit.policy = replace(unit.policy, **{name: getattr(old, name) for name in changes})


def _attachments_in(module: nn.Module, recurse: bool) -> list[Attachment]:
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(found for each in modules if (found := attachment_of(each)) is not None))


# ---- The private interface that torch's tools and tests use on a sharded module: its class, and what they read of its state.


@dataclass(frozen=True)
class StateForTools:
    """Answers what torch's tools and tests read of the private state of its own FSDP2, as it is at that moment.

    Before torch 2.15 a stage of ``torch.distributed.pipelining`` ends the backward of each group in ``all_states``, then the
    step of the root.  Here the root's engine ends everything, so a group has nothing to do.

    Attributes:
        of: an attachment, a unit (torch's param group) or a parameter.

    Raises: StateError for a name that is not in ``_READ_BY_TOOLS``.
    """

    of: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy asks for these before there are attributes
            raise AttributeError(name)
        if name not in _READ_BY_TOOLS:
            raise StateError(
                f"{name}: a tool asks for the private state of torch's own FSDP2 (FSDPMemTracker does), which this model has "
                "not. To reshard the root after forward write model.set_reshard_after_forward(True); "
                "shardwise.describe_units shows the bytes of every unit, and torch's MemTracker works on any module"
            )
        return _READ_BY_TOOLS[name](self.of)


def _all_states(attachment: Attachment) -> list[StateForTools]:
    engine = engine_of(attachment.unit)
    return [StateForTools(attachment_of(next(iter(unit.modules)))) for unit in (engine.units if engine else ())]


def _kept_over(unit: Unit) -> object:
    """Return the axes over which parameters stay sharded after forward, None if they stay whole."""
    return unit.settings.sub_axes or (unit.settings.axes if unit.policy.reshard_after_forward else None)


_READ_BY_TOOLS: dict[str, Callable[[Any], object]] = {
    # of a module
    "_is_root": lambda attachment: attachment.is_root,
    "_lazy_init": lambda attachment: partial(live_engine, attachment),
    "_mp_policy": lambda attachment: attachment.unit.settings.precision,
    "_state_ctx": StateForTools,
    "all_states": _all_states,
    "_fsdp_param_groups": lambda attachment: [StateForTools(unit) for unit in attachment.units if unit.params],
    "_fsdp_param_group": lambda attachment: StateForTools(attachment.unit) if attachment.unit.params else None,
    "_root_post_backward_final_callback": lambda attachment: provisional_engine(attachment).end_step,
    # of a unit
    "fsdp_params": lambda unit: [*map(StateForTools, unit.params)],
    "mesh_info": lambda unit: unit.settings.axes,
    "post_forward_mesh_info": _kept_over,
    "_reshard_after_forward": lambda unit: _kept_over(unit) is not None,
    "_module_fqn": lambda unit: unit.name,
    "post_backward": lambda unit: lambda: None,
    # of a parameter
    "sharded_param": lambda param: param.sharded,
    "_param_fqn": lambda param: param.fqn,
}


# ---- Handles of work that sharded modules have launched.


class UnshardHandle:
    """A launched unshard."""

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self._units = units

    def wait(self) -> None:
        """Make the full parameters readable on the current stream and register them; a second call does nothing."""
        units, self._units = self._units, ()  # a second call finds none
        for unit in units:
            unit.wait()
            engine = engine_of(unit)
            if engine is None or engine.comm_ctx.pass_tracker.number is None:
                unit.keep()  # writes of user code to full parameters are refused


class GradientReductionHandle:
    """Launched reductions whose gradients are not set yet."""

    def __init__(self, complete: Callable[[], object] = bool) -> None:
        self._complete = complete

    def wait(self) -> None:
        """Wait for the reductions and set the gradients; a second call does nothing.

        Raises: StateError if ``reset_iter_state`` has invalidated the handle.
        """
        self._complete()
        self._complete = bool


# ---- What compression has done: reports of errors and bytes saved, and the residuals of error feedback for checkpoints.
# A rank's residual is what compression has left out of the gradients that it sent.  To save each rank's own would tie a
# checkpoint to the number of ranks.  Source of error feedback: 1-bit SGD (Seide et al., 2014).


@dataclass(frozen=True, slots=True)
class CodedTraffic:
    """The errors and bytes of a unit's compressed collectives of one kind, on this rank.

    Attributes:
        num_calls: compressed collectives so far.
        last_error, worst_error: relative error, in the 2-norm, of the tensors that this rank sent: of the last collective, and
            the largest so far.  NaN if it was not finite.
        sent_bytes: bytes that this rank has sent to other ranks.
        plain_bytes: bytes that it would have sent without compression.
    """

    num_calls: int
    last_error: float
    worst_error: float
    sent_bytes: int
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class UnitCompression:
    """One unit's part of a compression report.

    Attributes:
        name: path of its first module in the model; "" is the model itself.
        gathers: the traffic of parameters.
        reductions: the traffic of gradients.
    """

    name: str
    gathers: CodedTraffic
    reductions: CodedTraffic


# The path of a unit's first module or the name of one of its parameters, and a unit with compression.
_Coded = tuple[str, Unit, Compression]


def _traffic(meter: Meter, unit: Unit) -> CodedTraffic:
    meter.warn(unit.params)
    last, worst = (0.0 if each is None else float(each.item()) for each in (meter.last, meter.worst))
    return CodedTraffic(meter.num_calls, last, worst, meter.sent_bytes, meter.plain_bytes)


def _compressed(model: nn.Module) -> Iterator[_Coded]:
    for unit, (path, *_) in units_in(model).items():
        if (compression := unit.settings.compression) is not None:
            yield path, unit, compression


class CompressionState:
    """The residuals of a model's compressed gradients, as an object with a state dict.

    Only the sum over ranks of a parameter's residuals matters, so that is saved: a float32 tensor of the parameter's shape and
    placements, under the parameter's name.  It loads at any number of ranks.

    Example:
        >>> state = {"model": model, "compression": model.compression_state()}  # doctest: +SKIP
        >>> shardwise.checkpoint.save(folder, state)  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residuals, summed over ranks.  Collective: every rank calls it, between steps.

        The sums replace the ranks' own residuals at once, so that a continued run and a resumed one are bit-identical.
        """
        found: dict[str, torch.Tensor] = {}
        for param, (name, unit, compression) in self._with_feedback():
            rows, axes = _rows(unit, compression, param), unit.settings.axes
            is_summed = axes.num_replicas > 1  # replicas have a residual each, other ranks one for each rank's section
            of = axes.mesh.get_group(axes.replicate_mesh_dim if is_summed else axes.shard_mesh_dim)
            total = sum_of(rows[0].clone(), of, is_max=False) if is_summed else sum_at_owners(rows, of)
            _place(unit, compression, param, total)
            found[name] = as_gradient(param, total[: param.local.numel()].view(param.local.shape).clone())
        return found

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load residuals, sharded like the parameters or as full tensors; names of uncompressed parameters are skipped.

        Raises: StateError if the residual of a compressed parameter is missing or has another shape.
        """
        for param, (name, unit, compression) in self._with_feedback():
            value = state_dict.get(name)
            if value is None:
                raise StateError(f"compression state: no residual of {name}; load this model's, or none (zeros)")
            local, shape = torch_private.local_of(value).detach(), tuple(param.local.shape)
            if tuple(local.shape) == param.shard.shape != shape:
                local = cut_shard(local, param.shard, unit.settings.axes.shard_rank)
            if tuple(local.shape) != shape:
                raise StateError(
                    f"compression state: the residual of {name} has shape {tuple(local.shape)} on this rank, expected "
                    f"{shape}, or the whole {param.shard.shape}"
                )
            total = local.reshape(-1).to(unit.settings.storage.device, torch.float32)
            total = nn.functional.pad(total, (0, param.shard.section_numel - local.numel()))
            _place(unit, compression, param, total)

    def _with_feedback(self) -> Iterator[tuple[ShardedParam, _Coded]]:
        """Yield the parameters whose gradients are compressed with feedback, with their names in the model."""
        paths = {id(torch_private.parameters_of(module)): where for where, module in self._model.named_modules()}
        for path, unit, compression in _compressed(self._model):
            if compression.policy.error_feedback and unit.coding("reduce") is not None:
                for param in filter(unit.is_coded, unit.params):
                    at = param.registrations[0]
                    name = f"{paths.get(id(at.parameters), path)}.{at.name}".lstrip(".")
                    yield param, (name, unit, compression)


def _rows(unit: Unit, compression: Compression, param: ShardedParam) -> torch.Tensor:
    axes, device = unit.settings.axes, unit.settings.storage.device
    shape = 1 if axes.num_replicas > 1 else axes.num_shards, param.shard.section_numel
    return compression.residuals.get(param, torch.zeros(shape, dtype=torch.float32, device=device))


def _place(unit: Unit, compression: Compression, param: ShardedParam, total: torch.Tensor) -> None:
    """Set this rank's residuals so that their sum over ranks is ``total``, the residual of this rank's section."""
    axes, rows = unit.settings.axes, torch.zeros_like(_rows(unit, compression, param))
    if axes.num_replicas > 1:
        assert axes.replicate_mesh_dim is not None
        rows[0] = own_part(total, axes.mesh.get_local_rank(axes.replicate_mesh_dim), axes.num_replicas)
    else:
        rows[axes.shard_rank] = total
    compression.residuals[param] = rows


# ---- The mixin, and the classes that it makes.

# Mixed classes by original class and mixin, so that equal modules have equal classes; filled by mix_in alone.
_mixed_classes: dict[tuple[type, type], type] = {}


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return a map from the original class of every module that was sharded to its FSDP class."""
    return {original: mixed for (original, mixin), mixed in _mixed_classes.items() if mixin is FSDPModule}


def mix_in(module: nn.Module, mixin: type, attachment: Attachment) -> None:
    """Put ``mixin`` first in the method resolution order of ``module``, and show the module to torch's tools."""
    original = type(module)
    mixed = _mixed_classes.get((original, mixin))
    if mixed is None:
        # Tools check ``isinstance`` for torch's class.  It is last, so that no method of it is found before another one.
        known = torch_private.class_that_tools_ask_for()
        tools = () if known is None else (known,)
        # Packages compare ``__module__`` of a class with their own name; transformers does before it initializes weights.
        body: dict[str, Any] = {"__module__": original.__module__, "_original_class": original}
        mixed = type(f"{mixin.__name__.removesuffix('Module')}{original.__name__}", (mixin, original, *tools), body)
        _mixed_classes[original, mixin] = mixed
    module.__class__ = mixed
    torch_private.show_to_tools(module, StateForTools(attachment))


if TYPE_CHECKING:  # a mixin of modules, which type checkers may take for one

    class _Base(nn.Module, Joinable): ...
else:
    _Base = object


class FSDPModule(_Base):
    """The mixin of every module that ``fully_shard`` was called on.

    The ``set_*`` methods replace the unit's immutable policy; ``shardwise.policy`` does so inside a ``with`` block.
    """

    _original_class: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module: a slice of a sharded container is a new container, which is not sharded."""
        original: type = cls._original_class
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy_module(cast(nn.Module, self), self._attachment(), memo)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as ``nn.Module`` does, also between forward and backward, when some units are unsharded."""
        super().zero_grad(set_to_none)
        registered = {id(each) for each in self.parameters()}  # a unit may have modules beside this one
        for param in [param for unit in self._units(True) if unit.has_copies for param in unit.params]:
            if registered.isdisjoint((id(param.full), id(param.registered_form))):
                continue
            if set_to_none:
                param.sharded.grad = None
            elif param.sharded.grad is not None:
                with torch.no_grad():  # not detach(): what waits for a backward with sync is dropped by zero_ alone
                    param.sharded.grad.zero_()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load shards, as ``nn.Module`` does.  Raises: StateError for full tensors, which :func:`shardwise.load` takes."""
        try:
            return super().load_state_dict(state_dict, *args, **options)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise StateError(
                "load_state_dict takes shards, and this state dict has full tensors: write shardwise.checkpoint.load(file, "
                "{'model': model}), or torch's set_model_state_dict with StateDictOptions(full_state_dict=True)"
            ) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"a {type(self).__name__} cannot be pickled or copied shallowly: its process groups, hooks and memory belong to "
            "this process. Save its state_dict(), and shard a model in the process that loads it, or use copy.deepcopy"
        )

    # ---- parameters ----

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own parameters (not those of inner sharded modules).

        Args:
            async_op: return a handle instead of waiting; the forward waits by itself.
        """
        attachment = self._attachment()
        provisional_engine(attachment)
        for unit in attachment.units:  # all are launched before the first is waited for
            unit.unshard()
        handle = UnshardHandle(attachment.units)
        return handle if async_op else handle.wait()

    def reshard(self) -> None:
        """Free this module's own full parameters and register the shards."""
        for unit in self._attachment().units:
            unit.reshard()

    def reset_iter_state(self) -> None:
        """Reshard all units and drop the state of a failed step.

        After an exception shardwise does so by itself; an interrupt (``KeyboardInterrupt``) of a forward needs this call.
        Raises: StateError if this is not the root module.
        """
        if (engine := engine_of(self._root("reset_iter_state").unit)) is not None:
            engine.forget_step()

    def release_memory(self) -> None:
        """Free idle staging and parameter buffers; the next step allocates new ones.

        Unsharded parameters that are in use stay.
        """
        if (engine := engine_of(self._unit())) is not None:
            engine.comm_ctx.pool.trim()

    # ---- compression ----

    def compression_report(self) -> tuple[UnitCompression, ...]:
        """Return errors and saved bytes of compression, for every unit below that has a :class:`CompressionPolicy`.

        The figures are those of this rank; no communication, but it synchronizes with an accelerator.
        """
        found = _compressed(cast(nn.Module, self))
        rows = [(path, _traffic(each.gathers, unit), _traffic(each.reductions, unit)) for path, unit, each in found]
        return tuple(UnitCompression(*row) for row in rows)

    def compression_state(self) -> CompressionState:
        """Return an object whose state dict has the residuals of error feedback, for checkpoints."""
        return CompressionState(cast(nn.Module, self))

    # ---- behaviour ----

    def set_transport(self, transport: Transport) -> None:
        """Set the transport of CPU tensors; call it on the root, with the same value on every rank.

        Args:
            transport: "auto", "gloo" or "collective", see :func:`shardwise.set_default_transport`.

        Raises: ConfigError for another name.
        """
        wanted = self._unit().settings.transport = check_transport(transport)
        if (engine := engine_of(self._unit())) is not None:
            engine.comm_ctx.transport = wanted
            bind_units(engine)

    def set_allow_rank_divergence(self, enabled: bool) -> None:
        """Set whether ranks may run different units within a forward and backward, in another order or number, or none.

        Call it on the root, on every rank, before the first forward or between two steps.  A rank that does not run a unit
        serves its shards, and counts as zeros in the average of the gradients.  ``.grad`` of a parameter that no rank has
        used stays as it is.  Ranks may also differ in whether they run a forward or a backward at all: a rank that comes to
        another one, or to an optimizer step, serves the others first.

        A step of ranks that take the same way takes five small all-reduces more, on the host.  With
        ``reshard_after_forward`` as an int units are resharded to all ranks.

        Raises: StateError if this is not the root module.
        """
        attachment = self._root("set_allow_rank_divergence")
        attachment.unit.settings.may_diverge = enabled
        # A rank that has run no forward yet is served, too, so those that may run one are known from here on.
        roots_to_come.pop(attachment, None)
        if enabled and not attachment.is_root:
            roots_to_come[attachment] = None
        if attachment.is_root:
            set_divergence(self._engine(), enabled)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook by which ``torch.distributed.algorithms.Join`` lets ranks run unequal numbers of passes.

        From here on ranks may take different ways, see :meth:`set_allow_rank_divergence`.  In ``with Join([model]):`` a rank
        that has left the body serves the forwards and backwards of the others until all have left it.

        Args:
            kwargs: ``divide_by_initial_world_size`` (True): average gradients over all ranks; False: over those that have
                not left the body.

        A ``Join`` with other objects raises ValueError: each engine that ranks may leave has a process group of its own.
        """
        attachment = self._attachment()
        attachment.unit.settings.may_diverge = True
        # ``Join`` exchanges messages right after this call, so the group for them has to be there.
        engine = live_engine(attachment)
        set_divergence(engine, True)
        if engine.divergence is None:
            return JoinHook()  # there is no other rank
        return ServeHook(self, engine.divergence, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device of the messages of ``Join``."""
        engine = self._engine()
        return engine.comm_ctx.device if engine.divergence is None else torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks of the model, in a group of its own, so that ``Join`` does not receive what user code sends."""
        divergence = self._engine().divergence
        return cast(dist.ProcessGroup, dist.group.WORLD) if divergence is None else divergence.group

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last of the step; only the last one waits for pending reductions."""
        self._engine().is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether :meth:`finalize_backward` sets gradients after any number of backwards, instead of every backward.

        Call it on the root.  If enabled, ``.grad`` does not change before ``finalize_backward``, ``is_last_backward`` has no
        effect, and an optimizer step before it is an error.  A backward that raises does not change the gradients of earlier
        ones.

        Raises: StateError if this is not the root module, or once a backward has begun that has not been finalized.
        """
        engine = provisional_engine(self._root("set_manual_backward_finalization"))
        refuse_manual(enabled and engine.divergence is not None)
        engine.manual.set_on(enabled, engine.is_in_backward, bool(engine.reductions.deferred))

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the remaining gradients and set ``.grad``; call it on every rank, after the last backward.

        Units whose gradients are complete are reduced during backward, as always.  Incomplete and unsynced gradients are
        reduced here if ``requires_gradient_sync`` is True now.  It does nothing before the first forward, or if no backward
        has reached these parameters.

        Args:
            async_op: return a handle; its ``wait()`` must come before gradients are used and before the next forward.

        Raises: StateError if this is not the root, without :meth:`set_manual_backward_finalization`, during a backward, or if
            the handle of an earlier call has not been waited for.
        """
        if self._attachment().is_root is None:
            return GradientReductionHandle() if async_op else None
        engine = provisional_engine(self._root("finalize_backward"))
        completion = engine.launch_rest()
        handle = GradientReductionHandle(bool if completion is None else partial(engine.complete, completion))
        return handle if async_op else handle.wait()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients; False accumulates them, unsharded and unsynced, for a later backward."""
        if (engine := engine_of(self._unit())) is not None and not requires_gradient_sync:
            engine.hold_assigned()
        for each in _attachments_in(self, recurse):
            each.asked_sync = None  # this call is the newer choice
        self._replace_policies(recurse, sync=requires_gradient_sync, syncs_replicas=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces over replicas (HSDP); False accumulates gradients reduced over shards only."""
        self._replace_policies(recurse, syncs_replicas=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Replace the ``reshard_after_forward`` argument.  Raises: ConfigError if it is not a bool."""
        if not isinstance(reshard_after_forward, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in self._units(recurse):
            unit.settings.keeps_for_backward = False  # the user has said it now: also a root is resharded, or never
        self._replace_policies(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether full parameters are freed after backward."""
        self._replace_policies(recurse, reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether reshard keeps the memory of full parameters, at the same address, for CUDA graphs.

        The full parameters must still not be used until the next unshard.  ``False`` frees the memory at once if the unit is
        sharded.
        """
        self._replace_policies(recurse, keeps_full_memory=keep)
        for unit in self._units(recurse):
            if unit.held is NONE and not keep:
                unit.memory.drop()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward of this module reads its parameters; an embedding's does not."""
        self._replace_policies(False, unshard_in_backward=unshard_in_backward)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Send zeros for trainable parameters without a gradient, so that ranks may use different parameters."""
        self._replace_policies(recurse, reduces_unused=reduce_scatter_unused_params)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of data-parallel ranks; on any backend.

        Raises: ConfigError if it is 0 or NaN; StateError while sums over shards, which were divided otherwise, wait.
        """
        if not abs(factor) > 0:
            raise ConfigError(
                f"set_gradient_divide_factor: the factor is {factor!r}; gradients cannot be divided by it"
            )
        for unit in self._units(False) if factor != self._unit().policy.divide_factor else ():
            for param in unit.earlier.partial:
                if param.sharded.grad is unit.earlier.waiting.get(param):  # else user code has cleared them
                    raise StateError(
                        f"set_gradient_divide_factor between backwards of one step: gradients of {param.fqn} that were divided "
                        "otherwise wait for their all-reduce (set_requires_all_reduce). Set it before the step, or after it"
                    )
        self._replace_policies(False, divide_factor=float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # torch's older name

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use only sums in collectives, and divide in separate kernels."""
        self._replace_policies(False, sum_only=enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Allow ``max_input_buffers`` reduce-scatter inputs at once; the largest setting in a model counts.

        Raises: ArgumentTypeError if it is no int, ConfigError if it is below 1.
        """
        check_whole("max_input_buffers", max_input_buffers, 1)
        for unit in self._units(recurse):
            unit.settings.max_reductions = max_input_buffers
        set_limits(self._engine())

    # ---- prefetch and events ----

    def set_gather_ahead_bytes(self, num_bytes: int | None) -> None:
        """Prefetch as many units as fit into ``num_bytes``, not one; call it on the root, the same on every rank.

        Args:
            num_bytes: the limit on full parameters and the staging of gathers and reductions.  It is raised to the peak of
                prefetching one unit, so 0 stands for that.  None: prefetch one unit.

        It takes effect with the plan of the next step.  Units with their own list (:meth:`set_modules_to_forward_prefetch`)
        use that.  Raises: ArgumentTypeError if it is no int, ConfigError if it is below 0, StateError if this is not the root.
        """
        if num_bytes is not None:
            check_whole("num_bytes", num_bytes, 0, "; 0 stands for the peak of prefetching one unit")
        engine = provisional_engine(self._root("set_gather_ahead_bytes"))
        self._attachment().unit.settings.ahead_bytes = num_bytes
        set_limits(engine)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Unshard ``modules``, in order, when the forward of this one starts, instead of the plan's prefetches."""
        self._unit().settings.forward_prefetch = _unit_refs(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Unshard ``modules``, in order, when the backward of this one starts, instead of the plan's prefetches."""
        self._unit().settings.backward_prefetch = _unit_refs(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next step's all-gathers wait only for ``event``, recorded after the optimizer; used once."""
        self._engine().post_optim_event = event

    def _get_fsdp_state(self) -> StateForTools:
        return StateForTools(self._attachment())

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept torch's switch without effect: all-gathers are always asynchronous, with memory of one stream."""
        del async_op

    # ---- communication ----

    def set_custom_all_gather(self, comm: CustomCollective) -> None:
        """All-gather with ``comm``, which has ``allocate`` and ``__call__`` like torch's ``AllGather``.

        Raises: ConfigError if the parameters of this module are on several meshes.
        """
        self._set_custom("all_gather", comm)

    def set_custom_reduce_scatter(self, comm: CustomCollective) -> None:
        """Reduce-scatter with ``comm``, which has the methods of torch's ``ReduceScatter``.

        Raises: ConfigError if the parameters of this module are on several meshes.
        """
        self._set_custom("reduce_scatter", comm)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with the flat reduced gradients, after the reduce-scatter or, with replicas, after the all-reduce.

        Raises: ConfigError with several meshes, or with ``stream`` on a mesh with replicas.
        """
        settings = self._single_unit("set_all_reduce_hook").settings
        if stream is not None and settings.axes.replicate_mesh_dim is not None:
            raise ConfigError("stream cannot be set when using native HSDP")
        settings.all_reduce_hook = hook if stream is None else _on_stream(hook, stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Run reduce-scatters on a separate process group, concurrently with all-gathers; call it on every rank of the mesh."""
        # NCCL runs the collectives of one group one after the other, also on several streams.
        made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        for settings in [unit.settings for unit in self._units(recurse)]:
            if settings.axes.shard_mesh_dim is not None:
                group = settings.axes.mesh.get_group(settings.axes.shard_mesh_dim)
                if enable and group not in made:
                    made[group] = group_of(dist.get_process_group_ranks(group))
                settings.custom.reduce_group = made.get(group)
        bind_units(self._engine())

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take staging buffers from the allocator of the process group, if its backend has one (NCCL).

        Raises: UsageError if a custom collective is set, which allocates its own buffers.
        """
        for custom in [unit.settings.custom for unit in self._attachment().units]:
            if custom.all_gather is not None or custom.reduce_scatter is not None:
                raise UsageError(
                    "set_allocate_memory_from_process_group_for_comm cannot be used together with set_custom_all_gather "
                    "or set_custom_reduce_scatter: a custom communication allocates its own buffers"
                )
            custom.allocates_from_group = enable
        bind_units(self._engine())

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse torch's switch to symmetric memory.

        Raises: ConfigError, which names the alternatives.
        """
        raise ConfigError(
            f"set_symm_mem_for_comm({backend!r}): shardwise does not use NCCL's symmetric memory. For buffers that NCCL has "
            "registered, call set_allocate_memory_from_process_group_for_comm(True)"
        )

    # ---- plumbing ----

    def _attachment(self) -> Attachment:
        return self.__dict__[ATTACHMENT]

    def _unit(self) -> Unit:
        return self._attachment().unit

    def _engine(self) -> Engine:
        return provisional_engine(self._attachment())

    def _root(self, method: str) -> Attachment:
        attachment = self._attachment()
        if attachment.is_root is False:
            raise StateError(f"{method} must be called on the root FSDP module; this is '{attachment.unit.name}'")
        return attachment

    def _units(self, recurse: bool) -> list[Unit]:
        return [unit for each in _attachments_in(cast(nn.Module, self), recurse) for unit in each.units]

    def _replace_policies(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            unit.policy = replace(unit.policy, **changes)

    def _single_unit(self, method: str) -> Unit:
        if self._unit().beside:
            raise ConfigError(
                f"{method} is not supported with multiple param groups (from per-param mesh via shard_placement_fn): "
                "it would be ambiguous across groups with different meshes."
            )
        return self._unit()

    def _set_custom(self, kind: str, comm: CustomCollective) -> None:
        setattr(self._single_unit(f"set_custom_{kind}").settings.custom, kind, comm)
        bind_units(self._engine())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # Module.to and the like convert the shards; they are packed again at the next unshard.
        self.reshard()
        # Owners of tied parameters are converted in their own modules; their gradients that wait are withdrawn here as well.
        own, units = self._attachment().units, {each for unit in self._units(True) for each in (unit, *unit.others)}
        for unit in own:
            unit.adopt_registered()
        params = [param for unit in own for param in unit.params]
        for param in params:
            # A conversion may swap the contents of two parameters, which torch refuses while there is an accumulator.
            param.accumulator = None
        places = [at.setattr_module for unit in units for param in unit.params for at in param.registrations]
        owners = dict.fromkeys(owner for ref in places if ref is not None and (owner := ref()) is not None)
        try:
            waits = withdrawn(unit.earlier.waiting for unit in units)
            with waits, torch_private.convertible(owners, fn) as convert:
                convert = materializing(convert, self._attachment())
                return torch_private.apply_to_tensors(self, convert, *args, after=FSDPModule, **kwargs)
        finally:
            for param in params:
                param.hand_on_attributes()  # torch registers new parameters, which have none
            refuse_gradients(params)


Joinable.register(FSDPModule)
torch_private.leave_join(FSDPModule)


def _on_stream(hook: Callable[[torch.Tensor], None], stream: Any) -> Callable[[torch.Tensor], None]:
    if not torch.accelerator.is_available():
        return hook  # without an accelerator there are no streams

    def run(section: torch.Tensor) -> None:
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            hook(section)
        torch.accelerator.current_stream().wait_stream(stream)

    return run


def _unit_refs(modules: Sequence[FSDPModule]) -> list[weakref.ref[Unit]]:
    for module in modules:
        if not isinstance(module, FSDPModule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [weakref.ref(module._unit()) for module in modules]  # pyright: ignore[reportPrivateUsage]
