"""Checks of a root's module tree and of its values: of each rank, and that all ranks begin with the same."""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.consistency.agreement import MismatchCheck
from shardwise.consistency.store import are_threads, digest_of, sample_of
from shardwise.errors import DesyncError, StateError
from shardwise.formatting import format_ranks
from shardwise.fsdp.attachment import Attachment, attachment_of, is_managed_by_torch, managed_by_registration
from shardwise.fsdp.equal_values import unwritten
from shardwise.fsdp.init_parameters import bytes_of, unwritten_in
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import Unit

_logger = logging.getLogger("shardwise.checks")
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # roots with parameters that were added
_VALUES, _TARGET = dict.values, weakref.ref.__call__
_NUM_FIRST = 8  # elements that are compared to detect equal seeds; few, since uneven shards may be small
_MOST_SHOWN = 8  # names that an error lists


def few(names: Iterable[str]) -> str:
    """Return the first of ``names``, and how many more there are."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MOST_SHOWN} more" if len(every) > _MOST_SHOWN else ""
    return ", ".join(every[:_MOST_SHOWN]) + more


def check_values(root: nn.Module, attachments: Sequence[Attachment], mismatch_check: MismatchCheck | None) -> None:
    """Check before the first forward that a model from meta has values, and that shards differ between ranks.

    If every rank has initialized its shard with the same seed, all shards have the same random numbers.  Collective, unless
    ``mismatch_check`` is None.  Raises: StateError on every rank.
    """
    # Also without values from meta: other ranks may have some, and all take part in the exchange.
    fresh = attachments if any(each.is_materialized for each in attachments) else ()
    local = [json.dumps(["", name]) for name in unwritten_in(root)] if fresh else []
    for unit in (unit for each in fresh for unit in each.units):
        starts_here, shard_rank = (
            [(param.fqn, _start_of(param)) for param in unit.params],
            unit.settings.axes.shard_rank,
        )
        local += [json.dumps([name, start, shard_rank]) for name, start in starts_here if start is not None]
    every = local if mismatch_check is None else mismatch_check.union("values", local)
    starts: dict[str, list[int]] = defaultdict(list)
    for name, value, *_ in map(json.loads, sorted(every)):
        starts[name].append(value)
    if unwritten := starts.pop("", None):
        raise StateError(
            f"{few(map(str, unwritten))} have no values: nothing was written to them after to_empty(). Load them, call "
            "shardwise.init_parameters(model, init_fn), or build computed buffers under torch.device('cpu')"
        )
    for each in attachments:
        each.is_materialized = False
    # With equal seeds the shards that were initialized first are equal; after shards of unequal sizes, random numbers differ.
    several = [name for name, _ in root.named_parameters() if len(starts[name]) > 1]
    alike = [name for name in several if len(set(starts[name])) == 1]
    if alike and (alike[0] == several[0] or 2 * len(alike) > len(several)):
        raise StateError(
            f"the shards of {few(alike)} begin with the same values on all ranks: every rank has initialized its local "
            "tensor (to_local()) with the same seed. Call shardwise.init_parameters(model), or draw on the parameters "
            "themselves. If the values are right (copies of one expert), call forward again: this is checked only once"
        )


def _start_of(param: ShardedParam) -> int | None:
    """Return a digest of the first elements of a shard; None if they are all equal, or the parameter is not sharded."""
    local, _ = bytes_of(param.sharded)
    if local is None or param.shard.is_whole or local.shape != param.shard_shape:
        return None
    first = local.reshape(-1)[:_NUM_FIRST]
    return None if bool((first == first[0]).all()) else digest_of(first)


class TreeWatch:
    """Watches the module tree of one root: ranks do not average the gradients of a parameter that was added to the tree.

    It has no module: those of the root's unit own the engine through their hooks, which owns this.
    """

    def __init__(self, root: nn.Module, warns: bool) -> None:
        self._root, self._warns = weakref.ref(root), warns
        self._note_tree(root)

    def check(self) -> None:
        """Warn of parameters without a unit; it takes microseconds if nothing has changed."""
        # While all modules are alive, no other one has the id of one of them.
        if None in [*map(_TARGET, self._alive)] or self._now() != self._noted:
            root = self._root()
            assert root is not None  # its forward is running
            self._note_tree(root)

    def _now(self) -> tuple[int, list[int]]:
        children = [*map(torch_private.children_of, map(_TARGET, self._owners))]  # pyright: ignore[reportArgumentType]
        # Children are counted, too, except a first child of a module that had none.
        return sum(map(len, chain(self._tables, children))), [*map(id, chain.from_iterable(map(_VALUES, children)))]

    def _note_tree(self, root: nn.Module) -> None:
        check_tree(root, self._warns)
        modules = list(root.modules())
        self._alive = [*map(weakref.ref, modules)]
        self._owners = [
            ref for ref, module in zip(self._alive, modules, strict=True) if torch_private.children_of(module)
        ]
        self._tables = [torch_private.parameters_of(module) for module in modules]
        self._noted = self._now()


def check_tree(root: nn.Module, warns: bool) -> None:
    """Raise StateError if a parameter of a unit was removed from its module; warn of trainable ones that belong to no unit."""
    attachments = {id(each): each for module in root.modules() if (each := attachment_of(module)) is not None}
    params = [param for each in attachments.values() for unit in each.units for param in unit.params]
    known = {id(form) for param in params for form in (param.sharded, param.full, param.subsharded)}
    ignored = {(id(table), name) for each in attachments.values() for table, name in each.ignored}
    of_torch = {each for module in root.modules() if is_managed_by_torch(module) for each in module.modules()}
    tables = {id(torch_private.parameters_of(module)): (path, module) for path, module in root.named_modules()}
    added = {
        f"{path}.{name}".lstrip("."): param
        for table, (path, module) in tables.items()
        for name, param in torch_private.parameters_of(module).items()
        if param is not None and param.requires_grad and id(param) not in known
        if (table, name) not in ignored and module not in of_torch
    }
    for param in params:
        param.check_places(lambda table: id(table) in tables)
    if not added:
        return
    owned = {id(form): owner for owner in managed_by_registration().values() for form in (owner.sharded, owner.full)}
    for path, param in added.items():
        owner = owned.get(id(param))
        if owner is not None:
            raise StateError(
                f"{path} of this {type(root).__name__} is shared with {type(owner.module()).__name__}, which was sharded by "
                "itself and is not below it. Call fully_shard (or replicate) on a module that contains both, and run that"
            )
    if warns and root not in _warned:
        _warned.add(root)
        _logger.warning(
            "%s was added to the module tree after its units were made and belongs to none of them, so its gradient is that of "
            "each rank's own batch unless somebody averages it: call fully_shard (or replicate) on the new module before the "
            "next forward, average the gradients over ranks before each step, or name the parameters in ignored_params",
            few(added),
        )


# ---- Checks that all ranks start with the same values.
# Replicas add the same averaged gradients to their values, so values that differ at the start (a seed per rank, a checkpoint
# that only one rank has loaded) differ forever.  Ranks that shard different values train a mixture of them: as good a random
# start as another, but no checkpoint.  The loss shows neither.  So ranks compare digests through the store once: of sharded
# values in the first forward, of replicas in the first backward that averages over them.

Key = tuple[str, str]  # which ranks have a part of the parameter, and its name
_REMEDY = (
    "build the model with one seed on all ranks, load weights on every rank or after sharding, or pass sync_module_states=True "
    "to fully_shard or shard_model, which broadcasts the values of the first rank"
)


def compare_replicas(units: Iterable[Unit], mismatch_check: MismatchCheck) -> None:
    """Compare the values of replicas of ``units`` between ranks; of a large parameter, a sample.  Collective.

    Raises: DesyncError on every rank, naming a parameter that is not the same on all of its replicas.
    """
    digests = {key: digest_of(sample_of(local)) for key, local in _replicated(units).items()}
    if unlike := _compare("values that replicas begin with", digests, mismatch_check):
        raise DesyncError(
            f"replicas do not begin with the same values: {_in_words(unlike)}. Each would add the same averaged gradients to "
            "its own, so that they never become equal: build the model with one seed on all ranks, load a checkpoint on every "
            "rank, or broadcast the parameters of one rank before the first step; put parameters that should differ between "
            "ranks into ignored_params"
        )


def compare_beginnings(units: Iterable[Unit], mismatch_check: MismatchCheck) -> None:
    """Compare between ranks the values from which the parameters of ``units`` were sharded.  Collective.

    Parameters that any rank has overwritten since (initialized, loaded) are skipped.  The first rank warns of others that were
    not the same on all ranks.

    Raises: DesyncError on every rank, naming such a parameter, if ranks would have different models: it has replicas, or is a
        scalar, which is not cut; or if the model must not depend on the number of ranks (``Reproducible``).
    """
    digests: dict[Key, int | str | None] = {}
    cut = [unit for unit in units if unit.settings.axes.num_shards > 1]
    if not cut:
        return
    must_agree: set[str] = set()
    for unit, param in ((each, param) for each in cut for param in each.params):
        if param.local.numel():  # values of a rank whose shard is empty are not used
            sample = unwritten(param.beginning, param.local)
            # Ranks whose models differ in shapes get a better error at the first all-gather.
            name = f"{param.fqn} of shape {param.shard.shape}"
            key = f"{int(unit.settings.axes.mesh.mesh.min())}/{param.shard.num_holders}", name
            digests[key] = None if sample is None else hashlib.sha256(sample).hexdigest()
            if unit.settings.axes.num_replicas > 1 or param.shard.is_whole or unit.settings.sums is not None:
                must_agree.add(name)
    unlike = _compare("values that were sharded", digests, mismatch_check)
    if refused := {name: row for name, row in unlike.items() if name in must_agree}:
        raise DesyncError(
            f"ranks do not begin with the same values: {_in_words(refused)}. Ranks would train different models, or one that "
            f"depends on their number: {_REMEDY}"
        )
    if unlike and mismatch_check.rank == mismatch_check.members[0]:
        _logger.warning(
            "ranks do not begin with the same values: %s. Each rank has sharded its own, so that the model is a mixture of "
            "them. One of random values is as good as another; to begin with one rank's weights %s",
            *(_in_words(unlike), _REMEDY),
        )
    for param in (param for unit in cut for param in unit.params):
        param.beginning = None


def _compare(
    topic: str, digests: Mapping[Key, int | str | None], mismatch_check: MismatchCheck
) -> dict[str, dict[int, int | str]]:
    """Return, by name, the digest on each rank of what differs; a parameter that has None on some rank is not compared.

    Nothing is compared if ranks are threads: they share one random generator, so no two ranks start with the same values.
    """
    if are_threads():
        return {}

    def exchange(topic: str, values: Mapping[Key, Any]) -> dict[Key, list[Any]]:
        local = [json.dumps([*key, value]) for key, value in values.items()]
        found: dict[Key, list[Any]] = defaultdict(list)
        for track, name, value in map(json.loads, sorted(mismatch_check.union(topic, local))):
            found[track, name].append(value)
        return found

    # Exchange one sum per set of ranks first: usually all agree, and no rank sends a digest per parameter.
    alike: dict[str, list[int | str | None]] = defaultdict(list)
    for (track, _), digest in digests.items():
        alike[track].append(digest)
    sums = {(track, ""): hashlib.sha256(repr(each).encode()).hexdigest() for track, each in alike.items()}
    if all(len(found) == 1 for found in exchange(topic, sums).values()):
        return {}
    mine = {key: [dist.get_rank(), digest] for key, digest in digests.items()}
    rows = {key: dict(found) for key, found in exchange(f"each of the {topic}", mine).items()}
    return {name: row for (_, name), row in rows.items() if None not in row.values() and len({*row.values()}) > 1}


def _in_words(unlike: Mapping[str, Mapping[int, int | str]]) -> str:
    name, row = min(unlike.items())
    first = min(row)
    others = sorted(rank for rank, digest in row.items() if digest != row[first])
    more = f", and {len(unlike) - 1} more parameters differ" if len(unlike) > 1 else ""
    return f"{name} is not the same on {format_ranks(others)} as on rank {first}{more}"


def _replicated(units: Iterable[Unit]) -> dict[Key, torch.Tensor]:
    """Return the local tensors that have replicas; without tensor subclasses, which may have no readable bits."""
    found: dict[Key, torch.Tensor] = {}
    for unit in (unit for unit in units if unit.settings.axes.num_replicas > 1):
        axes = unit.settings.axes
        assert axes.replicate_mesh_dim is not None
        track = dist.get_process_group_ranks(axes.mesh.get_group(axes.replicate_mesh_dim))[0]
        for param in unit.params:
            if type(param.local) in (torch.Tensor, nn.Parameter):
                found[str(track), param.fqn] = param.local.detach()
    return found
