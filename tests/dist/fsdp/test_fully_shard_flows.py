"""Ways to run a sharded model that are not forward, backward, step."""

from __future__ import annotations

import torch
from helpers.compare import assert_averaged
from helpers.models import Block, build
from helpers.ranks import on_ranks
from helpers.sharded import batch, build_sharded
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard, share_comm_ctx


@on_ranks(2)
def test_a_model_may_infer_before_and_between_steps() -> None:
    for mode in (torch.inference_mode, torch.no_grad):
        model, reference = build_sharded(), build("plain")
        with mode():
            assert torch.equal(model(batch()), reference(batch()))
        for _ in range(2):
            model(batch()).square().sum().backward()
            reference(batch()).square().sum().backward()
            with mode():
                model(batch(1))
        assert_averaged(model, reference)


@on_ranks(2)
def test_units_unsharded_by_hand_train_alike() -> None:
    model, reference = build_sharded(), build("plain")
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
    model(batch()).square().sum().backward()
    reference(batch()).square().sum().backward()
    assert_averaged(model, reference)
    model[2].unshard(async_op=True)
    model.zero_grad()
    reference.zero_grad()
    model(batch(2)).square().sum().backward()
    reference(batch(2)).square().sum().backward()
    assert_averaged(model, reference)


@on_ranks(2)
def test_autograd_grad_of_an_input_touches_no_parameter() -> None:
    model, reference = build_sharded(), build("plain")
    x, y = batch().requires_grad_(), batch().requires_grad_()
    (left,) = torch.autograd.grad(model(x).square().sum(), x)
    (right,) = torch.autograd.grad(reference(y).square().sum(), y)
    assert torch.equal(left, right)
    assert all(param.grad is None and isinstance(param, DTensor) for param in model.parameters())
    model(batch()).square().sum().backward()
    reference(batch()).square().sum().backward()
    assert_averaged(model, reference)


@on_ranks(2)
def test_two_models_share_a_communication_context() -> None:
    generator, critic = build_sharded(seed=1), build_sharded(seed=2)
    plain = build("plain", 1), build("plain", 2)
    share_comm_ctx([generator, critic])
    for step in range(3):
        critic(generator(batch(step))).square().sum().backward()
        plain[1](plain[0](batch(step))).square().sum().backward()
        critic(generator(batch(step)).detach()).sum().backward()
        plain[1](plain[0](batch(step)).detach()).sum().backward()
    for model, reference in zip((generator, critic), plain, strict=True):
        assert_averaged(model, reference)


@on_ranks(2)
def test_a_gradient_may_be_differentiated_again() -> None:
    model, reference = build_sharded(), build("plain")
    for each in (model, reference):
        x = batch().requires_grad_()
        (grad,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        (grad.square().sum() + each(x).sum()).backward()
    assert_averaged(model, reference)


class Odd(nn.Module):
    """Returns what is no tensor, and calls its block only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(7, 5), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, times: int) -> tuple[torch.Tensor | None, str]:
        for _ in range(times):
            x = self.block(x)
        return (x * self.scale if times != 3 else None), "done"


@on_ranks(2)
def test_a_block_may_run_any_number_of_times_and_return_no_tensor() -> None:
    torch.manual_seed(0)
    model, reference = Odd(), Odd()
    reference.load_state_dict(model.state_dict())
    fully_shard(model.block)
    fully_shard(model)
    for times in (1, 2, 3, 0, 2, 1):
        for each in (model, reference):
            out, text = each(batch(times), times)
            assert text == "done"
            if out is not None:
                out.square().sum().backward()
    assert_averaged(model, reference)


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


@on_ranks(2)
def test_recomputed_segments_may_hold_several_units() -> None:
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
                    each(batch(step).requires_grad_()).square().sum().backward()
                assert_averaged(model, reference)
                assert all(isinstance(param, DTensor) for param in model.parameters())
