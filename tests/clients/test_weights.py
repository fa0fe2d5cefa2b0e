"""Adapters of PEFT leave a sharded model for a folder, and come back from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from safetensors.torch import load_file

from shardwise import WeightPublisher, WeightReader, full_state_dict, fully_shard

pytestmark = pytest.mark.clients


def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def sharded(model: Any) -> Any:
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


@on_ranks(2)
def test_adapters_of_peft_are_saved_from_shards_and_loaded_before_sharding(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = sharded(get_peft_model(base(), LoraConfig(r=3, target_modules=["q_proj", "v_proj"])))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    tokens = torch.arange(8).view(2, 4) + dist.get_rank()
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapters = full_state_dict(model, only=lambda name: "lora_" in name)
    if dist.get_rank() == 0:
        assert len(adapters) == 8  # A and B of two matrices in two layers: nothing of the frozen base
        model.save_pretrained(tmp_path / "adapter", state_dict=adapters)
        assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 8
    dist.barrier()
    plain = PeftModel.from_pretrained(base(), tmp_path / "adapter", is_trainable=True)
    expected = model(input_ids=tokens).logits
    assert torch.equal(plain(input_ids=tokens).logits, expected)
    assert torch.equal(sharded(plain)(input_ids=tokens).logits, expected)
    assert sum(param.requires_grad for param in plain.parameters()) == 8


def is_adapter(name: str) -> bool:
    return "lora_" in name


@on_ranks(2)
def test_adapters_of_peft_are_published_alone_and_written_into_an_engine_that_has_the_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    model, engine = sharded(get_peft_model(base(), config)), get_peft_model(base(), config)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    publisher, reader = WeightPublisher(model, tmp_path, only=is_adapter), WeightReader(tmp_path)
    tokens = torch.arange(8).view(2, 4)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        publisher.publish()
        dist.barrier()  # rank 0 has committed
        changed = reader.advance(engine.state_dict())
        assert len(changed) == 8
        assert all(map(is_adapter, changed))
        assert torch.equal(engine(input_ids=tokens).logits, model(input_ids=tokens).logits)
        dist.barrier()
