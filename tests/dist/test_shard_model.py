"""shard_model: the same training as one process and as a unit for each block, and units as planned."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import (
    ConfigError,
    FSDPModule,
    MixedPrecisionPolicy,
    StateError,
    describe_units,
    fully_shard,
    replicate,
    shard_model,
)
from shardwise.events import Call, Event, Op
from shardwise.testing import WorkerPool
from shardwise.testing.models import Block, Mixed, TiedModel

BLOCK = 4 * sum(p.numel() for p in Block(7, 9).parameters())
HUGE = 10**9


class Stacked(nn.Module):
    """Blocks between an embedding-like and a head layer; ``order`` is the order in which they run."""

    def __init__(self, make: Callable[[], nn.Module], count: int, order: list[int] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(7, 3)
        self.order = list(range(count)) if order is None else order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def uneven() -> nn.Module:
    return Stacked(lambda: Block(7, 9), 5)


def mixed() -> nn.Module:
    return Stacked(lambda: nn.Sequential(Block(7, 3), Mixed(7)), 4)


def half_frozen() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 5)
    for block in model.blocks:
        block.up.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    model.stem.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 4)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[3].down.weight = model.blocks[0].down.weight
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def left_out() -> nn.Module:
    """One block is never used, one is used twice, and they run backwards."""
    return Stacked(lambda: Block(7, 9), 5, [4, 3, 1, 0, 3])


def checkpointed() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 4)
    for index in (0, 2, 3):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    return model


def checkpointed_and_frozen() -> nn.Module:
    model = half_frozen()
    for index in range(5):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    return model


def compiled() -> nn.Module:
    model = Stacked(lambda: Block(7, 9), 4)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[2].compile(backend="eager")
    return model


def tokens() -> nn.Module:
    return TiedModel(num_blocks=3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "uneven": uneven,
    "mixed": mixed,
    "half-frozen": half_frozen,
    "tied": tied,
    "left-out": left_out,
    "checkpointed": checkpointed,
    "checkpointed-and-frozen": checkpointed_and_frozen,
    "tokens": tokens,
    "compiled": compiled,
}


def inputs(name: str, step: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    if name == "tokens":
        return torch.randint(0, 11, (4 * size,), generator=generator)
    return torch.randn(4 * size, 7, generator=generator)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("blocks").children())


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, reference: nn.Module, where: str, exact: bool = False) -> None:
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for name, param in ours.items():
        for mine, other in ((param, theirs[name]), (param.grad, theirs[name].grad)):
            mine, other = full(mine), full(other)
            assert (mine is None) == (other is None), f"{where}: {name}"
            if mine is not None:
                torch.testing.assert_close(
                    mine, other, **tolerance, msg=lambda text, n=name: f"{where}: {n}: {text}"
                )


def units(model: nn.Module) -> list[str]:
    return [row.name for row in describe_units(model).rows]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def train_beside(name: str, least: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, per_block, model = build(name), build(name), build(name)
    for block in blocks_of(per_block):
        fully_shard(block)
    fully_shard(per_block)
    keys = list(model.state_dict())
    assert shard_model(model, min_unit_bytes=least) is model
    assert list(model.state_dict()) == keys
    models = (reference, per_block, model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in models]
    for step in range(4):
        batch = inputs(name, step, size)
        expected = reference(batch).square().mean()
        losses = [each(batch.chunk(size)[rank]).square().mean() for each in (per_block, model)]
        for loss in (expected, *losses):
            loss.backward()
        where = f"{name}, at least {least} bytes, step {step}"
        if size == 2:  # with more, gloo adds in an order that depends on the length of a message
            assert torch.equal(losses[0], losses[1]), where
        mean = losses[1].detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=1e-6, msg=where)
        assert_same(model, reference, where)
        assert_same(model, per_block, f"{where}, beside a unit for each block", exact=size == 2)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_same(model, reference, name)


def run_training(names: list[str], least: list[int]) -> None:
    for name in names:
        for each in least:
            train_beside(name, each)


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_process_and_as_a_unit_for_each_block(pool: WorkerPool, name: str) -> None:
    pool.run(run_training, names=[name], least=[2 * BLOCK, HUGE], num_ranks=2)


def test_trains_on_four_ranks(pool: WorkerPool) -> None:
    pool.run(run_training, names=[name for name in MODELS if name != "compiled"], least=[2 * BLOCK], num_ranks=4)


def run_lists_of_frozen_modules() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = build("half-frozen")
    model = copy.deepcopy(reference)
    fully_shard(blocks_of(model), reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    for step in range(3):
        x = inputs("", step, size)
        for backwards in range(1, 3):  # a graph that is kept passes the same inputs again
            outputs = [reference(x).square().mean(), model(x.chunk(size)[rank]).square().mean()]
            for output in outputs:
                for _ in range(backwards - 1):
                    output.backward(retain_graph=True)
                output.backward()
        assert_same(model, reference, f"step {step}")
        assert not model.blocks[0]._attachment().unit.is_full


def test_backward_leaves_a_list_of_half_frozen_modules_at_its_first_one(pool: WorkerPool) -> None:
    pool.run(run_lists_of_frozen_modules, num_ranks=2)


def run_units() -> None:
    model = shard_model(build("uneven"), min_unit_bytes=0)
    assert units(model) == ["", *(f"blocks.{n}" for n in range(5))]
    assert units(shard_model(build("uneven"), min_unit_bytes=2 * BLOCK)) == ["", "blocks.0-2", "blocks.3-4"]
    assert units(shard_model(build("uneven"), min_unit_bytes=HUGE)) == ["", "blocks.0-4"]
    assert units(shard_model(build("uneven"))) == ["", "blocks.0-4"], "small blocks are merged by default"
    assert units(shard_model(build("checkpointed"), min_unit_bytes=HUGE)) == ["", "blocks.0-3"]
    assert units(shard_model(build("compiled"), min_unit_bytes=HUGE)) == ["", "blocks.0-3"]
    (root,) = describe_units(shard_model(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))).rows
    assert (root.name, root.numel, root.num_bytes) == ("", 38, 152)
    twice = nn.ModuleDict({"encoder": uneven(), "decoder": mixed()})
    model = nn.Sequential(nn.Linear(7, 7))
    model.twice = twice
    assert units(shard_model(model, min_unit_bytes=HUGE)) == ["", "twice.encoder.blocks.0-4", "twice.decoder.blocks.0-3"]
    outer = nn.Sequential(*(nn.Sequential(Block(7, 9), Block(7, 9)) for _ in range(3)), nn.LayerNorm(7))
    assert units(shard_model(outer, min_unit_bytes=0)) == ["", "0", "1", "2"], "the outermost level of repetition"
    lists = nn.Sequential(nn.Linear(7, 7))
    lists.stages = nn.ModuleList(nn.ModuleList(Block(7, 9) for _ in range(2)) for _ in range(2))
    assert units(shard_model(lists, min_unit_bytes=HUGE)) == ["", "stages.0.0-1", "stages.1.0-1"], "lists have no forward"
    assert units(shard_model(Block(7, 9), min_unit_bytes=0)) == [""]


def test_units_are_those_of_the_plan(pool: WorkerPool) -> None:
    pool.run(run_units, num_ranks=2)


class TwoLayers(nn.Module):
    """A plain module with repeated children, parameterless and empty ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(7), nn.LayerNorm(7)
        self.first = Block(7, 9)
        self.between = nn.ReLU()
        self.second = Block(7, 9)
        self.other = Block(7, 11)
        self.third = torch.compile(Block(7, 9), backend="eager")


def run_plain_modules() -> None:
    names = units(shard_model(TwoLayers(), min_unit_bytes=HUGE))
    assert names == ["", "first, second", "third"], "norms are no blocks; a block of another shape separates"
    table = describe_units(shard_model(TwoLayers(), min_unit_bytes=0))
    assert [row.name for row in table.rows] == ["", "first", "second", "third"]
    assert [row.num_bytes for row in table.rows[1:]] == [BLOCK] * 3
    assert all(row.padding_ratio > 1 for row in table.rows[1:]), "no world size but 1 divides the rows"


def test_repeated_children_of_plain_modules(pool: WorkerPool) -> None:
    pool.run(run_plain_modules, num_ranks=2)


def run_what_does_not_count() -> None:
    model = build("uneven")
    ignored = {param for block in model.blocks for param in block.up.parameters()}
    rest = BLOCK - 4 * sum(p.numel() for p in model.blocks[0].up.parameters())
    shard_model(model, min_unit_bytes=2 * rest, ignored_params=ignored)
    assert units(model) == ["", "blocks.0-2", "blocks.3-4"]
    assert not any(isinstance(param, DTensor) for param in ignored)
    model = build("uneven")
    for block in model.blocks:
        fully_shard(block.up)
    shard_model(model, min_unit_bytes=2 * rest)
    assert [name for name in units(model) if "up" not in name] == ["", "blocks.0-2", "blocks.3-4"]
    model = build("tied")
    model.blocks[1] = model.blocks[0]
    assert units(shard_model(model, min_unit_bytes=0)) == ["", "blocks.0", "blocks.2", "blocks.3"]
    model = Stacked(lambda: Block(7, 9), 3)
    for name, param in list(model.blocks[0].named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.blocks[2].get_submodule(owner), leaf, param)
    assert units(shard_model(model, min_unit_bytes=BLOCK + 1)) == ["", "blocks.0-2"], "a tied parameter counts once"
    model(torch.randn(2, 7)).sum().backward()


def test_ignored_inner_and_tied_parameters_do_not_count(pool: WorkerPool) -> None:
    pool.run(run_what_does_not_count, num_ranks=2)


def run_explicit() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = build("uneven")
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("mine",))
    fully_shard(model.blocks[2], mesh=mesh, reshard_after_forward=False)
    inner = replicate(model.blocks[4].up) if size == 2 else fully_shard(model.blocks[4].up)
    kept = [module._attachment() for module in (model.blocks[2], inner)]
    before = [(each.unit, each.unit.policy, [group.axes for group in each.unit.groups]) for each in kept]
    shard_model(model, min_unit_bytes=HUGE, reshard_after_forward=True)
    assert [module._attachment() for module in (model.blocks[2], inner)] == kept
    assert units(model) == ["", "blocks.0-1", "blocks.2", "blocks.3-4", "blocks.4.up"]
    for step in range(3):
        x = inputs("uneven", step, size)
        reference(x).square().mean().backward()
        model(x.chunk(size)[rank]).square().mean().backward()
        assert_same(model, reference, f"step {step}")
    assert [(each.unit, each.unit.policy, [group.axes for group in each.unit.groups]) for each in kept] == before
    assert before[0][2][0].mesh is mesh
    assert model._attachment().unit.policy.reshard_after_forward is True
    assert model.blocks[0]._attachment() is model.blocks[1]._attachment()


def test_explicit_units_stay_as_they_are(pool: WorkerPool) -> None:
    pool.run(run_explicit, num_ranks=2)
    pool.run(run_explicit, num_ranks=4)


class Recorder:
    """Hears what units do."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Call):
            self.calls.append(event)


def run_counts() -> None:
    for least, names in ((0, 5), (2 * BLOCK, 2), (HUGE, 1)):
        model: Any = shard_model(build("uneven"), min_unit_bytes=least)
        x = torch.randn(4, 7)
        model(x).sum().backward()
        recorder = Recorder()
        engine = model._attachment().engine
        engine.journal.instruments.append(recorder)
        with CommDebugMode() as comm:
            model(x).sum().backward()
        ops = [call.op for call in recorder.calls]
        # Blocks give their parameters back after forward, all but the last unit of a pass; the root keeps its own.
        assert ops.count(Op.UNSHARD) == 1 + 2 * names
        assert ops.count(Op.REDUCE) == 1 + names
        assert tuple(recorder.calls) == engine.journal.plan.calls
        assert {call.unit for call in recorder.calls} == set(units(model)), "plans and tables have the same names"
        gathered = sum(count for op, count in comm.get_comm_counts().items() if "gather" in str(op))
        assert gathered in (0, 1 + 2 * names), "transports of our own are not seen by CommDebugMode"


def test_collectives_of_a_step_are_the_predicted_ones(pool: WorkerPool) -> None:
    pool.run(run_counts, num_ranks=2)


def run_arguments() -> None:
    size = dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [build("uneven"), build("uneven")]
    for block in models[0].blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(models[0], mp_policy=policy)
    shard_model(models[1], mp_policy=policy)
    for step in range(3):
        x = inputs("uneven", step, size).chunk(size)[dist.get_rank()]
        outputs = [model(x) for model in models]
        assert outputs[1].dtype == torch.bfloat16
        losses = [output.float().square().mean() for output in outputs]
        for loss in losses:
            loss.backward()
        assert torch.equal(losses[0], losses[1])
        assert_same(models[1], models[0], "bf16", exact=True)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    reference = build("uneven")
    model = shard_model(copy.deepcopy(reference), mesh=mesh, reshard_after_forward=False, min_unit_bytes=2 * BLOCK)
    assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in model.parameters())
    x = inputs("uneven", 0, size)
    for _ in range(2):
        reference(x).square().mean().backward()
        model(x.chunk(size)[dist.get_rank()]).square().mean().backward()
    assert_same(model, reference, "hybrid")
    assert all(m._attachment().unit.policy.reshard_after_forward is False for m in model.blocks)


def test_arguments_hold_for_all_units(pool: WorkerPool) -> None:
    pool.run(run_arguments, num_ranks=4)


def run_log() -> None:
    records: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, listener = logging.getLogger("torch.distributed.fsdp.fully_shard"), Listener(logging.INFO)
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        model = shard_model(build("uneven"))
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    if dist.get_rank():
        assert not records
    else:
        (text,) = records
        assert "Stacked" in text
        assert str(describe_units(model)) in text
    assert isinstance(model, FSDPModule)
    tables = [None] * dist.get_world_size()
    dist.all_gather_object(tables, describe_units(model))
    assert all(table == tables[0] for table in tables)


def test_rank_0_logs_the_table(pool: WorkerPool) -> None:
    pool.run(run_log, num_ranks=2)


def run_errors() -> None:
    with pytest.raises(ConfigError, match="takes the root module, found list"):
        shard_model([nn.Linear(2, 2)])  # type: ignore[type-var]
    for wrong in (-1, 1.5, True, "1M"):
        with pytest.raises(ConfigError, match="min_unit_bytes is .*, expected a whole number"):
            shard_model(nn.Linear(2, 2), min_unit_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shard_model does not support containers"):
        shard_model(nn.ModuleList([Block(7, 9), Block(7, 9)]))
    for door in (shard_model, fully_shard, replicate):
        model = build("uneven")
        door(model)
        with pytest.raises(StateError, match=r"Stacked was sharded before.*Call shard_model once"):
            shard_model(model)
    with pytest.raises(ConfigError, match="Linear contains no unit"):
        describe_units(nn.Linear(2, 2))
    model = build("uneven")
    with pytest.raises(ConfigError, match="factor of 2"):
        shard_model(model, reshard_after_forward=3)
    assert not any(isinstance(param, DTensor) for param in model.parameters()), "nothing is changed by wrong arguments"
    shard_model(model)


def test_errors(pool: WorkerPool) -> None:
    pool.run(run_errors, num_ranks=2)
