"""Ways out and back in: Hugging Face's layout, ``torch.save``, and files of other tools straight into shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import Net, differences, made, state_of, train
from helpers.compare import full
from helpers.ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise import fully_shard
from shardwise.checkpoint import CheckpointError, DamagedCheckpointError, load, save
from shardwise.checkpoint.convert import export_model


def _gpt2(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: full(v) for n, v in model.state_dict().items()}


@on_ranks(2)
@pytest.mark.parametrize("most_bytes", [3000, 10**9], ids=["many files", "one file"])
def test_from_pretrained_loads_what_was_exported_and_shards_load_it_back(tmp_path: Path, most_bytes: int) -> None:
    model = _gpt2(0)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    save(tmp_path / "run", {"model": model}, step=1)
    exported = tmp_path / "exported"
    if dist.get_rank() == 0:
        paths = export_model(tmp_path / "run", exported, most_bytes=most_bytes)
        model.config.save_pretrained(exported)
        assert (len(paths) > 3) == (most_bytes == 3000)
    dist.barrier()
    expected = _whole(model)
    found = type(model).from_pretrained(exported)
    for name, value in found.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert found.lm_head.weight is found.transformer.wte.weight
    back = _gpt2(1)
    fully_shard(back.transformer.h[0])
    fully_shard(back)
    load(exported, {"model": back})
    for name, value in _whole(back).items():
        assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_a_plain_process_loads_what_shards_saved_for_torch_save(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    train(model, optimizer, range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    save(tmp_path / "run", {**state_of(model, optimizer), "scheduler": scheduler}, step=1)
    alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    plain = Net(seed=1)
    other = torch.optim.AdamW(plain.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(other, 3)
    load(tmp_path / "run", {**state_of(plain, other), "scheduler": schedule}, group=alone)
    train(plain, other, range(2, 4))
    train(model, optimizer, range(2, 4))
    for name, value in _whole(model).items():
        assert torch.equal(value, plain.state_dict()[name]), name


@on_ranks(2)
def test_one_file_of_another_tool_is_loaded_into_shards(tmp_path: Path) -> None:
    whole = Net(seed=3)
    path = tmp_path / "weights.safetensors"
    if dist.get_rank() == 0:
        tensors = {name: value for name, value in whole.state_dict().items() if not name.startswith("second")}
        save_file(
            {name: value.bfloat16().contiguous() if value.dim() else value for name, value in tensors.items()}, path
        )
        assert len(load_file(path)) == 5
    dist.barrier()
    model, _ = made("tensor parallel", seed=1)
    load(path, {"model": model})
    with torch.no_grad():
        for param in whole.parameters():
            param.copy_(param.bfloat16())
    assert differences(model, whole) == []
    with pytest.raises(CheckpointError, match="contain one model"):
        load(path, {"model": model, "other": {}})
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../weights.safetensors"}}')
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match="is not a file of this folder"):
        load(tmp_path, {"model": model})


@pytest.mark.parametrize("api", ["fully_shard", "hybrid", "tensor parallel", "replicate", "plain"])
@on_ranks(2)
def test_a_state_dict_of_torch_save_is_loaded_into_shards(api: str, tmp_path: Path) -> None:
    whole, path = Net(seed=3), tmp_path / "weights.pt"
    with torch.no_grad():
        whole.first.weight.data = whole.first.weight.t().contiguous().t()  # rows that do not lie one after the other
    if dist.get_rank() == 0:
        torch.save(whole.state_dict(), path)
        torch.save(
            {"net": {f"_orig_mod.{name}": value for name, value in whole.state_dict().items()}}, tmp_path / "all.pth"
        )
        torch.save({f"module.{name}": each for name, each in whole.state_dict().items()}, tmp_path / "ddp.pt")
    dist.barrier()
    for folder, key in ((path, "model"), (tmp_path / "all.pth", "net"), (tmp_path / "ddp.pt", "model")):
        model, _ = made(api, seed=1)
        found = load(folder, {key: model})
        assert differences(model, whole) == []
        assert found.step == 0
    wrapped = torch.nn.ModuleDict({"module": Net(seed=1)})  # has such a name of its own
    load(tmp_path / "ddp.pt", {"model": wrapped})
    assert differences(wrapped["module"], whole) == []
    with pytest.raises(CheckpointError, match="a dict with one as 'model'; found net"):
        load(tmp_path / "all.pth", {"model": model})


@on_ranks(2)
def test_a_rank_reads_its_own_rows_of_a_file_of_torch_save(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
    dist.barrier()
    fully_shard(model)
    assert load(tmp_path / "weights.pt", {"model": model}).num_bytes_read == 64 * 32 * 4


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


@on_ranks(2)
def test_nothing_in_a_file_of_torch_save_is_run_and_damage_is_named(tmp_path: Path) -> None:
    model, _ = made("fully_shard")
    before = _whole(model)
    if dist.get_rank() == 0:
        torch.save({"first.weight": Evil()}, tmp_path / "evil.pt")
        torch.save(Net().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        (tmp_path / "cut.pt").write_bytes(b"PK\3\4 and no more")
        torch.save([1, 2], tmp_path / "list.pt")
    dist.barrier()
    for name in ("evil.pt", "old.pt", "cut.pt"):
        with pytest.raises(DamagedCheckpointError, match="cannot read it"):
            load(tmp_path / name, {"model": model})
    with pytest.raises(CheckpointError, match="expected a state dict of tensors.*found list"):
        load(tmp_path / "list.pt", {"model": model})
    assert not Path("ran").exists()
    for name, value in _whole(model).items():
        assert torch.equal(value, before[name]), name
