"""QLoRA: a frozen Llama of transformers in 4 bits (NF4 of torchao), sharded, under adapters that are trained in float32.

torchrun --nproc-per-node 2 examples/qlora.py     # pip install transformers torchao
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise import shard_model


class QLoRA(nn.Module):
    """A frozen linear layer in 4 bits, and what is learned of its change: B A.  Source: arXiv 2305.14314."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(base.weight.detach(), 64, 4), requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))  # at first nothing changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_nf4(x, self.weight) + x @ self.a.T @ self.b.T


def main(steps: int = 20, width: int = 128) -> list[float]:
    """Train the adapters and nothing else; return the losses of this rank."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).to(device).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, QLoRA(getattr(layer.self_attn, name)))
    shard_model(model)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    ids = torch.arange(8 * 32, device=device).view(8, 32) * (dist.get_rank() + 3) % 64
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"{torch.typename(model)}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
