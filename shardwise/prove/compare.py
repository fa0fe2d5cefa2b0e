"""Compare recordings: which tensor differs first and by what, what ranks differ in, and what a script does in all runs.

Nothing here communicates or computes tensors: a recording is files of sketches.
"""

from __future__ import annotations

import base64
import fnmatch
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
Place = tuple[int, int]  # a step, -1 before the first one, and the number of the optimizer, or of the model
RIGHT, DIFFERS, CANNOT = 0, 1, 2
LIMIT = 8.0
EPS = 2.0**-23
_UNMEASURED = 16 * EPS  # of two runs whose rounding was not measured, relative to a tensor's norm
_SAME = 1e-3  # of a tensor's norm: what a sentence about it may be off by
_MOST_NAMES = 4
_LATER = ("step gradient", "parameter", "buffer", "state")  # at the step; the others are in the order of the run
PER_RANK = ("input", "output", "loss")  # of data that each rank has for itself
_STAGES = {"step gradient": "gradient", "state": "optimizer state", "initial": "initial value"}
_NUMBERS = {
    "lr": "the learning rate",
    "microbatches": "the number of microbatches",
    "backwards": "the number of backwards before the step",
}


class Key(NamedTuple):
    """What was recorded: ``stage`` is what, ``microbatch`` when, ``shape`` that of what may be a part, ``name`` where."""

    stage: str
    microbatch: int
    shape: str
    name: str

    def __str__(self) -> str:
        when = f"microbatch {self.microbatch + 1}  " if self.stage in (*PER_RANK, "gradient", "random state") else ""
        is_loss = self.name == "the loss"
        return f"{when}{self.name if is_loss else f'{_STAGES.get(self.stage, self.stage)} of {self.name}'}"


@dataclass
class Recording:
    """What ranks have recorded.

    Attributes:
        rows: sketches by place and key.  numbers: by place and name.
        units: by parameter and rank: the wrapped module, and the names, sizes and ranks of the axes of its average.
        facts: what else the plain run has told.
    """

    ranks: tuple[int, ...] = ()
    rows: dict[Place, dict[Key, ByRank]] = field(default_factory=dict[Place, dict[Key, ByRank]])
    numbers: dict[Place, dict[str, ByRank]] = field(default_factory=dict[Place, dict[str, ByRank]])
    units: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict[str, dict[int, dict[str, Any]]])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read the files of a folder.  Raises: UnsafeFileError for one that is none of a recording."""
        ranks = sorted(int(path.stem.partition("-")[2]) for path in folder.glob("rank-*.jsonl"))
        return cls.from_lines((rank, line) for rank in ranks for line in lines_of(folder, f"rank-{rank}.jsonl"))

    @classmethod
    def from_lines(cls, lines: Iterable[tuple[int, Mapping[str, Any]]]) -> Recording:
        """Return what lines tell, each with its rank."""
        run, parts, ranks = cls(), dict[tuple[Place, Key, str], ByRank](), set[int]()
        for rank, line in lines:
            ranks.add(rank)
            place = line["step"], line["optimizer"]
            for name, unit in line.get("units", {}).items():
                run.units.setdefault(name, {})[rank] = unit
            run.facts |= line.get("facts", {})
            row = run.rows.setdefault(place, {})
            for name, values in line.get("numbers", {}).items():
                run.numbers.setdefault(place, {}).setdefault(name, {})[rank] = np.array(values)
            for text, (of, sums) in line["values"].items():
                stage, microbatch, shape, name = text.split("|", 3)
                key = Key(stage, int(microbatch), shape, name)
                found = row.setdefault(key, {})
                found[rank] = np.frombuffer(base64.b64decode(sums))
                if of:
                    parts[place, key, of] = found
        for (_, _, of), found in parts.items():
            own = {rank: found.pop(rank, None) for rank in map(int, of.split(","))}
            if len(whole := [each for each in own.values() if each is not None]) == len(own):
                found |= dict.fromkeys(own, np.sum(whole, 0))
        run.ranks = tuple(sorted(ranks))
        return run

    @property
    def steps(self) -> list[Place]:
        """The places of steps, without those before the first one."""
        return [place for place in self.rows if place[0] >= 0]

    def of(self, place: Place, stage: str) -> dict[str, ByRank]:
        """Return what was recorded of ``stage``, by name; the last microbatch counts."""
        return {key.name: found for key, found in self.rows[place].items() if key.stage == stage}

    def number(self, place: Place, name: str) -> ByRank:
        """Return numbers that were recorded at ``place``."""
        return self.numbers.get(place, {}).get(name, {})

    def before(self, place: Place, name: str) -> ByRank:
        """Return the last recorded values of a parameter before ``place``."""
        earlier = itertools.takewhile(lambda each: each != place, self.rows)
        found = [self.rows[each].get(Key("parameter", 0, "", name)) for each in earlier]
        return next((each for each in reversed(found) if each is not None), {})

    def unit(self, name: str, rank: int | None = None) -> dict[str, Any]:
        """Return the unit of a parameter, as ``rank`` has told it, or the first; of all ranks if nothing wraps it."""
        found = self.units.get(name, {})
        of_all = {"unit": "", "axes": [], "sizes": [], "ranks": self.ranks}
        return found.get(next(iter(found), 0) if rank is None else rank, of_all)

    def own(self, place: Place, name: str) -> list[ByRank]:
        """Return what each microbatch has added to the gradient of ``name``, by rank."""
        found = {key.microbatch: each for key, each in self.rows[place].items() if key[::3] == ("own", name)}
        return [found[number] for number in sorted(found)]

    def means(self, place: Place, name: str, rank: int) -> list[Sums]:
        """Return the means of that over the ranks with which ``rank`` averages; those without a gradient count."""
        found = self.own(place, name)
        return [np.mean([each.get(at, _zero(each)) for at in self.unit(name, rank)["ranks"]], 0) for each in found]


def _zero(by_rank: ByRank) -> Sums:
    return next(iter(by_rank.values())) * 0


def lines_of(folder: Path, name: str) -> Generator[dict[str, Any], None, None]:
    """Yield the lines of a file of a recording, a step each.  Raises: UnsafeFileError for another line."""
    with open_input(folder, name) as file:
        for line in file:
            if line.endswith(b"\n"):
                found = parse_object(line.decode(errors="replace"), str(folder / name))
                if type(found.get("step")) is not int or not isinstance(found.get("values"), dict):
                    raise UnsafeFileError(f"{folder / name}: a line has no step or no values. Remove it")
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


def digest_of(sums: Sums) -> int:
    """Return the digest whose halves are the last numbers; sums of digests wrap around."""
    return ((int(sums[-2]) << 32) + int(sums[-1])) % (1 << 64)


def factor_of(found: Sums, reference: Sums) -> float | None:
    """Return k if ``found`` is k times ``reference``, else None."""
    a, b = found[:NUM_SUMS], reference[:NUM_SUMS]
    if not (is_finite(found) and is_finite(reference) and norm(reference)):
        return None
    k = float(a @ b / (b @ b))
    return k if distance(found, reference * k) <= _SAME * max(norm(found), abs(k) * norm(reference)) else None


@dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        kind: "wrapper", "ranks" or "script".
        step: from 1 on; 0: before the first.
        what: the tensor, or what else differs.
        text: how.
        factor: the ratio to the reference, if it is constant.
        times: how often it is what rounding does; None: more than can be said.
        ranks: where.
    """

    kind: str
    step: int
    what: str
    text: str
    factor: float | None = None
    times: float | None = None
    ranks: tuple[int, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        where = f" (on rank {format_ranks(self.ranks)[5:].strip()})" if len(self.ranks) == 1 else ""
        return f"{f'step {self.step}  ' if self.step else ''}{self.what}: {self.text}{where}"


# ---- What differs, in words that a comparison of sketches backs.


def say(found: Sums, expected: Sums, known: Mapping[str, Sums], constants: Iterable[tuple[float, str]], of: str) -> Any:
    """Return what ``found`` is, in words, and its ratio to ``expected``, of which the words are ``of``.

    ``known``: tensors that it may be, by the words for each.  ``constants``: ratios, with theirs.
    """
    k = factor_of(found, expected)
    for text, part in known.items():
        if norm(part) and distance(found, part) <= min(_SAME * norm(part), distance(found, expected) / 10):
            return text, None
    if not is_finite(found) or not is_finite(expected):
        return f"is {'not ' * is_finite(expected)}finite, and {of} is{' not' * (not is_finite(expected))}", None
    if k is None or abs(k - 1) <= _SAME:
        return f"differs by {distance(found, expected) / max(norm(expected), norm(found)):.2g} of its norm", None
    named = [text for value, text in constants if abs(k - value) <= _SAME * max(abs(value), _SAME)]
    return f"{k:.3f} x {of}" + f" ({'; or '.join(named)})" * bool(named), k


def constants_of(plain: Recording, place: Place, name: str) -> Iterator[tuple[float, str]]:
    """Yield the numbers by which sums and means are wrong if they are, with their names."""
    unit = plain.unit(name)
    sizes = {"ranks": len(plain.ranks), "microbatches": len(plain.own(place, name))}
    sizes |= {f'the size of axis "{axis}"': size for axis, size in zip(unit["axes"], unit["sizes"], strict=False)}
    yield from ((-1.0, "the sign is wrong"), (0.0, "zero"))
    for what, size in sizes.items():
        less, more = (
            ("averaged twice?", "summed where it should be averaged?")
            if what == "ranks"
            else ("divided twice?", "not divided?")
        )
        if size > 1:
            yield from ((1 / size, f"1/{size} = 1/{what}: {less}"), (float(size), f"{size} = {what}: {more}"))


def parts_of_gradient(plain: Recording, place: Place, name: str, rank: int, stop: int | None = None) -> dict[str, Sums]:
    """Return what a wrong gradient may be after ``stop`` microbatches, from what backwards have added: by the words for it."""
    own, means = plain.own(place, name)[:stop], plain.means(place, name, rank)[:stop]
    if not own or any(rank not in each for each in own):
        return {}
    found = (
        {"this rank's own part": np.sum([each[rank] for each in own], 0)} if len(plain.unit(name)["ranks"]) > 1 else {}
    )
    if len(own) > 1:
        found |= {"the last microbatch alone": means[-1], "the first microbatch alone": means[0]}
        found |= {"this rank's own part of the last microbatch": own[-1][rank]}
        found |= {"the sum of all microbatches, also of those that were cleared": np.sum(means, 0)}
    return found


# ---- Two runs.


def _most(mine: ByRank, theirs: ByRank) -> float:
    found = [distance(sums, theirs[rank]) for rank, sums in mine.items() if rank in theirs]
    return max((each for each in found if math.isfinite(each)), default=0.0)


def rounding_of(plain: Recording, moved: Recording | None, place: Place) -> dict[Key, float]:
    """Return how far rounding alone moves the tensors of a row: the largest of all ranks, and no less than is usual.

    ``moved``: a run that differs from the plain one by rounding; None: it was not measured.
    """
    row, other = plain.rows[place], {} if moved is None else moved.rows.get(place, {})
    noise = {key: _most(found, other.get(key, {})) for key, found in row.items()}
    sizes = {key: max(map(norm, filter(is_finite, found.values())), default=0.0) for key, found in row.items()}
    for stage in {key.stage for key in row}:
        usual = [noise[key] / sizes[key] for key in row if key.stage == stage and sizes[key]]
        least = max(float(np.median(usual or [0.0])), EPS if moved is not None else _UNMEASURED)
        noise |= {key: max(noise[key], sizes[key] * least, 1e-30) for key in row if key.stage == stage}
    # Optimizers that divide by the size of a gradient turn elements near zero: of few elements, by chance.
    updates = {key: _most(row[key], plain.before(place, key.name)) for key in row if key.stage == "parameter"}
    turned = max((noise[key] / size for key, size in updates.items() if size > noise[key]), default=0.0)
    return noise | {key: max(noise[key], turned * size) for key, size in updates.items()}


@dataclass(frozen=True)
class ProveOptions:
    """What is asked of a proof.

    Attributes:
        steps: of each optimizer.  rtol: how many times what rounding does is a fault.  only: a pattern of names.
        keep: the folder that keeps the recordings.  init: compare initial values, too.  exact: to the bit.
        strict: notes about the script are faults.  limit_s: of each run.
    """

    steps: int = 3
    rtol: float = LIMIT
    only: str | None = None
    keep: Path | None = None
    init: bool = False
    exact: bool = False
    strict: bool = False
    limit_s: float = 600.0


@dataclass(frozen=True)
class Comparison:
    """A tested run beside the plain thing, and ``moved``: that once more, moved by rounding.

    Attributes:
        times: what tensors differ by until the first fault, in multiples of rounding, by stage and name; inf: a fault.
    """

    tested: Recording
    plain: Recording
    moved: Recording | None
    options: ProveOptions
    times: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def findings(self) -> list[Finding]:
        """Return the differences of initial values, and of the first step that has one, in the order of the step."""
        found: list[Finding] = []
        for place in self.plain.rows:
            if place[0] < 0:
                found += self._row(place) if self.options.init and place in self.tested.rows else []
            elif place not in self.tested.rows:
                return [*found, Finding("wrapper", place[0] + 1, "the step", "was not made by the script as it is")]
            elif here := self._row(place):
                return found + here
        return found

    def _row(self, place: Place) -> list[Finding]:
        mine, theirs = self.tested.rows[place], self.plain.rows[place]
        noise, here = rounding_of(self.plain, self.moved, place), dict[Key, Finding]()
        for key in sorted(
            {**mine, **theirs}, key=lambda each: 1 + _LATER.index(each.stage) if each.stage in _LATER else 0
        ):
            is_asked = self.options.only is None or fnmatch.fnmatchcase(key.name, self.options.only)
            if is_asked and key.stage != "own" and (key.stage == "initial") == (place[0] < 0):
                worst = self._worst(place, key, noise.get(key, 0.0))
                if worst is not None:
                    times, own = (math.inf, worst) if isinstance(worst, Finding) else (worst, None)
                    known = self.times.setdefault(key.stage, {})
                    known[key.name] = max(known.get(key.name, 0.0), times)
                    here |= {} if own is None else {key: own}
        # Where gradients are complete with the step alone, those of single microbatches may be in another order.
        wrong = {key.name for key in here if key.stage == "step gradient"}
        found = [each for key, each in here.items() if key.stage != "gradient" or key.name in wrong]
        for name in ("lr", "microbatches"):
            for rank, theirs_here in self.plain.number(place, name).items():
                own = self.tested.number(place, name).get(rank)
                if own is not None and not np.allclose(own, theirs_here, rtol=1e-6, atol=0.0):
                    text = f"is {own.tolist()}, and {theirs_here.tolist()} in the reference"
                    found.append(Finding("wrapper", place[0] + 1, _NUMBERS[name], text, ranks=(rank,)))
                    break
        return found

    def _worst(self, place: Place, key: Key, noise: float) -> Finding | float | None:
        """Return the difference on the rank where it is largest, a number if it is no fault; None without a pair."""
        mine, theirs = (each.rows[place].get(key, {}) for each in (self.tested, self.plain))
        is_alike, step = self.tested.ranks == self.plain.ranks, place[0] + 1
        if not mine or not theirs:
            lone = max(map(norm, (mine or theirs).values()), default=0.0)
            if key.stage not in ("step gradient", "parameter") or not lone:
                return None  # a part of an activation, or of a state
            text = "has none, and the reference has one" if theirs else "has one, and the reference has none"
            return Finding("wrapper", step, str(key), text, ranks=tuple(mine or theirs), name=key.name)
        pairs = {rank: rank for rank in theirs if rank in mine}
        if not is_alike:
            pairs = {} if key.stage in PER_RANK else {min(mine): min(theirs)}
        times = {rank: times_of(mine[rank], theirs[other], noise) for rank, other in pairs.items()}
        bad = [rank for rank, each in times.items() if not each <= self.options.rtol * (not self.options.exact)]
        if not bad:
            return max(times.values(), default=None)
        rank = max(bad, key=lambda each: times[each])
        text, factor = self._words(place, key, rank, pairs[rank])
        how_often = times[rank] if math.isfinite(times[rank]) else None  # JSON has no inf
        return Finding("wrapper", step, str(key), text, factor, how_often, tuple(bad), key.name)

    def _words(self, place: Place, key: Key, rank: int, other: int) -> tuple[str, float | None]:
        row, known = self.plain.rows[place][key], dict[str, Sums]()
        if key.stage == "parameter" and rank in (before := self.tested.before(place, key.name)):
            known = {"equal to the value before the step": before[rank]}
        if key.stage in ("gradient", "step gradient"):
            stop = key.microbatch + 1 if key.stage == "gradient" else None
            known = parts_of_gradient(self.plain, place, key.name, other, stop)
        if key.stage not in ("input", "loss"):
            known |= {f"equal to that of rank {each}": row[each] for each in row if each != other}
        constants = constants_of(self.plain, place, key.name)
        return say(self.tested.rows[place][key][rank], row[other], known, constants, "the reference")


def times_of(found: Sums, expected: Sums, noise: float = 0.0) -> float:
    """Return by how many times ``noise`` two tensors differ; inf: by what is no matter of rounding."""
    if len(found) > NUM_SUMS + 1:  # of recordings to be compared exactly
        return 0.0 if digest_of(found) == digest_of(expected) else math.inf
    if is_finite(found) and is_finite(expected):
        return distance(found, expected) / noise if noise else math.inf
    return 0.0 if is_finite(found) == is_finite(expected) else math.inf


# ---- The ranks of one run, held against each other.


def compare_ranks(run: Recording) -> Iterator[Finding]:
    """Yield in what ranks differ that began with the same parameters, in the order of steps."""
    first: dict[str, ByRank] = {}
    for place in run.rows:
        first = run.of(place, "parameter") | first
    counts = {rank: sum(rank in run.number(place, "lr") for place in run.steps) for rank in run.ranks}
    for place in run.steps:
        step = place[0] + 1
        for name in ("lr", "backwards"):
            told = {rank: str(np.round(each, 12).tolist()) for rank, each in run.number(place, name).items()}
            if len({*told.values()}) > 1:
                text = "; ".join(f"{each} on rank {rank}" for rank, each in told.items())
                yield Finding("ranks", step, _NUMBERS[name], text)
        for key, by_rank in run.rows[place].items():
            if key.stage in ("parameter", "state"):
                start = first.get(key.name if key.stage == "parameter" else key.name.rpartition(".")[0], {})
                for apart in _apart(by_rank, start):
                    text = f"differs between ranks {apart[0]} and {apart[1]}, which began with the same parameters"
                    yield Finding("ranks", step, str(key), text, ranks=apart, name=key.name)
    if len({*counts.values()}) > 1:
        text = "; ".join(f"{count} on rank {rank}" for rank, count in counts.items())
        yield Finding("ranks", min(counts.values()) + 1, "the number of steps", text)


def _apart(by_rank: ByRank, start: ByRank) -> list[tuple[int, int]]:
    """Return the first two ranks that had the same at the start and differ now, if there are any."""
    for one, other in itertools.combinations(sorted(by_rank.keys() & start.keys()), 2):
        is_same = distance(start[one], start[other]) <= EPS * norm(start[one])
        if is_same and not distance(by_rank[one], by_rank[other]) <= 64 * EPS * norm(by_rank[one]):
            return [(one, other)]
    return []


# ---- What the script does with gradients and data, in both runs alike.

_UNEXPLAINED = "are no multiple of what backward has computed"
_STALE = "gradients of earlier backwards are still in it (zero_grad() was not called after them)"


def notes_of(plain: Recording) -> Iterator[tuple[Finding, bool]]:
    """Yield what became of what backwards have computed, and what ranks were given, and whether ``--strict`` refuses it."""
    for text in plain.facts.get("untied", ()):
        yield Finding("script", 0, text, "were one parameter when they were wrapped, and are several now"), True
    # What zero_grad() should have cleared: of other losses alone, and with the gradient of the last step.
    earlier: dict[str, list[ByRank]] = {}
    random: ByRank = {}
    for place in plain.steps:
        fates: dict[str, dict[str, float | None]] = {}
        gradients, stepped, step = plain.of(place, "step gradient"), plain.of(place, "parameter"), place[0] + 1
        for name in plain.of(place, "own"):
            mean: ByRank = {rank: np.sum(plain.means(place, name, rank), 0) for rank in plain.ranks}
            nothing = dict.fromkeys(plain.ranks, _zero(mean))
            kept = [{rank: sums + mean[rank] for rank, sums in each.items()} for each in earlier.get(name, [nothing])]
            if name not in stepped:
                earlier[name] = kept
                continue
            earlier[name] = [nothing, gradients.get(name, {})]
            for rank, sums in gradients.get(name, {}).items():
                stale = [each[rank] for each in kept if rank in each]
                text, factor = _fate(plain, place, name, (rank, sums), stale)
                if text:
                    fates.setdefault(text, {})[name] = factor
        yield from _clipping(step, fates, gradients)
        for text, names in fates.items():
            shown = ", ".join([*names][:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)
            what = f"gradient of {shown}" if len(names) < 2 else f"{len(names)} gradients ({shown})"
            name, factor = next(iter(names.items()))
            yield Finding("script", step, what, text, factor, name=name), text != _UNEXPLAINED
        yield from _given(plain, place, random)
        random = plain.number(place, "random")


def _fate(
    plain: Recording, place: Place, name: str, at: tuple[int, Sums], stale: list[Sums]
) -> tuple[str, float | None]:
    """Return what became of the gradient of ``name`` until the step; an empty text if it is their mean over ranks."""
    (rank, sums), mean = at, np.sum(plain.means(place, name, at[0]), 0)
    rounding = 64 * EPS * max((norm(each) for part in plain.own(place, name) for each in part.values()), default=0.0)
    if not norm(sums) or not is_finite(sums) or distance(sums, mean) <= max(_SAME * norm(mean), rounding):
        return "", None
    known = parts_of_gradient(plain, place, name, rank)
    if stale:
        known[_STALE] = min(stale, key=lambda each: distance(sums, each))
    text, k = say(sums, mean, known, constants_of(plain, place, name), "their mean over ranks")
    return (text, k) if text in known or k is not None else (_UNEXPLAINED, None)


def _clipping(
    step: int, fates: dict[str, dict[str, float | None]], gradients: Mapping[str, ByRank]
) -> Iterator[tuple[Finding, bool]]:
    """Say once that all gradients were scaled by one factor that has no name, as clipping does."""
    scaled = [text for text in fates if " x their mean" in text and "(" not in text]
    factors = [k for names in fates.values() for k in names.values() if k is not None]
    if scaled and max(factors) - min(factors) <= _SAME * abs(factors[0]):
        total = math.sqrt(sum(norm(next(iter(each.values()))) ** 2 for each in gradients.values()))
        for text in scaled:
            del fates[text]
        text = f"scaled by {factors[0]:.4g} to a norm of {total:.4g} (clipping or loss scaling)"
        yield Finding("script", step, "all gradients", text, factors[0]), False


def _given(plain: Recording, place: Place, random: ByRank) -> Iterator[tuple[Finding, bool]]:
    """Say which ranks were given the same data, and the same random numbers, and have buffers that differ."""
    step, state = place[0] + 1, plain.number(place, "random")
    inputs = [found for key, found in plain.rows[place].items() if key.stage == "input"]
    for one, other in itertools.combinations(plain.ranks, 2):
        shared = [found for found in inputs if one in found and other in found]
        if shared and all(np.array_equal(found[one], found[other]) for found in shared):
            are_averaged = not plain.units or any(other in plain.unit(name, one)["ranks"] for name in plain.units)
            text = f"ranks {one} and {other} have the same batch"
            yield Finding("script", step, "data", text, ranks=(one, other)), are_averaged
        if one in random and one in state and other in state and state[one] == state[other] != random[one]:
            text = f"ranks {one} and {other} draw the same (dropout, noise)"
            yield Finding("script", step, "random numbers", text, ranks=(one, other)), False
    for name, by_rank in plain.of(place, "buffer").items() if not plain.facts.get("shares_buffers") else ():
        for one, other in _apart(by_rank, dict.fromkeys(by_rank, next(iter(by_rank.values())))):
            text = f"differs between ranks {one} and {other}, and a checkpoint has one of them"
            yield Finding("script", step, f"buffer of {name}", text, ranks=(one, other), name=name), True
