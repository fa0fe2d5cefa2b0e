"""Where public means of torch do not reach, the page of errors has torch's own words, so that a search finds what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from torch import nn
from torch.nn.utils import parametrizations, prune

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.checkpoint import save

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"


def sharded() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fully_shard(model[0])
    return fully_shard(model)


def with_norm_in_bf16() -> None:
    model = fully_shard(nn.Sequential(nn.BatchNorm1d(8)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model(torch.ones(2, 8)).sum().backward()


MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "forward": ("got mixed torch.Tensor and DTensor", lambda: sharded().forward(torch.ones(2, 8))),
    "forward of a block": ("got mixed torch.Tensor and DTensor", lambda: sharded()[0].forward(torch.ones(2, 8))),
    "values": (
        "got mixed torch.Tensor and DTensor",
        lambda: sharded()[0].weight.detach().copy_(torch.ones(8, 8)),
    ),
    "mask": (
        "got mixed torch.Tensor and DTensor",
        lambda: prune.custom_from_mask(sharded()[0], "weight", torch.ones(8, 8)),
    ),
    "orthogonal": ("got mixed torch.Tensor and DTensor", lambda: parametrizations.orthogonal(sharded()[0])),
    "prune": (
        "in-place operations that require placement changes are not supported",
        lambda: prune.l1_unstructured(sharded()[0], "weight", 0.5),
    ),
    "spectral norm": (
        "in-place operations that require placement changes are not supported",
        lambda: parametrizations.spectral_norm(sharded()[0]),
    ),
    "prune all": (
        "Sharding propagation failed for",
        lambda: prune.global_unstructured([(sharded()[0], "weight")], prune.L1Unstructured, amount=0.5),
    ),
    "batch norm": ("expected scalar type BFloat16 but found Float", with_norm_in_bf16),
    "argument": ("got an unexpected keyword argument", lambda: sharded().unshard(blocking=True)),  # pyright: ignore[reportCallIssue]
    "step": ("missing 1 required keyword-only argument: 'step'", lambda: save("run", {"model": sharded()})),  # pyright: ignore[reportCallIssue]
}


@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(2)
def test_the_page_of_errors_has_what_torch_says(mistake: str) -> None:
    words, make = MISTAKES[mistake]
    with pytest.raises((RuntimeError, TypeError)) as found:
        make()
    assert words in str(found.value)
    assert f'"{words}"' in PAGE.read_text().partition("What torch and Python say")[2].partition("Every error that")[0]


@on_ranks(2)
def test_batch_norm_as_a_unit_of_its_own_trains_under_a_policy_of_bf16() -> None:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))
    fully_shard(norm)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16), sync_module_states=True)
    out = model(torch.randn(4, 8))
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert norm.running_mean is not None
    assert norm.running_mean.dtype == norm.weight.dtype == torch.float32
    assert norm.running_mean.any()
