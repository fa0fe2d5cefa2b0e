"""Streams: samples that can only be read in their order, one stream for each microbatch of a step."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from shardwise.arguments import check_whole
from shardwise.data.order import SampleOrder
from shardwise.errors import ConfigError, StateError

Tokens = NDArray[np.int64]
logger = logging.getLogger(__name__)


class StreamPosition:
    """Reads ``stream`` from ``state`` on, which :meth:`state_dict` has returned; None: from its beginning.

    A stream without ``state_dict`` and ``load_state_dict`` is counted, and read again up to the position.
    """

    def __init__(self, stream: Iterable[Any], state: Any = None) -> None:
        self._stream: Any = stream
        self._has_state = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
        if self._has_state and state is not None:
            self._stream.load_state_dict(copy.deepcopy(state))
        self._samples, self._count = iter(stream), 0
        if not self._has_state and state:
            begin = time.monotonic()
            self._count = sum(1 for _ in islice(self._samples, state))
            logger.warning(
                "Microbatches: a %s has no state_dict() and load_state_dict(): %d samples were read again in %.1f s",
                *(type(stream).__name__, self._count, time.monotonic() - begin),
            )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        sample = next(self._samples)
        self._count += 1
        return sample

    def state_dict(self) -> Any:
        """Return what a later stream continues from."""
        return copy.deepcopy(self._stream.state_dict()) if self._has_state else self._count


class Packed:
    """Pack sequences of tokens from ``stream`` into windows of ``length`` tokens, cut where a window is full.

    It is a stream itself: an iterable with a state, which has the state of ``stream`` and the tokens of the unfinished window.

    Args:
        stream: sequences of whole numbers, as lists, arrays or 1-D tensors.
        length: of a window.  To predict each next token, make it one longer than the context.
        key: of the tokens, if samples are dicts.

    Yields: dicts of "tokens" and "positions", int64 tensors of shape (length,).  Positions count from 0 in each sequence, and
        in each part of one that a window cuts off, as varlen attention takes them.

    Example:
        >>> for window in Packed([[5, 6, 7], [8, 9]], 2):
        ...     print(window["tokens"].tolist(), window["positions"].tolist())
        [5, 6] [0, 1]
        [7, 8] [0, 0]
    """

    def __init__(self, stream: Iterable[Any], length: int, key: str | None = None) -> None:
        check_whole("length", length, 1)
        self._stream, self._length, self._key = stream, length, key
        self._position: StreamPosition | None = None
        self._begin: Any = None  # the state of the stream from which the next pass starts
        self._unfinished: list[Tokens] = []  # parts of sequences; all but the last are shorter than a window together

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._position is not None:  # another pass
            self._begin, self._unfinished = None, []
        self._position = StreamPosition(self._stream, self._begin)
        first, self._unfinished = self._unfinished, []
        for tokens in chain(first, map(self._tokens_of, self._position)):
            self._unfinished.append(tokens)
            while (excess := sum(map(len, self._unfinished)) - self._length) >= 0:
                *window, last = self._unfinished
                window.append(last[: len(last) - excess])
                self._unfinished = [last[len(last) - excess :]]
                positions = np.concatenate([np.arange(len(each)) for each in window])
                yield {"tokens": torch.from_numpy(np.concatenate(window)), "positions": torch.from_numpy(positions)}

    def _tokens_of(self, sample: Any) -> Tokens:
        return np.array(sample if self._key is None else sample[self._key], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream, and the tokens of the unfinished window."""
        stream = self._begin if self._position is None else self._position.state_dict()
        return {
            "length": self._length,
            "stream": stream,
            "unfinished": [each.tobytes() for each in self._unfinished],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from that state in the next pass.  Raises: ConfigError for windows of another length."""
        if state_dict["length"] != self._length:
            raise ConfigError(
                f"Packed: the state has windows of {state_dict['length']} tokens and this one {self._length}; pack as before"
            )
        self._position, self._begin = None, state_dict["stream"]
        self._unfinished = [np.frombuffer(each, dtype=np.int64) for each in state_dict["unfinished"]]


class StreamBatch(NamedTuple):
    """Microbatch ``microbatch`` of ``step``, as collated; ``state``: of its stream after it."""

    step: int
    microbatch: int
    samples: Any
    state: Any


@dataclass(eq=False)
class StreamReader(IterableDataset[StreamBatch | None]):
    """Reads the streams of a rank's microbatches, divided among the workers of a DataLoader.

    Workers yield in turn, so that all have equally many turns in a step: None where one has no microbatch.

    Attributes:
        open_stream: returns the stream of a microbatch.  collate: its samples.
        order: of the microbatches.  begin: the first step.  states: of the streams before it, by microbatch.
    """

    open_stream: Callable[[int], Iterable[Any]]
    collate: Callable[[list[Any]], Any]
    order: SampleOrder
    begin: int
    states: Mapping[int, Any]

    def __iter__(self) -> Iterator[StreamBatch | None]:
        worker = get_worker_info()
        index, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbers: list[int | None] = [*self.states, *[None] * (-len(self.states) % num_workers)]
        own = numbers[index::num_workers]
        streams = {each: StreamPosition(self.open_stream(each), self.states[each]) for each in own if each is not None}
        for step in count(self.begin):
            for each in own:
                yield None if each is None else self._read(step, each, streams[each])

    def _read(self, step: int, microbatch: int, stream: StreamPosition) -> StreamBatch:
        self.order.seed_worker(step * self.order.num_microbatches + microbatch)
        samples = [*islice(stream, self.order.microbatch_size)]
        if len(samples) < self.order.microbatch_size:
            raise StateError(
                f"Microbatches: the stream of microbatch {microbatch} ended in step {step}; repeat it for ever (as "
                "dataset.repeat() does), or make fewer steps"
            )
        return StreamBatch(step, microbatch, self.collate(samples), stream.state_dict())
