"""The plan of a sharded model's steps."""

from __future__ import annotations

from torch import nn

from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.engine import engine_of
from shardwise.observe import Call


def planned_calls(model: nn.Module) -> list[Call]:
    """Return the calls that the engine of ``model``, a unit, has planned for a step."""
    attachment = attachment_of(model)
    assert attachment is not None
    engine = engine_of(attachment.unit)
    assert engine is not None
    assert engine.exec_order.plan is not None
    return list(engine.exec_order.plan.calls)
