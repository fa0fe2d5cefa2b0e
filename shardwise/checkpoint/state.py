"""The entries of a state, as carriers that save and load them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise import torch_private
from shardwise.checkpoint.contents import (
    Contents,
    LoadRequests,
    Windows,
    device_of,
    encode,
    groups_of,
    like,
    parts_of,
    windows_of,
)
from shardwise.checkpoint.format import TensorRecord, bytes_of, dtype_of, join, plain, split, sum_of
from shardwise.consistency.agreement import StoreGather
from shardwise.consistency.store import digest_of, sample_of
from shardwise.data.microbatches import Microbatches
from shardwise.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DesyncError,
    ShardwiseError,
    TransportError,
)
from shardwise.formatting import format_ranks, ranks_by_text
from shardwise.fsdp.init_parameters import SHARES_BUFFERS, unlike_buffers, unlike_in_words, unwritten_in
from shardwise.one_host import RandomState, set_seed
from shardwise.optim.sharded_optimizer import ShardedOptimizer, empty_state_of
from shardwise.optim.slices import in_order_of
from shardwise.optim.state_dict import options_of, why_other_class
from shardwise.zero.optimizer import OptimizerState
from shardwise.zero.partition import LocalSlice, StateSlice

# ---- Phases that end alike on all ranks: with every rank's result, or with one error that names the failed rank and
# the cause.


def together(store_gather: StoreGather, what: str, phase: str, do: Callable[[], Any]) -> list[Any]:
    """Run ``do``; return its results on every rank, in rank order.  They must be JSON.

    ``phase``: its name, equal on all ranks unless one has left an earlier phase that the others have completed.
    Raises: the same CheckpointError on every rank if one raised anything, or DamagedCheckpointError if all errors are
        damage.  DesyncError on every rank if they are in different phases.  An interrupt is re-raised unchanged on its
        own rank.
    """
    found: Any = None
    error: BaseException | None = None
    try:
        found = do()
    except BaseException as raised:
        error = raised
    is_damage, is_own = (isinstance(error, kind) for kind in (DamagedCheckpointError, ShardwiseError))
    report = [phase, found, None if error is None else [type(error).__name__, _text(error), is_damage, is_own]]
    try:
        reports = [json.loads(text) for text in store_gather.call(json.dumps(report))]
    except TransportError as gone:
        rest = "" if "nothing has changed" in what else "; nothing has changed"
        raise CheckpointError(f"{what}: {gone}{rest}") from (error or gone)
    if error is not None and not isinstance(error, Exception):
        raise error
    if any(other != phase for other, *_ in reports):
        phases = ranks_by_text((rank, other) for rank, (other, *_) in enumerate(reports))
        raise DesyncError(
            f"ranks are in different phases: {'; '.join(f'{format_ranks(ranks)}: {text}' for text, ranks in phases.items())}. "
            "They made different calls, or an interrupt ended the call of one; make the same call on all of them"
        ) from error
    failures = [(rank, failure) for rank, (*_, failure) in enumerate(reports) if failure is not None]
    if not failures:
        return [value for _, value, _ in reports]
    texts = ranks_by_text((rank, text if is_own else f"{kind}: {text}") for rank, (kind, text, _, is_own) in failures)
    causes = "; ".join(
        f"{format_ranks(ranks)}: {text}" if store_gather.size > 1 else text for text, ranks in texts.items()
    )
    is_damage = all(damage for _, (_, _, damage, _) in failures)
    raise (DamagedCheckpointError if is_damage else CheckpointError)(f"{what}: {causes}") from error


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return "/".join(split(str(error)))  # names of state as their users write them


# ---- Buffers of modules: ranks compare them before a save, because a checkpoint has one value for all ranks.

Buffers = Literal["rank0", "per_rank"]


def check_choice(choice: object) -> None:
    """Raise ConfigError unless ``choice`` is one of :data:`Buffers` or None."""
    if choice is not None and choice not in get_args(Buffers):
        raise ConfigError(f"buffers is {choice!r}, expected {', '.join(map(repr, get_args(Buffers)))} or None")


def own_name(rank: int, name: str) -> str:
    """Return the name of one rank's copy of the buffer ``name`` in a checkpoint.

    Example:
        >>> own_name(1, "model/0.running_mean")
        'rank/1/model/0.running_mean'
    """
    return f"{join('rank', str(rank))}/{name}"


class BufferCheck:
    """The buffers of one rank, which may not differ between ranks unless the user has chosen what to save.

    Attributes:
        mark: equal on ranks with equal buffers and the same choice.
    """

    def __init__(self, contents: Contents, choice: Buffers | None, rank: int) -> None:
        self._choice = choice
        self._digests: dict[str, str] = {}
        if choice == "per_rank":
            for name in list(contents.buffers):
                contents.add_tensor(own_name(rank, name), contents.parts[name][0].tensor)
        elif choice != "rank0":
            self._digests = {name: f"{digest_of(contents.parts[name][0].tensor):x}" for name in contents.buffers}
        self.mark = sum_of(json.dumps([choice, self._digests]).encode())

    def compare(self, what: str, exchange: Callable[[str, Callable[[], Any]], list[Any]]) -> None:
        """Raise CheckpointError on every rank if buffers differ and ``buffers`` is None, or differs between ranks.

        ``exchange``: as :func:`together`, of a phase and what to call in it.  ``what`` begins the error.
        """
        reports = exchange("buffers", lambda: [self._choice, self._digests])
        choices = [choice for choice, _ in reports]
        if any(choice != choices[0] for choice in choices):
            each = ", ".join(map(repr, choices))
            raise CheckpointError(f"{what}: buffers is {each} on ranks 0 to {len(reports) - 1}, expected one for all")
        unlike = unlike_buffers([digests for _, digests in reports])
        if unlike:
            raise CheckpointError(f"{what}: {unlike_in_words(list(unlike), next(iter(unlike.values())))}")


# ---- Parameters: a rank that holds the same part as another must have the same values, since one of them writes it.

_SAMPLE_NUMEL = 64


class ParameterCheck:
    """Samples of one rank's parameters, to compare with those of ranks that hold the same parts.

    Values that differ on purpose (columns or experts of each rank in plain tensors) differ everywhere: a few elements show it.

    Attributes:
        marks: a digest of all samples, by what they are of: ``digest`` of the windows, and the names of plain parameters.
    """

    def __init__(self, contents: Contents, digest: str) -> None:
        tensors = {name: part.tensor for name in contents.params for part in contents.parts[name]}
        # copies, since torch calls one element contiguous whatever its stride is
        copies = [
            torch.clone(sample_of(each, _SAMPLE_NUMEL), memory_format=torch.contiguous_format)
            for each in tensors.values()
        ]
        samples = [each.view(torch.uint8) for each in copies]
        taken = torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *(each.cpu() for each in samples)])
        texts = (sum_of(bytes_of(each)) for each in taken.split([each.numel() for each in samples]))
        found = dict(zip(tensors, texts, strict=True))
        whole_ones = {name: text for name, text in found.items() if contents.params[name]}
        self._digests = {digest: found, sum_of(json.dumps(list(whole_ones)).encode()): whole_ones}
        self.marks = {key: sum_of(json.dumps(each).encode()) for key, each in self._digests.items()}

    def compare(
        self, what: str, marks: Sequence[Mapping[str, str]], exchange: Callable[[str, Callable[[], Any]], list[Any]]
    ) -> None:
        """Raise CheckpointError on every rank if two ranks with the same part have different values in it."""
        first: dict[str, tuple[int, str]] = {}
        for rank, each in enumerate(marks):
            for key, mark in each.items():
                other, known = first.setdefault(key, (rank, mark))
                if mark != known:
                    reports = exchange("parameters", lambda key=key: self._digests.get(key, {}))
                    names = [name for name, text in reports[other].items() if reports[rank][name] != text]
                    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                    raise CheckpointError(
                        f"{what}: parameters (or numbers of steps) differ between ranks that hold the same part of them: "
                        f"{names[0]}{more}; rank {other} and rank {rank} have different values, and a checkpoint holds one. "
                        "Skip a step on all ranks; give each rank's own a name of its own, make it a part of a DTensor on a "
                        "mesh of all ranks, or save with group= into a folder of each group"
                    )


# ---- Carriers: each is one entry of the saved state; it names the state and restores it.

Apply = Callable[[], None]
# State to load as functions to call after the read: a copy on a device that was made before it would lack the values.
Later = dict[int, dict[str, Callable[[], Any]]]  # number of the parameter -> state key
_Item = TypeVar("_Item")


class PerRank:
    """Mark state that differs between ranks: ``PerRank(loader)``.  It loads only at the same number of ranks.

    Example:
        >>> state = {"loader": PerRank(loader)}  # doctest: +SKIP
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner


class ObjectCarrier:
    """Anything with ``state_dict`` and ``load_state_dict``, and dicts; equal on all ranks.

    All carriers have ``put``, which adds this rank's part to a save and may be collective, and ``ask``, which requests
    what this rank needs and returns a function that restores it after everything is read and verified.  ``prefix``: of
    the names.
    """

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
        """Add this rank's part."""
        contents.add_value(self.prefix, encode(self._state(), self.prefix, contents.add_tensor))

    def ask(self, order: LoadRequests) -> Apply:
        """Request what this rank needs."""
        if self.prefix not in order.manifest.values:
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

        self._check_scheduler(order.value(self.prefix, give=stage))
        # Decode again after the read: a copy on a device that was made before it would lack the values.
        return lambda: self._load(order.value(self.prefix, give=place))

    def _check_scheduler(self, found: Any) -> None:
        """Refuse the state of another class of scheduler: torch's take over any attributes."""
        if type(self._thing).__module__ != LRScheduler.__module__ or not isinstance(found, Mapping):
            return
        there, here = ({key for key in names if key[0] != "_"} - {"verbose"} for names in (found, self._state()))
        if there != here:
            raise CheckpointError(
                f"{self.prefix}: it is the state of another scheduler, with {', '.join(sorted(there))}; a "
                f"{type(self._thing).__name__} has {', '.join(sorted(here))}. Load it into a scheduler of its class"
            )

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
    """State of one rank, under its rank."""

    def __init__(self, key: str, thing: Any, rank: int, size: int, warn: Callable[[str], None]) -> None:
        self.prefix = join("rank", str(rank), key)
        self._key, self._thing, self._rank, self._size, self._warn = key, thing, rank, size, warn

    def put(self, contents: Contents) -> None:
        """See :class:`ObjectCarrier`."""
        contents.divided.add(self.prefix)
        ObjectCarrier(self.prefix, self._thing).put(contents)

    def ask(self, order: LoadRequests) -> Apply:
        """See :class:`ObjectCarrier`."""
        saved_by = order.manifest.num_ranks
        if saved_by == self._size:
            return ObjectCarrier(self.prefix, self._thing).ask(order)
        order.skip(self.prefix)
        is_random = isinstance(self._thing, RandomState)
        what = "each rank's is derived from the save" if is_random else "it stays as it is"
        if self._rank == 0:
            self._warn(f"{self._key}: {saved_by} ranks have saved theirs, {self._size} load it: {what}")
        seed = xxhash.xxh3_64_intdigest(f"{order.manifest.save_id}/{self._rank}".encode()) >> 1
        return (lambda: set_seed(seed)) if is_random else (lambda: None)


class MicrobatchesCarrier(ObjectCarrier):
    """Data of :class:`~shardwise.Microbatches`; states of streams are by microbatch, each from the ranks that read it."""

    def put(self, contents: Contents) -> None:
        """See :class:`ObjectCarrier`."""
        state = self._thing.state_dict()
        streams = state.pop("streams")
        contents.add_value(self.prefix, encode(state, self.prefix))
        for number, stream in streams.items():
            name = f"{self.prefix}/streams/{number}"
            contents.divided.add(name)
            contents.add_value(name, encode(stream, name, contents.add_tensor))

    def ask(self, order: LoadRequests) -> Apply:
        """See :class:`ObjectCarrier`.  Raises: CheckpointError for other data."""
        if self.prefix not in order.manifest.values:
            order.missing.append(self.prefix)
            return lambda: None
        found = order.value(self.prefix)
        try:
            self._thing.check_state(found)
        except ConfigError as error:
            raise CheckpointError(f"{self.prefix}: {error}") from error
        names = order.names_under(f"{self.prefix}/streams")
        found["streams"] = {int(split(name)[-1]): order.value(name) for name in names}
        return lambda: self._thing.load_state_dict(found)


# ---- Optimizers as carriers: state and options by parameter names.  In memory, state is by the number of the parameter, as
# in a plain optimizer's state dict: the optimizers of this package have that form, too.


class OptimizerCarrier:
    """One optimizer; ``names``: of parameters, by ``id``, from the modules in the same state."""

    def __init__(self, prefix: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.prefix, self._optimizer, self._state = prefix, optimizer, OptimizerState.of(optimizer)
        self._params: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._names = _names_of(prefix, optimizer, self._params, names)

    def put(self, contents: Contents) -> None:
        """See :class:`ObjectCarrier`."""
        for number, values in self._state.entries():
            for key, value in values.items():
                full = join(self.prefix, "state", self._names[number], str(key))
                if isinstance(value, torch.Tensor):
                    contents.add_tensor(full, value)
                    # Ranks compare these, too: one may have skipped a step alone.
                    contents.params |= {full: True} if key == "step" and type(value) is torch.Tensor else {}
                else:
                    contents.add_value(full, encode(value, full, contents.add_tensor))
        full, kind = join(self.prefix, "groups"), type(self._state.inner).__name__
        groups = [
            {"params": names, "options": options_of(group), "class": kind}
            for names, group in zip(self._by_group(self._names), self._optimizer.param_groups, strict=True)
        ]
        contents.add_value(full, [encode(group, f"{full}/{i}") for i, group in enumerate(groups)])

    def ask(self, order: LoadRequests) -> Apply:
        """See :class:`ObjectCarrier`."""
        groups = self._ask_groups(order)
        later = self._ask_state(order)
        return lambda: self._load(later, groups)

    def _by_group(self, items: Iterable[_Item]) -> list[list[_Item]]:
        """Return ``items``, one of each parameter, by param group."""
        rest = iter(items)
        return [[next(rest) for _ in group["params"]] for group in self._optimizer.param_groups]

    # ---- loaded state ----

    def _ask_groups(self, order: LoadRequests) -> list[dict[str, Any]]:
        """Return the options of the optimizer's groups, as the checkpoint has them for their parameters."""
        full = join(self.prefix, "groups")
        if full not in order.manifest.values:
            order.missing.append(full)
            return [options_of(group) for group in self._optimizer.param_groups]
        saved = groups_of(order.value(full), full)
        group_of = {str(name): number for number, group in enumerate(saved) for name in group["params"]}
        options: dict[str, Any] = {name: saved[number]["options"] for name, number in group_of.items()}
        order.missing += [join(full, name) for name in self._names if name not in options]
        order.missing += [f"{join(full, name)}: in no group here" for name in options if name not in self._names]
        found: list[dict[str, Any]] = []
        seen: dict[int, tuple[str, dict[str, Any]]] = {}
        for names, own in zip(self._by_group(self._names), self._optimizer.param_groups, strict=True):
            members = [name for name in names if name in options]
            other = next((name for name in members if not _same(options[name], options[members[0]])), None)
            if other is not None:
                raise CheckpointError(
                    f"{full}: {members[0]} and {other} have other options there, and are in one param group here; make groups "
                    "as those of the checkpoint"
                )
            mine, theirs = options_of(own), options[members[0]] if members else {}
            odd = next((key for key in theirs if not _fits(mine.get(key), theirs[key])), None)
            if odd is not None:
                raise CheckpointError(
                    f"{full}: the option {odd!r} is {str(theirs[odd])[:60]!r}, expected a value like {str(mine[odd])[:60]!r}"
                )
            for name in members:
                first, others = seen.setdefault(group_of[name], (name, mine))
                unlike = [key for key in mine if not _same(mine[key], others.get(key))]
                if unlike:
                    raise CheckpointError(
                        f"{full}: {first} and {name} are in one param group there, and here in two with other options "
                        f"({', '.join(unlike)}), which both would get those of the one; make groups as those of the "
                        "checkpoint"
                    )
            if members:
                self._check_class(order, members, mine, saved[group_of[members[0]]])
            found.append({**mine, **theirs})
        return found

    def _check_class(
        self, order: LoadRequests, members: Sequence[str], mine: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> None:
        dims = {name: param.dim() for name, param in zip(self._names, self._params, strict=True)}
        states = [(dims[name], self._saved(order, name)) for name in members]
        reason = why_other_class(self._state.inner, mine, saved["options"], states, saved.get("class"))
        if reason is not None:
            raise CheckpointError(f"{self.prefix}: {reason}")

    def _saved(self, order: LoadRequests, name: str) -> dict[str, str]:
        """Return the keys of the saved state of a parameter, and the name of each in the checkpoint."""
        return {split(full)[-1]: full for full in order.names_under(join(self.prefix, "state", name))}

    def _ask_state(self, order: LoadRequests) -> Later:
        """Request the state that this rank has; that of other ranks is marked as known."""
        saved = [self._saved(order, name) for name in self._names]
        records = [{key: order.manifest.record_of(full) for key, full in names.items()} for names in saved]
        by_param = list(zip(self._params, records, strict=True))
        # State that is one number even of a parameter with dims: one without dims has it as a plain tensor, too.
        numbers = {k for param, of in by_param if param.dim() for k, r in of.items() if r is not None and not r.shape}
        targets: dict[int, dict[str, list[torch.Tensor]]] = {}
        if isinstance(self._optimizer, ShardedOptimizer) and all(
            device_of(each).type == "cpu" for each in self._params
        ):
            dtypes = {
                number: {
                    k: dtype_of(r.dtype, k) for k, r in of.items() if r is not None and r.shape == tuple(param.shape)
                }
                for number, (param, of) in enumerate(by_param)
                if param.dim()
            }
            targets = empty_state_of(self._optimizer, dtypes)
        places, found, entries = self._state.places(), Later(), order.entries()
        for number, names in enumerate(saved):
            name, shape = self._names[number], self._params[number].shape
            of_param = [join(*name.split(":", 1)), *(join(entry, name) for entry in entries)]
            shapes = {record.shape for record in map(order.manifest.record_of, of_param) if record is not None}
            is_unlike = bool(names and shapes) and tuple(shape) not in shapes
            if is_unlike:
                saved_state = f"{join(self.prefix, 'state', name)}, whose parameter"
                order.unlike.append(
                    f"{saved_state} is {list(min(shapes))} in the checkpoint and {list(shape)} in the state"
                )
            for key, full in names.items():
                order.use(full)
                if is_unlike:
                    continue
                values, place, record = found.setdefault(number, {}), places.get(number), records[number][key]
                if place is None:
                    continue
                if record is None:
                    saved_value = order.value(full)
                    values[key] = lambda value=saved_value: value
                elif isinstance(place, LocalSlice):
                    values[key] = _ask_slice(order, place, full, record)
                elif not place.dim() or record.shape != tuple(place.shape):
                    value = order.whole(full)
                    is_number = not place.dim() and key in numbers
                    values[key] = (lambda value=value: value) if is_number else partial(_beside, place, value)
                else:
                    windows = windows_of(full, place)
                    staged = targets.get(number, {}).get(key) or [
                        torch.empty(window.sizes, dtype=dtype_of(record.dtype, full), device="cpu")
                        for window in windows
                    ]
                    order.into(full, record, windows, staged)
                    values[key] = partial(_placed, place, staged)
        return found

    def _load(self, later: Later, groups: Sequence[Mapping[str, Any]]) -> None:
        state = {number: {key: make() for key, make in values.items()} for number, values in later.items()}
        packed = [
            {**options, **({"param_names": own["param_names"]} if own.get("param_names") else {}), "params": members}
            for options, own, members in zip(
                groups, self._optimizer.param_groups, self._by_group(range(len(self._params))), strict=True
            )
        ]
        self._state.load_state_dict({"state": state, "param_groups": packed})


def _names_of(prefix: str, optimizer: Optimizer, params: Sequence[torch.Tensor], names: Mapping[int, str]) -> list[str]:
    given = [
        name for group in optimizer.param_groups for name in group.get("param_names") or [None] * len(group["params"])
    ]
    found = [names.get(id(param), name) for param, name in zip(params, given, strict=True)]
    unknown = [index for index, name in enumerate(found) if name is None]
    if unknown:
        raise ConfigError(
            f"{prefix}: parameter {unknown[0]} of shape {tuple(params[unknown[0]].shape)} has no name; give the module that it "
            "belongs to in the same state, or make the optimizer from model.named_parameters()"
        )
    fine = [name for name in found if name is not None]
    if len(set(fine)) != len(fine):
        again = next(name for name in fine if fine.count(name) > 1)
        raise ConfigError(f"{prefix}: two parameters have the name {again!r}")
    return fine


def _ask_slice(order: LoadRequests, own: LocalSlice, full: str, record: TensorRecord) -> Callable[[], Any]:
    param = own.param
    if not record.shape or not param.dim():
        return partial(_beside, param, order.whole(full))
    if record.shape != tuple(param.shape):
        raise CheckpointError(
            f"{full}: has shape {list(record.shape)}, the parameter {list(param.shape)}: partition='even' needs "
            "state with a number per element; use partition='whole'"
        )
    memory = torch.empty(own.tensor.numel(), dtype=dtype_of(record.dtype, full), device="cpu")
    found = StateSlice.make(memory, param, own.owned_slice.start)
    parts = parts_of(full, found)
    order.into(full, record, [part.window for part in parts], [part.tensor for part in parts])
    return lambda: found


def _placed(param: torch.Tensor, staged: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return state that is sharded like its parameter."""
    device = device_of(param)
    return in_order_of(param, like(param, [each.to(device) for each in staged], staged[0].dtype))


def _beside(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return state of another shape than its parameter, of the parameter's kind: DTensors do not mix with plain tensors."""
    if not isinstance(param, DTensor) or (param.dim() and not value.dim()):
        return value.to(device_of(param)) if value.dim() else value
    mesh = param.device_mesh
    spec = torch_private.make_spec(mesh, [Replicate()] * mesh.ndim, value.shape, value.stride(), value.dtype)
    return torch_private.dtensor_from_local(value.to(device_of(param)), spec)


def _fits(own: Any, found: Any) -> bool:
    """Return True if an option of a checkpoint can replace the optimizer's ``own``: numbers replace numbers."""
    if isinstance(own, int | float | torch.Tensor):
        return found is None or isinstance(found, int | float | torch.Tensor)
    if isinstance(own, tuple | list):
        mine, theirs = cast(Sequence[Any], own), cast(Sequence[Any], found)
        if not isinstance(found, tuple | list) or len(theirs) != len(mine):
            return False
        return all(_fits(*pair) for pair in zip(mine, theirs, strict=True))
    return own is None or found is None or isinstance(found, str) == isinstance(own, str)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return type(left) is type(right) and (left == right or (left != left and right != right))


# ---- Modules as carriers.


def _shares_buffers(module: nn.Module) -> bool:
    """Return True if every forward of ``module`` broadcasts the buffers of one rank, which are the ones to save."""
    is_ddp = isinstance(module, DistributedDataParallel) and module.broadcast_buffers
    return is_ddp or SHARES_BUFFERS in module.__dict__


class ModuleCarrier:
    """Parameters and buffers of a module, by their names in the model without wrappers; ``only``: those that it accepts.

    Attributes:
        names: of each parameter, by ``id``, as optimizers use them.
    """

    def __init__(
        self, prefix: str, module: nn.Module, rank: int, size: int, only: Callable[[str], bool] | None = None
    ) -> None:
        self.prefix, self._rank, self._size = prefix, rank, size
        self._given = module
        self._module = module.module if isinstance(module, DistributedDataParallel) else module
        # With the live tensors, so that tied names give one object. The call reshards sharded modules.
        self._state: dict[str, Any] = self._module.state_dict(keep_vars=True)
        self._keys: dict[str, str] = {}
        for key in self._state if only is None else [key for key in self._state if only(plain(key))]:
            if self._keys.setdefault(plain(key), key) != key:
                raise ConfigError(f"{prefix}: {key!r} and {self._keys[plain(key)]!r} have one name without wrappers")
        self.names: dict[int, str] = {}
        for name, key in self._keys.items():
            if isinstance(self._state[key], torch.Tensor):
                self.names.setdefault(id(self._state[key]), name)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the live parameters and persistent buffers; tied ones under each of their names."""
        values = {name: self._state[key] for name, key in self._keys.items()}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def put(self, contents: Contents) -> None:
        """See :class:`ObjectCarrier`."""
        shared = {id(each) for module in self._given.modules() if _shares_buffers(module) for each in module.buffers()}
        buffers = {id(each) for each in self._module.buffers()}
        for name, key in self._keys.items():
            value, full = self._state[key], join(self.prefix, name)
            if not isinstance(value, torch.Tensor):
                contents.add_value(full, encode(value, full, contents.add_tensor))
            elif self.names[id(value)] != name:
                contents.ties[full] = join(self.prefix, self.names[id(value)])
            else:
                is_buffer = id(value) in buffers and type(value) is torch.Tensor
                contents.add_tensor(full, value, is_lowest=is_buffer)
                if not is_buffer:
                    contents.params[full] = not isinstance(value, DTensor)
                if is_buffer and id(value) not in shared:
                    contents.buffers.append(full)

    def ask(self, order: LoadRequests) -> Apply:
        """See :class:`ObjectCarrier`."""
        live = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        others: dict[str, Any] = {}
        placed: list[tuple[str, torch.Tensor, list[torch.Tensor]]] = []
        same_as: dict[int, list[str]] = {}
        for name, key in self._keys.items():
            same_as.setdefault(id(self._state[key]), []).append(name)
        for name, key in self._keys.items():
            value, full = self._state[key], join(self.prefix, name)
            if not isinstance(value, torch.Tensor):
                if full in order.manifest.values:
                    others[key] = order.value(full)
                else:
                    order.missing.append(full)
                continue
            if self.names[id(value)] != name:
                order.use(full)
                continue
            ties = [join(self.prefix, other) for other in same_as[id(value)]]
            found = next((tie for tie in ties if order.manifest.record_of(tie) is not None), full)
            found = self._own(found, order)
            parts = parts_of(full, value)
            staged = order.windows(found, value.shape, [part.window for part in parts])
            if staged is None:
                continue
            if id(value) in live:
                copies += [(part.tensor, new) for part, new in zip(parts, staged, strict=True)]
            else:
                placed.append((key, value, staged))

        for name in unwritten_in(self._module, buffers_only=True):
            if name not in self._state:
                order.missing.append(
                    f"{join(self.prefix, plain(name))} (a non-persistent buffer without values since to_empty(): call "
                    "shardwise.init_parameters(model, init_fn) instead of to_empty(), or compute the buffer)"
                )

        def apply() -> None:
            for key, value, staged in placed:  # only after the read: on a GPU this copies
                others[key] = like(value, [each.to(device_of(value)) for each in staged], staged[0].dtype)
            self._apply(copies, others)

        return apply

    def _own(self, name: str, order: LoadRequests) -> str:
        """Return the name of this rank's own copy of buffer ``name`` if the checkpoint has one per rank; else ``name``."""
        own = own_name(self._rank, name)
        if order.manifest.num_ranks != self._size or order.manifest.record_of(own) is None:
            return name
        order.use(name)
        return own

    @torch.no_grad()
    def _apply(self, copies: list[tuple[torch.Tensor, torch.Tensor]], others: dict[str, Any]) -> None:
        for target, source in copies:
            target.copy_(source)
        if others:
            self._module.load_state_dict(others, strict=False)


Carrier = ModuleCarrier | OptimizerCarrier | PerRankCarrier | ObjectCarrier

logger = logging.getLogger(__name__)


def carriers_of(state: Mapping[str, Any], rank: int, size: int) -> list[Carrier]:
    """Return a carrier for each entry of ``state``, in its order.

    Raises: ConfigError for an entry that cannot be saved.
    """
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  from user code
        raise ArgumentTypeError(
            f'the state is a {type(state).__name__}; give what is to be saved by name, such as {{"model": model}}'
        )
    if not state:
        raise ConfigError(
            'the state is empty; give what is to be saved by name, as {"model": model, "optimizer": optimizer}'
        )
    modules = {
        key: ModuleCarrier(join(_checked(key)), thing, rank, size)
        for key, thing in state.items()
        if isinstance(thing, nn.Module)
    }
    found: list[Carrier] = []
    for key, thing in state.items():
        prefix = join(_checked(key))
        if key in modules:
            found.append(modules[key])
        elif isinstance(thing, Optimizer):
            found.append(OptimizerCarrier(prefix, thing, _names_for(thing, modules)))
        elif isinstance(thing, (PerRank, RandomState)):
            own = thing._inner if isinstance(thing, PerRank) else thing  # pyright: ignore[reportPrivateUsage]
            found.append(PerRankCarrier(key, own, rank, size, logger.warning))
        else:
            carrier = MicrobatchesCarrier if isinstance(thing, Microbatches) else ObjectCarrier
            found.append(carrier(prefix, thing))
    return found


def contents_of(state: Mapping[str, Any], rank: int, size: int, windows: Windows | None = None) -> Contents:
    """Return this rank's part of ``state``; collective if an optimizer's state is on the owners of matrices.

    ``windows``: see :class:`~shardwise.checkpoint.contents.Contents`; one dict for repeated calls saves most of their time.
    Raises: ConfigError for what cannot be saved.
    """
    contents = Contents(windows={} if windows is None else windows)
    for carrier in carriers_of(state, rank, size):
        carrier.put(contents)
    return contents


def _names_for(optimizer: Optimizer, modules: Mapping[str, ModuleCarrier]) -> dict[int, str]:
    """Return the optimizer's names for its parameters; with a module prefix if they belong to several modules."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found: dict[int, tuple[str, str]] = {}
    for key, module in modules.items():
        for number, name in module.names.items():
            if number in params:
                found.setdefault(number, (key, name))
    several = len({key for key, _ in found.values()}) > 1
    return {number: f"{key}:{name}" if several else name for number, (key, name) in found.items()}


def _checked(key: object) -> str:
    if not isinstance(key, str) or not key or key == "rank":
        raise ConfigError(f"{key!r} cannot be the name of an entry of the state: expected a text, and not 'rank'")
    return key
