"""Gradients that lie with their owners, as tensors that users hold."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import on_ranks
from helpers.zero_models import loss_of_rank, mixed_model, zero_of

from shardwise import StateError, clip_grad_norm_
from shardwise.fsdp.clip import OwnedGradient


@on_ranks(2, 4)
def test_gradients_do_not_keep_the_optimizer() -> None:
    model = mixed_model()
    zero = zero_of(model, "whole")
    loss_of_rank(model, 0).backward()
    zero.reduce_gradients()
    alive = weakref.ref(zero)
    del zero
    gc.collect()
    assert alive() is None
    with pytest.raises(StateError, match="is gone"):
        clip_grad_norm_(model.parameters(), 1.0)


def _owned_gradients() -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
    """Yield each parameter that has one, its gradient with an owner, and the mean over ranks that it stands for."""
    model = mixed_model()
    zero = zero_of(model, "whole")
    loss_of_rank(model, 0).backward()
    means = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    zero.reduce_gradients()
    for p, mean in zip(model.parameters(), means, strict=True):
        assert (p.grad is None) == (mean is None)
        if mean is not None:
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            yield p, p.grad, mean


@on_ranks(2)
def test_every_gradient_has_one_owner_and_the_layout_of_its_parameter() -> None:
    owned: list[int] = []
    for index, (p, gradient, _) in enumerate(_owned_gradients()):
        assert isinstance(gradient, OwnedGradient)
        assert (gradient.shape, gradient.stride(), gradient.dtype) == (p.shape, p.stride(), p.dtype)
        owned += [index] * gradient.is_whole
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, owned)
    assert sorted(index for each in found for index in each) == [0, 1, 2, 3, 4]


@on_ranks(2)
def test_a_gradient_without_values_here_says_so() -> None:
    others = [gradient for _, gradient, _ in _owned_gradients() if not gradient.is_whole]
    assert others
    for gradient in others:
        for call in (
            lambda g=gradient: pickle.dumps(g),
            lambda g=gradient: torch.save(g, io.BytesIO()),
            gradient.numpy,
        ):
            with pytest.raises(StateError, match="only a part"):
                call()
        copy.deepcopy(gradient)


@on_ranks(2)
def test_an_owners_gradient_is_saved_and_copied_as_any_tensor(tmp_path: Path) -> None:
    for index, (_, gradient, mean) in enumerate(_owned_gradients()):
        if not gradient.is_whole:
            continue
        assert gradient.storage_offset() == 0
        assert gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        stream = io.BytesIO()
        torch.save(gradient, stream)
        assert stream.tell() < gradient.numel() * 4 + 4096
        stream.seek(0)
        for found in (torch.load(stream), pickle.loads(pickle.dumps(gradient)), torch.from_numpy(gradient.numpy())):
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-7)
        assert torch.equal(copy.deepcopy(gradient), gradient)
        path = str(tmp_path / f"{index}-{dist.get_rank()}")
        dcp.save({"g": gradient}, checkpoint_id=path, no_dist=True)
        blank = {"g": torch.zeros(gradient.shape)}
        dcp.load(blank, checkpoint_id=path, no_dist=True)
        assert torch.equal(blank["g"], gradient)


@on_ranks(2)
def test_aliases_of_an_owners_gradient_stay_live() -> None:
    for p, gradient, _ in _owned_gradients():
        if gradient.is_whole:
            alias = gradient.data
            p.grad.mul_(2.0)
            assert torch.equal(alias, p.grad)
