"""Which contenders can carry out which case.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from fuzz import actions as do
from fuzz.case import Case, Contender
from fuzz.losses import OF_WEIGHTS
from fuzz.nodes import calls_twice, has_matrices, places, recomputes, rows_of_codes, trains, uses_all
from fuzz.optims import OPTIMIZERS

ENGINE_APIS = ("fully_shard", "shard_model", "replicate", "replicate_older", "within_replicate", "torch_fully_shard")
SHARDING_APIS = ("fully_shard", "shard_model", "torch_fully_shard")
OVERLAP_APIS = ("overlap", "interleaved")
APIS = (*ENGINE_APIS, "ddp", "zero1", "zero_alone", "torch_zero", *OVERLAP_APIS)
HOLDING = ("requires_gradient_sync", "requires_all_reduce", "is_last_backward")
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
    Contender("within_replicate"),
    *(Contender(api, update=update) for api in ("zero1", "zero_alone") for update in ("whole", "even")),
    *(Contender(api, update=update) for api in OVERLAP_APIS for update in ("whole", "even")),
)
# Contenders of the area "offload" alone.
OFFLOADED = tuple(Contender(api, update="offloaded") for api in ("fully_shard", "shard_model", "replicate"))


def is_ours(contender: Contender) -> bool:
    """True for what is compared, False for what it is compared with."""
    return contender.api not in ("torch_fully_shard", "ddp", "torch_zero")


def is_engines(contender: Contender) -> bool:
    """True for APIs of the engine: whatever they raise is their own."""
    return contender.api in ENGINE_APIS


def peer_of(contender: Contender) -> Contender:
    """Return torch's own class that does what ``contender`` does."""
    return Contender("torch_fully_shard" if is_engines(contender) else "ddp")


def suits(case: Case, contender: Contender) -> bool:
    """True if ``contender`` can be asked to carry out ``case``: it has the methods, and ``.grad`` means the same."""
    return all(rule(case, contender) for rule in RULES)


def _has_mesh(case: Case, contender: Contender) -> bool:
    return case.settings.mesh == "flat" or contender.api in SHARDING_APIS


def _has_policies(case: Case, contender: Contender) -> bool:
    settings = case.settings
    asks = bool(settings.compute or settings.reduce or settings.output or settings.offload)
    if settings.columns and contender.api not in SHARDING_APIS:
        return False
    return not asks or (is_engines(contender) and contender.api != "replicate_older")


def _keeps_sums(case: Case, contender: Contender) -> bool:
    """Whoever keeps ``.grad`` of plain parameters sees this rank's own sums in it while they are held back.

    So they take no other divisor.
    """
    takes = any(isinstance(each, (do.Take, do.Copy)) and each.what == "grads" for each in case.actions)
    holds = any(isinstance(each, do.Set) and each.method in HOLDING for each in case.actions)
    divides = any(isinstance(each, do.Set) and each.method == "gradient_divide_factor" for each in case.actions)
    return contender.api != "replicate_older" or not (divides or (takes and holds))


def _follows_steps(case: Case, contender: Contender) -> bool:
    """Step counts that a sharded optimizer returns are copies, which later steps leave as they are."""
    takes = any(isinstance(each, do.Take) and each.what == "optim" for each in case.actions)
    counts = not OPTIMIZERS[case.settings.optim.name].is_exact
    return not (takes and counts and contender.update in ("sharded", "offloaded"))


def _has_whole_matrices(case: Case, contender: Contender) -> bool:
    """Some optimizers cannot work on shards."""
    kind = OPTIMIZERS[case.settings.optim.name]
    is_bare = contender.api in SHARDING_APIS and not contender.update
    if kind.is_block_wise:  # pieces of ZeRO it is given, or refused for
        return not is_bare
    return not kind.is_whole_matrix or not (is_bare or contender.update.startswith("even"))


def _averages(case: Case, contender: Contender) -> bool:
    """ZeRO alone takes what a closure has made as torch's class does; what else is not averaged its step refuses by name.

    Before that torch's own clipping tells the norm of one rank's gradients, which nobody of ours sees.  It compares in the
    first step alone, where the few whole numbers of oddments may happen to be the same on all ranks.  DDP averages nothing
    any more once a conversion has replaced what its hooks hang on.
    """
    closes = any(isinstance(action, do.Step) and action.closure for action in case.actions)
    clips = any(isinstance(action, do.Clip) for action in case.actions)
    converts = any(isinstance(action, do.Change) and action.how == "convert" for action in case.actions)
    if contender.api != "zero_alone":
        return not (contender.api == "zero1" and closes and converts)
    return not (closes or clips) and has_matrices(case.model.root)


def _hooks_gradients(case: Case, contender: Contender) -> bool:
    """torch's own class does not call hooks on the gradients of sharded parameters; DDP calls them before it averages.

    Parameters that stay plain have every backward's own gradient hooked, held back or not; a shard the sum of those.
    """
    hooks = bool(case.settings.hooks) or any(isinstance(action, do.HookGradient) for action in case.actions)
    if not hooks or contender.api in ("fully_shard", "shard_model"):
        return True
    holds = any(isinstance(action, do.Set) and action.method in HOLDING for action in case.actions)
    return contender.api in ("replicate", "replicate_older") and not holds


def _is_compiled(case: Case, contender: Contender) -> bool:
    return not case.settings.compiled or contender.api in ENGINE_APIS


def _syncs_buffers(case: Case, contender: Contender) -> bool:
    """A unit that is called twice in a forward takes the buffers twice, where DDP around the whole does so once."""
    if not case.settings.sync_buffers:
        return True
    if contender.api == "replicate_older":
        held = [
            action
            for action in case.actions
            if isinstance(action, do.Set) and action.method == "requires_gradient_sync"
        ]
        return not calls_twice(case.model.root) and all(each.recurse and each.unit == -1 for each in held)
    return contender.api in ("ddp", "zero1", "torch_zero")


def _notices_data(case: Case, contender: Contender) -> bool:
    """DTensors ignore what is assigned to their ``.data``, torch's own parameters too; compiled graphs save no views of it."""
    assigns = any(isinstance(action, do.Change) and action.how == "data_set" for action in case.actions)
    return not assigns or not (case.settings.compiled or contender.api in (*SHARDING_APIS, "replicate"))


def _takes_strides(case: Case, contender: Contender) -> bool:
    """torch's FSDP2 refuses a shard that is put in place and is not contiguous."""
    lays = any(isinstance(action, do.Change) and action.how == "lay" for action in case.actions)
    return not lays or contender.api != "torch_fully_shard"


def _joins(case: Case, contender: Contender) -> bool:
    """In ``Join`` DDP takes the buffers of the last rank that has inputs, which the reference does not follow."""
    joins = any(isinstance(action, do.JoinLoop) for action in case.actions)
    if joins and (_joins_with_gradients(case.actions) or _holds_gradients(case.actions)):
        return False
    return not joins or (
        not case.settings.sync_buffers and contender.api in ("ddp", "zero1", "torch_zero", *OVERLAP_APIS)
    )


def _holds_gradients(actions: Sequence[do.Action]) -> bool:
    """True if gradients are held back: DDP shows each rank's own, as ours do then; but it cannot excuse them after a loop in
    ``Join``, in which the plain optimizer of a rank without inputs makes no steps.
    """
    return any(isinstance(action, do.Set) and action.method == "requires_gradient_sync" for action in actions)


def _joins_with_gradients(actions: Sequence[do.Action]) -> bool:
    """True if gradients are left when a loop in ``Join`` begins: DDP halves them where a rank has no inputs."""
    has_gradients = False
    for action in actions:
        if isinstance(action, do.JoinLoop) and has_gradients:
            return True
        has_gradients = isinstance(action, (do.Backward, do.Step)) or (
            has_gradients and not (isinstance(action, do.ZeroGrad) and action.to_none)
        )
        if isinstance(action, do.Step) and not action.closure:
            has_gradients = True
    return False


def _has_units(case: Case, contender: Contender) -> bool:
    """Units that ``shard_model`` has chosen are not those that actions name."""
    return contender.api != "shard_model" or not any(_names_a_unit(action) for action in case.actions)


def _defers_alike(case: Case, contender: Contender) -> bool:
    """Without an all-reduce, replicas of the whole model would hold everything back; of some units, those alone."""
    defers = any(isinstance(action, do.Set) and action.method == "requires_all_reduce" for action in case.actions)
    mixes = any(own.other_api or own.flat for own in case.settings.own)
    return not defers or not (mixes or contender.api in ("replicate", "replicate_older"))


def _has_own(case: Case, contender: Contender) -> bool:
    """What a unit has for itself is for APIs that are called per unit."""
    return not case.settings.own or contender.api in ("fully_shard", "replicate", "torch_fully_shard")


def _ignores(case: Case, contender: Contender) -> bool:
    """Parameters are ignored, or on meta, where the engine's newer APIs shard the model; some take the first rank's values."""
    # Ranks that begin apart are an error where they would train different models; slices of several are one model.
    apis = {"": None, "synced": ("fully_shard", "shard_model"), "named": ("zero1",)}[case.settings.apart]
    if apis is not None and contender.api not in apis:
        return False
    asks = case.settings.ignored or case.settings.meta
    return not asks or contender.api in ("fully_shard", "shard_model", "replicate", "torch_fully_shard")


def _wraps(case: Case, contender: Contender) -> bool:
    """torch's ``replicate`` around units wants what DDP wants, and what it holds itself has the API of no unit."""
    if contender.api != "within_replicate":
        return True
    holds = any(
        isinstance(action, (do.Set, do.Change, do.Take, do.Copy)) or action.is_engines for action in case.actions
    )
    inner = [place for unit in case.model.units for place in unit if place]
    leaves = [(place, node) for place, node in places(case.model.root) if not node.children and trains(node)]
    left = any(all(place[: len(unit)] != unit for unit in inner) for place, _ in leaves)
    return left and not (holds or case.settings.own) and _suits_ddp(case, False)


def _torch_is_right(case: Case, contender: Contender) -> bool:
    """Leave out what torch's class trains wrongly in silence: that is no excuse for ours."""
    takes_weights = any(isinstance(action, do.LossOf) and action.form in OF_WEIGHTS for action in case.actions)
    return contender.api != "torch_fully_shard" or not (takes_weights or case.settings.apart)


def _torch_can(case: Case, contender: Contender) -> bool:
    """Leave out what would make one rank of torch's class raise and the others wait.

    Its clipping cannot take the largest value of an empty shard; it slices uneven shards of subclasses that cannot be.
    """
    if contender.api != "torch_fully_shard":
        return True
    takes_largest = any(isinstance(action, do.Clip) and action.how == "inf" for action in case.actions)
    return not takes_largest and all(rows % case.num_ranks == 0 for rows in rows_of_codes(case.model.root))


def _clips_shards(case: Case, contender: Contender) -> bool:
    """torch's ``clip_grad_value_`` finds no gradients in full parameters that a forward has left registered."""
    is_full = False
    for action in case.actions:
        is_full = isinstance(action, do.Forward) or (is_full and not isinstance(action, do.Backward))
        if is_full and isinstance(action, do.Clip) and action.how == "value":
            return not is_engines(contender)
    return True


def _means_the_same(case: Case, contender: Contender) -> bool:
    """Apis with whole parameters show held gradients in ``.grad``, have no units, and DDP wants its turns."""
    if is_engines(contender):
        return contender.api != "replicate_older" or not _uses_held(case.actions)
    if rows_of_codes(case.model.root) or not _suits_whole(case.actions):
        return False
    return (
        _suits_owners(case.actions)
        if contender.api == "zero_alone"
        else _suits_ddp(case, contender.api in OVERLAP_APIS)
    )


def _has_gradients(case: Case, contender: Contender) -> bool:
    """DDP refuses a model without a parameter that takes a gradient."""
    is_wrapped = contender.api in ("ddp", "zero1", "torch_zero", *OVERLAP_APIS)
    return not is_wrapped or trains(case.model.root)


RULES: tuple[Callable[[Case, Contender], bool], ...] = (
    _has_mesh, _has_gradients, _has_policies, _follows_steps, _has_whole_matrices, _averages, _hooks_gradients,
    _keeps_sums, _is_compiled, _syncs_buffers, _notices_data, _takes_strides, _joins, _has_units, _defers_alike,
    _has_own, _ignores, _wraps, _torch_is_right, _torch_can, _clips_shards, _means_the_same,
)  # fmt: skip


def _names_a_unit(action: do.Action) -> bool:
    if isinstance(action, do.Set):
        return not (action.recurse and action.unit == -1) or action.method == "gradient_divide_factor"
    is_of_unit = isinstance(action, do.LossOf) and action.form == "unshard"
    return is_of_unit or (action.is_engines and hasattr(action, "unit"))


def _suits_whole(actions: Sequence[do.Action]) -> bool:
    """True for APIs without units: nothing asks for one, nor for gradients that are only held or lie elsewhere."""
    for action in actions:
        if action.is_engines or isinstance(action, do.ChangeKept):
            return False
        if isinstance(action, (do.Take, do.Copy)) and action.what in ("optim", "grads"):
            return False
    return not _uses_held(actions)


def _uses_held(actions: Sequence[do.Action]) -> bool:
    """True if something is done with gradients that are held back: DDP, ``replicate``'s older call and ZeRO-2 have them
    in ``.grad``, each rank its own, where units of the engine show none.
    """
    holds = pending = False
    for action in actions:
        if isinstance(action, do.Set) and action.method == "requires_gradient_sync":
            is_whole = action.unit == -1 and action.recurse
            holds = not action.value or (holds and not is_whole)
        elif isinstance(action, do.Backward):
            pending = holds
        elif holds and isinstance(action, do.JoinLoop):
            return True  # a loop of whole steps
        elif pending and not isinstance(action, (do.Forward, do.Rate)):
            return True
    return holds


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
        if isinstance(action, do.Freeze) or (isinstance(action, do.Change) and action.how in ("assign", "lay")):
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
    if alive or recomputes(case.model.root):
        return False
    return not overlaps or (_steps_in_backward(case.actions) and uses_all(case.model.root))


def _steps_in_backward(actions: Sequence[do.Action]) -> bool:
    """True if each backward is followed by its step, and nothing could tell that the step was made before."""
    allowed = (do.Forward, do.Backward, do.Step, do.ZeroGrad, do.Rate, do.JoinLoop)
    if any(not isinstance(action, allowed) for action in actions):
        return False
    order = (do.Forward, do.Backward, do.Step)
    turns = [action for action in actions if isinstance(action, (*order, do.JoinLoop))]
    number = 0
    for action in turns:
        if isinstance(action, do.JoinLoop):
            if number % 3:
                return False
            continue
        number += 1
        if type(action) is not order[(number - 1) % 3]:
            return False
        if getattr(action, "mode", "train") != "train" or getattr(action, "closure", False):
            return False
    if number % 3:
        return False
    rates = [type(left) for left, right in pairwise(actions) if isinstance(right, do.Rate)]
    return do.Backward not in rates
