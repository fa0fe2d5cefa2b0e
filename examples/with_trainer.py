"""The Trainer of transformers, its FSDP2 done by shardwise, with a callback that saves through shardwise.checkpoint.

torchrun --nproc-per-node 2 examples/with_trainer.py runs/trainer     # pip install transformers accelerate
"""

import sys
from pathlib import Path

import torch
import torch.distributed.fsdp
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from shardwise import use_in
from shardwise.checkpoint import finish, load, save


class Checkpoints(TrainerCallback):
    """Load the newest checkpoint of ``folder`` before the first step; save every ``every`` steps and at the end.

    The Trainer counts its steps from one again after a resume: give it the data and the number of steps that are left.
    """

    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every, self.begin = folder, every, 0

    def state_of(self, passed: dict) -> dict:
        return {"model": passed["model"], "optimizer": getattr(passed["optimizer"], "optimizer", passed["optimizer"])}

    def on_train_begin(self, args, state, control, **passed) -> None:
        if Path(self.folder).is_dir():
            self.begin = load(self.folder, self.state_of(passed), fallback=True).step

    def on_step_end(self, args, state, control, **passed) -> None:
        if state.global_step % self.every == 0:
            save(self.folder, self.state_of(passed), step=self.begin + state.global_step, keep=2, wait=False)

    def on_train_end(self, args, state, control, **passed) -> None:
        finish(self.folder)


def main(steps: int = 50, width: int = 64, folder: str = "", **options: object) -> list[float]:
    """Train a small GPT-2 on one sentence; return the losses."""
    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=folder or "runs/trainer",
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",  # the callback saves
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
        **{"use_cpu": not torch.cuda.is_available(), **options},
    )
    callbacks = [Checkpoints(f"{folder}/checkpoints", every=steps)] if folder else []
    rows = [{"input_ids": ids, "labels": ids}] * (8 * steps)
    with use_in(torch.distributed.fsdp):  # accelerate, which the Trainer calls, shards with shardwise
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main(folder=sys.argv[1] if len(sys.argv) > 1 else "runs/trainer")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
