"""A slice of chaos: jobs that break ranks in fixed ways; ``make chaos`` draws them at random."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import pytest
from chaos.campaign import Campaign, diverging, elastic, faulty, transacting
from chaos.job import Job
from chaos.program import Program

from shardwise.one_host import PREFIX

JOBS = [
    faulty(Program("fully_shard", "auto"), 2, "kill", "backward", rank=1),
    faulty(Program("hsdp", "auto"), 4, "kill", "evaluation", rank=1),  # ranks 2 and 3 wait for one that follows
    faulty(Program("hsdp", "gloo"), 4, "raise", "backward", rank=1, store="tcp"),  # who follows keeps the store
    faulty(Program("hsdp", "collective"), 4, "drop", "reduction", rank=0),  # of a sum over replicas
    transacting(faulty(Program("replicate", "auto"), 2, "raise", "optimizer step", rank=1), "retry"),
    faulty(Program("zero1", "auto"), 2, "SIGINT", "consolidation", rank=1),
    faulty(Program("zero2", "auto"), 2, "kill", "reduction", rank=0, store="tcp"),
    faulty(
        Program("fully_shard", "auto", ranks_per_host=2), 4, "kill", "init", rank=1
    ),  # the other host sees nothing of it
    # Those of the other host wait in a meeting for rank 0, which cannot see rank 2.
    faulty(Program("zero1", "auto", ranks_per_host=2), 4, "kill", "evaluation", rank=2),
    diverging(Program("fully_shard", "auto"), 2, "width"),
    diverging(Program("whole_matrix", "auto"), 2, "extra block"),
]


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    return Campaign()


# What others of these say of two ranks, or of a host beside another; test_elastic.py kills ranks of elastic runs.
MORE = [
    faulty(Program("fully_shard", "auto", ranks_per_host=2), 4, "kill", "between steps", rank=1),
    faulty(Program("fully_shard", "auto", ranks_per_host=2), 4, "late", "forward", rank=3),
    faulty(Program("fully_shard", "gloo"), 2, "kill", "reduction", rank=0),
    faulty(Program("fully_shard", "auto"), 2, "late", "forward", rank=0),
    faulty(Program("fully_shard", "auto", ranks_per_host=2), 4, "raise", "backward", rank=2),
    diverging(Program("zero2", "auto"), 2, "frozen"),  # test_fully_shard_desync.py
    elastic(4),
]
CASES = [*JOBS, *(pytest.param(job, marks=pytest.mark.exhaustive) for job in MORE)]


@pytest.mark.parametrize("job", CASES, ids=lambda job: job.text.replace(" ", "-"))
def test_every_rank_ends_with_a_named_error_or_with_the_numbers_of_a_whole_run(
    campaign: Campaign, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(multiprocessing.active_children())  # the session's workers, where another file has used them
    result = campaign.run(job)
    assert not result.verdict.faults, "\n".join([*result.verdict.faults, "", *result.run.report])
    assert not list(tmp_path.glob(f"{PREFIX}*"))
    assert not set(multiprocessing.active_children()) - before
