"""A step in a transaction happens on all ranks or on none, whatever a rank raises in it and wherever the others wait.

No group here gives up before the pool does: nobody hears of a fault by a timeout of the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.inside import parts_from
from helpers.jobs import Job, tell
from helpers.ranks import on_ranks
from helpers.undone import APIS, PLACES, Program, build, one_step, struck, train
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise import RejectedStep, StepError, TransportError, fully_shard, set_default_transport, transaction
from shardwise.testing import faults
from shardwise.torch_private import local_of

KINDS = (KeyError, RejectedStep)
PATIENT = {"group_timeout_s": 600.0, "timeout_s": 60.0}


def trained(api: str, transport: str) -> Program:
    program = build(api, transport)
    torch.manual_seed(8)
    train(program, 3)
    assert program.steps == ["committed"] * 3
    return program


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    assert list(found) == list(wanted), what
    wrong = [name for name in found if not torch.equal(found[name], wanted[name])]
    assert not wrong, f"{what}: {wrong}"


def assert_undone(expected: Program, transport: str, place: str, step: int, rank: int = 1) -> None:
    program = build(expected.api, transport)
    torch.manual_seed(8)
    counted = step + (place == "stepped")  # faults count a step as over when the optimizer has made it

    def body() -> None:
        train(program, 3, retry=KINDS)

    is_struck = struck(place, body, rank=rank, step=counted)
    what = f"{expected.api} over {transport}, {place} in step {step}"
    assert is_struck == (dist.get_rank() == rank), what
    assert program.steps == [*["committed"] * (step - 1), "again", *["committed"] * (4 - step)], what
    assert_same(program.tensors(), expected.tensors(), what)
    assert program.losses[-1] == expected.losses[-1], what


def assert_all_undone(api: str, transport: str, places: Sequence[str], rank: int = 1) -> None:
    with parts_from(8):
        expected = trained(api, transport)
        for place in places:
            assert_undone(expected, transport, place, 2, rank)
        # Only rank 1 over shared memory fails in the first step: the ledger does not depend on the transport.
        for place in (
            ("data", "optimizer step") if (transport, rank) == ("auto", 1) else ()
        ):  # where ranks have opened and agreed on more, or less, than others
            assert_undone(expected, transport, place, 1, rank)
    set_default_transport("auto")


# An API is struck at every second place, each place behind every second API.
LIKE_OTHERS = ("elementwise", "shard_model", "zero2")  # what they change, fully_shard and whole matrices change too
STRUCK = [(api, (number + half) % 2, half) for number, api in enumerate(APIS) for half in (0, 1)]


@pytest.mark.parametrize(
    ("api", "first"),
    [
        pytest.param(api, first, marks=[pytest.mark.exhaustive] * (half or api in LIKE_OTHERS))
        for api, first, half in STRUCK
    ],
)
@on_ranks(2, **PATIENT)
def test_a_step_that_a_rank_ends_is_made_again_to_the_bit(api: str, first: int) -> None:
    assert_all_undone(api, "auto", PLACES[first::2])


@pytest.mark.parametrize(("transport", "api"), [("gloo", "fully_shard"), ("collective", "replicate")])
@on_ranks(2, **PATIENT)
def test_a_step_is_made_again_over_connections_that_were_closed(transport: str, api: str) -> None:
    assert_all_undone(api, transport, ["data", "backward", "stepped"])


@pytest.mark.parametrize(
    "transport", ["auto", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gloo", "collective"))]
)
@on_ranks(4, **PATIENT)
def test_ranks_that_wait_for_ranks_that_wait_hear_of_it(transport: str) -> None:
    apis = {"auto": ("fully_shard", "zero1"), "gloo": ("hsdp",), "collective": ("fully_shard",)}
    for api in apis[transport]:
        assert_all_undone(api, transport, ["backward", "stepped"], rank=2)


@on_ranks(2, **PATIENT)
def test_gradients_of_earlier_microbatches_are_those_before_the_step() -> None:
    for api in ("fully_shard", "replicate", "zero1", "zero2"):
        program = build(api, "auto")
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        program.model(batch).square().mean().backward()
        before = program.tensors()

        def microbatch(program: Program = program, batch: torch.Tensor = batch) -> None:
            with transaction(program.model, program.optimizer, skip=KeyError) as step:
                program.model(2 * batch).square().mean().backward()
                faults.reach("end")
            program.steps.append(step.outcome)

        struck("end", microbatch, rank=1)
        assert_same(program.tensors(), before, api)
        microbatch()
        assert program.steps == ["skipped", "committed"]
        program.optimizer.step()


@on_ranks(2, **PATIENT)
def test_gradients_that_wait_for_sync_are_those_before_the_step() -> None:
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    results: list[dict[str, torch.Tensor]] = []
    for is_faulty in (False, True):
        program = build("fully_shard", "auto")
        program.net.eval()
        program.net.set_requires_gradient_sync(False)  # type: ignore[operator]
        program.net(batch).square().mean().backward()
        program.net.set_requires_gradient_sync(True)  # type: ignore[operator]

        def rest(program: Program = program) -> bool:
            with transaction(program.model, program.optimizer, retry=KeyError) as step:
                program.net(2 * batch).square().mean().backward()
                faults.reach("end")
            return step.again

        if is_faulty:
            struck("end", rest, rank=1)
        assert not rest()
        results.append(program.tensors())
    assert_same(results[1], results[0], "held gradients")


@on_ranks(2, **PATIENT)
def test_an_exception_that_is_not_named_is_raised_on_all_ranks_and_training_can_go_on() -> None:
    rank = dist.get_rank()
    for api in ("fully_shard", "zero1"):
        program = build(api, "auto")
        train(program, 1)
        before = program.tensors()
        with pytest.raises(KeyError if rank == 1 else StepError) as caught:
            struck("forward", lambda program=program: train(program, 1), rank=1)
        assert_same(program.tensors(), before, api)
        if rank == 0:
            error = caught.value
            assert isinstance(error, StepError)
            assert (error.rank, error.kind) == (1, "KeyError")
            assert "injected: raise KeyError of rank 1 at forward" in error.text
            assert error.place.startswith("undone.py:")
            assert f"rank 1 raised KeyError at {error.place}" in str(error)
        train(program, 1)
        assert program.steps == ["committed"] * 2


@on_ranks(2, **PATIENT)
def test_the_rank_that_raised_chooses_by_the_class_of_its_exception() -> None:
    program = build("fully_shard", "auto")
    train(program, 1)
    before = program.tensors()
    with transaction(program.model, program.optimizer, retry=MemoryError, skip=RejectedStep) as step:
        one_step(program, torch.ones(6, 8), 1, step)
        if dist.get_rank() == 1:
            step.reject("the loss is NaN")
    assert (step.outcome, step.again) == ("skipped", False)
    assert step.cause is not None
    assert (step.cause.rank, step.cause.kind, step.cause.text) == (1, "RejectedStep", "the loss is NaN")
    assert str(step.cause).endswith("are those before it.")  # the program has said already what skips a step
    assert_same(program.tensors(), before, "skipped")
    with transaction(program.model, program.optimizer, retry=MemoryError, skip=RejectedStep) as step:
        if dist.get_rank() == 0:
            raise MemoryError
        one_step(program, torch.ones(6, 8), 1, step)
    assert (step.outcome, step.again) == ("again", True)
    assert_same(program.tensors(), before, "again")


@pytest.mark.parametrize("steps", [True, False])
@on_ranks(2, **PATIENT)
def test_what_a_forward_has_written_is_undone(steps: bool) -> None:
    """``Embedding(max_norm=)`` writes to its parameter, BatchNorm to its buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state() -> list[torch.Tensor]:
        return [
            each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in model.state_dict().values()
        ]

    before = state()
    with transaction(model, optimizer, skip=ValueError) as step:
        model(torch.arange(8)).square().sum().backward()
        if steps:
            optimizer.step()
        raise ValueError("as a test")
    assert step.outcome == "skipped"
    assert all(map(torch.equal, state(), before))


@on_ranks(2, **PATIENT)
def test_a_scaler_and_a_schedule_are_those_before_the_step() -> None:
    program = build("fully_shard", "auto")
    train(program, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    schedule = torch.optim.lr_scheduler.StepLR(program.optimizer, 1)
    scaler.scale(torch.ones(()))
    for is_struck in (True, False):
        with transaction(program.model, program.optimizer, skip=KeyError, also=[scaler, schedule]):
            program.optimizer.zero_grad()
            scaler.scale(program.model(torch.ones(6, 8)).sum()).backward()
            scaler.unscale_(program.optimizer)
            scaler.step(program.optimizer)
            scaler.update()
            schedule.step()
            if is_struck and dist.get_rank() == 1:
                raise KeyError
        made = 0 if is_struck else 1
        assert scaler.get_scale() == 4.0 * 2**made
        assert schedule.last_epoch == made
        assert program.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**made)


@on_ranks(2, **PATIENT)
def test_a_step_costs_copies_of_what_it_changes() -> None:
    for transport in ("auto", "gloo"):
        program = build("fully_shard", transport)
        train(program, 2)
        ledger = transaction(program.model, program.optimizer, also=["rng"])._ledger
        program.optimizer.zero_grad()
        train(program, 1)
        params = [param.to_local() for param in program.net.parameters()]  # type: ignore[attr-defined]
        buffers = list(program.net.buffers())
        of_state = sum(2 * param.nbytes + 4 for param in params)
        expected = sum(param.nbytes for param in params) + of_state + sum(buffer.nbytes for buffer in buffers)
        assert ledger.saved.num_bytes == expected
        train(program, 1)  # with the gradients of the last step still there when it begins
        assert ledger.saved.num_bytes == expected + sum(param.nbytes for param in params)
    set_default_transport("auto")


@on_ranks(2, **PATIENT)
def test_ddp_keeps_its_order_of_buckets_when_a_step_is_undone() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        for is_struck in (True, False):
            with transaction(model, optimizer, skip=KeyError) as step, suppress(ZeroDivisionError):
                optimizer.zero_grad()
                if is_struck and number % 2 == dist.get_rank():
                    raise KeyError
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
            assert step.outcome == ("skipped" if is_struck else "committed")


@on_ranks(2, **PATIENT)
def test_state_that_somebody_holds_is_that_before_the_step() -> None:
    found: list[dict[str, torch.Tensor]] = []
    for is_faulty in (False, True):
        program = build("elementwise", "auto")
        torch.manual_seed(8)
        train(program, 2)
        held = program.optimizer.state_dict()["state"]
        body = partial(train, program, 2, retry=KINDS)
        if is_faulty:
            struck("stepped", body, rank=1)
        else:
            body()
        found.append(program.tensors())
        live = program.optimizer.state_dict()["state"]
        for name, values in held.items():
            of_elements = {key: value for key, value in values.items() if value.dim()}  # step counts are copies
            assert all(torch.equal(local_of(value), local_of(live[name][key])) for key, value in of_elements.items()), (
                name
            )
    assert_same(found[1], found[0], "held state")


def killed_in_a_step(transport: str, at: str) -> str:
    program = build("fully_shard", transport)
    train(program, 1)
    try:
        with faults.kill_at(at, rank=1):
            tell(None)
            train(program, 1, retry=Exception)
    except TransportError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("transport", "at"), [("auto", "backward"), ("collective", "backward"), ("auto", "agreement")])
def test_a_rank_that_is_gone_is_named_and_nothing_is_made_again(transport: str, at: str) -> None:
    with Job(killed_in_a_step, transport, at, num_ranks=3, group_timeout_s=300.0) as job:
        for rank in (0, 2):
            outcome = job.message(rank)
            while not hasattr(outcome, "value"):
                outcome = job.message(rank)
            assert "rank 1 is gone in a transaction" in outcome.value


@on_ranks(2, **PATIENT)
def test_an_exception_after_an_inner_transaction_is_heard_by_ranks_that_wait() -> None:
    """As in a GAN: each optimizer has a transaction, one around the other."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(first)
    fully_shard(second)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    for _ in range(2):
        with transaction(first, optimizers[0], skip=KeyError) as outer:
            with transaction(second, optimizers[1]):
                second(torch.ones(2, 4)).sum().backward()
                optimizers[1].step()
            if dist.get_rank() == 1:
                raise KeyError
            first(torch.ones(2, 4)).sum().backward()  # over shared memory it waits for rank 1
            optimizers[0].step()
        assert outer.outcome == "skipped"
