"""Precision policies cast tensors, not containers: what modules put into their arguments reaches the caller."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.each import of_each
from helpers.inside import engine_of
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from shardwise import ConfigError, MixedPrecisionPolicy, StateError, fully_shard, register_fsdp_forward_method
from shardwise.fsdp.unit import HELD

# Every float32 tensor has to be cast, and rounding does not hide what is lost.
WIDER = MixedPrecisionPolicy(param_dtype=torch.float64)


class Batch(MutableMapping[Any, Any]):
    """A mapping around a dict, as libraries for data have it."""

    def __init__(self, **items: Any) -> None:
        self.inner: dict[Any, Any] = items

    def __getitem__(self, key: Any) -> Any:
        return self.inner[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class AttrDict(dict[Any, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Boxes(list[Any]):
    def __init__(self, size: int, items: list[Any]) -> None:
        super().__init__(items)
        self.size = size


class Point(tuple[Any, ...]):
    def __new__(cls, x: Any, y: Any) -> Point:
        return super().__new__(cls, (x, y))


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any
    unset: Any = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any
    unset: Any = dataclasses.field(init=False)


class Uncopied(dict[Any, Any]):
    def __copy__(self) -> Uncopied:
        raise TypeError("there is one of these alone")


# ---- What blocks put in.

WAYS: dict[str, tuple[Any, Any, Any]] = {  # the container, what a block does with it, what is read in the end
    "appended": (lambda zero: [zero], lambda box, new: box.append(new), sum),
    "stored": (lambda zero: {0: zero}, lambda box, new: box.update({len(box): new}), lambda box: sum(box.values())),
    "added": (lambda zero: {zero}, lambda box, new: box.add(new), sum),
    "in place": (lambda zero: {"sum": zero}, lambda box, new: box["sum"].add_(new), lambda box: box["sum"]),
    "in place in a tuple": (lambda zero: (zero, [zero]), lambda box, new: box[0].add_(new), lambda box: box[1][0]),
    "attribute": (
        lambda zero: Record(zero, 0),
        lambda box, new: setattr(box, "unset", getattr(box, "unset", box.x) + new),
        lambda box: box.unset,
    ),
    "mapping of one's own": (
        lambda zero: Batch(x=zero),
        lambda box, new: box.update({len(box): new}),
        lambda box: sum(box.values()),
    ),
    "list of one's own": (lambda zero: Boxes(3, [zero]), lambda box, new: box.append(new), sum),
}


class Expert(nn.Module):
    """Puts a number that depends on its output, as auxiliary losses do, into an argument."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.router, self.head, self.way = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 1), way

    def forward(self, x: torch.Tensor, *, box: Any) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        WAYS[self.way][1](box, self.head(torch.tanh(self.router(x))).mean())
        return x


class Mixture(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.way = nn.ModuleList(Expert(way) for _ in range(3)), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        make, _, read = WAYS[self.way]
        box = make(torch.zeros(()))
        for block in self.blocks:
            x = block(x, box=box)
        return x + read(box)


@on_ranks(2)
@of_each(WAYS)
def test_what_blocks_put_into_an_argument_is_trained_as_on_one_process(way: str) -> None:
    for policy in (MixedPrecisionPolicy(), WIDER):
        model = Mixture(way)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=True, mp_policy=policy)
        fully_shard(model)
        assert_trains_alike(model, Mixture(way))


class Fills(nn.Module):
    """Calls ``act`` on its arguments, keeps what that returns, and returns it with its output if ``returns``."""

    def __init__(self, act: Any, returns: bool = False) -> None:
        super().__init__()
        self.linear, self.act, self.returns = nn.Linear(4, 4), act, returns

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.kept = self.act(*args)
        x = self.linear(x.to(self.linear.weight.dtype))
        return (x, self.kept) if self.returns else x

    def fill(self, *args: Any) -> Any:
        return self.forward(*args)


def filled(act: Any, *args: Any, policy: MixedPrecisionPolicy = WIDER, returns: bool = False) -> tuple[Any, Any]:
    """Return what ``act`` has returned on ``args`` in a sharded block, and the block's output."""
    torch.manual_seed(0)
    model = fully_shard(Fills(act, returns), mp_policy=policy)
    output = model(torch.ones(2, 4), *args)
    return model.kept, output


@on_ranks(2)
def test_what_a_block_puts_in_before_it_raises_reaches_the_caller() -> None:
    box = [torch.ones(2)]

    def raising(inner: list[Any]) -> None:
        inner.append("put")
        raise KeyError("after it")

    model = fully_shard(Fills(raising), mp_policy=WIDER)
    with pytest.raises(KeyError):
        model(torch.ones(2, 4), box)
    assert box[1] == "put"
    dist.barrier()  # the other rank may still read this one's shards


@on_ranks(2)
def test_methods_treated_as_forward_hand_on_what_they_put_in() -> None:
    model = fully_shard(Fills(lambda box: box.append("put")), mp_policy=WIDER)
    register_fsdp_forward_method(model, "fill")
    box = [torch.ones(2)]
    model.fill(torch.ones(2, 4), box)
    assert box[1:] == ["put"]


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_a_recomputed_block_puts_in_as_often_as_on_one_process(reentrant: bool) -> None:
    counts = []
    for sharded in (True, False):
        block = Fills(lambda box: box.append("put"))
        if sharded:
            fully_shard(block, mp_policy=WIDER)
        box = [torch.ones(2)]
        checkpoint(block, torch.ones(2, 4, requires_grad=True), box, use_reentrant=reentrant).sum().backward()
        counts.append(len(box))
    assert counts[0] == counts[1]


@on_ranks(2)
def test_a_returned_argument_is_the_callers_own() -> None:
    box = {"x": torch.ones(2), "y": [torch.ones(2)]}
    own = box["x"], box["y"]
    _, (_, returned) = filled(lambda box: box.update(new=1) or box, box, returns=True)
    assert returned is box
    assert box["new"] == 1
    assert box["x"] is own[0]
    assert box["y"] is own[1]
    _, (_, returned) = filled(lambda box: (box["y"],), box, returns=True)
    assert returned[0] is box["y"]


@on_ranks(2)
def test_containers_that_share_a_container_or_a_tensor_still_share_it() -> None:
    x = torch.ones(2)
    inner = [x]
    found, _ = filled(lambda a, b, x: (a["in"] is b, b[0] is x, x.dtype), {"in": inner}, inner, x)
    assert found == (True, True, torch.float64)
    assert inner[0] is x


@pytest.mark.parametrize("inference", [True, False])
@on_ranks(2)
def test_writes_to_a_cache_reach_it_and_round_nothing_else(inference: bool) -> None:
    cache, number = {"keys": (torch.full((3,), 1.0001),)}, torch.tensor(1.0001)

    def write(cache: Any) -> None:
        assert cache["keys"][0].dtype == torch.bfloat16
        cache["keys"][0][1] = 2.0

    model = fully_shard(Fills(write), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.inference_mode(inference):
        model(torch.ones(2, 4), cache)
    assert cache["keys"][0].tolist() == [number, 2.0, number]


# ---- What the caller keeps.

KINDS: dict[str, Any] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered dict": lambda x, y: collections.OrderedDict(x=x, y=y),
    "default dict": lambda x, y: collections.defaultdict(list, x=x, y=y),
    "user dict": lambda x, y: collections.UserDict(x=x, y=y),
    "attributes that are items": lambda x, y: AttrDict(x=x, y=y),
    "mapping of one's own": lambda x, y: Batch(x=x, y=y),
    "read-only mapping": lambda x, y: types.MappingProxyType({"x": x, "y": y}),
    "list": lambda x, y: [x, y],
    "list of one's own": lambda x, y: Boxes(3, [x, y]),
    "tuple of one's own": lambda x, y: Point(x, y),
    "named tuple": lambda x, y: Pair(x, y),
    "dataclass": lambda x, y: Record(x, y),
    "frozen dataclass": lambda x, y: Frozen(x, y),
    "dataclass with slots": lambda x, y: Slotted(x, y),
    "set": lambda x, y: {x, y},
    "nested": lambda x, y: [{"x": (x,)}, Pair(Frozen(x, y), y)],
}


def parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (Mapping, list, tuple, set)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from parts(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name, None))
    elif isinstance(value, torch.Tensor):
        yield value


@on_ranks(2)
@of_each(KINDS)
def test_a_block_gets_cast_tensors_and_the_caller_keeps_its_own(kind: str) -> None:
    x, y = torch.full((2,), 1.0001), torch.full((3,), 1.0001)
    box = KINDS[kind](x, y)
    before = {*map(id, parts(box))}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    got, _ = filled(lambda box: (type(box), [each.dtype for each in parts(box)]), box, policy=policy)
    assert got[0] is type(box)
    assert {*got[1]} == {torch.bfloat16}
    assert {*map(id, parts(box))} == before == {id(x), id(y)}
    assert x[0] == y[0] == torch.tensor(1.0001)


@on_ranks(2)
@of_each(KINDS)
def test_a_container_without_anything_to_cast_is_handed_on_as_it_is(kind: str) -> None:
    box = KINDS[kind](torch.arange(2), torch.ones(2, dtype=torch.float64))
    got, (_, returned) = filled(
        lambda box: box, box, policy=dataclasses.replace(WIDER, output_dtype=torch.float64), returns=True
    )
    assert got is box
    assert returned is box


@on_ranks(2)
def test_other_objects_are_handed_on_as_they_are() -> None:
    endless: list[Any] = []
    endless.append(endless)
    others = (
        iter([torch.ones(2)]),
        nn.Linear(2, 2),
        endless,
        Uncopied(x=torch.ones(2, dtype=torch.float64)),
        types.SimpleNamespace(x=1),
        None,
    )
    got, _ = filled(lambda *others: others, *others)
    assert all(left is right for left, right in zip(got, others, strict=True))


@on_ranks(2)
def test_an_output_that_cannot_be_copied_and_has_tensors_to_cast_is_named() -> None:
    box = Uncopied(x=torch.ones(2))
    got, _ = filled(lambda box: box["x"].dtype, box)
    assert got == torch.float64
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="a Uncopied among a module's outputs .* TypeError: there is one of these"):
        filled(lambda box: box, box, policy=policy, returns=True)


@on_ranks(2)
def test_the_caller_keeps_its_own_tensors_when_a_forward_is_refused() -> None:
    box = [torch.full((2,), 1.0001)]
    own = box[0]
    model = fully_shard(Fills(lambda box: None), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.linear.weight = None
    with pytest.raises(StateError, match="was removed from its module"):
        model(torch.ones(2, 4), box)
    assert box[0] is own


@on_ranks(2)
def test_a_container_that_contains_itself_is_cast() -> None:
    endless: list[Any] = [torch.ones(2)]
    endless.append(endless)
    got, _ = filled(lambda box: (box[0].dtype, box.append("put")), endless)
    assert got[0] == torch.float64
    assert endless[2] == "put"


@on_ranks(2)
def test_a_packed_sequence_keeps_its_batch_sizes_and_order() -> None:
    packed = pack_sequence([torch.ones(2, 4), torch.zeros(3, 4)], enforce_sorted=False)
    got, _ = filled(lambda packed: packed, packed)
    assert isinstance(got, PackedSequence)
    assert got.data.dtype == torch.float64
    assert got.batch_sizes is packed.batch_sizes
    assert got.sorted_indices is packed.sorted_indices


@on_ranks(2)
def test_outputs_are_cast_in_copies_of_their_containers() -> None:
    kept, (_, returned) = filled(
        lambda: {"x": torch.ones(2), "n": [1]}, policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16), returns=True
    )
    assert returned["x"].dtype == torch.bfloat16
    assert returned["n"] is kept["n"]
    assert kept["x"].dtype == torch.float32


# ---- Outputs that need no gradient.


class Quantizer(nn.Module):
    """Keeps the loss as an attribute; what it returns needs no gradient."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.linear, self.codes, self.unused = nn.Linear(6, 6), nn.Embedding(5, 6), nn.Linear(2, 2)
        self.returned = returned

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        indices = torch.cdist(h, self.codes.weight).argmin(-1)
        keeper: Any = type(self) if self.returned == "nothing, kept on the class" else self  # no search finds it there
        keeper.loss = (self.codes(indices) - torch.tanh(self.linear(h))).square()
        detached = self.loss.detach()
        return {
            "nothing": None,
            "nothing, kept on the class": None,
            "indices": indices,
            "detached": detached,
            "both": [indices, {"loss": detached}],
            "number": 1.0,
        }[self.returned]


class Quantized(nn.Module):
    def __init__(self, returned: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.quantizer = nn.Linear(6, 6), Quantizer(returned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.quantizer(self.first(x))
        return self.quantizer.loss


@pytest.mark.parametrize("returned", ["nothing", "nothing, kept on the class", "indices", "detached", "both", "number"])
@on_ranks(2)
def test_a_unit_whose_outputs_need_no_gradient_trains_as_on_one_process(returned: str) -> None:
    model, plain = Quantized(returned), Quantized(returned)
    fully_shard(model.quantizer, reshard_after_forward=True)
    fully_shard(model)
    assert_trains_alike(model, plain)
    model(torch.ones(2, 6)).mean().backward()
    assert model.quantizer.unused.weight.grad is None
    assert not any(unit.held is HELD for unit in engine_of(model).units)


KEPT = ("of a layer behind the output", "output is the input", "output is not used", "hidden", "in a list")


class Keeps(nn.Module):
    """Keeps what the loss uses as an attribute, beside an output that needs a gradient."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.linear, self.router, self.kept = nn.Linear(6, 6), nn.Linear(6, 6), kept
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        self.aux = h if self.kept == "hidden" else self.router(h).square().mean()
        if self.kept == "in a list":
            self.aux = [self.aux, {"of the input": x.mean()}]
        return x if self.kept == "output is the input" else self.router(h.detach()) if self.kept == "hidden" else h


class UsesKept(nn.Module):
    def __init__(self, kept: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last, self.kept = nn.Linear(6, 6), Keeps(kept), nn.Linear(6, 6), kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.block(self.first(x)))
        aux = self.block.aux[0] if self.kept == "in a list" else self.block.aux
        return aux.square() if self.kept == "output is not used" else x + aux


@pytest.mark.parametrize("kept", KEPT)
@on_ranks(2)
def test_a_loss_that_a_unit_keeps_as_an_attribute_trains_as_on_one_process(kept: str) -> None:
    model = UsesKept(kept)
    for each in (model.block, model.last):
        fully_shard(each, reshard_after_forward=True)
    fully_shard(model)
    assert_trains_alike(model, UsesKept(kept))
    assert not any(unit.held is HELD for unit in engine_of(model).units)


class Teacher(nn.Module):
    """Builds no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@on_ranks(2)
def test_a_unit_that_builds_no_graph_is_sharded_after_forward() -> None:
    model = nn.Sequential(Teacher(), nn.Linear(6, 6))
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model)
    loss = model(torch.ones(2, 6)).sum()
    assert engine_of(model).units[1].held is not HELD
    loss.backward()
