"""Ranks that are threads of one process: no state of an engine may be global to the process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from helpers.models import Block, batch_for, build, units_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_distributed import MultiThreadedTestCase

from shardwise import FSDPModule, fully_shard
from shardwise.consistency.store import are_threads


class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_parity_with_one_process(self) -> None:
        for reshard in (True, False, 2):
            reference = build("plain")
            for param in reference.parameters():
                dist.broadcast(param.detach(), src=0)
            model = copy.deepcopy(reference)
            for module in units_of("plain", model):
                fully_shard(module, reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            batch = batch_for("plain", 0, 8)
            for _ in range(3):
                reference(batch).square().mean().backward()
                model(batch.chunk(4)[self.rank]).square().mean().backward()
            for param, other in zip(model.parameters(), reference.parameters(), strict=True):
                self.assertIsInstance(param, DTensor)
                torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)

    def test_hybrid_mesh_and_registration(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(Block(8, 4), Block(8, 4))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.randn(2, 8)).sum().backward()
        self.assertTrue(are_threads())  # whose one generator gives replicas different weights: no error
        self.assertTrue(all(isinstance(module, FSDPModule) for module in (model, *model)))
        self.assertTrue(all(isinstance(param.grad, DTensor) for param in model.parameters()))
