"""Models of transformers that are made on the meta device and sharded there: initialized by their own ``init_weights``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.ranks import on_ranks
from torch import nn

from shardwise import init_parameters, shard_model

pytestmark = pytest.mark.clients


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=61))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 61}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=3))


@pytest.mark.parametrize("build", [_gpt2, _llama])
@on_ranks(2)
def test_a_model_of_transformers_has_the_values_of_one_process(build: Callable[[], Any]) -> None:
    with torch.device("meta"):
        plain, model = build(), build()
    shard_model(model, min_unit_bytes=0)
    for net in (plain, model):
        torch.manual_seed(5 if net is plain else 5 + dist.get_rank())
        init_parameters(net)
    for name, expected in plain.state_dict().items():
        assert torch.equal(full(model.state_dict()[name]), expected), name
    for (name, mine), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, expected), name
    tokens = torch.arange(8).view(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=tokens).logits, plain.eval()(input_ids=tokens).logits)
