"""Faults that are planted in the ranks of a runner, and nowhere else, to see that the fuzzer finds them.

They lie where anybody could put them: on torch's collectives and on what torch lets one register, and are at work while
a contender of ours runs.  Steps whose collectives are replaced use no other transport.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise import torch_private

Collective = Callable[..., Any]
_at_work = [False]  # one entry, set by faults_at_work alone


def plant(name: str) -> None:
    """Plant the fault called ``name`` in this process, for good."""
    FAULTS[name]()


@contextmanager
def faults_at_work(is_ours: bool) -> Generator[None, None, None]:
    """Let what was planted do its work, if a contender of ours runs inside."""
    _at_work[0] = is_ours
    try:
        yield
    finally:
        _at_work[0] = False


def _wrap(names: tuple[str, ...], wrapper: Callable[[Collective], Collective]) -> None:
    """Replace those of torch's collectives that exist."""
    for name in names:
        original: Collective | None = getattr(dist, name, None)
        if original is not None:
            setattr(dist, name, _switched(original, wrapper(original)))


def _switched(original: Collective, faulty: Collective) -> Collective:
    return lambda *args, **kwargs: (faulty if _at_work[0] else original)(*args, **kwargs)


def _gather_late() -> None:
    """Every all-gather delivers what the one before it, of as many elements, has gathered."""
    earlier: dict[int, Tensor] = {}

    def wrapper(original: Collective) -> Collective:
        def gather(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = original(output, *args, **kwargs)
            if work is not None:
                work.wait()
            found = output.clone()
            output.copy_(earlier.get(output.numel(), found))
            earlier[output.numel()] = found
            return work

        return gather

    _wrap(("all_gather_single", "all_gather_into_tensor"), wrapper)


def _drop_gradients() -> None:
    """The gradients of the last rank do not take part in reductions."""

    def wrapper(original: Collective) -> Collective:
        def reduce(output: Tensor, packed: Tensor, *args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == dist.get_world_size() - 1:
                packed.zero_()
            return original(output, packed, *args, **kwargs)

        return reduce

    _wrap(("reduce_scatter_single", "reduce_scatter_tensor"), wrapper)


def _divide_twice() -> None:
    """Reduced gradients are half of what they should be."""

    def wrapper(original: Collective) -> Collective:
        def reduce(output: Tensor, packed: Tensor, *args: Any, **kwargs: Any) -> Any:
            packed.div_(2)
            return original(output, packed, *args, **kwargs)

        return reduce

    _wrap(("reduce_scatter_single", "reduce_scatter_tensor"), wrapper)


def _break_aliases() -> None:
    """After a step parameters lie in other memory than before."""

    def move(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups if _at_work[0] else ():
            for param in group["params"]:
                if isinstance(param, DTensor):
                    torch_private.set_local(param, torch_private.local_of(param).clone())

    register_optimizer_step_post_hook(move)


def _keep_buffers_apart() -> None:
    """Buffers are not sent to the other ranks."""

    def wrapper(original: Collective) -> Collective:
        def send(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_step = kwargs.get("async_op", False)  # parameters of ZeRO
            return original(tensor if is_step else tensor.clone(), *args, **kwargs)

        return send

    _wrap(("broadcast",), wrapper)


def _forget_zero_grad() -> None:
    """The model's ``zero_grad`` leaves one gradient."""
    original = nn.Module.zero_grad

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        kept = [(param, param.grad) for param in list(self.parameters())[: int(_at_work[0])]]
        original(self, set_to_none)
        for param, gradient in kept:
            param.grad = gradient

    nn.Module.zero_grad = zero_grad


def _mistake_ranks() -> None:
    """One rank waits for a collective that the others do not call."""
    calls = [0]

    def wrapper(original: Collective) -> Collective:
        def gather(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == 12 and dist.get_rank() == 0:
                dist.barrier()
            return original(output, *args, **kwargs)

        return gather

    _wrap(("all_gather_single", "all_gather_into_tensor"), wrapper)


FAULTS: dict[str, Callable[[], None]] = {
    "gathers are stale": _gather_late,
    "gradients of a rank are dropped": _drop_gradients,
    "the divisor is wrong": _divide_twice,
    "aliases are broken": _break_aliases,
    "buffers are not synced": _keep_buffers_apart,
    "zero_grad forgets a gradient": _forget_zero_grad,
    "a rank calls one collective more": _mistake_ranks,
}
