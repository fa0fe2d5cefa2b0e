"""A pool whose ranks are forked from one process that has imported the packages: each would take seconds to do so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.testing import WorkerPool

PACKAGES = ("torchao.quantization", "transformers", "accelerate", "peft", "lightning", "schedulefree")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Hide the pool of the other tests."""
    with WorkerPool(max_ranks=4, timeout_s=300.0, preload=("torch", "torch._dynamo", "pytest", *PACKAGES)) as workers:
        yield workers
