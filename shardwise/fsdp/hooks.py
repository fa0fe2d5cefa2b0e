"""The hooks that connect modules and their outputs to an engine.  No other file of ``fsdp`` registers these."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.collectives.owned import broadcast_from_first
from shardwise.consistency.process_groups import refuse_forked
from shardwise.containers import Args, Conversion, Kwargs, tensors_in
from shardwise.errors import StateError
from shardwise.fsdp.attachment import Attachment, attachment_of
from shardwise.fsdp.backward import Place
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.forward_graph import Begun, ForwardGraph
from shardwise.fsdp.init_parameters import SHARES_BUFFERS
from shardwise.fsdp.roots import live_engine
from shardwise.fsdp.unit import is_in_backward
from shardwise.observe import log_for_torch, logger
from shardwise.torch_private import beside_transforms, innermost_transform, is_profiling

# ---- The hooks on modules and outputs.

_NO_RANGE = contextlib.nullcontext()

_WHY_NO_GRAPH = (
    "shardwise gathers parameters and reduces gradients between graphs, where a unit begins and ends. With fullgraph=True "
    "compile each unit by itself: for block in model.blocks: block.compile(fullgraph=True)"
)


def dynamo_disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` after excluding it from the graphs of torch.compile; it does not change otherwise."""
    torch_private.skip_frames(function, _WHY_NO_GRAPH)
    return function


dynamo_disabled(Engine.reach)  # the hook of the gradients of inputs


def _range(what: str, unit: str, logs: bool) -> contextlib.AbstractContextManager[object]:
    """Log that ``what`` begins for ``unit``; return a context that a profiler shows as one range.

    Inside a ``torch.func`` transform the context suspends it: the transform applies to the module's computation, not to the
    gathers for it.
    """
    if logs:
        log_for_torch(what, unit)
    if innermost_transform() is not None:
        return beside_transforms()
    if is_profiling():
        return torch.profiler.record_function(f"FSDP::{what} ({unit})")
    return _NO_RANGE


# Of a forward that runs: the conversion of its arguments, and what its graph began with.
_Running = tuple[Conversion | None, Begun]
_NOTHING: _Running = None, ([], {}, 0)


class Hooks:
    """The hooks on the modules of one attachment, and what they note of the forwards that run now."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment, self._unit = attachment, attachment.unit
        self._running: list[_Running] = []
        self._graph = ForwardGraph()

    def install(self) -> None:
        """Register the forward hooks on the unit's modules, and those of state dicts on all that own a parameter."""
        for module in self._unit.modules:
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, prepend=False, always_call=True)
            module.register_load_state_dict_post_hook(self.after_load)
        for module in {param.module(): None for param in self._unit.params}:
            if module is not None:
                self.reshard_for_state_dict(module)
        self.listen()

    def listen(self) -> None:
        """Hook gradients of plain parameters before the first forward, since user code may call only parts of the module."""
        unit, attachment_ref = self._unit, weakref.ref(self._attachment)

        def engine_for_first_gradient() -> Engine | None:
            attachment = attachment_ref()
            return None if attachment is None else live_engine(attachment)

        for member in (unit, *unit.beside) if unit.settings.keeps_plain else ():
            member.engine_side.engine_for_gradient = engine_for_first_gradient
            member.listen()

    def reshard_for_state_dict(self, module: nn.Module) -> None:
        """Reshard the unit before the state dict of ``module`` is taken or loaded."""
        module.register_state_dict_pre_hook(self.before_state_dict)
        module.register_load_state_dict_pre_hook(self.before_load)

    def before_load(self, *_: Any) -> None:
        """Reshard the unit, and those with tied parameters: the pre-hook of ``load_state_dict``."""
        for unit in (self._unit, *self._unit.others):
            unit.reshard()

    def before_state_dict(self, *_: Any) -> None:
        """Reshard the unit, and move shards to the memory that they keep: a state dict shows every later step."""
        self.before_load()
        self._pack()

    def after_load(self, *_: Any) -> None:
        """Move shards to the memory that they keep: so do those that user code takes after ``load_state_dict(assign=True)``."""
        engine = engine_of(self._unit)
        if engine is None or not engine.awaits_backward:  # else that backward is of other parameters than are loaded
            with contextlib.suppress(StateError):  # the next forward raises it again, when all is loaded
                self._pack()

    def _pack(self) -> None:
        engine = engine_of(self._unit)
        for unit in () if engine is not None and engine.is_in_step else (self._unit, *self._unit.beside):
            # Not while user code loads a state dict part by part over parameters on meta: shards are packed on one device.
            registered = [at.parameters.get(at.name) for param in unit.params for at in param.registrations]
            if len({each.is_meta for each in registered if each is not None}) <= 1:
                unit.ensure_packed()

    @dynamo_disabled
    def before_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Pre-forward hook: wait for full parameters, move inputs to the device and cast them to the compute dtype.

        It runs once per module and step, so it enters contexts only if a log, a profiler or a transform needs one.
        """
        attachment, unit = self._attachment, self._unit
        # Before the first forward a unit may have a provisional engine (``unshard``), which ``live_engine`` replaces.
        engine = None if attachment.is_root is None else unit.engine_side.engine_ref()
        if attachment.is_root is not False:
            refuse_forked()  # the root, or a module that may become it: inner ones run inside of its forward
        if attachment.asked_sync is not None and torch.is_grad_enabled() and not is_in_backward():
            cast(Any, module).set_requires_gradient_sync(attachment.asked_sync)
        if engine is None:
            with _NO_RANGE if innermost_transform() is None else beside_transforms():
                engine = live_engine(attachment, in_forward=True)
        while self._running and not unit.forward.holders and not is_in_backward():
            conversion = self._running.pop()[0]  # an interrupt has ended this forward without the forward hooks
            if conversion is not None:
                conversion.take_back()
        precision, device = unit.settings.precision, None
        # Only the inputs of the outermost forward come from user code, perhaps on another device.
        if not engine.forwards:
            engine.logs = logger.isEnabledFor(logging.DEBUG)
            device = None if engine.comm_ctx.device.type == "cpu" else engine.comm_ctx.device
        dtype = precision.param_dtype if precision.cast_forward_inputs else None
        conversion = None if dtype is device is None else Conversion(dtype, device)
        self._running.append((conversion, ([], {}, sys.maxsize)))  # ``after_forward`` runs also if this raises
        if conversion is not None:
            args, kwargs = conversion.arguments(args, kwargs)
        if engine.logs or innermost_transform() is not None or is_profiling():
            with _range("pre_forward", unit.name, engine.logs):
                engine.before_forward(unit, module)
        else:
            engine.before_forward(unit, module)
        if not torch.is_grad_enabled():
            return args, kwargs
        # Backward leaves last the module whose forward came first, and with it the unit.  A checkpoint of each module by
        # itself recomputes that one last.
        use = unit.forward
        if use.begun_by == id(module) and (use.holders == 1 or is_in_backward()):
            if innermost_transform() is None:
                args = self._watch_inputs(engine, args, kwargs)
            use.begun_at = get_ident(), torch_private.num_nodes_made()
        self._running[-1] = conversion, self._graph.begin((*args, *kwargs.values()))
        return args, kwargs

    @staticmethod
    def _watch_inputs(engine: Engine, args: Args, kwargs: Kwargs) -> Args:
        """Hook the gradients of the inputs on the engine's device: the first one says that autograd has left this forward."""
        on, thread, reach = engine.comm_ctx.device.type, get_ident(), engine.reach
        for index, each in enumerate(args):
            # A leaf's gradient is accumulated as soon as it is there, whatever else is left of the graph; a view's is not.
            # Leaves elsewhere (keywords, containers) get none: a unit that has only those ends with the whole backward.
            if type(each) is torch.Tensor and each.requires_grad and each.is_leaf and each.layout is torch.strided:
                args = (*args[:index], each.view_as(each), *args[index + 1 :])
        for each in (*args, *kwargs.values()):
            for tensor in (each,) if isinstance(each, torch.Tensor) else tensors_in(each):
                if tensor.grad_fn is not None and tensor.device.type == on:
                    tensor.register_hook(functools.partial(reach, (thread, torch_private.node_number(tensor))))
        return args

    @dynamo_disabled
    def after_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Forward hook: reshard, hook the outputs for backward, cast the output.  It runs also if forward has raised."""
        unit = self._unit
        engine = unit.engine_side.engine_ref()
        conversion, begun = self._running.pop() if self._running else _NOTHING
        put_in = tensors_in(begun[0]) if begun[0] else []
        ends: list[tuple[torch.Tensor, int]] = []
        try:
            if conversion is not None:
                conversion.take_back()
            if torch.is_grad_enabled():
                ends, is_unseen = self._graph.ends(module, begun, output, put_in)
                for member in (unit, *unit.beside):
                    member.backward.is_unseen = is_unseen
            if engine is None:
                return output
            if engine.logs or innermost_transform() is not None or is_profiling():
                with _range("post_forward", unit.name, engine.logs):
                    has_output = engine.after_forward(unit, module)
            else:
                has_output = engine.after_forward(unit, module)
        except BaseException:
            if engine is not None:
                engine.drop_forward(unit)
            raise
        if not has_output:
            return output
        on, thread = engine.comm_ctx.device.type, get_ident()
        num_packs, begun_at = unit.memory.packs.count, unit.forward.begun_at
        for tensor, number in ends:
            place = thread, number if tensor.device.type == on else sys.maxsize
            pre_backward = functools.partial(self.before_backward, num_packs, begun_at, place)
            tensor.register_hook(pre_backward)
            # An in-place op on a view replaces the view's grad_fn and would lose the hook above; the grad_fn of its base stays.
            base = torch_private.base_of_view(tensor)
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(pre_backward)
        dtype = unit.settings.precision.output_dtype
        return output if dtype is None else Conversion(dtype, copies=True)(output)

    @dynamo_disabled
    def before_backward(self, num_packs: int, begun_at: Place, place: Place, *_: object) -> None:
        """Pre-backward hook, at the first gradient of an output.

        Args:
            num_packs, begun_at: of the unit, at the output's forward.
            place: of the node that has made the output.
        """
        engine = self._unit.engine_side.engine_ref()
        if engine is not None:
            if engine.logs or innermost_transform() is not None or is_profiling():
                with _range("pre_backward", self._unit.name, engine.logs):
                    engine.before_backward(self._unit, num_packs, begun_at, place)
            else:
                engine.before_backward(self._unit, num_packs, begun_at, place)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Hooks:
        result = memo[id(self)] = Hooks(copy.deepcopy(self._attachment, memo))
        return result


def keep_buffers_equal(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the buffers of the group's first rank before each forward of ``module``, as DDP does.

    A forward that follows one without gradients or without sync does not broadcast.  So the first forward of an evaluation
    uses the first rank's buffers, and later ones need no other rank.  Nor does one where ranks may take different ways.
    """
    calm = weakref.WeakSet[nn.Module]()  # modules, copies included, whose last forward had no gradients or no sync

    def before_forward(module: nn.Module, _: Any) -> None:
        attachment = attachment_of(module)
        if attachment is not None and (attachment.unit.settings.may_diverge or attachment.unit.engine_side.diverges):
            return  # other ranks may run no forward now
        if module not in calm:
            broadcast_from_first(list(module.buffers()), group)
        if torch.is_grad_enabled() and (attachment is None or attachment.unit.policy.sync):
            calm.discard(module)
        else:
            calm.add(module)

    module.register_forward_pre_hook(dynamo_disabled(before_forward))
    module.__dict__[SHARES_BUFFERS] = True


def wrap_forward_method(module: nn.Module, attachment: Attachment, name: str) -> None:
    """Replace method ``name`` of ``module`` by one that runs the forward hooks around it."""
    original: Callable[..., Any] = getattr(module, name)
    module_ref, hooks = weakref.ref(module), Hooks(attachment)

    @functools.wraps(original)
    def forward_method(*args: Any, **kwargs: Any) -> Any:
        owner = module_ref()
        assert owner is not None
        try:
            args, kwargs = hooks.before_forward(owner, args, kwargs)
            output = original(*args, **kwargs)
        except Exception:
            hooks.after_forward(owner, args, None)
            raise
        return hooks.after_forward(owner, args, output)

    setattr(module, name, forward_method)
    attachment.forward_methods[name] = None
