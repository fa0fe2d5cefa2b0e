"""shard_model: which units it makes, and that plan, table, log and collectives tell of the same ones."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import EXACT, assert_same
from helpers.inside import Recorder
from helpers.models import Block
from helpers.ranks import FOUR, on_ranks
from helpers.stacked import BLOCK, HUGE, Stacked, build, inputs, mixed, uneven, units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import (
    ConfigError,
    FSDPModule,
    MixedPrecisionPolicy,
    UsageError,
    describe_units,
    fully_shard,
    replicate,
    shard_model,
)
from shardwise.observe import Op

EACH = ["", *(f"blocks.{n}" for n in range(5))]


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "least", "expected"),
    [
        ("uneven", 0, EACH),
        ("uneven", 2 * BLOCK, ["", "blocks.0-2", "blocks.3-4"]),
        ("uneven", HUGE, ["", "blocks.0-4"]),
        ("checkpointed", HUGE, ["", "blocks.0-3"]),
        ("compiled", HUGE, ["", "blocks.0-3"]),
    ],
)
def test_neighbouring_blocks_are_merged_up_to_a_size(name: str, least: int, expected: list[str]) -> None:
    assert units(shard_model(build(name), min_unit_bytes=least)) == expected


@on_ranks(2)
def test_small_blocks_are_merged_by_default() -> None:
    assert units(shard_model(build("uneven"))) == ["", "blocks.0-4"]


@on_ranks(2)
def test_a_model_without_blocks_is_one_unit() -> None:
    (root,) = describe_units(shard_model(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))).rows
    assert (root.name, root.numel, root.num_bytes) == ("", 38, 152)
    assert units(shard_model(Block(7, 9), min_unit_bytes=0)) == [""]


@on_ranks(2)
def test_every_stack_of_blocks_is_found() -> None:
    model = nn.Sequential(nn.Linear(7, 7))
    model.twice = nn.ModuleDict({"encoder": uneven(), "decoder": mixed()})
    found = units(shard_model(model, min_unit_bytes=HUGE))
    assert found == ["", "twice.encoder.blocks.0-4", "twice.decoder.blocks.0-3"]


@on_ranks(2)
def test_blocks_are_the_outermost_repeated_modules_with_a_forward() -> None:
    outer = nn.Sequential(*(nn.Sequential(Block(7, 9), Block(7, 9)) for _ in range(3)), nn.LayerNorm(7))
    assert units(shard_model(outer, min_unit_bytes=0)) == ["", "0", "1", "2"]
    lists = nn.Sequential(nn.Linear(7, 7))
    lists.stages = nn.ModuleList(nn.ModuleList(Block(7, 9) for _ in range(2)) for _ in range(2))
    assert units(shard_model(lists, min_unit_bytes=HUGE)) == ["", "stages.0.0-1", "stages.1.0-1"]


@on_ranks(2)
def test_the_first_block_may_have_more_than_the_others() -> None:
    layers = nn.Sequential(Block(7, 15), Block(7, 9), Block(7, 9), nn.Linear(7, 7))
    assert units(shard_model(layers, min_unit_bytes=HUGE)) == ["", "0-2"]


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


@on_ranks(2)
def test_repeated_children_of_plain_modules() -> None:
    names = units(shard_model(TwoLayers(), min_unit_bytes=HUGE))
    assert names == ["", "first, second", "third"], "norms are no blocks; a block of another shape separates"
    table = describe_units(shard_model(TwoLayers(), min_unit_bytes=0))
    assert [row.name for row in table.rows] == ["", "first", "second", "third"]
    assert [row.num_bytes for row in table.rows[1:]] == [BLOCK] * 3
    assert all(row.padding_ratio > 1 for row in table.rows[1:]), "no world size but 1 divides the rows"


@on_ranks(2)
def test_ignored_inner_and_tied_parameters_do_not_count() -> None:
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


@on_ranks(2, FOUR)
def test_explicit_units_stay_as_they_are() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = build("uneven")
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("mine",))
    fully_shard(model.blocks[2], mesh=mesh, reshard_after_forward=False)
    inner = replicate(model.blocks[4].up) if size == 2 else fully_shard(model.blocks[4].up)
    kept = [module._attachment() for module in (model.blocks[2], inner)]
    before = [(each.unit, each.unit.policy, [unit.settings.axes for unit in each.units]) for each in kept]
    shard_model(model, min_unit_bytes=HUGE, reshard_after_forward=True)
    assert [module._attachment() for module in (model.blocks[2], inner)] == kept
    assert units(model) == ["", "blocks.0-1", "blocks.2", "blocks.3-4", "blocks.4.up"]
    for step in range(3):
        x = inputs("uneven", step, size)
        reference(x).square().mean().backward()
        model(x.chunk(size)[rank]).square().mean().backward()
        assert_same(model, reference, where=f"step {step}")
    assert [(each.unit, each.unit.policy, [unit.settings.axes for unit in each.units]) for each in kept] == before
    assert before[0][2][0].mesh is mesh
    assert model._attachment().unit.policy.reshard_after_forward is True
    assert model.blocks[0]._attachment() is model.blocks[1]._attachment()


@on_ranks(2)
def test_collectives_of_a_step_are_the_predicted_ones() -> None:
    for least, names in ((0, 5), (2 * BLOCK, 2), (HUGE, 1)):
        model: Any = shard_model(build("uneven"), min_unit_bytes=least)
        x = torch.randn(4, 7)
        model(x).sum().backward()
        engine = model._attachment().engine
        recorder = Recorder(engine)
        with CommDebugMode() as comm:
            model(x).sum().backward()
        ops = [call.op for call in recorder.calls]
        # Blocks give their parameters back after forward, all but the last unit of a pass; the root keeps its own.
        assert ops.count(Op.UNSHARD) == 1 + 2 * names
        assert ops.count(Op.REDUCE) == 1 + names
        assert recorder.calls == [*engine.exec_order.plan.calls]
        assert {call.unit for call in recorder.calls} == set(units(model)), "plans and tables have the same names"
        gathered = sum(count for op, count in comm.get_comm_counts().items() if "gather" in str(op))
        assert gathered == 1 + 2 * names, comm.get_comm_counts()


@on_ranks(4)
def test_arguments_hold_for_all_units() -> None:
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
        assert_same(models[1], models[0], EXACT, "bf16")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    reference = build("uneven")
    model = shard_model(copy.deepcopy(reference), mesh=mesh, reshard_after_forward=False, min_unit_bytes=2 * BLOCK)
    assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in model.parameters())
    x = inputs("uneven", 0, size)
    for _ in range(2):
        reference(x).square().mean().backward()
        model(x.chunk(size)[dist.get_rank()]).square().mean().backward()
    assert_same(model, reference, where="hybrid")
    assert all(m._attachment().unit.policy.reshard_after_forward is False for m in model.blocks)


@on_ranks(2)
def test_rank_0_logs_the_table() -> None:
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


@on_ranks(2)
def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    with pytest.raises(ConfigError, match="takes the root module, found list"):
        shard_model([nn.Linear(2, 2)])  # type: ignore[type-var]
    for wrong in (-1, 1.5, True, "1M"):
        with pytest.raises((ConfigError, TypeError), match="min_unit_bytes must be"):
            shard_model(nn.Linear(2, 2), min_unit_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shard_model does not support containers"):
        shard_model(nn.ModuleList([Block(7, 9), Block(7, 9)]))
    model = build("uneven")
    with pytest.raises(ConfigError, match="factor of 2"):
        shard_model(model, reshard_after_forward=3)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    shard_model(model)


@on_ranks(2)
def test_a_model_that_is_sharded_is_refused() -> None:
    for api in (shard_model, fully_shard, replicate):
        model = build("uneven")
        api(model)
        with pytest.raises(UsageError, match="Stacked was given to shard_model before"):
            shard_model(model)


@on_ranks(2)
def test_a_model_without_units_has_no_table() -> None:
    with pytest.raises(ConfigError, match="Linear contains no unit"):
        describe_units(nn.Linear(2, 2))


@on_ranks(2)
@pytest.mark.parametrize("least", [0, HUGE])
def test_the_output_dtype_is_that_of_the_model_and_not_of_the_units_it_has_chosen(least: int) -> None:
    """Which units there are is no affair of the user: what lies between them computes on."""
    torch.manual_seed(0)
    # The head is in the unit of the model, which casts what comes into the model alone.
    plain = nn.Sequential(Block(8, 16), Block(8, 16), nn.Linear(8, 3))
    model = copy.deepcopy(plain)
    shard_model(model, min_unit_bytes=least, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    assert units(model)[0] == ""
    assert len(units(model)) > 1
    x = torch.randn(4, 8)
    found = model(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, plain.bfloat16()(x.bfloat16()).float())
    found.sum().backward()
    assert all(param.grad is not None for param in model.parameters())
