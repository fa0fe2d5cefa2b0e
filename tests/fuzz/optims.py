"""The optimizers of cases, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fuzz.case import Optim


class _Own(Optimizer):
    """Steps each parameter by itself."""

    def update(self, param: Tensor, gradient: Tensor, lr: float) -> None:
        """Change ``param`` and its state."""
        raise AssertionError("a base class")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group["lr"])
        return loss


class Modular(_Own):
    """Momentum and parameters modulo 8: whole numbers stay whole and small for any number of steps."""

    sharded_update = "elementwise"

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, param: Tensor, gradient: Tensor, lr: float) -> None:
        """Change ``param`` and its momentum."""
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
        momentum: Tensor = state["momentum"]
        momentum.add_(gradient).add_(4).remainder_(8).sub_(4)
        if not lr:
            return  # torch makes state by such a step, which is to change nothing: users may have put in what is not small
        param.sub_(momentum, alpha=lr).add_(4).remainder_(8).sub_(4)


BLOCK = 4


class Blocks(_Own):
    """Momentum in 8 bits with a scale per block of elements, in full where a tensor's size is no multiple of that."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, param: Tensor, gradient: Tensor, lr: float) -> None:
        """Change ``param`` and its momentum."""
        param.sub_(_eight_bit_momentum(self.state[param], gradient), alpha=lr)


def _eight_bit_momentum(state: dict[str, Tensor], gradient: Tensor) -> Tensor:
    momentum = gradient.clone()
    if "codes" in state:
        blocks = state["codes"].view(-1, BLOCK) / 127 * state["scales"][:, None]
        momentum += 0.9 * blocks.view(gradient.shape)
    elif "momentum" in state:
        momentum += 0.9 * state["momentum"]
    if gradient.numel() % BLOCK:
        state["momentum"] = momentum
    else:
        blocks = momentum.reshape(-1, BLOCK)
        state["scales"] = blocks.abs().amax(1).clamp_min(1e-12)
        state["codes"] = (blocks / state["scales"][:, None] * 127).round().to(torch.int8).view(gradient.shape)
    return momentum


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer class with its options.

    Attributes:
        bias: other options for one-dimensional parameters, where a case asks for groups.
        is_exact: whole numbers stay whole.  is_whole_matrix: shards are not enough for it.
        is_block_wise: it keeps state per block, so that it must be given whole blocks or be refused.
    """

    make: type[Optimizer]
    options: dict[str, Any]
    bias: dict[str, Any]
    is_exact: bool = False
    is_whole_matrix: bool = False
    is_block_wise: bool = False


OPTIMIZERS: dict[str, Kind] = {
    "sgd": Kind(torch.optim.SGD, {"lr": 1.0}, {"lr": 2.0}, is_exact=True),
    "momentum": Kind(torch.optim.SGD, {"lr": 1.0, "momentum": 1.0}, {"momentum": 0.0}, is_exact=True),
    "modular": Kind(Modular, {}, {"lr": 2.0}, is_exact=True),
    "small_sgd": Kind(
        torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, {"weight_decay": 0.0}
    ),
    "adamw": Kind(torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}, {"weight_decay": 0.0}),
    "adam": Kind(torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}, {"lr": 0.02}),
    "foreach": Kind(torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": True}, {"lr": 0.02}),
    "fused_sgd": Kind(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, {"lr": 0.02}),
    "fused": Kind(torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}, {"lr": 0.02}),
    "adagrad": Kind(torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}, {"lr": 0.02}),
    "rmsprop": Kind(torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "momentum": 0.5}, {"momentum": 0.0}),
    "adafactor": Kind(torch.optim.Adafactor, {"lr": 0.05}, {"lr": 0.02}, is_whole_matrix=True),
    "blocks": Kind(Blocks, {}, {"lr": 0.02}, is_block_wise=True),
}


def is_wide(param: Tensor, optim: Optim) -> bool:
    """Return True for parameters of the first group."""
    return not getattr(param, "is_thin", False) if optim.marked else param.dim() > 1


def groups_of(named: Iterable[tuple[str, Tensor]], optim: Optim) -> list[dict[str, Any]]:
    """Return the parameter groups that an optimizer is made with: one, or one more for what has fewer than 2 dims."""
    kind = OPTIMIZERS[optim.name]
    pairs = list(named)
    if not optim.groups:
        return [{"params": [param for _, param in pairs]}]
    wide = [param for _, param in pairs if is_wide(param, optim)]
    thin = [param for _, param in pairs if not is_wide(param, optim)]
    return [group for group in ({"params": wide}, {"params": thin, **kind.bias}) if group["params"]]
