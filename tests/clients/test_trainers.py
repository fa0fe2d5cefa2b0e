"""Trainers of other packages that call torch's ``fully_shard`` themselves: with ``use_in``, bit by bit as without it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from helpers.compare import assert_equal, full
from helpers.of_clients import say_as_torchrun, sharding_on_cpu
from helpers.ranks import on_ranks
from torch import nn

import shardwise
from shardwise import use_in

pytestmark = pytest.mark.clients
STEPS, ROWS, VOCABULARY = 3, 4, 64

Run = Callable[[], nn.Module]


def both_ways(run: Run, kind: str) -> None:
    """Call ``run`` with shardwise and with torch's own class; compare the parameters of the models it returns."""
    say_as_torchrun()
    found: list[dict[str, torch.Tensor]] = []
    for used in (True, False):
        with use_in(torchs) if used else nullcontext():
            model = run()
        sharded = [module for module in model.modules() if isinstance(module, torchs.FSDPModule)]
        assert sharded, f"{kind} has sharded nothing"
        assert all(isinstance(module, shardwise.FSDPModule) is used for module in sharded), kind
        found.append({name: full(param).detach().clone() for name, param in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    assert_equal(list(found[0].values()), list(found[1].values()))


def tiny_gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts))


def tokens(number: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS, 8), generator=torch.Generator().manual_seed(number))


def plugin() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
        use_orig_params=None,
    )


def accelerated(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator

    with sharding_on_cpu():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(STEPS):
        ids = tokens(2 * step + dist.get_rank())
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny_gpt(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    return model


def transformers_trainer() -> nn.Module:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for number in range(2 * STEPS) for row in tokens(number)]
    with tempfile.TemporaryDirectory() as folder, sharding_on_cpu():
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            fsdp="full_shard auto_wrap",
            fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
        )
        trainer = Trainer(tiny_gpt(), arguments, train_dataset=rows)
        trainer.train()
    return trainer.model_wrapped


def lightning_trainer() -> nn.Module:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))

        def configure_model(self) -> None:
            for layer in (self.model[0], self.model[2]):
                torchs.fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            torchs.fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
            return (self.model(x) - x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    rows = torch.randn(2 * STEPS * ROWS, 8, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            accelerator="cpu",
            devices=2,
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=ROWS))
    return module.model


@on_ranks(2)
def test_accelerate() -> None:
    both_ways(lambda: accelerated(tiny_gpt()), "accelerate")


@on_ranks(2)
def test_adapters_of_peft() -> None:
    both_ways(lambda: accelerated(with_adapters()), "peft")


@on_ranks(2)
def test_the_trainer_of_transformers() -> None:
    both_ways(transformers_trainer, "transformers")


@on_ranks(2)
def test_lightning() -> None:
    both_ways(lightning_trainer, "lightning")
