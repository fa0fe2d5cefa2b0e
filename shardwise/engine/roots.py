"""Roots: at the first forward the module that runs it owns the engine of all units below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shardwise.engine.attachment import Attachment, attachment_of
from shardwise.engine.engine import Engine, engine_of
from shardwise.engine.optimizers import check_optimizers
from shardwise.engine.outside import ModificationChecks
from shardwise.engine.replicas import compare_beginnings
from shardwise.engine.unwritten import check_values
from shardwise.engine.wiring import new_engine
from shardwise.errors import StateError
from shardwise.plan.naming import compress_paths
from shardwise.units.precision import CPUOffloadPolicy
from shardwise.units.unit import Unit


def live_engine(attachment: Attachment) -> Engine:
    """Return the engine of ``attachment``'s root: at the first forward the module that runs it becomes the root.

    Raises: RuntimeError if an inner unit has been a root before, or the root unit has several modules, or parameters
        are still on meta or not where the offload policy wants them.
    """
    engine = engine_of(attachment.unit)
    return _become_root(attachment) if engine is None or attachment.is_root is None else engine


def provisional_engine(attachment: Attachment) -> Engine:
    """Return an engine for calls before the first forward (``unshard``); the root takes its units over later."""
    engine = engine_of(attachment.unit)
    if engine is None:
        engine = attachment.engine = new_engine([attachment.unit])
    return engine


def copy_settings(old: Attachment, new: Attachment) -> None:
    """Let the engine of a copied module go on by the rules that the user gave the old one's; nothing of a step is copied."""
    if old.engine is not None and (old.engine.manual.is_on or not old.engine.is_last_backward):
        engine = provisional_engine(new)
        engine.is_last_backward = old.engine.is_last_backward
        engine.manual.inherit(old.engine.manual)


def _become_root(attachment: Attachment) -> Engine:
    modules = list(attachment.unit.modules)
    if len(modules) > 1:
        raise StateError(f"FSDP requires a single root module but got {tuple(modules)}")
    root = modules[0]
    attachments = _attachments_in(root, attachment)
    for inner in attachments[1:]:
        if inner.is_root is not None and engine_of(inner.unit) is not None:
            raise StateError(
                f"FSDP state has already been lazily initialized for {inner.unit.name or _path_in(root, inner)}\n"
                "FSDP requires running forward through the root module first: this module already ran, alone or below another "
                "root, and belongs to that. Run the outermost module first. If two models share this module (an actor and a "
                "critic with one trunk), call fully_shard on their parts, not on the two models, or on one module whose "
                "forward runs both"
            )
    _name_units(root, attachments)
    _check_materialized(attachments)
    check_optimizers(param for each in attachments for param in each.unit.params)
    if attachment.unit.uses_default_reshard:
        attachment.unit.policy = replace(attachment.unit.policy, reshard_after_forward=False)
    _give_to_readers(root, attachment.unit)
    outside = ModificationChecks(root, attachments)
    engine = new_engine([each.unit for each in attachments])
    engine.outside = outside
    check_values(root, attachments, engine.journal.bulletin, engine.journal.position())
    if engine.journal.bulletin is not None:
        compare_beginnings(engine.units, engine.journal.bulletin, engine.journal.position())
    for inner in attachments:
        if inner.engine is not None:
            if inner.engine.manual.is_on and inner is not attachment:
                raise StateError(
                    "set_manual_backward_finalization must be called on the root FSDP module; it was called on "
                    f"{inner.unit.name or _path_in(root, inner)}"
                )
            _inherit(engine, inner.engine)
        inner.is_root, inner.engine = False, None
    attachment.is_root, attachment.engine = True, engine
    return engine


def _give_to_readers(module: nn.Module, unit: Unit) -> None:
    """Unshard units together with the unit of a module that reads their parameters without calling their modules."""
    own = attachment_of(module)
    unit = unit if own is None else own.unit
    read = attachment_of(module.out_proj) if isinstance(module, nn.MultiheadAttention) else None
    if read is not None and read.unit is not unit:
        unit.borrow(read.unit)
    for child in module.children():
        _give_to_readers(child, unit)


def _inherit(engine: Engine, old: Engine) -> None:
    engine.is_last_backward = engine.is_last_backward and old.is_last_backward
    engine.manual.inherit(old.manual)
    engine.post_optim_event = engine.post_optim_event or old.post_optim_event


def _attachments_in(root: nn.Module, first: Attachment) -> list[Attachment]:
    found = {id(first): first}
    for module in root.modules():
        each = attachment_of(module)
        if each is not None:
            found.setdefault(id(each), each)
    return list(found.values())


def _path_in(root: nn.Module, attachment: Attachment) -> str:
    inner = attachment.unit.modules
    return ", ".join(name for name, module in root.named_modules() if module in inner)


def _name_units(root: nn.Module, attachments: Sequence[Attachment]) -> None:
    names: dict[int, list[str]] = {}
    for name, module in root.named_modules():
        each = attachment_of(module)
        if each is not None:
            names.setdefault(id(each), []).append(name)
    paths = {id(param): name for name, param in root.named_parameters()}
    for each in attachments:
        each.unit.name = compress_paths(names.get(id(each), [""]))
        for param in each.unit.params:
            param.fqn = paths.get(id(param.sharded), param.fqn)


def _check_materialized(attachments: Sequence[Attachment]) -> None:
    for each in attachments:
        for param in each.unit.params:
            param.check_places()
            if len(param.slots) > 1:
                param.check_ties()
            param.adopt_registered()
    on_meta = [p.fqn for each in attachments for p in each.unit.params if p.sharded.device.type == "meta"]
    if on_meta:
        raise StateError(
            "Call shardwise.init_parameters(model), which gives parameters memory and values, or to_empty() and load a "
            "checkpoint. FSDP parameters should be materialized from meta device before training, but the following were still "
            f"on meta device: {on_meta}"
        )
    misplaced = [
        (p.fqn, p.local.device)
        for each in attachments
        for group in each.unit.groups
        if isinstance(group.place.offload, CPUOffloadPolicy)
        for p in group.params
        if p.local.device.type != "cpu"
    ]
    if misplaced:
        raise StateError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a CPU state "
            f"dict or call module.to_empty(device='cpu'). Found following parameters on non-CPU device: {misplaced}\n"
        )
