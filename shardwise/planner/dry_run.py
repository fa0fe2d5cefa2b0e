"""One forward and backward of a model without memory and without arithmetic, written down as a profile.

Tensors are fake: they have shapes, dtypes and storages of a size, so autograd keeps and frees what it would keep and free,
recomputation included; what is alive at each moment is counted, not computed from a formula.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise import torch_private
from shardwise.api.repeated_blocks import families_of
from shardwise.errors import ConfigError
from shardwise.plan.grouping import Child, group_blocks
from shardwise.plan.visits import Edge
from shardwise.planner.alike import AlikeRun, StandIn, alike_runs, with_skipped
from shardwise.planner.op_watch import OpCall, OpWatch
from shardwise.planner.profile import ROOT, ParamFacts, Profile, StepMark, Stretch, params_by_block
from shardwise.planner.split import TensorSplit, split_copy

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class DryRun:
    """A profile, and its operations by number, for whoever wants to time them."""

    profile: Profile
    calls: tuple[OpCall, ...]


def default_loss(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Return next-token cross entropy in fp32 for integer inputs (batch, time), else the mean of the output."""
    output: object = model(*inputs)
    found = getattr(output, "logits", output)
    logits = found if isinstance(found, torch.Tensor) else cast(torch.Tensor, torch_private.leaves_of(found)[0])
    if inputs and not inputs[0].is_floating_point() and logits.shape[:-1] == inputs[0].shape:
        return F.cross_entropy(logits.float().flatten(0, -2), inputs[0].flatten().long())
    return logits.float().mean()


def dry_run(
    model: nn.Module,
    inputs: Sequence[object],
    loss: Loss = default_loss,
    *,
    precision: str = "fp32",
    recompute: bool = False,
    split: TensorSplit | None = None,
) -> DryRun:
    """Run ``loss(model, *inputs).backward()`` on fake tensors and return what it does.

    Args:
        model: on any device, the meta device too; it is as before when this returns.
        inputs: of one microbatch of one rank; of tensors, shape and dtype count; dim 0 of the first is the batch.
        loss: called with ``model`` and the inputs.
        precision: "fp32": as the model is; "bf16": parameters are cast, as the engine does; "autocast": torch's.
        recompute: keep only the inputs of repeated blocks, as ``torch.utils.checkpoint`` does.
        split: tensor parallelism, as the first of its ranks; collectives are those that DTensor makes.

    Raises: ConfigError if parameters are sharded already.  Errors of the model pass through.
    Cost: about 0.3 ms for each operation of the model, of alike blocks only four run; nothing that grows with its sizes.
    """
    families = tuple(families_of(model, frozenset()))
    paths = [path for each in families for group in group_blocks(each, 0) for path in group]
    blocks = ("", *sorted_blocks(model, paths))
    runs = alike_runs(model, blocks)
    if split is None:
        return _run(_Question(model, inputs, loss, precision, recompute, families, blocks), runs)
    _check_whole(model)
    with split_copy(model, blocks, split) as twin:
        families = tuple(families_of(twin, frozenset()))
        return _run(_Question(twin, inputs, loss, precision, recompute, families, blocks, split.ranks), runs)


def _run(question: _Question, runs: Sequence[AlikeRun]) -> DryRun:
    if runs:
        try:
            found = question.answer(runs)
        except Exception:  # whatever it was: if the model is at fault, the run of all blocks says how
            found = None
        if found is not None:
            return found
    return cast(DryRun, question.answer(()))


@dataclass(frozen=True, slots=True)
class _Question:
    """What is to be run, and its blocks."""

    model: nn.Module
    inputs: Sequence[object]
    loss: Loss
    precision: str
    recompute: bool
    families: tuple[tuple[Child, ...], ...]
    blocks: tuple[str, ...]
    tensor: int = 1

    def answer(self, runs: Sequence[AlikeRun]) -> DryRun | None:
        """Run forward and backward without the blocks that ``runs`` skip; None if those that ran were not alike."""
        model, precision = self.model, self.precision
        if self.tensor == 1:
            _check_whole(model)
        skipped = [model.get_submodule(self.blocks[block]) for run in runs for block in run.skipped]
        idle = {id(param) for module in skipped for param in module.parameters()}
        with torch_private.fake_mode(), torch.enable_grad():
            used = [param for param in model.parameters() if id(param) not in idle]
            fakes = {id(param): _fake_parameter(param, precision) for param in used}
            buffers = {id(each): _fake(each) for each in model.buffers()}
            given = [_fake(each) if isinstance(each, torch.Tensor) else each for each in self.inputs]
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            watch = OpWatch([*map(torch_private.local_of, fakes.values()), *buffers.values(), *tensors])
            steps = _Steps(model, self.blocks, watch, precision)
            with _standing_in(model, fakes, buffers), steps.hooked(fakes, self.recompute, runs):
                autocast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
                with torch_private.watching(watch.after):
                    with autocast:
                        value = self.loss(model, *given)
                    value.backward()
                watch.end()
        params = tuple(_facts(name, param, steps.block_of[id(param)]) for name, param in model.named_parameters())
        profile = Profile(
            model=type(model).__name__,
            params=params,
            buffer_bytes=sum(each.numel() * each.element_size() for each in buffers.values()),
            input_bytes=sum(each.numel() * each.element_size() for each in tensors),
            blocks=self.blocks,
            families=self.families,
            stretches=tuple(watch.stretches),
            saved_bytes=tuple(steps.saved_bytes),
            op_names=tuple(watch.calls),
            precision=precision,
            recomputes=self.recompute,
            batch=tensors[0].shape[0] if tensors and tensors[0].ndim else 1,
            tensor=self.tensor,
        )
        whole = _with_all(profile, runs)
        return None if whole is None else DryRun(whole, tuple(watch.calls.values()))


def _with_all(profile: Profile, runs: Sequence[AlikeRun]) -> Profile | None:
    """Return the profile with what the skipped blocks of ``runs`` would have done; None if that is not known."""
    stretches, saved = profile.stretches, list(profile.saved_bytes)
    for run in runs:
        found = with_skipped(stretches, run, params_by_block(profile))
        if found is None:
            return None
        saved[ROOT] += _left_in_forward(found) - _left_in_forward(stretches)
        stretches = found
        for block in run.skipped:
            saved[block] = saved[run.kept[2]]
    return replace(profile, stretches=stretches, saved_bytes=tuple(saved))


def _left_in_forward(stretches: Sequence[Stretch]) -> int:
    end = next(place for place, each in enumerate(stretches) if each.mark == StepMark(Edge.EXIT_FORWARD))
    return stretches[end - 1].left_bytes


def sorted_blocks(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return ``paths`` in the order of the modules of ``model``."""
    wanted = set(paths)
    return [path for path, _ in model.named_modules() if path in wanted]


def _facts(name: str, param: nn.Parameter, block: int) -> ParamFacts:
    dtype, shape = str(param.dtype).removeprefix("torch."), tuple(torch_private.local_of(param).shape)
    return ParamFacts(name, shape, dtype, param.element_size(), param.is_floating_point(), param.requires_grad, block)


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


def _check_whole(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ConfigError(
                f"{name} is a DTensor: plan the model before fully_shard, shard_model or replicate is called on it"
            )


def _fake_parameter(param: nn.Parameter, precision: str) -> nn.Parameter:
    dtype = torch.bfloat16 if precision == "bf16" and param.is_floating_point() else param.dtype
    fake = _in_dtype(param, dtype)
    torch_private.give_attributes(dict(torch_private.attributes_of(param)), fake)
    return fake


def _in_dtype(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if isinstance(param, DTensor):
        local = _fake(torch_private.local_of(param), dtype)
        spec = torch_private.spec_in(torch_private.spec_of(param), dtype)
        return torch_private.parameter_from_local(local, spec, param.requires_grad)
    return nn.Parameter(_fake(param, dtype), requires_grad=param.requires_grad)


@contextmanager
def _standing_in(
    model: nn.Module, fakes: dict[int, nn.Parameter], buffers: dict[int, torch.Tensor]
) -> Generator[None, None, None]:
    """Let modules hold fakes in place of their parameters and buffers."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        for held, stand_ins in (
            (torch_private.parameters_of(module), fakes),
            (torch_private.buffers_of(module), buffers),
        ):
            tensors = cast("dict[str, Any]", held)
            before.append((tensors, dict(tensors)))
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = stand_ins.get(id(tensor), tensor)
    try:
        yield
    finally:
        for held, tensors in before:
            held.clear()
            held.update(tensors)


class _Steps:
    """Marks the edges of blocks and the arrival of gradients while a model runs.

    Attributes:
        block_of: number of the block of each parameter, by its id.
        saved_bytes: of each block.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], watch: OpWatch, precision: str) -> None:
        self._watch = watch
        self._casts = precision == "bf16"
        self._modules = [model.get_submodule(path) for path in blocks]
        self.block_of = {id(param): ROOT for param in model.parameters()}
        for number in range(len(blocks) - 1, ROOT, -1):  # a tied parameter is the first block's
            self.block_of |= {id(param): number for param in self._modules[number].parameters()}
        self._order = {id(param): number for number, param in enumerate(model.parameters())}
        self.saved_bytes = [0] * len(blocks)
        self._entered = [0] * len(blocks)
        self._stand_ins: dict[int, StandIn] = {}

    @contextmanager
    def hooked(
        self, fakes: dict[int, nn.Parameter], recompute: bool, runs: Sequence[AlikeRun]
    ) -> Generator[None, None, None]:
        """Watch the modules, which compute again in backward if ``recompute``; those that ``runs`` skip do nothing."""
        handles: list[Any] = []
        replaced: list[nn.Module] = []
        self._stand_ins = {block: each for run in runs for each in [StandIn()] for block in (*run.kept, *run.skipped)}
        skipped = {block for run in runs for block in run.skipped}
        for number, module in enumerate(self._modules):
            if number in skipped:
                module.forward = self._passing_on(number)
                replaced.append(module)
                continue
            handles.append(module.register_forward_pre_hook(self._entering(number), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leaving(number), always_call=False))
            if recompute and number != ROOT and "forward" not in vars(module):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
                replaced.append(module)
        for key, fake in fakes.items():
            if fake.requires_grad:
                handles.append(fake.register_post_accumulate_grad_hook(self._arriving(self._order[key])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in replaced:
                del module.forward

    def _entering(self, number: int) -> Callable[..., Any]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._watch.mark(StepMark(Edge.ENTER_FORWARD, number))
            self._entered[number] = self._watch.live_bytes
            if number in self._stand_ins:
                self._stand_ins[number].entered(args, kwargs)
            return torch_private.map_tensors(self._cast, (args, kwargs)) if self._casts else (args, kwargs)

        return enter

    def _passing_on(self, number: int) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            self._watch.mark(StepMark(Edge.ENTER_FORWARD, number))
            output = self._stand_ins[number].pass_on(args, kwargs)
            self._left(number, output)
            return output

        return forward

    @staticmethod
    def _cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def _leaving(self, number: int) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, output: object) -> None:
            if number in self._stand_ins:
                self._stand_ins[number].left(output)
            self.saved_bytes[number] = max(self._watch.live_bytes - self._entered[number], 0)
            self._left(number, output)

        return leave

    def _left(self, number: int, output: object) -> None:
        self._watch.mark(StepMark(Edge.EXIT_FORWARD, number))
        is_marked = False

        def enter_backward(_: torch.Tensor) -> None:
            nonlocal is_marked
            if not is_marked:
                is_marked = True
                self._watch.mark(StepMark(Edge.ENTER_BACKWARD, number))

        for each in torch_private.leaves_of(output):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(enter_backward)

    def _arriving(self, number: int) -> Callable[[torch.Tensor], None]:
        def arrive(param: torch.Tensor) -> None:
            param.grad = None  # what gradients hold from here on depends on the door: the plan adds it
            self._watch.mark(StepMark(None, self.block_at(number), number))

        return arrive

    def block_at(self, number: int) -> int:
        """Return the block of parameter ``number``."""
        return self._blocks_by_order[number]

    @functools.cached_property
    def _blocks_by_order(self) -> dict[int, int]:
        return {self._order[key]: block for key, block in self.block_of.items()}
