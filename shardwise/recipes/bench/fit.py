"""Whether all contenders together fit into memory: they live in one process per rank while they are timed."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.recipes.bench.contenders import CONTENDERS, Contender
from shardwise.recipes.bench.request import BenchConfig

_STATE_BYTES, _OTHER_BYTES = 8, 8  # per element, fp32: the two averages of AdamW; the parameter and its gradient


def held_bytes(contender: Contender, num_parameters: int, ranks: int) -> float:
    """Return roughly what one rank holds for ``contender``: parameters, gradients and the state of AdamW, in fp32."""
    state = _STATE_BYTES / (1 if contender.sharded == "nothing" else ranks)
    rest = _OTHER_BYTES / (ranks if contender.sharded == "everything" else 1)
    return num_parameters * (state + rest)


def check_fit(config: BenchConfig, num_parameters: int, available_bytes: int) -> None:
    """Refuse a benchmark whose ranks would be killed for memory, or swap.

    ``available_bytes``: for all ranks together.  Raises: ConfigError.
    """
    per_rank = sum(held_bytes(CONTENDERS[name], num_parameters, config.ranks) for name in config.names)
    needed = config.ranks * per_rank
    if needed > available_bytes:
        raise ConfigError(
            f"{len(config.names)} contenders at once on {config.ranks} rank(s) hold about {needed / 1e9:.1f} GB, and "
            f"{available_bytes / 1e9:.1f} GB are available. Choose some of them with --only, or fewer --ranks."
        )
