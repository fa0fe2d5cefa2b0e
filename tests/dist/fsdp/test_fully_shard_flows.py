"""Ways to run a sharded model that are not forward, backward, step."""

from __future__ import annotations

import torch
from helpers.compare import assert_averaged
from helpers.models import build
from helpers.ranks import on_ranks
from helpers.sharded import batch, build_sharded
from torch.distributed.tensor import DTensor

from shardwise import share_comm_ctx


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
