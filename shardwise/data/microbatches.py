"""``Microbatches``: data that belongs to a step and a microbatch, whichever rank computes it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from shardwise.arguments import check_whole, unknown_argument
from shardwise.consistency.agreement import open_agreement
from shardwise.data.mixture import Mixture, check_map_style, digest_of_samples
from shardwise.data.order import SampleOrder, own_microbatches, whole_weights
from shardwise.data.streams import StreamReader
from shardwise.errors import ConfigError, StateError, UsageError

_ARGUMENTS = ("num_microbatches", "microbatch_size", "seed", "drop_last", "mesh")
_OWN_DRAWS = "; random numbers of a dataset's own generator, unlike those of Python, numpy and torch, have other values"
_OF_WORKERS = ("prefetch_factor", "multiprocessing_context")
_OPTIONS = (*("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"), *_OF_WORKERS)


def _loader(dataset: Dataset[Any], seed: int, options: Mapping[str, Any], **more: Any) -> DataLoader[Any]:
    # Without a generator of its own each iterator would draw a seed from the random numbers of the model.
    return DataLoader(dataset, generator=torch.Generator("cpu").manual_seed(seed), **{**options, **more})


@dataclass(eq=False)
class _SampleReader(Dataset[Any]):
    """Reads the samples of one microbatch at a time in a worker, whose random numbers follow from the microbatch."""

    dataset: Any
    order: SampleOrder

    def __getitems__(self, item: tuple[int, list[int]]) -> Any:
        number, samples = item
        self.order.seed_worker(number)
        read = getattr(self.dataset, "__getitems__", None)
        return [self.dataset[each] for each in samples] if read is None else read(samples)


class _MapSource:
    """A map-style dataset; samples follow from the step, so that the state has the weights of a mixture alone."""

    def __init__(self, dataset: Any, order: SampleOrder, options: Mapping[str, Any]) -> None:
        check_map_style(dataset, "Microbatches: the dataset")
        self.order, self._dataset, self._options = order, dataset, options
        self._digests: dict[str, str] = {}
        order.sources = {"": dataset}
        if isinstance(dataset, Mixture):
            order.sources, order.weights = dataset.sources, {0: dataset.weights}
        order.lengths = {name: len(each) for name, each in order.sources.items()}
        if order.drop_last and (len(order.sources) > 1 or len(dataset) < order.batch):
            raise ConfigError(
                f"Microbatches: drop_last leaves out the end of an epoch that fills no step of {order.batch} samples; found "
                f"{len(order.sources)} sources of {len(dataset)} samples, expected one dataset of a step or more"
            )

    def identity(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, and in a state that is loaded."""
        order = self.order
        order.check()  # no state is saved of another dataset
        if not self._digests:
            # Workers share the position of a file that the dataset opens at its first sample: open it in a worker too.
            sources: Any = [*order.sources.values()]
            more = {"num_workers": min(1, self._options.get("num_workers", 0)), "timeout": 0, "pin_memory": False}
            found = _loader(sources, order.seed, self._options, **more, batch_size=None, collate_fn=digest_of_samples)
            self._digests = dict(zip(order.sources, found, strict=True))
        facts: dict[str, Any] = {"samples per step": order.batch, "seed": order.seed, "drop_last": order.drop_last}
        for (name, digest), weight in zip(self._digests.items(), order.weights[0], strict=True):
            facts[f"dataset {name}".strip()] = f"{order.lengths[name]} samples, digest {digest}, weight {weight}"
        return facts

    def read(self, step: int, own: range) -> Iterator[Any]:
        """Yield the microbatches ``own`` of each step from ``step`` on, for ever."""
        samples, reader = self.order.microbatches(step, own), self._dataset
        if self._options.get("num_workers"):
            numbers = (each * self.order.num_microbatches + k for each in count(step) for k in own)
            samples, reader = zip(numbers, samples, strict=False), _SampleReader(reader, self.order)
        return iter(_loader(reader, self.order.seed, self._options, batch_sampler=samples))

    def state(self, step: int) -> dict[str, Any]:
        """Return what a later run needs before ``step`` besides its number."""
        return {"weights": {each: [*weights] for each, weights in self.order.weights.items() if each}}

    def load(self, step: int, state: Mapping[str, Any], is_new: bool) -> None:
        """Continue from a state; ``is_new``: nothing was read yet."""
        saved = {0: self.order.weights[0], **state["weights"]}
        mine = {each: weights for each, weights in self.order.weights.items() if is_new and each not in saved}
        if early := [each for each in mine if each < step]:
            raise ConfigError(
                f"Microbatches: set_weights({early[0]}, ...) was called before a state of step {step} was loaded, in which "
                f"weights did not change at step {early[0]}"
            )
        self.order.weights = {**saved, **mine}


class _StreamSource:
    """A stream for each microbatch of a step.

    ``_states``: of the streams before a step, by step and microbatch: None for a new stream.  Those of the first step, the
    last one and the next one are kept.
    """

    def __init__(
        self, open_stream: Callable[[int], Iterable[Any]], order: SampleOrder, options: Mapping[str, Any]
    ) -> None:
        self.order, self._open, self._options = order, open_stream, options
        self._states: dict[int, dict[int, Any]] = {0: dict.fromkeys(range(order.num_microbatches))}

    def identity(self) -> dict[str, Any]:
        """See :class:`_MapSource`."""
        names = "num_microbatches", "microbatch_size", "seed"
        return {**{name: getattr(self.order, name) for name in names}, "dataset": "streams"}

    def read(self, step: int, own: range) -> Iterator[Any]:
        """See :class:`_MapSource`.  Without states of all streams, earlier steps are read again."""
        begin = max(each for each, states in self._states.items() if each <= step and states.keys() >= {*own})
        states = {microbatch: self._states[begin][microbatch] for microbatch in own}
        collate = self._options.get("collate_fn") or default_collate
        reader = StreamReader(self._open, collate, self.order, begin, states)
        for batch in _loader(reader, self.order.seed, self._options, batch_size=None, collate_fn=_unchanged):
            if batch is None:
                continue
            after = batch.step + 1
            self._states = {each: states for each, states in self._states.items() if each in (0, batch.step, after)}
            self._states.setdefault(after, {})[batch.microbatch] = batch.state
            if batch.step >= step:
                yield batch.samples

    def state(self, step: int) -> dict[str, Any]:
        """See :class:`_MapSource`."""
        return {"streams": dict(self._states.get(step, {}))}

    def load(self, step: int, state: Mapping[str, Any], is_new: bool) -> None:
        """See :class:`_MapSource`."""
        self._states = {step: dict(state["streams"]), 0: self._states[0]}


def _unchanged(batch: Any) -> Any:
    return batch


@dataclass(slots=True)
class _Reading:
    """A source that is read by a rank, ``num_batches`` per step.

    ``step``: the one that comes next; NaN, which equals no number, within a step.  ``world``: the process group of the ranks.
    """

    batches: Iterator[Any]
    num_batches: int
    step: float
    world: Callable[[], object]


class StepSampler(Sampler[list[int]]):
    """The samples of one rank's microbatches of some steps, as a ``batch_sampler`` of a DataLoader; it serves once."""

    def __init__(self, order: SampleOrder, steps: range, own: range) -> None:
        self._order, self.steps, self._own, self.is_used = order, steps, own, False

    def __len__(self) -> int:
        return len(self.steps) * len(self._own)

    def __iter__(self) -> Iterator[list[int]]:
        if self.is_used:
            raise UsageError(
                f"Microbatches: the sampler of steps {self.steps.start} to {self.steps.stop} is used a second time, which "
                "would give the same samples again; make another for the steps that follow"
            )
        self.is_used = True
        yield from islice(self._order.microbatches(self.steps.start, self._own), len(self))


class Microbatches:
    """Data by seed, step and microbatch: the same samples at any number of ranks, after a resume, a lost rank, a step undone.

    Every rank makes it with the same arguments.  A step has ``num_microbatches`` microbatches, of which each rank reads equally
    many consecutive ones, as :class:`~shardwise.Reproducible` numbers them.  torch's DataLoader reads them.

    Args:
        dataset: a map-style dataset (``__len__`` and ``__getitem__``), a :class:`~shardwise.Mixture` of them, or a function
            that returns a new stream for the number of a microbatch: an iterable, best with ``state_dict`` and
            ``load_state_dict``, such as :class:`~shardwise.Packed`.
        num_microbatches: of a step, over all ranks.  microbatch_size: samples of each.
        seed: of the order, which has each sample of a map-style dataset once per epoch.
        drop_last: leave out the samples of an epoch that fill no step; else a step may have samples of two epochs.
        mesh: the data-parallel mesh, if ranks share microbatches (tensor parallelism); None: all ranks.
        loader: options of the DataLoader: num_workers, collate_fn, pin_memory, prefetch_factor, timeout, worker_init_fn,
            multiprocessing_context.

    Attributes:
        step: the step after the last one that was read, also after a state was loaded.
        num_microbatches: of a step.

    Ranks compare their arguments, and a hundred samples, in the first step.  Random numbers of transforms follow from the seed,
    the step and the microbatch in workers; without workers they are those of the process.

    Raises: ConfigError if the number of ranks does not divide ``num_microbatches``; DesyncError on all ranks if ranks have
        other arguments or samples; StateError for a dataset that changes its length, a stream that ends, a worker that dies.

    Example:
        >>> data = Microbatches(range(10), num_microbatches=2, microbatch_size=3, seed=0)
        >>> for number in range(data.step, 2):
        ...     print(number, [batch.tolist() for batch in data.of_step(number)])
        0 [[0, 0, 0], [0, 0, 0]]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_microbatches: int,
        microbatch_size: int,
        seed: int = 0,
        drop_last: bool = False,
        mesh: DeviceMesh | None = None,
        **loader: Any,
    ) -> None:
        for name in loader:
            if name not in _OPTIONS:
                raise unknown_argument("Microbatches", name, [*_ARGUMENTS, *_OPTIONS])
        for name, value, least in zip(_ARGUMENTS, (num_microbatches, microbatch_size, seed), (1, 1, 0), strict=False):
            check_whole(name, value, least)
        self.num_microbatches, self.step = num_microbatches, 0
        order = SampleOrder(num_microbatches, microbatch_size, seed, drop_last)
        kind: Any = _StreamSource if callable(dataset) and not hasattr(dataset, "__getitem__") else _MapSource
        self._source: _MapSource | _StreamSource = kind(dataset, order, loader)
        self._mesh = mesh
        self._world: Callable[[], object] = lambda: None  # whose ranks have compared their data
        self._reading: _Reading | None = None
        self._sampler: StepSampler | None = None  # of the user's own DataLoader

    def of_step(self, number: int) -> Iterator[Any]:
        """Yield this rank's microbatches of step ``number``, as collated.

        Steps that follow each other are read ahead by workers.  Another step, such as one that is made again, is read at once;
        of streams, the last step and the next one, and others after a new read from their beginning.
        """
        reading = self._reading  # the steps of a run that nothing happens to need no more than this
        try:
            if reading is None or reading.step != number or reading.world() is not dist.group.WORLD:
                check_whole("number", number, 0)
                own, self._reading = self._own(), None  # ends its workers
                reading = self._reading = _Reading(self._source.read(number, own), len(own), math.nan, self._world)
            reading.step = math.nan
            yield from islice(reading.batches, reading.num_batches - 1)
            if self._reading is not reading:
                text = "end one before another, and before set_weights()"
                raise UsageError(f"Microbatches: the loop over of_step({number}) was left; {text}")
            batch = next(reading.batches)
            reading.step = self.step = number + 1
            yield batch
        except Exception as error:
            self._source.order.check()  # before the samples that it lacks are missed
            if str(error).startswith("DataLoader worker (pid"):
                text = f"Microbatches: a worker of the DataLoader has died in step {number}: {error}. of_step() reads it again"
                raise StateError(text) from error
            raise

    def batch_sampler(self, steps: range, rank: int | None = None, num_ranks: int = 1) -> StepSampler:
        """Return the samples of ``rank`` (default: this rank) in ``steps``, for a loop that has a DataLoader of its own.

        ``DataLoader(dataset, batch_sampler=data.batch_sampler(range(begin, end)))`` has one batch per microbatch.  Set
        :attr:`step` before a save: a DataLoader reads ahead of the loop.  Give Microbatches its ``num_workers`` too: a worker
        then reads the samples that ranks compare, and files that the dataset opens at its first sample stay its own.
        Raises: UsageError for streams, which have no sample numbers; ConfigError for steps that do not follow each other,
            and for a rank that is not below ``num_ranks``.
        """
        if not self._source.order.lengths:
            raise UsageError("Microbatches.batch_sampler: streams have no sample numbers; read them with of_step()")
        if steps.step != 1 or steps.start < 0:
            raise ConfigError(f"Microbatches.batch_sampler: steps are {steps}, expected range(begin, end) from 0 on")
        own = self._own() if rank is None else own_microbatches(self.num_microbatches, rank, num_ranks)
        self._sampler = StepSampler(self._source.order, steps, own)
        return self._sampler

    def set_weights(self, number: int, weights: Mapping[str, float]) -> None:
        """Let the sources of a mixture have other weights from step ``number`` on; the state has the change.

        Raises: ConfigError for a step that was read, for weights that are not numbers, and without a mixture; UsageError for
            a step of a :meth:`batch_sampler` that is being read.
        """
        order, own = self._source.order, self._sampler
        if number < max(self.step, 1) or len(order.lengths) < 2:
            raise ConfigError(
                f"Microbatches.set_weights: step {number} of {len(order.lengths)} sources, expected a mixture, and step "
                f"{max(self.step, 1)} or a later one, which was not read yet"
            )
        if own is not None and own.is_used and number < own.steps.stop:
            text = "whose samples are chosen; set weights before, or make samplers of fewer steps"
            raise UsageError(f"Microbatches.set_weights: step {number} is of a batch_sampler {text}")
        order.weights[number] = whole_weights(weights, [*order.lengths])
        self._reading = None  # workers may have read beyond the step

    def state_dict(self) -> dict[str, Any]:
        """Return the position, what identifies the data, and of streams the states that this rank has, by microbatch.

        Raises: StateError if only a DataLoader of the user's own knows the position.
        """
        own = self._sampler
        if own is not None and own.is_used and self.step <= own.steps.start:
            steps = f"{own.steps.start} to {own.steps.stop}"
            raise StateError(
                f"Microbatches: a DataLoader of your own reads steps {steps}, and the step is {self.step}: set data.step first"
            )
        return {"step": self.step, "identity": self._source.identity(), "streams": {}, **self._source.state(self.step)}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ConfigError, with the first fact that differs, unless ``state_dict`` is of this data."""
        own = self._source.identity()
        saved: Mapping[str, Any] = state_dict["identity"]
        for name in {**own, **saved}:
            if saved.get(name) != own.get(name):
                raise ConfigError(
                    f"Microbatches: the state is of other data: {name} is {saved.get(name)} there and {own.get(name)} here. "
                    f"Samples would not be those that follow; leave this entry out to begin with new data{_OWN_DRAWS}"
                )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the step of ``state_dict``, at any number of ranks.  Raises: ConfigError for the state of other data."""
        self.check_state(state_dict)
        self._source.load(state_dict["step"], state_dict, is_new=self._reading is None and not self.step)
        self._reading, self.step = None, state_dict["step"]

    def _own(self) -> range:
        """Return the microbatches of this rank.  The first call on a process group compares the data of its ranks."""
        mesh, world = self._mesh, dist.group.WORLD
        if world is None:
            self._world = lambda: None
            self._source.identity()  # before samples are read, which may advance a generator of the dataset's own
            return own_microbatches(self.num_microbatches, 0, 1)
        ranks = range(world.size()) if mesh is None else mesh.mesh.flatten().tolist()
        own = own_microbatches(self.num_microbatches, ranks.index(dist.get_rank()), len(ranks))
        if self._world() is not world and dist.get_backend() != "fake":
            self._compare([world] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)])
        ref = weakref.ref(world)
        self._world = lambda: ref() or ref  # a group that is gone is not no group
        return own

    def _compare(self, groups: list[Any]) -> None:
        facts, error = list[str](), None
        try:
            its = self._source.identity().items()
            facts = [f"{name} {value}{_OWN_DRAWS * name.startswith('dataset')}" for name, value in its]
        except Exception as raised:
            error = raised
        for group in groups:
            open_agreement(group, "Microbatches").agree("Microbatches", facts, error)
