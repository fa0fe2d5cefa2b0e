"""What the tests under torch's own names share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_utils import TestCase

from helpers.compare import comparable

check = TestCase()
Reshard = bool | int


def same_losses(losses: list[torch.Tensor]) -> None:
    """Compare sums of logits: on two ranks as torch's tests do; the numbers are the same to the bit there.

    Four ranks' gradients are added in another order than DDP adds them.  After a step of Adam weights differ by 1.5e-8, and a
    logit of 16 by its last bit, 1.9e-6; a sum of 192 logits that cancel to -2.0 then differs by 2.3e-5.
    """
    options = {} if dist.get_world_size() == 2 else {"rtol": 1.3e-6, "atol": 4e-5}
    check.assertEqual(losses[0], losses[1], **options)


def check_sharded_parity(reference: nn.Module, model: nn.Module, prefixes: Sequence[str] = ()) -> None:
    """Compare a model's shards, and their gradients, with the rank's own parts of a plain reference's: nothing is sent."""
    pairs = zip(reference.named_parameters(), model.named_parameters(), strict=True)
    for (name, expected), (sharded_name, sharded) in pairs:
        for prefix in prefixes:
            name, sharded_name = name.replace(prefix, ""), sharded_name.replace(prefix, "")
        check.assertEqual(name, sharded_name)
        check.assertIsInstance(sharded, DTensor)
        check.assertEqual(*comparable(sharded, expected))
        check.assertEqual(sharded.grad is None, expected.grad is None)
        if sharded.grad is not None:
            check.assertEqual(sharded.grad.placements, sharded.placements)
            check.assertEqual(*comparable(sharded.grad, expected.grad))


def train_beside(
    reference: nn.Module, model: nn.Module, inputs: Callable[[], torch.Tensor], steps: int = 4, **adam: object
) -> None:
    adam.setdefault("foreach", True)  # for each parameter alone, DTensors would take most of the time of a test
    optims = [torch.optim.Adam(each.parameters(), lr=1e-2, **adam) for each in (reference, model)]
    for iter_idx in range(steps):
        inp = inputs()
        losses: list[torch.Tensor] = []
        for each, optim in zip((reference, model), optims, strict=True):
            optim.zero_grad(set_to_none=iter_idx % 2 == 0)
            losses.append(each(inp).sum())
            losses[-1].backward()
            optim.step()
        same_losses(losses)
