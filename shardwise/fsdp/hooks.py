"""The hooks that connect modules, their outputs and optimizers to an engine.  No other file of ``fsdp`` registers these."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise import observe, torch_private
from shardwise.collectives.owned import broadcast_from_first
from shardwise.consistency.liveness import refuse_forked
from shardwise.errors import ConfigError, StateError, UsageError
from shardwise.fsdp.attachment import Attachment, attachment_of, diverging, roots_to_come
from shardwise.fsdp.casting import Args, Conversion, Kwargs, can_grow, tensors_in
from shardwise.fsdp.engine import Engine, checked_optimizers, live_engines
from shardwise.fsdp.equal_values import SHARES_BUFFERS
from shardwise.fsdp.roots import live_engine
from shardwise.fsdp.unit import is_in_backward
from shardwise.observe import log_for_torch, logger
from shardwise.torch_private import beside_transforms, innermost_transform, is_profiling

# ---- The hooks on modules and outputs.

_NO_RANGE = nullcontext()
_warnings = logging.getLogger("shardwise")
_warned: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines with a warning about steps without any gradient


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
        """Reshard the unit: the pre-hook of ``load_state_dict``."""
        self._unit.reshard()

    def before_state_dict(self, *_: Any) -> None:
        """Reshard the unit, and move shards to the memory that they keep: a state dict shows every later step."""
        self._unit.reshard()
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
                engine = live_engine(attachment)
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
        if unit.begun_by == id(module) and (unit.holders == 1 or is_in_backward()) and innermost_transform() is None:
            args = self._watch_inputs(args, kwargs, engine.comm_ctx.device.type)
        growing: list[Any] = []
        for each in (*args, *kwargs.values()):  # a comprehension would be one more call
            if not isinstance(each, torch.Tensor) and can_grow(each):
                growing.append(each)
        held = {id(each): (each, each.grad_fn) for each in tensors_in(growing)} if growing else {}
        self._running[-1] = conversion, growing, held, torch_private.num_nodes_made()
        return args, kwargs

    def _watch_inputs(self, args: Args, kwargs: Kwargs, on: str) -> Args:
        """Hook the gradients of the inputs on device type ``on``: the first one says that autograd has left this forward.

        Autograd runs the nodes of a device in the opposite order of their creation, on a thread for each device.
        """
        for index, each in enumerate(args):
            # A leaf's gradient is accumulated as soon as it is there, whatever else is left of the graph; a view's is not.
            if type(each) is torch.Tensor and each.requires_grad and each.grad_fn is None:
                args = (*args[:index], each.view_as(each), *args[index + 1 :])
        for each in (*args, *kwargs.values()):
            for tensor in (each,) if isinstance(each, torch.Tensor) else tensors_in(each):
                if tensor.grad_fn is not None and tensor.device.type == on:
                    tensor.register_hook(self.leave_unit)
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
            pre_backward = functools.partial(self.before_backward, unit.num_packs)
            for tensor in watched:
                # Hooks of nodes run after those of tensors, so autograd leaves the unit that got this tensor first.
                if tensor.grad_fn is None:
                    tensor.register_hook(pre_backward)
                else:
                    tensor.grad_fn.register_prehook(pre_backward)
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
    def before_backward(self, num_packs: int, *_: object) -> None:
        """Pre-backward hook, at the first gradient of an output; ``num_packs``: that of the unit at the output's forward."""
        engine = self._unit.callbacks_ref()
        if isinstance(engine, Engine):
            if engine.logs or innermost_transform() is not None or is_profiling():
                with _range("pre_backward", self._unit.name, engine.logs):
                    engine.before_backward(self._unit, num_packs)
            else:
                engine.before_backward(self._unit, num_packs)

    @dynamo_disabled
    def leave_unit(self, _: object) -> None:
        """Post-backward hook, at the first gradient of an input."""
        engine = self._unit.callbacks_ref()
        if isinstance(engine, Engine) and self._unit.backward.is_running:
            engine.leave_unit(self._unit)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Hooks:
        result = memo[id(self)] = Hooks(copy.deepcopy(self._attachment, memo))
        return result


_watches: list[RemovableHandle] = []  # two entries, made by watch_optimizers alone


def watch_optimizers() -> None:
    """Install global optimizer hooks that reshard units and count steps as writes."""
    if not _watches:
        _watches.append(register_optimizer_step_pre_hook(before_optimizer_step))
        _watches.append(register_optimizer_step_post_hook(after_optimizer_step))


def before_optimizer_step(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Reshard units before the optimizer steps on their shards, so that writes to full parameters are copied first.

    Full parameters would be stale after the step, and gathered again in any case.

    Raises: StateError if gradients of these parameters wait for ``finalize_backward`` or for a backward with sync.
    """
    observe.note("optimizer steps", type(optimizer).__name__)
    if _key_of(optimizer) not in checked_optimizers:
        _check_forms(optimizer)
    serve_others([param for group in optimizer.param_groups for param in group["params"]])
    engines = [engine for engine in live_engines if engine.heeds_steps]
    stepped = _stepped(optimizer) if engines else set[int]()
    for engine in engines:
        engine.check_step(stepped)
        if engine.awaits_backward:
            _look_for_gradients(engine, stepped)
        if not engine.is_in_step:
            engine.reshard_stepped(stepped)


def shards_of(params: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return ``params``, whose gradients are clipped next; those of units that are unsharded as shards, which have these."""
    refuse_fixed_sums(params)
    serve_others(params)
    units = [unit for engine in live_engines for unit in engine.units if unit.has_copies]
    shards = {id(form): p.sharded for unit in units for p in unit.params for form in (p.full, p.registered_form)}
    return [shards.get(id(param), param) for param in params] if shards else params


def refuse_fixed_sums(params: Sequence[torch.Tensor]) -> None:
    """Raise UsageError if ``Reproducible`` sums the gradients of ``params``: the norm would be added in the order of ranks."""
    groups = [each for engine in live_engines for unit in engine.units for each in unit.groups if each.sums is not None]
    ids = {*map(id, params)} if groups else set[int]()
    for param in (param for group in groups for param in group.params):
        if not ids.isdisjoint(map(id, (param.sharded, param.full, param.registered_form))):
            raise UsageError(
                f"clip_grad_norm_: Reproducible sums the gradient of {param.fqn}, and this function adds norms in the order of "
                "ranks, so that the bits depend on their number. Call fixed.clip_grad_norm_ of the Reproducible object"
            )


def serve_others(params: Sequence[torch.Tensor]) -> None:
    """Serve the passes that other ranks still run, before gradients of ``params`` are read: they are not complete yet."""
    if not (roots_to_come or diverging):
        return
    ids = {*map(id, params)}
    for attachment in list(roots_to_come):
        if not ids.isdisjoint([id(param) for module in attachment.unit.modules for param in module.parameters()]):
            live_engine(attachment)  # other ranks run a first forward that this one does not run
    for engine in list(diverging):
        mine = [form for unit in engine.units for param in unit.params for form in (param.sharded, param.full)]
        if engine.divergence is not None and not ids.isdisjoint(map(id, mine)):
            engine.divergence.begin(None, ids)


def _stepped(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


# Optimizers of torch whose own step raises in DTensor, or is another update, over shards: what to write instead.
_IN_A_SHARDED_OPTIMIZER = "write shardwise.ShardedOptimizer(dict(model.named_parameters()), torch.optim.{}, ...)"
_NOT_OVER_SHARDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adafactor: f"it takes norms over whole matrices; {_IN_A_SHARDED_OPTIMIZER}",
    torch.optim.LBFGS: "its history takes inner products over all parameters; take another optimizer, or keep whole, plain "
    "parameters: shardwise.replicate(model, process_group=None)",
    torch.optim.Rprop: f"it writes to single elements, which DTensor refuses; {_IN_A_SHARDED_OPTIMIZER}",
}


def _key_of(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return what changes when an optimizer is another one or has got more parameters."""
    return id(optimizer), sum(len(group["params"]) for group in optimizer.param_groups)


def _check_forms(optimizer: torch.optim.Optimizer) -> None:
    key = _key_of(optimizer)
    stepped = _stepped(optimizer)
    kind = next((kind for kind in _NOT_OVER_SHARDS if isinstance(optimizer, kind)), None)
    unknown = {id(p) for group in optimizer.param_groups for p in group["params"] if kind and isinstance(p, DTensor)}
    early: list[str] = []
    for param in (param for engine in live_engines for unit in engine.units for param in unit.params):
        original = param.original()
        if original is not None and original is not param.sharded and id(original) in stepped:
            early.append(param.fqn)
        unknown.discard(id(param.sharded))
        placements = param.sharded.placements if isinstance(param.sharded, DTensor) else ()
        if kind is not None and id(param.sharded) in stepped and any(place.is_shard() for place in placements):
            reason = _NOT_OVER_SHARDS[kind].format(kind.__name__)
            raise ConfigError(f"{kind.__name__} cannot step on {param.fqn}, which is sharded: {reason}")
        forms = (each for each in (param.full, param.registered_form) if each is not param.sharded)
        if any(each is not None and id(each) in stepped for each in forms):
            raise StateError(
                f"an optimizer was given the full form of {param.fqn}, or its form on a smaller mesh: its steps would not "
                "reach the model. Build the optimizer before forward; after an interrupt call reset_iter_state()"
            )
    if early:
        raise StateError(
            f"an optimizer was built before fully_shard and holds the unsharded {early[:4]}{'...' if len(early) > 4 else ''}; "
            "its steps would not reach the model. Build the optimizer after fully_shard."
        )
    if not unknown:  # else the closure runs the first forward: it is checked after the step
        checked_optimizers[key] = weakref.ref(optimizer, lambda _: checked_optimizers.pop(key, None))


def _look_for_gradients(engine: Engine, stepped: set[int]) -> None:
    """Warn of an optimizer step on parameters without any gradient, after a forward whose backward did not run."""
    params = [param for unit in engine.units for param in unit.params if id(param.sharded) in stepped]
    trained = [param for param in params if param.sharded.requires_grad]
    engine.awaits_backward = False
    if trained and engine not in _warned and all(param.sharded.grad is None for param in trained):
        _warned.add(engine)
        _warnings.warning(
            "an optimizer steps on %s and %d other sharded parameters, none of which has a gradient, although a forward has "
            "built a graph. backward(inputs=...) and torch.autograd.grad do not find them: call backward() without inputs",
            trained[0].fqn,
            len(trained) - 1,
        )


def after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Bump the version counters of shards after a step: torch's multi-tensor and fused steps do not."""
    if _key_of(optimizer) not in checked_optimizers:
        _check_forms(optimizer)
    written = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    if written:
        torch.autograd.graph.increment_version(written)


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
