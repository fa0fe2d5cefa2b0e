"""A case as data, drawn from a seed, and smaller cases.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from fuzz.shrink import fewer, plainer, put

KINDS = ("sharded", "kept", "int", "hsdp", "replicate", "shard_model", "merged")
TRANSPORTS = ("auto", "gloo", "collective")
LAYERS = ("plain", "inner", "experts")
STYLES = ("tower", "drop", "exit", "shuffle", "same")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer of the model.

    Attributes:
        kind: "plain"; "inner": has a layer inside, which is a unit; "experts": a router and experts, which are units.
        is_unit: the layer is a unit.
        top: experts per row.
        shared: this layer is the module of the first layer.
        frozen: none of its parameters requires a gradient.
    """

    kind: str = "plain"
    is_unit: bool = True
    top: int = 1
    shared: bool = False
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a layer, whose number counts modulo the number of layers; ``seldom``, ``inner``: which parts it uses."""

    layer: int = 0
    seldom: bool = False
    inner: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """A microbatch of a rank.

    Attributes:
        calls: the layers in the order in which they run.
        checkpoints: recompute layers in backward: "", "reentrant" or "saved".
        has_graph: the loss depends on the output; else there is no backward.
        forwards: 0: one forward in training; more: so many forwards under ``no_grad``.
        sync: the argument of ``set_requires_gradient_sync`` before it.
        waits: its backward comes with that of the next microbatch, as one.
    """

    calls: tuple[Call, ...] = ()
    checkpoints: str = ""
    has_graph: bool = True
    forwards: int = 0
    sync: bool = True
    waits: bool = False

    @property
    def trains(self) -> bool:
        """A backward follows."""
        return self.has_graph and not self.forwards


@dataclass(frozen=True, slots=True)
class Step:
    """Microbatches per rank, and the end of a step.

    Attributes:
        join: they run inside of ``Join([model])``.
        clip: "", "torch" or "shardwise".
        updates: the optimizer steps at the end.
        zero: before it: "none", "zeros", or "" to keep gradients.
    """

    ranks: tuple[tuple[Way, ...], ...]
    join: bool = False
    clip: str = ""
    updates: bool = True
    zero: str = "none"

    @property
    def meets(self) -> bool:
        """No rank leaves the step before all others have come to its end."""
        return self.join or self.updates


@dataclass(frozen=True, slots=True)
class Case:
    """A program.

    Attributes:
        seed: of inputs.
        kind: one of :data:`KINDS`; "merged": ``shard_model`` with all layers in one unit.
        half, reduce_half: compute, and reduce, in bfloat16.
        divides_by_all: the argument ``divide_by_initial_world_size`` of ``Join``.
        head_unit: the head, whose weight is tied to one of the root, is a unit.
        on_at, off_at, copy_at: numbers of the steps before which the switch is set and unset, and the model copied; -1: never.
        on_by_join: the switch is not set: ``Join`` does it.
        large: parameters are sent one by one where the transport sends messages.
        prefetch: pairs of numbers of units: the first prefetches the second in forward (in backward the other way round).
    """

    seed: int
    num_ranks: int
    layers: tuple[LayerSpec, ...]
    steps: tuple[Step, ...]
    kind: str = "sharded"
    transport: str = "auto"
    half: bool = False
    reduce_half: bool = False
    divides_by_all: bool = True
    head_unit: bool = False
    on_at: int = 0
    off_at: int = -1
    copy_at: int = -1
    on_by_join: bool = False
    large: bool = False
    prefetch: tuple[tuple[int, int], ...] = ()

    @property
    def is_exact(self) -> bool:
        """All numbers are exact in any order of sums."""
        return self.divides_by_all and not any(step.clip for step in self.steps)

    def may_diverge(self, number: int) -> bool:
        """Return True if the switch is on in step ``number``."""
        return number >= self.on_at and not 0 <= self.off_at <= number


# ---- from a seed ----


def draw(seed: int, num_ranks: int) -> Case:
    """Return the case of ``seed``."""
    return _Draw(seed, num_ranks).case()


class _Draw:
    def __init__(self, seed: int, num_ranks: int) -> None:
        self._random, self._seed, self._num_ranks = Random(f"{seed} {num_ranks}"), seed, num_ranks
        self._by_join = Random(f"{seed} {num_ranks} inside")  # of its own, so that other draws stay

    def _chance(self, chance: float) -> bool:
        return self._random.random() < chance

    def case(self) -> Case:
        chance, choose = self._chance, self._random.choice
        self._style = choose(STYLES)
        self._recompute = choose((0.0, 0.3, 1.0))
        self._layers = tuple(self._layer() for _ in range(choose((1, 2, 3, 4))))
        self._half = chance(0.25)
        self._divides_by_all = self._half or chance(0.75)
        self._holds = self._divides_by_all and chance(0.4)
        self._joins = 1.0 if not self._divides_by_all else choose((0.0, 0.5, 1.0))
        self._clips = choose((0.0, 0.0, 0.5))
        self._keeps = 0.0 if self._half and self._clips else 0.2
        num_steps = choose((2, 3, 3, 4, 5))
        on_at = choose((0, 0, 0, 1, 2))
        off_at = choose((-1, -1, -1, num_steps - 1))
        if off_at <= on_at:
            off_at = -1
        case = Case(
            self._seed,
            self._num_ranks,
            self._layers,
            (),
            choose(KINDS),
            choose(TRANSPORTS),
            self._half,
            self._half and chance(0.5),
            self._divides_by_all,
            chance(0.3),
            min(on_at, num_steps - 1),
            off_at,
            self._random.randrange(num_steps) if chance(0.2) else -1,
            chance(0.5),
            self._by_join.random() < 0.4,
            tuple((self._random.randrange(6), self._random.randrange(6)) for _ in range(choose((0, 0, 0, 1, 3)))),
        )
        return replace(case, steps=self._steps(case, num_steps))

    def _layer(self) -> LayerSpec:
        kind = self._random.choice(("plain", "plain", *LAYERS))
        return LayerSpec(
            kind,
            self._chance(0.85),
            self._random.choice((1, 2)),
            self._chance(0.15),
            kind != "experts" and self._chance(0.1),
        )

    def _steps(self, case: Case, count: int) -> tuple[Step, ...]:
        steps: list[Step] = []
        held = False  # gradients of the step before are not reduced
        for number in range(count):
            if not case.may_diverge(number):
                micros = tuple(self._way(number, 0) for _ in range(self._random.choice((1, 1, 2))))
                step = Step((self._synced(micros, [self._chance(0.5) for _ in micros]),) * self._num_ranks)
                steps.append(replace(step, clip=self._clip(), zero=self._zero(steps)))
                continue
            is_last = number == count - 1
            meets = {number + 1, number + 2} & {case.copy_at, case.off_at, case.on_at} or is_last
            holds = self._holds and self._chance(0.2) and not meets
            ranks: list[tuple[Way, ...]] = []
            generates = not held and not holds and self._chance(0.15)
            for rank in range(self._num_ranks):
                micros = tuple(self._way(number, rank) for _ in range(self._random.choice((0, 1, 1, 1, 2, 3))))
                if generates:
                    micros = tuple(replace(each, forwards=self._length()) for each in micros)
                if held:
                    micros = (*micros, replace(self._way(number, rank), has_graph=True, forwards=0))
                syncs = [not (holds or (self._holds and self._chance(0.5))) for _ in micros]
                ranks.append(self._synced(micros, syncs, ends=not holds))
            join = self._chance(self._joins) and (not steps or steps[-1].meets)
            updates = not holds and (not (join and self._chance(0.3)) or is_last) and not (generates and join)
            clip = self._clip() if updates else ""
            steps.append(Step(tuple(ranks), join, clip, updates, "" if held else self._zero(steps)))
            held = holds
        return tuple(steps)

    def _synced(self, micros: Sequence[Way], syncs: Sequence[bool], ends: bool = True) -> tuple[Way, ...]:
        """Return ``micros`` with these flags; the last backward of a rank is synced, if ``ends``."""
        found = [replace(way, sync=sync or not self._holds) for way, sync in zip(micros, syncs, strict=True)]
        trains = [place for place, way in enumerate(found) if way.trains]
        if trains:
            found[trains[-1]] = replace(found[trains[-1]], sync=ends, waits=False)
        return tuple(found)

    def _zero(self, steps: Sequence[Step]) -> str:
        if not steps or not steps[-1].updates:
            return "none" if not steps else ""
        return self._random.choice(("none", "none", "zeros")) if not self._chance(self._keeps) else ""

    def _clip(self) -> str:
        return self._random.choice(("torch", "shardwise")) if self._chance(self._clips) else ""

    def _length(self) -> int:
        return self._random.choice((5, 6, 8, 12)) if self._chance(0.97) else 50

    def _way(self, step: int, rank: int) -> Way:
        recompute = self._random.choice(("reentrant", "saved")) if self._chance(self._recompute) else ""
        forwards = self._random.choice((1, 1, 3)) if self._chance(0.12) else 0
        return Way(self._calls(step, rank), recompute, self._chance(0.85), forwards, True, self._chance(0.1))

    def _calls(self, step: int, rank: int) -> tuple[Call, ...]:
        every = range(len(self._layers))
        if self._style == "tower":
            layers = [each for each in every if each != 1 or (rank + step) % 2]
        elif self._style == "drop":
            layers = [each for each in every if self._chance(0.6)]
        elif self._style == "exit":
            layers = list(every)[: self._random.randint(0, len(every))]
        elif self._style == "shuffle":
            layers = [self._random.choice(every) for _ in range(self._random.randint(0, 5))]
        else:
            layers = list(every)
        return tuple(Call(each, self._chance(0.3), self._chance(0.5)) for each in layers)


# ---- smaller ----


def candidates(case: Case) -> Iterator[Case]:
    """Yield smaller cases, the much smaller ones first.  Some are not valid, see :func:`is_valid`."""
    yield from (replace(case, steps=steps) for steps in fewer(case.steps))
    if case.num_ranks > 2:
        steps = tuple(replace(step, ranks=step.ranks[: case.num_ranks // 2]) for step in case.steps)
        yield replace(case, num_ranks=case.num_ranks // 2, steps=steps)
    yield from (replace(case, layers=layers) for layers in fewer(case.layers) if layers)
    yield from plainer(case)
    for number, layer in enumerate(case.layers):
        for plain in plainer(layer):
            yield replace(case, layers=put(case.layers, number, plain))
    for number, step in enumerate(case.steps):
        for smaller in _smaller_steps(step):
            yield replace(case, steps=put(case.steps, number, smaller))


def _smaller_steps(step: Step) -> Iterator[Step]:
    if len(set(step.ranks)) > 1:
        for rank, ways in enumerate(step.ranks):
            for shorter in fewer(ways):
                yield replace(step, ranks=put(step.ranks, rank, shorter))
    yield from plainer(step)
    for rank, ways in enumerate(step.ranks):
        for number, way in enumerate(ways):
            smaller = [replace(way, calls=calls) for calls in fewer(way.calls)]
            smaller += plainer(way)
            for place, call in enumerate(way.calls):
                smaller += [replace(way, calls=put(way.calls, place, plain)) for plain in plainer(call)]
            if way.forwards > 1:
                smaller.append(replace(way, forwards=1))
            for each in smaller:
                yield replace(step, ranks=put(step.ranks, rank, put(ways, number, each)))
    if len(set(step.ranks)) == 1 and len(step.ranks) > 1:
        for each in _smaller_steps(replace(step, ranks=step.ranks[:1])):
            yield replace(each, ranks=each.ranks * len(step.ranks))


def is_valid(case: Case) -> bool:
    """Return True if the case is one that ranks can run, and whose numbers are defined."""
    if not case.steps or not case.steps[-1].meets or not 0 <= case.on_at < len(case.steps):
        return False
    held = False
    for number, step in enumerate(case.steps):
        if not case.may_diverge(number) and (step.join or not step.updates or len(set(step.ranks)) > 1):
            return False
        if {number + 1} & {case.copy_at, case.off_at, case.on_at} and not step.meets:
            return False
        if step.clip and not step.updates:
            return False
        if number and not case.steps[number - 1].updates and step.zero:
            return False
        trained = [[way for way in ways if way.trains] for ways in step.ranks]
        if held and not all(trained):
            return False
        syncs = [ways[-1].sync for ways in trained if ways]
        held = bool(syncs) and not any(syncs)
        if len(set(syncs)) > 1 or (held and (step.updates or not case.divides_by_all)):
            return False
        if step.join and number and not case.steps[number - 1].meets:
            return False  # ranks outside of a Join do not count its calls
        if any(ways[-1].waits for ways in trained if ways):
            return False
        if not case.divides_by_all and not all(way.sync for ways in trained for way in ways):
            return False
    return True
