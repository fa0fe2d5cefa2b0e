"""Modules that a test writes in one line: layers, and the way of an input through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

WIDTH = 6


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Layers(nn.Module):
    """Modules by name, and ``way``, which is called with this module and the inputs.

    Example:
        >>> Layers(lambda it, x: it.second(it.first(x)), first=layer(), second=layer())
    """

    def __init__(self, way: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.way = way

    def forward(self, *args: Any) -> Any:
        return self.way(self, *args)
