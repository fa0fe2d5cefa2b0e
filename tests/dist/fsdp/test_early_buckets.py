"""replicate called once for a whole model: gradients are summed while backward runs, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.compare import assert_gradients, average_gradients, is_incomplete, local
from helpers.inside import Recorder, all_reduced, engine_of, full_from, over, parts_from
from helpers.models import Block
from helpers.pairs import few, pairwise
from helpers.ranks import on_ranks
from helpers.sharded import batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import DesyncError, TransportError, policy, replicate
from shardwise.collectives.routes import Transport
from shardwise.consistency.agreement import MismatchCheck
from shardwise.observe import Op

NUM_BLOCKS, WIDTH = 6, 7
BYTES = sum(param.numel() for param in Block(WIDTH, 2 * WIDTH).parameters()) * 4


class Chain(nn.Module):
    """Blocks in a row; ``ways`` says of each how it runs."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, 2 * WIDTH) for _ in range(NUM_BLOCKS))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.ways = dict(enumerate(ways))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            how = self.ways.get(number, "")
            if how in ("reentrant", "not reentrant"):
                x = checkpoint(block, x, use_reentrant=how == "reentrant")
            elif how != "left out":
                x = block(x)
            if how == "twice":
                x = block(x)
        return x * self.scale


def made(*ways: str, style: str = "mesh", change: Any = None) -> tuple[nn.Module, Any]:
    """Return a reference and the same model, replicated as one unit."""
    torch.manual_seed(0)
    reference = Chain(*ways)
    if change is not None:
        change(reference)
    model = copy.deepcopy(reference)
    replicate(model, **({} if style == "mesh" else {"process_group": dist.group.WORLD}))
    return reference, model


def assert_same_gradients(reference: nn.Module, model: nn.Module) -> None:
    average_gradients(reference)
    assert_gradients(model, reference)


@contextmanager
def small_buckets(large_numel: int = 1 << 20) -> Iterator[None]:
    """Let two blocks fill a bucket, and tensors of ``large_numel`` go in their own memory."""
    with full_from(2 * BYTES), parts_from(large_numel):
        yield


@on_ranks(2)
@pytest.mark.parametrize("style", ["mesh", "older"])
def test_sums_begin_while_backward_runs(style: str) -> None:
    with small_buckets():
        _, model = made(style=style)
        for step in range(3):
            x = batch(step).requires_grad_()
            before_first: list[int] = []
            with all_reduced() as seen:
                out = model(x)
                x.register_hook(lambda _, seen=seen, found=before_first: found.append(len(seen)))
                out.sum().backward()
            assert len(seen) == 4  # the last is of what lies before the blocks
            assert before_first[0] >= 2, (before_first, seen)


@on_ranks()
@pytest.mark.parametrize(
    ("style", "large_numel", "transport", "num_ranks"),
    few(pairwise(["mesh", "older"], [40, 1 << 20], ["auto", "gloo"], [2, 4]), 2),
)
def test_gradients_are_those_of_one_process(style: str, large_numel: int, transport: Transport) -> None:
    ways = [(), ("", "twice"), ("", "left out", "left out"), ("", "reentrant", "", "reentrant"), ("not reentrant",) * 6]
    with small_buckets(large_numel), over(transport):
        for run in ways:
            reference, model = made(*run, style=style)
            for step in range(2):
                x = batch(step)
                for each in (reference, model):
                    each(x).square().sum().backward()
                assert_same_gradients(reference, model)
                for each in (reference, model):
                    each.zero_grad()


def freeze_some(model: Any) -> None:
    for each in (model.nothing, *list(model.blocks)[1:4]):
        each.requires_grad_(False)


@on_ranks(2)
def test_a_hook_on_sums_sees_all_of_the_unit_at_once() -> None:
    with small_buckets(40):
        reference, model = made()
        seen: list[int] = []
        model.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
        for each in (reference, model):
            each(batch()).square().sum().backward()
        assert_same_gradients(reference, model)
        [numel] = seen
        assert numel >= sum(param.numel() for param in reference.parameters())


@on_ranks(2)
@pytest.mark.parametrize("style", ["mesh", "older"])
def test_frozen_thawed_converted_and_new_parameters(style: str) -> None:
    with small_buckets(40):
        reference, model = made(style=style, change=freeze_some)
        model(batch()).sum().backward()
        model.zero_grad()
        recorder = Recorder(engine_of(model))
        for step in range(6):
            recorder.calls.clear()
            if step == 2:
                for each in (reference, model):
                    each.requires_grad_(True)
            if step == 3:
                for each in (reference, model):
                    each.double()
            if step == 4:
                for each in (reference, model):
                    up = each.blocks[2].up
                    up.weight = nn.Parameter(torch.full_like(local(up.weight.detach()), 0.5))
            x = batch(step).to(next(reference.parameters()).dtype)
            for each in (reference, model):
                each(x).square().sum().backward()
            assert_same_gradients(reference, model)
            assert [call.op for call in recorder.calls].count(Op.REDUCE) == 1
            for each in (reference, model):
                each.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("style", ["mesh", "older"])
def test_accumulated_and_repeated_backwards(style: str) -> None:
    with small_buckets(40):
        reference, model = made(style=style)
        for step in range(3):
            for microbatch in range(3):
                x = batch(3 * step + microbatch)
                leaves_out = (step, microbatch) == (1, 2)  # what is held goes all the same
                for each in (reference, model):
                    each.ways = {2: "left out"} if leaves_out else {}
                reference(x).square().sum().backward()
                with policy(model, sync=microbatch == 2), all_reduced() as seen:
                    model(x).square().sum().backward()
                assert bool(seen) == (microbatch == 2)
            assert_same_gradients(reference, model)
            for each in (reference, model):
                each.zero_grad()
                loss = each(batch(step)).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
            assert_same_gradients(reference, model)
            for each in (reference, model):
                each.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_backward_that_raises_after_sums_leaves_what_was_before(transport: Transport, is_held: bool) -> None:
    with small_buckets(40), over(transport):
        reference, model = made()
        for step in range(4):
            x = batch(step).requires_grad_()
            if is_held:
                reference(x.detach()).square().sum().backward()
                with policy(model, sync=False):
                    model(x.detach()).square().sum().backward()
            if step in (1, 2):

                def fail(_: torch.Tensor) -> None:
                    raise ValueError("in backward")

                out = model(x)
                x.register_hook(fail)
                with pytest.raises(ValueError, match="in backward"):
                    out.square().sum().backward()
                assert all(is_incomplete(param) for param in model.parameters())
            for each in (reference, model):
                each(x.detach()).square().sum().backward()
            assert_same_gradients(reference, model)
            for each in (reference, model):
                each.zero_grad()


@on_ranks(4)
def test_sums_are_of_the_same_elements_whenever_they_are_sent() -> None:
    # Sums over more than two ranks depend on where an element lies: a run that begins again must find the same bits.
    with small_buckets(), over("gloo"):
        found: list[list[torch.Tensor]] = []
        for way in ("first step", "third step", "after what was held, which all goes at the end"):
            _, model = made()
            if way == "third step":
                for _ in range(2):
                    model(batch(9)).sum().backward()
                    model.zero_grad()
            elif way != "first step":
                with policy(model, sync=False):
                    (model(batch(9)).sum() * 0).backward()
            with all_reduced() as seen:
                model(batch(1)).square().sum().backward()
            assert len(seen) == 4, (way, seen)
            found.append([local(param.grad) for param in model.parameters() if param.grad is not None])
        for other in found[1:]:
            for left, right in zip(found[0], other, strict=True):
                assert torch.equal(left, right)


@on_ranks(2)
def test_ranks_may_use_different_parts_where_zeros_are_sent_for_the_others() -> None:
    with small_buckets(40):
        reference, model = made()
        model.set_reduce_scatter_unused_params(True)
        for step in range(3):
            for each in (reference, model):
                each.ways = {4: "left out"} if dist.get_rank() == 1 else {}
                each(batch(step)).square().sum().backward()
            for param in reference.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            assert_same_gradients(reference, model)
            for each in (reference, model):
                each.zero_grad()


@on_ranks(2)
def test_only_a_first_step_asks_other_ranks_what_they_reduce() -> None:
    with small_buckets(40):
        _, model = made(change=lambda model: model.nothing.requires_grad_(False))
        for step in range(3):
            loss = model(batch(step)).sum()
            with mock.patch.object(MismatchCheck, "check_facts") as check:
                loss.backward()
            assert check.call_count == (step == 0), check.call_args_list  # of all parameters, in the first


@on_ranks(2)
@pytest.mark.parametrize("how", ["not last", "manual", "no sum over replicas", "by hand", "kept away"])
def test_backwards_whose_end_the_user_says(how: str) -> None:
    with small_buckets(40):
        reference, model = made()
        model.set_manual_backward_finalization(how == "manual")
        for step in range(3):
            for microbatch in range(2):
                x = batch(2 * step + microbatch)
                if how == "not last":
                    model.set_is_last_backward(microbatch == 1)
                elif how == "no sum over replicas":
                    model.set_requires_all_reduce(microbatch == 1)
                elif how == "kept away":
                    model.set_unshard_in_backward(False)
                reference(x).square().sum().backward()
                loss = model(x).square().sum()
                if how in ("by hand", "kept away"):
                    model.reshard()
                with all_reduced() as seen:
                    loss.backward()
                assert bool(seen) == (how != "manual" and (how != "no sum over replicas" or microbatch == 1))
            if how == "manual":
                model.finalize_backward()
            assert_same_gradients(reference, model)
            for each in (reference, model):
                each.zero_grad()


@on_ranks(2, group_timeout_s=3, fresh=True)
@pytest.mark.parametrize(
    ("transport", "large_numel"), [("auto", 40), pytest.param("gloo", 1 << 20, marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_leaves_something_out_is_named(transport: Transport, large_numel: int) -> None:
    with small_buckets(large_numel), over(transport):
        _, model = made()
        for step in range(3):
            if step == 2 and dist.get_rank() == 1:
                model.ways = {3: "left out"}
            loss = model(batch(step)).sum()
            if step == 2:
                with pytest.raises((DesyncError, TransportError)) as found:
                    loss.backward()
                assert "blocks.3" in str(found.value) or "rank 1" in str(found.value), found.value
            else:
                loss.backward()
