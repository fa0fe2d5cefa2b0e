"""What waits for a collective that has failed already."""

from __future__ import annotations

import pytest
import torch

from shardwise.collectives.c10d import HostWork


class _Failed:
    """A collective that has ended before it is waited for, since another rank is gone."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_collective_that_has_failed_before_it_is_waited_for_raises_and_delivers_nothing() -> None:
    delivered: list[torch.Tensor] = []
    handle = HostWork(_Failed(), delivered.append, torch.zeros(1), None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Connection closed"):
        handle.wait()
    assert not delivered
