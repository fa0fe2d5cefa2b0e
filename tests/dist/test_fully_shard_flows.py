"""Ways to run a sharded model that are not forward, backward, step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard, share_comm_ctx
from shardwise.testing import WorkerPool
from shardwise.testing.models import Block, batch_for, build, units_of


def sharded(seed: int = 0) -> nn.Module:
    model = build("plain", seed)
    for module in units_of("plain", model):
        fully_shard(module)
    return fully_shard(model)


def mine(seed: int = 0) -> torch.Tensor:
    return batch_for("plain", seed, 4 * dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()]


def same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        expected = other.grad.clone()
        dist.all_reduce(expected, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(param.grad.full_tensor(), expected)


def run_inference_first() -> None:
    for mode in (torch.inference_mode, torch.no_grad):
        model, reference = sharded(), build("plain")
        with mode():
            assert torch.equal(model(mine()), reference(mine()))
        for _ in range(2):
            model(mine()).square().sum().backward()
            reference(mine()).square().sum().backward()
            with mode():
                model(mine(1))
        same_gradients(model, reference)


def run_explicit_unshard() -> None:
    model, reference = sharded(), build("plain")
    handle = model[0].unshard(async_op=True)
    assert handle is not None
    handle.wait()
    handle.wait()
    assert model[0].unshard() is None
    assert torch.equal(model[0].up.weight, reference[0].up.weight)
    model[0].reshard()
    model[0].reshard()
    assert isinstance(model[0].up.weight, DTensor)
    model[1].unshard()
    model(mine()).square().sum().backward()
    reference(mine()).square().sum().backward()
    same_gradients(model, reference)
    model[2].unshard(async_op=True)
    model.zero_grad()
    reference.zero_grad()
    model(mine(2)).square().sum().backward()
    reference(mine(2)).square().sum().backward()
    same_gradients(model, reference)


def run_grad_function() -> None:
    model, reference = sharded(), build("plain")
    x, y = mine().requires_grad_(), mine().requires_grad_()
    (left,) = torch.autograd.grad(model(x).square().sum(), x)
    (right,) = torch.autograd.grad(reference(y).square().sum(), y)
    assert torch.equal(left, right)
    assert all(param.grad is None and isinstance(param, DTensor) for param in model.parameters())
    model(mine()).square().sum().backward()
    reference(mine()).square().sum().backward()
    same_gradients(model, reference)


def run_two_models() -> None:
    generator, critic = sharded(1), sharded(2)
    plain = build("plain", 1), build("plain", 2)
    share_comm_ctx([generator, critic])
    for step in range(3):
        critic(generator(mine(step))).square().sum().backward()
        plain[1](plain[0](mine(step))).square().sum().backward()
        critic(generator(mine(step)).detach()).sum().backward()
        plain[1](plain[0](mine(step)).detach()).sum().backward()
    for model, reference in zip((generator, critic), plain, strict=True):
        same_gradients(model, reference)


def run_create_graph() -> None:
    model, reference = sharded(), build("plain")
    for each in (model, reference):
        x = mine().requires_grad_()
        (grad,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        (grad.square().sum() + each(x).sum()).backward()
    same_gradients(model, reference)


class Odd(nn.Module):
    """Returns what is no tensor, and calls its block only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(7, 5), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, times: int) -> tuple[torch.Tensor | None, str]:
        for _ in range(times):
            x = self.block(x)
        return (x * self.scale if times != 3 else None), "done"


def run_odd() -> None:
    torch.manual_seed(0)
    model, reference = Odd(), Odd()
    reference.load_state_dict(model.state_dict())
    fully_shard(model.block)
    fully_shard(model)
    for times in (1, 2, 3, 0, 2, 1):
        for each in (model, reference):
            out, text = each(mine(times), times)
            assert text == "done"
            if out is not None:
                out.square().sum().backward()
    same_gradients(model, reference)


class Segments(nn.Module):
    """Four blocks in two recomputed segments; blocks are recomputed inside them once more if ``nested``."""

    def __init__(self, nested: bool, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7, 9) for _ in range(4))
        self.nested, self.use_reentrant = nested, use_reentrant

    def segment(self, x: torch.Tensor, start: int) -> torch.Tensor:
        for block in self.blocks[start : start + 2]:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if self.nested else block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in (0, 2):
            x = checkpoint(self.segment, x, start, use_reentrant=self.use_reentrant)
        return x


def run_recomputed_segments() -> None:
    for nested in (False, True):
        for use_reentrant in (False, True):
            torch.manual_seed(0)
            model, reference = Segments(nested, use_reentrant), Segments(False, False)
            reference.load_state_dict(model.state_dict())
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            for step in range(3):
                for each in (model, reference):
                    each.zero_grad()
                    each(mine(step).requires_grad_()).square().sum().backward()
                same_gradients(model, reference)
                assert all(isinstance(param, DTensor) for param in model.parameters())


FLOWS = [
    run_recomputed_segments,
    run_inference_first,
    run_explicit_unshard,
    run_grad_function,
    run_two_models,
    run_create_graph,
    run_odd,
]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_flow(pool: WorkerPool, flow: object) -> None:
    pool.run(flow, num_ranks=2)
