"""The hooks that connect modules and their outputs to an engine.  No other file of ``fsdp`` registers these."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.collectives.owned import broadcast_from_first
from shardwise.consistency.liveness import refuse_forked
from shardwise.containers import Args, Conversion, Kwargs, can_grow, tensors_in
from shardwise.fsdp.attachment import Attachment, attachment_of
from shardwise.fsdp.backward import Place
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.equal_values import SHARES_BUFFERS
from shardwise.fsdp.roots import live_engine
from shardwise.fsdp.unit import is_in_backward
from shardwise.observe import log_for_torch, logger
from shardwise.torch_private import beside_transforms, innermost_transform, is_profiling

# ---- The hooks on modules and outputs.

_NO_RANGE = nullcontext()

_WHY_NO_GRAPH = (
    "shardwise gathers parameters and reduces gradients between graphs, where a unit begins and ends. With fullgraph=True "
    "compile each unit by itself: for block in model.blocks: block.compile(fullgraph=True)"
)


def dynamo_disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` after excluding it from the graphs of torch.compile; it does not change otherwise."""
    torch_private.skip_frames(function, _WHY_NO_GRAPH)
    return function


def _range(what: str, unit: str, logs: bool) -> AbstractContextManager[object]:
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


# Of a forward that runs: the conversion of its arguments, those arguments that it may put tensors into, the tensors that these
# held before with their nodes, and how many nodes this thread had made.
_Held = dict[int, tuple[torch.Tensor, torch.autograd.graph.Node | None]]
_Running = tuple[Conversion | None, list[Any], _Held, int]

_NOTHING: _Running = None, [], {}, 0
_MOST_SIZES = 32  # graphs of other sizes are not searched: modules whose every graph differs would pay in every step


class Hooks:
    """The hooks on the modules of one attachment, and what they note of the forwards that run now."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._unit = attachment.unit
        self._running: list[_Running] = []
        self._sizes: set[int] = set()  # numbers of graph nodes of the forwards after which attributes were searched
        self._keepers: list[tuple[weakref.ref[nn.Module], str]] = []  # attributes that had a tensor of the graph then

    def install(self) -> None:
        """Register the forward hooks on the unit's modules, and those of state dicts on all that own a parameter."""
        for module in self._unit.modules:
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, prepend=False, always_call=True)
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

        for group in unit.groups:
            if group.keeps_plain:
                unit.heard_by = engine_for_first_gradient
                unit.listen()

    def reshard_for_state_dict(self, module: nn.Module) -> None:
        """Reshard the unit before the state dict of ``module`` is taken or loaded."""
        module.register_state_dict_pre_hook(self.before_state_dict)
        module.register_load_state_dict_pre_hook(self.before_load)

    def before_load(self, *_: Any) -> None:
        """Reshard the unit, and those with tied parameters: the pre-hook of ``load_state_dict``."""
        for unit in (self._unit, *self._unit.tied_units):
            unit.reshard()

    def before_state_dict(self, *_: Any) -> None:
        """Reshard the unit, and move shards to the memory that they keep: a state dict shows every later step."""
        self.before_load()
        engine = self._unit.callbacks_ref()
        for group in () if isinstance(engine, Engine) and engine.is_in_step else self._unit.groups:
            group.ensure_packed()

    @dynamo_disabled
    def before_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Pre-forward hook: wait for full parameters, move inputs to the device and cast them to the compute dtype.

        It runs once per module and step, so it enters contexts only if a log, a profiler or a transform needs one.
        """
        attachment, unit = self._attachment, self._unit
        # Before the first forward a unit may have a provisional engine (``unshard``), which ``live_engine`` replaces.
        callbacks = unit.callbacks_ref()
        engine = callbacks if isinstance(callbacks, Engine) and attachment.is_root is not None else None
        if attachment.is_root is not False:
            refuse_forked()  # the root, or a module that may become it: inner ones run inside of its forward
        if attachment.asked_sync is not None and torch.is_grad_enabled() and not is_in_backward():
            cast(Any, module).set_requires_gradient_sync(attachment.asked_sync)
        if engine is None:
            with _NO_RANGE if innermost_transform() is None else beside_transforms():
                engine = live_engine(attachment, in_forward=True)
        while self._running and not unit.holders and not is_in_backward():
            conversion = self._running.pop()[0]  # an interrupt has ended this forward without the forward hooks
            if conversion is not None:
                conversion.take_back()
        precision, device, conversion = unit.precision, None, None
        # Only the inputs of the outermost forward come from user code, perhaps on another device.
        if not engine.forwards:
            engine.logs = logger.isEnabledFor(logging.DEBUG)
            device = None if engine.comm_ctx.device.type == "cpu" else engine.comm_ctx.device
        dtype = precision.param_dtype if precision.cast_forward_inputs else None
        if not (dtype is device is None):
            conversion = Conversion(dtype, device)
            args, kwargs = conversion.arguments(args, kwargs)
        self._running.append((conversion, [], {}, sys.maxsize))  # ``after_forward`` runs also if this raises
        if engine.logs or innermost_transform() is not None or is_profiling():
            with _range("pre_forward", unit.name, engine.logs):
                engine.before_forward(unit, module)
        else:
            engine.before_forward(unit, module)
        if not torch.is_grad_enabled():
            return args, kwargs
        # Autograd leaves the unit last where it leaves the module whose forward came first; a checkpoint recomputes that last.
        if unit.begun_by == id(module) and (unit.holders == 1 or is_in_backward()):
            if innermost_transform() is None:
                args = self._watch_inputs(args, kwargs, engine.comm_ctx.device.type)
            unit.begun_at = get_ident(), torch_private.num_nodes_made()
        growing: list[Any] = []
        for each in (*args, *kwargs.values()):  # a comprehension would be one more call
            if not isinstance(each, torch.Tensor) and can_grow(each):
                growing.append(each)
        held = {id(each): (each, each.grad_fn) for each in tensors_in(growing)} if growing else {}
        self._running[-1] = conversion, growing, held, torch_private.num_nodes_made()
        return args, kwargs

    def _watch_inputs(self, args: Args, kwargs: Kwargs, on: str) -> Args:
        """Hook the gradients of the inputs on device type ``on``: the first one says that autograd has left this forward."""
        thread = get_ident()
        for index, each in enumerate(args):
            # A leaf's gradient is accumulated as soon as it is there, whatever else is left of the graph; a view's is not.
            if (
                type(each) is torch.Tensor
                and each.requires_grad
                and each.grad_fn is None
                and each.layout is torch.strided
            ):
                args = (*args[:index], each.view_as(each), *args[index + 1 :])
        for each in (*args, *kwargs.values()):
            for tensor in (each,) if isinstance(each, torch.Tensor) else tensors_in(each):
                if tensor.grad_fn is not None and tensor.device.type == on:
                    tensor.register_hook(functools.partial(self.reach, (thread, torch_private.node_number(tensor))))
        return args

    @dynamo_disabled
    def after_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Forward hook: reshard, hook the outputs for backward, cast the output.  It runs also if forward has raised."""
        unit, returned = self._unit, output
        engine = unit.callbacks_ref()
        conversion, growing, held, num_nodes = self._running.pop() if self._running else _NOTHING
        put_in = tensors_in(growing) if growing else []  # before the caller's tensors are in the containers again
        if conversion is not None:
            conversion.take_back()
        watched: list[torch.Tensor] = []
        if builds_graph := torch.is_grad_enabled():
            if isinstance(returned, torch.Tensor) and innermost_transform() is None:
                watched = [returned] if returned.requires_grad else []
            else:
                watched = self._outputs_in_graph(returned)
            num_made = torch_private.num_nodes_made() - num_nodes
            if num_made and num_made not in self._sizes and len(self._sizes) < _MOST_SIZES:
                self._search(module, num_nodes, num_made)
            if self._keepers:
                watched += self._kept(watched, num_nodes)
            # What was there before this forward, leaves included, is not of its graph.
            numbers = [*map(torch_private.node_number, watched)]
            if numbers and min(numbers) < num_nodes:
                watched = [each for each, number in zip(watched, numbers, strict=True) if number >= num_nodes]
            unit.backward.is_unseen = not watched and num_made > 0
            if put_in:  # what the module has put into its arguments leaves it, too
                ids = {*map(id, watched)}
                added = [each for each in put_in if each.requires_grad and id(each) not in ids]
                watched += [each for each in added if held.get(id(each)) != (each, each.grad_fn)]
        if not isinstance(engine, Engine):
            return output
        if engine.logs or innermost_transform() is not None or is_profiling():
            with _range("post_forward", unit.name, engine.logs):
                has_output = engine.after_forward(unit, module)
        else:
            has_output = engine.after_forward(unit, module)
        if not has_output:
            return output
        if builds_graph:
            on, thread = engine.comm_ctx.device.type, get_ident()
            for tensor in watched:
                # This also regenerates the grad_fn of a view that is out of date: register_hook would crash.
                number = torch_private.node_number(tensor) if tensor.device.type == on else sys.maxsize
                pre_backward = functools.partial(self.before_backward, unit.num_packs, unit.begun_at, (thread, number))
                tensor.register_hook(pre_backward)
                # An in-place op on a view replaces the view's grad_fn and would lose the hook above; the grad_fn of its base
                # stays.
                base = torch_private.base_of_view(tensor)
                if base is not None and base.grad_fn is not None:
                    base.grad_fn.register_prehook(pre_backward)
        dtype = unit.precision.output_dtype
        return output if dtype is None else Conversion(dtype, copies=True)(output)

    def _search(self, module: nn.Module, num_nodes: int, num_made: int) -> None:
        """Note which attributes of the modules of ``module`` keep tensors of its forward, such as auxiliary losses."""
        self._sizes.add(num_made)
        todo = [module]
        for each in todo:
            todo += [child for child in each.children() if attachment_of(child) is None]
            for name, value in each.__dict__.items():
                place, numbers = (weakref.ref(each), name), map(torch_private.node_number, tensors_in(value))
                if place not in self._keepers and max(numbers, default=-1) >= num_nodes:
                    self._keepers.append(place)

    def _kept(self, known: list[torch.Tensor], num_nodes: int) -> list[torch.Tensor]:
        """Return tensors of this forward, other than ``known``, in attributes: a backward may reach them before the output."""
        ids = {*map(id, known)}
        values = [owner.__dict__.get(name) for ref, name in self._keepers if (owner := ref()) is not None]
        found = {id(each): each for each in tensors_in(values) if torch_private.node_number(each) >= num_nodes}
        return [each for number, each in found.items() if number not in ids]

    def _outputs_in_graph(self, returned: Any) -> list[torch.Tensor]:
        found = tensors_in(returned) or tensors_in(returned, everywhere=True)
        if innermost_transform() is not None:
            found = [each for tensor in found for each in torch_private.graphs_of(tensor)]
        return [each for each in found if each.requires_grad]

    @dynamo_disabled
    def before_backward(self, num_packs: int, begun_at: Place, place: Place, *_: object) -> None:
        """Pre-backward hook, at the first gradient of an output.

        Args:
            num_packs, begun_at: of the unit, at the output's forward.
            place: of the node that has made the output.
        """
        engine = self._unit.callbacks_ref()
        if isinstance(engine, Engine):
            if engine.logs or innermost_transform() is not None or is_profiling():
                with _range("pre_backward", self._unit.name, engine.logs):
                    engine.reach(place)
                    engine.before_backward(self._unit, num_packs, begun_at)
            else:
                engine.reach(place)
                engine.before_backward(self._unit, num_packs, begun_at)

    @dynamo_disabled
    def reach(self, place: Place, _: object) -> None:
        """Post-backward hook, at the first gradient of an input; ``place``: of the node that has made the input."""
        engine = self._unit.callbacks_ref()
        if isinstance(engine, Engine):
            engine.reach(place)

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
        if attachment is not None and (attachment.unit.may_diverge or attachment.unit.diverges):
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
        args, kwargs = hooks.before_forward(owner, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except Exception:
            hooks.after_forward(owner, args, None)
            raise
        return hooks.after_forward(owner, args, output)

    setattr(module, name, forward_method)
    if name not in attachment.forward_methods:
        attachment.forward_methods.append(name)
