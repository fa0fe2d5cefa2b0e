"""Optimizers of any door as carriers: state and options under the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.api.sharded_optimizer import ShardedOptimizer, room_for_state, whole_state_names
from shardwise.api.zero import ZeroRedundancyOptimizer, share_stepper
from shardwise.checkpoint.carriers import Apply
from shardwise.checkpoint.contents import Contents, device_of, like, parts_of, windows_of
from shardwise.checkpoint.dtypes import dtype_of
from shardwise.checkpoint.names import join, split
from shardwise.checkpoint.order import LoadRequests
from shardwise.checkpoint.values import encode, groups_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.optim.forms import options_of
from shardwise.optim.pieces import in_order_of
from shardwise.zero.checkpoint import StateSlice

State = dict[str, dict[str, Any]]  # parameter name -> state key -> value
# The same to be made once all is read: what is moved to a device before that has not got its values yet.
Later = dict[str, dict[str, Callable[[], Any]]]


class OptimizerCarrier:
    """One optimizer; ``names``: of parameters, by ``id``, from the modules that are saved with it."""

    def __init__(self, prefix: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.prefix, self._optimizer = prefix, optimizer
        self._params: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._names = _names_of(prefix, optimizer, self._params, names)
        self._by_name = dict(zip(self._names, self._params, strict=True))

    def put(self, contents: Contents) -> None:
        """See :class:`Carrier`."""
        for name, values in self._state().items():
            place = join(self.prefix, "state", name)
            for key, value in values.items():
                full = f"{place}/{join(str(key))}"
                if isinstance(value, torch.Tensor):
                    contents.add_tensor(full, value)
                else:
                    contents.add_value(full, encode(value, full, contents.add_tensor))
        groups = join(self.prefix, "groups")
        contents.add_value(groups, [encode(group, f"{groups}/{i}") for i, group in enumerate(self._groups())])

    def ask(self, order: LoadRequests) -> Apply:
        """See :class:`Carrier`."""
        groups = self._ask_groups(order)
        later = self._ask_all(order)
        return lambda: self._load(later, groups)

    # ---- what there is ----

    def _state(self) -> State:
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            found = self._optimizer.sharded(dict(zip(self._names, self._params, strict=True))).state_dict()["state"]
            return found
        packed = self._optimizer.state_dict()["state"]
        if isinstance(self._optimizer, ShardedOptimizer):
            own = dict(zip(_own_names(self._optimizer), self._names, strict=True))
        else:
            own = dict(enumerate(self._names))
        unknown = [key for key in packed if key not in own]
        if unknown:
            raise ConfigError(f"{self.prefix}: state of {unknown[0]!r} belongs to no parameter; it cannot be named")
        return {own[key]: values for key, values in packed.items()}

    def _groups(self) -> list[dict[str, Any]]:
        names = iter(self._names)
        return [
            {"params": [next(names) for _ in group["params"]], "options": options_of(group)}
            for group in self._optimizer.param_groups
        ]

    # ---- what there will be ----

    def _ask_groups(self, order: LoadRequests) -> list[dict[str, Any]]:
        """Return the options of the own groups, from those that the checkpoint has for their parameters."""
        full = join(self.prefix, "groups")
        if not order.has_value(full):
            order.missing.append(full)
            return [options_of(group) for group in self._optimizer.param_groups]
        options: dict[str, Any] = {}
        for group in groups_of(order.value(full), full):
            options |= {str(name): group["options"] for name in group["params"]}
        order.missing += [join(full, name) for name in self._names if name not in options]
        order.missing += [f"{join(full, name)}: in no group here" for name in options if name not in self._by_name]
        names, found = iter(self._names), []
        for own in self._optimizer.param_groups:
            members = [name for name in (next(names) for _ in own["params"]) if name in options]
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
            found.append({**mine, **theirs})
        return found

    def _ask_all(self, order: LoadRequests) -> Later:
        optimizer = self._optimizer
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return self._ask_zero(optimizer, order)
        rooms: Mapping[str, Sequence[torch.Tensor]] = {}
        if isinstance(optimizer, ShardedOptimizer):
            whole = whole_state_names(optimizer)
            if whole is not None:
                return self._ask_whole([own in whole for own in _own_names(optimizer)], order)
            rooms = self._rooms(optimizer, order)
        found = {name: self._ask_state(name, param, rooms, order) for name, param in self._by_name.items()}
        return {name: values for name, values in found.items() if values}

    def _ask_whole(self, is_held: Sequence[bool], order: LoadRequests) -> Later:
        """Ask for all state of the matrices of this rank; entries of those of others are empty."""
        found: Later = {}
        for (name, param), is_own in zip(self._by_name.items(), is_held, strict=True):
            for full in order.names_under(join(self.prefix, "state", name)):
                values = found.setdefault(name, {})
                if not is_own:
                    order.use(full)
                elif order.manifest.record_of(full) is None:
                    values[split(full)[-1]] = partial(_as_it_is, order.value(full))
                else:
                    values[split(full)[-1]] = partial(_on_device, order.whole(full), device_of(param))
        return found

    def _rooms(self, optimizer: ShardedOptimizer, order: LoadRequests) -> dict[str, Sequence[torch.Tensor]]:
        """Return new memory for state as it will lie in the optimizer, by its name in the file; on the CPU alone."""
        if any(device_of(param).type != "cpu" for param in self._params):
            return {}
        dtypes: dict[str, dict[str, torch.dtype]] = {}
        places: dict[tuple[str, str], str] = {}
        for own, (name, param) in zip(_own_names(optimizer), self._by_name.items(), strict=True):
            for full in order.names_under(join(self.prefix, "state", name)):
                key, record = split(full)[-1], order.manifest.record_of(full)
                if record is not None and param.dim() and record.shape == tuple(param.shape):
                    dtypes.setdefault(own, {})[key] = dtype_of(record.dtype, full)
                    places[own, key] = full
        rooms = room_for_state(optimizer, dtypes)
        return {full: rooms[own][key] for (own, key), full in places.items()}

    def _ask_state(
        self, name: str, param: torch.Tensor, rooms: Mapping[str, Sequence[torch.Tensor]], order: LoadRequests
    ) -> dict[str, Callable[[], Any]]:
        found: dict[str, Callable[[], Any]] = {}
        for full in order.names_under(join(self.prefix, "state", name)):
            key, record = split(full)[-1], order.manifest.record_of(full)
            if record is None:
                found[key] = partial(_as_it_is, order.value(full))
            elif param.dim() and record.shape == tuple(param.shape):
                windows = windows_of(full, param)
                staged = rooms.get(full)
                if staged is None:
                    staged = order.windows(full, record.shape, windows) or []
                else:
                    order.into(full, record, windows, staged)
                found[key] = partial(_placed, param, staged)
            else:
                found[key] = partial(_beside, param, order.whole(full))
        return found

    def _ask_zero(self, zero: ZeroRedundancyOptimizer, order: LoadRequests) -> Later:
        state: Later = {}
        for name in self._names:
            for full in order.names_under(join(self.prefix, "state", name)):
                order.use(full)
        for own in share_stepper(zero).share.local_pieces:
            param, name = own.param, self._names[own.piece.tensor]
            values: dict[str, Callable[[], Any]] = {}
            for full in order.names_under(join(self.prefix, "state", name)):
                key, record = split(full)[-1], order.manifest.record_of(full)
                if record is None:
                    values[key] = partial(_as_it_is, order.value(full))
                elif own.is_param or not record.shape or not param.dim():
                    values[key] = partial(_beside, param, order.whole(full))
                elif record.shape != tuple(param.shape):
                    raise CheckpointError(
                        f"{full}: has shape {list(record.shape)}, the parameter {list(param.shape)}: partition='even' needs "
                        "state with a number per element; use partition='whole'"
                    )
                else:
                    values[key] = partial(
                        _as_it_is, self._ask_slice(full, own.tensor.numel(), (param, own.piece.start), order)
                    )
            if values:
                state[name] = values
        return state

    def _ask_slice(self, full: str, numel: int, place: tuple[torch.Tensor, int], order: LoadRequests) -> StateSlice:
        param, start = place
        record = order.manifest.record_of(full)
        assert record is not None
        found = StateSlice.make(torch.empty(numel, dtype=dtype_of(record.dtype, full), device="cpu"), param, start)
        parts = parts_of(full, found)
        order.into(full, record, [part.window for part in parts], [part.tensor for part in parts])
        return found

    def _load(self, later: Later, groups: Sequence[Mapping[str, Any]]) -> None:
        optimizer = self._optimizer
        state: State = {name: {key: make() for key, make in values.items()} for name, values in later.items()}
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            sharded = optimizer.sharded(self._by_name)
            sharded.load_state_dict({"state": state, "param_groups": self._named(groups, self._names)})
        elif isinstance(optimizer, ShardedOptimizer):
            own = _own_names(optimizer)
            back = dict(zip(self._names, own, strict=True))
            entries = {back[name]: values for name, values in state.items()}
            optimizer.load_state_dict({"state": entries, "param_groups": self._named(groups, own)}, adopt=True)
        else:
            number = {name: index for index, name in enumerate(self._names)}
            entries = {number[name]: values for name, values in state.items()}
            packed = self._named(groups, list(range(len(self._names))))
            for group, own in zip(packed, optimizer.param_groups, strict=True):
                if "param_names" in own:
                    group["param_names"] = own["param_names"]
            optimizer.load_state_dict({"state": entries, "param_groups": packed})

    def _named(self, groups: Sequence[Mapping[str, Any]], names: Sequence[Any]) -> list[dict[str, Any]]:
        rest = iter(names)
        return [
            {**options, "params": [next(rest) for _ in own["params"]]}
            for options, own in zip(groups, self._optimizer.param_groups, strict=True)
        ]


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


def _own_names(optimizer: ShardedOptimizer) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def _as_it_is(value: Any) -> Any:
    return value


def _on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value.to(device) if value.dim() else value


def _placed(param: torch.Tensor, staged: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return state that is sharded like its parameter."""
    device = device_of(param)
    return in_order_of(param, like(param, [each.to(device) for each in staged], staged[0].dtype))


def _beside(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return state of another shape than its parameter, of the parameter's kind: DTensors do not mix with plain ones."""
    if not isinstance(param, DTensor) or not value.dim():
        return _on_device(value, device_of(param))
    mesh = param.device_mesh
    spec = torch_private.make_spec(mesh, [Replicate()] * mesh.ndim, value.shape, value.stride(), value.dtype)
    return torch_private.dtensor_from_local(value.to(device_of(param)), spec)


def _fits(own: Any, found: Any) -> bool:
    """Return True if an option of a checkpoint may stand where the optimizer has ``own``: numbers for numbers."""
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
