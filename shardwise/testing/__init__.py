"""The tools of shardwise's own tests, public so that yours can use them too."""

from shardwise.testing import faults
from shardwise.testing.pool import RankFailure, WorkerPool
from shardwise.testing.proofs import prove

__all__ = ["RankFailure", "WorkerPool", "faults", "prove"]
