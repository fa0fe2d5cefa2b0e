"""What a carrier is: one entry of the state a user saves, which knows its names and how to take state back."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, cast

import numpy as np
import torch
import xxhash

from shardwise.checkpoint.contents import Contents, device_of, like, parts_of
from shardwise.checkpoint.names import join
from shardwise.checkpoint.order import LoadRequests
from shardwise.checkpoint.values import encode
from shardwise.errors import ConfigError

Apply = Callable[[], None]


class Carrier(Protocol):
    """One entry of the state."""

    prefix: str  # of its names

    def put(self, contents: Contents) -> None:
        """Say what this rank holds; may be collective."""
        ...

    def ask(self, order: LoadRequests) -> Apply:
        """Ask for what this rank needs; return what puts it into place, once all of it is read and verified."""
        ...


class PerRank:
    """Marks state that is each rank's own: ``PerRank(loader)``.  It loads at the same number of ranks alone.

    Example:
        >>> state = {"loader": PerRank(loader)}  # doctest: +SKIP
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner


class RandomState:
    """The state of the random generators of Python, numpy and torch on this rank, for the state to be saved.

    At another number of ranks there is none to go back to: each rank gets a seed that follows from the save and its rank.

    Example:
        >>> state = {"random": RandomState()}
        >>> sorted(state["random"].state_dict())
        ['cuda', 'numpy', 'python', 'torch']
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators."""
        kind, keys, *rest = cast(Any, np.random.get_state())
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        numpy = (str(kind), np.asarray(keys).tobytes(), *[float(x) if isinstance(x, float) else int(x) for x in rest])
        return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to that state."""
        random.setstate(state_dict["python"])
        kind, keys, *rest = state_dict["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state_dict["torch"])
        if state_dict["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"][0])


def own_state(marked: PerRank | RandomState) -> Any:
    """Return what differs between ranks: what ``PerRank`` marks, or the generators."""
    return marked._inner if isinstance(marked, PerRank) else marked  # pyright: ignore[reportPrivateUsage]


def _seed_from(save_id: str, rank: int) -> None:
    """Seed all generators from what every rank knows and its own number."""
    seed = xxhash.xxh3_64_intdigest(f"{save_id}/{rank}".encode())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


class ObjectCarrier:
    """Anything with ``state_dict`` and ``load_state_dict``, and dicts; equal on all ranks."""

    def __init__(self, prefix: str, thing: Any) -> None:
        self.prefix, self._thing = prefix, thing
        if isinstance(thing, MutableMapping):
            return
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise ConfigError(
                f"{prefix}: a {type(thing).__name__} has no state_dict() and load_state_dict(); give an object that has, or "
                "put the value into a dict"
            )

    def put(self, contents: Contents) -> None:
        """See :class:`Carrier`."""
        contents.add_value(self.prefix, encode(self._state(), self.prefix, contents.add_tensor))

    def ask(self, order: LoadRequests) -> Apply:
        """See :class:`Carrier`."""
        if not order.has_value(self.prefix):
            order.missing.append(self.prefix)
            return lambda: None
        own: dict[str, torch.Tensor] = {}
        encode(self._state(), self.prefix, own.__setitem__)
        staged: dict[str, list[torch.Tensor]] = {}

        def stage(name: str) -> torch.Tensor:
            mine, record = own.get(name), order.manifest.record_of(name)
            if mine is None or record is None or type(mine) is torch.Tensor or tuple(mine.shape) != record.shape:
                staged[name] = [order.whole(name)]
                own.pop(name, None)
            else:
                staged[name] = order.windows(name, record.shape, [part.window for part in parts_of(name, mine)]) or []
            return staged[name][0]

        def place(name: str) -> torch.Tensor:
            mine, found = own.get(name), staged[name]
            return found[0] if mine is None else like(mine, [x.to(device_of(mine)) for x in found], found[0].dtype)

        order.value(self.prefix, give=stage)
        # Decoded once more when all is read: what is moved to a device before that has not got its values yet.
        return lambda: self._load(order.value(self.prefix, give=place))

    def _state(self) -> Any:
        if isinstance(self._thing, MutableMapping):
            return dict(cast(MutableMapping[str, Any], self._thing))
        return self._thing.state_dict()

    def _load(self, found: Any) -> None:
        if isinstance(self._thing, MutableMapping):
            self._thing.clear()
            self._thing.update(found)
        else:
            self._thing.load_state_dict(found)


class PerRankCarrier:
    """State of one rank, under the rank's number."""

    def __init__(self, key: str, thing: Any, rank: int, size: int, warn: Callable[[str], None]) -> None:
        self.prefix = join("rank", str(rank), key)
        self._key, self._thing, self._rank, self._size, self._warn = key, thing, rank, size, warn

    def put(self, contents: Contents) -> None:
        """See :class:`Carrier`."""
        ObjectCarrier(self.prefix, self._thing).put(contents)

    def ask(self, order: LoadRequests) -> Apply:
        """See :class:`Carrier`."""
        saved_by, save_id = order.manifest.num_ranks, order.manifest.save_id
        if saved_by == self._size:
            return ObjectCarrier(self.prefix, self._thing).ask(order)
        order.leave(self.prefix)
        is_random = isinstance(self._thing, RandomState)
        what = "each rank's is derived from the save" if is_random else "it stays as it is"
        if self._rank == 0:
            self._warn(f"{self._key}: {saved_by} ranks have saved theirs, {self._size} load it: {what}")
        return (lambda: _seed_from(save_id, self._rank)) if is_random else (lambda: None)
