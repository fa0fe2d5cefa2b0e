"""What a collective of other ranks raises, in words: who is gone, unless the error says itself what happened."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from shardwise.consistency.failure_report import naming_lost_peers
from shardwise.errors import DesyncError, StateError, TransportError


def _call(error: BaseException) -> NoReturn:
    def act() -> NoReturn:
        raise error

    naming_lost_peers(act, "matrices cannot travel", range(3), mine=1)


@pytest.mark.parametrize("kind", [DesyncError, StateError, TransportError, torch.OutOfMemoryError])
def test_an_error_that_says_what_happened_is_raised_as_it_is(kind: type[Exception]) -> None:
    error = kind("rank 0 has another plan")
    with pytest.raises(kind) as found:
        _call(error)
    assert found.value is error


def test_a_backends_own_error_names_all_whom_it_may_be() -> None:
    error = RuntimeError("Connection closed by peer\nframe #0: 0x1234")
    with pytest.raises(TransportError) as found:
        _call(error)
    assert str(found.value).startswith("matrices cannot travel: ranks 0, 2 did not all make this call")
    assert str(found.value).endswith("first error: Connection closed by peer")
    assert found.value.__cause__ is error
