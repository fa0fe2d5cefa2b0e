"""``DistributedConfig`` of transformers, which calls torch's ``fully_shard`` while it loads: with ``use_in``, and without."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_equal, full
from helpers.of_clients import say_as_torchrun
from helpers.ranks import on_ranks
from torch import nn

import shardwise
from shardwise import ConfigError, fully_shard, use_in

pytestmark = pytest.mark.clients


def shared_folder() -> Path:
    paths = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(paths, src=0)
    return Path(str(paths[0]))


def saved(folder: Path, tied: bool = False) -> Path:
    """Let rank 0 write a tiny model there, as a plain program does; ``tied``: its embeddings are those of its head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
        sizes["tie_word_embeddings"] = tied
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(folder)
    dist.barrier()
    return folder


def loaded(folder: Path) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))


def trained(model: Any, optimizer: torch.optim.Optimizer | None = None) -> Any:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        ids = torch.randint(64, (4, 8), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def values(model: nn.Module) -> list[torch.Tensor]:
    return [full(param).detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_a_model_is_loaded_trained_saved_and_loaded_again_as_with_torchs_own(tied: bool) -> None:
    """transformers shards a model, loads it, and ties its weights then."""
    import transformers.distributed.fsdp as used_by_transformers

    say_as_torchrun()
    folder = saved(shared_folder(), tied)
    found: list[list[torch.Tensor]] = []
    for used in (True, False):
        with use_in(used_by_transformers) if used else nullcontext():
            model = trained(loaded(folder))
            assert isinstance(model, shardwise.FSDPModule) is used
            found.append(values(model))
            again = shared_folder()
            model.save_pretrained(again)
            dist.barrier()
            assert_equal(values(loaded(again)), found[-1])
    if not tied:
        assert_equal(*found)
    # Ours adds the gradients of a tied weight before they are reduced, torch's afterwards.
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_a_distributed_checkpoint_of_model_and_optimizer_goes_on_as_with_torchs_own() -> None:
    """``save_pretrained(distributed_checkpoint=True)`` writes each rank's shards with torch's DCP."""
    import transformers.distributed.fsdp as used_by_transformers
    from transformers.distributed import load_optimizer_distributed, save_optimizer_distributed

    say_as_torchrun()
    folder = saved(shared_folder())
    ends: list[list[torch.Tensor]] = []
    for used in (True, False):
        with use_in(used_by_transformers) if used else nullcontext():
            model = loaded(folder)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            trained(model, optimizer)
            weights, state = shared_folder(), str(shared_folder())
            model.save_pretrained(weights, distributed_checkpoint=True)
            save_optimizer_distributed(model, optimizer, state)
            assert any("shard-" in each.name for each in weights.iterdir())
            ends.append(values(trained(model, optimizer)))
            again = loaded(weights)
            restored = torch.optim.AdamW(again.parameters(), lr=0.1)
            load_optimizer_distributed(again, restored, state)
            ends.append(values(trained(again, restored)))
    for end in ends[1:]:
        assert_equal(end, ends[0])


@on_ranks(2)
def test_what_torchs_own_has_sharded_is_refused_by_name() -> None:
    say_as_torchrun()
    model = loaded(saved(shared_folder()))
    with pytest.raises(ConfigError, match="torch's own fully_shard manages the parameters of this"):
        fully_shard(model)
