"""The model of a case, what one process computes, and what ranks do.  All numbers are whole, so that sums are exact.

Between layers values and gradients are taken modulo a small odd number; the optimizer keeps parameters in -1, 0, 1.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from helpers.compare import full, gradient_of, local, own_part
from helpers.inside import parts_from
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardwise
from fuzz.divergence.case import Call, Case, LayerSpec, Step, Way
from shardwise import FSDPModule, MixedPrecisionPolicy, fully_shard, replicate, shard_model

BACKWARD, FORWARD = range(2)
WIDTH, NUM_EXPERTS, MAX_NORM = 5, 3, 1.5
Values = list["torch.Tensor | None"]


class Wrap(torch.autograd.Function):
    """Take values and gradients modulo an odd number, so that they stay whole and small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, modulus: int) -> torch.Tensor:
        ctx.modulus = modulus
        return _modulo(x, modulus)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _modulo(gradients[0], ctx.modulus), None


def _modulo(x: torch.Tensor, modulus: int) -> torch.Tensor:
    return torch.remainder(x + modulus // 2, modulus) - modulus // 2


class Layer(nn.Module):
    """Parameters of uneven, empty, frozen and non-contiguous kinds, and two that only some calls, or none, use."""

    def __init__(self, spec: LayerSpec, modulus: int, random: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()

        def whole(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=random).to(dtype)

        self.modulus, self.top = modulus, spec.top
        self.weight = nn.Parameter(whole(WIDTH, WIDTH))
        self.turned = nn.Parameter(whole(WIDTH, 2 * WIDTH).t())
        self.bias = nn.Parameter(whole(WIDTH))
        self.scale = nn.Parameter(torch.full((1,), 2.0, dtype=dtype), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, WIDTH, dtype=dtype))
        self.seldom = nn.Parameter(whole(3))
        self.never = nn.Parameter(whole(3))
        self.inner: nn.Module | None = None
        if spec.kind == "inner":
            self.inner = Layer(LayerSpec(), modulus, random, dtype)
        self.experts: nn.ModuleList | None = None
        if spec.kind == "experts":
            self.router = nn.Parameter(whole(WIDTH, NUM_EXPERTS))
            experts = [nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(NUM_EXPERTS)]
            with torch.no_grad():
                for param in (param for expert in experts for param in expert.parameters()):
                    param.copy_(whole(*param.shape))
            self.experts = nn.ModuleList(experts)
        self.requires_grad_(not spec.frozen)
        self.scale.requires_grad_(False)

    def forward(self, x: torch.Tensor, has_seldom: bool = False, has_inner: bool = False) -> torch.Tensor:
        found = torch.relu(x @ self.weight + self.bias) * self.scale
        found = found + (x @ self.turned.t())[:, :WIDTH] + self.nothing.sum()
        if has_seldom:
            found = found + nn.functional.pad(self.seldom, (0, WIDTH - 3))
        if has_inner and self.inner is not None:
            found = found + self.inner(x)
        if self.experts is not None:
            found = found + self._of_experts(x, self.experts)
        return self._wrap(found)

    def _wrap(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, Wrap.apply(x, self.modulus))

    def _of_experts(self, x: torch.Tensor, experts: nn.ModuleList) -> torch.Tensor:
        scores = self._wrap(x @ self.router)
        chosen = (scores.detach() * NUM_EXPERTS + torch.arange(NUM_EXPERTS)).topk(self.top).indices
        found = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            rows = (chosen == number).any(1).nonzero().flatten()
            if len(rows):
                found = found.index_add(0, rows, self._wrap(expert(x[rows])) * scores[rows, number : number + 1])
        return found


class Model(nn.Module):
    """Layers that run as a :class:`Way` says, and a tied parameter."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        random, self.modulus = torch.Generator().manual_seed(case.seed), 3 if case.half else 15
        self.layers = nn.ModuleList(Layer(spec, self.modulus, random, dtype) for spec in case.layers)
        for number, spec in enumerate(case.layers):
            if spec.shared:
                self.layers[number] = self.layers[0]
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(WIDTH))
        self.tied = self.head.weight

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        x = x @ self.tied
        for call in way.calls:
            x = self._call(x, call, way.checkpoints)
        return cast(torch.Tensor, Wrap.apply(self.head(x), self.modulus))

    def _call(self, x: torch.Tensor, call: Call, checkpoints: str) -> torch.Tensor:
        layer = self.layers[call.layer % len(self.layers)]
        if not (checkpoints and torch.is_grad_enabled()):  # without gradients a reentrant checkpoint warns
            return layer(x, call.seldom, call.inner)
        return checkpoint(layer, x, call.seldom, call.inner, use_reentrant=checkpoints == "reentrant")


class Signs(torch.optim.Optimizer):
    """Subtracts the signs of gradients, rounding errors aside; parameters stay in -1, 0, 1."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for param in (each for group in self.param_groups for each in group["params"]):
            if param.grad is not None:
                mine, gradient = local(param), local(param.grad)
                mine.sub_((gradient * 2.0**20).round().sign()).clamp_(-1, 1)


@dataclass(frozen=True)
class Pass:
    """What comes next; what all ranks do comes in the order of these numbers."""

    kind: int
    way: Way


def inputs(case: Case, number: int, rank: int, micro: int) -> torch.Tensor:
    """Return a batch of two rows; without the switch ranks have the same one, and so the same experts."""
    rank = rank if case.may_diverge(number) else 0
    random = torch.Generator().manual_seed(abs(hash((case.seed, number, rank, micro))))
    dtype = torch.float32 if case.half else torch.float64
    return torch.randint(-1, 2, (2, WIDTH), generator=random).to(dtype)


def passes_of(case: Case, number: int, rank: int, model: nn.Module, outputs: list[torch.Tensor]) -> Iterator[Pass]:
    """Do what ``rank`` does in step ``number``; yield each forward and backward before it runs, and optimizer steps."""
    losses: list[torch.Tensor] = []
    dtype = next(model.parameters()).dtype
    for micro, way in enumerate(case.steps[number].ranks[rank]):
        x = inputs(case, number, rank, micro).to(dtype)
        for _ in range(way.forwards):
            yield Pass(FORWARD, way)
            with torch.no_grad():
                x = model(x, way).to(dtype)
            outputs.append(x.double())
        if not way.forwards:
            yield Pass(FORWARD, way)
            output = model(x.requires_grad_(way.checkpoints == "reentrant"), way)
            outputs.append(output.detach().double())
            if way.trains:
                losses.append(output.sum())
        if way.trains and not way.waits:
            yield Pass(BACKWARD, way)
            torch.stack(losses).sum().backward()
            losses.clear()


# ---- one process ----


@dataclass
class Outcome:
    """What is compared: outputs per rank, and gradients, parameters and the norm at the end of each step where ranks meet."""

    outputs: list[list[torch.Tensor]]
    gradients: list[Values] = field(default_factory=list)
    params: list[list[torch.Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class _Alone:
    """One process that does what all ranks do, in the order in which ranks of a ``Join`` meet."""

    def __init__(self, case: Case) -> None:
        self._case, self._model = case, Model(case, torch.float64)
        self._params = list(self._model.parameters())
        self._optimizer = Signs(self._params)
        self._total: dict[int, torch.Tensor] = {}
        self._held: list[dict[int, torch.Tensor]] = [{} for _ in range(case.num_ranks)]
        self.outcome = Outcome([[] for _ in range(case.num_ranks)])

    def run(self, number: int) -> None:
        case, step = self._case, self._case.steps[number]
        if number == case.copy_at or step.zero == "none":
            self._total.clear()
        elif step.zero == "zeros":
            self._total = {place: torch.zeros_like(gradient) for place, gradient in self._total.items()}
        outputs = self.outcome.outputs
        ranks = [passes_of(case, number, rank, self._model, outputs[rank]) for rank in range(case.num_ranks)]
        wanted = {rank: first for rank, passes in enumerate(ranks) if (first := self._next(passes)) is not None}
        while wanted:
            kind = min(each.kind for each in wanted.values())
            num_ranks = case.num_ranks if case.divides_by_all or not step.join else len(wanted)
            for rank, each in list(wanted.items()):
                if each.kind == kind:
                    following = self._next(ranks[rank])
                    if kind == BACKWARD:
                        self._take(rank, each.way.sync, num_ranks)
                    del wanted[rank]
                    if following is not None:
                        wanted[rank] = following
        if step.meets:
            self._end(step)

    def _next(self, passes: Iterator[Pass]) -> Pass | None:
        """Return the next pass for which ranks meet: a forward takes no other rank where nothing is sharded."""
        case = self._case
        gathers = case.kind != "replicate" and not (case.kind == "hsdp" and case.num_ranks == 2)
        meets = (each for each in passes if each.kind != FORWARD or gathers)
        return next(meets, None)

    def _take(self, rank: int, sync: bool, num_ranks: int) -> None:
        held = self._held[rank]
        for place, param in enumerate(self._params):
            if param.grad is not None:
                held[place] = held[place] + param.grad if place in held else param.grad
                param.grad = None
        if sync:
            for place, gradient in held.items():
                self._total[place] = self._total.get(place, torch.zeros_like(gradient)) + gradient / num_ranks
            held.clear()

    def _end(self, step: Step) -> None:
        for place, param in enumerate(self._params):
            param.grad = self._total.get(place)
        if step.clip:
            self.outcome.norms.append(float(nn.utils.clip_grad_norm_(self._params, MAX_NORM)))
        self.outcome.gradients.append([None if param.grad is None else param.grad.clone() for param in self._params])
        if step.updates:
            self._optimizer.step()
        self._model.zero_grad()
        self.outcome.params.append([param.detach().clone() for param in self._params])


def alone(case: Case) -> Outcome:
    """Return what one process computes."""
    process = _Alone(case)
    for number in range(len(case.steps)):
        process.run(number)
    return process.outcome


# ---- ranks ----


def shard(model: Model, case: Case) -> FSDPModule:
    """Shard ``model`` on every rank as ``case`` says."""
    policy = MixedPrecisionPolicy()
    if case.half:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if case.reduce_half else torch.float32)
    options: dict[str, Any] = {"mp_policy": policy}
    if case.kind in ("shard_model", "merged"):
        options.update({} if case.kind == "merged" else {"min_unit_bytes": 0})
        shard_model(model, **options)
    else:
        units: list[nn.Module] = []
        for layer, spec in zip(cast("Iterable[Layer]", model.layers), case.layers, strict=True):
            units += [*(layer.experts or ()), *([] if layer.inner is None else [layer.inner]), *[layer] * spec.is_unit]
        units = [*dict.fromkeys(units), *[model.head] * case.head_unit, model]
        size = case.num_ranks
        if case.kind == "hsdp":
            options["mesh"] = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        if case.kind in ("kept", "int"):
            options["reshard_after_forward"] = size // 2 if case.kind == "int" else False
        for unit in units:
            if case.kind == "replicate":
                replicate(unit, **options)
            else:
                if unit is model:
                    options.pop("reshard_after_forward", None)
                fully_shard(unit, **options)
    assert isinstance(model, FSDPModule)
    found = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for first, second in case.prefetch:
        one, other = found[first % len(found)], found[second % len(found)]
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])
    model.set_transport(cast(Any, case.transport))
    return model


class _OnRank:
    """This rank's part of a case, and how it differs from one process."""

    def __init__(self, case: Case, expected: Outcome) -> None:
        self._case, self._expected = case, expected
        plain = Model(case, torch.float32 if case.half else torch.float64)
        self._names = [name for name, _ in plain.named_parameters()]
        self._take(shard(plain, case))
        self._outputs: list[torch.Tensor] = []
        self._tolerance = 0.0 if case.is_exact else 2e-2 if case.half else 1e-9
        self._num_ends = self._num_norms = 0
        self.differences: list[str] = []

    def _take(self, model: FSDPModule) -> None:
        self._model = cast(Any, model)
        self._optimizer = Signs(self._model.parameters())

    def run(self, number: int) -> None:
        case, step, rank = self._case, self._case.steps[number], dist.get_rank()
        if number == case.copy_at:
            self._take(copy.deepcopy(self._model))
            self._optimizer.zero_grad()
        if number == case.on_at and not (case.on_by_join and step.join):
            self._model.set_allow_rank_divergence(True)
        if number == case.off_at:
            self._model.set_allow_rank_divergence(False)
        if step.zero:
            self._optimizer.zero_grad(step.zero == "none")
        options: dict[str, Any] = {} if case.divides_by_all else {"divide_by_initial_world_size": False}
        with Join([self._model], **options) if step.join else nullcontext():
            for each in passes_of(case, number, rank, self._model, self._outputs):
                if each.way.trains and each.kind == FORWARD:
                    self._model.set_requires_gradient_sync(each.way.sync)
        if step.meets:
            self._end(number, step)

    def _clip(self, step: Step) -> torch.Tensor:
        clip: Any = shardwise.clip_grad_norm_ if step.clip == "shardwise" else nn.utils.clip_grad_norm_
        return clip(self._model.parameters(), MAX_NORM)

    def _end(self, number: int, step: Step) -> None:
        if step.clip:
            norm = full(self._clip(step))
            self._compare(
                f"step {number}: norm",
                norm,
                torch.tensor(self._expected.norms[self._num_norms]),
                max(self._tolerance, 1e-6),
            )
            self._num_norms += 1
        if step.updates:
            self._optimizer.step()
        params = list(self._model.parameters())
        for name, param, gradient in zip(self._names, params, self._expected.gradients[self._num_ends], strict=True):
            self._compare(f"step {number}: gradient of {name}", gradient_of(param), gradient, self._tolerance)
        for name, param, value in zip(self._names, params, self._expected.params[self._num_ends], strict=True):
            self._compare(f"step {number}: {name}", param.detach(), value)
        self._num_ends += 1

    def end(self) -> None:
        expected = self._expected.outputs[dist.get_rank()]
        for number, (mine, its) in enumerate(zip(self._outputs, expected, strict=True)):
            self._compare(f"output {number}", mine, its)

    def _compare(self, name: str, mine: torch.Tensor | None, its: torch.Tensor | None, tolerance: float = 0.0) -> None:
        if mine is None or its is None:
            if mine is not its:
                self.differences.append(f"{name}: {mine}, expected {its}")
            return
        part = (own_part(its, mine) if isinstance(mine, DTensor) else its).double()
        found = local(mine).double()
        if found.shape != part.shape or (found - part).abs().gt(tolerance * part.abs().clamp(min=1.0)).any():
            self.differences.append(f"{name}: {found.tolist()}, expected {part.tolist()}")


def run_rank(cases: list[Case], expected: list[Outcome]) -> list[list[str]]:
    """Run cases one after another on this rank; return how each differs from one process."""
    found: list[list[str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimizers step without gradients
        for case, outcome in zip(cases, expected, strict=True):
            with parts_from(6) if case.large else nullcontext():
                this = _OnRank(case, outcome)
                for number in range(len(case.steps)):
                    this.run(number)
                this.end()
            found.append(this.differences)
    return found
