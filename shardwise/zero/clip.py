"""Clip the gradients of a share by the norm of all of them, each rank reading its own elements only."""

from __future__ import annotations

import math

import torch

from shardwise.optim.clip import checked_norm_type, clip_coefficient, power_of_norm, root_of_power, scale_by
from shardwise.optim.owned import GradientOwner, OwnedGradient
from shardwise.zero.pieces import gradient_for
from shardwise.zero.share import Share


def clip_gradients(
    share: Share, owner: GradientOwner | None, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``; return the norm before.

    Plain gradients must be the same on all ranks, or be this rank's alone to judge (``owner`` None: nothing is exchanged).
    """
    checked_norm_type(norm_type)
    gradients = [param.grad for param in share.params if param.grad is not None]
    counted = _own_parts(share) if owner is not None else gradients
    total = power_of_norm(counted, norm_type, share.params[0].device)
    if owner is not None:
        total = owner.sum_over_ranks(total, is_max=math.isinf(norm_type))
    total = root_of_power(total, norm_type, {gradient.dtype for gradient in gradients})
    coefficient = clip_coefficient(total, max_norm, norm_type, error_if_nonfinite)
    for gradient in gradients:
        scale_by(coefficient, gradient.usable_parts() if isinstance(gradient, OwnedGradient) else [gradient])
    return total


def _own_parts(share: Share) -> list[torch.Tensor]:
    """Return this rank's elements of all gradients: together the ranks' are each gradient once."""
    parts: list[torch.Tensor] = []
    for local in share.local_pieces:
        gradient = local.param.grad
        if gradient is not None and not isinstance(gradient, OwnedGradient):
            parts.append(gradient_for(local, gradient))
    for param in share.params:
        if isinstance(param.grad, OwnedGradient):
            parts.extend(param.grad.usable_parts())
    return parts
