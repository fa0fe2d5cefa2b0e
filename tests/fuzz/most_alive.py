"""The most full parameters alive at once, counted on the modules themselves, beside what the plan said."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from fuzz.codes import Codes
from shardwise import observe
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.unit import HELD, Unit
from shardwise.observe import Call, Op
from shardwise.plan.schedule import StepPlan


def most_full(
    calls: Iterable[Call], before: Mapping[str, int] | None = None, padding: Mapping[str, int] | None = None
) -> int:
    """Return the most bytes of full parameters that are registered at once when ``calls`` are carried out.

    ``before``: bytes of the units that are unsharded when the step begins.  ``padding``: bytes of a unit's buffers between
    and behind parameters, which calls and ``before`` count.
    """
    beyond = padding or {}
    alive = {unit: num_bytes - beyond.get(unit, 0) for unit, num_bytes in (before or {}).items()}
    most = sum(alive.values())
    for call in calls:
        if call.op is Op.WAIT:
            alive[call.unit] = call.num_bytes - beyond.get(call.unit, 0)
        elif call.op is Op.RESHARD:
            alive.pop(call.unit, None)
        most = max(most, sum(alive.values()))
    return most


def _padding_of(unit: Unit) -> int:
    layouts = [(bucket.layout, bucket.full_dtype.itemsize) for bucket in unit.main_buckets if bucket.travels]
    return sum(
        (layout.full_numel - sum(each.numel for each in layout.shards)) * itemsize for layout, itemsize in layouts
    )


class Watch(observe.Listener):
    """Listens to an engine; counts what is registered on modules whenever a unit has been unsharded.

    A step counts, from the end of one backward to the end of the next, if its calls are those of the plan.
    """

    def __init__(self, model: nn.Module, ignored: Container[str] = (), most_units: int | None = None) -> None:
        self._model = weakref.ref(model)
        self._ignored, self._most_units = ignored, most_units
        self._calls: list[Call] = []
        self._most = 0
        self._before: dict[str, int] = {}
        self._padding: dict[str, int] = {}
        self._engine: weakref.ref[Engine] | None = None
        self._found: list[str] = []
        self.num_steps = 0

    def listen(self) -> None:
        """Listen from here on, if the engine is there by now."""
        model = self._model()
        attachment = attachment_of(model) if model is not None else None
        engine = engine_of(attachment.unit) if attachment is not None else None
        if engine is not None and (self._engine is None or self._engine() is not engine):
            self._engine = weakref.ref(engine)
            observe.listeners.append(self)
            weakref.finalize(engine, observe.listeners.remove, self)

    def end(self, track: str, what: str, subject: str, num_bytes: int, call: Call | None) -> None:
        """Take note of a call."""
        model, engine = self._model(), self._engine() if self._engine is not None else None
        if model is None or engine is None or call is None or track != engine.exec_order.track.name:
            return
        if call.op is Op.COMMIT:
            self._padding = {unit.name: _padding_of(unit) for unit in engine.units}
            if self._calls:
                self._compare(engine.exec_order.plan)
            self._calls = []
            self._before = {unit.name: unit.full_bytes for unit in engine.units if unit.held is HELD}
            self._most = most_full((), self._before, self._padding)
            return
        self._calls.append(call)
        if call.op is Op.WAIT:
            self._most = max(self._most, registered_bytes(model, self._ignored))
            count = sum(unit.held is HELD for unit in engine.units)
            if self._most_units is not None and count > self._most_units:
                self._found.append(f"{count} units were full at once, expected {self._most_units} at most")

    def _compare(self, plan: StepPlan | None) -> None:
        if plan is None or self._calls != [call for call in plan.calls if call.op is not Op.COMMIT]:
            return
        self.num_steps += 1
        planned = most_full(plan.calls, self._before, self._padding)
        if self._most != planned:
            self._found.append(f"{self._most} bytes of full parameters were registered at once, planned are {planned}")

    def findings(self) -> list[str]:
        """Return the differences that were found."""
        return list(dict.fromkeys(self._found))


def registered_bytes(model: nn.Module, ignored: Container[str] = ()) -> int:
    """Return the bytes of parameters that are registered whole on ``model``, but for those that keep codes of their own."""
    seen: dict[int, int] = {}
    for name, param in model.named_parameters():
        if not isinstance(param, (DTensor, Codes)) and name not in ignored:
            seen[id(param)] = param.numel() * param.element_size()
    return sum(seen.values())
