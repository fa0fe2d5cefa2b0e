"""A recording of a training run: sketches of what each step computes, a file of lines per rank.

Torch's global hooks watch modules and optimizers.  No hook tells where a backward begins and ends, so a function that calls
``torch.autograd.backward`` replaces it until :meth:`RunRecorder.remove`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import torch_private
from shardwise.containers import tensors_in
from shardwise.fsdp.waiting_gradients import WaitingGradient
from shardwise.prove.sketch import sketch_of
from shardwise.random_state import RandomState
from shardwise.safe_files import open_append

LEAVE_S = 30.0  # what a rank that has made its steps waits for the others
FSDP1 = "FullyShardedDataParallel"
_WRAPPERS = ("DistributedDataParallel", "PlainReplicas", "PlainShards")
_OF_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a rank is told.

    Attributes:
        folder: of its recording, which gets ``rank-K.jsonl``.
        steps: of each optimizer that steps, after which the process ends with the next forward; None: it goes on.
        rank: of this process; None: that of the process group.
        exact: record digests, too.
        keeps_initial: save the values that a model has at its first forward, for the plain run.
        place: the working folder; "": that of the launcher.
        initial: the folder of the tested run's recording; "": this is the tested run.
        moves: weights, inputs and sums are moved.
    """

    folder: str
    steps: int | None = None
    rank: int | None = None
    exact: bool = False
    keeps_initial: bool = False
    place: str = ""
    initial: str = ""
    moves: bool = False

    def path(self, what: str, kind: str = "", folder: str = "") -> Path:
        """Return the path of a file of this rank."""
        rank = rank_and_size()[0] if self.rank is None else self.rank
        return Path(folder or self.folder, f"{what}-{rank}{f'.{kind}' * bool(kind)}")


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def bare(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers of classes that wrap a whole model."""
    while type(module).__name__ in _WRAPPERS or hasattr(module, "_orig_mod"):
        inner: Any = getattr(module, "_orig_mod", None) or module.module
        module = inner
    return module


class Names:
    """The models of a script, and names of their parts as the plain model has them.

    A model is a module with parameters that was called by none of its parents.  Names in later ones begin with ``model2.``.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self._modules: dict[int, str] = {}
        self._params: dict[
            int, tuple[torch.Tensor, str]
        ] = {}  # that were registered; full ones take their places for a time

    def add(self, called: nn.Module) -> bool:
        """Add a model, unless it belongs to a known one or has no parameters; return True if it was added."""
        root = bare(called)
        if id(root) in self._modules or next(root.parameters(), None) is None:
            return False
        self.roots.append(root)
        for name, module in root.named_modules():
            self._modules.setdefault(id(module), self._clean(len(self.roots) - 1, name) or "the model")
        return True

    def of_module(self, module: nn.Module) -> str | None:
        """Return the name of a module; None for wrappers and those of no model."""
        return None if type(module).__name__ in (*_WRAPPERS, FSDP1) else self._modules.get(id(module))

    def _clean(self, index: int, name: str) -> str:
        parts = name.split(".")
        kept = [each for each in parts if each not in _OF_WRAPPERS]
        return ".".join([f"model{index + 1}"] * bool(index) + [each for each in kept if each])

    def parameters(self, index: int | None = None) -> dict[str, torch.Tensor]:
        """Return all parameters, as they are registered now; or those of one model."""
        found = self._of(nn.Module.named_parameters, index)
        for name, param in found.items():
            self._params.setdefault(id(param), (param, name))
        return found

    def of_optimizer(self, optimizer: Optimizer) -> dict[str, torch.Tensor] | None:
        """Return the parameters of an optimizer; None if it has one that no model has had."""
        self.parameters()
        given = [self._params.get(id(param)) for group in optimizer.param_groups for param in group["params"]]
        found = {each[1]: each[0] for each in given if each is not None}
        return None if None in given or has_fsdp1(self.roots) else found

    def buffers(self, index: int | None = None) -> dict[str, torch.Tensor]:
        """Return all buffers, or those of one model."""
        return self._of(nn.Module.named_buffers, index)

    def _of(
        self, list_tensors: Callable[[nn.Module], Iterator[tuple[str, torch.Tensor]]], only: int | None
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for index, root in enumerate(self.roots):
            for name, tensor in list_tensors(root) if only in (None, index) else ():
                found.setdefault(self._clean(index, name), tensor)
        return found


class Rows:
    """Sketches of one step until they are written: ``stage|microbatch|name`` and the ranks whose parts make up a tensor."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.facts: dict[str, Any] = {}
        self._found: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}

    def add(self, key: str, tensor: torch.Tensor, notes_shape: bool = False) -> None:
        """Note the sketch of a tensor, and its shape if it may be a part; a key that was there gets a number."""
        found = sketch_of(tensor, self._terms.exact)
        number, first = 1, key
        while key in self._found:
            number += 1
            key = f"{first} (call {number})"
        if found is not None:
            self._found[key] = found
            if notes_shape:
                self.facts.setdefault("shapes", {})[key] = [*tensor.shape]

    def write(self, step: int, optimizer: int) -> None:
        """Append what was found to this rank's file, and begin with nothing."""
        if self._found:
            numbers = torch.stack([each.to("cpu") for each, _ in self._found.values()]).tolist()
            values = {
                key: [",".join(map(str, ranks)), *(float(f"{each:.12g}") for each in row)]
                for (key, (_, ranks)), row in zip(self._found.items(), numbers, strict=True)
            }
            path = self._terms.path("rank", "jsonl")
            with open_append(path.parent, path.name) as file:
                row = {"step": step, "optimizer": optimizer, **self.facts, "values": values}
                file.write(json.dumps(row) + "\n")
        self._found, self.facts = {}, {}


class RunRecorder:
    """Records this rank.

    Args:
        terms: what is recorded, and for how long.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.names, self.rows = Names(), Rows(terms)
        self._stack: list[nn.Module] = []  # modules whose forward runs
        self._stepping: list[Optimizer] = []  # an optimizer inside another one steps within its step
        self.num_steps: dict[Optimizer, int] = {}
        self.counts = {"microbatch": 0, "before": 0, "backwards": 0, "depth": 0, "inputs": 0}
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Begin to record."""
        hooks = (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if not self.counts["depth"]:
                self.begin_backward()
            self.counts["depth"] += 1  # checkpoints run one inside another
            try:
                original(*args, **kwargs)
            finally:
                self.counts["depth"] -= 1
            if not self.counts["depth"]:
                self.end_backward(args[0] if args else kwargs["tensors"])

        torch.autograd.backward = backward
        self._undo = [*(each.remove for each in hooks), lambda: setattr(torch.autograd, "backward", original)]

    def remove(self) -> None:
        """End the recording; another one may have begun meanwhile, and ends first."""
        for each in self._undo:
            each()

    # ---- forward

    def _before_forward(self, module: nn.Module, args: Any) -> Any:
        if self._is_outside():
            return None
        changed = None
        if not self._stack:
            if self._is_complete():
                self._leave()
            if self.names.add(module):
                with torch.no_grad():
                    self.see_model(self.names.roots[-1], len(self.names.roots) - 1)
            self.counts["inputs"] = 0
            changed = self.begin_pass(module, args)
        tensors = tensors_in(args)
        if not self.counts["inputs"] and tensors:  # of the model, or of the first module that has positional ones
            self.counts["inputs"] = 1
            self._add_all("input", self.names.of_module(module) or "the model", tensors)
        self._stack.append(module)
        return changed

    def _is_outside(self) -> bool:
        """Return True inside compiled code, in blocks that are computed again in backward, and where tools watch operations."""
        return torch.compiler.is_compiling() or self.counts["depth"] > 0 or torch_private.has_dispatch_mode()

    def _after_forward(self, module: nn.Module, args: Any, output: object) -> None:
        if self._is_outside() or module not in self._stack:
            return
        while self._stack.pop() is not module:  # those that have raised
            pass
        name = self.names.of_module(module)
        if name is not None and output is not None:
            tensors = tensors_in(output)
            self._add_all("output", name, tensors)

    def _add_all(self, stage: str, name: str, tensors: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():
            for number, each in enumerate(tensors):
                key = f"{stage}|{self.counts['microbatch']}|{name}{f'[{number}]' * bool(number)}"
                self.rows.add(key, each, notes_shape=True)

    def see_model(self, root: nn.Module, index: int) -> None:
        """Note a model's values before its first forward.  Collective if they are sharded and are to be kept."""
        if self.terms.keeps_initial:
            with whole(root):
                tensors = {**self.names.parameters(index), **self.names.buffers(index)}
                values = {name: full(each).clone() for name, each in tensors.items()}
            kept = {"values": values, "random": RandomState().state_dict()}
            torch.save(kept, self.terms.path(f"initial-{index}", "pt"))
        self.add_parameters("parameter")
        self.rows.write(-1, index)

    def begin_pass(self, module: nn.Module, args: Any) -> Any:
        """Return other arguments for the forward of a model, or None."""

    # ---- backward and step

    def begin_backward(self) -> None:
        """Do nothing before a backward."""

    def end_backward(self, tensors: Any) -> None:
        """Note the loss and the gradients."""
        found = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
        self._add_all("loss", "the loss", [each for each in found if each.numel() == 1])
        self.add_gradients("gradient")
        self.counts["microbatch"] += 1
        self.counts["backwards"] += 1

    def add_gradients(self, stage: str, params: Mapping[str, torch.Tensor] | None = None) -> None:
        """Note the gradients of parameters, or of all."""
        with torch.no_grad(), whole(*self.names.roots, with_grads=True):
            params = self.names.parameters() if params is None else params
            for name, param in reversed([*params.items()]):
                if param.grad is not None and not isinstance(param.grad, WaitingGradient):
                    self.rows.add(f"{stage}|{self.counts['microbatch']}|{name}", param.grad)

    def add_parameters(self, stage: str, params: Mapping[str, torch.Tensor] | None = None) -> None:
        """Note parameters, or all."""
        with whole(*self.names.roots):
            for name, param in (self.names.parameters() if params is None else params).items():
                self.rows.add(f"{stage}|0|{name}", param)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch_private.has_dispatch_mode():  # an optimizer that is tried on small tensors
            return
        self._stepping.append(optimizer)
        if len(self._stepping) == 1:
            self.counts["before"] = self.counts["microbatch"]
            if self.counts["microbatch"]:
                self.add_gradients("step gradient", self.names.of_optimizer(optimizer))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        is_known = optimizer in self._stepping
        while is_known and self._stepping.pop() is not optimizer:  # those that have raised
            pass
        if not is_known or self._stepping or not self.names.roots:  # a closure may be the first that calls the model
            return
        if self.counts["microbatch"] > self.counts["before"]:  # by a closure
            self.add_gradients("step gradient", self.names.of_optimizer(optimizer))
        with torch.no_grad():
            self._add_state(optimizer)
            number = self.num_steps.setdefault(optimizer, 0)
            self.num_steps[optimizer] += 1
        self.rows.facts |= {
            "microbatches": self.counts["microbatch"],
            "backwards": self.counts["backwards"],
            "lr": [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16],
            "ranks": rank_and_size()[1],
        }
        self.add_facts()
        self.rows.write(number, list(self.num_steps).index(optimizer))
        self.counts["microbatch"] = 0
        if self._is_complete():
            self.note_done()

    def add_facts(self) -> None:
        """Add to the facts of the step."""

    def _add_state(self, optimizer: Optimizer) -> None:
        params = self.names.of_optimizer(optimizer)
        self.add_parameters("parameter", params)
        if optimizer is next(iter(self.num_steps), optimizer):
            for name, each in self.names.buffers().items():
                self.rows.add(f"buffer|0|{name}", each)
        for name, param in (params or {}).items():
            state = optimizer.state[param] if param in optimizer.state else {}  # noqa: SIM401  a default of torch's adds one
            for key, value in sorted(state.items(), key=lambda each: str(each[0])):
                if isinstance(value, torch.Tensor) and (found := state_like(value, param)) is not None:
                    self.rows.add(f"state|0|{name}.{key}", found, found.shape != param.shape)

    # ---- the end

    def _is_complete(self) -> bool:
        most = self.terms.steps
        return most is not None and bool(self.num_steps) and min(self.num_steps.values()) >= most

    def note_done(self) -> None:
        """Tell the launcher and the other ranks that this rank has made its steps."""
        self.terms.path("done").touch()

    def _leave(self) -> None:
        """End this process; the others may need it for what they do after their last step."""
        deadline = time.monotonic() + LEAVE_S
        while len([*Path(self.terms.folder).glob("done-*")]) < rank_and_size()[1] and time.monotonic() < deadline:
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def state_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor | None:
    """Return an optimizer's state as a tensor that is cut as its parameter is, or whole; None for what is cut otherwise."""
    if isinstance(value, DTensor) or not isinstance(param, DTensor) or value.numel() == 1:
        return value
    if value.shape != torch_private.local_of(param).shape:
        return None
    spec = torch_private.spec_of(param, value.dtype)
    return torch_private.dtensor_from_local(value.detach(), spec)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, and others as they are."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def has_fsdp1(roots: Iterable[nn.Module]) -> bool:
    """Return True if torch's older FSDP, whose shards do not tell their places, wraps a part of these models."""
    return any(type(each).__name__ == FSDP1 for root in roots for each in root.modules())


@contextmanager
def whole(*roots: nn.Module, with_grads: bool = False) -> Generator[None]:
    """Let torch's older FSDP show full parameters, if these models have any.  Collective then."""
    with ExitStack() as stack:
        for root in roots:
            if has_fsdp1([root]):
                fsdp: Any = getattr(importlib.import_module("torch.distributed.fsdp"), FSDP1)
                stack.enter_context(fsdp.summon_full_params(root, writeback=False, with_grads=with_grads))
        yield


@contextmanager
def recorded(folder: str | Path, *, exact: bool = False) -> Generator[None]:
    """Record the training within the context, for ``shardwise prove --compare``; every rank writes a file.

    Recorded are sketches of the outputs, losses, gradients, parameters, buffers and optimizer states of each step, no tensors:
    a few hundred bytes per tensor and step.  It works with every wrapper, and with none; the other run may have other ranks.

    Args:
        folder: gets ``rank-K.jsonl``; a file of an earlier run is replaced.
        exact: record a digest of every bit, too, for ``--exact``.

    Example:
        >>> with shardwise.recorded("runs/a"):  # doctest: +SKIP
        ...     train(model, steps=3)
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    terms = Terms(str(place), exact=exact)
    terms.path("rank", "jsonl").unlink(missing_ok=True)
    recorder = RunRecorder(terms)
    recorder.install()
    try:
        yield
    finally:
        recorder.remove()
