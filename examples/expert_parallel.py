"""Expert parallelism beside fully_shard: experts are split over `ep`, their shards lie over `efsdp`, the rest over all ranks.

torchrun --nproc-per-node 4 examples/expert_parallel.py     # (efsdp, ep) = (2, 2), as torchtitan folds its meshes
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor, init_device_mesh

from shardwise import fully_shard


class Exchange(torch.autograd.Function):  # rows to other ranks; gradients go back the way that the rows came
    @staticmethod
    def forward(ctx, x, received, sent, group):
        ctx.way, found = (sent, received, group), x.new_empty(int(received.sum()), x.size(1))
        dist.all_to_all_single(found, x.contiguous(), received.sum(1).tolist(), sent.sum(1).tolist(), group=group)
        return found

    @staticmethod
    def backward(ctx, grad):
        return Exchange.forward(ctx, grad, *ctx.way), None, None, None


class Experts(nn.Module):  # their weights are a DTensor over ep, so checkpoints know which ones a rank holds
    def __init__(self, num: int, width: int, ep: DeviceMesh) -> None:
        super().__init__()
        self.weights = nn.Parameter(distribute_tensor(torch.randn(num, width, width) / width**0.5, ep, [Shard(0)]))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        weights = self.weights.to_local()  # counts: of each of these experts from the first rank, from the second...
        return torch.cat([(rows @ weights[i % len(weights)]).relu() for i, rows in enumerate(x.split(counts))])


class MoE(nn.Module):
    def __init__(self, num: int, width: int, ep: DeviceMesh) -> None:
        super().__init__()
        self.router, self.experts, self.num, self.ep = nn.Linear(width, num), Experts(num, width, ep), num, ep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        order, group = choice.argsort(stable=True), self.ep.get_group()
        sent = choice.bincount(minlength=self.num).view(self.ep.size(), -1)  # rows for each expert of each rank
        dist.all_to_all_single(received := torch.empty_like(sent), sent, group=group)
        done = self.experts(Exchange.apply(x[order], received, sent, group), received.flatten().tolist())
        return x + Exchange.apply(done, sent, received, group)[order.argsort()] * weight[:, None]


def main(steps: int = 50, width: int = 64, expert_ranks: int = 2) -> list[float]:
    """Train a mixture of four experts; return the losses, averaged over ranks."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    size, ep = dist.get_world_size(), min(expert_ranks, dist.get_world_size())
    mesh = init_device_mesh(device.type, (size // ep, ep), mesh_dim_names=("efsdp", "ep"))  # takes GPU LOCAL_RANK
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), MoE(4, width, mesh["ep"]), nn.Linear(width, 1)).to(device)
    fully_shard(model[1].experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
    model[1].experts.set_gradient_divide_factor(size)  # an expert sees tokens of all ranks, not of efsdp alone
    fully_shard(model)  # all else, over all ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)  # one by one: they are on two meshes
    data, losses = torch.Generator().manual_seed(0), []  # all ranks draw the batch, each takes its rows
    for _ in range(steps):
        x = torch.randn(64, width, generator=data).chunk(size)[dist.get_rank()].to(device)
        loss = (model(x) - x.abs().mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach())
        losses.append(mean.item() / size)
    if dist.get_rank() == 0:
        print(f"efsdp x ep = {size // ep} x {ep}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
