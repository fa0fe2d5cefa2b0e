"""The Trainer of transformers with data that resumes exactly: run it twice, on 1, 2 or 4 ranks.

torchrun --nproc-per-node 2 examples/data_with_trainer.py runs/data     # pip install transformers accelerate
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from shardwise import Microbatches
from shardwise.checkpoint import finish, load, save


class DataTrainer(Trainer):
    """Reads the microbatches of ``data`` from its step on; the Trainer's own sampler would begin again."""

    data: Microbatches

    def get_train_dataloader(self) -> DataLoader:
        steps = range(self.data.step, self.data.step + self.args.max_steps)
        return DataLoader(
            self.train_dataset, batch_sampler=self.data.batch_sampler(steps), collate_fn=self.data_collator
        )


class Checkpoints(TrainerCallback):
    """Load the newest checkpoint of ``folder`` before the first step; save after the last one."""

    def __init__(self, folder: str, data: Microbatches) -> None:
        self.folder, self.data = folder, data

    def state_of(self, passed: dict) -> dict:
        optimizer = getattr(passed["optimizer"], "optimizer", passed["optimizer"])
        return {"model": passed["model"], "optimizer": optimizer, "data": self.data}

    def on_train_begin(self, args, state, control, **passed) -> None:
        if Path(self.folder).is_dir():
            load(self.folder, self.state_of(passed), fallback=True)

    def on_train_end(self, args, state, control, **passed) -> None:
        self.data.step += state.global_step  # a loader of one's own has read them
        save(self.folder, self.state_of(passed), step=self.data.step, keep=2)
        finish(self.folder)


def main(folder: str, steps: int = 20, width: int = 64) -> list[float]:
    """Train a small GPT-2 for ``steps`` more steps; return the losses of all ranks."""
    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (90, 8))]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        gradient_accumulation_steps=4 // (dist.get_world_size() if dist.is_initialized() else 1),
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",  # the callback saves
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    data = Microbatches(rows, num_microbatches=4, microbatch_size=4, seed=0)
    if Path(folder, "checkpoints").is_dir():
        load(f"{folder}/checkpoints", {"data": data}, fallback=True)  # the position, before the loader is made
    trainer = DataTrainer(model, arguments, train_dataset=rows, callbacks=[Checkpoints(f"{folder}/checkpoints", data)])
    trainer.data = data
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main(sys.argv[1] if len(sys.argv) > 1 else "runs/data")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
