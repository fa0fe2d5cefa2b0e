"""Compare recordings: which tensor differs first and by what, what ranks differ in, and what a script does in all runs.

Nothing here communicates or computes tensors: a recording is files of sketches.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import UnsafeFileError
from shardwise.formatting import format_ranks
from shardwise.prove.sketch import NUM_SUMS
from shardwise.safe_files import open_input, parse_object

Sums = NDArray[np.float64]
ByRank = dict[int, Sums]
EPS = 2.0**-23
_UNMEASURED = 16 * EPS  # of two runs whose rounding was not measured, relative to a tensor's norm
_SAME = 1e-3  # of a tensor's norm: what a sentence about it may be off by
_MOST_NAMES = 4
_ORDER = {
    "step gradient": 1,
    "parameter": 2,
    "buffer": 3,
    "state": 4,
}  # of a step; the others are in the order of the run
PER_RANK = ("input", "output", "loss")  # of data that each rank has for itself
_STAGES = {"step gradient": "gradient", "state": "optimizer state", "initial": "initial value"}


class Key(NamedTuple):
    """What was recorded: ``stage`` is what, ``microbatch`` when, ``name`` of which part of the model."""

    stage: str
    microbatch: int
    name: str

    def __str__(self) -> str:
        what = _STAGES.get(self.stage, self.stage)
        when = f"microbatch {self.microbatch + 1}  " if self.stage in (*PER_RANK, "gradient") else ""
        return f"{when}{self.name if self.name == 'the loss' else f'{what} of {self.name}'}"


@dataclass
class Row:
    """One step of one optimizer; step -1: before the first one."""

    step: int
    values: dict[Key, ByRank] = field(default_factory=dict[Key, ByRank])
    facts: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])

    def of(self, stage: str) -> dict[str, ByRank]:
        """Return what was recorded of ``stage``, by name; the last microbatch counts."""
        return {key.name: found for key, found in self.values.items() if key.stage == stage}

    def own(self, name: str) -> list[ByRank]:
        """Return what each microbatch has added to the gradient of ``name``, by rank."""
        found: dict[int, ByRank] = {}
        for key, by_rank in self.values.items():
            if key.stage == "own" and key.name.partition(" (call ")[0] == name:
                total = found.setdefault(key.microbatch, {})
                for rank, sums in by_rank.items():
                    total[rank] = total.get(rank, 0) + sums
        return [found[number] for number in sorted(found)]


@dataclass
class Recording:
    """What ranks have recorded, by (step, optimizer)."""

    ranks: tuple[int, ...]
    rows: dict[tuple[int, int], Row]

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read the files of a folder.  Raises: UnsafeFileError for one that is none of a recording."""
        rows: dict[tuple[int, int], Row] = {}
        parts: dict[tuple[tuple[int, int], Key, str], ByRank] = {}
        ranks = sorted(int(path.stem.partition("-")[2]) for path in folder.glob("rank-*.jsonl"))
        for rank in ranks:
            for line in lines_of(folder, f"rank-{rank}.jsonl"):
                place = line["step"], line["optimizer"]
                row = rows.setdefault(place, Row(line["step"]))
                row.facts[rank] = line
                for text, (of, *numbers) in line.pop("values").items():
                    stage, microbatch, name = text.split("|", 2)
                    key = Key(stage, int(microbatch), name)
                    found = row.values.setdefault(key, {})
                    if of:
                        parts.setdefault((place, key, of), {})[rank] = np.array(numbers)
                    else:
                        found[rank] = np.array(numbers)
        for (place, key, of), found in parts.items():
            owners = [int(each) for each in of.split(",")]
            if all(each in found for each in owners):
                whole: Sums = np.sum([found[each] for each in owners], 0)
                rows[place].values[key].update(dict.fromkeys(owners, whole))
        return cls(tuple(ranks), rows)

    @property
    def steps(self) -> list[Row]:
        """The rows of steps, without those before the first one."""
        return [row for row in self.rows.values() if row.step >= 0]

    def before(self, place: tuple[int, int], name: str) -> ByRank:
        """Return the last recorded values of a parameter before ``place``."""
        found: ByRank = {}
        for other, row in self.rows.items():
            if other == place:
                break
            found = row.values.get(Key("parameter", 0, name), found)
        return found


def lines_of(folder: Path, name: str, what: str = "values") -> Generator[dict[str, Any], None, None]:
    """Yield the lines of a file of a recording, a step each.  Raises: UnsafeFileError for a line without ``what``."""
    with open_input(folder, name) as file:
        for line in file:
            if line.endswith(b"\n"):
                found = parse_object(line.decode(errors="replace"), str(folder / name))
                if type(found.get("step")) is not int or not isinstance(found.get(what), dict):
                    raise UnsafeFileError(f"{folder / name}: a line has no step or no {what}. Remove it")
                yield found


def norm(sums: Sums) -> float:
    """Return the norm of a tensor, from its sum of squares."""
    return float(np.sqrt(np.abs(sums[NUM_SUMS])))


def distance(first: Sums, second: Sums) -> float:
    """Return an estimate of the norm of the difference of two tensors."""
    return float(np.sqrt(np.mean(np.square(first[:NUM_SUMS] - second[:NUM_SUMS]))))


def is_finite(sums: Sums) -> bool:
    """Return False for a tensor with nan or inf."""
    return bool(np.isfinite(sums).all())


@dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        kind: "wrapper", "ranks" or "script".
        step: from 1 on; 0: before the first.
        what: the tensor, or what else differs.
        text: how.
        factor: the ratio to the reference, if it is constant.
        times: how often it is what rounding does.
        ranks: where.
    """

    kind: str
    step: int
    what: str
    text: str
    factor: float | None = None
    times: float = math.inf
    ranks: tuple[int, ...] = ()
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, which has no inf."""
        return {**asdict(self), "times": self.times if math.isfinite(self.times) else None}

    def __str__(self) -> str:
        where = f" (on rank {format_ranks(self.ranks)[5:].strip()})" if len(self.ranks) == 1 else ""
        return f"{f'step {self.step}  ' if self.step else ''}{self.what}: {self.text}{where}"


# ---- Rounding, as a third run has measured it.


@dataclass(frozen=True)
class Rounding:
    """How far rounding alone moves tensors.

    Args:
        reference, moved: two runs that differ by rounding; ``moved`` None: it was not measured.
        limit: a difference is a fault if it is so many times what rounding does.
    """

    reference: Recording
    moved: Recording | None
    limit: float

    def of_row(self, place: tuple[int, int]) -> dict[Key, float]:
        """Return it for each key of a row: the largest of all ranks, and no less than is usual for tensors of its kind."""
        row = self.reference.rows[place]
        other = None if self.moved is None else self.moved.rows.get(place)
        found: dict[Key, float] = {}
        sizes: dict[Key, float] = {}
        usual: dict[str, list[float]] = {}
        for key, by_rank in row.values.items():
            theirs = {} if other is None else other.values.get(key, {})
            moved = [distance(sums, theirs[rank]) for rank, sums in by_rank.items() if rank in theirs]
            found[key] = max((each for each in moved if math.isfinite(each)), default=0.0)
            sizes[key] = max((norm(sums) for sums in by_rank.values() if is_finite(sums)), default=0.0)
            if sizes[key]:
                usual.setdefault(key.stage, []).append(found[key] / sizes[key])
        least = EPS if self.moved is not None else _UNMEASURED
        for key, size in sizes.items():
            found[key] = max(found[key], size * max(float(np.median(usual.get(key.stage, [0.0]))), least), 1e-30)
        return self._with_flips(place, found)

    def _with_flips(self, place: tuple[int, int], found: dict[Key, float]) -> dict[Key, float]:
        """Return ``found``, of parameters no less than the largest part of an update that rounding changes.

        Optimizers that divide by the size of a gradient turn elements near zero: of few elements, by chance.
        """
        updates: dict[Key, float] = {}
        for key, by_rank in self.reference.rows[place].values.items():
            before = self.reference.before(place, key.name) if key.stage == "parameter" else {}
            moved = [distance(sums, before[rank]) for rank, sums in by_rank.items() if rank in before]
            updates |= {key: max(moved)} if moved else {}
        most = max((found[key] / size for key, size in updates.items() if size > found[key]), default=0.0)
        return found | {key: max(found[key], most * size) for key, size in updates.items()}


# ---- What differs, in words that a comparison of sketches backs.


def factor_of(found: Sums, reference: Sums) -> float | None:
    """Return k if ``found`` is k times ``reference``, else None."""
    a, b = found[:NUM_SUMS], reference[:NUM_SUMS]
    if not (is_finite(found) and is_finite(reference) and norm(reference)):
        return None
    k = float(a @ b / (b @ b))
    return k if distance(found, reference * k) <= _SAME * max(norm(found), abs(k) * norm(reference)) else None


def constants(row: Row, name: str) -> list[tuple[float, str]]:
    """Return the numbers by which sums and means of this row are wrong if they are, with their names."""
    facts = next(iter(row.facts.values()))
    sizes = [("ranks", int(facts.get("ranks", 1))), ("microbatches", int(facts.get("microbatches", 1)))]
    for unit in facts.get("units", ()):
        if name in unit["names"] and len(unit["sizes"]) > 1:
            sizes += [
                (f'the size of axis "{axis}"', size) for axis, size in zip(unit["axes"], unit["sizes"], strict=True)
            ]
    asked = {"ranks": ("averaged twice?", "summed where it should be averaged?")}
    found: list[tuple[float, str]] = [(-1.0, "the sign is wrong"), (0.0, "zero")]
    for what, size in sizes:
        less, more = asked.get(what, ("divided twice?", "not divided?"))
        if size > 1:
            found += [(1 / size, f"1/{size} = 1/{what}: {less}"), (float(size), f"{size} = {what}: {more}")]
    return found


def words_for_factor(k: float, row: Row, name: str) -> str:
    """Return what a factor is equal to, in brackets; empty if it is none of :func:`constants`."""
    named = [text for value, text in constants(row, name) if abs(k - value) <= _SAME * max(abs(value), _SAME)]
    return f" ({'; or '.join(named)})" if named else ""


def _mean(by_rank: ByRank, ranks: Iterable[int] | None = None) -> Sums:
    found = [by_rank[rank] for rank in (by_rank if ranks is None else ranks) if rank in by_rank]
    return np.mean(found, 0)


def parts_of_gradient(row: Row, name: str, rank: int, stop: int | None = None) -> dict[str, Sums]:
    """Return what a wrong gradient may be after ``stop`` microbatches, from what backwards have added: by the words for it."""
    own, group = row.own(name)[:stop], group_of(row, name)
    if not own or any(rank not in each for each in own):
        return {}
    found = {"this rank's own part": np.sum([each[rank] for each in own], 0)} if len(group) > 1 else {}
    if len(own) > 1:
        means = [_mean(each, group) for each in own]
        found |= {"the last microbatch alone": means[-1], "the first microbatch alone": means[0]}
        found |= {"this rank's own part of the last microbatch": own[-1][rank]}
        found |= {"the sum of all microbatches, also of those that were cleared": np.sum(means, 0)}
    return found


def _unit_of(row: Row, name: str) -> dict[str, Any]:
    units = next(iter(row.facts.values())).get("units", ())
    return next((unit for unit in units if name in unit["names"]), {})


def group_of(row: Row, name: str) -> tuple[int, ...]:
    """Return the ranks over which the gradient of ``name`` is averaged; all ranks if nothing wraps it."""
    return tuple(_unit_of(row, name).get("ranks", row.facts))


@dataclass(frozen=True)
class Pair:
    """A tested and a reference recording, and a row of both."""

    tested: Recording
    reference: Recording
    place: tuple[int, int]

    def words(self, key: Key, rank: int, found: Sums, expected: Sums) -> tuple[str, float | None]:
        """Return how ``found`` differs, in words, and the factor."""
        row = self.reference.rows[self.place]
        if not is_finite(found) or not is_finite(expected):
            return (
                "is not finite, and the reference is" if is_finite(expected) else "is finite, and the reference is not"
            ), None
        if key.stage == "parameter":
            before = self.tested.before(self.place, key.name).get(rank)
            if before is not None and distance(found, before) <= EPS * norm(found):
                return "equal to the value before the step", None
        if key.stage in ("gradient", "step gradient"):
            stop = key.microbatch + 1 if key.stage == "gradient" else None
            for words, part in parts_of_gradient(row, key.name, rank, stop).items():
                off = distance(found, part)
                if norm(part) and off <= min(_SAME * norm(part), distance(found, expected) / 10):
                    return words, factor_of(found, expected)
        k = factor_of(found, expected)
        if k is not None and abs(k - 1) > _SAME:
            return f"{k:.3f} x the reference{words_for_factor(k, row, key.name)}", k
        if key.stage not in PER_RANK or key.stage == "output":
            for other, theirs in row.values[key].items():
                if other != rank and distance(found, theirs) <= EPS * norm(theirs):
                    return f"equal to that of rank {other}", None
        off = distance(found, expected) / max(norm(expected), norm(found))
        return f"differs by {off:.2g} of its norm", None


def compare(
    tested: Recording, rounding: Rounding, only: str | None, exact: bool = False
) -> tuple[list[Finding], dict[str, dict[str, float]]]:
    """Return the differences of the first step that has one, in the order of the step, and how far all tensors are apart.

    The second is by stage and name, in multiples of rounding; inf for a fault.
    """
    reference, times = rounding.reference, dict[str, dict[str, float]]()
    is_alike = tested.ranks == reference.ranks
    for place, row in reference.rows.items():
        mine = tested.rows.get(place)
        if mine is None:
            if row.step < 0:
                continue
            return [Finding("wrapper", row.step + 1, "the step", "was not made by the script as it is")], times
        pair, noise = Pair(tested, reference, place), rounding.of_row(place)
        here: list[tuple[Key, Finding]] = []
        for key in sorted({**mine.values, **row.values}, key=lambda each: _ORDER.get(each.stage, 0)):
            if only is not None and not fnmatch.fnmatchcase(key.name, only):
                continue
            if key.stage in ("own", "initial") or (key.stage in PER_RANK and not is_alike):
                continue
            worst = _worst(pair, key, noise.get(key, 0.0), is_alike, 0.0 if exact else rounding.limit)
            if worst is not None:
                own = times.setdefault(key.stage, {})
                own[key.name] = max(own.get(key.name, 0.0), math.inf if isinstance(worst, Finding) else worst)
            if isinstance(worst, Finding):
                here.append((key, worst))
        wrong = {key.name for key, _ in here if key.stage == "step gradient"}
        # Where gradients are complete with the step alone, those of single microbatches may be in another order.
        found = [each for key, each in here if key.stage != "gradient" or key.name in wrong]
        found += list(_facts_that_differ(mine, row, "wrapper")) if is_alike else []
        if found:
            return found, times
    return [], times


def compare_initial(tested: Recording, plain: Recording, limit: float) -> Iterator[Finding]:
    """Yield the parameters that the two scripts have initialised otherwise."""
    for place, row in plain.rows.items():
        values = tested.rows[place].of("parameter") if place in tested.rows else {}
        for name, by_rank in row.of("initial").items():
            for rank, sums in by_rank.items():
                found = values.get(name, {}).get(rank)
                if found is not None and not distance(found, sums) <= limit * EPS * norm(sums):
                    k = factor_of(found, sums)
                    text = "differs from that of the plain model" if k is None else f"{k:.3f} x that of the plain model"
                    yield Finding("wrapper", 0, f"initial value of {name}", text, k, ranks=(rank,), name=name)
                    break


def _worst(pair: Pair, key: Key, noise: float, is_alike: bool, limit: float) -> Finding | float | None:
    """Return the difference on the rank where it is largest, as a number if it is no fault; None if nothing can be compared."""
    mine, theirs = (each.rows[pair.place].values.get(key, {}) for each in (pair.tested, pair.reference))
    step = pair.reference.rows[pair.place].step + 1
    if not mine or not theirs:
        lone = max((norm(sums) for sums in (mine or theirs).values()), default=0.0)
        if key.stage not in ("step gradient", "parameter") or not lone:
            return None
        text = "has none, and the reference has one" if theirs else "has one, and the reference has none"
        return Finding("wrapper", step, str(key), text, ranks=tuple(mine or theirs), name=key.name)
    pairs = [(rank, rank) for rank in theirs if rank in mine] if is_alike else [(min(mine), min(theirs))]
    shapes = [each.rows[pair.place].facts for each in (pair.tested, pair.reference)]
    pairs = [at for at in pairs if _shape(shapes[0][at[0]], key) == _shape(shapes[1][at[1]], key)]
    if not pairs:
        return None  # local parts of activations, or of states
    times = {at: _times(mine[at[0]], theirs[at[1]], noise) for at in pairs}
    bad = [at for at, each in times.items() if not each <= limit]
    if not bad:
        return max(times.values())
    at = max(bad, key=lambda each: times[each])
    text, factor = pair.words(key, at[1], mine[at[0]], theirs[at[1]])
    ranks = tuple(rank for rank, _ in bad)
    return Finding("wrapper", step, str(key), text, factor, times[at], ranks, key.name)


def _shape(facts: Mapping[str, Any], key: Key) -> Any:
    return facts.get("shapes", {}).get(f"{key.stage}|{key.microbatch}|{key.name}")


def _times(found: Sums, expected: Sums, noise: float) -> float:
    if len(found) > NUM_SUMS + 1:  # of recordings to be compared exactly
        return 0.0 if _digest(found) == _digest(expected) else math.inf
    if is_finite(found) and is_finite(expected):
        return distance(found, expected) / noise if noise else math.inf
    return 0.0 if is_finite(found) == is_finite(expected) else math.inf


def _digest(sums: Sums) -> int:
    high, low = sums[NUM_SUMS + 1 :]
    return ((int(high) << 32) + int(low)) % (1 << 64)


def _facts_that_differ(mine: Row, row: Row, kind: str) -> Iterator[Finding]:
    for name, what in (("lr", "the learning rate"), ("microbatches", "the number of microbatches")):
        for rank, facts in row.facts.items():
            own = mine.facts.get(rank, {}).get(name)
            if own is not None and not np.allclose(own, facts[name], rtol=1e-6, atol=0.0):
                yield Finding(kind, row.step + 1, what, f"is {own}, and {facts[name]} in the reference", ranks=(rank,))
                break


# ---- The ranks of one run, held against each other.


def compare_ranks(run: Recording) -> Iterator[Finding]:
    """Yield in what ranks differ that began with the same parameters, in the order of steps."""
    first: dict[str, ByRank] = {}
    for row in run.rows.values():
        for name, by_rank in row.of("parameter").items():
            first.setdefault(name, by_rank)
    counts = {rank: len([row for row in run.steps if rank in row.facts]) for rank in run.ranks}
    for row in run.steps:
        step = row.step + 1
        for what, text in (("lr", "the learning rate"), ("backwards", "the number of backwards before the step")):
            told = {rank: str(np.round(facts[what], 12).tolist()) for rank, facts in row.facts.items()}
            if len({*told.values()}) > 1:
                yield Finding("ranks", step, text, "; ".join(f"{each} on rank {rank}" for rank, each in told.items()))
        for stage in ("parameter", "state"):
            for name, by_rank in row.of(stage).items():
                start = first.get(name if stage == "parameter" else name.rpartition(".")[0], {})
                apart = _apart(by_rank, start)
                if apart:
                    what = f"{_STAGES.get(stage, stage)} of {name}"
                    text = f"differs between ranks {apart[0]} and {apart[1]}, which began with the same parameters"
                    yield Finding("ranks", step, what, text, ranks=apart, name=name)
    if len({*counts.values()}) > 1:
        text = "; ".join(f"{count} on rank {rank}" for rank, count in counts.items())
        yield Finding("ranks", min(counts.values()) + 1, "the number of steps", text)


def _apart(by_rank: ByRank, start: Mapping[int, Sums] | None) -> tuple[int, int] | None:
    """Return two ranks that had the same at the start and differ now; ``start`` None: it does not matter."""
    ranks = sorted(by_rank)
    for number, one in enumerate(ranks):
        for other in ranks[number + 1 :]:
            is_same = start is None
            if start is not None and one in start and other in start:
                is_same = distance(start[one], start[other]) <= EPS * norm(start[one])
            far = distance(by_rank[one], by_rank[other])
            if is_same and not far <= 64 * EPS * norm(by_rank[one]):
                return one, other
    return None


# ---- What the script does with gradients and data, in both runs alike.


def notes_of(plain: Recording) -> Iterator[tuple[Finding, bool]]:
    """Yield what became of what backwards have computed, and what ranks were given, and whether ``--strict`` refuses it."""
    earlier: dict[
        str, list[ByRank]
    ] = {}  # what zero_grad() should have cleared: of other losses, and with the last step
    last: Row | None = None
    for row in plain.steps:
        found: dict[str, list[tuple[str, float | None]]] = {}
        stepped = row.of("parameter")
        for name in {key.name.partition(" (call ")[0]: None for key in row.values if key.stage == "own"}:
            gradients, mean = row.of("step gradient").get(name, {}), mean_of(row, name)
            if name in stepped:
                for text, factor in {_fate(row, name, each, earlier.get(name, ())) for each in gradients.items()}:
                    found.setdefault(text, []).append((name, factor))
                earlier[name] = [dict.fromkeys(gradients, mean * 0), gradients]
            else:
                kept = earlier.get(name, [dict.fromkeys(row.facts, mean * 0)])
                earlier[name] = [{rank: sums + mean for rank, sums in each.items()} for each in kept]
        found.pop("", None)
        yield from _clipping(row, found)
        for text, names in found.items():
            shown = ", ".join(name for name, _ in names[:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)
            what = f"gradient of {shown}" if len(names) < 2 else f"{len(names)} gradients ({shown})"
            yield Finding("script", row.step + 1, what, text, names[0][1], name=names[0][0]), text != _UNEXPLAINED
        yield from _given(row, last)
        last = row
        for name, by_rank in row.of("buffer").items():
            apart = _apart(by_rank, None)
            if apart and not next(iter(row.facts.values())).get("shares_buffers"):
                text = f"differs between ranks {apart[0]} and {apart[1]}, and a checkpoint has one of them"
                yield Finding("script", row.step + 1, f"buffer of {name}", text, ranks=apart, name=name), True
    for row in plain.rows.values():
        for text in next(iter(row.facts.values())).get("untied", ()):
            yield Finding("script", 0, text, "were one parameter when they were wrapped, and are several now"), True


_UNEXPLAINED = "are no multiple of what backward has computed"


def mean_of(row: Row, name: str) -> Sums:
    """Return the mean over ranks of what a step's backwards have added to the gradient of ``name``, or the sum asked for."""
    group = group_of(row, name)
    total: Sums = np.sum([_mean(each, group) for each in row.own(name)], 0)
    return total * (len(group) / (_unit_of(row, name).get("divide_by") or len(group)))


def _fate(row: Row, name: str, at: tuple[int, Sums], earlier: Sequence[ByRank]) -> tuple[str, float | None]:
    """Return what became of the gradients of ``name`` until the step; an empty text if it is their mean over ranks."""
    (rank, sums), mean = at, mean_of(row, name)
    rounding = 64 * EPS * max((norm(each) for part in row.own(name) for each in part.values()), default=0.0)
    if not norm(sums) or not is_finite(sums) or distance(sums, mean) <= max(_SAME * norm(mean), rounding):
        return "", None
    for text, part in parts_of_gradient(row, name, rank).items():
        if distance(sums, part) <= _SAME * norm(part):
            return text, None
    for kept in earlier:
        if rank in kept and distance(sums, mean + kept[rank]) <= _SAME * norm(sums):
            return "gradients of earlier backwards are still in it (zero_grad() was not called after them)", None
    k = factor_of(sums, mean)
    if k is None:
        return _UNEXPLAINED, None
    return f"{k:.3f} x their mean over ranks{words_for_factor(k, row, name)}", k


def _clipping(row: Row, found: dict[str, list[tuple[str, float | None]]]) -> Iterator[tuple[Finding, bool]]:
    """Say once that all gradients were scaled by one factor that is no constant of :func:`constants`, as clipping does."""
    factors = [k for names in found.values() for _, k in names if k is not None]
    plain = [text for text, names in found.items() if names[0][1] is not None and "(" not in text]
    if factors and plain and max(factors) - min(factors) <= _SAME * abs(factors[0]):
        total = math.sqrt(sum(norm(next(iter(each.values()))) ** 2 for each in row.of("step gradient").values()))
        for text in plain:
            del found[text]
        text = f"scaled by {factors[0]:.4g} to a norm of {total:.4g} (clipping or loss scaling)"
        yield Finding("script", row.step + 1, "all gradients", text, factors[0]), False


def _given(row: Row, last: Row | None) -> Iterator[tuple[Finding, bool]]:
    """Say which ranks were given the same data, and the same random numbers."""
    inputs = [found for key, found in row.values.items() if key.stage == "input"]
    units = next(iter(row.facts.values())).get("units", ())
    pairs = [(one, other) for one in row.facts for other in row.facts if one < other]
    for one, other in pairs:
        shared = [found for found in inputs if one in found and other in found]
        if shared and all(np.array_equal(found[one], found[other]) for found in shared):
            are_averaged = not units or any({one, other} <= {*unit["ranks"]} for unit in units)
            text = f"ranks {one} and {other} have the same batch"
            yield Finding("script", row.step + 1, "data", text, ranks=(one, other)), are_averaged
    if last is None:
        return
    for one, other in pairs:
        state, before = row.facts[one].get("random"), last.facts.get(one, {}).get("random")
        if state == row.facts[other].get("random") != before:
            text = f"ranks {one} and {other} draw the same (dropout, noise)"
            yield Finding("script", row.step + 1, "random numbers", text, ranks=(one, other)), False
