"""Losses that do more than call the model: over transforms of ``torch.func``, under hooks on saved tensors, of weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.zoo import unbox


def by_address() -> Any:
    """Return hooks that keep one copy per address of what autograd saves, and hold what lies there, as offloaders do."""
    kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def pack(tensor: Tensor) -> Any:
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        kept.setdefault(key, (tensor.detach().clone(), tensor))
        return key

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda key: kept[key][0])


def _jvp(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found: Any = torch.func.jvp(net, (x,), (torch.ones_like(x),))
    return (found[0] ** 2 + found[1] ** 2).mean()


def _jvp_values(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (torch.func.jvp(net, (x,), (torch.ones_like(x),))[0] ** 2).mean()


def _vmap(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: (net(row.unsqueeze(0)) ** 2).sum())(x).mean()


def _vjp(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found: Any = torch.func.vjp(net, x)
    return (found[0] ** 2).mean() + (found[1](torch.ones_like(found[0]))[0] ** 2).mean()


_ONE_BY_ONE = threading.Lock()  # the reference's ranks are threads, and levels of forward AD are of all of them
TRANSFORMS = {"jvp": _jvp, "values of jvp": _jvp_values, "vmap": _vmap, "vjp": _vjp}
MIXED = tuple(
    f"{name} {place}" for name in ("jvp", "vmap") for place in ("first", "last")
)  # beside an ordinary forward
OF_WEIGHTS = ("unshard",)
LOSSES = ("by address", *TRANSFORMS, *MIXED, *OF_WEIGHTS)


def loss_of(s: Any, form: str, number: int, name: str) -> Tensor:
    """Return the loss ``form`` of side ``s`` over batch ``number``; ``name``: of the parameter that it takes, if any."""
    x = s.batch(number)
    if form in TRANSFORMS:
        with _ONE_BY_ONE:
            return TRANSFORMS[form](lambda z: unbox(s.model(z)), x)
    if form in MIXED:
        kind, _, place = form.partition(" ")
        order = (kind, "") if place == "first" else ("", kind)
        first, last = (loss_of(s, each, number, name) if each else s.loss(s.model(x)) for each in order)
        return first + last
    if form == "by address":
        with by_address():
            return s.loss(s.model(x))
    loss = s.loss(s.model(x))
    s.unit_of(name).unshard()
    whole = s.param(name)
    return loss + (whole * x.sum().to(whole.dtype)).sum() * (s.seat.num_data_ranks if s.exact else 0.01)
