"""The autograd behaviour that torch's own tests ask of fully_shard, under their names."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools

import torch
import torch.distributed as dist
from helpers.ranks import FOUR, on_ranks
from helpers.torchs_tests import check, check_sharded_parity
from torch import nn
from torch.testing._internal.common_fsdp import MLP, DoubleLinear
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

from shardwise import fully_shard


def divide_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.div_(dist.get_world_size())


def run_unused(part: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for reshard in (True, False, 2):
        torch.manual_seed(42)
        model = DoubleLinear(dim=24, use_second_linear=part == "output")
        reference = copy.deepcopy(model)
        units = [model.lin1, model] if part == "output" else [model.lin1, model.lin2, model]
        for unit in units:
            fully_shard(unit, reshard_after_forward=reshard)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
        torch.manual_seed(1)
        for step in range(5):
            whole = torch.rand((2 * size, 24))
            losses = []
            for each, inp in ((reference, whole), (model, whole.chunk(size)[rank])):
                out = each(inp)
                if part == "output":
                    loss = (out[0] * out[1]).sum() if step < 3 else out[0].sum()
                else:
                    loss = out.sum()
                loss.backward()
                losses.append(loss.detach())
            divide_gradients(reference)
            dist.all_reduce(losses[1])
            check.assertEqual(losses[0], losses[1])
            check_sharded_parity(reference, model)
            for optim in optims:
                optim.step()
                optim.zero_grad(set_to_none=bool(step % 2))
            check_sharded_parity(reference, model)


@on_ranks(2, FOUR)
def test_unused_forward_output() -> None:
    run_unused(part="output")


@on_ranks(2, FOUR)
def test_unused_forward_module() -> None:
    run_unused(part="module")


Pair = collections.namedtuple("Pair", ["x", "others"])


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    tag: str


CONTAINERS = {
    "list": (lambda x: [x, "tag"], lambda c: c[0]),
    "tuple": (lambda x: (x, 3), lambda c: c[0]),
    "named tuple": (lambda x: Pair(x, [x.detach()]), lambda c: c.x),
    "dict": (lambda x: {"x": x, "n": 1}, lambda c: c["x"]),
    "default dict": (lambda x: collections.defaultdict(list, x=x), lambda c: c["x"]),
    "dataclass": (lambda x: Record(x, "tag"), lambda c: c.x),
    "nested": (lambda x: {"deep": [Record(x, "tag")]}, lambda c: c["deep"][0].x),
    "view": (lambda x: x.view(-1).view(x.shape), lambda c: c),
}


class Boxed(nn.Module):
    """A linear layer whose input and output lie in a container."""

    def __init__(self, kind: str, in_place: bool) -> None:
        super().__init__()
        self.linear, self.kind, self.in_place = nn.Linear(8, 8), kind, in_place

    def forward(self, box: object) -> object:
        make, take = CONTAINERS[self.kind]
        x = take(box)
        assert isinstance(x, torch.Tensor)
        return make(self.linear(x))


@on_ranks(2)
def test_nontensor_activations_and_views() -> None:
    for kind, in_place in itertools.product(CONTAINERS, (False, True)):
        make, take = CONTAINERS[kind]
        torch.manual_seed(42)
        model = nn.Sequential(*(Boxed(kind, in_place) for _ in range(3)))
        reference = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module)
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(2):
            inp = torch.randn(2, 8)
            for each in (reference, model):
                out = take(each(make(inp)))
                if in_place:
                    out += 1.0
                out.square().sum().backward()
            for param in reference.parameters():
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
            check_sharded_parity(reference, model)
            reference.zero_grad()
            model.zero_grad()


@on_ranks(2)
def test_post_acc_grad_hook_runs() -> None:
    counts: dict[str, int] = collections.defaultdict(int)

    def hook(name: str, param: torch.Tensor) -> None:
        assert param.grad is not None
        counts[name] += 1

    model = MLP(8)
    for module in (model.in_proj, model.out_proj, model):
        fully_shard(module)
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(hook, name))
    model(torch.randn((2, 8))).sum().backward()
    assert counts == {name: 1 for name, _ in model.named_parameters()}


@on_ranks(2)
def test_post_acc_grad_hook_optim_parity() -> None:
    torch.manual_seed(42)
    args = ModelArgs(dropout_p=0.0)
    model = Transformer(args)
    reference = copy.deepcopy(model)
    for each in (reference, model):
        for module in itertools.chain(each.layers, [each]):
            fully_shard(module)
    settings = {"lr": 1e-2, "foreach": False}
    ref_optim = torch.optim.AdamW(reference.parameters(), **settings)
    ref_scheduler = torch.optim.lr_scheduler.StepLR(ref_optim, step_size=5)
    optims = {param: torch.optim.AdamW([param], **settings) for param in model.parameters()}
    schedulers = {param: torch.optim.lr_scheduler.StepLR(optim, step_size=5) for param, optim in optims.items()}

    def optim_hook(param: nn.Parameter) -> None:
        optims[param].step()
        optims[param].zero_grad()
        schedulers[param].step()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(optim_hook)
    torch.manual_seed(42 + dist.get_rank())
    inp = torch.randint(0, args.vocab_size, (2, 16))
    for _ in range(6):
        ref_loss = reference(inp).sum()
        ref_loss.backward()
        ref_optim.step()
        ref_optim.zero_grad()
        ref_scheduler.step()
        loss = model(inp).sum()
        loss.backward()
        assert torch.equal(ref_loss, loss)
        for left, right in zip(reference.parameters(), model.parameters(), strict=True):
            assert torch.equal(left.to_local(), right.to_local())
