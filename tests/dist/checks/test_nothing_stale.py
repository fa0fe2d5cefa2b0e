"""Nothing gathered before the shards changed is ever read after: programs train as they would on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import average_gradients, full
from helpers.inside import over
from helpers.pairs import checkered
from helpers.ranks import on_ranks
from helpers.sharded import noise
from torch import nn

from shardwise import StateError, fully_shard


class Normalised(nn.Module):
    """Normalises its weight whenever it runs in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return x @ self.weight.t()


class Net(nn.Module):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.middle = middle if middle is not None else nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.full((5,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x) * self.scale))))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(noise(number, 5)).square().mean()


Program = Callable[[nn.Module, torch.optim.Optimizer, list[nn.Parameter]], None]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, number).backward()
    finish(model, optimizer)


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


# ---- programs; each is run on the sharded model and on a plain one ----


def backward_twice(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for number in range(3):
        loss = loss_of(model, number)
        loss.backward(retain_graph=True)
        loss.backward()
        finish(model, optimizer)


def forward_before_step(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for number in range(3):
        loss_of(model, number).backward()
        loss_of(model, 100 + number)
        finish(model, optimizer)


def evaluation_before_step(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for number in range(3):
        loss_of(model, number).backward()
        with torch.no_grad():
            loss_of(model, 100 + number)
        finish(model, optimizer)
        with torch.no_grad():
            loss_of(model, 200 + number)


def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """Evaluate, exchange the weights for others through .data, evaluate, exchange them back, train."""
    others = [param.detach().clone().mul_(0.5) for param in params]
    for number in range(2):
        one_step(model, optimizer, number)
        with torch.no_grad():
            found = [loss_of(model, 100)]
        kept = [param.detach().clone() for param in params]
        for param, other in zip(params, others, strict=True):
            param.data.copy_(other)
        with torch.no_grad():
            found.append(loss_of(model, 100))
        for param, old in zip(params, kept, strict=True):
            param.data.copy_(old)
        results.append([float(value) for value in found])


def write_between(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """Write to parameters that backward does not read, between forward and backward."""
    bias = dict(zip(names, params, strict=True))["last.bias"]
    for number in range(3):
        loss = loss_of(model, number)
        with torch.no_grad():
            bias.add_(1.0)
        loss.backward()
        finish(model, optimizer)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for number in range(3):
        loss_of(model, number).backward()
        if hasattr(model, "unshard"):
            model.unshard()
            model.first.unshard(async_op=True)
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def write_to_what_is_registered(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for number in range(3):
        one_step(model, optimizer, number)
        with torch.no_grad():
            loss_of(model, 100)
            for module in model.modules():  # those that were sharded with reshard_after_forward=False stay unsharded
                if hasattr(module, "reshard"):
                    module.reshard()
            for param in model.parameters():
                param.mul_(0.9)


def just_train(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for number in range(3):
        one_step(model, optimizer, number)


def keep_between_microbatches(model: nn.Module, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """Leave parameters unsharded after backward, and step."""
    if hasattr(model, "set_reshard_after_backward"):
        model.set_reshard_after_backward(False)
    just_train(model, optimizer, params)


results: list[list[float]] = []
names: list[str] = []


def run(program: Program, middle: str, reshard: bool | int | None, transport: Any, prefetch: bool) -> None:
    made: list[tuple[list[torch.Tensor], list[list[float]]]] = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = Net(None if middle == "Linear" else globals()[middle]())
        names[:] = [name for name, _ in model.named_parameters()]
        results.clear()
        if is_sharded:
            with over(transport):
                for block in (model.first, model.middle, model.last):
                    fully_shard(block, reshard_after_forward=True if reshard is None else reshard)
                fully_shard(model, reshard_after_forward=reshard)
            if prefetch:
                model.last.set_modules_to_backward_prefetch([model.middle, model.last, model.first])
                model.first.set_modules_to_backward_prefetch([model.last, model.middle])
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        program(model, optimizer, params)
        values = [full(p).detach().clone() for p in model.state_dict().values()]
        made.append((values, [list(row) for row in results]))
    (plain, plain_results), (sharded, sharded_results) = made
    for name, left, right in zip(names, plain, sharded, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    # Losses are of each rank's own batch, so they are comparable as they are.
    torch.testing.assert_close(torch.tensor(sharded_results), torch.tensor(plain_results), rtol=1e-5, atol=1e-6)


PROGRAMS: list[Program] = [
    backward_twice,
    forward_before_step,
    evaluation_before_step,
    averaged_weights,
    write_between,
    by_hand,
    write_to_what_is_registered,
    keep_between_microbatches,
]


@on_ranks(2)
@pytest.mark.parametrize(
    ("program", "transport"),
    [
        *((program, "auto") for program in PROGRAMS),
        *((program, transport) for program in (backward_twice, by_hand) for transport in ("gloo", "collective")),
        (evaluation_before_step, "collective"),
        (write_to_what_is_registered, "gloo"),
    ],
)
def test_a_program_trains_as_on_one_process(program: Program, transport: str) -> None:
    run(program=program, middle="Linear", reshard=None, transport=transport, prefetch=False)


@on_ranks()
@pytest.mark.parametrize(
    ("program", "num_ranks"), checkered([p for p in PROGRAMS if p is not averaged_weights], [4, 2])
)
def test_it_does_so_when_parameters_stay_after_forward(program: Program, num_ranks: int) -> None:
    reshard = False if num_ranks == 2 else 2
    run(program=program, middle="Linear", reshard=reshard, transport="auto", prefetch=False)


@on_ranks(2)
@pytest.mark.parametrize(
    ("program", "transport"),
    [
        *((program, "auto") for program in (backward_twice, evaluation_before_step, just_train)),
        (backward_twice, "gloo"),
        (evaluation_before_step, "collective"),
    ],
)
def test_it_does_so_whatever_is_prefetched(program: Program, transport: str) -> None:
    run(program=program, middle="Linear", reshard=None, transport=transport, prefetch=True)


@on_ranks(2)
@pytest.mark.parametrize(("reshard", "transport"), [(None, "auto"), (None, "collective"), (False, "auto")])
def test_what_a_module_writes_to_its_own_weight_stays(reshard: bool | None, transport: str) -> None:
    run(program=just_train, middle="Normalised", reshard=reshard, transport=transport, prefetch=False)


WRITES: dict[str, Callable[[Any], object]] = {
    "parameter": lambda param: param.mul_(2.0),
    "alias": lambda param: param.detach().mul_(2.0),
    "several": lambda param: torch._foreach_mul_([param], 2.0),
    "initialized": lambda param: nn.init.zeros_(param),
}


@on_ranks(2)
@pytest.mark.parametrize("when", ["between forward and backward", "unshard"])
@pytest.mark.parametrize("how", WRITES)
def test_writes_to_full_parameters_between_passes_are_named_and_dropped(how: str, when: str) -> None:
    torch.manual_seed(0)
    model = Net()
    for block in (model.first, model.middle, model.last):
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)
    with torch.no_grad():
        before = loss_of(model, 0)
    for _ in range(2):
        loss = before
        if when == "between forward and backward":
            loss = loss_of(model, 0)
        elif when == "unshard":
            model.last.reshard()
            model.last.unshard()
        with torch.no_grad():
            WRITES[how](model.last.weight)
        with pytest.raises(
            StateError, match=r"last\.weight was written to while it was unsharded.*To write, call reshard"
        ):
            if when == "between forward and backward":
                loss.backward()
            else:
                model.last.reshard()
        with torch.no_grad():
            assert torch.equal(loss_of(model, 0), before)
    loss_of(model, 0).backward()


@on_ranks(2)
def test_writes_that_nobody_can_count_are_an_error_on_every_rank() -> None:
    torch.manual_seed(0)
    model = Net()
    for block in (model.first, model.middle, model.last):
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)
    params = list(model.parameters())
    with torch.no_grad():
        loss_of(model, 0)
    for param in params:
        param.data.mul_(2.0)
    expected = r"(first|last).weight \(unit '(first|last)'\).*through .data.*reshard\(\)"
    with torch.no_grad(), pytest.raises(StateError, match=expected):
        loss_of(model, 0)
    model.zero_grad()
    loss_of(model, 0).backward()  # the step failed alike on all ranks, and the next one is right


@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "reshard"),
    [
        *((how, None) for how in ("parameter", "local tensor", "state dict", "other memory", "other memory again")),
        *((how, reshard) for how in ("parameter", "other memory again") for reshard in (False, 1)),
    ],
)
def test_a_backward_that_needs_what_was_written_over_raises_as_on_one_process(
    how: str, reshard: bool | int | None
) -> None:
    torch.manual_seed(0)
    model = Net()
    for block in (model.first, model.middle, model.last):
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    param, values = model.last.weight, {name: value.clone() for name, value in model.state_dict().items()}
    if how == "other memory again":
        model.to_empty(device="cpu")
        model.load_state_dict(values)
    loss = loss_of(model, 0)
    with torch.no_grad():
        if how.startswith("other memory"):
            model.to_empty(device="cpu")
            model.load_state_dict(values)
        elif how == "parameter":
            param.mul_(2.0)
        elif how == "local tensor":
            param.to_local().mul_(2.0)  # type: ignore[operator] # Pyright doesn't know DTensor here
        else:
            model.state_dict()["last.weight"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    loss_of(model, 0).backward()
