"""Rules of a run's values: what is refused, what a resume may change, and the schedule of the learning rate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import ConfigError
from shardwise.recipes.config import (
    PRESETS,
    RESUME_MAY_CHANGE,
    ModelShape,
    TrainConfig,
    check_config,
    check_ranks,
    config_from_json,
    data_ranks,
    learning_rate,
)
from shardwise.recipes.run_folder import drop_later_metrics, merge_resumed, read_metrics, with_overrides


@given(st.integers(0, 50), st.integers(1, 500))
def test_the_rate_rises_to_lr_and_falls_to_a_tenth(warmup: int, steps: int) -> None:
    config = TrainConfig(lr=1.0, warmup=warmup, steps=steps)
    rates = [learning_rate(config, step) for step in range(warmup + steps + 5)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == pytest.approx(1.0)
    assert max(rates) <= 1.0
    assert rates[-1] >= 0.1 - 1e-12
    if steps > warmup:
        assert learning_rate(config, steps) == pytest.approx(0.1)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 4))
def test_a_batch_is_accepted_exactly_when_it_divides(batch: int, ranks: int, accumulate: int) -> None:
    config = TrainConfig(batch=batch, accumulate=accumulate)
    if batch % (ranks * accumulate) == 0:
        check_ranks(config, ranks)
        return
    with pytest.raises(ConfigError, match=f"--batch {batch} ") as caught:
        check_ranks(config, ranks)
    suggested = int(str(caught.value).rstrip(".").split()[-1])
    check_ranks(dataclasses.replace(config, batch=suggested), ranks)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_hybrid_takes_exactly_the_ranks_that_make_two_or_more_copies_of_two_or_more_shards(
    ranks: int, replicas: int, tp: int
) -> None:
    config = TrainConfig(shard="hsdp", replicas=replicas, tp=tp)
    shards, rest = divmod(ranks, replicas * tp)
    if rest == 0 and shards >= 2 and replicas >= 2:
        assert data_ranks(config, ranks) == replicas * shards
    else:
        with pytest.raises(ConfigError, match=r"--tp \d|--replicas \d"):
            data_ranks(config, ranks)


def test_presets_are_valid() -> None:
    for shape in PRESETS.values():
        check_config(TrainConfig(model=shape))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "--layers is 0"),
        ({"save_every": -1}, "--save-every is -1"),
        ({"warmup": -1}, "--warmup is -1"),
        ({"min_unit_bytes": -1}, "--min-unit-bytes is -1"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"clip": -1.0}, "--clip is -1.0, expected a positive number, or 0"),
        ({"dtype": "fp8"}, "--dtype is 'fp8'"),
        ({"shard": "some"}, "--shard is 'some'"),
        ({"transport": "pigeon"}, "--transport is 'pigeon'"),
        ({"tp": 0}, "--tp is 0"),
        ({"experts": -1}, "--experts is -1"),
        ({"top_k": 2}, "--top-k is 2, expected at least 1 and at most --experts"),
        ({"experts": 4, "top_k": 5}, "--top-k is 5, expected at least 1 and at most --experts"),
        ({"experts": 4, "top_k": 0}, "--top-k is 0"),
        ({"experts": 4, "tp": 2}, "--tp 2 does not go with --experts 4"),
        ({"experts": 4, "compile": True}, "--compile does not go with --experts 4"),
        *(
            ({"experts": 4, "shard": each}, f"--shard {each} does not go with --experts 4")
            for each in ("none", "zero1")
        ),
        *(({"tp": 2, "shard": shard}, f"--tp 2 .* --shard {shard}") for shard in ("none", "zero1")),
        *(({"offload": True, "shard": shard}, f"--offload .* {shard}") for shard in ("none", "zero1")),
    ],
)
def test_a_value_that_cannot_be_trained_with_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(with_overrides(TrainConfig(), changes))


def test_a_config_survives_json() -> None:
    config = TrainConfig(model=ModelShape(1, 2, 1, 8, experts=3, top_k=2), data="some/path", lr=0.123)
    assert config_from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_options_of_execution_that_a_config_does_not_know_are_the_defaults() -> None:
    values = dataclasses.asdict(TrainConfig(lr=0.5, transport="gloo"))
    del values["transport"], values["min_unit_bytes"]
    assert config_from_json(values) == TrainConfig(lr=0.5)
    model = dataclasses.asdict(TrainConfig())["model"]
    assert isinstance(model, dict)
    del model["experts"], model["top_k"]
    assert config_from_json({**values, "model": model}) == TrainConfig(lr=0.5)
    del values["lr"]
    with pytest.raises(ConfigError, match="missing or unknown values: lr"):
        config_from_json(values)


@pytest.mark.parametrize("damage", [{"extra": 1}, {"model": 3}, {"model": {"layers": 1}}])
def test_a_config_of_another_version_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        config_from_json(dataclasses.asdict(TrainConfig()) | damage)


def test_a_resume_does_not_change_experts() -> None:
    saved = TrainConfig(model=dataclasses.replace(PRESETS["tiny"], experts=4))
    with pytest.raises(ConfigError, match=r"cannot be continued with --top-k 2 \(the run has 1\)"):
        merge_resumed(saved, with_overrides(saved, {"top_k": 2}), Path("run"))


def test_a_resume_may_change_only_what_leaves_past_steps_as_they_were() -> None:
    saved = TrainConfig()
    for field in dataclasses.fields(TrainConfig):
        old = getattr(saved, field.name)
        new: object = (
            PRESETS["small"] if field.name == "model" else f"{old}x" if isinstance(old, str | None) else old + 1
        )
        asked = dataclasses.replace(saved, **{field.name: new})
        if field.name in RESUME_MAY_CHANGE:
            assert merge_resumed(saved, asked, Path("run")) == asked
        else:
            with pytest.raises(ConfigError, match="cannot be continued with"):
                merge_resumed(saved, asked, Path("run"))


def test_figures_past_the_checkpoint_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        "".join(json.dumps({"step": n, "kind": "train"}) + "\n" for n in range(1, 6)) + '{"step": 6, "ki'
    )
    drop_later_metrics(metrics, 3)
    assert [line["step"] for line in read_metrics(metrics)] == [1, 2, 3]
