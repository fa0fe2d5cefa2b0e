"""The checks of one root: what the environment variable ``SHARDWISE_CHECKS`` asks for, at the events of its engine."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from shardwise import torch_private
from shardwise.checks.model import TreeWatch, check_values, compare_beginnings, compare_replicas
from shardwise.checks.optimizers import OptimizerSteps
from shardwise.consistency.store import digest_of
from shardwise.errors import ConfigError, StateError, TransportError
from shardwise.fsdp.attachment import Attachment
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.equal_values import SHARES_BUFFERS, unlike_buffers, unlike_in_words
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.roots import check_makers
from shardwise.fsdp.unit import StepChecks, Unit
from shardwise.observe import unit_in_words

_logger = logging.getLogger(__name__)
_NUM_FIRST = 2  # passes that are checked by default, and forwards per unit whose writes are compared between ranks
CHECKS = "SHARDWISE_CHECKS"
# The rule of this switch: it chooses how often values are compared, and whether there are warnings.  A check whose error keeps
# a program from training other numbers than it says runs in every mode, at least in the first passes, and nothing that
# computes may depend on the switch.


def mode_of(environment: Mapping[str, str]) -> str:
    """Return "always", "first" or "off".  Raises: ConfigError for another value."""
    mode = environment.get(CHECKS, "first")
    if mode not in ("always", "first", "off"):
        raise ConfigError(f"{CHECKS} is '{mode}', expected always, first or off")
    return mode


def register() -> None:
    """Make these the checks of every root."""
    check_makers.append(_checks_of)


def _checks_of(root: nn.Module, attachments: Sequence[Attachment], engine: Engine) -> StepChecks:
    if engine.exec_order.mismatch_check is not None:  # first: a wrong value on one rank is named on all
        engine.exec_order.mismatch_check.check_facts(CHECKS, [f"{CHECKS}={os.environ.get(CHECKS, 'first')}"])
    return RootChecks(root, attachments, engine, mode_of(os.environ))


class RootChecks(StepChecks):
    """Watches the module tree of ``root`` and what its engine reports.

    Args:
        attachments: the attachments in the tree.
        mode: with "always" every pass is checked, else the first ones and those after a change; with "off" nothing is looked
            for that is only worth a warning.
    """

    def __init__(self, root: nn.Module, attachments: Sequence[Attachment], engine: Engine, mode: str) -> None:
        self._root, self._engine = weakref.ref(root), weakref.ref(engine)
        self._tree = TreeWatch(root, mode != "off")
        self._mode = mode
        self._num_forwards = self._num_steps = 0
        self._posted: list[tuple[str, list[str]]] = []  # writes of forwards, to be compared with those of other ranks
        self._num_compared: Counter[int] = Counter()
        check = engine.exec_order.mismatch_check
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
        """Check the running pass."""
        self.is_on = True
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
        engine, number = self._engine(), unit.number
        check = None if engine is None else engine.exec_order.mismatch_check
        count = self._num_compared[number]
        if check is None or not (self._mode == "always" or count < _NUM_FIRST):
            return
        fulls = [(param.fqn, param.full) for param in written if param.inner_spec is None]
        values = [f"{fqn} with digest {digest_of(full.data):x}" for fqn, full in fulls if full is not None]
        if values:
            place = f"{self._num_forwards}/{number}/{count}"
            self._num_compared[number] += 1
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
            unlike = unlike_buffers([json.loads(each) for each in (theirs, mine) if each is not None])
            if unlike:
                _logger.warning("after the first step %s", unlike_in_words(list(unlike), sorted([other, check.rank])))


def _digests_in(root: nn.Module) -> dict[str, str]:
    """Return the digests of buffers that are saved and that no forward makes equal on all ranks."""
    shared = {id(inner) for module in root.modules() if SHARES_BUFFERS in module.__dict__ for inner in module.modules()}
    return {
        f"{path}.{name}" if path else name: f"{digest_of(buffer):x}"
        for path, module in root.named_modules()
        if id(module) not in shared
        for name, buffer in torch_private.buffers_of(module, saved=True).items()
        if type(buffer) is torch.Tensor and not buffer.is_meta
    }


def _differing(unit: Unit) -> ShardedParam | None:
    """Return a parameter whose full form differs from its shard, though torch has counted no write to it; NaN equals NaN."""
    if not unit.memory.is_collective or not unit.settings.storage.on.has_values:
        return None
    for param, full, version, address in zip(*unit.tables.registered, strict=True):
        is_seen = (
            torch_private.version_of(full) != version or full.data_ptr() != address
        )  # ``find_writes`` sees this write itself
        if is_seen or param.inner_spec is not None or not param.local.numel():
            continue
        rows, gathered = unit.own_rows(param, full)
        if not torch.equal(rows, gathered) and not torch.allclose(rows, gathered, rtol=0, atol=0, equal_nan=True):
            return param
    return None
