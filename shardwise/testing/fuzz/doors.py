"""Which contenders can carry out which case.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardwise.testing.fuzz import actions as do
from shardwise.testing.fuzz.case import Case, Contender, Node
from shardwise.testing.fuzz.optims import OPTIMIZERS

ENGINE_DOORS = ("fully_shard", "shard_model", "replicate", "replicate_older", "torch_fully_shard")
SHARDING_DOORS = ("fully_shard", "shard_model", "torch_fully_shard")
OVERLAP_DOORS = ("overlap", "interleaved")
DOORS = (*ENGINE_DOORS, "ddp", "zero1", "zero2", "torch_zero", *OVERLAP_DOORS)
TRANSPORTS = ("auto", "gloo", "collective")

OURS: tuple[Contender, ...] = (
    *(Contender("fully_shard", transport) for transport in TRANSPORTS),
    Contender("fully_shard", update="sharded"),
    Contender("shard_model"),
    Contender("shard_model", "gloo"),
    Contender("shard_model", update="sharded"),
    Contender("replicate"),
    Contender("replicate", update="sharded"),
    Contender("replicate_older"),
    *(Contender(door, update=update) for door in ("zero1", "zero2") for update in ("whole", "even")),
    *(
        Contender(door, update=update)
        for door in OVERLAP_DOORS
        for update in ("whole", "even", "whole-owner", "even-owner")
    ),
)


def is_ours(contender: Contender) -> bool:
    """True for what is compared, False for what it is compared with."""
    return contender.door not in ("torch_fully_shard", "ddp", "torch_zero")


def is_engines(contender: Contender) -> bool:
    """True for doors of the engine: whatever they raise is their own."""
    return contender.door in ENGINE_DOORS


def peer_of(contender: Contender) -> Contender:
    """Return torch's own class that does what ``contender`` does."""
    return Contender("torch_fully_shard" if is_engines(contender) else "ddp")


def suits(case: Case, contender: Contender) -> bool:
    """True if ``contender`` can be asked to carry out ``case``: it has the methods, and ``.grad`` means the same."""
    settings, door = case.settings, contender.door
    has_policy = bool(settings.compute or settings.reduce or settings.offload)
    if settings.mesh != "flat" and door not in SHARDING_DOORS:
        return False
    if door == "torch_fully_shard" and any(isinstance(each, do.Clip) and each.how == "inf" for each in case.actions):
        return False  # torch's clipping cannot take the largest of an empty shard: one rank raises, the others wait
    if settings.sync_buffers and door not in ("replicate_older", "ddp", "zero1", "torch_zero"):
        return False
    if has_policy and (not is_engines(contender) or door == "replicate_older"):
        return False
    if OPTIMIZERS[settings.optim.name].is_whole_matrix and (
        contender.update.startswith("even") or (door in SHARDING_DOORS and not contender.update)
    ):
        return False
    if door == "shard_model" and any(_names_a_unit(action) for action in case.actions):
        return False
    if is_engines(contender):
        defers = any(isinstance(action, do.Set) and action.method == "requires_all_reduce" for action in case.actions)
        return not (defers and door in ("replicate", "replicate_older"))  # there, it would hold everything back
    return _suits_whole(case.actions) and (
        _suits_owners(case.actions) if door == "zero2" else _suits_ddp(case, door in OVERLAP_DOORS)
    )


def _names_a_unit(action: do.Action) -> bool:
    if isinstance(action, do.Set):
        return not (action.recurse and action.unit == -1) or action.method == "gradient_divide_factor"
    return action.is_engines and hasattr(action, "unit")


def _suits_whole(actions: Sequence[do.Action]) -> bool:
    """True for doors without units: nothing asks for one, nor for gradients that are only held or lie elsewhere."""
    holds = pending = False
    for action in actions:
        if action.is_engines or isinstance(action, do.ChangeKept):
            return False
        if isinstance(action, (do.Take, do.Copy)) and action.what in ("optim", "grads"):
            return False
        if isinstance(action, do.Set):
            holds = not action.value
        elif isinstance(action, do.Backward):
            pending = holds
        elif pending and not isinstance(action, (do.Forward, do.Rate)):
            return False  # DDP and ZeRO-2 show held gradients in ``.grad``
    return not holds


def _suits_owners(actions: Sequence[do.Action]) -> bool:
    """True for gradients that lie on their owners alone after a step: no backward adds to them."""
    is_reduced = False
    for action in actions:
        if isinstance(action, (do.Step, do.Clip)):
            is_reduced = True
        elif isinstance(action, do.ZeroGrad):
            is_reduced = is_reduced and not action.to_none
        elif isinstance(action, do.Backward) and is_reduced:
            return False
    return True


def _suits_ddp(case: Case, overlaps: bool) -> bool:
    """True for what DDP takes: forward and backward in turns, the same trainable parameters, nothing recomputed."""
    alive = 0
    for action in case.actions:
        if isinstance(action, do.Freeze) or (isinstance(action, do.Change) and action.how == "assign"):
            return False
        if isinstance(action, do.Forward) and action.mode in ("train", "eval"):
            alive += 1
        elif isinstance(action, do.Backward):
            if action.retain or action.together or not alive:
                return False
            alive -= 1
        elif isinstance(action, do.Step) and action.closure and alive:
            return False
        if alive > 1:
            return False
    if alive or _recomputes(case.model.root):
        return False
    return not overlaps or (_steps_in_backward(case.actions) and uses_all(case.model.root))


def _steps_in_backward(actions: Sequence[do.Action]) -> bool:
    """True if each backward is followed by its step, and nothing could tell that the step was made before."""
    allowed = (do.Forward, do.Backward, do.Step, do.ZeroGrad, do.Rate)
    if any(not isinstance(action, allowed) for action in actions):
        return False
    order = (do.Forward, do.Backward, do.Step)
    turns = [action for action in actions if isinstance(action, order)]
    for number, action in enumerate(turns):
        if type(action) is not order[number % 3]:
            return False
        if getattr(action, "mode", "train") != "train" or getattr(action, "closure", False):
            return False
    rates = [type(left) for left, right in pairwise(actions) if isinstance(right, do.Rate)]
    return do.Backward not in rates


def uses_all(node: Node) -> bool:
    """True if a forward uses every parameter and all are trainable."""
    if node.frozen or node.kind == "Gate" or any(part in node.form for part in ("unused", "frozen", "empty")):
        return False
    used = {number for segment in node.segments for number in segment.children}
    if node.kind == "Stack" and used != set(range(len(node.children))):
        return False
    return all(uses_all(child) for child in node.children)


def _recomputes(node: Node) -> bool:
    return any(segment.recompute for segment in node.segments) or any(_recomputes(child) for child in node.children)
