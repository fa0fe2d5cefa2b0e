"""The checks of one root: what the environment variable ``SHARDWISE_CHECKS`` asks for, at the events of its engine.

An engine trusts that user code leaves parameters and modules alone in a pass, and that ranks do the same; these checks look
whether it is so.  They repair nothing: what they find is a named error, or a warning.  Three kinds stand here: of the module
tree, of the values that ranks begin with, and of what a pass has written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.checks.optimizers import OptimizerSteps
from shardwise.consistency.agreement import MismatchCheck
from shardwise.consistency.store import are_threads, digest_of, sample_of
from shardwise.errors import ConfigError, DesyncError, StateError, TransportError
from shardwise.formatting import format_ranks
from shardwise.fsdp.attachment import Attachment, attachment_of, is_managed_by_torch
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.init_parameters import (
    SHARES_BUFFERS,
    bytes_of,
    few,
    unlike_buffers,
    unlike_in_words,
    unwritten,
    unwritten_in,
)
from shardwise.fsdp.param import ShardedParam, manager_of
from shardwise.fsdp.roots import check_makers
from shardwise.fsdp.unit import StepChecks, Unit
from shardwise.observe import unit_in_words

_logger = logging.getLogger("shardwise.checks")
_NUM_FIRST = 2  # passes that are checked by default, and forwards per unit whose writes are compared between ranks
CHECKS = "SHARDWISE_CHECKS"
# The rule of this switch: it chooses how often values are compared, and whether there are warnings.  A check whose error keeps
# a program from training other numbers than it says runs in every mode, at least in the first passes, and nothing that
# computes may depend on the switch.
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # roots with parameters that were added
_VALUES, _TARGET = dict.values, weakref.ref.__call__
Values = defaultdict[tuple[str, ...], list[Any]]  # of all ranks, by key
_NUM_BEGIN = 8  # elements that are compared to detect equal seeds; few, since uneven shards may be small


def mode_of(environment: Mapping[str, str]) -> str:
    """Return "always", "first" or "off".  Raises: ConfigError for another value."""
    mode = environment.get(CHECKS, "first")
    if mode not in ("always", "first", "off"):
        raise ConfigError(f"{CHECKS} is '{mode}', expected always, first or off")
    return mode


def register() -> None:
    """Make these the checks of every root."""
    check_makers.append(RootChecks)


class RootChecks(StepChecks):
    """Watches the module tree of ``root`` and what its engine reports.

    Args:
        attachments: the attachments in the tree.

    With the mode "always" every pass is checked, else the first ones and those after a change; with "off" nothing is looked for
    that is only worth a warning.
    """

    def __init__(self, root: nn.Module, attachments: Sequence[Attachment], engine: Engine) -> None:
        check = engine.exec_order.mismatch_check
        if check is not None:  # first: a wrong value on one rank is named on all
            check.check_facts(CHECKS, [f"{CHECKS}={os.environ.get(CHECKS, 'first')}"])
        self._root, self._engine, self._mode = weakref.ref(root), weakref.ref(engine), mode_of(os.environ)
        self._tree = TreeWatch(root, self._mode != "off")
        self._num_forwards = self._num_steps = 0
        self._posted: list[tuple[str, list[str]]] = []  # writes of forwards, to be compared with those of other ranks
        self._num_compared: Counter[int] = Counter()
        self._steps = OptimizerSteps(engine.units if check is not None else ())
        check_values(root, attachments, check)
        if check is not None and self._mode != "off":
            compare_beginnings(engine.units, check)

    def begin_forward(self) -> None:
        """Check the module tree."""
        self._num_forwards += 1
        self.is_on = self._mode == "always" or self._num_forwards <= _NUM_FIRST
        self._tree.check()

    def see_change(self) -> None:
        """Check the running pass, and the next forward: a state dict may have been loaded between passes."""
        self.is_on, self._num_forwards = True, min(self._num_forwards, _NUM_FIRST - 1)
        self._steps.look_again()

    def end_unit(self, unit: Unit) -> None:
        """Raise StateError if the forward has written to a full parameter through ``.data``."""
        if (param := _differing(unit)) is not None:
            raise param.uncounted()

    def use_again(self, unit: Unit) -> None:
        """Raise StateError if shards were written to through ``.data`` while their unit stayed unsharded."""
        if not unit.settings.storage.on.has_streams and (param := _differing(unit)) is not None:
            raise StateError(
                f"{param.fqn} ({unit_in_words(unit.name)}) was unsharded when its shard was written to through .data or "
                "another alias. Call reshard() on the module first, or copy_ to the parameter itself"
            )

    def see_writes(self, unit: Unit, written: Sequence[ShardedParam]) -> None:
        """Post digests of what a forward has written; every rank has posted when the gradients of its backward are set.

        Every rank copies its own rows of a written full parameter to its shard: if ranks write different values, the shards
        silently become a mixture.
        """
        engine, count = self._engine(), self._num_compared[unit.number]
        check = None if engine is None else engine.exec_order.mismatch_check
        if check is None or not (self._mode == "always" or count < _NUM_FIRST):
            return
        fulls = [(param.fqn, param.full) for param in written if param.inner_spec is None]
        if values := [f"{fqn} with digest {digest_of(full.data):x}" for fqn, full in fulls if full is not None]:
            place = f"{unit.track.num_forwards}/{unit.number}/{count}"
            self._num_compared[unit.number] += 1
            check.post(f"writes/{place}", json.dumps(values))
            self._posted.append((place, values))

    def end_backward(self) -> None:
        """Compare between ranks: writes of forwards, replicas after the first backward, buffers in the first steps."""
        engine, root = self._engine(), self._root()
        check = None if engine is None else engine.exec_order.mismatch_check
        if engine is None or root is None or check is None:
            return
        posted, self._posted = self._posted, []
        for place, values in posted:
            check.check_writes(place, values)
        if not self._num_steps and any(unit.settings.axes.num_replicas > 1 for unit in engine.units):
            compare_replicas(engine.units, check)
        self._num_steps += 1
        # No rank waits: all post their buffers in step 1, and read another rank's in step 3, which a rank begins after it has
        # reduced gradients with all others.
        if engine.divergence is not None:
            return
        with suppress(TransportError):  # the rank that keeps the store has made its steps and ended
            self._steps.compare(check, self._num_steps)
            if self._mode == "off" or self._num_steps not in (1, 3):
                return
            if self._num_steps == 1:
                check.post("buffers", json.dumps(_digests_in(root)))
                return
            other = check.members[check.rank == check.members[0]]
            mine, theirs = (check.posted("buffers", rank) for rank in (check.rank, other))
            if unlike := unlike_buffers([json.loads(each) for each in (theirs, mine) if each is not None]):
                _logger.warning("after the first step %s", unlike_in_words(list(unlike), sorted([other, check.rank])))


def _digests_in(root: nn.Module) -> dict[str, str]:
    """Return the digests of buffers that are saved and that no forward makes equal on all ranks."""
    shared = {id(inner) for module in root.modules() if SHARES_BUFFERS in module.__dict__ for inner in module.modules()}
    return {
        f"{path}.{name}".lstrip("."): f"{digest_of(buffer):x}"
        for path, module in root.named_modules()
        if id(module) not in shared
        for name, buffer in torch_private.buffers_of(module, saved=True).items()
        if type(buffer) is torch.Tensor and not buffer.is_meta
    }


def _differing(unit: Unit) -> ShardedParam | None:
    """Return a parameter whose full form differs from its shard, though torch has counted no write to it; NaN equals NaN."""
    if not unit.memory.is_collective or not unit.settings.storage.on.has_values:
        return None
    for param, full, version, place in zip(*unit.tables.registered, strict=True):
        # ``find_writes`` sees such a write itself.
        now = torch_private.storage_id(full), full.storage_offset()
        is_seen = torch_private.version_of(full) != version or now != place
        if is_seen or param.inner_spec is not None or not param.local.numel():
            continue
        rows, gathered = unit.own_rows(param, full)
        if not torch.equal(rows, gathered) and not torch.allclose(rows, gathered, rtol=0, atol=0, equal_nan=True):
            return param
    return None


# ---- The module tree, and values before the first forward.


def check_values(root: nn.Module, attachments: Sequence[Attachment], mismatch_check: MismatchCheck | None) -> None:
    """Check before the first forward that a model from meta has values, and that shards differ between ranks.

    If every rank has initialized its shard with the same seed, all shards have the same random numbers.  Collective, unless
    ``mismatch_check`` is None.  Raises: StateError on every rank.
    """
    # Also without values from meta: other ranks may have some, and all take part in the exchange.
    fresh = attachments if any(each.is_materialized for each in attachments) else ()
    local: list[tuple[tuple[str, ...], object]] = [((), name) for name in unwritten_in(root)] if fresh else []
    for unit in (unit for each in fresh for unit in each.units):
        for param in unit.params:
            values, _ = bytes_of(param.sharded)
            if values is not None and not param.shard.is_whole and values.shape == param.shard_shape:
                first = values.reshape(-1)[:_NUM_BEGIN]
                if not bool((first == first[0]).all()):  # zeros and ones are equal on all ranks, as they should be
                    local.append(((param.fqn,), (digest_of(first), unit.settings.axes.shard_rank)))
    starts = _union(mismatch_check, "values", local)
    if unwritten := starts.pop((), None):
        raise StateError(
            f"{few(map(str, unwritten))} have no values: nothing was written to them after to_empty(). Load them, call "
            "shardwise.init_parameters(model, init_fn), or build computed buffers under torch.device('cpu')"
        )
    for each in attachments:
        each.is_materialized = False
    # With equal seeds the shards that were initialized first are equal; after shards of unequal sizes, random numbers differ.
    several = [name for name, _ in root.named_parameters() if len(starts[name,]) > 1]
    alike = [name for name in several if len({digest for digest, _ in starts[name,]}) == 1]
    if alike and (alike[0] == several[0] or 2 * len(alike) > len(several)):
        raise StateError(
            f"the shards of {few(alike)} begin with the same values on all ranks: every rank has initialized its local "
            "tensor (to_local()) with the same seed. Call shardwise.init_parameters(model), or draw on the parameters "
            "themselves. If the values are right (copies of one expert), call forward again: this is checked only once"
        )


def _union(check: MismatchCheck | None, topic: str, values: Iterable[tuple[tuple[str, ...], Any]]) -> Values:
    """Return what all ranks pass as ``values``, by key, the same on all of them; ``check`` None: what this rank does."""
    local, found = [*map(json.dumps, values)], Values(list)
    for key, value in map(json.loads, sorted(check.union(topic, local) if check is not None else local)):
        found[tuple(key)].append(value)
    return found


class TreeWatch:
    """Watches the module tree of one root: ranks do not average the gradients of a parameter that was added to the tree.

    It has no module: those of the root's unit own the engine through their hooks, which owns this.
    """

    def __init__(self, root: nn.Module, warns: bool) -> None:
        self._root, self._warns = weakref.ref(root), warns
        self._note_tree(root)

    def check(self) -> None:
        """Warn of parameters without a unit; it takes microseconds if nothing has changed."""
        modules = [*map(_TARGET, self._alive)]
        # While all modules are alive, no other one has the id of one of them.
        if None in modules or self._seen_in(cast(Any, modules)) != self._noted:
            root = self._root()
            assert root is not None  # its forward is running
            self._note_tree(root)

    def _seen_in(self, modules: Iterable[nn.Module]) -> tuple[int, list[int]]:
        # Modules of torch.jit.script have another kind of dict, which cannot change.
        found: list[Any] = [*map(torch_private.children_of, modules)]
        children = [each for each in found if isinstance(each, dict)]
        return sum(map(len, self._tables)), [*map(id, chain.from_iterable(map(_VALUES, children)))]

    def _note_tree(self, root: nn.Module) -> None:
        check_tree(root, self._warns)
        modules = list(root.modules())
        self._alive = [*map(weakref.ref, modules)]
        self._tables = [*map(torch_private.parameters_of, modules)]
        self._noted = self._seen_in(modules)


def check_tree(root: nn.Module, warns: bool) -> None:
    """Raise StateError if a parameter of a unit was removed from its module; warn of trainable ones that belong to no unit."""
    attachments = {each for module in root.modules() if (each := attachment_of(module)) is not None}
    params = [param for each in attachments for unit in each.units for param in unit.params]
    tables = {id(torch_private.parameters_of(module)) for module in root.modules()}
    for param in params:
        param.check_places(lambda table: id(table) in tables)
    known = {id(form) for param in params for form in (param.sharded, param.full, param.subsharded)}
    ignored = {(id(table), name) for each in attachments for table, name in each.ignored}
    of_torch = {each for module in root.modules() if is_managed_by_torch(module) for each in module.modules()}
    named = [(path, module) for path, module in root.named_modules() if module not in of_torch]
    added = {
        f"{path}.{name}".lstrip("."): param
        for path, module in named
        for name, param in module.named_parameters(recurse=False)
        if param.requires_grad and id(param) not in known
        if (id(torch_private.parameters_of(module)), name) not in ignored
    }
    for path, param in added.items():
        if (owner := manager_of(param)) is not None:
            raise StateError(
                f"{path} of this {type(root).__name__} is shared with {type(owner.module()).__name__}, which was sharded by "
                "itself and is not below it. Call fully_shard (or replicate) on a module that contains both, and run that"
            )
    if added and warns and root not in _warned:
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

Digest = int | str
Key = tuple[str, str]  # which ranks have a part of the parameter, and its name
_REMEDY = (
    "build the model with one seed on all ranks, load weights on every rank or after sharding, or pass sync_module_states=True "
    "to fully_shard or shard_model, which broadcasts the values of the first rank"
)


def compare_replicas(units: Iterable[Unit], mismatch_check: MismatchCheck) -> None:
    """Compare the values of replicas of ``units`` between ranks; of a large parameter, a sample.  Collective.

    Raises: DesyncError on every rank, naming a parameter that is not the same on all of its replicas.
    """
    digests: dict[Key, Digest | None] = {}
    for axes, params in [(unit.settings.axes, unit.params) for unit in units]:
        if axes.replicate_mesh_dim is not None and axes.num_replicas > 1:
            first = str(dist.get_process_group_ranks(axes.mesh.get_group(axes.replicate_mesh_dim))[0])
            # Tensor subclasses may have no readable bits.
            plain = [param for param in params if type(param.local) in (torch.Tensor, nn.Parameter)]
            digests |= {(first, param.fqn): digest_of(sample_of(param.local.detach())) for param in plain}
    if unlike := _compare("values that replicas begin with", digests, mismatch_check):
        raise DesyncError(
            f"replicas do not begin with the same values: {_in_words(unlike)}. Each would add the same averaged gradients to "
            "its own, so that they never become equal: build the model with one seed on all ranks, load a checkpoint on every "
            "rank, or broadcast those of one rank first; put parameters that should differ into ignored_params"
        )


def compare_beginnings(units: Iterable[Unit], mismatch_check: MismatchCheck) -> None:
    """Compare between ranks the values from which the parameters of ``units`` were sharded.  Collective.

    Parameters that any rank has overwritten since (initialized, loaded) are skipped.  The first rank warns of others that were
    not the same on all ranks.

    Raises: DesyncError on every rank, naming such a parameter, if ranks would have different models: it has replicas, or is a
        scalar, which is not cut; or if the model must not depend on the number of ranks (``Reproducible``).
    """
    digests: dict[Key, Digest | None] = {}
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


def _compare(topic: str, digests: Mapping[Key, Digest | None], check: MismatchCheck) -> dict[str, dict[int, Digest]]:
    """Return, by name, the digest on each rank of what differs; a parameter that has None on some rank is not compared.

    Nothing is compared if ranks are threads: they share one random generator, so no two ranks start with the same values.
    """
    if are_threads():
        return {}
    # Exchange one sum per set of ranks first: usually all agree, and no rank sends a digest per parameter.
    alike: dict[str, list[Digest | None]] = defaultdict(list)
    for (track, _), digest in digests.items():
        alike[track].append(digest)
    sums = {(track, ""): hashlib.sha256(repr(each).encode()).hexdigest() for track, each in alike.items()}
    if all(len(found) == 1 for found in _union(check, topic, sums.items()).values()):
        return {}
    mine = [(key, (dist.get_rank(), digest)) for key, digest in digests.items()]
    rows = {key: dict(found) for key, found in _union(check, f"each of the {topic}", mine).items()}
    return {name: row for (_, name), row in rows.items() if None not in row.values() and len({*row.values()}) > 1}


def _in_words(unlike: Mapping[str, Mapping[int, Digest]]) -> str:
    name, row = min(unlike.items())
    first = min(row)
    others = sorted(rank for rank, digest in row.items() if digest != row[first])
    more = f", and {len(unlike) - 1} more parameters differ" if len(unlike) > 1 else ""
    return f"{name} is not the same on {format_ranks(others)} as on rank {first}{more}"
