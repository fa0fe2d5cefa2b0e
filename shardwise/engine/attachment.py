"""What a sharded module carries."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise import torch_private
from shardwise.engine.engine import Engine
from shardwise.units.unit import Unit

ATTACHMENT = "_shardwise_attachment"
SHARES_BUFFERS = "_shardwise_shares_buffers"  # marks a module whose forward broadcasts the first rank's buffers
PENDING = "shardwise: attachments to complete"  # among the memo of a deep copy: pairs of an attachment and its copy


class Pass:
    """One pass through a unit's modules: backward has left it when all its inputs have their gradients."""

    __slots__ = ("_backward", "_expected", "_missing")

    def __init__(self) -> None:
        self._backward = -1
        self._expected = self._missing = 0

    def expect(self, count: int) -> None:
        """Wait for ``count`` more gradients."""
        self._expected += count

    def passed(self) -> bool:
        """Count one gradient of the running backward; return True if it was the last."""
        backward = torch_private.graph_task_id()
        if backward != self._backward:  # a graph that is kept may run backward again
            self._backward, self._missing = backward, self._expected
        self._missing -= 1
        return not self._missing


class Attachment:
    """The unit of a module, and its engine if it is a root.

    Ownership runs module -> attachment -> (engine ->) unit; every way back is weak.

    Attributes:
        unit: the parameters.
        engine: owned here by a root's attachment; None until the first forward, and for non-roots.
        is_root: None until the first forward of the root.
        forward_methods: names of methods that are treated like ``forward``.
        looked_at: nodes of the graph that a root's last forward made that was searched for reentrant checkpoints, and whether
            an input of it needed a gradient; None: no forward was searched.
        before: how many nodes this thread had made before a root's running forward; the same of its inputs.
        ignored: the places of parameters that are left to the user: a module's dict of them, and a name.
        shared_pass: that the modules of a unit share.  passes: of the forwards that have begun.
        is_materialized: tensors of its modules were moved from meta to a device, and no forward has run since.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.engine: Engine | None = None
        self.is_root: bool | None = None
        self.forward_methods: list[str] = []
        self.looked_at: tuple[int, bool] | None = None
        self.before: tuple[int, bool] = 0, False
        self.ignored: tuple[tuple[dict[str, nn.Parameter | None], str], ...] = ()
        self.shared_pass: Pass | None = None
        self.passes: list[Pass | None] = []
        self.is_materialized = False

    def __deepcopy__(self, memo: dict[Any, Any]) -> Attachment:
        """Return one with an empty unit, which is filled in when the outermost copy is done."""
        result = Attachment(Unit([], self.unit.precision, self.unit.policy))
        result.is_materialized = self.is_materialized
        memo[id(self)] = result
        memo.setdefault(PENDING, []).append((self, result))
        return result


def is_managed_by_torch(module: nn.Module) -> bool:
    """Return True if torch's own composable APIs (``fully_shard``, ``replicate``) manage the parameters of ``module``."""
    names = torch_private.composable_apis_of(module)
    return attachment_of(module) is None and not {"fully_shard", "replicate"}.isdisjoint(names)


def attachment_of(module: nn.Module) -> Attachment | None:
    """Return what a door has attached to ``module``, None if none was applied."""
    return module.__dict__.get(ATTACHMENT)
