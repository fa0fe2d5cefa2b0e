"""The area ``reproducible``: drawn programs with ``Reproducible``, which must agree to the bit at all numbers of ranks."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from helpers.compare import full
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.functional import dropout

import shardwise
from fuzz.case import WIDTH, Case, Model, Settings
from fuzz.draw_model import draw_model
from fuzz.optims import OPTIMIZERS
from fuzz.phases import Play
from fuzz.programs import Programs
from fuzz.render import render
from fuzz.shrink import candidates as smaller_cases
from fuzz.shrink import plainer, put
from fuzz.weights import ODDMENTS, Weights, table
from fuzz.zoo import unbox
from shardwise.checkpoint import finish, load, save

APIS = ("fully_shard", "fully_shard", "zero3", "zero2", "hsdp", "hfsdp", "ddp", "zero1", "replicate")
PLAIN = ("small_sgd", "adamw", "adam", "foreach", "fused", "adagrad", "rmsprop")
USES = ("", "", "", "scale", "value", "drop", "unscale", "hook")
KINDS = table(Mlp=6, Oddments=3, Conv=1, Lookup=1, Lstm=0.3, Norm=0.1)
WEIGHTS = Weights(
    kinds=KINDS, real_kinds=table(), oddments=ODDMENTS, twice=0.15, recompute=0.15, tie=0.15, frozen=0.1, formats=True
)


@dataclass(frozen=True, slots=True)
class Step:
    """A step.

    Attributes:
        loops: over all microbatches; their gradients add up.  backwards: of each microbatch, the first without sync.
        clip: the type of the norm; 0: does not clip.  use: what is done to the gradients after the loop.
        zero: how gradients are cleared: "none", "zeros", or "" to keep them.
    """

    loops: int = 1
    backwards: int = 1
    clip: float = 0.0
    use: str = ""
    zero: str = "none"


@dataclass(frozen=True, slots=True)
class Fixed:
    """A program.

    Attributes:
        seed: of values and batches.  num_ranks: the most.  num: microbatches of a step.
        sharded: ``ShardedOptimizer`` in place of torch's class.  precision: "fp32", "mixed", or "bf16" for parameters.
        columns: matrices are cut along their second dim.  drops: dropout on the output.  moves: each step runs at another
            number of ranks, from a checkpoint.
    """

    seed: int
    num_ranks: int
    model: Model
    steps: tuple[Step, ...]
    num: int = 4
    api: str = "fully_shard"
    optimizer: str = "adamw"
    sharded: bool = False
    precision: str = "fp32"
    transport: str = "auto"
    reshard: bool = True
    columns: bool = False
    drops: bool = False
    moves: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Numbers of ranks, and of replicas: 0 for meshes with one axis."""
        ranks = [each for each in range(1, self.num_ranks + 1) if self.num % each == 0]
        if self.api not in ("hsdp", "hfsdp"):
            return [(each, 0) for each in ranks]
        if self.api == "hfsdp":  # makes a group of its mesh, which torch wants all ranks to make
            ranks = [self.num_ranks]
        return [(each, replicas) for each in ranks for replicas in range(1, each + 1) if each % replicas == 0]


def draw(seed: int, num_ranks: int) -> Fixed:
    """Return the program of ``seed``."""
    random = Random(f"{seed} {num_ranks} reproducible")
    choose, api = random.choice, random.choice(APIS)
    steps = tuple(
        Step(
            choose((1, 1, 1, 2)),
            choose((1, 1, 2)),
            choose((0.0, 2.0, 1.0, torch.inf, 0.5, 3.0)),
            choose(USES),
            choose(("none", "none", "zeros", "")),
        )
        for _ in range(choose((1, 2, 3)))
    )
    is_matrix = api in ("fully_shard", "zero3", "zero2") and random.random() < 0.15
    return Fixed(
        seed,
        num_ranks,
        draw_model(random, WEIGHTS, reals=True),
        steps,
        choose((4, 8, 12, 12)),
        api,
        "muon" if is_matrix else choose(PLAIN),
        is_matrix or (api not in ("zero1", "ddp", "replicate") and random.random() < 0.4),
        choose(("fp32", "fp32", "mixed", "bf16")),
        choose(("auto", "gloo", "collective")),
        random.random() < 0.7,
        api in ("fully_shard", "zero3") and random.random() < 0.15,
        random.random() < 0.5,
        random.random() < 0.4,
    )


def candidates(case: Fixed) -> Iterator[Fixed]:
    """Yield smaller programs."""
    for number in range(len(case.steps) if len(case.steps) > 1 else 0):
        yield replace(case, steps=put(case.steps, number))
    for other in smaller_cases(_as_case(case)):
        if other.model != case.model:
            yield replace(case, model=other.model)
    yield from plainer(case)
    for number, step in enumerate(case.steps):
        for simpler in plainer(step):
            yield replace(case, steps=put(case.steps, number, simpler))


# ---- on the ranks ----


def _as_case(case: Fixed) -> Case:
    settings = Settings(arithmetic="reals")
    return Case(case.seed, "reproducible", case.num_ranks, case.model, settings, ())


class _Run:
    """The model, the optimizer and the loop of ``case`` over the ranks of ``mesh``."""

    def __init__(self, case: Fixed, mesh: DeviceMesh, group: Any) -> None:
        self.case, self.group, play = case, group, Play.load(render(_as_case(case)))
        torch.manual_seed(0)
        model = play.build()
        model = model.bfloat16() if case.precision == "bf16" else model
        dtype = None if case.precision == "fp32" else torch.bfloat16
        options: dict[str, Any] = {"mp_policy": shardwise.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)}
        if case.columns:
            options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() > 1 else None
        if case.api == "fully_shard":
            for paths in play.units:
                modules = [model.get_submodule(path) for path in paths]
                root = modules if len(modules) > 1 else modules[0]
                shardwise.fully_shard(root, mesh=mesh, reshard_after_forward=case.reshard, **options)
        elif case.api == "replicate":
            shardwise.replicate(model, mesh=mesh, **options)
        else:
            shardwise.shard_model(model, strategy=case.api, mesh=mesh, min_unit_bytes=0, **options)
        self.model: Any = model
        if case.api != "replicate":
            self.model.set_transport(case.transport)
        self.optimizer = self._optimizer()
        self.fixed = shardwise.Reproducible(model, self.optimizer, num_microbatches=case.num, seed=case.seed)

    def _optimizer(self) -> Any:
        case, named = self.case, dict(self.model.named_parameters())
        if case.optimizer == "muon":
            named = {name: param for name, param in named.items() if param.ndim == 2 and param.requires_grad}
            return shardwise.ShardedOptimizer(named, torch.optim.Muon, lr=0.05) if named else None
        kind = OPTIMIZERS[case.optimizer]
        if case.api == "zero1":
            partition = "whole" if case.seed % 2 else "even"
            own = [param for param in named.values() if param.requires_grad]
            return shardwise.ZeroRedundancyOptimizer(
                own, kind.make, process_group=self.group, partition=partition, **kind.options
            )  # fmt: skip
        if case.sharded:
            return shardwise.ShardedOptimizer(named, kind.make, flat=case.seed % 3 > 0, **kind.options)
        make: Any = kind.make
        return make(named.values(), **kind.options)

    def step(self, step: Step) -> Iterator[tuple[str, torch.Tensor]]:
        case, fixed, params = self.case, self.fixed, [*self.model.parameters()]
        trained = [param for param in params if param.requires_grad][: step.use == "hook"]
        hooks = [param.register_hook(lambda grad: grad * 0.75) for param in trained]
        for _ in range(step.loops):
            losses: list[torch.Tensor] = []
            for number in fixed.microbatches():
                loss = torch.zeros(())
                for part in range(step.backwards):
                    with shardwise.policy(self.model, sync=part == step.backwards - 1):
                        noise = torch.Generator("cpu").manual_seed(1000 * fixed.step + 10 * number + part)
                        batch = torch.randn(2, WIDTH, generator=noise)
                        if case.precision == "bf16":
                            batch = batch.bfloat16()
                        batch.requires_grad_()  # reentrant checkpoints need it
                        output = unbox(self.model(batch)).float()
                        loss = dropout(output, 0.3 if case.drops else 0.0).square().mean() / case.num
                        loss.backward()
                losses.append(loss.detach())
            yield "loss", fixed.sum(losses)
        for hook in hooks:
            hook.remove()
        grads = [param.grad for param in params if param.grad is not None]
        if step.use == "scale":
            for grad in grads:
                grad.mul_(0.3)
        elif step.use == "value":
            nn.utils.clip_grad_value_(params, 0.01)
        elif step.use == "drop" and grads:
            next(param for param in params if param.grad is not None).grad = None
        elif step.use == "unscale" and self.optimizer is not None and case.api not in ("zero1",) and not case.sharded:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.ones(()))
            scaler.unscale_(self.optimizer)
        if step.clip:
            yield "norm", fixed.clip_grad_norm_(0.02, step.clip)
        if self.optimizer is not None:
            self.optimizer.step()
        if step.zero:
            self.model.zero_grad(set_to_none=step.zero == "none")

    @property
    def state(self) -> dict[str, Any]:
        optimizer = {} if self.optimizer is None else {"optimizer": self.optimizer}
        return {"model": self.model, "fixed": self.fixed, **optimizer}

    def params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self.model.named_parameters():
            yield name, full(param.detach())


Answer = list[tuple[str, str]]


def _digest(value: torch.Tensor) -> str:
    flat = value.detach().contiguous().reshape(-1)
    text = f"{flat[:3].tolist()}" if flat.numel() <= 1 else ""
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest() + text


def _train(case: Fixed, places: Sequence[Any], folder: str) -> Answer:
    """Return what a run gives that takes its steps on ``places`` by turns."""
    found: Answer = []
    run: _Run | None = None
    for number, step in enumerate(case.steps):
        mesh, group, ranks = places[number % len(places)]
        if dist.get_rank() < ranks and (run is None or len(places) > 1):
            run = _Run(case, mesh, group)
            if number:
                load(f"{folder}/{number - 1}", run.state, group=group)
        if dist.get_rank() < ranks:
            assert run is not None
            found += [(f"step {number}: {name}", _digest(value)) for name, value in run.step(step)]
            found += [(f"step {number}: {name}", _digest(value)) for name, value in run.params()]
            if len(places) > 1:
                save(f"{folder}/{number}", run.state, step=number, group=group)
                finish(f"{folder}/{number}", group)
        if len(places) > 1:
            dist.barrier()
    return found


def run_rank(cases: list[Fixed]) -> list[list[tuple[str, Answer]]]:
    """Run cases on this rank; return what each gives over each of its shapes."""
    answers: list[list[tuple[str, Answer]]] = []
    for case in cases:
        rank, places = dist.get_rank(), list[Any]()
        folders = [tempfile.mkdtemp() if not rank else ""]
        dist.broadcast_object_list(folders)
        for ranks, replicas in case.shapes:
            chosen = torch.arange(ranks)
            mesh = DeviceMesh("cpu", chosen.view(replicas, -1), mesh_dim_names=("r", "s")) if replicas else None
            places.append((mesh or DeviceMesh("cpu", chosen), dist.new_group(range(ranks)), ranks))
        runs = [[place] for place in places] + [[places[-1], places[0], *places[1:-1]]] * case.moves
        keeps_gradients = any(not step.zero for step in case.steps)
        answers.append([])
        for way in runs[: len(places) if keeps_gradients else None]:  # a checkpoint has no gradients
            name = "moves" if len(way) > 1 or (way is not runs[0] and len(runs) == 1) else f"{way[0][2]} ranks"
            try:
                answer = _train(case, way, folders[0])
            except (RuntimeError, shardwise.ShardwiseError) as error:
                answer = [("refused", f"{type(error).__name__}: {str(error)[:120]}")]
            answers[-1].append((name, answer))
            dist.barrier()
        if not rank:
            shutil.rmtree(folders[0], ignore_errors=True)
    return answers


# ---- beside the ranks ----

REFUSED: Counter[str] = Counter()


def _in_words(ranks: list[list[tuple[str, Answer]]]) -> str:
    found = ranks[0]
    _, expected = found[0]
    if expected[0][0] == "refused":
        REFUSED[expected[0][1][:60]] += 1
    for name, answer in found[1:]:
        if len(answer) != len(expected) or [key for key, _ in answer] != [key for key, _ in expected]:
            return f"{name} gives {answer[0]} ({len(answer)}), {found[0][0]} {expected[0]} ({len(expected)})"
        for (what, mine), (_, theirs) in zip(answer, expected, strict=True):
            if mine != theirs and what != "refused":
                return (
                    f"differs in {what.split(': ')[-1].split('.')[-1]}\n{name}: {what}: {mine}, {found[0][0]}: {theirs}"
                )
    return ""


REPRODUCIBLE = Programs(
    kind=Fixed,
    draw=draw,
    candidates=candidates,
    run_rank=run_rank,
    arguments=lambda cases: {"cases": cases},
    in_words=_in_words,
    preload="fuzz.fixed_sums",
    batch=4,
    limit_s=20.0,
    more_s=10.0,
    tries=60,
    refused=REFUSED,
)
