"""Right scripts whose wrappers are called by trainers of other packages."""

from __future__ import annotations

from helpers.prove_programs import Program

GPT = """
import tempfile
from helpers.of_clients import sharding_on_cpu
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
gpt = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=64, **dropouts))
rows = torch.randint(64, (64, 8), generator=torch.Generator().manual_seed(0))
"""
LOOP = """
optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(gpt, optimizer)
for number in range(4):
    ids = rows[4 * (2 * number + rank) :][:4]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
items = [{"input_ids": row, "labels": row} for row in rows]
with tempfile.TemporaryDirectory() as folder, context:
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        gradient_accumulation_steps=2, **options,
    )
    Trainer(gpt, arguments, train_dataset=items).train()
"""
SHARDED = """
options = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
context = sharding_on_cpu()
"""
CLIENTS = {
    "accelerate": Program(GPT + "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n" + LOOP),
    "accelerate_sharded": Program(
        GPT
        + """
from accelerate import Accelerator, FullyShardedDataParallelPlugin

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"],
    cpu_ram_efficient_loading=False, use_orig_params=None,
)
with sharding_on_cpu():
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
"""
        + LOOP
    ),
    "trainer": Program(GPT + "options, context = {}, contextlib.nullcontext()\n" + TRAINER),
    "trainer_sharded": Program(GPT + SHARDED + TRAINER),
    "lightning": Program("""
import lightning, tempfile

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, x, _):
        return self.net(x).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        strategy="ddp", accelerator="cpu", devices=world, max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=4))
"""),
}
