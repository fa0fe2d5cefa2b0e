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
Words = tuple[str, float | None]  # how a tensor differs, and its ratio to the reference, if that is constant
Place = tuple[int, int]  # a step, -1 before the first one, and the number of the optimizer, or of the model
RIGHT, DIFFERS, CANNOT = 0, 1, 2
LIMIT = 8.0
EPS = 2.0**-23
_UNMEASURED = 16 * EPS  # of two runs whose rounding was not measured, relative to a tensor's norm
_SAME = 1e-3  # of a tensor's norm: what a sentence about it may be off by
_MOST_NAMES = 4
_LATER = ("step gradient", "parameter", "buffer", "state", "number")  # at the step; before it, the order of the run
PER_RANK = ("input", "output", "loss")  # of data that each rank has for itself
_OF_ONE_RUN = ("own", "random state")
_STAGES = {"step gradient": "gradient", "state": "optimizer state", "initial": "initial value"}


class Key(NamedTuple):
    """What was recorded: ``stage`` is what, ``microbatch`` when, ``shape`` that of what may be a part, ``name`` where."""

    stage: str
    microbatch: int
    shape: str
    name: str

    def __str__(self) -> str:
        when = f"microbatch {self.microbatch + 1}  " if self.stage in (*PER_RANK, "gradient", "random state") else ""
        has_name = self.stage in ("loss", "number")
        return when + (self.name if has_name else f"{_STAGES.get(self.stage, self.stage)} of {self.name}")


@dataclass
class Recording:
    """What ranks have recorded.

    Attributes:
        rows: sketches, and numbers, by place, key and rank.
        units: by parameter and rank: the wrapped module, and the names, sizes and ranks of the axes of its average.
        facts: what else the plain run has told.
    """

    ranks: tuple[int, ...] = ()
    rows: dict[Place, dict[Key, ByRank]] = field(default_factory=dict[Place, dict[Key, ByRank]])
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
            run.facts |= line.get("facts", {}) | {"signs": line.get("signs", run.facts.get("signs"))}
            row = run.rows.setdefault(place, {})
            for name, values in line.get("numbers", {}).items():
                row.setdefault(Key("number", 0, "", name), {})[rank] = np.array(values)
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


def say(
    found: Sums, expected: Sums, known: Mapping[str, Sums], constants: Iterable[tuple[float, str]], of: str
) -> Words:
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


_OF_SIZE = {"ranks": ("averaged twice?", "summed where it should be averaged?")}


def constants_of(plain: Recording, place: Place, name: str) -> Iterator[tuple[float, str]]:
    """Yield the numbers by which sums and means are wrong if they are, with their names."""
    unit = plain.unit(name)
    sizes = {"ranks": len(plain.ranks), "microbatches": len(plain.own(place, name))}
    sizes |= {f'the size of axis "{axis}"': size for axis, size in zip(unit["axes"], unit["sizes"], strict=False)}
    yield from ((-1.0, "the sign is wrong"), (0.0, "zero"))
    for what, size in sizes.items():
        less, more = _OF_SIZE.get(what, ("divided twice?", "not divided?"))
        if size > 1:
            yield from ((1 / size, f"1/{size} = 1/{what}: {less}"), (float(size), f"{size} = {what}: {more}"))


def parts_of_gradient(plain: Recording, place: Place, name: str, rank: int, stop: int | None = None) -> dict[str, Sums]:
    """Return what a wrong gradient may be after ``stop`` microbatches, from what backwards have added: by the words for it."""
    own, means = plain.own(place, name)[:stop], plain.means(place, name, rank)[:stop]
    if not own or any(rank not in each for each in own):
        return {}
    is_averaged = len(plain.unit(name)["ranks"]) > 1
    found = {"this rank's own part": np.sum([each[rank] for each in own], 0)} if is_averaged else {}
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
    row = {key: found for key, found in plain.rows[place].items() if key.stage != "number"}
    other = {} if moved is None else moved.rows.get(place, {})
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
            if place[0] >= 0 and place not in self.tested.rows:
                return [*found, Finding("wrapper", place[0] + 1, "the step", "was not made by the script as it is")]
            here = self._row(place) if place[0] >= 0 or self.options.init else []
            found += here
            if here and place[0] >= 0:
                break
        return found

    def _row(self, place: Place) -> list[Finding]:
        noise, here = rounding_of(self.plain, self.moved, place), dict[Key, Finding]()
        all_keys = {**self.tested.rows.get(place, {}), **self.plain.rows[place]}
        for key in sorted(all_keys, key=lambda each: 1 + _LATER.index(each.stage) if each.stage in _LATER else 0):
            is_asked = key.stage not in _OF_ONE_RUN and fnmatch.fnmatchcase(key.name, self.options.only or "*")
            pairs = self._pairs(place, key)
            if not is_asked or not pairs or (key.stage == "initial") != (place[0] < 0):
                continue
            times = {rank: times_of(key, *pair, noise.get(key, 0.0)) for rank, pair in pairs.items()}
            bad = [rank for rank, each in times.items() if not each <= self.options.rtol * (not self.options.exact)]
            known = self.times.setdefault(key.stage, {})
            known[key.name] = max(known.get(key.name, 0.0), math.inf if bad else max(times.values()))
            if bad:
                rank = max(bad, key=lambda each: times[each])
                text, factor = self._words(place, key, rank, *pairs[rank])
                how_often = times[rank] if math.isfinite(times[rank]) else None  # JSON has no inf
                here[key] = Finding("wrapper", place[0] + 1, str(key), text, factor, how_often, tuple(bad), key.name)
        # Where gradients are complete with the step alone, those of single microbatches may be in another order.
        wrong = {key.name for key in here if key.stage == "step gradient"}
        return [each for key, each in here.items() if key.stage != "gradient" or key.name in wrong]

    def _pairs(self, place: Place, key: Key) -> dict[int, tuple[Sums | None, Sums | None]]:
        """Return by rank what is held against each other; None: what one run alone does not have, and should have."""
        mine, theirs = (each.rows.get(place, {}).get(key, {}) for each in (self.tested, self.plain))
        if not mine or not theirs:
            is_due = key.stage in ("step gradient", "parameter")  # others may be parts of an activation, or of a state
            ranks = (mine or theirs) if is_due and any(map(norm, (mine or theirs).values())) else ()
        elif self.tested.ranks == self.plain.ranks:
            ranks = mine.keys() & theirs.keys()
        else:
            return {} if key.stage in PER_RANK else {min(mine): (mine[min(mine)], theirs[min(theirs)])}
        return {rank: (mine.get(rank), theirs.get(rank)) for rank in sorted(ranks)}

    def _words(self, place: Place, key: Key, rank: int, found: Sums | None, expected: Sums | None) -> Words:
        if found is None or expected is None:
            mine, theirs = ("none", "one") if found is None else ("one", "none")
            return f"has {mine}, and the reference has {theirs}", None
        if key.stage == "number":
            return f"is {found.tolist()}, and {expected.tolist()} in the reference", None
        row, known = self.plain.rows[place][key], dict[str, Sums]()
        if key.stage == "parameter" and rank in (before := self.tested.before(place, key.name)):
            known = {"equal to the value before the step": before[rank]}
        if key.stage in ("gradient", "step gradient"):
            stop = key.microbatch + 1 if key.stage == "gradient" else None
            known = parts_of_gradient(self.plain, place, key.name, rank, stop)
        if key.stage not in ("input", "loss"):
            known |= {f"equal to that of rank {each}": row[each] for each in row if each != rank}
        return say(found, expected, known, constants_of(self.plain, place, key.name), "the reference")


def times_of(key: Key, found: Sums | None, expected: Sums | None, noise: float = 0.0) -> float:
    """Return by how many times ``noise`` two tensors differ; inf: by what is no matter of rounding."""
    if found is None or expected is None:
        return math.inf
    if key.stage == "number":
        return 0.0 if found.shape == expected.shape and np.allclose(found, expected, rtol=1e-6, atol=0.0) else math.inf
    if len(found) > NUM_SUMS + 1:  # of recordings to be compared exactly
        return 0.0 if digest_of(found) == digest_of(expected) else math.inf
    if is_finite(found) and is_finite(expected):
        return distance(found, expected) / noise if noise else math.inf
    return 0.0 if is_finite(found) == is_finite(expected) else math.inf


# ---- The ranks of one run, held against each other.


def _on_ranks(values: Mapping[int, object]) -> str:
    return "; ".join(f"{each} on rank {rank}" for rank, each in values.items())


def compare_ranks(run: Recording) -> Iterator[Finding]:
    """Yield in what ranks differ that began with the same parameters, in the order of steps."""
    first: dict[str, ByRank] = {}
    for place in run.rows:
        first = run.of(place, "parameter") | first
    recorded = [set[int]().union(*run.rows[place].values()) for place in run.steps]
    made = {rank: sum(rank in each for each in recorded) for rank in run.ranks}
    for place in run.steps:
        for key, by_rank in run.rows[place].items():
            ranks, text = (), ""
            if key.stage == "number" and len({str(np.round(each, 12)) for each in by_rank.values()}) > 1:
                text = _on_ranks({rank: np.round(each, 12).tolist() for rank, each in by_rank.items()})
            elif key.stage in ("parameter", "state"):
                start = first.get(key.name if key.stage == "parameter" else key.name.rpartition(".")[0], {})
                if ranks := _apart(by_rank, start):
                    text = f"differs between ranks {ranks[0]} and {ranks[1]}, which began with the same parameters"
            if text:
                yield Finding("ranks", place[0] + 1, str(key), text, ranks=ranks, name=key.name)
    if len({*made.values()}) > 1:
        yield Finding("ranks", min(made.values()) + 1, "the number of steps", _on_ranks(made))


def _apart(by_rank: ByRank, start: ByRank) -> tuple[int, ...]:
    """Return the first two ranks that had the same at the start and differ now, if there are any."""
    for one, other in itertools.combinations(sorted(by_rank.keys() & start.keys()), 2):
        is_same = distance(start[one], start[other]) <= EPS * norm(start[one])
        if is_same and not distance(by_rank[one], by_rank[other]) <= 64 * EPS * norm(by_rank[one]):
            return one, other
    return ()


Notes = Iterator[tuple[Finding, bool]]  # and whether ``--strict`` refuses it
Fates = dict[str, dict[str, float | None]]  # by what became of gradients, and their names: the ratio

# ---- What the script does with gradients and data, in both runs alike.

_UNEXPLAINED = "are no multiple of what backward has computed"
_STALE = "gradients of earlier backwards are still in it (zero_grad() was not called after them)"


def notes_of(plain: Recording) -> Notes:
    """Yield what became of what backwards have computed, and what ranks were given, and whether ``--strict`` refuses it."""
    for text in plain.facts.get("untied", ()):
        yield Finding("script", 0, text, "were one parameter when they were wrapped, and are several now"), True
    # What zero_grad() should have cleared: of other losses alone, and with the gradient of the last step.
    earlier: dict[str, list[ByRank]] = {}
    random: ByRank = {}
    for place in plain.steps:
        fates: Fates = {}
        gradients, stepped = plain.of(place, "step gradient"), plain.of(place, "parameter")
        for name in plain.of(place, "own"):
            mean: ByRank = {rank: np.sum(plain.means(place, name, rank), 0) for rank in plain.ranks}
            nothing = dict.fromkeys(plain.ranks, _zero(mean))
            kept = [{rank: sums + mean[rank] for rank, sums in each.items()} for each in earlier.get(name, [nothing])]
            earlier[name] = [nothing, gradients.get(name, {})] if name in stepped else kept
            for rank, sums in gradients.get(name, {}).items() if name in stepped else ():
                stale = [each[rank] for each in kept if rank in each]
                text, factor = _fate(plain, place, name, (rank, sums, mean[rank]), stale)
                if text:
                    fates.setdefault(text, {})[name] = factor
        yield from _told(place[0] + 1, fates, gradients)
        yield from _given(plain, place, random)
        random = plain.of(place, "random state").get("torch", {})


def _fate(plain: Recording, place: Place, name: str, at: tuple[int, Sums, Sums], stale: list[Sums]) -> Words:
    """Return what became of the gradient of ``name`` until the step; an empty text if it is their mean over ranks."""
    rank, sums, mean = at
    rounding = 64 * EPS * max((norm(each) for part in plain.own(place, name) for each in part.values()), default=0.0)
    if not norm(sums) or not is_finite(sums) or distance(sums, mean) <= max(_SAME * norm(mean), rounding):
        return "", None
    known = parts_of_gradient(plain, place, name, rank)
    if stale:
        known[_STALE] = min(stale, key=lambda each: distance(sums, each))
    text, k = say(sums, mean, known, constants_of(plain, place, name), "their mean over ranks")
    return (text, k) if text in known or k is not None else (_UNEXPLAINED, None)


def _told(step: int, fates: Fates, gradients: Mapping[str, ByRank]) -> Notes:
    """Say what became of gradients; once if all were scaled by one factor that has no name, as clipping does."""
    scaled = [text for text in fates if " x their mean" in text and "(" not in text]
    factors = [k for names in fates.values() for k in names.values() if k is not None]
    if scaled and max(factors) - min(factors) <= _SAME * abs(factors[0]):
        total = math.sqrt(sum(norm(next(iter(each.values()))) ** 2 for each in gradients.values()))
        for text in scaled:
            del fates[text]
        text = f"scaled by {factors[0]:.4g} to a norm of {total:.4g} (clipping or loss scaling)"
        yield Finding("script", step, "all gradients", text, factors[0]), False
    for text, names in fates.items():
        shown = ", ".join([*names][:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)
        what = f"gradient of {shown}" if len(names) < 2 else f"{len(names)} gradients ({shown})"
        name, factor = next(iter(names.items()))
        yield Finding("script", step, what, text, factor, name=name), text != _UNEXPLAINED


def _given(plain: Recording, place: Place, random: ByRank) -> Notes:
    """Say which ranks were given the same data, and the same random numbers, and have buffers that differ."""
    step, state = place[0] + 1, plain.of(place, "random state").get("torch", {})
    inputs = [found for key, found in plain.rows[place].items() if key.stage == "input"]
    for one, other in itertools.combinations(plain.ranks, 2):
        shared = [np.array_equal(found[one], found[other]) for found in inputs if {one, other} <= found.keys()]
        if shared and all(shared):
            are_averaged = not plain.units or any(other in plain.unit(name, one)["ranks"] for name in plain.units)
            text = f"ranks {one} and {other} have the same batch"
            yield Finding("script", step, "data", text, ranks=(one, other)), are_averaged
        have_drawn = {one, other} <= state.keys() and one in random and not np.array_equal(state[one], random[one])
        if have_drawn and np.array_equal(state[one], state[other]):
            text = f"ranks {one} and {other} draw the same (dropout, noise)"
            yield Finding("script", step, "random numbers", text, ranks=(one, other)), False
    for name, by_rank in plain.of(place, "buffer").items() if not plain.facts.get("shares_buffers") else ():
        if ranks := _apart(by_rank, dict.fromkeys(by_rank, next(iter(by_rank.values())))):
            text = f"differs between ranks {ranks[0]} and {ranks[1]}, and a checkpoint has one of them"
            yield Finding("script", step, f"buffer of {name}", text, ranks=ranks, name=name), True
