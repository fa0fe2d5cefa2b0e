"""Parameters that user code replaces, or takes off, while their unit is full or a forward or backward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz.codes import Codes
from helpers.compare import assert_same, average_gradients, local
from helpers.pairs import pairwise
from helpers.ranks import on_ranks
from helpers.trains_alike import assert_trains_alike, batch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import FSDPModule, StateError, fully_shard, replicate

older_replicate = functools.partial(replicate, device_ids=None)
APIS: list[Callable[..., Any]] = [fully_shard, replicate, older_replicate]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


def _through(api: Callable[..., Any], model: nn.Sequential) -> nn.Sequential:
    if api is not older_replicate:  # whose one root is the unit
        api(model[0])
    api(model)
    return model


def _halved(sharded: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(sharded.detach() * 0.5)


def _replace(model: nn.Sequential, sharded: list[nn.Parameter], *_: object) -> None:
    for layer, name, param in zip((0, 0, 2, 2), ("weight", "bias") * 2, sharded, strict=True):
        setattr(model[layer], name, _halved(param))


@on_ranks()
@pytest.mark.parametrize(("api", "when", "num_ranks"), pairwise(APIS, ["unsharded by hand", "end of backward"], [2, 1]))
def test_what_is_put_in_place_of_full_parameters_stays(api: Any, when: str) -> None:
    model, plain = _model(), _model()
    api(model)
    for each in (model, plain):
        params = list(each.parameters())
        if when == "end of backward":
            each(batch(0)).sum().backward()
            out = each(batch(1))
            out.register_hook(functools.partial(_replace, each, params))
            out.sum().backward()
            assert all(param.grad is not None for param in params)  # what has computed gets the gradients, as anywhere
        elif isinstance(each, FSDPModule):
            each.unshard()
            _replace(each, params)
            each.reshard()
        else:
            _replace(each, params)
    assert_trains_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize(
    ("api", "where"), [(fully_shard, "forward"), (replicate, "forward"), (fully_shard, "backward")]
)
@pytest.mark.parametrize("warm", [True, False])
def test_a_parameter_that_is_replaced_before_its_unit_is_full_is_named(api: Any, warm: bool, where: str) -> None:
    model = _through(api, _model())
    plain = _model()
    if warm:
        for each in (model, plain):
            each(batch(0)).sum().backward()
            each.zero_grad()
    weights, handle = [model[0].weight], None
    if where == "forward":
        handle = model.register_forward_pre_hook(lambda *_: setattr(model[0], "weight", _halved(weights[0])))
    with pytest.raises(StateError, match=r"0\.weight was replaced while a forward or backward ran"):
        out = model(batch(0))
        out.register_hook(lambda _: setattr(model[0], "weight", _halved(weights[0])))
        out.sum().backward()
    if handle is not None:
        handle.remove()
    assert model[0].weight is not weights.pop()
    assert isinstance(model[0].weight, DTensor)
    with torch.no_grad():
        plain[0].weight.mul_(0.5)
    assert_trains_alike(model, plain)


@on_ranks(2)
@pytest.mark.parametrize(
    ("api", "when", "way"), pairwise(APIS, ["before the first step", "between steps", "in backward"], ["none", "gone"])
)
def test_a_parameter_that_is_set_to_none_does_not_come_back(api: Any, when: str, way: str) -> None:
    model = _through(api, _model())

    def take_off(*_: object) -> None:
        if way == "none":
            model[0].bias = None
        else:
            del model[0].bias
            model[0].bias = None

    if when != "before the first step":
        model(batch(0)).sum().backward()
    if when != "in backward":
        take_off()
    with pytest.raises(StateError, match=r"bias was removed from its module or set to None"):
        out = model(batch(1))
        out.register_hook(take_off)
        out.sum().backward()
        model(batch(2))
    assert model[0].bias is None


@on_ranks(1, 2)
@pytest.mark.parametrize("api", [fully_shard, replicate])
@pytest.mark.parametrize("way", ["to_empty", "double"])
def test_what_is_replaced_and_converted_after_a_forward_gets_no_gradient_of_it(api: Any, way: str) -> None:
    model = _through(api, _model())
    out = model(batch(0))
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if way == "to_empty":
        model.to_empty(device="cpu")
        model.load_state_dict(values)
    else:
        model.double().float()
    with pytest.raises(StateError, match="were replaced, moved or given another dtype after the forward"):
        out.sum().backward()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("api", ["replicate", "replicate without sync"])
def test_plain_parameters_that_are_converted_after_a_forward_get_gradients_that_they_can_hold(api: str) -> None:
    model = _model().double()
    replicate(model, device_ids=None)
    model.set_requires_gradient_sync(api == "replicate")  # type: ignore[operator]
    loss = model(torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)).sum()  # alike on all ranks
    wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    model.float()
    loss.backward()
    for gradient, want in zip((param.grad for param in model.parameters()), wanted, strict=True):
        assert gradient is not None
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, want.float(), atol=1e-5, rtol=1e-5)


def _write_past_torchs_count(model: nn.Sequential) -> None:
    model.double().float()
    model[2].weight.data.add_(1.0)  # on one process the graph keeps what was before the conversion


def _rounded(model: nn.Sequential) -> None:
    model.bfloat16().float()


def _and_back(model: nn.Sequential) -> None:
    model.double().float()


REFUSED = dict.fromkeys(
    [_write_past_torchs_count, _rounded, _and_back], (RuntimeError, "has been modified by an inplace operation")
)


@on_ranks()
@pytest.mark.parametrize(
    ("api", "change", "num_ranks"),
    pairwise([fully_shard, replicate], [*REFUSED, nn.Module.double], [2, 1]),
)
def test_a_conversion_between_forward_and_backward_is_refused(api: Any, change: Any) -> None:
    model = _through(api, _model())
    model(batch(0)).sum().backward()
    model.zero_grad()
    loss = model(batch(0)).sum()
    change(model)
    error, text = REFUSED.get(change, (StateError, "given another dtype after the forward"))
    with pytest.raises(error, match=text):
        loss.backward()
    model.float()
    model(batch(0)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks()
@pytest.mark.parametrize(
    ("api", "change", "between", "num_ranks"),
    pairwise(
        [fully_shard, replicate],
        list(REFUSED),
        ["two forwards", "two backwards"],
        [2, 1],
    ),
)
def test_graphs_of_before_a_conversion_are_told_apart_from_those_of_after_it(
    api: Any, change: Any, between: str
) -> None:
    model, plain = _through(api, _model()), _model()
    for each in (model, plain):
        losses = [each(batch(0)).sum()]
        if between == "two backwards":
            losses[0].backward(retain_graph=True)
        change(each)
        if between == "two forwards":
            losses.append(each(batch(1)).sum())
            losses.pop().backward()
        if each is model:
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                losses[0].backward()
            return
        losses[0].backward()
    average_gradients(plain)
    assert_same(model, plain)


class _Quantized(nn.Module):
    """A frozen weight of a class that allows little, and a trained one of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(Codes(torch.arange(24, dtype=torch.int8).view(4, 6)), requires_grad=False)
        self.turns = nn.Parameter(torch.ones(4, 4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.codes.dequantize().T).to(torch.complex128) @ self.turns).abs()


@on_ranks(1, 2)
def test_conversions_of_what_has_no_plain_bits_are_no_matter() -> None:
    model = fully_shard(_Quantized())
    for _ in range(2):
        loss = model(batch(0)).sum()
        model.to("cpu")
        loss.backward()
    assert local(model.turns.grad).abs().sum() > 0


@on_ranks(2)
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_what_is_converted_and_loaded_before_another_forward_is_nobodys_business(api: Any) -> None:
    model, plain = _through(api, _model()), _model()
    for each in (model, plain):
        each(batch(0)).sum()  # of which no backward comes
        each.double().float()
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(0.5)
        each(batch(0)).sum().backward()
    average_gradients(plain)
    assert_same(model, plain)


@on_ranks(2)
def test_a_rank_may_evaluate_alone_what_nobody_has_cut_after_a_conversion() -> None:
    model = _through(replicate, _model())
    model(batch(0)).sum().backward()
    model.double().float()
    if dist.get_rank() == 0:
        with torch.no_grad():
            assert model(batch(1)).isfinite().all()
