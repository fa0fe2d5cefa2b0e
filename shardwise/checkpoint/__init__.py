"""Checkpoints that all ranks commit together, that are verified to the byte, and that load at any number of ranks.

Example:
    >>> from shardwise.checkpoint import finish, load, save
    >>> state = {"model": model, "optimizer": optimizer}  # doctest: +SKIP
    >>> save("run", state, step=100, keep=3, wait=False)  # doctest: +SKIP
    >>> finish("run")  # doctest: +SKIP
    >>> load("run", state, fallback=True).step  # doctest: +SKIP
    100
"""

from shardwise.checkpoint.load import Loaded, load
from shardwise.checkpoint.save import finish, save
from shardwise.checkpoint.state import PerRank, RandomState
from shardwise.errors import CheckpointError, DamagedCheckpointError

__all__ = ["CheckpointError", "DamagedCheckpointError", "Loaded", "PerRank", "RandomState", "finish", "load", "save"]
