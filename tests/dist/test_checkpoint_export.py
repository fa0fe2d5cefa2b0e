"""Ways out and back in: Hugging Face's layout, ``torch.save``, and files of other tools straight into shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoints import Net, differences, made, state_of, train
from helpers.ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import fully_shard
from shardwise.checkpoint import CheckpointError, DamagedCheckpointError, load, save
from shardwise.checkpoint.convert import export_model, export_torch


def _gpt2(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


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
        assert (len(paths) > 3) == (most_bytes == 3000)
        model.config.save_pretrained(exported)
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
def test_plain_torch_loads_what_was_exported(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard")
    train(model, optimizer, range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    save(tmp_path / "run", {**state_of(model, optimizer), "scheduler": scheduler}, step=1)
    if dist.get_rank() == 0:
        found = torch.load(export_torch(tmp_path / "run", tmp_path / "all.pt"), weights_only=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["all.pt", "run"]
        plain = Net(seed=1)
        other = torch.optim.AdamW(plain.parameters())
        plain.load_state_dict(found["model"])
        other.load_state_dict(found["optimizer"])
        torch.optim.lr_scheduler.StepLR(other, 3).load_state_dict(found["scheduler"])
        train(plain, other, range(2, 4))
    train(model, optimizer, range(2, 4))
    for name, value in _whole(model).items():
        if dist.get_rank() == 0:
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
    with pytest.raises(CheckpointError, match="hold one model"):
        load(path, {"model": model, "other": {}})
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../weights.safetensors"}}')
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match="no file of this folder"):
        load(tmp_path, {"model": model})
