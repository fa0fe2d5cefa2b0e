"""The tools of shardwise's own tests, public so that yours can use them too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.prove.compare import ProveOptions
from shardwise.prove.run import Verdict
from shardwise.prove.run import prove as prove_script
from shardwise.testing import faults
from shardwise.testing.pool import RankFailure, WorkerPool

__all__ = ["RankFailure", "WorkerPool", "faults", "prove"]


def prove(
    program: str | Path,
    ranks: int = 2,
    args: Sequence[str] = (),
    *,
    options: ProveOptions = ProveOptions(),  # noqa: B008  frozen
) -> Verdict:
    """Hold a training script against plain data parallelism on ``ranks`` processes, as ``shardwise prove`` does.

    Args:
        program: the path of the script.  args: its arguments.
        options: as those of the command.

    Returns: the verdict, with its notes.
    Raises: AssertionError with the first difference, or with the reason why the script cannot be proven.

    Example:
        >>> def test_training_is_right():  # doctest: +SKIP
        ...     shardwise.testing.prove("train.py", ranks=2)
    """
    verdict = prove_script([str(program), *args], ranks, options, quiet=True)
    if verdict.code:
        raise AssertionError("\n".join(verdict.lines()))
    return verdict
