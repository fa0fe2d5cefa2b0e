"""State that users hold is like any tensor's: saved, pickled and copied by itself, and live whatever moment it is from."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.compare import full, local
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from shardwise import ShardedOptimizer, ZeroRedundancyOptimizer, fully_shard
from shardwise.collectives.streams import suballocate
from shardwise.zero.optimizer import zero_backend

SIZES = ((6, 5), (5,), (4, 3), (3,), (1, 7), (2, 2))  # uneven, empty shards on four ranks
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}),
}
MISSING = {2: 3, 5: 0}  # step: parameter without a gradient


class Params(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])

    def forward(self, factors: list[torch.Tensor | None]) -> torch.Tensor:
        return sum((p * f).sum() for p, f in zip(self.of, factors, strict=True) if f is not None)  # type: ignore[return-value]


def _factors(step: int) -> list[torch.Tensor | None]:
    noise = torch.Generator().manual_seed(step)
    found: list[torch.Tensor | None] = [torch.randn(size, generator=noise) for size in SIZES]
    if step in MISSING:
        found[MISSING[step]] = None
    return found


def _windows(model: Params, as_views: bool) -> None:
    """Parameters that are neighbours in memory, as views of one tensor or with storages of their own."""
    flat = torch.empty(sum(p.numel() for p in model.of))
    start = 0
    for p in model.of:
        place = flat[start : start + p.numel()].view(p.shape) if as_views else suballocate(flat, start, p.shape)
        p.data = place.copy_(p.detach())
        start += p.numel()


def _flat_gradients(model: Params, factors: list[torch.Tensor | None]) -> None:
    flat = torch.zeros(sum(p.numel() for p in model.of))
    start = 0
    for p, factor in zip(model.of, factors, strict=True):
        p.grad = None if factor is None else suballocate(flat, start, p.shape).copy_(factor)
        start += p.numel()


def _cut(whole: torch.Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _backward(api: str, model: Params, step: int) -> None:
    factors = _factors(step)
    if api == "fully_shard":
        model(factors).backward()
    elif api == "dtensors":
        for p, factor in zip(model.of, factors, strict=True):
            assert isinstance(p, DTensor)
            p.grad = None if factor is None else _cut(factor, p)
    elif api in ("views", "neighbours"):
        _flat_gradients(model, factors)
    else:
        for p, factor in zip(model.of, factors, strict=True):
            p.grad = None if factor is None else factor.clone()


def _build(api: str, kind: str) -> tuple[Params, Any]:
    model = Params()
    if api == "fully_shard":
        fully_shard(model)
    elif api == "dtensors":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for index, p in enumerate(model.of):
            model.of[index] = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
    elif api in ("views", "neighbours"):
        _windows(model, as_views=api == "views")
    optimizer_class, options = KINDS[kind]
    if api.startswith("zero"):
        partition = api.removeprefix("zero ")
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class, partition=partition, **options)
    return model, ShardedOptimizer(dict(model.named_parameters()), optimizer_class, **options)


def _state(optimizer: Any) -> dict[Any, Mapping[str, Any]]:
    """What users get: by name, or by the index of this rank's piece."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return {
            index: optimizer.optim.state[local.tensor]
            for index, local in enumerate(zero_backend(optimizer).rank_partition.local_slices)
        }
    return optimizer.state_dict()["state"]


def _tensors(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    for name, values in _state(optimizer).items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                yield (name, key), value


def _values(optimizer: Any) -> dict[Any, torch.Tensor]:
    return {key: local(value).clone() for key, value in _tensors(optimizer)}


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda t: t,
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "view": lambda t: local(t).view(-1),
    "numpy": lambda t: local(t).numpy(),
    "from a copied dict": lambda t: copy.copy({"t": t})["t"],
}


def _read(alias: Any, like: torch.Tensor) -> torch.Tensor:
    return (torch.from_numpy(alias.copy()) if not isinstance(alias, torch.Tensor) else local(alias)).reshape(like.shape)


def _check_like_any(value: torch.Tensor) -> None:
    """Offset 0, storage of its own bytes; saves, loads, pickles and copies just itself."""
    mine = local(value)
    assert mine.storage_offset() == 0
    assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size()
    stream = io.BytesIO()
    torch.save(value, stream)
    assert stream.tell() < mine.numel() * mine.element_size() + 10_000
    stream.seek(0)
    for found in (torch.load(stream, weights_only=False), pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert type(found) is type(value)
        assert torch.equal(local(found), mine)
        assert not mine.numel() or local(found).data_ptr() != mine.data_ptr()


def aliases_stay_live(api: str, kind: str, way: str) -> None:
    """Taken after any step, also between a load and the next step, while gradients come and go.

    Numbers of shards that are updated together are copies, so those are read again.
    """
    model, optimizer = _build(api, kind)
    held: list[tuple[int, dict[Any, Any]]] = []
    for step in range(8):
        optimizer.zero_grad()
        _backward(api, model, step)
        optimizer.step()
        if step == 3:
            held = []  # loading makes new state, as for any optimizer
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.optim.load_state_dict(copy.deepcopy(optimizer.optim.state_dict()))
            else:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        now = _values(optimizer)
        for since, aliases in held:
            for key, alias in aliases.items():
                assert torch.equal(_read(alias, now[key]), now[key]), (
                    api,
                    kind,
                    way,
                    f"from step {since} at {step}",
                    key,
                )
        if step in (0, 1, 2, 3, 5):
            for _, value in _tensors(optimizer) if way == "itself" else ():
                _check_like_any(value)
            held.append((step, {key: ALIASES[way](value) for key, value in _tensors(optimizer) if value.dim()}))
    _assert_trained(api, kind, model, optimizer)


def _assert_trained(api: str, kind: str, model: Params, optimizer: Any, num_steps: int = 8) -> None:
    plain = Params()
    optimizer_class, options = KINDS[kind]
    reference = optimizer_class(plain.parameters(), **options)
    for step in range(num_steps):
        _backward("plain", plain, step)
        reference.step()
    for a, b in zip(model.of, plain.of, strict=True):
        whole = full(a)
        assert torch.equal(whole, b), (api, kind)
    if isinstance(optimizer, ShardedOptimizer):
        found = optimizer.full_state_dict(by_index=True)["state"]
        for index, values in reference.state_dict()["state"].items():
            for key, value in values.items():
                assert (
                    torch.equal(found[index][key], value)
                    if isinstance(value, torch.Tensor)
                    else found[index][key] == value
                )


# Four ranks leave some with empty shards only; plain tensors know nothing of ranks.
APIS = dict.fromkeys(("fully_shard", "dtensors", "zero whole", "zero even"), (2, 4))
APIS |= dict.fromkeys(("views", "neighbours", "separate"), (1,))
ALIKE = (("fully_shard", 4), ("zero even", 4))  # their state is that of other cases, in empty shards as in others


def num_runs(optimizer: ShardedOptimizer) -> int:
    """Return how many tensors the inner optimizer sees."""
    return sum(len(group["params"]) for group in optimizer._backend.optimizer.param_groups)


@on_ranks()
@pytest.mark.parametrize(
    ("api", "num_ranks"),
    [
        pytest.param(api, size, marks=[pytest.mark.exhaustive] * ((api, size) in ALIKE))
        for api, sizes in APIS.items()
        for size in sizes
    ],
)
def test_aliases_of_state_stay_live(api: str) -> None:
    for kind, way in product(KINDS, ALIASES):
        if (kind == "adam" and dist.get_world_size() < 4) or way in ("itself", "numpy")[dist.get_world_size() // 4 :]:
            aliases_stay_live(api, kind, way)


@on_ranks(2)
@pytest.mark.parametrize("api", ["fully_shard", "dtensors", "views", "neighbours", "separate"])
def test_writes_to_state_count(api: str) -> None:
    """What is written to state that was given out counts in the next step, step counts included."""
    model, optimizer = _build(api, "adam")
    plain = Params()
    reference = torch.optim.Adam(plain.parameters(), **KINDS["adam"][1])
    names = list(dict(plain.named_parameters()))
    for step in (0, 1):
        optimizer.zero_grad()
        _backward(api, model, step)
        _backward("plain", plain, step)
        optimizer.step()
        reference.step()
        kept = _state(optimizer)
        if step == 0:
            for index, name in enumerate(names[:2]):
                for key, factor in (("exp_avg", 3.0), ("step", 7.0)):
                    local(kept[name][key]).mul_(factor)
                    reference.state[plain.of[index]][key].mul_(factor)
    for a, b in zip(model.of, plain.of, strict=True):
        assert torch.equal(full(a), b)
    assert local(kept[names[0]]["step"]).item() == 8.0


def dicts_travel(api: str, folder: str) -> None:
    """A state dict as a whole: saved, pickled, copied, gathered, checkpointed at once and in the background."""
    model, optimizer = _build(api, "adam")
    for step in range(3):
        optimizer.zero_grad()
        _backward(api, model, step)
        optimizer.step()
    found = optimizer.state_dict()
    expected = _values(optimizer)
    num_bytes = sum(value.numel() * 4 for value in expected.values())
    stream = io.BytesIO()
    torch.save(found, stream)
    assert stream.tell() < num_bytes + 200_000
    stream.seek(0)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    assert len(pickle.dumps(found)) < num_bytes + 200_000
    copies = [torch.load(stream, weights_only=False), pickle.loads(pickle.dumps(found)), copy.deepcopy(found)]
    for other in [*copies, gathered[dist.get_rank()]]:
        _assert_same(other["state"], expected)
    dcp.save({"optimizer": found}, checkpoint_id=f"{folder}/now")
    pending = dcp.async_save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/later")
    pending.result()
    for path in ("now", "later"):
        blank = {"optimizer": optimizer.blank_state_dict()}
        dcp.load(blank, checkpoint_id=f"{folder}/{path}")
        _assert_same(blank["optimizer"]["state"], expected)


def _assert_same(state: Mapping[str, Mapping[str, Any]], expected: Mapping[Any, torch.Tensor]) -> None:
    found = {(name, key): local(value) for name, values in state.items() for key, value in values.items()}
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


@on_ranks(2)
@pytest.mark.parametrize("api", ["fully_shard", "dtensors", "views", "neighbours", "separate"])
def test_state_dicts_travel(tmp_path: Path, api: str) -> None:
    dicts_travel(api=api, folder=str(tmp_path))


@on_ranks(2)
def test_state_of_empty_shards_is_live() -> None:
    """State of shards without elements is like the others': what ``.state`` gives counts on, dicts copy on all ranks."""
    for api in ("fully_shard", "dtensors"):
        model, optimizer = _build(api, "adam")
        held: list[dict[str, Any]] = []
        for step in (0, 1, 3, 4):
            optimizer.zero_grad()
            _backward(api, model, step)
            optimizer.step()
            held = [dict(optimizer.state[p]) for p in model.of]
            assert len({values["step"].item() for values in held}) == 1, (api, step)
            _assert_same(copy.deepcopy(optimizer.state_dict())["state"], _values(optimizer))
        assert dist.get_rank() == 0 or any(not p.to_local().numel() for p in model.of)


@on_ranks(2)
@pytest.mark.parametrize("api", ["fully_shard", "views", "neighbours"])
def test_runs_stay_joined_while_state_is_held(api: str) -> None:
    """Holding a state dict, also one from between a load and a step, does not take runs apart."""
    model, optimizer = _build(api, "adam")
    counts, held = [], []
    for step in (0, 1, 3, 4, 6, 7):
        optimizer.zero_grad()
        _backward(api, model, step)
        optimizer.step()
        counts.append(num_runs(optimizer))
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        held.append(optimizer.state_dict())
    assert len(set(counts)) == 1, counts
    assert counts[0] <= (1 if api != "fully_shard" else len(SIZES) // 2), counts
