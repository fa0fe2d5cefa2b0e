"""What pages and examples say is what works: their code runs, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import on_ranks
from helpers.snippets import (
    EXAMPLES_OF_CLIENTS,
    PAGES_OF_CLIENTS,
    RECIPES_OF_CLIENTS,
    ROOT,
    main_of_example,
    python_of,
    read,
    run_page,
)

from shardwise.testing import WorkerPool

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page not in PAGES_OF_CLIENTS and any(snippet.is_run and python_of(snippet) is not None for snippet in read(page))
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@on_ranks(2)
def test_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path) > 0


@on_ranks(2)
def test_examples_learn(tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {name: {"folder": str(tmp_path / name)} for name in ("resume", "zero2")}
    more["publish_weights"] = {"num_engines": 1}  # a new interpreter
    for name in sorted({example.stem for example in EXAMPLES} - {*EXAMPLES_OF_CLIENTS, *RECIPES_OF_CLIENTS}):
        losses = main_of_example(name)(**more.get(name, {}), steps=5, width=16)
        assert losses[-1] < losses[0], f"{name}: {losses}"


def resumed(folder: str, steps: int) -> list[float]:
    return main_of_example("resume")(folder, steps=steps, width=16)


def test_the_example_of_resuming_goes_on_at_another_number_of_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(resumed, num_ranks=2, folder=str(tmp_path / "whole"), steps=6)[0]
    begin = pool.run(resumed, num_ranks=2, folder=str(tmp_path / "cut"), steps=3)[0]
    rest = pool.run(resumed, num_ranks=1, folder=str(tmp_path / "cut"), steps=3)[0]
    assert begin + rest == pytest.approx(whole, rel=1e-5)  # sums of one rank are rounded in another order


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 80
