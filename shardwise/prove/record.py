"""A recording of a training run: sketches of what each step computes, a file of lines per rank.

Torch's global hooks watch modules and optimizers.  No hook tells where a backward begins and ends, so a function that calls
``torch.autograd.backward`` replaces it until the recording ends.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Generator
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
from shardwise.one_host import RandomState
from shardwise.prove.sketch import NOTHING, SIGNS, Named, Sketches, sketches_of
from shardwise.safe_files import open_append

LEAVE_S = 30.0  # what a rank that has made its steps waits for the others
FSDP1 = "FullyShardedDataParallel"
_WRAPPERS = ("DistributedDataParallel", "PlainReplicas", "PlainShards")  # the last two stand for torch's
_OF_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a rank is told.

    Attributes:
        folder: of its recording, which gets ``rank-K.jsonl``; those of the other runs are beside it.
        role: "tested", "plain" or "moved"; "": a recording that a script makes.
        steps: of each optimizer that steps, after which the process ends with the next forward; None: it goes on.
        exact: record digests, too.
        files: the working folder; "": that of the launcher.
        rank: of this process; None: that of the process group.
    """

    folder: str
    role: str = ""
    steps: int | None = None
    exact: bool = False
    files: str = ""
    rank: int | None = None

    def path(self, name: str, role: str = "") -> Path:
        """Return the path of a file of this rank, or of the same rank of another run."""
        folder = Path(self.folder).with_name(role) if role else Path(self.folder)
        return folder / name.format(rank_and_size()[0] if self.rank is None else self.rank)


def packed(sums: Any) -> str:
    """Return an array of float64 as text."""
    return base64.b64encode(sums.tobytes()).decode()


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Models:
    """The models of a script, and names of their parts as the plain model has them.

    A model is a module with parameters that was called by none of its parents.  Names in later ones begin with ``model2.``.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.fsdp1: list[tuple[nn.Module, Any]] = []  # models with parts of torch's older FSDP, and its class
        self._modules: dict[int, str] = {}
        # Each that was registered once: full parameters take the places of shards for a time.
        self._params: dict[int, tuple[torch.Tensor, str]] = {}

    def add(self, called: nn.Module) -> bool:
        """Add a model, unless it belongs to a known one or has no parameters; return True if it was added."""
        root: Any = called
        while type(root).__name__ in _WRAPPERS or hasattr(root, "_orig_mod"):
            root = getattr(root, "_orig_mod", None) or root.module
        if id(root) in self._modules or next(root.parameters(), None) is None:
            return False
        self.roots.append(root)
        for name, module in root.named_modules():
            self._modules.setdefault(id(module), self._clean(len(self.roots) - 1, name) or "the model")
        self.fsdp1 += [(root, type(each)) for each in root.modules() if type(each).__name__ == FSDP1][:1]
        return True

    def of_module(self, module: nn.Module) -> str | None:
        """Return the name of a module; None for wrappers and those of no model."""
        return None if type(module).__name__ in (*_WRAPPERS, FSDP1) else self._modules.get(id(module))

    def _clean(self, index: int, name: str) -> str:
        kept = [each for each in name.split(".") if each and each not in _OF_WRAPPERS]
        return ".".join([f"model{index + 1}"] * bool(index) + kept)

    def tensors(self, kind: str = "parameters", only: int | None = None) -> dict[str, torch.Tensor]:
        """Return all parameters, as they are registered now, or all "buffers"; ``only``: of one model."""
        found: dict[str, torch.Tensor] = {}
        for index, root in enumerate(self.roots):
            for name, tensor in getattr(root, f"named_{kind}")() if only in (None, index) else ():
                found.setdefault(self._clean(index, name), tensor)
        for name, tensor in found.items():
            self._params.setdefault(id(tensor), (tensor, name))
        return found

    def of_optimizer(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Return the parameters of an optimizer; all if it has one that no model has had."""
        given = [self._params.get(id(param)) for group in optimizer.param_groups for param in group["params"]]
        known = {each[1]: each[0] for each in given if each is not None}
        return self.tensors() if None in given or self.fsdp1 else known  # whose shards do not tell their places

    @contextmanager
    def whole(self, with_grads: bool = False) -> Generator[None]:
        """Let torch's older FSDP show full parameters, if it is there.  Collective then."""
        with ExitStack() as stack:
            for root, fsdp in self.fsdp1:
                stack.enter_context(fsdp.summon_full_params(root, writeback=False, with_grads=with_grads))
            yield


class RunRecorder:
    """Records this rank.

    An entry is a sketch, or a number, by what it is of, the number of the microbatch, the shape if it may be of a part alone,
    and a name; with the ranks whose parts make up the tensor.

    Args:
        terms: what is recorded, and for how long.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms, self.models = terms, Models()
        self._found: Sketches = {}
        self._stepping: Optimizer | None = None  # one inside another one steps within its step
        self._num_steps: dict[Optimizer, int] = {}
        self._is_complete = False
        # Of this step, of the run, of nested forwards, and of inputs of this pass.
        self.counts = {"microbatch": 0, "backwards": 0, "forward": 0, "inputs": 0}
        self._is_in_backward = False

    def install(self) -> ExitStack:
        """Begin to record; return what ends the recording.  Another one may begin meanwhile, and ends first."""
        original, stack = torch.autograd.backward, ExitStack()

        def backward(*args: Any, **kwargs: Any) -> None:
            if self._is_in_backward:  # checkpoints run one inside another
                return original(*args, **kwargs)
            self.begin_backward()
            self._is_in_backward = True
            try:
                original(*args, **kwargs)
            except BaseException:
                self.undo_backward()
                raise
            finally:
                self._is_in_backward = False
            self.end_backward(args[0] if args else kwargs["tensors"])

        for hook in (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            stack.callback(hook.remove)
        torch.autograd.backward = backward
        stack.callback(setattr, torch.autograd, "backward", original)
        return stack

    # ---- entries

    def add(self, stage: str, tensors: Named, like: Named = NOTHING, may_be_cut: bool = False) -> None:
        """Note the sketches of tensors by name, some cut as those in ``like`` are; one of a known name gets a number."""
        for name, found in sketches_of(tensors, like, self.terms.exact).items():
            shape = "x".join(map(str, like.get(name, tensors[name]).shape)) if may_be_cut else ""
            number, first = 1, f"{stage}|{self.counts['microbatch']}|{shape}|{name}"
            while (key := first + f" (call {number})" * (number > 1)) in self._found:
                number += 1
            self._found[key] = found

    def add_all(self, stage: str, name: str, tree: object) -> None:
        """Note the tensors in ``tree``, of which each rank has its own."""
        tensors = {f"{name}{f'[{number}]' * bool(number)}": each for number, each in enumerate(tensors_in(tree))}
        self.add(stage, tensors, may_be_cut=True)

    def take(self) -> dict[str, list[str]]:
        """Return the entries as a line has them, and begin with none."""
        found, self._found = self._found, {}
        sums = torch.stack([each for each, _ in found.values()]).cpu().numpy() if found else ()
        rows = zip(found.items(), map(packed, sums), strict=True)
        return {key: [",".join(map(str, ranks)), text] for (key, (_, ranks)), text in rows}

    def write(self, step: int, optimizer: int, **facts: Any) -> None:
        """Append the entries to this rank's file, and begin with none."""
        path = self.terms.path("rank-{}.jsonl")
        with open_append(path.parent, path.name) as file:
            file.write(json.dumps({"step": step, "optimizer": optimizer, **facts, "values": self.take()}) + "\n")

    # ---- forward

    def _before_forward(self, module: nn.Module, args: Any) -> Any:
        if self._is_outside():
            return None
        changed = None
        if not self.counts["forward"]:
            if self._is_complete:
                self._leave()
            if self.models.add(module):
                self.see_model(len(self.models.roots) - 1)
            self.counts["inputs"] = 0
            changed = self.begin_pass(args)
        if not self.counts["inputs"] and args:  # of the model, or of the first module that has positional ones
            self.counts["inputs"] = 1
            self.add_all("input", self.models.of_module(module) or "the model", args)
        self.counts["forward"] += 1
        return changed

    def _is_outside(self) -> bool:
        """Return True inside compiled code, in blocks that are computed again in backward, and where tools watch operations."""
        return torch.compiler.is_compiling() or self._is_in_backward or torch_private.has_dispatch_mode()

    def _after_forward(self, module: nn.Module, args: Any, output: object) -> None:
        if not self._is_outside() and self.counts["forward"]:
            self.counts["forward"] -= 1  # also of those that raise
            name = self.models.of_module(module)
            if name is not None and output is not None:
                self.add_all("output", name, output)

    def see_model(self, index: int) -> None:
        """Note a model's values before its first forward, as the script has initialised them and as the run begins."""
        with self.models.whole(), torch.no_grad():
            params = self.models.tensors(only=index)
            self.add("initial", params)
            facts = self.start(index)
            self.add("parameter", params)
        self.write(-1, index, signs=SIGNS, **facts)

    def start(self, index: int) -> dict[str, Any]:
        """Keep the values of a model for the plain run; return facts of the recording.  Collective if they are sharded."""
        if self.terms.role == "tested":
            tensors = self.models.tensors(only=index) | self.models.tensors("buffers", index)
            full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}
            values = {name: each.detach().clone() for name, each in full.items()}
            torch.save((values, RandomState().state_dict()), self.terms.path(f"initial-{index}-{{}}.pt"))
        return {}

    def begin_pass(self, args: Any) -> Any:
        """Return other arguments for the forward of a model, or None."""

    def begin_backward(self) -> None:
        """Do nothing before a backward."""

    def undo_backward(self) -> None:
        """Do nothing after one that has raised."""

    # ---- backward and step

    def end_backward(self, tensors: Any) -> None:
        """Note the loss and the gradients."""
        self.add_all("loss", "the loss", [each for each in tensors_in(tensors) if each.numel() == 1])
        self._add_gradients("gradient", self.models.tensors())
        if self._stepping is not None:  # in a closure
            self._add_gradients("step gradient", self.models.of_optimizer(self._stepping))
        self.counts["microbatch"] += 1
        self.counts["backwards"] += 1

    def _add_gradients(self, stage: str, params: dict[str, torch.Tensor]) -> None:
        with self.models.whole(with_grads=True):
            grads = {name: param.grad for name, param in reversed(params.items()) if param.grad is not None}
            self.add(stage, {name: each for name, each in grads.items() if not isinstance(each, WaitingGradient)})

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Some optimizers are tried on small tensors; one that has raised steps again.
        if not torch_private.has_dispatch_mode() and self._stepping in (None, optimizer):
            self._stepping = optimizer
            if self.counts["microbatch"]:
                self._add_gradients("step gradient", self.models.of_optimizer(optimizer))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        if not self.models.roots:
            return
        number, params = self._num_steps.get(optimizer, 0), self.models.of_optimizer(optimizer)
        self._num_steps[optimizer] = number + 1
        index = [*self._num_steps].index(optimizer)
        numbers = {
            "the learning rate": [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            "the number of backwards before the step": self.counts["backwards"],
            "the number of microbatches": self.counts["microbatch"],
        }
        self.counts["microbatch"] = 0
        self.add("random state", {"torch": torch.get_rng_state()})
        with self.models.whole():
            self.add("parameter", params)
        self.add("buffer", {} if index else self.models.tensors("buffers"))
        if not self.models.fsdp1:
            self.add("state", *states_of(optimizer, params), may_be_cut=True)
        self.write(number, index, numbers=numbers)
        most = self.terms.steps
        if most is not None and min(self._num_steps.values()) >= most:
            self.note_done()

    # ---- the end

    def note_done(self) -> None:
        """Tell the launcher and the other ranks that this rank has made its steps."""
        self._is_complete = True
        self.terms.path("done-{}").touch()

    def _leave(self) -> None:
        """End this process after its steps; the others may need it for what they do after their last step."""
        deadline = time.monotonic() + LEAVE_S
        while len([*Path(self.terms.folder).glob("done-*")]) < rank_and_size()[1] and time.monotonic() < deadline:
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def states_of(optimizer: Optimizer, params: Named) -> tuple[Named, Named]:
    """Return an optimizer's state by name, and parameters for what is cut as they are; without what is cut otherwise."""
    states, like = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, param in params.items():
        state = optimizer.state[param] if param in optimizer.state else {}  # noqa: SIM401  a default of torch's adds one
        tensors = {f"{name}.{key}": each for key, each in state.items() if isinstance(each, torch.Tensor)}
        for key, each in sorted(tensors.items()):
            is_local = isinstance(param, DTensor) and not isinstance(each, DTensor)
            if is_local and each.shape == torch_private.local_of(param).shape:
                like[key] = param
            if not is_local or key in like or each.numel() == 1:
                states[key] = each
    return states, like


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
    Path(folder).mkdir(parents=True, exist_ok=True)
    recorder = RunRecorder(Terms(str(folder), exact=exact))
    recorder.terms.path("rank-{}.jsonl").unlink(missing_ok=True)
    with recorder.install():
        yield
