"""Say of a contender whether it did what one process does: a verdict, with the first difference.

Rules, per quantity, for a value ``a`` of the contender and ``b`` of the reference:

* whole numbers ("integers" cases, world sizes 1, 2 and 4): equal to the bit;
* others, computed in fp64: |a - b| <= 1e-7 * (1 + max |b| of the tensor), which a few steps may make of 1e-16; computed in
  fp32 (the case, or the one parameter): 1e-4 instead of 1e-7;
* half precision is drawn with whole numbers only;
* state that loading a checkpoint has made of nothing, for parameters without gradients, is zero and may be there;
* missing gradients are missing on both sides; ranks that hold the same rows hold the same values, and all rows are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fuzz.case import Settings
from fuzz.record import WRITTEN, Array, Part, Raised, Record, Tale

Kind = Literal["equal", "refused", "excused", "as torch", "numbers", "raw error", "some ranks", "gone", "memory"]
_PAST_THE_PARAMETER = ("change data_", "change detach", "change local", "change through")  # labels of writes to aliases
_UNTRUE = "the module tree after its units were made"  # no program adds parameters to a sharded model
_ANY_SIZE = 1e3  # a difference that a bound this wide does not take is of shape, or of a tensor that is missing
_CHAOS = 1e3  # how much smaller the drift of a nudged process may be than a difference it excuses
FAILURES: tuple[Kind, ...] = ("numbers", "raw error", "some ranks", "gone", "memory")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one contender.

    Attributes:
        kind: "equal"; "refused" by a named error on every rank; "excused": the reference itself raised, or makes other
            numbers of its own last bits; "as torch":
            unlike one process, but like torch's own class; or a failure: other "numbers", an error that is not ours or
            without words ("raw error"), on "some ranks" only, a rank that hung or died ("gone"), more full parameters
            alive than planned ("memory").
        text: the first difference, or the error.
        what: the quantity or error class, for telling failures apart.
    """

    kind: Kind
    text: str = ""
    what: str = ""

    @property
    def is_failure(self) -> bool:
        """True if somebody should look at it."""
        return self.kind in FAILURES


def bound_of(settings: Settings, num_data_ranks: int) -> float:
    """Return the largest difference, relative to 1 + max |b|; 0 means equal to the bit."""
    if settings.arithmetic == "integers" and num_data_ranks & (num_data_ranks - 1) == 0:
        return 0.0
    is_wide = settings.dtype == "float64" and settings.reduce != "float32"
    return 1e-7 if is_wide else 1e-4


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a contender first shows something else.

    Attributes:
        moment: number of the record.  what: kind of quantity, e.g. "grad".
    """

    moment: int
    what: str
    text: str


def first_difference(theirs: Sequence[Tale], ours: Sequence[Tale], bound: float) -> Difference | None:
    """Return the first difference, None if there is none up to where either raised.

    While a unit is unsharded its parameters are registered whole, and the optimizer has the shards.  One of the two may
    show old values for a time and training be right, so such a difference comes last, as kind "full".  What is written
    to an alias of one of them (``.data``, ``.detach()``) need not show in the other before the next forward or step.

    Args:
        theirs: of the reference, one per rank with batches of its own.  ours: one per rank.
    """
    shared = len(ours) // len(theirs)
    stale: Difference | None = None
    waits = False
    for moment in range(min(len(tale.records) for tale in (*theirs, *ours))):
        expected = [tale.records[moment] for tale in theirs]
        found = [tale.records[moment] for tale in ours]
        place = f"at moment {moment}, {found[0].label!r}"
        waits = _waits(found[0].label, waits)
        difference = _between(expected, found, shared, bound, waits)
        if difference is not None:
            what, text = difference
            return Difference(moment, what, f"{place}: {text}")
        text = _between_full(expected[0], found, bound) if stale is None and not waits else None
        if text is not None:
            stale = Difference(moment, "full", f"{place}: {text}")
    return stale


def _waits(label: str, waited: bool) -> bool:
    """Return whether an alias has been written to and no forward or step has come since."""
    if label.startswith(_PAST_THE_PARAMETER):
        return True
    return waited and not label.startswith(("forward", "step"))


def _between(
    expected: Sequence[Record], found: Sequence[Record], shared: int, bound: float, waits: bool
) -> tuple[str, str] | None:
    hidden = expected[0].hidden | found[0].hidden
    if waits and any(name.startswith("full:") for name in found[0].shared):
        hidden = hidden | {"kept"}  # aliases of shards, while the full form has been written to
    for name in expected[0].shared:
        kind = name.split(":")[0]
        if kind in hidden:
            continue
        parts = [each.shared.get(name) for each in found]
        if kind == "state" and any(parts):
            parts = [part for part in parts if part is not None]  # of a whole matrix, its owner alone
        text = _differ_shared(parts, expected[0].shared[name], bound)
        if text is not None and not _full_is_right(name, expected[0], found, bound):
            return kind, f"{name}: {text}"
    extra = [
        name
        for name, part in found[0].shared.items()
        if name not in expected[0].shared
        and name.split(":")[0] not in (*hidden, "full")
        and not _is_blank_state(name, part)
    ]
    if extra:
        return extra[0].split(":")[0], f"{extra[0]} is not there in one process"
    for rank, record in enumerate(found):
        for name, value in expected[rank // shared].own.items():
            mine = record.own.get(name)
            text = _missing(mine, value) if mine is None or value is None else _differ(mine.values, value.values, bound)
            if text is not None:
                return name.split(":")[0], f"{name} of rank {rank}: {text}"
    return None


def _full_is_right(name: str, expected: Record, found: Sequence[Record], bound: float) -> bool:
    """True if ``name`` is a parameter that is registered whole, with the values of one process."""
    full = [each.shared.get(name.replace("param:", "full:")) for each in found]
    return name.startswith("param:") and any(full) and _differ_shared(full, expected.shared[name], bound) is None


def _between_full(expected: Record, found: Sequence[Record], bound: float) -> str | None:
    """Return how parameters that are registered whole, or the shards behind them, differ from those of one process."""
    if "param" in found[0].hidden:
        return None
    for full in [name for name in found[0].shared if name.startswith("full:")]:
        name = full.replace("full:", "param:")
        for shown in (full, name):
            text = _differ_shared([each.shared.get(shown) for each in found], expected.shared[name], bound)
            if text is not None:
                return f"{shown}: {text}"
    return None


def _is_blank_state(name: str, part: Part | None) -> bool:
    """True for state that loading has made for a parameter which never had a gradient: zeros, and a count of steps."""
    return name.startswith("state:") and part is not None and (name.endswith(":step") or not part.values.any())


def _missing(found: Part | None, expected: Part | None) -> str | None:
    if found is None and expected is None:
        return None
    return f"found {_show(found)}, expected {_show(expected)}"


def _show(part: Part | None) -> str:
    return "none" if part is None else f"{part.dtype}{list(part.shape)}"


def _differ_shared(found: Sequence[Part | None], expected: Part | None, bound: float) -> str | None:
    if expected is None or any(part is None for part in found):
        for rank, part in enumerate(found):
            if part is not None or expected is not None:
                text = _missing(part, expected) if part is None or expected is None else None
                if text is not None:
                    return f"rank {rank}: {text}"
        return None
    parts = [part for part in found if part is not None]
    for rank, part in enumerate(parts):
        if part.shape != expected.shape or (part.dtype and part.dtype != expected.dtype):
            return f"rank {rank}: found {_show(part)}, expected {_show(expected)}"
    covered = np.zeros(expected.shape, dtype=bool)
    for rank, part in enumerate(parts):
        place = tuple(slice(start, start + size) for start, size in zip(part.offset, part.values.shape, strict=True))
        text = _differ(part.values, expected.values[place], _bound_for(expected, bound))
        if text is not None:
            return f"rank {rank}: {text}"
        covered[place] = True
    return None if covered.all() else f"{int((~covered).sum())} elements are held by no rank"


def _bound_for(expected: Part, bound: float) -> float:
    """Return the bound for one tensor: some parameters of a model in float64 are float32."""
    return max(bound, 1e-4) if bound and expected.dtype == "float32" else bound


def _differ(found: Array, expected: Array, bound: float) -> str | None:
    if found.shape != expected.shape:
        return f"found shape {found.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        limit = bound * (1 + np.abs(expected).max(initial=0.0))
        same = (np.abs(found - expected) <= limit) | (np.isnan(found) & np.isnan(expected)) | (found == expected)
    if same.all():
        return None
    first = tuple(int(index[0]) for index in np.nonzero(~same)) if same.ndim else ()
    return (
        f"{int((~same).sum())} of {same.size} elements differ, first at {list(first)}: "
        f"found {float(found[first])!r}, expected {float(expected[first])!r}"
    )


def is_chaotic(reference: Sequence[Tale], nudged: Sequence[Tale], ours: Sequence[Tale], bound: float) -> bool:
    """True if ``ours`` are no further from ``reference`` than it is from itself once its parameters were ``nudged``.

    That is, by their first difference it had shown one already, of a size not much smaller: a batch norm over two rows, or
    sines of large numbers, make anything of the last bit.  Nothing excuses a tensor that is missing or of another shape.
    """
    difference = first_difference(reference, ours, bound)
    if difference is None:
        return False
    size = bound
    while (still := first_difference(reference, ours, 10 * size)) is not None and still.moment == difference.moment:
        size *= 10
        if size > _ANY_SIZE:
            return False
    drift = first_difference(reference, nudged, max(bound, size / _CHAOS))
    return drift is not None and drift.moment <= difference.moment


def judge(
    reference: Sequence[Tale], ours: Sequence[Tale], torchs: Sequence[Tale] | None, bound: float, is_engine: bool = True
) -> Verdict:
    """Return the verdict over ``ours``, tales of all ranks; ``torchs`` are those of torch's own class, None without one.

    Args:
        is_engine: False for APIs inside torch's own DDP, whose errors are not ours.
    """
    difference = first_difference(reference, ours, bound)
    reference_raised = _first_raised(reference)
    raised = [tale.raised for tale in ours]
    if difference is not None:
        is_as_torch = _as_torch(ours, torchs, bound, difference.moment + 1, is_engine)
        return Verdict("as torch" if is_as_torch else "numbers", difference.text, difference.what)
    first = next((each for each in raised if each is not None), None)
    if first is None:
        return _judge_end(reference, ours, torchs, bound)
    if any(each is None for each in raised):
        ranks = [rank for rank, each in enumerate(raised) if each is not None]
        return Verdict("some ranks", f"only ranks {ranks} raised {first.kind}: {first.text}", first.kind)
    if reference_raised is not None and len(ours[0].records) >= len(reference[0].records):
        return Verdict("excused", f"one process raises {reference_raised.kind}, ours {first.kind}: {first.text}")
    rough = next((each for each in raised if each is not None and not each.is_named), None)
    if rough is None and first.text.partition(_UNTRUE)[1]:
        return Verdict("raw error", f"untrue: {first.text}", first.kind)
    if rough is None:
        return Verdict("refused", f"{first.kind}: {first.text}", first.kind)
    if _raises_as_torch(ours, torchs, is_engine):
        return Verdict("as torch", f"{rough.kind}: {rough.text}", rough.kind)
    return Verdict("raw error", f"{rough.kind}: {rough.text}", rough.kind)


def _first_raised(reference: Sequence[Tale]) -> Raised | None:
    """Return what the reference raised; the other ranks of it only miss the one that raised."""
    found = [tale.raised for tale in reference if tale.raised is not None]
    return next((each for each in found if each.kind != "LeftBehind"), found[0] if found else None)


def _raises_as_torch(ours: Sequence[Tale], torchs: Sequence[Tale] | None, is_engine: bool) -> bool:
    """True if torch's own class raises the same: at the same moment the same words, or inside of DDP the same class."""
    if torchs is None or len(torchs) != len(ours):
        return False
    for mine, theirs in zip(ours, torchs, strict=True):
        if mine.raised is None or theirs.raised is None or mine.raised.kind != theirs.raised.kind:
            return False
        same_place = len(mine.records) == len(theirs.records) and mine.raised.text[:60] == theirs.raised.text[:60]
        if is_engine and not same_place:
            return False
    return True


def _judge_end(reference: Sequence[Tale], ours: Sequence[Tale], torchs: Sequence[Tale] | None, bound: float) -> Verdict:
    raised = _first_raised(reference)
    if raised is not None:
        text = f"one process raises {raised.kind}: {raised.text}; ours goes on"
        if raised.text.startswith(WRITTEN):
            return Verdict("excused", text, raised.kind)  # what was written before backward may be gathered again
        if torchs is None or any(
            len(theirs.records) < len(mine.records) for theirs, mine in zip(torchs, ours, strict=False)
        ):
            return Verdict("excused", text, raised.kind)  # torch's own class raises too, or does not take the model
        if _as_torch(ours, torchs, bound, len(ours[0].records)):
            return Verdict("as torch", text, raised.kind)
        return Verdict("numbers", f"{text}, and not as torch's own class", raised.kind)
    notes = [f"rank {rank}: {note}" for rank, tale in enumerate(ours) for note in tale.notes]
    return Verdict("memory", notes[0], "memory") if notes else Verdict("equal")


def _as_torch(
    ours: Sequence[Tale], torchs: Sequence[Tale] | None, bound: float, num_moments: int, is_engine: bool = True
) -> bool:
    """True if both show the same in ``num_moments`` records or more, as far as both go.

    What is cut over the ranks need not be cut alike.  Inside of DDP no more than ``num_moments`` count: where that has left
    ranks with gradients of their own, ZeRO's step sends those of one rank to all.
    """
    if torchs is None or len(torchs) != len(ours):
        return False
    shared = min(len(tale.records) for tale in (*ours, *torchs))
    if shared < num_moments:
        return False
    for moment in range(shared if is_engine else num_moments):
        mine, theirs = [tale.records[moment] for tale in ours], [tale.records[moment] for tale in torchs]
        hidden = mine[0].hidden | theirs[0].hidden | {"full"}  # which is registered when is each class's own affair
        for name in {name for record in theirs for name in record.shared}:
            kind = name.split(":")[0]
            if kind in hidden or (kind == "state" and not any(name in record.shared for record in mine)):
                continue
            left, right = (_whole([record.shared.get(name) for record in records]) for records in (mine, theirs))
            if (left is None) != (right is None) or (
                left is not None and right is not None and _differ(left, right, bound)
            ):
                return False
        for left, right in zip(mine, theirs, strict=True):
            for name, part in right.own.items():
                other = left.own.get(name)
                if (part is None) != (other is None):
                    return False
                if part is not None and other is not None and _differ(other.values, part.values, bound):
                    return False
    return True


def _whole(parts: Sequence[Part | None]) -> Array | None:
    """Return a tensor of which each rank holds a part, NaN where none holds anything; None if nobody has it."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    whole = np.full(found[0].shape, np.nan)
    for part in found:
        place = tuple(slice(start, start + size) for start, size in zip(part.offset, part.values.shape, strict=True))
        whole[place] = part.values
    return whole
