"""The engine on an accelerator, without one: every order that streams and their memory need is there, and none is idle.

Each program runs once in this process, on tensors of the host, as one rank of a group that carries nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from fake_accelerator.timeline import Work
from helpers.streams import PROGRAMS, Seen, called, run

from shardwise.collectives import c10d
from shardwise.collectives.streams import CommStreams, SideStream
from shardwise.fsdp import gradients
from shardwise.fsdp.gradients import Reduction
from shardwise.fsdp.unit_memory import UnitMemory

ORDERS = ("wait_current", "wait_event", "current_waits")
Site = tuple[str, ...]  # the function that orders, how, which lane


def site_of(lane: SideStream, how: str) -> Site:
    frame = sys._getframe(2)
    while frame.f_code.co_name in ORDERS:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_name, how, lane._name


@contextmanager
def orders_seen(dropped: Site | None = None) -> Iterator[set[Site]]:
    """Note where streams are ordered; leave ``dropped`` out."""
    seen: set[Site] = set()

    def watched(how: str, real: Callable[..., None]) -> Callable[..., None]:
        def order(lane: SideStream, *args: Any) -> None:
            site = site_of(lane, how)
            seen.add(site)
            if site != dropped:
                real(lane, *args)

        return order

    with mock.patch.multiple(SideStream, **{how: watched(how, getattr(SideStream, how)) for how in ORDERS}):
        yield seen


all_sites: set[Site] = set()


@functools.cache
def result_of(name: str) -> Seen:
    with orders_seen() as sites:
        seen = run(called(name))
    all_sites.update(sites)
    return seen


@pytest.mark.parametrize("name", [program.name for program in PROGRAMS])
def test_nothing_races_and_no_memory_serves_twice_at_once(name: str) -> None:
    assert not result_of(name).violations


@pytest.mark.parametrize("name", [program.name for program in PROGRAMS])
def test_a_step_leaves_no_memory_behind(name: str) -> None:
    _, second, third = result_of(name).live_bytes
    assert third == second


@pytest.mark.parametrize("name", [program.name for program in PROGRAMS if "offload" not in program.name])
def test_the_host_waits_for_nothing_in_a_step(name: str) -> None:
    assert result_of(name).host_waits == [[], [], []]


def test_the_host_waits_once_for_gradients_that_live_there() -> None:
    for name in ("offload", "offload, bf16", "offload, mixed", "offload, defers", "hybrid, offload"):
        assert result_of(name).host_waits == [["Event.synchronize (of store)"]] * 3, name


def test_staging_memory_peaks_where_the_plan_says() -> None:
    for name in ("plain", "bf16", "tied", "offload, bf16", "hybrid", "matrices", "matrices, offload, bf16"):
        measured, planned = result_of(name).peaks[-1]
        assert measured == planned, name
    measured, planned = result_of("mixed").peaks[-1]
    assert measured == (planned or 0) - 128  # of a parameter without a gradient, which the plan expects


def test_ranks_far_apart_of_worlds_of_all_sizes_are_ordered() -> None:
    for name, rank, world in (
        ("offload, bf16", 0, 1),
        ("mixed, bf16", 63, 64),
        ("offload, bf16", 0, 64),
        ("mixed, bf16", 16_383, 16_384),
        ("hybrid, offload", 699, 16_384),
    ):
        assert not run(replace(called(name), num_steps=2), rank, world).violations, (name, rank, world)


def test_collectives_are_issued_in_one_order_on_all_ranks() -> None:
    for name in ("tied", "hybrid, sums at last", "recomputes", "a smaller mesh after forward"):
        issued = [run(replace(called(name), num_steps=1), rank, 8).fake.collectives for rank in (0, 5, 7)]
        without_groups = [[(each.name, each.numel, each.dtype, each.lane) for each in one] for one in issued]
        assert without_groups[0], name
        assert without_groups[0] == without_groups[1] == without_groups[2], name


def test_a_unit_takes_one_event_per_direction_and_pass() -> None:
    # Three units, forward and backward: a gather takes one event back from the current stream when its buffer has been
    # read, a reduction one to its lane.  Beside these there is one at the start of forward and one at the end of backward.
    units = 3
    events = result_of("plain").num_events[-1]
    assert events == {"gather": 2 * units, "reduce": units + 1, "current": 2 * units + units + 1}
    offloaded = result_of("offload").num_events[-1]
    assert offloaded == {**events, "reduce": 2 * units + 1, "fetch": 2 * units + 1, "store": 1}


# ---- what runs beside what ----


def are_concurrent(one: Work, other: Work) -> bool:
    return not one.comes_after(other) and not other.comes_after(one)


@functools.cache
def offloaded_works() -> tuple[list[Work], list[str]]:
    seen = run(called("offload"), keeps_works=True)
    return seen.fake.timeline.works, seen.fake.timeline.names


def beside(what: str, lane: str, compute: str) -> int:
    """Return how many pieces of work ``what`` of ``lane`` may run beside some ``compute`` of the current stream."""
    every, names = offloaded_works()
    mine = [work for work in every if work.what == what and names[work.at.lane] == lane]
    computing = [work for work in every if work.what == compute and names[work.at.lane] == "current"]
    assert mine, (what, lane)
    assert computing, compute
    return sum(any(are_concurrent(work, each) for each in computing) for work in mine)


@pytest.mark.parametrize(
    ("what", "lane", "compute", "per_step"),
    [
        ("_allgather_base_", "gather", "addmm", 2),  # all but the first unit's
        ("_allgather_base_", "gather", "gelu_backward", 2),
        ("_reduce_scatter_base_", "reduce", "gelu_backward", 2),  # all but the last unit's
        ("copy_", "store", "gelu_backward", 2),
        ("copy_", "fetch", "addmm", 2),
        ("copy_", "fetch", "gelu_backward", 2),
    ],
)
def test_communication_runs_beside_compute(what: str, lane: str, compute: str, per_step: int) -> None:
    assert beside(what, lane, compute) >= per_step * 3


def test_copies_to_the_host_run_beside_the_next_reduction() -> None:
    every, names = offloaded_works()
    copies = [work for work in every if names[work.at.lane] == "store" and work.what == "copy_"]
    scatters = [work for work in every if work.what == "_reduce_scatter_base_"]
    assert sum(any(are_concurrent(copy, scatter) for scatter in scatters) for copy in copies) >= 2 * 3


@pytest.mark.parametrize("name", ["replicate", "replicate, bf16", "replicate, accumulates", "replicate, raises"])
def test_one_unit_is_summed_beside_the_rest_of_its_backward(name: str) -> None:
    with mock.patch.object(gradients, "FULL_BYTES_ON_STREAMS", 300):
        seen = run(called(name), keeps_works=True)
    assert not seen.violations
    _, second, third = seen.live_bytes
    assert third == second
    sums = [work for work in seen.fake.timeline.works if work.what == "allreduce_"]
    computing = [work for work in seen.fake.timeline.works if work.what == "gelu_backward"]
    assert sum(any(are_concurrent(one, work) for work in computing) for one in sums) >= 3


def test_all_reduces_over_replicas_run_beside_the_next_reduce_scatter() -> None:
    seen = run(called("hybrid"), keeps_works=True)
    every = seen.fake.timeline.works
    sums = [work for work in every if work.what == "allreduce_"]
    scatters = [work for work in every if work.what == "_reduce_scatter_base_"]
    assert sum(any(are_concurrent(one, scatter) for scatter in scatters) for one in sums) >= 2 * 3


# ---- what happens without each order ----

# Of each order of streams: the program in which it is missed, and the rule that is broken.
MISSED: dict[Site, tuple[str, str]] = {
    ("_begin_forward", "wait_current", "gather"): ("plain", "race: _allgather_base_"),
    ("_begin_forward", "wait_event", "gather"): ("post-optimizer event", "race: _allgather_base_"),
    ("unshard", "wait_current", "gather"): ("a smaller mesh after forward", "race: _allgather_base_"),
    ("_come_after", "current_waits", "gather"): ("plain", "race: _foreach_copy_"),
    ("_come_after", "current_waits", "reduce"): ("plain", "reuse: empty"),
    ("_come_after", "wait_event", "fetch"): ("offload", "reuse: empty"),
    ("end", "wait_current", "gather"): ("plain", "reuse: empty"),
    ("release", "wait_current", "gather"): ("matrices", "reuse: empty"),
    ("_all_gather_on_stream", "wait_event", "gather"): ("offload", "race: _allgather_base_"),
    ("_reduce_scatter_on_stream", "wait_current", "reduce"): ("plain", "race: _reduce_scatter_base_"),
    ("all_reduce_by_backend", "wait_current", "replicas"): ("replicate", "race: allreduce_"),
    ("_follow_on_streams", "wait_current", "store"): ("offload", "race: copy_"),
    ("current_waits_for_reductions", "current_waits", "reduce"): ("hook on sums", "race: "),
    ("current_waits_for_reductions", "current_waits", "replicas"): ("replicate", "race: "),
    ("current_waits_for_results", "current_waits", "replicas"): ("hybrid, raises", "race: "),
    ("current_waits_for_results", "current_waits", "store"): ("offload, raises in backward", "reuse: empty"),
    ("_come_after", "current_waits", "fetch"): ("replicate, blocks, offload", "race: "),
    ("end", "wait_current", "fetch"): ("replicate, blocks, offload", "reuse: "),
    ("host_waits_for_copies", "wait_event", "store"): ("offload, evaluates", "race: mul_"),
    ("reduce_scatter", "wait_current", "reduce"): ("along the tree", "race: fill_"),
    ("reduce_scatter_by_backend", "wait_current", "reduce"): ("along the tree", "race: copy_"),
    ("reduce_scatter_by_backend", "wait_current", "replicas"): ("along the tree, hybrid", "race: copy_"),
    ("_come_after", "current_waits", "replicas"): ("along the tree, hybrid", "reuse: empty"),
    ("all_reduce", "wait_current", "replicas"): ("along the tree, hybrid, offload", "race: "),
}


@pytest.mark.parametrize("site", MISSED, ids=lambda site: "-".join(site))
def test_an_order_that_is_left_out_is_missed(site: Site) -> None:
    name, rule = MISSED[site]
    with orders_seen(dropped=site):
        found = run(replace(called(name), num_steps=2)).violations
    assert found
    assert found[0].startswith(rule), found[0]


def test_the_engine_has_no_order_beside_those() -> None:
    for program in PROGRAMS:
        result_of(program.name)
    assert all_sites == set(MISSED)


def keeps_nothing(real: Any) -> Any:
    def made(
        self: Any, lane: SideStream, end: Any, forget: Any, keeps: object, fetch: SideStream | None = None
    ) -> None:
        real(self, lane, end, forget, None, fetch)

    return made


def drops_its_section(real: Any) -> Any:
    def scatter(self: Any) -> None:
        real(self)
        self.section = None

    return scatter


def is_asynchronous(real: Any) -> Any:
    def gather(self: Any, packed: Any, shard: Any, async_op: bool) -> None:
        real(self, packed, shard, async_op=True)

    return gather


def never(real: Any) -> Any:
    return lambda *_: None


def not_before_settling(real: Any) -> Any:
    def wait(streams: CommStreams) -> None:
        if sys._getframe(1).f_code.co_name != "settle":
            real(streams)

    return wait


HOLDS = [
    (
        "the host writes shards where copies have read them",
        CommStreams,
        "host_waits_for_copies",
        not_before_settling,
        "offload, replaces",
        "race: copy_",
    ),
    (
        "a fetched shard is kept until it is gathered",
        c10d.StreamWork,
        "__init__",
        keeps_nothing,
        "offload, prefetches as told",
        "reuse: ",
    ),
    ("a section is kept until it is on the host", Reduction, "scatter", drops_its_section, "offload", "reuse: "),
    (
        "the host waits for copies before it reads them",
        CommStreams,
        "host_waits_for_copies",
        never,
        "offload",
        "race: _foreach_add_ while optimizer steps SGD on lane 'host'",
    ),
    (
        "a lane carries out its collectives itself",
        c10d.GroupCommunicator,
        "_start_gather",
        is_asynchronous,
        "plain",
        "race: _foreach_copy_",
    ),
]


@pytest.mark.parametrize(
    ("owner", "method", "change", "name", "rule"), [each[1:] for each in HOLDS], ids=[e[0] for e in HOLDS]
)
def test_what_is_kept_and_waited_for_is_missed(owner: Any, method: str, change: Any, name: str, rule: str) -> None:
    with mock.patch.object(owner, method, change(getattr(owner, method))):
        found = run(replace(called(name), num_steps=2)).violations
    assert found
    assert found[0].startswith(rule), found[0]


@pytest.mark.parametrize("name", ["writes to full parameters", "replaces"])
def test_what_the_engine_writes_to_shards_is_missed_if_gathers_do_not_wait_for_it(name: str) -> None:
    unnoticed = property(lambda memory: False, lambda memory, value: None)
    with mock.patch.object(UnitMemory, "is_written", unnoticed, create=True):
        found = run(replace(called(name), num_steps=2)).violations
    assert found
    assert found[0].startswith("race: _allgather_base_"), found[0]
