"""``SHARDWISE_CHECKS``: the checks beside the step run always, or in the first passes and after changes; "off": no warnings."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import nn

from shardwise import ConfigError, DesyncError, FSDPModule, StateError, fully_shard, replicate


class Writer(nn.Linear):
    """A layer that can write to its weight in a way that torch does not count."""

    writes = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.weight.data.mul_(2.0)
        return super().forward(input)


def made() -> Writer:
    torch.manual_seed(0)
    model = fully_shard(Writer(4, 4))
    assert isinstance(model, Writer)
    return model


def writes_are_found(model: Writer) -> bool:
    model.writes = True
    try:
        model(torch.ones(2, 4)).sum().backward()
    except StateError:
        return True
    finally:
        model.writes = False
    return False


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize(
    ("mode", "found"), [("always", (True, True)), ("first", (True, False)), ("off", (True, False))]
)
def test_writes_are_looked_for_when_the_switch_says(mode: str, found: tuple[bool, bool]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CHECKS", mode)
        early, late = made(), made()
        assert writes_are_found(early) is found[0]
        for _ in range(2):
            step(late)
        assert writes_are_found(late) is found[1]


@on_ranks(2)
def test_the_first_pass_after_a_change_is_checked() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CHECKS", "first")
        model = made()
        for _ in range(3):
            step(model)
        assert isinstance(model, FSDPModule)
        model.reshard()
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        assert writes_are_found(model)


@on_ranks(2)
def test_memory_that_is_put_under_a_full_parameter_while_it_is_freed_is_named_without_checks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CHECKS", "off")
        model = made()
        for _ in range(3):
            step(model)
        assert isinstance(model, FSDPModule)
        model.unshard()
        full = model.weight
        model.reshard()
        full.data = torch.zeros(4, 4)
        with pytest.raises(
            StateError, match=r"a write to weight in forward, or while it was unsharded, through \.data"
        ):
            step(model)


@on_ranks(2)
def test_what_keeps_numbers_right_cannot_be_switched_off() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CHECKS", "off")
        model = made()
        for _ in range(3):
            step(model)
        del model._parameters["bias"]
        with pytest.raises(StateError, match="bias"):
            step(model)
        torch.manual_seed(dist.get_rank())
        with pytest.raises(DesyncError, match="replicas do not begin with the same values: bias"):
            step(replicate(nn.Linear(4, 4)))
        with torch.device("meta"):
            empty = nn.Linear(4, 4)
        fully_shard(empty).to_empty(device="cpu")
        with pytest.raises(StateError, match="have no values"):
            step(empty)


class Keeps(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("mode", ["first", "off"])
@on_ranks(2)
def test_off_leaves_out_warnings_and_what_ranks_have_sharded(mode: str) -> None:
    kept, logger = Keeps(), logging.getLogger("shardwise")
    logger.addHandler(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CHECKS", mode)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].running_mean += dist.get_rank()
        for param in model.parameters():
            nn.init.zeros_(param)
        fully_shard(model)
        for _ in range(4):
            step(model)
    logger.removeHandler(kept)
    assert any("buffers differ" in text for text in kept.texts) is (mode == "first")


@on_ranks(2)
def test_a_parameter_that_is_added_late_is_found_by_default_and_not_without_checks() -> None:
    for mode in ("first", "off"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDWISE_CHECKS", mode)
            model = made()
            for _ in range(3):
                step(model)
            model.register_parameter("late", nn.Parameter(torch.ones(2)))
            with mock.patch.object(logging.getLogger("shardwise.checks"), "warning") as warned:
                step(model)
            assert [call.args[1] for call in warned.call_args_list] == ["late"] * (mode == "first")


@on_ranks(2)
def test_an_unknown_value_is_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CHECKS", "sometimes")
        with pytest.raises(ConfigError, match="SHARDWISE_CHECKS is 'sometimes', expected always, first or off"):
            step(made())


@on_ranks(2)
@pytest.mark.parametrize("modes", [("first", "off"), ("always", "first"), ("first", "never")])
def test_ranks_with_different_switches_are_named(modes: tuple[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CHECKS", modes[dist.get_rank()])
        model = made()
        with pytest.raises(DesyncError, match=r"ranks have different SHARDWISE_CHECKS: rank \d: SHARDWISE_CHECKS="):
            step(model)
