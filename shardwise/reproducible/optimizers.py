"""Optimizer steps that compute the same bits wherever parameters are cut: optimizers are tried on small tensors.

Some round the end of a vectorized loop differently than its body (fused AdamW, SGD in bfloat16).  Where whole vectors have the
same bits, the ends of parameters are stepped once more, in such.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise import torch_private
from shardwise.errors import ConfigError
from shardwise.optim.elementwise import ElementwiseStep
from shardwise.optim.sharded_optimizer import ShardedOptimizer, optimizer_backend
from shardwise.optim.state_dict import options_of
from shardwise.zero.optimizer import ZeroRedundancyOptimizer

# Sizes around the widths of vector loops: an element is in the vector part of the whole and in the tail of a slice.
_SIZES = (1, 7, 33, 65, 94)
_WIDTH = 64  # elements; a multiple of what these loops take at once (32 in bfloat16)


class EqualSteps:
    """Let each step of ``optimizer`` compute the bits of an element alike wherever its parameter is cut.

    Cost: a few steps on some hundred elements, for each param group and dtype of sharded parameters.  Where ends are stepped
    again, a copy of less than a vector of each parameter, gradient and state per step.

    Raises: ConfigError if that is impossible.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._inner, self._is_cut, self._has_hooks = optimizer, optimizer, _is_cut, True
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            is_whole = optimizer.partition == "whole"  # an owner updates whole parameters
            self._inner, self._is_cut = optimizer.optim, lambda param: not is_whole
        if isinstance(optimizer, ShardedOptimizer):
            backend = optimizer_backend(optimizer)
            self._inner, self._has_hooks = backend.optimizer, isinstance(backend, ElementwiseStep)  # else by units
            if not backend.is_elementwise:
                self._is_cut = lambda param: False  # an owner updates whole matrices
        self._steps_ends, self._twin = False, optimizer
        self._ends: dict[torch.Tensor, torch.Tensor] = {}
        self._tried: list[object] = []
        self.check()

    def check(self) -> None:
        """Try the optimizer, unless its groups and their options apart from ``lr`` are those that were tried.

        Raises: ConfigError.
        """
        groups = self._optimizer.param_groups
        found: list[object] = [(repr({**options_of(each), "lr": 0}), [*map(id, each["params"])]) for each in groups]
        if found == self._tried:
            return
        tried, cls = dict[object, bool](), type(self._inner)
        for group in self._optimizer.param_groups:
            options = options_of(group)
            for param in group["params"]:
                key = (param.dtype, param.device, repr(options))
                if key not in tried and self._is_cut(param):
                    tried[key] = _differs(cls, options, param, 1)
                    if tried[key] and (not self._has_hooks or _differs(cls, options, param, _WIDTH)):
                        raise ConfigError(
                            f"Reproducible: {cls.__name__} computes other bits for parameters of {param.dtype} that "
                            "are cut elsewhere: elements depend on each other, or are updated unit by unit. Leave fused=True "
                            "and offload= out, or keep parameters whole (strategy='ddp' or 'zero1')"
                        )
        if any(tried.values()) and not self._steps_ends:
            self._steps_ends = True
            self._inner.register_step_pre_hook(self._take_in_closure)
            self._inner.register_step_post_hook(self._put)
        self._tried = found

    def _take_in_closure(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a step that takes the ends after all other pre-hooks, and a closure, made gradients."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        def closure_then_take() -> Any:
            loss = None if closure is None else closure()
            self._take(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": closure_then_take}

    @torch.no_grad()
    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the ends, their gradients and their state, before ``optimizer`` steps."""
        self._ends, groups, states = {}, list[dict[str, Any]](), dict[torch.Tensor, Any]()
        for group in optimizer.param_groups:
            groups.append({**options_of(group), "params": []})
            for param in group["params"]:
                if param.grad is not None and param.ndim and torch_private.local_of(param).numel() % _WIDTH:
                    end = self._ends[param] = torch.nn.Parameter(_in_vectors(_end_of(param)))
                    end.grad = _in_vectors(_end_of(param.grad))
                    groups[-1]["params"].append(end)
                    if state := optimizer.state.get(param):
                        states[end] = {
                            key: _in_vectors(_end_of(value)) if _is_per_element(value, param) else copy.deepcopy(value)
                            for key, value in state.items()
                        }
        if self._ends:
            self._twin = _made(type(optimizer), groups)
            self._twin.state.update(states)
            for name in ("grad_scale", "found_inf"):  # of a GradScaler, for fused steps
                setattr(self._twin, name, getattr(optimizer, name, None))

    @torch.no_grad()
    def _put(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Step the ends, and write them over those that ``optimizer`` has stepped."""
        if self._ends:
            torch_private.step_inside(self._twin)
        for param, end in self._ends.items():
            states = optimizer.state[param], self._twin.state[end]
            for whole, part in [(param, end), *((states[0][key], value) for key, value in states[1].items())]:
                if _is_per_element(whole, param):
                    target = _end_of(whole)
                    target.copy_(part[: target.numel()])
        self._ends = {}


def _is_per_element(value: object, param: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == param.shape


def _end_of(values: torch.Tensor) -> torch.Tensor:
    """Return what the local part of ``values``, in the order of memory, has after its last whole vector, as a view."""
    local = torch_private.local_of(values).detach()
    return local.as_strided((local.numel(),), (1,))[local.numel() // _WIDTH * _WIDTH :]


def _in_vectors(values: torch.Tensor, width: int = _WIDTH) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % width))


def _is_cut(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and not all(isinstance(each, Replicate) for each in param.placements)


def _differs(cls: type[torch.optim.Optimizer], options: Mapping[str, Any], param: torch.Tensor, width: int) -> bool:
    """Return True if a step over slices, padded to ``width``, has other bits than one over the whole."""
    noise = torch.Generator("cpu").manual_seed(0)
    values = [torch.randn(sum(_SIZES), generator=noise, device="cpu").to(param.device, param.dtype) for _ in range(4)]
    whole = _stepped(cls, options, [[each] for each in values], width)
    return not torch.equal(whole, _stepped(cls, options, [list(each.split(_SIZES)) for each in values], width))


def _made(cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    lr: dict[str, Any] = {"lr": groups[0]["lr"]} if "lr" in groups[0] else {}  # some classes have no default
    return cls([group for group in groups if group["params"]], **lr)


def _stepped(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], values: Sequence[Sequence[torch.Tensor]], width: int
) -> torch.Tensor:
    """Return the parts ``values[0]`` and their state, in rows, after a step with each of the gradients ``values[1:]``."""
    params = [torch.nn.Parameter(_in_vectors(part, width).clone()) for part in values[0]]
    optimizer = _made(cls, [{**options, "params": params}])
    for gradients in values[1:]:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = _in_vectors(gradient, width).clone()
        torch_private.step_inside(optimizer)
    columns: list[torch.Tensor] = []
    for param, part in zip(params, values[0], strict=True):
        state = [value for value in optimizer.state[param].values() if _is_per_element(value, param)]
        columns.append(torch.stack([param.detach(), *(value.to(param.dtype) for value in state)])[:, : part.numel()])
    return torch.cat(columns, dim=1)
