"""The values that the parameters and buffers of models begin with."""

from __future__ import annotations

import torch
from torch import nn

from fuzz.zoo import Oddments


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return ``model`` with parameters of ``dtype``, except for those that are of another dtype on purpose."""
    model.to(dtype)
    for part in model.modules():
        if isinstance(part, Oddments) and "wide" in part.parts:
            other = torch.float32 if dtype == torch.float64 else torch.float64
            part.get_parameter("wide").data = part.get_parameter("wide").data.to(other)
    return model


def reset(model: nn.Module, seed: int, exact: bool, dtype: torch.dtype) -> nn.Module:
    """Let every module draw its own values, as users do, from one seed; return ``model``."""
    assert not exact
    torch.manual_seed(seed)
    for module in convert(model, dtype).modules():
        initialize = getattr(module, "reset_parameters", None)
        if initialize is not None:
            initialize()
    return model


def fill(model: nn.Module, seed: int, exact: bool, dtype: torch.dtype) -> nn.Module:
    """Give every parameter values that depend on ``seed`` and its name's place alone; return ``model``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in convert(model, dtype).parameters():
            if exact:
                param.copy_(torch.randint(-3, 4, param.shape, generator=generator))
            else:
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model
