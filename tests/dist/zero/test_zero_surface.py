"""What torch's own tests ask of ZeroRedundancyOptimizer, under their names, on gloo and CPU."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import average_gradients, from_rank
from helpers.ranks import FOUR, on_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import SGD, Adam, AdamW

from shardwise import ZeroRedundancyOptimizer
from shardwise.zero.optimizer import zero_backend


class SGDWithStepKWArg(SGD):
    def step(self, closure=None, kwarg=None):
        super().step()
        kwarg.append(5)


class SGDWithNewKey(SGD):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["new_key"] = 0.1


class SGDWithoutClosure(SGD):
    def step(self):
        return super().step()


@on_ranks(1)
def test_state_dict() -> None:
    x = torch.tensor([1.0], requires_grad=True)
    o = ZeroRedundancyOptimizer([x], optimizer_class=SGD, lr=0.1, momentum=0.9)
    x.backward()
    o.step()
    assert x.item() == pytest.approx(0.9)
    assert torch.equal(o.optim.state[x]["momentum_buffer"], torch.tensor([1.0]))
    o.zero_grad()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        o.state_dict()
    o.consolidate_state_dict(to=0)
    saved = o.state_dict()
    group = saved["param_groups"][0]
    assert {
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "dampening": 0.0,
    }.items() <= group.items()
    for key in group:
        if key != "params":
            assert group[key] == o.param_groups[0][key]
    o = ZeroRedundancyOptimizer([x], optimizer_class=SGD, lr=0.01)
    o.load_state_dict(saved)
    assert torch.equal(o.optim.state[x]["momentum_buffer"], torch.tensor([1.0]))
    assert o.param_groups[0]["lr"] == 0.1
    x.backward()
    o.step()
    assert x.item() == pytest.approx(0.71)
    assert o.optim.state[x]["momentum_buffer"].item() == pytest.approx(1.9)
    assert saved["state"][0]["momentum_buffer"].item() == 1.0  # the dict is a copy: training does not change it
    assert o.param_groups[0]["params"][0].device == x.device


@on_ranks(1, 2, FOUR)
def test_lr_scheduler() -> None:
    x, x2 = (torch.tensor([1.0], requires_grad=True) for _ in range(2))
    o, o2 = ZeroRedundancyOptimizer([x], optimizer_class=SGD, lr=0.01), SGD([x2], lr=0.01)
    s, s2 = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in (o, o2))
    for _ in range(5):
        x.backward()
        o.zero_grad(set_to_none=False)
        o.step()
        s.step()
        x2.backward()
        o2.zero_grad(set_to_none=False)
        o2.step()
        s2.step()
        x.backward()
        o.step()
        x2.backward()
        o2.step()
        assert torch.equal(x, x2)
        assert o.param_groups[0]["lr"] == o2.param_groups[0]["lr"]
    assert x.item() != 1.0


@on_ranks(1, 2, FOUR)
def test_step_with_kwargs() -> None:
    kwarg: list[Any] = []
    x = torch.tensor([1.0], requires_grad=True)
    o = ZeroRedundancyOptimizer([x], optimizer_class=SGDWithStepKWArg, lr=0.1)
    x.backward()
    o.step(0, kwarg=kwarg)
    assert kwarg == [5]
    assert x.item() == pytest.approx(0.9)


@on_ranks(1, 2, FOUR)
def test_step_with_extra_inner_key() -> None:
    x = torch.tensor([1.0], requires_grad=True)
    o = ZeroRedundancyOptimizer([x], optimizer_class=SGDWithNewKey, lr=0.1)
    x.backward()
    o.step()
    assert o.param_groups[0]["new_key"] == 0.1
    assert x.item() == pytest.approx(0.9)


@on_ranks(1, 2, FOUR)
def test_step_without_closure() -> None:
    x = torch.tensor([1.0], requires_grad=True)
    o = ZeroRedundancyOptimizer([x], optimizer_class=SGDWithoutClosure, lr=0.1)
    x.backward()
    o.step()
    assert x.item() == pytest.approx(0.9)


@on_ranks(1, 2, FOUR)
def test_zero_grad() -> None:
    for partition in ("whole", "even"):
        torch.manual_seed(0)  # the same gradients on all ranks
        x = torch.rand(1)
        m = torch.nn.Linear(1, 1)
        o = ZeroRedundancyOptimizer(m.parameters(), optimizer_class=SGD, lr=0.01, partition=partition)
        m(x).backward(x)
        assert m.weight.grad is not None
        assert torch.count_nonzero(m.weight.grad) > 0
        assert torch.count_nonzero(m.bias.grad) > 0
        o.step()
        o.zero_grad()
        assert m.weight.grad is None
        assert m.bias.grad is None


@on_ranks(1, 2, FOUR)
def test_constructor() -> None:
    m = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
    weights, biases = [layer.weight for layer in m], [layer.bias for layer in m]
    inputs = [
        ([], ValueError),
        (torch.randn(1), TypeError),
        (1.2, TypeError),
        ([{"params": weights}, {"params": biases}], None),
        ([*m.parameters(), 42], TypeError),
        ([{"params": weights}, m[0].bias], TypeError),
        ([{"weights": weights}], ValueError),
        (m.parameters(), None),
        (list(m.parameters()), None),
    ]
    for params, error in inputs:
        with pytest.raises(error) if error else nullcontext():
            ZeroRedundancyOptimizer(params, optimizer_class=SGD, lr=0.01)
    groups = [{"params": weights, "weight_decay": 0.0}, {"params": biases, "weight_decay": 0.01}]
    o = ZeroRedundancyOptimizer(groups, optimizer_class=AdamW, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    assert len(o.param_groups) == len(o.optim.param_groups) == 2
    assert [group["weight_decay"] for group in o.optim.param_groups] == [0.0, 0.01]
    for options in ({"partition": "rows"}, {"lr": -1.0}):
        with pytest.raises(ValueError):
            ZeroRedundancyOptimizer(m.parameters(), SGD, **options)


@on_ranks(1, 2, FOUR)
def test_functional_optimizers() -> None:
    from torch.distributed.optim.functional_adam import _FunctionalAdam

    x = [torch.ones(2, requires_grad=True)]
    with pytest.raises(ValueError, match="functional optimizer"):
        ZeroRedundancyOptimizer(x, _FunctionalAdam, lr=0.1)
    assert type(ZeroRedundancyOptimizer(x, _FunctionalAdam, overlap_with_ddp=True, lr=0.1).optim) is Adam


@on_ranks(1, 2, FOUR)
def test_same_dense_param_type() -> None:
    sparse = torch.sparse_coo_tensor(size=(2, 3))
    for params in (
        [sparse],
        [torch.zeros(1), torch.zeros(1, dtype=torch.double)],
        [torch.zeros(1), torch.ones(1), sparse],
    ):
        with pytest.raises(ValueError, match="the same dense type"):
            ZeroRedundancyOptimizer(params, optimizer_class=SGD, lr=0.01)
    with pytest.raises(ValueError, match="mixed_dtypes=True"):
        ZeroRedundancyOptimizer([torch.zeros(1), torch.zeros(1, dtype=torch.double)], optimizer_class=SGD, lr=0.01)


@on_ranks(2, FOUR)
def test_step() -> None:
    x = torch.tensor([float(dist.get_rank() + 1)])
    m = torch.nn.Linear(1, 1)
    m.weight.data, m.bias.data = torch.tensor([[1.0]]), torch.tensor([2.0])
    m_zero = copy.deepcopy(m)
    o, o_zero = SGD(m.parameters(), lr=0.01), ZeroRedundancyOptimizer(m_zero.parameters(), SGD, lr=0.01)
    for model, optimizer in ((m, o), (m_zero, o_zero)):
        model(x).backward(x)
        average_gradients(model)
        optimizer.step()
    assert torch.equal(m.weight, m_zero.weight)
    assert torch.equal(m.bias, m_zero.bias)
    assert m.weight.item() != 1.0


@on_ranks(2, FOUR)
def test_step_with_closure() -> None:
    for bucket_view in (False, True):
        for partition in ("whole", "even"):
            x = torch.tensor([float(dist.get_rank() + 1)])
            target = x * 1.0 + 2.0 + 1.0
            loss_fn = torch.nn.L1Loss()
            m = torch.nn.Linear(1, 1)
            m.weight.data, m.bias.data = torch.tensor([[1.0]]), torch.tensor([2.0])
            o = ZeroRedundancyOptimizer(
                m.parameters(), SGD, parameters_as_bucket_view=bucket_view, partition=partition, lr=0.1
            )
            m(x).backward(x)
            average_gradients(m)

            def closure(o=o, m=m, x=x, target=target, loss_fn=loss_fn):
                o.zero_grad()
                loss = loss_fn(m(x), target)
                loss.backward()
                return loss

            loss = o.step(closure=closure)
            assert loss.item() == 1.0
            # As in torch's test, the closure's gradients are not averaged: the owner's own decide.
            owner = next(p.owner for p in zero_backend(o).rank_partition.slices if p.tensor == 0)
            assert torch.allclose(m.weight, torch.tensor([[1.0 + 0.1 * (owner + 1)]]))
            assert torch.allclose(m.bias, torch.tensor([2.1]))


@on_ranks(2, FOUR)
def test_sharding() -> None:
    sizes = [9, 7, 5, 3]
    params = [torch.rand(size, 1) for size in sizes * dist.get_world_size()]
    o = ZeroRedundancyOptimizer(params, optimizer_class=SGD, lr=0.01)
    assert sum(x.numel() for x in o.optim.param_groups[0]["params"]) == sum(sizes)
    theirs = TorchZero(params, optimizer_class=SGD, lr=0.01)
    mine = sorted(x.numel() for x in o.optim.param_groups[0]["params"])
    assert sorted(x.numel() for x in theirs.optim.param_groups[0]["params"]) == mine


@on_ranks(2, FOUR)
def test_add_param_group() -> None:
    sizes = [9, 7, 5, 3]
    params = [torch.rand(size, 1, requires_grad=True) for size in (sizes * dist.get_world_size())[:-1]]
    o = ZeroRedundancyOptimizer(params, optimizer_class=SGD, lr=0.01)
    assert len(o.param_groups) == 1
    o.add_param_group({"params": [torch.rand(3, 1)]})
    assert len(o.param_groups) == len(o.optim.param_groups) == 2
    assert sum(x.numel() for g in o.optim.param_groups for x in g["params"]) == sum(sizes)

    params = [torch.rand(size, 1) for size in [100, 3, 5, 2, 6, 4]]
    for p in params[1:]:
        p.requires_grad = True
    o = ZeroRedundancyOptimizer(params, optimizer_class=SGD, lr=0.01)
    before = {local.owned_slice for local in zero_backend(o).rank_partition.local_slices}
    o.add_param_group({"params": [torch.rand(3, 1)]})
    assert len(o.param_groups) == len(o.optim.param_groups) == 2
    assert before <= {local.owned_slice for local in zero_backend(o).rank_partition.local_slices}


@on_ranks(2, FOUR)
def test_multiple_param_groups() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(5, 10), torch.nn.Linear(10, 10), torch.nn.Linear(10, 5)]
    models = [torch.nn.Sequential(*layers)]
    models += [copy.deepcopy(models[0]) for _ in range(4)]
    inputs = [torch.randn(8, 5) for _ in range(3)]

    def groups(model):
        return [
            {"params": [layer.weight for layer in model], "weight_decay": 0.0},
            {"params": [layer.bias for layer in model], "weight_decay": 0.01},
        ]

    optims = [ZeroRedundancyOptimizer(groups(models[0]), AdamW, lr=0.01)]
    for model, partition in zip(models[1:3], ("whole", "even"), strict=True):
        first, second = groups(model)
        optims.append(ZeroRedundancyOptimizer(first["params"], AdamW, lr=0.01, weight_decay=0.0, partition=partition))
        optims[-1].add_param_group(second)
    optims.append(ZeroRedundancyOptimizer(groups(models[3]), AdamW, lr=0.01, partition="even"))
    optims.append(AdamW(groups(models[4]), lr=0.01))
    for batch in inputs:
        for model, optim in zip(models, optims, strict=True):
            optim.zero_grad()
            model(batch).sum().backward()
            optim.step()
        for params in zip(*(model.parameters() for model in models), strict=True):
            for p in params[:-1]:
                torch.testing.assert_close(p, params[-1])


@on_ranks(2, FOUR)
def test_collect_shards() -> None:
    torch.manual_seed(0)
    target, inputs = torch.rand(3, 5), torch.rand(3, 20)
    for partition in ("whole", "even"):
        model = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Linear(10, 5))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3, momentum=0.99, partition=partition)

        def closure(optimizer=optimizer, model=model):
            optimizer.zero_grad()
            loss = torch.nn.functional.l1_loss(model(inputs), target)
            loss.backward()
            return loss

        optimizer.step(closure=closure)
        optimizer.consolidate_state_dict(to=0)
        saved: Any = {}
        if dist.get_rank() == 0:
            saved = optimizer.state_dict()
            assert len(saved["state"]) == len(list(model.parameters()))
            for index, p in enumerate(model.parameters()):
                assert torch.equal(saved["state"][index]["momentum_buffer"], p.grad)
        else:
            with pytest.raises(RuntimeError, match="consolidate"):
                optimizer.state_dict()
        saved = from_rank(0, saved)
        optimizer.load_state_dict(saved)
        for local in zero_backend(optimizer).rank_partition.local_slices:
            assert "momentum_buffer" in optimizer.optim.state[local.tensor]


@on_ranks(2, FOUR)
def test_local_optimizer_parity() -> None:
    for optimizer_class in (Adam, AdamW, SGD):
        for maximize in (False, True):
            _one_parity(optimizer_class, maximize)


def _one_parity(optimizer_class, maximize) -> None:
    torch.manual_seed(dist.get_rank())
    options = {"lr": 1e-3, "maximize": maximize} | ({"momentum": 0.9} if optimizer_class is SGD else {})
    torch.manual_seed(0)
    local_model = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 5))
    local = torch.nn.parallel.DistributedDataParallel(local_model)
    sharded = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(local_model))
    optims = [optimizer_class(local.parameters(), **options)]
    optims.append(ZeroRedundancyOptimizer(sharded.parameters(), optimizer_class, **options))
    torch.manual_seed(10 + dist.get_rank())

    def train(times: int) -> None:
        for _ in range(times):
            x, y = torch.rand(3, 20), torch.rand(3, 5)
            for model, optim in zip((local, sharded), optims, strict=True):
                optim.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optim.step()
            for a, b in zip(local.parameters(), sharded.parameters(), strict=True):
                assert torch.equal(a, b)

    train(10)
    before = optims[0].state_dict()
    optims[1].consolidate_state_dict(to=0)
    states = [before, optims[1].state_dict() if dist.get_rank() == 0 else {}]
    saved: Any = from_rank(0, states[1])
    optims[0].load_state_dict(saved)
    optims[1].load_state_dict(before)
    train(3)


@on_ranks(2, FOUR)
def test_model_parallel() -> None:
    """Two devices per rank: on a CPU-only machine both are the CPU, in two dtypes so that they do not mix."""
    for bucket_view in (False, True):
        for partition in ("whole", "even"):
            torch.manual_seed(0)
            net0, net1 = torch.nn.Linear(10, 20), torch.nn.Linear(20, 5).double()
            plain0, plain1 = copy.deepcopy((net0, net1))
            plain = Adam([*plain0.parameters(), *plain1.parameters()], lr=0.01)
            zero = ZeroRedundancyOptimizer(
                [*net0.parameters(), *net1.parameters()],
                Adam,
                lr=0.01,
                parameters_as_bucket_view=bucket_view,
                mixed_dtypes=True,
                partition=partition,
            )
            for _ in range(3):
                x = torch.rand(4, 10)
                for first, second, optim in ((plain0, plain1, plain), (net0, net1, zero)):
                    optim.zero_grad()
                    second(torch.relu(first(x)).double()).square().sum().backward()
                    optim.step()
                for a, b in zip(
                    [*plain0.parameters(), *plain1.parameters()], zero_backend(zero).rank_partition.params, strict=True
                ):
                    torch.testing.assert_close(a, b)
            assert isinstance(zero.join_device, torch.device)


@on_ranks(1, backend="none")
def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group\(\)"):
        ZeroRedundancyOptimizer([torch.zeros(1)], SGD, lr=0.1)
