"""Training scripts that are wrong, each after a public report, and scripts that are right; all of one prelude and a body."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

PRELUDE = """
import contextlib, copy, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
draws = torch.Generator().manual_seed(1 + rank)

class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 4)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def batch(number=4):
    return torch.randn(number, 8, generator=draws), torch.randint(0, 4, (number,), generator=draws)

def loss_of(model, number=4):
    x, y = batch(number)
    return F.cross_entropy(model(x), y)

def shard(model, fully_shard, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)

def step(model, optimizer, microbatches=1):
    for _ in range(microbatches):
        (loss_of(model) / microbatches).backward()
    update(optimizer)

def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()

def train(model, optimizer, microbatches=1):
    while True:
        step(model, optimizer, microbatches)

def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)

def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)
"""
TORCH = "from torch.distributed.fsdp import fully_shard, FSDPModule, MixedPrecisionPolicy\n"
OURS = "import shardwise\nfrom shardwise import fully_shard, MixedPrecisionPolicy\n"


@dataclass(frozen=True)
class Program:
    """One script.

    Attributes:
        body: after the prelude.  ranks: how many.  options: of the command.
        expected: a pattern of the output of a wrong one.  source: the report that it follows.
    """

    body: str
    expected: str = ""
    ranks: int = 2
    options: tuple[str, ...] = ()
    source: str = ""

    @property
    def text(self) -> str:
        """The whole script."""
        return PRELUDE + self.body


def torchs(text: str, expected: str = "", **more: Any) -> Program:
    """Return a program of torch's ``fully_shard``."""
    return Program(TORCH + textwrap.dedent(text), expected, **more)


def ours(text: str, expected: str = "", **more: Any) -> Program:
    """Return a program of this package."""
    return Program(OURS + textwrap.dedent(text), expected, **more)


STRICT = ("--strict",)
WRONG = {
    "optimizer_before_sharding": torchs("""
        model = Net()
        optimizer = sgd(model)
        shard(model, fully_shard)
        while True:
            step(model, optimizer)
            model.zero_grad()
        """, r"step 1  parameter of first.weight: equal to the value before the step",
            source="torchtitan: an optimizer built before fully_shard holds parameters that nothing trains"),
    "clip_by_norm_of_a_rank": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = sgd(model)
        while True:
            loss_of(model).backward()
            norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad.mul_(0.1 / norm.item())
            update(optimizer)
        """, r"step 1  gradient of [\w.]+: ", source="transformers 48792: clipping by each rank's own norm"),
    "clip_by_norm_of_a_rank_ours": ours("""
        model = shardwise.shard_model(Net(), min_unit_bytes=0)
        optimizer = sgd(model)
        while True:
            loss_of(model).backward()
            norm = sum(float(p.grad.to_local().square().sum()) for p in model.parameters()) ** 0.5
            for p in model.parameters():
                p.grad.to_local().mul_(0.1 / norm)
            update(optimizer)
        """, r"step 1  gradient of [\w.]+: ", source="Megatron-LM 6660: p.grad.norm() per rank"),
    "unsynced_given_up": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = sgd(model)
        while True:
            model.set_requires_gradient_sync(False)
            loss_of(model).backward()  # a bad microbatch, which is given up
            optimizer.zero_grad()
            model.set_requires_gradient_sync(True)
            step(model, optimizer)
        """, r"step 1  microbatch 2  gradient of [\w.]+: ",
            source="accelerate 3760: FSDP2 keeps gradients that zero_grad() should have cleared"),
    "aliased_memory": torchs("""
        model = Net()
        model.head, model.tail = nn.Linear(16, 8), nn.Linear(8, 16)
        model.tail.weight = nn.Parameter(model.first.weight.data)
        model.head.forward = lambda x, run=model.head.forward: model.tail(run(x))
        shard(model, fully_shard)
        train(model, sgd(model))
        """, r"step 1  parameter of (first|tail).weight: ",
            source="weights tied by their memory: FSDP2 trains two"),
    "norm_item": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = sgd(model)
        while True:
            loss_of(model).backward()
            norm = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
            for p in model.parameters():
                p.grad.mul_(0.1 / norm)
            update(optimizer)
        """, r"step 1  gradient of head.bias: differs by 0.2 of its norm",
            source="pytorch 166638: item() of a DTensor's norm is that of this rank's part"),
    "frozen_by_old_references": torchs("""
        model = Net()
        frozen = list(model.first.parameters())
        shard(model, fully_shard)
        for p in frozen:
            p.requires_grad_(False)
        train(model, sgd(model))
        """, r"step 1  (microbatch 1  )?gradient of first.(weight|bias): has one",
            source="transformers 45662: a frozen layer that trains"),
    "hook_divides_again": torchs("""
        model = shard(Net(), fully_shard)
        for p in model.blocks[1].parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', p.grad.div_(world)))
        train(model, sgd(model))
        """, r"in both runs: step 1  6 gradients \(blocks.1.*0.500 x their mean over ranks \(1/2 = 1/ranks: averaged twice",
            options=STRICT, source="Megatron-LM 7452: gradients averaged twice on one unit, by the script"),
    "reduction_divides_again": ours("""
        model = shard(Net(), shardwise.fully_shard)
        model.blocks[1].set_all_reduce_hook(lambda reduced: reduced.div_(world))
        train(model, sgd(model))
        """, r"step 1  microbatch 1  gradient of blocks.1.down.bias: 0.500 x the reference \(1/2 = 1/ranks",
            source="Megatron-LM 7452: gradients averaged twice on one unit"),
    "comm_hook_sums": torchs("""
        def sums(state, bucket):
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        model = DDP(Net())
        model.register_comm_hook(None, sums)
        train(model, sgd(model))
        """, r"step 1  microbatch 1  gradient of head.bias: 2.000 x the reference \(2 = ranks: summed",
            source="DeepSpeed 8432: gradients summed where they should be averaged"),
    "comm_hook_averages_twice": torchs("""
        def twice(state, bucket):
            work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)
            return work.get_future().then(lambda done: done.value()[0].div_(world))
        model = DDP(Net())
        model.register_comm_hook(None, twice)
        train(model, adamw(model), 2)
        """, r"gradient of head.bias: 0.250 x the reference \(1/4 = 1/ranks",
            ranks=4, source="Megatron-LM 7186: averaged twice"),
    "comm_hook_forgets_to_send": torchs("""
        def own(state, bucket):
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        model = DDP(Net())
        model.register_comm_hook(None, own)
        train(model, sgd(model))
        """, r"step 1  microbatch 1  gradient of head.bias: this rank's own part",
            source="DeepSpeed 8443: gradients of a bucket that are not reduced"),
    "momentum_of_another_rank": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = sgd(model, momentum=0.9)
        step(model, optimizer)
        for state in optimizer.state.values():  # as a resume that loads the file of rank 0 on every rank
            local = state["momentum_buffer"].to_local()
            if local.shape[0] == 8:
                dist.broadcast(local, 0)
        train(model, optimizer)
        """, r"step 2  (parameter|optimizer state) of [\w.]+(.momentum_buffer)?: differs by",
            source="torchtitan 4382: momentum of another rank after a resume"),
    "dummy_step": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = adamw(model)
        if isinstance(model.head.weight, DTensor):  # an engine that makes its state with a step of zeros
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            update(optimizer)
        train(model, optimizer)
        """, r"step 1  ", source="Megatron-LM 7452: a state that a dummy step has moved"),
    "never_synced": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = sgd(model)
        model.set_requires_gradient_sync(False)
        train(model, optimizer)
        """, r"gradient of head.bias: has none, and the reference has one",
            source="a last microbatch whose gradients are not synced"),
    "step_within_no_sync": torchs("""
        model = DDP(Net())
        optimizer = sgd(model)
        while True:
            with model.no_sync():
                step(model, optimizer)
        """, r"between ranks, in the plain run: step 1  parameter of first.weight: differs between ranks 0 and 1",
            source="gradients that were never averaged"),
    "rate_by_rank": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
        train(model, optimizer)
        """, r"between ranks, in the plain run: step 1  the learning rate: \[0.1\] on rank 0; \[0.2\] on rank 1",
            source="a learning rate per rank"),
    "schedule_on_local_loss": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = sgd(model)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for number in range(9):
            step(model, optimizer)
            schedule.step(float(number * (2 * rank - 1)))
        """, r"the learning rate: \[0.1\] on rank 0; \[0.01\] on rank 1", source="a scheduler on a local loss"),
    "step_skipped_on_one_rank": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = sgd(model)
        for number in range(9):
            loss_of(model).backward()
            if (rank, number) != (1, 1):
                optimizer.step()
            optimizer.zero_grad()
        """, r"step 2  the number of backwards before the step: 2 on rank 0; 3 on rank 1",
            source="a step skipped on one rank (a local inf)"),
    "no_wrapper": torchs("""
        model = Net()
        train(model, sgd(model))
        """, r"between ranks, in the plain run: step 1  parameter of first.weight: differs between ranks 0 and 1",
            source="Megatron 1736: a model that nothing wraps"),
    "experts_over_the_wrong_axis": torchs("""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = Net()
        torch.manual_seed(mesh["ep"].get_local_rank())
        model.expert = nn.Linear(8, 16)
        fully_shard(model.expert, mesh=mesh["ep"])
        model.first.forward = lambda x, first=model.first: F.linear(x, first.weight, first.bias) + model.expert(x)
        shard(model, fully_shard)
        train(model, sgd(model))
        """, r"parameter of expert.weight: differs between ranks 0 and 2",
            ranks=4, source="Megatron-LM 5974: experts averaged over the wrong axis"),
    "divided_by_hand": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = sgd(model)
        while True:
            loss_of(model).backward()
            for p in model.parameters():
                p.grad.div_(world)
            update(optimizer)
        """, r"step 1  16 gradients .*: 0.500 x their mean over ranks \(1/2 = 1/ranks: averaged twice",
            options=STRICT, source="torchtitan 2318: gradients divided twice"),
    "last_microbatch_alone": ours("""
        model = shardwise.replicate(Net())
        optimizer = adamw(model)
        while True:
            for _ in range(3):
                optimizer.zero_grad()
                (loss_of(model) / 3).backward()
            optimizer.step()
        """, r"step 1  16 gradients .*: the last microbatch alone",
            options=STRICT, source="transformers: accumulation whose last microbatch alone counts"),
    "same_batch": torchs("""
        model = DDP(Net())
        optimizer = sgd(model)
        draws = torch.Generator().manual_seed(1)  # without the rank, as a sampler that nobody told it
        train(model, optimizer)
        """, r"step 1  data: ranks 0 and 1 have the same batch",
            options=STRICT, source="set_epoch or num_replicas forgotten, so that ranks have the same batch"),
    "untied_by_to_empty": torchs("""
        class Tied(Net):
            def __init__(self):
                super().__init__()
                self.first, self.head = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
                self.tail = nn.Linear(8, 16, bias=False)
                self.tail.weight = self.first.weight
            def forward(self, x):
                return super().forward(self.first(x)[..., :8] + self.tail(x)[..., :8])
        with torch.device("meta"):
            model = Tied()
        shard(model, fully_shard)
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        train(model, sgd(model))
        """, r"first.weight and tail.weight: were one parameter when they were wrapped, and are several now",
            options=STRICT, source="a tied head untied by to_empty"),
    "zero_grad_forgotten": torchs("""
        model = DDP(Net())
        optimizer = sgd(model)
        while True:
            loss_of(model).backward()
            optimizer.step()
        """, r"step 2  16 gradients .*: gradients of earlier backwards are still in it",
            options=STRICT, source="zero_grad forgotten"),
    "summed_by_hand": torchs("""
        model = Net()
        optimizer = sgd(model)
        while True:
            loss_of(model).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            update(optimizer)
        """, r"step 1  16 gradients .*: 2.000 x their mean over ranks \(2 = ranks: summed",
            options=STRICT, source="gradients summed where they should be averaged"),
    "gan_leaks": torchs("""
        made, judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), Net()
        for each in (made, judge):
            fully_shard(each)
        of_made = torch.optim.Adam(made.parameters(), lr=0.01)
        of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
        while True:
            judge(torch.cat([batch()[0], made(torch.randn(4, 4, generator=draws)).detach()])).mean().backward()
            of_judge.step()
            of_judge.zero_grad()  # before the other loss, which leaves gradients here
            judge(made(torch.randn(4, 4, generator=draws))).mean().backward()
            of_made.step()
            of_made.zero_grad()
        """, r"step 2  16 gradients \(model2.*: gradients of earlier backwards are still in it",
            options=STRICT, source="a GAN loop under FSDP2 whose judge learns from both losses"),
    "buffers_of_ranks": ours("""
        model = Net()
        model.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        shard(model, fully_shard)
        train(model, sgd(model))
        """, r"step 1  buffer of first.1.running_mean: differs between ranks 0 and 1",
            options=STRICT, source="fairseq2 1081: BatchNorm's buffers of one rank in a checkpoint"),
    "buffers_summed": torchs("""
        model = Net()
        model.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        shard(model, fully_shard)
        optimizer = sgd(model)
        while True:
            loss_of(model).backward()
            if isinstance(model.head.weight, DTensor):  # an engine that shares buffers by a sum
                dist.all_reduce(model.first[1].running_var)
            update(optimizer)
        """, r"step 1  buffer of first.1.running_var: (differs|[\d.]+ x)",
            source="BatchNorm's buffers under FSDP"),
}  # fmt: skip


RIGHT = {
    "torchs_fully_shard": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = adamw(model)
        for _ in range(4):
            for number in range(3):
                model.set_requires_gradient_sync(number == 2)
                (loss_of(model) / 3).backward()
            update(optimizer)
        """),
    "shard_model": ours("""
        model = shardwise.shard_model(Net(), min_unit_bytes=0)
        print(shardwise.describe_units(model))
        optimizer = adamw(model)
        while True:
            loss_of(model).backward()
            shardwise.clip_grad_norm_(model.parameters(), 0.1)
            update(optimizer)
        """),
    "hsdp": torchs("""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = shard(Net(), fully_shard, mesh=mesh)
        train(model, sgd(model, momentum=0.9), 2)
        """, ranks=4),
    "hfsdp": ours("""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = shardwise.shard_model(Net(), strategy="hfsdp", mesh=mesh, min_unit_bytes=0)
        train(model, adamw(model))
        """, ranks=4),
    "ddp_and_zero": torchs("""
        from torch.distributed.optim import ZeroRedundancyOptimizer
        model = DDP(Net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        train(model, optimizer)
        """),
    "zero_of_ours": ours("""
        model = shardwise.shard_model(Net(), strategy="zero1")
        optimizer = shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, partition="even")
        while True:
            loss_of(model).backward()
            optimizer.clip_grad_norm_(0.5)
            update(optimizer)
        """, ranks=4),
    "ddp_no_sync": torchs("""
        model = DDP(Net())
        optimizer = adamw(model)
        while True:
            for number in range(4):
                with model.no_sync() if number < 3 else contextlib.nullcontext():
                    (loss_of(model) / 4).backward()
            update(optimizer)
        """),
    "bf16": torchs("""
        model = shard(Net(), fully_shard, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        train(model, adamw(model), 2)
        """),
    "bf16_of_ours": ours("""
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        model = shardwise.shard_model(Net(), min_unit_bytes=0, mp_policy=policy)
        train(model, sgd(model), 2)
        """),
    "autocast": torchs("""
        model = DDP(Net())
        optimizer = adamw(model)
        while True:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model)
            loss.backward()
            update(optimizer)
        """),
    "tied": torchs("""
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.block, self.head = nn.Embedding(12, 16), Block(), nn.Linear(16, 12, bias=False)
                self.head.weight = self.embed.weight
            def forward(self, ids):
                return self.head(self.block(self.embed(ids)))
        model = Tied()
        fully_shard(model.block)
        fully_shard(model)
        optimizer = adamw(model)
        while True:
            ids = torch.randint(0, 12, (4, 6), generator=draws)
            F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
            update(optimizer)
        """),
    "lora": torchs("""
        class Adapted(nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base = base.requires_grad_(False)
                self.a = nn.Parameter(torch.randn(4, base.in_features) / 8)
                self.b = nn.Parameter(torch.zeros(base.out_features, 4))
            def forward(self, x):
                return self.base(x) + F.linear(F.linear(x, self.a), self.b)
        model = Net()
        for block in model.blocks:
            block.up = Adapted(block.up)
        model.first.requires_grad_(False)
        shard(model, fully_shard)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        train(model, optimizer)
        """),
    "gan": ours("""
        made, judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), Net()
        for each in (made, judge):
            fully_shard(each)
        of_made = torch.optim.Adam(made.parameters(), lr=0.01)
        of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
        while True:
            noise = torch.randn(4, 4, generator=draws)
            real, _ = batch()
            fake = made(noise)
            of_judge.zero_grad()
            (judge(real).mean() - judge(fake.detach()).mean()).backward()
            of_judge.step()
            of_made.zero_grad()
            judge(fake).mean().backward()
            of_made.step()
        """),
    "gan_ddp": torchs("""
        made, judge = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))), DDP(Net())
        of_made = torch.optim.Adam(made.parameters(), lr=0.01)
        of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
        while True:
            noise = torch.randn(4, 4, generator=draws)
            of_judge.zero_grad()
            judge(torch.cat([batch()[0], made(noise).detach()])).mean().backward()
            of_judge.step()
            of_made.zero_grad()
            for p in judge.parameters():
                p.requires_grad_(False)
            judge.module(made(noise)).mean().backward()
            for p in judge.parameters():
                p.requires_grad_(True)
            of_made.step()
        """),
    "experts": torchs("""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = Net()
        torch.manual_seed(mesh["ep"].get_local_rank())
        model.expert = nn.Linear(8, 16)
        fully_shard(model.expert, mesh=mesh["dp"])
        model.first.forward = lambda x, first=model.first: F.linear(x, first.weight, first.bias) + model.expert(x)
        shard(model, fully_shard)
        train(model, sgd(model))
        """, ranks=4),
    "checkpointing": torchs("""
        from torch.utils.checkpoint import checkpoint
        model = Net()
        for block in model.blocks:
            block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False)
        shard(model, fully_shard)
        train(model, adamw(model))
        """),
    "compiled_blocks": torchs("""
        model = Net()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        shard(model, fully_shard)
        train(model, adamw(model))
        """),
    "batch_norm": torchs("""
        model = Net()
        model.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        model = DDP(model)
        train(model, sgd(model))
        """),
    "dropout": ours("""
        model = Net()
        model.first = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3))
        shard(model, fully_shard)
        train(model, adamw(model))
        """),
    "grad_scaler": torchs("""
        model = DDP(Net())
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu")
        while True:
            scaler.scale(loss_of(model)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """),
    "ema": torchs("""
        model = Net()
        ema = copy.deepcopy(model).requires_grad_(False)
        shard(model, fully_shard)
        shard(ema, fully_shard)
        optimizer = adamw(model)
        while True:
            step(model, optimizer)
            with torch.no_grad():
                for mean, p in zip(ema.parameters(), model.parameters()):
                    mean.lerp_(p, 0.1)
                ema(batch()[0])
                ema.reshard()
        """),
    "two_optimizers": ours("""
        model = shard(Net(), fully_shard)
        matrices = {n: p for n, p in model.blocks.named_parameters() if p.ndim == 2}
        others = [p for p in model.parameters() if all(p is not each for each in matrices.values())]
        first = shardwise.ShardedOptimizer(matrices, torch.optim.Muon, lr=0.01)
        second = shardwise.ShardedOptimizer([{"params": others}], torch.optim.AdamW, lr=0.01)
        while True:
            loss_of(model).backward()
            for optimizer in (first, second):
                update(optimizer)
        """),
    "offload": ours("""
        model = shard(Net(), fully_shard, offload_policy=shardwise.CPUOffloadPolicy())
        offload = shardwise.OptimizerOffload()
        optimizer = shardwise.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.01, offload=offload)
        train(model, optimizer)
        """),
    "compression": ours("""
        policy = shardwise.CompressionPolicy(gather="int8", reduce="int8", min_bytes=0)
        model = shard(Net(64), fully_shard, compression=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train(model, optimizer)
        """),
    "from_meta": torchs("""
        with torch.device("meta"):
            model = Net()
        shard(model, fully_shard)
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        train(model, adamw(model))
        """),
    "closure": torchs("""
        model = shard(Net(), fully_shard)
        optimizer = adamw(model)
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss
        while True:
            optimizer.step(closure)
        """),
    "saves_and_resumes": torchs("""
        model = DDP(Net())
        optimizer = adamw(model)
        if os.path.exists("last.pt"):
            model.load_state_dict(torch.load("last.pt"))
        for _ in range(5):
            step(model, optimizer)
            if rank == 0:
                torch.save(model.state_dict(), "last.pt")
        """),
    "reproducible": ours("""
        model = shardwise.shard_model(Net(), min_unit_bytes=0)
        optimizer = adamw(model)
        fixed = shardwise.Reproducible(model, optimizer, num_microbatches=4)
        data = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
        while True:
            for number in fixed.microbatches():
                (model(data[number]).square().mean() / 4).backward()
            fixed.clip_grad_norm_(1.0)
            update(optimizer)
        """),
    "fsdp1": torchs("""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        mesh = init_device_mesh("cpu", (world,))
        policy = ModuleWrapPolicy({Block})
        model = FSDP(Net(), device_mesh=mesh, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = adamw(model)
        while True:
            loss_of(model).backward()
            model.clip_grad_norm_(1.0)
            update(optimizer)
        """),
}  # fmt: skip
