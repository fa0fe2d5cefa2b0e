"""A policy of activations: blocks keep, recompute or offload, and gradients are those of the plain model to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fake_accelerator.accelerator import FakeAccelerator
from helpers.one_process import standing_for
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise import ActivationPolicy, ConfigError, MixedPrecisionPolicy, StateError, apply_activations, shard_model

MM = torch.ops.aten.addmm.default


class Block(nn.Module):
    """Dropout draws random numbers; ``inner`` is under a checkpoint of the user's, reentrant or not, or under none."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.drop, self.reentrant, self.calls = nn.Dropout(0.2), reentrant, 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.up(x).chunk(3, dim=-1)
        return self.down((a * b.tanh()).softmax(-1) * c)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        y = self.norm(x)
        y = self.inner(y) if self.reentrant is None else checkpoint(self.inner, y, use_reentrant=self.reentrant)
        return x + self.drop(y) * scale


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(reentrant) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean()


def a_net(reentrant: bool | None = None) -> Net:
    torch.manual_seed(0)
    return Net(reentrant)


def trained(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Return the losses and, at last, the parameters of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[torch.Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(5, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *[getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


POLICIES: list[Any] = [
    ActivationPolicy(),
    ActivationPolicy(keep_ops=[MM]),
    ActivationPolicy({"blocks.0": "recompute", "blocks.1": "keep", "blocks.3": "recompute"}),
]


@pytest.mark.parametrize(
    ("num_ranks", "reshard"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.exhaustive), pytest.param(4, 2, marks=pytest.mark.exhaustive)],
)
@on_ranks()
def test_recomputed_blocks_train_as_those_that_keep_in_units_and_before_sharding(reshard: bool | int) -> None:
    for policy, reentrant, first in zip(POLICIES, (None, True, False), (True, False, True), strict=True):
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if first else MixedPrecisionPolicy()
        options: Any = {"min_unit_bytes": 0, "reshard_after_forward": reshard, "mp_policy": precision}
        plain = trained(shard_model(a_net(reentrant), **options))
        model = a_net(reentrant)
        if first:
            apply_activations(model, policy)
        shard_model(model, **options)
        if not first:
            apply_activations(model, policy)
        assert equal(trained(model), plain), (policy, reentrant)
        assert model.blocks[0].calls == 6
        assert model.blocks[1].calls == (3 if isinstance(policy.blocks, dict) else 6)


OFFLOAD = ActivationPolicy("offload", min_offload_bytes=0)


def on_fake(policy: ActivationPolicy | None, reentrant: bool | None, shards: bool = False) -> tuple[Any, Any]:
    """Return what :func:`trained` does on the fake accelerator, and this."""
    fake = FakeAccelerator()
    with standing_for(0, 1), fake.in_use():
        model: Any = a_net(reentrant)
        if policy is not None:
            apply_activations(model, policy)
        return trained(shard_model(model, min_unit_bytes=0) if shards else model), fake


@pytest.mark.parametrize("shards", [False, True])
def test_offloaded_blocks_give_the_same_bits_and_no_buffer_is_reused_early(shards: bool) -> None:
    for reentrant in (None, True, False):
        (plain, without), (found, fake) = (on_fake(each, reentrant, shards) for each in (None, OFFLOAD))
        assert equal(found, plain), reentrant
        assert not fake.violations
        assert fake.timeline.host_waits == without.timeline.host_waits
        assert fake.timeline.num_events["activations"] >= 3 * 4, "at least one after the copies of each forward"


def test_saved_tensors_of_two_blocks_are_on_the_device_after_forward_and_none_after_backward() -> None:
    held: dict[bool, list[int]] = {}
    for offloads in (False, True):
        fake = FakeAccelerator()
        with standing_for(0, 1), fake.in_use():
            model: Any = shard_model(a_net(), min_unit_bytes=0)
            if offloads:
                apply_activations(model, OFFLOAD)
            x, held[offloads] = torch.randn(200, 8), []
            for _ in range(2):
                loss = model(x)
                after_forward = fake.live_bytes
                assert all(isinstance(block.up.weight, DTensor) for block in model.blocks)  # weights are not among them
                loss.backward()
                del loss
                model.zero_grad()
                held[offloads] += [after_forward - fake.live_bytes, fake.live_bytes]
    saved, offloaded = held[False][2], held[True][2]
    assert offloaded < 0.6 * saved  # two of four blocks, and what is outside of blocks
    assert held[True][1] == held[True][3] <= held[False][3]


def test_a_saved_tensor_that_is_written_to_is_named_when_backward_reads_it() -> None:
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).exp()

    for num_later in (0, 3):
        with standing_for(0, 1), FakeAccelerator().in_use():
            model: Any = nn.Sequential(*[Exp() for _ in range(4)])
            apply_activations(model, OFFLOAD)
            y = model[0](torch.ones(50))
            y.add_(1)  # exp saves its result
            for later in model[1 : 1 + num_later]:
                y = later(y)
            with pytest.raises(StateError, match=r"that 0 saved for backward was changed in place"):
                y.sum().backward()
            y = model[0](torch.ones(50, requires_grad=True))
            with torch.no_grad():
                model[0].scale.add_(1)
            with pytest.raises(StateError, match="changed in place"):
                y.sum().backward()


def test_an_interrupt_in_a_block_leaves_no_hook_behind() -> None:
    for policy in (ActivationPolicy(), OFFLOAD):
        with standing_for(0, 1), FakeAccelerator().in_use():
            model: Any = a_net()
            apply_activations(model, policy)

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            handle = model.blocks[2].drop.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(5, 8))
            handle.remove()
            with pytest.raises(ValueError, match="mine"):
                model.blocks[1](torch.ones(5, 16), scale=Raises())
            assert equal(trained(copy.deepcopy(model)), trained(a_net()))


class Raises:
    def __rmul__(self, other: Any) -> Any:
        raise ValueError("mine")


def test_activations_of_the_host_stay_there_with_a_warning() -> None:
    model = a_net()
    assert apply_activations(model, OFFLOAD) == {f"blocks.{number}": "offload" for number in range(4)}
    with pytest.warns(UserWarning, match=r"blocks.0 keeps its activations: they are in host memory already"):
        found = trained(model)
    assert equal(found, trained(a_net()))


def test_policies_that_no_model_can_follow_are_named() -> None:
    cases: list[tuple[Any, str]] = [
        ({"blocks.9": "keep"}, "has no module 'blocks.9'"),
        ({"blocks.0": "drop"}, "unknown choice 'drop' for blocks.0; choose from keep, recompute, offload"),
        ({"blocks.0.up": "keep", "blocks.0": "recompute"}, "blocks.0.up is inside of blocks.0"),
    ]
    for blocks, message in cases:
        with pytest.raises(ConfigError, match=message):
            apply_activations(a_net(), ActivationPolicy(blocks))
    with pytest.raises(ConfigError, match="Linear has no repeated blocks"):
        apply_activations(nn.Linear(2, 2), ActivationPolicy())
    model = a_net()
    model.blocks[1].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"blocks.1 was compiled by compile\(\)"):
        apply_activations(model, ActivationPolicy())
    model = a_net()
    apply_activations(model, ActivationPolicy())
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.raises(StateError, match="a forward pre-hook was registered on blocks.0 after apply_activations"):
        model(torch.ones(5, 8))
