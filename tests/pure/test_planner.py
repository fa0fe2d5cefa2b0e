"""The model of memory and time: values alone, closed form in ranks."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import ConfigError, Hardware
from shardwise.layout import ChunkShard
from shardwise.plan.grouping import Child
from shardwise.plan.schedule import StepEvent
from shardwise.planner.advice import Choices, Search, evaluate, step_under
from shardwise.planner.hardware import (
    COLLECTIVE,
    HARDWARE,
    ONE_UNIT,
    SHARED,
    ParamFacts,
    Profile,
    Setting,
    StepMark,
    Stretch,
    Wire,
    Work,
    read_hardware,
)
from shardwise.planner.rank_step import KINDS, RankMemory, rank_units

MB = 1_000_000
BLOCK, NORM = 4_096_000, 4096  # bytes of the parameters of a block, and of the root
PARAMETERS, GRADIENTS, FULL = (KINDS.index(kind) for kind in ("parameters", "gradients", "full parameters"))


def a_profile(
    num_blocks: int = 3, rows: int = 1000, width: int = 1024, recompute: bool = False, keep_blocks: int = 0
) -> Profile:
    """A root without parameters of its own but a norm, and blocks of one matrix that keep 8 MB each, 2 if recomputed."""
    params = [ParamFacts("norm", (width,), "float32", 4, True, True, 0)]
    params += [
        ParamFacts(f"blocks.{i}.weight", (rows, width), "float32", 4, True, True, i + 1) for i in range(num_blocks)
    ]
    work = Work(1e12, 1e9, 10)
    num_recomputed = num_blocks - keep_blocks if recompute else 0

    def kept_after(block: int) -> int:
        return 2 * MB * min(block, num_recomputed) + 8 * MB * max(block - num_recomputed, 0)

    steps = [(StepMark(StepEvent.PRE_FORWARD), 0)]
    for block in range(1, num_blocks + 1):
        steps += [
            (StepMark(StepEvent.PRE_FORWARD, block), kept_after(block)),
            (StepMark(StepEvent.POST_FORWARD, block), kept_after(block)),
        ]
    steps += [
        (StepMark(StepEvent.POST_FORWARD), kept_after(num_blocks)),
        (StepMark(StepEvent.PRE_BACKWARD), kept_after(num_blocks)),
    ]
    for block in range(num_blocks, 0, -1):
        steps += [
            (StepMark(StepEvent.PRE_BACKWARD, block), kept_after(block - 1)),
            (StepMark(None, block, block), kept_after(block - 1)),
        ]
    steps.append((StepMark(None, 0, 0), 0))
    stretches = tuple(Stretch(mark, left + MB, left, work) for mark, left in steps)
    paths = tuple(f"blocks.{i}" for i in range(num_blocks))
    family = tuple(Child(path, "block", num_bytes=4 * rows * width) for path in paths)
    return Profile(
        "Model",
        tuple(params),
        0,
        0,
        ("", *paths),
        (family,),
        stretches,
        "fp32",
        recompute,
        4,
    )


def held(profile: Profile, setting: Setting, device: str = "cuda") -> RankMemory:
    hardware = replace(HARDWARE["h100" if device == "cuda" else "cpu"], library_bytes=0)
    return step_under(profile, setting, hardware)[0]


@settings(max_examples=15)
@given(st.integers(1, 20_000), st.integers(1, 40), st.sampled_from(["cpu", "cuda"]))
def test_padding_is_what_the_layout_makes(ranks: int, rows: int, device: str) -> None:
    profile, setting = a_profile(2, rows, 64), Setting(ranks=ranks, min_unit_bytes=0)
    unit = rank_units(profile, setting, device)[1]
    section = ChunkShard((rows, 64), 0, ranks).section_numel
    assert unit.shard_bytes == 4 * section
    assert unit.padding_ratio == pytest.approx(section * ranks / (rows * 64))


def test_a_rank_holds_its_shards_and_two_units_at_a_time() -> None:
    profile = a_profile()
    memory = held(profile, Setting(ranks=4))
    assert {moment.held[PARAMETERS] for moment in memory.moments} == {(3 * BLOCK + NORM) // 4}
    # One is full, the next is on its way: the buffer of a gather of one tensor becomes the full parameter.
    assert max(moment.held[FULL] for moment in memory.moments) == 2 * BLOCK + NORM
    assert memory.moments[-1].held[GRADIENTS] == (3 * BLOCK + NORM) // 4


def test_more_ranks_hold_less_and_replicas_hold_more() -> None:
    profile = a_profile()
    peaks = [held(profile, Setting(ranks=ranks)).peak.total for ranks in (2, 8, 40, 1000)]
    assert peaks == sorted(peaks, reverse=True)
    whole = held(profile, Setting(strategy="hsdp", ranks=64, replicas=8)).peak.total
    assert whole == held(profile, Setting(ranks=8)).peak.total


def test_more_ranks_than_rows_gather_padding() -> None:
    profile = a_profile()
    few, many = (evaluate(profile, Setting(ranks=ranks), HARDWARE["h100"]) for ranks in (1000, 16_384))
    assert few.padding_ratio < 1.01
    assert many.padding_ratio == pytest.approx(16.384, rel=0.01)
    assert many.peak.total > few.peak.total
    assert re.fullmatch(r".+: [\d.]+ .iB \(([a-z ]+ [\d.]+ (.i)?B(, )?)+\)", repr(many.peak)), many.peak


def test_gradients_that_wait_for_later_microbatches_stay_whole() -> None:
    profile, waiting = a_profile(), KINDS.index("full gradients")
    once, twice = (
        max(moment.held[waiting] for moment in held(profile, Setting(ranks=4, accumulate=number)).moments)
        for number in (1, 2)
    )
    assert once == BLOCK
    assert twice == 3 * BLOCK + NORM + 2 * BLOCK  # all wait, one is new, and one is the sum of both


def test_offload_leaves_the_device_what_is_computed_with() -> None:
    profile, setting = a_profile(), Setting(ranks=4)
    here, there = held(profile, setting), held(profile, replace(setting, offload=True))
    assert {moment.held[PARAMETERS] for moment in there.moments} == {0}
    assert there.host_bytes == 3 * BLOCK + NORM  # a quarter of parameters, gradients and two states
    assert here.host_bytes == 0


def test_a_step_takes_as_long_as_its_computation_and_what_nothing_hides() -> None:
    profile, setting = a_profile(), Setting(ranks=8)
    fast = replace(HARDWARE["h100"], host_s_per_op=0.0, host_s_per_unit=0.0)
    time = step_under(profile, setting, fast)[1]
    copies = time.step_s - time.compute_s - time.exposed_s - time.optimizer_s
    assert 0 <= copies < 0.01 * time.step_s
    slow = replace(fast, inside=replace(fast.inside, bytes_per_s=1e8))
    waiting = step_under(profile, setting, slow)[1]
    assert waiting.compute_s == time.compute_s
    assert waiting.exposed_s > time.exposed_s
    assert waiting.step_s > time.step_s


def test_each_parameter_costs_the_host_of_a_cpu_rank_something_in_the_update() -> None:
    profile, setting = a_profile(), Setting(ranks=2)
    dear = replace(HARDWARE["cpu"], host_s_per_update=0.5)
    free = replace(dear, host_s_per_update=0.0)
    seconds = [evaluate(profile, setting, each).time.optimizer_s for each in (dear, free)]
    assert seconds[0] - seconds[1] == pytest.approx(0.5 * len(profile.params))


def test_bytes_of_a_link_are_those_of_two_gathers_and_a_scatter() -> None:
    profile, setting = a_profile(), Setting(ranks=8)
    candidate = evaluate(profile, setting, HARDWARE["h100"])
    sent = (BLOCK * 3 * 3 + NORM * 2) * 7 / 8  # the root is gathered once, it stays
    assert candidate.time.inside_bytes == pytest.approx(sent)
    assert candidate.time.between_bytes == 0


def test_a_thousand_ranks_cost_no_more_planning_than_two() -> None:
    profile = a_profile(2)
    labels = []
    for ranks in (16, 1 << 40):
        search = Search(lambda _: profile, ranks, HARDWARE["h100"], Choices(strategies=("zero3",), recompute=(False,)))
        labels.append([candidate.setting.label for candidate in search.run().candidates])
    assert sorted(labels[0]) == sorted(labels[1])


def test_what_fits_nowhere_gets_the_smallest_change_that_makes_it_fit() -> None:
    profiles = {False: a_profile(8), True: a_profile(8, recompute=True)}
    choices = Choices(strategies=("zero3",), recompute=(False,), unit_bytes=(0,), offload=(False,), precision="fp32")
    tight = replace(HARDWARE["h100"], memory_bytes=50 * MB, library_bytes=0, usable=1.0)
    found = Search(lambda setting: profiles[setting.recompute], 8, tight, choices).run()
    assert not any(candidate.fits for candidate in found.candidates)
    assert found.changes[0].words == "recompute blocks in backward"
    assert found.changes[0].best.setting.recompute
    assert found.changes[0].best.fits


def test_state_that_is_too_large_needs_more_ranks() -> None:
    profile = a_profile(8, recompute=True)
    choices = Choices(strategies=("zero3",), recompute=(False,), unit_bytes=(0,), offload=(False,), precision="fp32")
    tight = replace(HARDWARE["h100"], memory_bytes=60 * MB, library_bytes=0, usable=1.0)
    found = Search(lambda _: profile, 2, tight, choices).run()
    more = next(change for change in found.changes if "ranks in place of 2" in change.words)
    assert more.best.fits
    assert not evaluate(profile, replace(more.best.setting, ranks=more.best.setting.ranks // 2), tight).fits


def test_of_what_fits_the_fastest_is_first() -> None:
    profiles = {False: a_profile(8), True: a_profile(8, recompute=True)}
    found = Search(lambda setting: profiles[setting.recompute], 8, HARDWARE["h100"], Choices(precision="fp32")).run()
    fitting = [candidate.time.step_s for candidate in found.candidates if candidate.fits]
    assert fitting == sorted(fitting)
    assert {candidate.setting.strategy for candidate in found.candidates} == set(Choices().strategies)


OPTIMIZER = KINDS.index("optimizer")
STATE = (3 * BLOCK + NORM) * 2  # AdamW's two averages of all parameters


def test_optimizer_state_on_disk_leaves_that_of_two_units_in_memory() -> None:
    profile, setting = a_profile(), Setting(ranks=1, min_unit_bytes=0)
    found = held(profile, replace(setting, disk_share=1.0), "cpu")
    *earlier, update, checkpoint = found.moments
    assert {moment.held[OPTIMIZER] for moment in earlier} == {0}
    assert (update.place, update.held[OPTIMIZER]) == ("optimizer step", 4 * BLOCK)
    assert checkpoint.place == "checkpoint"
    assert found.moments[-1].held[OPTIMIZER] == STATE
    offloaded = replace(setting, offload=True)
    host, rest = (held(profile, replace(offloaded, disk_share=share)).host_bytes for share in (0.0, 1.0))
    assert host - rest == STATE
    many = a_profile(30)
    state = (30 * BLOCK + NORM) * 2
    assert held(many, replace(setting, disk_share=0.5), "cpu").moments[-2].held[OPTIMIZER] == state // 2 + 4 * BLOCK


def test_parameters_on_disk_leave_those_of_one_unit_in_memory() -> None:
    profile, setting = a_profile(8), Setting(min_unit_bytes=0, disk_share=1.0)
    without, found = (held(profile, replace(setting, offload=each), "cpu").moments for each in (False, True))
    parameters, gradients = KINDS.index("parameters"), KINDS.index("gradients")
    assert {moment.held[parameters] for moment in without} == {8 * BLOCK + NORM}
    assert {moment.held[parameters] for moment in found[:-1]} == {2 * BLOCK}  # and its gradients
    assert found[-1].held[parameters] == 8 * BLOCK + NORM  # a checkpoint reads all
    assert max(moment.held[gradients] for moment in found if moment.place != "optimizer step") <= NORM
    slow = replace(HARDWARE["cpu"], disk=Wire(1e6, 0.0))
    state, everything = (
        evaluate(profile, replace(setting, offload=each), slow).time.optimizer_s for each in (False, True)
    )
    assert everything == pytest.approx(2.5 * state, rel=0.01)  # 6 of 4 bytes per parameter beside 2 of 8


def test_state_on_disk_takes_the_time_of_the_disk() -> None:
    profile, slow = a_profile(), replace(HARDWARE["cpu"], disk=Wire(1e6, 0.0))
    near, far = (evaluate(profile, Setting(disk_share=share), slow).time.optimizer_s for share in (0.0, 1.0))
    assert far == pytest.approx(2 * STATE / 1e6, rel=0.01)
    assert near < far / 100


def test_as_little_state_as_makes_it_fit_goes_to_disk() -> None:
    profile = a_profile(8)
    choices = Choices(
        strategies=("zero3",), recompute=(False,), unit_bytes=(0,), offload=(False,), precision="fp32", disk=True
    )
    whole = evaluate(profile, Setting(min_unit_bytes=0), HARDWARE["cpu"]).peak.total
    state = (8 * BLOCK + NORM) * 2

    def setting_for(memory_bytes: float, device: str = "cpu") -> Setting:
        hardware = replace(HARDWARE[device], memory_bytes=int(memory_bytes), usable=1.0)
        first = Search(lambda _: profile, 1, hardware, choices).run().candidates[0]
        assert first.fits == (first.peak.total <= memory_bytes)
        return first.setting

    assert setting_for(whole).disk_share == 0
    assert setting_for(whole - state * 0.2).disk_share == pytest.approx(0.2)
    all_state = setting_for(whole - state + MB)
    assert (all_state.disk_share, all_state.offload) == (1, False)
    for left in (state * 1.1, 2 * state):  # that fits; and nothing does: the least that would is of interest
        assert (setting_for(whole - left).disk_share, setting_for(whole - left).offload) == (1, True)
    assert setting_for(whole - 2 * state).label.endswith("parameters, gradients and optimizer state on disk")
    on_gpu = setting_for(whole / 2, "h100")
    assert (on_gpu.disk_share, on_gpu.offload) == (0, False)


def test_as_few_blocks_are_recomputed_as_make_it_fit() -> None:
    choices = Choices(strategies=("zero3",), unit_bytes=(0,), offload=(False,), precision="fp32", keep_blocks=True)

    def best(memory_bytes: int) -> Setting:
        hardware = replace(HARDWARE["cpu"], memory_bytes=memory_bytes, usable=1.0)

        def profile_of(setting: Setting) -> Profile:
            return a_profile(8, recompute=setting.recompute, keep_blocks=setting.keep_blocks)

        first = Search(profile_of, 1, hardware, choices).run().candidates[0]
        assert first.fits
        more = replace(first.setting, keep_blocks=first.setting.keep_blocks + 1)
        if first.setting.recompute and more.keep_blocks < 8:
            assert not evaluate(profile_of(more), more, hardware).fits
        return first.setting

    whole = evaluate(a_profile(8), Setting(min_unit_bytes=0), HARDWARE["cpu"]).peak.total
    assert not best(whole).recompute
    assert [best(whole - 6 * MB * blocks).keep_blocks for blocks in (1, 3)] == [7, 5]
    assert best(whole - 6 * MB * 5).recompute
    assert best(whole - 6 * MB * 3).label.endswith("recompute all but 5 blocks")


def test_shards_of_other_ranks_are_resident_where_they_are_read() -> None:
    profile, other = a_profile(), KINDS.index("other ranks")
    alone, near = (
        held(profile, Setting(ranks=4, min_unit_bytes=0, transport=each), "cpu").peak for each in (COLLECTIVE, SHARED)
    )
    assert alone.held[other] == 0
    # shards, and this rank's part of the gradients in the three slots of each outbox
    assert near.held[other] == 3 * ((3 * BLOCK + NORM) // 4 + 3 * (BLOCK // 4))


def test_one_unit_is_the_root() -> None:
    units = rank_units(a_profile(), Setting(ranks=2, min_unit_bytes=ONE_UNIT), "cpu")
    assert [unit.blocks for unit in units] == [(0, 1, 2, 3)]


def test_hardware_written_is_hardware_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(HARDWARE["a100"])))
    assert read_hardware(path) == HARDWARE["a100"]
    path.write_text(
        json.dumps({"like": "h100", "ranks_per_host": 4, "between": {"bytes_per_s": 1e9, "latency_s": 1e-5}})
    )
    found = read_hardware(path)
    assert (found.ranks_per_host, found.between.bytes_per_s, found.inside) == (4, 1e9, HARDWARE["h100"].inside)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON object"),
        ("[]", "found list"),
        ('{"like": "h100", "speed": 1}', "unknown speed"),
        ("{}", "like"),
    ],
)
def test_hardware_that_cannot_be_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hardware(path)


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong, message in (
        ({"strategy": "sideways"}, "expected one of zero3"),
        ({"ranks": 6, "replicas": 4}, "choose a divisor"),
        ({"ranks": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Setting(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="expected one of adamw"):
        Choices(optimizer="lion")
    assert isinstance(HARDWARE["cpu"], Hardware)


def test_ranks_of_one_host_that_read_each_others_memory_stage_nothing_but_an_outbox() -> None:
    profile, cpu = a_profile(), replace(HARDWARE["cpu"], ranks_per_host=4)
    near, far = (evaluate(profile, Setting(ranks=4), replace(cpu, ranks_per_host=hosts)) for hosts in (4, 2))
    assert (near.setting.transport, far.setting.transport) == (SHARED, COLLECTIVE)
    staging = KINDS.index("staging")
    moments = held(profile, near.setting, "cpu").moments
    parts = 3 * (BLOCK * 3 // 4)  # of three reductions, for the three other ranks
    assert {moment.held[staging] for moment in moments} == {parts}
    assert near.time.between_bytes == 0
    assert near.time.inside_bytes == pytest.approx((BLOCK * 3 * 3 + NORM * 2) * 3 / 4)


def test_what_is_read_from_shared_memory_takes_the_rank_that_reads_it() -> None:
    profile, cpu = a_profile(), replace(HARDWARE["cpu"], overlaps=True)
    assert cpu.shared is not None
    fast, slow = (
        evaluate(profile, Setting(ranks=2), replace(cpu, shared=replace(cpu.shared, bytes_per_s=rate))).time
        for rate in (4e9, 1e9)
    )
    copied = 3 * 3 * BLOCK + 2 * NORM
    assert slow.step_s - fast.step_s == pytest.approx(copied * (1 / 1e9 - 1 / 4e9))
    assert slow.compute_s == fast.compute_s


def test_what_libraries_of_a_gpu_work_in_counts_at_every_moment() -> None:
    profile, setting = a_profile(), Setting(ranks=8, min_unit_bytes=0)
    without, found = (
        step_under(profile, setting, replace(HARDWARE["h100"], library_bytes=num_bytes))[0]
        for num_bytes in (0, 64 * MB)
    )
    assert [each.total - plain.total for each, plain in zip(found.moments, without.moments, strict=True)] == [
        64 * MB
    ] * len(without.moments)
    assert HARDWARE["h100"].library_bytes == 64 * 2**20
    assert HARDWARE["cpu"].library_bytes == 0
