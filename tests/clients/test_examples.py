"""Examples with other packages learn, and what their trainers hold is sharded by shardwise."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers.of_clients import say_as_torchrun, sharding_on_cpu
from helpers.ranks import on_ranks
from helpers.snippets import EXAMPLES_OF_CLIENTS, PAGES_OF_CLIENTS, main_of_example, run_page

from shardwise import get_cls_to_fsdp_cls

pytestmark = pytest.mark.clients


@on_ranks(2)
def test_examples_with_other_packages_learn() -> None:
    say_as_torchrun()
    for name in EXAMPLES_OF_CLIENTS:
        with sharding_on_cpu() if name == "with_accelerate" else nullcontext():
            losses = main_of_example(name)(steps=10, width=128 if name == "qlora" else 16)
        assert losses[-1] < losses[0], f"{name}: {losses}"
    sharded = {each.__name__ for each in get_cls_to_fsdp_cls()}
    assert {"LlamaDecoderLayer", "Layer", "Sequential"} <= sharded


@on_ranks(2)
def test_code_of_pages_with_other_packages_runs(tmp_path: Path) -> None:
    for page in PAGES_OF_CLIENTS:
        assert run_page(page, tmp_path) > 0
