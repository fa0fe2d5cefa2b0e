"""``StepMeter``: figures of a user's own loop, the same on every rank, from one collective."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise import ConfigError, DesyncError, StepMeter, fully_shard, torch_private, trace
from shardwise.loop import meter as module

ROWS, WIDTH, TOKENS = 8, 16, 8.0


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def sharded() -> nn.Module:
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


class Clock:
    """Seconds that pass when the loop says so, one more at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def train(meter: StepMeter, model: nn.Module, steps: int, **values: Any) -> list[dict[str, float | None] | None]:
    found: list[dict[str, float | None] | None] = []
    for _ in range(steps):
        with meter.step():
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        found.append(meter.log(**values))
    return found


def test_attention_counts_in_the_mfu_of_a_cpu() -> None:
    """torch's registry of operations lacks the kernel of flash attention on CPUs."""
    query = torch.ones(2, 4, 16, 8, requires_grad=True)
    meter = StepMeter(nn.Identity(), peak_flops=1.0)
    with meter.step():
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    forward = 2 * 2 * 4 * 16 * 16 * 8 * 2  # two products
    found = meter.figures()
    times = (found["step_s"] or 0.0) + (found["data_s"] or 0.0)
    assert (found["mfu"] or 0.0) * times == pytest.approx(forward * 3.5), "backward has five products"


def test_the_mfu_of_sequences_of_several_lengths_is_that_of_what_each_step_computed() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    meter = StepMeter(model, every=1, peak_flops=1.0, writers=())

    def step(*lengths: int) -> float:
        """Return the operations per row of a step with a microbatch of each of ``lengths``."""
        with meter.step():
            for length in lengths:
                model(torch.ones(length, WIDTH)).sum().backward()
        found = meter.figures()
        return (found["mfu"] or 0.0) * ((found["step_s"] or 0.0) + (found["data_s"] or 0.0)) / sum(lengths)

    per_row = 2 * WIDTH * WIDTH * 2  # forward, and the gradient of the weight
    for lengths in ((8,), (8, 64), (64, 8), (8, 8, 512), (64,), (8,), (64, 8)):
        assert step(*lengths) == pytest.approx(per_row)
    with pytest.raises(ValueError, match="as a test"), meter.step():
        model(torch.ones(3, WIDTH))
        raise ValueError("as a test")
    assert step(3) == pytest.approx(per_row), "a step that raised was counted in part"


@on_ranks(2)
def test_values_are_means_over_ranks_and_figures_are_the_same_on_all() -> None:
    rank = dist.get_rank()
    meter = StepMeter(net(), TOKENS, every=2)
    first, found = train(meter, net(), 2, loss=torch.tensor(1.0 + rank), grad_norm=3.0 * rank)
    assert first is None
    assert found is not None
    assert (found["loss"], found["grad_norm"]) == (1.5, 1.5)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, found)
    assert both[0] == both[1]
    assert found["mfu"] is None, "nobody has said what a CPU can do"


@on_ranks(2)
def test_times_are_those_of_steps_and_of_data_without_each_other() -> None:
    rank, clock, model = dist.get_rank(), Clock(), net()
    meter = StepMeter(model, TOKENS, every=3, writers=())

    def batches(seconds: float) -> Iterator[int]:
        for number in range(2):
            clock.now += seconds
            yield number

    with mock.patch.object(module.time, "perf_counter", clock.perf_counter):
        for step in range(3):
            clock.now += 100  # whatever is between steps counts for nothing
            for _ in meter.data(batches(0.5)):
                continue
            with meter.step():
                clock.now += 50.0 if step == 0 else 2.0 + 2 * rank  # the first warms up
                for _ in meter.data(batches(0.25)):
                    clock.now += 0.125
        found = meter.figures()
    assert found["step_s"] == pytest.approx(3.25)
    assert found["data_s"] == pytest.approx(1.5)
    assert found["tokens_per_s"] == pytest.approx(2 * TOKENS / 4.75)


def test_what_would_be_counted_twice_or_overwritten_is_refused() -> None:
    meter = StepMeter(net(), TOKENS, writers=())
    with meter.step(), pytest.raises(ConfigError, match=r"step\(\) within step\(\)"), meter.step():
        pass
    with meter.step():
        pass
    with pytest.raises(ConfigError, match="step_s is a figure of its own"):
        meter.figures(step_s=3.0)
    assert meter.num_steps == 2


def test_operations_of_a_first_step_that_raised_are_not_counted() -> None:
    found: list[float | None] = []
    for raises in (False, True):
        clock, model = Clock(), net()
        meter = StepMeter(model, TOKENS, peak_flops=1e6, writers=())
        with mock.patch.object(module.time, "perf_counter", clock.perf_counter):
            if raises:
                with pytest.raises(ValueError, match="bad batch"), meter.step():
                    model(torch.ones(ROWS, WIDTH))
                    raise ValueError("bad batch")
            with meter.step():
                model(torch.ones(ROWS, WIDTH)).sum().backward()
                clock.now += 0.5
            found.append(meter.figures()["mfu"])
    assert found[0] == found[1]


@on_ranks(2)
def test_operations_are_counted_once_as_torchs_counter_counts_them_in_one_process() -> None:
    counter = FlopCounterMode(display=False)
    with counter:
        net()(torch.ones(ROWS, WIDTH)).sum().backward()
    clock, model = Clock(), sharded()
    meter = StepMeter(model, TOKENS, every=2, peak_flops=1e6, writers=())
    with mock.patch.object(module.time, "perf_counter", clock.perf_counter):
        for _ in range(2):
            with meter.step():
                assert not torch_private.has_dispatch_mode(), "tensors would take another way"
                model(torch.ones(ROWS, WIDTH)).sum().backward()
                clock.now += 0.5
        found = meter.figures()
    assert found["mfu"] == pytest.approx(counter.get_total_flops() / 0.5 / 1e6)


@on_ranks(2)
def test_waits_are_those_of_the_trace_and_none_where_nothing_of_ours_waits() -> None:
    model = sharded()
    waits = train(StepMeter(model, every=2, writers=()), model, 2)[1]
    assert waits is not None
    assert waits["exposed_wait_s"] is not None
    assert waits["exposed_wait_s"] > 0
    plain = train(StepMeter(net(), every=2, writers=()), net(), 2)[1]
    assert plain is not None
    assert plain["exposed_wait_s"] is None


@on_ranks(2)
def test_a_step_between_two_logs_calls_no_collective_and_looks_at_no_loss() -> None:
    class Loss(Tensor):
        def __float__(self) -> float:
            raise AssertionError("the device was waited for")

    model = net()
    meter = StepMeter(model, every=3, writers=())
    loss = torch.ones(()).as_subclass(Loss)
    with mock.patch.object(dist, "all_gather", side_effect=AssertionError), trace() as seen:
        assert train(meter, model, 2, loss=loss) == [None, None]
    assert seen.spans == []
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers:
        train(meter, model, 1, loss=1.0, grad_norm=2.0)
    assert gathers.call_count == 1


@on_ranks(2)
def test_ranks_that_give_other_values_are_named_on_all() -> None:
    values = {"loss": 1.0} if dist.get_rank() == 0 else {"norm": 1.0}
    with pytest.raises(DesyncError, match="rank 1 and rank 0 give other values; here they are (loss|norm)"):
        train(StepMeter(net(), every=1), net(), 1, **values)
    wrong = dist.get_rank() == 1
    with pytest.raises(ConfigError if wrong else DesyncError, match="(norm is a str|Give the same names, and numbers)"):
        train(StepMeter(net(), every=1), net(), 1, norm="a" if wrong else 1.0)
    (found,) = train(StepMeter(net(), every=1), net(), 1, norm=torch.inf if wrong else -torch.inf)
    assert found is not None
    assert str(found["norm"]) == "nan"


@on_ranks(2)
def test_rank_0_alone_writes_and_only_what_was_measured() -> None:
    tensorboard, tracker, mlflow = (
        mock.Mock(spec=["add_scalar"]),
        mock.Mock(spec=["log"]),
        mock.Mock(spec=["log_metrics"]),
    )
    model = net()
    train(StepMeter(model, TOKENS, every=2, writers=(tensorboard, tracker, mlflow)), model, 3, loss=2.0)
    if dist.get_rank():
        assert not [each for each in (tensorboard, tracker, mlflow) if each.mock_calls]
        return
    ((written,), steps) = tracker.log.call_args
    assert steps == {"step": 2}
    assert written["loss"] == 2.0
    assert {"step_s", "tokens_per_s", "memory_bytes", "peak_memory_bytes"} <= written.keys()
    assert "mfu" not in written
    assert mlflow.log_metrics.call_args == tracker.log.call_args
    assert {call.args for call in tensorboard.add_scalar.call_args_list} == {
        (name, value, 2) for name, value in written.items()
    }


def test_one_process_without_a_group_logs_by_default(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with caplog.at_level(logging.INFO, "shardwise.meter"):
        (found,) = train(StepMeter(model, TOKENS, every=1, peak_flops=1e12), model, 1, loss=0.5)
    assert found is not None
    assert found["mfu"] is not None
    assert found["mfu"] > 0
    assert found["peak_memory_bytes"] is not None
    assert found["peak_memory_bytes"] >= (found["memory_bytes"] or 0)
    assert "step 1: " in caplog.text
    assert "loss=0.5" in caplog.text


def test_a_model_between_steps_has_no_hooks() -> None:
    model = net()
    train(StepMeter(model, peak_flops=1e12), model, 1)
    torch.save(model, io.BytesIO())


def test_a_step_that_raises_does_not_count() -> None:
    meter = StepMeter(net())
    with pytest.raises(ValueError, match="no batch"), meter.step():
        raise ValueError("no batch")
    assert meter.num_steps == 0
    assert meter.log(loss=1.0) is None


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989e12), ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA A10", 125e12), ("NVIDIA A10G", 70e12), ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12), ("Tesla K80", None),
    ],
)  # fmt: skip
def test_devices_are_known_by_name(name: str, flops: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert module._peak_flops("auto", torch.device("cuda", 0)) == flops


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="every is 0, expected 1 or more"):
        StepMeter(net(), every=0)
    with pytest.raises(ConfigError, match="a writer is a dict, expected one with add_scalar, log_metrics or log"):
        StepMeter(net(), writers=({},))
    with pytest.raises(ConfigError, match="peak_flops is 'H100', expected a number, 'auto' or None"):
        StepMeter(net(), peak_flops="H100")
    with pytest.raises(ConfigError, match="17 values, expected at most 16"):
        train(StepMeter(net(), every=1), net(), 1, **{f"value{n}": 1.0 for n in range(17)})
    for value, what in ((torch.ones(3), r"tensor of shape \(3,\)"), ("a", "str"), ("1", "str"), (None, "NoneType")):
        with pytest.raises(ConfigError, match=f"StepMeter: norm is a {what}, expected a number"):
            train(StepMeter(net(), every=1), net(), 1, norm=value)
