"""What shardwise's own tests are built from, public so that yours can be too."""

from shardwise.testing import faults
from shardwise.testing.pool import RankFailure, WorkerPool

__all__ = ["RankFailure", "WorkerPool", "faults"]
