"""Weights as versions: a reader has the bits of the newest one, or all of the one before, whatever is in its way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import APIS, Net, made, train
from helpers.damage import KINDS, damage
from helpers.models import MODELS, build
from helpers.published import BF16, Engine, assert_follows, change_some, differing
from helpers.ranks import FOUR, on_ranks
from helpers.sharded import build_sharded, step_on_drawn_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import (
    ArgumentTypeError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    RejectedStep,
    ShardedOptimizer,
    StateError,
    WeightPublisher,
    WeightReader,
    full_state_dict,
    fully_shard,
    replicate,
    transaction,
)
from shardwise.checkpoint import load, save


def versions(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("step-"))


def num_bytes(folder: Path, version: int) -> int:
    return sum(path.stat().st_size for path in (folder / f"step-{version:08d}").iterdir())


@pytest.mark.parametrize(
    ("api", "num_ranks"),
    [
        pytest.param(
            api, size, marks=[pytest.mark.exhaustive] * ((api in ("hybrid", "tensor parallel")) == (size == 2))
        )
        for api in APIS
        for size in (2, 4)  # a mesh of two axes has no second rank on one of them at two
    ],
)
@on_ranks()
def test_an_engine_follows_every_api_to_the_bit(api: str, tmp_path: Path) -> None:
    model, optimizer = made(api)
    publisher = WeightPublisher(model, tmp_path, dtype=BF16, anchor_every=3)
    engine = Engine(tmp_path, Net())
    for step in range(5):
        assert publisher.publish(wait=step % 2 == 0) == step + 1
        publisher.wait_for(0, step + 1)
        assert_follows(engine, model, what=f"{api}, version {step + 1}")
        train(model, optimizer, [step])


@pytest.mark.parametrize("name", MODELS)
@on_ranks(1, 2, FOUR)
def test_parameters_of_any_shape_dtype_and_strides_are_published(name: str, tmp_path: Path) -> None:
    model = build_sharded(name)
    publisher = WeightPublisher(model, tmp_path)
    engine = Engine(tmp_path, build(name), None)
    for step in range(3):
        publisher.publish()
        assert_follows(engine, model, None)
        change_some(model, 0.1, step)


@on_ranks(2)
def test_bits_are_compared_not_values(tmp_path: Path) -> None:
    model = replicate(nn.Linear(4, 4, bias=False))
    publisher, engine = WeightPublisher(model, tmp_path), Engine(tmp_path, nn.Linear(4, 4, bias=False), None)
    with torch.no_grad():
        for values in ([0.0, float("nan")], [-0.0, float("nan")], [0.0, -float("nan")]):
            model.weight.to_local()[:2, :2] = torch.tensor(values)
            publisher.publish()
            assert_follows(engine, model, None)


@on_ranks(2)
def test_a_reader_that_comes_late_or_skips_versions_ends_at_the_same_bits(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    publisher = WeightPublisher(model, tmp_path, dtype=BF16, anchor_every=4)
    engine = Engine(tmp_path, Net())
    for step in range(1, 8):
        publisher.publish()
        if step in (1, 3, 7):  # over deltas; over an anchor
            assert_follows(engine, model)
            assert_follows(Engine(tmp_path, Net()), model)
        train(model, optimizer, [step])


@on_ranks(2)
def test_rows_that_are_new_are_told_and_nothing_without_a_newer_version(tmp_path: Path) -> None:
    model, reader = replicate(nn.Linear(3, 8)), WeightReader(tmp_path)
    weights = nn.Linear(3, 8).state_dict()
    assert reader.advance(weights) == {}
    assert reader.version is None
    publisher = WeightPublisher(model, tmp_path)
    publisher.publish()
    dist.barrier()
    assert {name: rows.tolist() for name, rows in reader.advance(weights).items()} == {
        "weight": [*range(8)],
        "bias": [*range(8)],
    }
    dist.barrier()
    with torch.no_grad():
        model.weight[5, 1] += 1
        model.weight[2] += 1
    publisher.publish()
    dist.barrier()
    assert {name: rows.tolist() for name, rows in reader.advance(weights).items()} == {"weight": [2, 5]}
    assert reader.advance(weights) == {}
    assert reader.version == 2


@on_ranks(2)
def test_dense_tensors_come_with_each_tied_name_once_they_have_changed(tmp_path: Path) -> None:
    model = build_sharded("tied")
    publisher, reader = WeightPublisher(model, tmp_path, dtype=BF16), WeightReader(tmp_path)
    engine: dict[str, torch.Tensor] = {}
    for step in range(3):
        publisher.publish()
        wanted = full_state_dict(model, dtype=BF16)
        if dist.get_rank() == 0:
            changed = dict(reader.changed_tensors())
            engine |= {name: value.clone() for name, value in changed.items()}
            assert step != 2 or changed.keys() == {"embed.weight", "head.weight"}
            assert not differing(engine, wanted)
        if step == 0:
            change_some(model, 0.3, step)
        if step == 1:
            change_some(model.embed, 0.3, step)


class Fused(nn.Module):
    """The weights of an engine: rows of three projections in one matrix, experts in one tensor, one matrix transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 4, dtype=BF16))
        self.experts = nn.Parameter(torch.zeros(3, 5, 4, dtype=BF16))
        self.out = nn.Parameter(torch.zeros(4, 6, dtype=BF16))
        self.own = nn.Parameter(torch.zeros(2))


@on_ranks(2)
def test_fused_rows_stacked_experts_and_views_are_written_in_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = {"q": nn.Linear(4, 6), "k": nn.Linear(4, 3), "v": nn.Linear(4, 3), "out": nn.Linear(4, 6)}
    model = nn.ModuleDict({name: nn.Linear(4, part.out_features, bias=False) for name, part in parts.items()})
    model["experts"] = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(3))
    for layer in (*(model[name] for name in parts), *model["experts"]):
        fully_shard(layer)
    publisher, reader, engine = WeightPublisher(model, tmp_path, dtype=BF16), WeightReader(tmp_path), Fused()
    weights = {"qkv": engine.qkv, "experts": engine.experts, "out.weight": engine.out.t(), "own": engine.own}
    names = {"qkv": ["q.weight", "k.weight", "v.weight"], "experts": [f"experts.{n}.weight" for n in range(3)]}
    for step in range(3):
        publisher.publish()
        wanted = full_state_dict(model, dtype=BF16)
        if dist.get_rank() == 0:
            reader.advance(weights, names=names)
            assert torch.equal(engine.qkv, torch.cat([wanted[name] for name in names["qkv"]]))
            assert torch.equal(engine.experts, torch.stack([wanted[name] for name in names["experts"]]))
            assert torch.equal(engine.out, wanted["out.weight"].t())
            assert not engine.own.any()
        change_some(model, 0.2, step)


@on_ranks(2)
def test_only_the_names_that_are_wanted_are_published(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    publisher = WeightPublisher(model, tmp_path, only=lambda name: name in ("tied.weight", "scale"))
    weights = {name: value for name, value in Net().state_dict().items() if name in ("tied.weight", "scale")}
    reader = WeightReader(tmp_path)
    for step in range(2):
        train(model, optimizer, [step])
        publisher.publish()
        wanted = full_state_dict(model, only=weights.__contains__)
        if dist.get_rank() == 0:
            reader.advance(weights)
            assert not differing(weights, wanted)


def test_a_reader_without_locks_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WeightPublisher(nn.Linear(2, 2), tmp_path).publish()
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    WeightReader(tmp_path).advance({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    assert not os.listdir(tmp_path / "readers")


@pytest.mark.parametrize("part", [0.0, 0.03, 1.0])
@on_ranks(2)
def test_a_delta_takes_the_bytes_of_what_has_changed_and_never_more_than_all(part: float, tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(1000, 600, bias=False))
    publisher = WeightPublisher(model, tmp_path, dtype=BF16)
    publisher.publish()
    before = full_state_dict(model, dtype=BF16)
    change_some(model, part, 0)
    after = full_state_dict(model, dtype=BF16)
    publisher.publish()
    if dist.get_rank() == 0:
        changed = int((before["weight"] != after["weight"]).sum())
        most = min(1.15 * 3 * changed + 2048, 1.01 * 2 * 600_000)  # 2048: headers of two files, and the manifest
        assert num_bytes(tmp_path, 2) <= most


@on_ranks(2)
def test_an_anchor_is_a_checkpoint_of_the_model(tmp_path: Path) -> None:
    model, _ = made("fully_shard")
    WeightPublisher(model, tmp_path).publish()
    other, _ = made("fully_shard", seed=5)
    load(tmp_path, {"model": other})
    assert not differing(full_state_dict(other), full_state_dict(model))


# ---- Optimizers, and as many steps as a reader takes.


class Adapted(nn.Module):
    """A frozen matrix with an adapter, between two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(24, 40, bias=False).requires_grad_(False)
        self.lora_down, self.lora_up = nn.Linear(24, 4, bias=False), nn.Linear(4, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_up(self.lora_down(x))


def layered() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 17, bias=False))


def is_adapter(name: str) -> bool:
    return "lora" in name


Wrap = Callable[[nn.Module], nn.Module]
RUNS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, float], Any], Callable[[str], bool] | None]] = {
    "AdamW": (layered, lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr), None),
    "Muon": (
        layered,
        lambda model, lr: ShardedOptimizer(dict(model.named_parameters()), torch.optim.Muon, lr=lr),
        None,
    ),
    "LoRA": (
        Adapted,
        lambda model, lr: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr),
        is_adapter,
    ),
}
# Of the elements, these change about 0.1 %, 3 % and 100 % in a step.
RATES = {"few": 1e-7, "some": 3e-6, "all": 3e-2}


def assert_follows_a_run(
    run: str, rate: float, num_versions: int, wrap: Callable[[nn.Module], nn.Module], folder: Path
) -> None:
    """Publish after each step, and compare what the engine has with the bits of ``full_state_dict``."""
    build_plain, make, only = RUNS[run]
    model = wrap(build_plain())
    optimizer = make(model, rate)
    publisher = WeightPublisher(model, folder, dtype=BF16, only=only, anchor_every=60)
    wanted = full_state_dict(model, dtype=BF16, only=only)
    weights = {name: torch.zeros_like(value) for name, value in wanted.items()}
    reader = WeightReader(folder)
    for step in range(num_versions):
        model(torch.randn(8, 24, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        publisher.publish(wait=step % 2 == 0)
        wanted = full_state_dict(model, dtype=BF16, only=only)
        publisher.wait_for(0, 0)
        if dist.get_rank() == 0:
            reader.advance(weights)
            assert reader.version == step + 1
            assert not differing(weights, wanted), f"version {step + 1}"


def sharded_whole(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def hybrid(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    names = ("lora_down", "lora_up") if isinstance(model, Adapted) else ("0", "1")
    parallelize_module(model, mesh["tensor"], {names[0]: ColwiseParallel(), names[1]: RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


@pytest.mark.parametrize("run", RUNS)
@on_ranks(2)
def test_an_engine_follows_every_optimizer_to_the_bit(run: str, tmp_path: Path) -> None:
    assert_follows_a_run(run, RATES["some"], 6, sharded_whole, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("run", RUNS)
@on_ranks(1, 2, 4, timeout_s=400.0)
def test_an_engine_follows_200_versions_to_the_bit(run: str, rate: str, tmp_path: Path) -> None:
    assert_follows_a_run(run, RATES[rate], 200, sharded_whole, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["AdamW", "LoRA"])
@pytest.mark.parametrize("wrap", [hybrid, tensor_parallel])
@on_ranks(4, timeout_s=400.0)
def test_an_engine_follows_200_versions_on_meshes(run: str, wrap: Wrap, tmp_path: Path) -> None:
    assert_follows_a_run(run, RATES["some"], 200, wrap, tmp_path)


# ---- What comes between two versions.


@on_ranks(2, FOUR)
def test_the_version_after_a_step_that_is_undone_is_right(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    publisher, engine = WeightPublisher(model, tmp_path, dtype=BF16), Engine(tmp_path, Net())
    publisher.publish()
    assert_follows(engine, model)
    for seed, is_rejected in enumerate((True, False, True)):
        with transaction(model, optimizer, skip=RejectedStep) as step:
            step_on_drawn_gradients(model, optimizer, seed)
            if is_rejected and dist.get_rank() == 1:
                step.reject("no")
        publisher.publish()
        assert_follows(engine, model, what=f"step {seed}")


@on_ranks(4)
def test_another_number_of_ranks_goes_on_with_an_anchor(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    engine = Engine(tmp_path, Net())
    publisher = WeightPublisher(model, tmp_path, dtype=BF16)
    for step in range(2):
        train(model, optimizer, [step])
        publisher.publish()
        assert_follows(engine, model)
    publisher.close()
    save(tmp_path.with_name("run"), {"model": model}, step=2)
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        fewer = fully_shard(Net(1), mesh=mesh)
        load(tmp_path.with_name("run"), {"model": fewer}, group=group)
        publisher = WeightPublisher(fewer, tmp_path, dtype=BF16, group=group)
        for step in range(2):
            assert publisher.publish() == 3 + step
            assert_follows(engine, fewer)
            change_some(fewer, 0.2, step)
        assert versions(tmp_path) == ["step-00000003", "step-00000004"]


def test_a_folder_that_was_emptied_goes_on_with_an_anchor(tmp_path: Path) -> None:
    model = nn.Linear(40, 30)
    publisher, engine = WeightPublisher(model, tmp_path, dtype=BF16), Engine(tmp_path, model)
    for step in range(2):
        publisher.publish()
        change_some(model, 0.1, step)
    engine.advance()
    assert engine.reader.version == 2
    for name in versions(tmp_path):
        shutil.rmtree(tmp_path / name)
    assert publisher.publish() == 3
    assert_follows(engine, model)
    assert_follows(Engine(tmp_path, model), model)


@on_ranks(2)
def test_a_full_folder_is_named_on_all_ranks_and_the_next_version_is_right(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    publisher, engine = WeightPublisher(model, tmp_path, dtype=BF16, anchor_every=3), Engine(tmp_path, Net())
    for step in range(1, 7):
        train(model, optimizer, [step])
        if step in (2, 4):  # a delta, an anchor
            full = mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device"))
            where = full if dist.get_rank() == 1 else nullcontext()
            with where, pytest.raises(CheckpointError, match="rank 1: OSError: No space left on device"):
                publisher.publish()
            if engine.is_here:
                assert engine.advance() == {}
        else:
            publisher.publish()
            assert_follows(engine, model, what=f"step {step}")


@on_ranks(2)
def test_an_error_of_a_thread_that_writes_is_raised_by_the_next_call(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    publisher, engine = WeightPublisher(model, tmp_path), Engine(tmp_path, Net(), None)
    with mock.patch.object(os, "fsync", side_effect=OSError(errno.EIO, "Input/output error")):
        publisher.publish(wait=False)
        with pytest.raises(CheckpointError, match="Input/output error"):
            publisher.wait_for(0, 1)
    train(model, optimizer, [1])
    is_interrupted = dist.get_rank() == 1
    with (
        mock.patch.object(torch.Tensor, "copy_", side_effect=KeyboardInterrupt) if is_interrupted else nullcontext(),
        pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext(),
    ):
        publisher.publish(wait=False)
    with pytest.raises(CheckpointError, match="interrupted by KeyboardInterrupt"):
        publisher.wait_for(0, 1)
    publisher.publish(wait=False)
    publisher.close()
    assert_follows(engine, model, None)


# ---- Files that are not what was written.


@pytest.mark.parametrize("seed", range(2 * len(KINDS)))
def test_a_damaged_version_is_named_and_changes_nothing(seed: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    publisher, engine = WeightPublisher(model, tmp_path, dtype=BF16, anchor_every=3), Engine(tmp_path, model)
    for step in range(2):
        publisher.publish()
        assert_follows(engine, model)
        change_some(model, 0.05, step)
    publisher.publish()
    before = {name: value.clone() for name, value in engine.weights.items()}
    what = damage(tmp_path / "step-00000003", tmp_path / "step-00000002", seed)
    with pytest.raises(DamagedCheckpointError, match="step-00000003"):
        engine.advance()
    assert engine.reader.version == 2, what
    assert not differing(engine.weights, before), what
    change_some(model, 0.05, 9)
    publisher.publish()  # an anchor
    assert_follows(engine, model, what=what)


def harm(kind: str, folder: Path) -> None:
    second, third = folder / "step-00000002", folder / "step-00000003"
    if kind == "missing":
        shutil.rmtree(second)
    if kind == "doubled":
        shutil.rmtree(third)
        shutil.copytree(second, third)
    if kind == "link":
        shutil.move(third / "part-00000.safetensors", folder / "elsewhere")
        (third / "part-00000.safetensors").symlink_to(folder / "elsewhere")


HARM = {
    "missing": "version 2 is missing, which version 3 follows",
    "doubled": "step-00000003/manifest.json: is that of step 2",
    "link": "part-00000.safetensors: is a symbolic link",
}


@pytest.mark.parametrize("kind", HARM)
def test_a_chain_that_is_broken_is_named_and_never_followed(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(40, 30)
    publisher, engine = WeightPublisher(model, tmp_path, dtype=BF16, anchor_every=3), Engine(tmp_path, model)
    publisher.publish()
    assert_follows(engine, model)
    for step in range(2):
        change_some(model, 0.05, step)
        publisher.publish()
    harm(kind, tmp_path)
    with pytest.raises(DamagedCheckpointError, match=HARM[kind]):
        engine.advance()
    assert engine.reader.version == 1
    change_some(model, 0.05, 2)
    publisher.publish()
    assert_follows(engine, model)


def test_a_version_of_another_publisher_under_the_same_number_is_not_followed(tmp_path: Path) -> None:
    model = nn.Linear(40, 30)
    engine = Engine(tmp_path / "here", model)
    for folder in ("here", "there"):
        publisher = WeightPublisher(model, tmp_path / folder, dtype=BF16)
        for step in range(3):
            publisher.publish()
            change_some(model, 0.05, step)
        publisher.close()
        if folder == "here":
            assert_follows_until(engine, tmp_path / folder, 1)
    shutil.rmtree(tmp_path / "here" / "step-00000003")
    shutil.copytree(tmp_path / "there" / "step-00000003", tmp_path / "here" / "step-00000003")
    with pytest.raises(DamagedCheckpointError, match="is not the version that version 3 follows"):
        engine.advance()


def assert_follows_until(engine: Engine, folder: Path, version: int) -> None:
    """Let the engine take ``version`` while the later ones are away."""
    later = [name for name in versions(folder) if int(name[5:]) > version]
    for name in later:
        (folder / name).rename(folder / f"away-{name}")
    engine.advance()
    assert engine.reader.version == version
    for name in later:
        (folder / f"away-{name}").rename(folder / name)


def test_weights_that_somebody_else_has_changed_are_named_and_written_anew(tmp_path: Path) -> None:
    model = nn.Linear(40, 30)
    publisher, engine = WeightPublisher(model, tmp_path, dtype=BF16), Engine(tmp_path, model)
    publisher.publish()
    engine.advance()
    engine.weights["weight"].zero_()
    change_some(model, 0.1, 0)
    publisher.publish()
    with pytest.raises(StateError, match="model/weight would not be what was published.* wrote version 1"):
        engine.advance()
    assert not engine.weights["weight"].any()
    assert_follows(engine, model)


def test_an_interrupt_while_tensors_are_written_says_that_they_are_mixed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    publisher, engine = WeightPublisher(model, tmp_path, dtype=BF16), Engine(tmp_path, model)
    publisher.publish()
    engine.advance()
    change_some(model, 0.1, 0)
    publisher.publish()
    put, calls = torch.Tensor.put_, []

    def interrupted(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(engine.reader.is_mixed)
        if sum(calls) == 3:
            raise KeyboardInterrupt
        return put(tensor, *arguments)

    with mock.patch.object(torch.Tensor, "put_", interrupted), pytest.raises(KeyboardInterrupt):
        engine.advance()
    assert engine.reader.is_mixed
    assert engine.reader.version is None
    assert_follows(engine, model)
    assert not engine.reader.is_mixed
    assert engine.reader.version == 2


# ---- Readers' marks, and what is removed.


def test_versions_before_an_anchor_go_unless_a_live_reader_reads(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    publisher = WeightPublisher(model, tmp_path, anchor_every=2, most_versions=4)
    for _ in range(3):
        publisher.publish()
    assert versions(tmp_path) == ["step-00000003"]
    held = WeightReader(tmp_path)
    read, seen = os.preadv, []

    def slow(*arguments: Any) -> int:
        if not seen:
            for _ in range(4):  # meanwhile
                seen.append([])
                publisher.publish()
                seen[-1] = versions(tmp_path)
        return read(*arguments)

    with (
        mock.patch.object(os, "preadv", slow),
        pytest.raises(DamagedCheckpointError, match="step-00000003.*the file is missing"),
    ):
        held.advance(model.state_dict())
    assert seen[1] == [f"step-{n:08d}" for n in (3, 4, 5)]
    assert seen[3] == [f"step-{n:08d}" for n in (4, 5, 6, 7)]  # there was one more than 4
    publisher.publish()
    publisher.publish()
    assert versions(tmp_path) == ["step-00000009"]
    assert os.listdir(tmp_path / "readers")
    held.close()
    publisher.publish()
    publisher.publish()
    assert not os.listdir(tmp_path / "readers")


@on_ranks(2)
def test_readers_are_waited_for_and_named_if_they_are_late(tmp_path: Path) -> None:
    model, _ = made("fully_shard")
    publisher, engine = WeightPublisher(model, tmp_path, dtype=BF16), Engine(tmp_path, Net())
    publisher.publish()
    engine.advance()
    dist.barrier()
    publisher.wait_for(1, 1)
    with pytest.raises(
        CheckpointError, match=r"version 2 is not in use: rank 0: expected 1 readers after 0.1 s: .* has 1"
    ):
        publisher.wait_for(1, 2, timeout_s=0.1)
    engine.reader.close()
    dist.barrier()
    with pytest.raises(CheckpointError, match="expected 1 readers after 0.1 s: none is alive"):
        publisher.wait_for(1, 1, timeout_s=0.1)


# ---- Hosts without a folder that all see.


@on_ranks(2)
def test_versions_reach_readers_by_what_users_send_and_receive(tmp_path: Path) -> None:
    sent = tmp_path / "sent"

    def send(path: Path) -> None:
        (sent / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, sent / path.parent.name / path.name)

    def receive(folder: Path) -> None:
        if sent.exists():
            shutil.copytree(sent, folder, dirs_exist_ok=True)

    model, optimizer = made("fully_shard")
    publisher = WeightPublisher(model, tmp_path / "publish", dtype=BF16, send=send)
    engine = Engine(tmp_path / "engine", Net(), receive=receive)
    for step in range(3):
        publisher.publish()
        assert_follows(engine, model)
        train(model, optimizer, [step])
    failing = mock.patch.object(shutil, "copyfile", side_effect=OSError(errno.ENETUNREACH, "Network is unreachable"))
    where = failing if dist.get_rank() == 1 else nullcontext()
    with (
        where,
        pytest.raises(CheckpointError, match="was not sent to readers.*rank 1: OSError: Network is unreachable"),
    ):
        publisher.publish()
    publisher.publish()
    assert_follows(engine, model)


# ---- Mistakes.


@on_ranks(2)
def test_ranks_that_publish_into_different_folders_are_named(tmp_path: Path) -> None:
    publisher = WeightPublisher(fully_shard(nn.Linear(2, 2)), tmp_path / str(dist.get_rank()))
    with pytest.raises(CheckpointError, match="rank 1: FileNotFoundError: No such file or directory: .*/1/.saving"):
        publisher.publish()


@on_ranks(2)
def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    torch.manual_seed(dist.get_rank())
    publisher = WeightPublisher(nn.Linear(2, 2), tmp_path)
    with pytest.raises(CheckpointError, match="parameters .* differ between ranks that hold the same part"):
        publisher.publish()


def test_a_folder_of_checkpoints_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, {"model": model}, step=3)
    with pytest.raises(CheckpointError, match="is a checkpoint of a run; publish into a folder of its own"):
        WeightPublisher(model, tmp_path).publish()
    with pytest.raises(DamagedCheckpointError, match="publish: expected an object, found 'None'"):
        WeightReader(tmp_path).advance(model.state_dict())


REFUSED: dict[str, Callable[[dict[str, torch.Tensor]], tuple[dict[str, torch.Tensor], Any]]] = {
    "weights lack 'bias'": lambda found: ({"weight": found["weight"]}, {}),
    r"weight: \[2, 3\] of torch.float64 for weight; published is \[2, 3\] of F32": lambda found: (
        found | {"weight": found["weight"].double()},
        {},
    ),
    r"weight: \[3, 2\] of torch.float32 for weight": lambda found: (found | {"weight": found["weight"].t()}, {}),
    "other: .* for wight; published is no such tensor": lambda found: (
        found | {"other": found["weight"]},
        {"other": "wight"},
    ),
    "weight: it has 3 rows, the tensors of names= 2": lambda found: (
        found | {"weight": torch.zeros(3, 3)},
        {"weight": ["weight"]},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_weights_that_do_not_fit_are_named(message: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    WeightPublisher(model, tmp_path).publish()
    weights, names = REFUSED[message](dict(model.state_dict()))
    with pytest.raises(ConfigError, match=message):
        WeightReader(tmp_path).advance(weights, names=names)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(ArgumentTypeError, match="WeightPublisher takes a module, found OrderedDict"):
        WeightPublisher(model.state_dict(), tmp_path)
    with pytest.raises(ConfigError, match="WeightPublisher: anchor_every must be at least 1, got 0"):
        WeightPublisher(model, tmp_path, anchor_every=0)
    with pytest.raises(ArgumentTypeError, match="It takes .*anchor_every"):
        WeightPublisher(model, tmp_path, anchors=3)
    with pytest.raises(CheckpointError, match="tensors of C128 cannot be published"):
        WeightPublisher(nn.Linear(2, 2, dtype=torch.complex128), tmp_path).publish()


def test_the_files_can_be_read_without_the_package(tmp_path: Path) -> None:
    """Do what docs/design/034-weight-deltas.md says, with json and safetensors alone."""
    from safetensors.torch import load_file

    model = nn.Linear(50, 40, bias=False)
    publisher = WeightPublisher(model, tmp_path, dtype=BF16)
    publisher.publish()
    change_some(model, 0.05, 0)
    publisher.publish()
    anchor, delta = (tmp_path / name for name in versions(tmp_path))
    weight = load_file(anchor / "part-00000.safetensors")["model/weight"]
    manifest = json.loads((delta / "manifest.json").read_text())
    assert manifest["values"]["publish"]["base"] == [1, json.loads((anchor / "manifest.json").read_text())["save"]]
    found = load_file(delta / "part-00000.safetensors")
    place, gap, shift = -1, 0, 0
    positions = []
    for byte in found["model/weight/positions"].tolist():
        gap |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            place, gap, shift = place + gap + 1, 0, 0
            positions.append(place)
    weight.view(-1)[positions] = found["model/weight"]
    assert torch.equal(weight, model.weight.bfloat16())
    odd, total = -7046029254386353131, 0
    for place, value in enumerate(weight.view(torch.int16).view(-1).tolist(), start=1):
        weight_of = signed(place * odd)
        total += value * (signed((weight_of ^ (weight_of >> 31)) * odd) | 1)
    assert signed(total) == manifest["values"]["publish/model/weight"]


def signed(number: int) -> int:
    """Return ``number`` modulo 2**64, as a signed one."""
    return (number + 2**63) % 2**64 - 2**63
