"""One forward and backward of a model without memory and without arithmetic, recorded as a profile.

Tensors are fake: they have shapes, dtypes and storages of a size, so autograd saves and frees what it would save and
free, recomputation included.  The live bytes at each moment are counted, not computed from a formula.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardwise import torch_private
from shardwise.errors import ConfigError
from shardwise.fsdp.shard_model import families_of
from shardwise.plan.grouping import Child, group_blocks
from shardwise.plan.schedule import StepEvent
from shardwise.planner.profile import ROOT, ParamFacts, Profile, StepMark, Stretch, Work, params_by_block

# ---- Alike blocks: a dry run runs a few of them and copies what they did for the others. Of a run of alike blocks the
# first three and the last one run. The second and the third must have done the same, to the byte and to the operation,
# relative to what they found; then the others would repeat it.

_FIRST = 3  # blocks that run: the second and the third have alike neighbours
_HELD = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class AlikeRun:
    """Consecutive alike blocks, by number: ``kept`` ones run, the first and the last; ``skipped`` come before the last."""

    kept: tuple[int, int, int, int]
    skipped: tuple[int, ...]


def alike_runs(model: nn.Module, blocks: Sequence[str]) -> tuple[AlikeRun, ...]:
    """Return the runs of five and more neighbours among ``blocks`` (paths, the root's first) that are alike.

    Alike blocks have one class, structure and settings, in all of their parts, and share no parameter with other
    modules.
    """
    users: dict[int, set[int]] = {}
    modules = [model.get_submodule(path) for path in blocks]
    for number, module in enumerate(modules[1:], 1):
        for param in module.parameters():
            users.setdefault(id(param), set()).add(number)
    inside = {id(part) for module in modules[1:] for part in module.modules()}
    for part in model.modules():
        if id(part) not in inside:
            for param in part.parameters(recurse=False):
                users.setdefault(id(param), set()).add(0)
    found: list[list[int]] = []
    for number, module in enumerate(modules[1:], 1):
        is_own = all(len(users[id(param)]) == 1 for param in module.parameters()) and "forward" not in vars(module)
        last = found[-1] if found else []
        is_next = bool(last) and blocks[last[0]].rpartition(".")[0] == blocks[number].rpartition(".")[0]
        if is_own and is_next and are_alike(modules[last[0]], module):
            last.append(number)
        else:
            found.append([number] if is_own else [])
    return tuple(
        AlikeRun((run[0], run[1], run[2], run[-1]), tuple(run[_FIRST:-1])) for run in found if len(run) > _FIRST + 1
    )


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return True if the contents of both modules are equal except for the values of tensors."""
    if type(one) is not type(other) or _ties(one) != _ties(other):
        return False
    pairs = list(zip(one.modules(), other.modules(), strict=False))
    return all(_held_alike(left, right) for left, right in pairs)


def _ties(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the names of parts and parameters, each with the index of its first occurrence."""
    places: dict[int, int] = {}
    named = [*module.named_modules(remove_duplicate=False), *module.named_parameters(remove_duplicate=False)]
    return tuple((name, places.setdefault(id(each), len(places))) for name, each in named)


def _held_alike(one: nn.Module, other: nn.Module) -> bool:
    if one is other:
        return True
    mine, theirs = vars(one), vars(other)
    if type(one) is not type(other) or mine.keys() != theirs.keys():
        return False
    tensors = (torch_private.parameters_of, torch_private.buffers_of)
    return all(_are_same(dict(held(one)), dict(held(other))) for held in tensors) and all(
        _are_same(value, theirs[name]) for name, value in mine.items() if name not in _HELD
    )


def _are_same(one: object, other: object) -> bool:
    """Return True if code cannot distinguish the values; False if unknown."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return spec_of(one) == spec_of(cast(torch.Tensor, other))
    if isinstance(one, (bool, int, float, complex, str, bytes, frozenset, set, torch.dtype, torch.device)):
        return one == other
    if isinstance(one, (list, tuple)):
        values, others = cast("Sequence[object]", one), cast("Sequence[object]", other)
        return len(values) == len(others) and all(map(_are_same, values, others))
    if isinstance(one, Mapping):
        left, right = cast("Mapping[object, object]", one), cast("Mapping[object, object]", other)
        return list(left) == list(right) and all(_are_same(left[key], right[key]) for key in left)
    if isinstance(one, functools.partial):
        same = cast("functools.partial[object]", other)
        return one.func is same.func and _are_same((one.args, one.keywords), (same.args, same.keywords))
    return False


def spec_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what distinguishes tensors without values."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type, tensor.requires_grad


class Unlike(Exception):
    """A block was not called like those before it: the dry run has to run all blocks."""


class StandIn:
    """Passes on the input of a skipped block, whose output would have the form of its input.

    There is one for each run: it gets the calls of blocks that run, and answers those of blocks that do not.
    """

    def __init__(self) -> None:
        self._given: object = None
        self._output: object = None

    def entered(self, args: object, kwargs: object) -> None:
        """Record the arguments of a block that runs."""
        self._given = torch_private.map_tensors(_Spec, (args, kwargs))

    def left(self, output: object) -> None:
        """Record its output."""
        self._output = torch_private.map_tensors(_Spec, output)

    def pass_on(self, args: object, kwargs: object) -> object:
        """Return what the block would return, as another view of its first tensor.  Raises: Unlike."""
        given = (args, kwargs)
        tensors = [each for each in torch_private.leaves_of(given) if isinstance(each, torch.Tensor)]
        made = [each for each in torch_private.leaves_of(self._output) if isinstance(each, _Spec)]
        if torch_private.map_tensors(_Spec, given) != self._given or not tensors or made != [_Spec(tensors[0])]:
            raise Unlike
        return torch_private.map_of_kind(_Spec, lambda _: tensors[0].view_as(tensors[0]), self._output)


class _Spec:
    """A tensor in a tree of arguments."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.spec = spec_of(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self.spec == other.spec

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def with_skipped(
    stretches: Sequence[Stretch], run: AlikeRun, params: Sequence[Sequence[int]]
) -> tuple[Stretch, ...] | None:
    """Return the stretches with those of the skipped blocks of ``run``; None if blocks that ran did not do the same.

    Args:
        stretches: of a dry run without the skipped blocks.
        params: for each block, the numbers of its parameters.
    """
    without = _without(stretches, frozenset(run.skipped))
    return None if without is None else _with_copies(without, run, params)


def _without(stretches: Sequence[Stretch], skipped: frozenset[int]) -> list[Stretch] | None:
    """Return the stretches without those of ``skipped`` blocks; None if anything happened in these."""
    kept: list[Stretch] = []
    for each in stretches:
        if each.mark.block not in skipped:
            kept.append(each)
        elif each.work.num_ops or {each.peak_bytes, each.left_bytes} != {kept[-1].left_bytes}:
            return None
    return kept


def _with_copies(
    stretches: Sequence[Stretch], run: AlikeRun, params: Sequence[Sequence[int]]
) -> tuple[Stretch, ...] | None:
    places = [{param: place for place, param in enumerate(params[block])} for block in run.kept]
    forward = _neighbours(stretches, StepEvent.PRE_FORWARD, list(zip(run.kept[1:], places[1:], strict=True)))
    if forward is None or stretches[forward.end].work != stretches[forward.second].work:
        return None
    backward = _neighbours(stretches, StepEvent.PRE_BACKWARD, list(zip(run.kept[2::-1], places[2::-1], strict=True)))
    grown = forward.growth
    if backward is None:
        has_backward = any(
            StepMark(StepEvent.PRE_BACKWARD, block) in [each.mark for each in stretches] for block in run.kept
        )
        if has_backward or grown:
            return None
        again = stretches[forward.second : forward.end]
        copies = [each for block in run.skipped for each in _copied(again, block, params[block], places[2], 0)]
        return (*stretches[: forward.end], *copies, *stretches[forward.end :])
    if backward.growth != -grown or backward.first < forward.end:
        return None
    numbered = list(enumerate(run.skipped, 1))
    again = stretches[forward.second : forward.end]
    there = [e for place, b in numbered for e in _copied(again, b, params[b], places[2], place * grown)]
    again = stretches[backward.first : backward.second]
    back = [e for place, b in reversed(numbered) for e in _copied(again, b, params[b], places[2], place * grown)]
    between = [_shifted(each, len(run.skipped) * grown) for each in stretches[forward.end : backward.first]]
    return (*stretches[: forward.end], *there, *between, *back, *stretches[backward.first :])


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Indices of the begins of two consecutive blocks that did the same, and of the end of the second.

    ``growth``: of the remaining bytes, from one to the next.
    """

    first: int
    second: int
    end: int
    growth: int


def _neighbours(
    stretches: Sequence[Stretch], event: StepEvent, blocks: Sequence[tuple[int, Mapping[int, int]]]
) -> _Neighbours | None:
    """Return where three blocks reach ``event``, if the first two do the same from there to the next.

    ``blocks``: their numbers, and the index of each of their parameters in its block.
    """
    found = [[n for n, each in enumerate(stretches) if each.mark == StepMark(event, block)] for block, _ in blocks]
    if any(len(each) != 1 for each in found):
        return None
    first, second, end = (each[0] for each in found)
    if not 0 < first < second < end:
        return None
    before, between = stretches[first - 1].left_bytes, stretches[second - 1].left_bytes
    one = _beside(stretches[first:second], before, *blocks[0])
    if one is None or one != _beside(stretches[second:end], between, *blocks[1]):
        return None
    return _Neighbours(first, second, end, stretches[end - 1].left_bytes - between)


def _beside(stretches: Sequence[Stretch], base: int, block: int, places: Mapping[int, int]) -> list[object] | None:
    """Return what ``block`` did relative to ``base`` bytes; None if another block passed a mark meanwhile."""
    if any(
        each.mark.block != block or (each.mark.event is None and each.mark.param not in places) for each in stretches
    ):
        return None
    return [
        (each.mark.event, places.get(each.mark.param), each.peak_bytes - base, each.left_bytes - base, each.work)
        for each in stretches
    ]


def _copied(
    stretches: Sequence[Stretch], block: int, params: Sequence[int], places: Mapping[int, int], num_bytes: int
) -> list[Stretch]:
    """Return ``stretches`` as those of ``block``, whose parameters are ``params``, with ``num_bytes`` more alive."""
    return [
        replace(
            _shifted(each, num_bytes),
            mark=StepMark(
                each.mark.event, block, -1 if each.mark.event is not None else params[places[each.mark.param]]
            ),
        )
        for each in stretches
    ]


def _shifted(stretch: Stretch, num_bytes: int) -> Stretch:
    peak, left = stretch.peak_bytes + num_bytes, stretch.left_bytes + num_bytes
    return replace(stretch, peak_bytes=peak, left_bytes=left)


# ---- Tensor parallelism in a dry run: a copy of the model without memory, split by ``parallelize_module``.


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """The split of a model's blocks.

    Attributes:
        ranks: that share one block.
        plan: the argument of ``parallelize_module`` for a block: paths in it, and how each module there is split.
    """

    ranks: int
    plan: Mapping[str, ParallelStyle]


@contextmanager
def split_copy(model: nn.Module, blocks: Sequence[str], split: TensorSplit) -> Generator[nn.Module, None, None]:
    """Yield a copy of ``model`` on the meta device whose ``blocks`` are split, as the first of ``split.ranks`` ranks has it.

    Existing process groups stay as they are.  Raises: ConfigError if the plan does not match the blocks.
    """
    twins: dict[int, object] = {}
    for each in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        is_param = isinstance(each, nn.Parameter)
        twins[id(each)] = nn.Parameter(empty, requires_grad=each.requires_grad) if is_param else empty
    twin = copy.deepcopy(model, twins)
    with torch_private.fake_world(split.ranks):
        mesh = init_device_mesh("cpu", (split.ranks,), mesh_dim_names=("tp",))
        for path in blocks[1:]:
            block = twin.get_submodule(path)
            parts = dict(block.named_modules())
            missing = [name for name in split.plan if "*" not in name and name not in parts]
            if missing:
                raise ConfigError(
                    f"tensor_plan names {', '.join(missing)}, which {path} ({type(block).__name__}) has not; name its modules, "
                    "such as {'mlp.up': ColwiseParallel(), 'mlp.down': RowwiseParallel()}"
                )
            parallelize_module(block, mesh, dict(split.plan), src_data_rank=None)
        yield twin


# ---- A watch of what operations of a dry run allocate, free and compute, where torch dispatches them.

# Collectives of DTensor: number of rings over the bytes of the result, or of the input if that is larger.
_RINGS = {
    "all_reduce": 2,
    "all_reduce_": 2,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Replaces a tensor in the arguments of an operation that is to be repeated."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operation and its arguments, tensors as :class:`TensorSpec`."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


class OpWatch:
    """Counts the live bytes that operations have allocated, and their work, from mark to mark.

    Attributes:
        stretches: those that have ended.
        live_bytes: now.
        calls: distinct operations by name and shapes, numbered in this order.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        """``given``: tensors whose memory does not count."""
        self.stretches: list[Stretch] = []
        self.live_bytes = 0
        self.calls: dict[str, OpCall] = {}
        self._numbers: dict[str, int] = {}
        self._mark: StepMark | None = None
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in given:
            self._follow(tensor.untyped_storage(), 0)
        self._restart()

    def mark(self, mark: StepMark) -> None:
        """End the current stretch and begin that of ``mark``."""
        self.end()
        self._mark = mark
        self._restart()

    def end(self) -> None:
        """End the current stretch."""
        if self._mark is not None:
            ops = tuple(sorted(self._ops.items()))
            num_ops = sum(count for _, count in ops) + self._rings
            work = Work(self._flops, self._traffic, num_ops, ops, self._ring_bytes, self._rings)
            self.stretches.append(Stretch(self._mark, self._peak, self.live_bytes, work))
            self._mark = None

    def _restart(self) -> None:
        self._peak = self.live_bytes
        self._flops = self._traffic = self._ring_bytes = 0.0
        self._rings = 0
        self._ops: dict[int, int] = {}

    def after(self, func: Any, given: tuple[Any, Any], out: object) -> None:
        """Record an operation that has just run."""
        if func.namespace == "prim":
            return
        inputs = [each for each in torch_private.leaves_of(given) if isinstance(each, torch.Tensor)]
        outputs = [each for each in torch_private.leaves_of(out) if isinstance(each, torch.Tensor)]
        made = 0
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if id(storage) not in self._storages:
                self._follow(storage, storage.nbytes())
                made += 1
        self._peak = max(self._peak, self.live_bytes)
        if func.namespace == "_c10d_functional":
            rings = _RINGS.get(func._overloadpacket.__name__, 0)
            self._rings += rings
            self._ring_bytes += rings * max(t.numel() * t.element_size() for t in [*inputs, *outputs])
        elif made or torch_private.is_mutating(func):
            self._count(func, given, [*inputs, *outputs], out)

    def _follow(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = id(storage)  # a storage keeps its Python object alive as long as it lives

        def forget(_: object) -> None:
            del self._storages[key]
            self.live_bytes -= num_bytes

        self._storages[key] = weakref.ref(storage, forget)
        self.live_bytes += num_bytes

    def _count(self, func: Any, given: tuple[Any, Any], tensors: Sequence[torch.Tensor], out: object) -> None:
        args, kwargs = given
        name = f"{func}({', '.join([_shape_of(each) for each in torch_private.leaves_of(given)])})"
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            specs = torch_private.map_tensors(_spec_of, given)
            self.calls[name] = OpCall(func, specs[0], specs[1])
        self._ops[number] = self._ops.get(number, 0) + 1
        flops = flops_of(func, args, kwargs, out)
        if flops:
            self._flops += flops
        else:
            self._traffic += sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _shape_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        dense = "" if value.is_contiguous() else str(list(value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{dense}"
    return str(value)


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: object) -> float:
    """Return the floating-point operations of matrix products and attention; 0 for anything else."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    name = packet.__name__
    if name == _ATTENTION:
        is_causal = bool(args[4]) if len(args) > 4 else bool(kwargs.get("is_causal", False))
        return (0.5 if is_causal else 1.0) * sdpa_flop_count(*_with_all_heads(args[:3]))
    if name == f"{_ATTENTION}_backward":
        is_causal = bool(args[7]) if len(args) > 7 else bool(kwargs.get("is_causal", False))
        return (0.5 if is_causal else 1.0) * sdpa_backward_flop_count(tuple(args[0].shape), *_with_all_heads(args[1:4]))
    return 0.0


def _with_all_heads(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of query, key and value as if no heads shared a key: torch 2.11 counts no others."""
    query, *others = [tuple(each.shape) for each in tensors]
    return [query, *[(shape[0], query[1], *shape[2:]) for shape in others]]


def numel_of(spec: TensorSpec) -> int:
    """Return the number of elements that memory under ``spec`` must have."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))


def num_bytes_of(spec: TensorSpec) -> int:
    """Return the bytes of the elements of ``spec``."""
    return math.prod(spec.shape) * spec.dtype.itemsize


Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class DryRun:
    """A profile, and its operations by number, so that they can be timed."""

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
        model: on any device, including meta; it is unchanged when this returns.
        inputs: of one microbatch of one rank; only shape and dtype of tensors matter; dim 0 of the first is the batch.
        loss: called with ``model`` and the inputs.
        precision: "fp32": the model unchanged; "bf16": parameters are cast, as the engine does; "autocast": torch's.
        recompute: save only the inputs of repeated blocks, as ``torch.utils.checkpoint`` does.
        split: tensor parallelism, as on the first of its ranks, with the collectives of DTensor.

    Raises: ConfigError if parameters are sharded already.  Errors of the model pass through. Cost: about 0.3 ms per
    operation of the model (of alike blocks only four run), independent of its sizes.
    """
    families = tuple(families_of(model, frozenset()))
    paths = {path for each in families for group in group_blocks(each, 0) for path in group}
    blocks = ("", *[path for path, _ in model.named_modules() if path in paths])
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
        except Exception:  # if the model itself is at fault, the run of all blocks raises
            found = None
        if found is not None:
            return found
    return cast(DryRun, question.answer(()))


@dataclass(frozen=True, slots=True)
class _Question:
    """What to run, and its blocks."""

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
    """Return the profile with what the skipped blocks of ``runs`` would have done; None if that is unknown."""
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
    end = next(place for place, each in enumerate(stretches) if each.mark == StepMark(StepEvent.POST_FORWARD))
    return stretches[end - 1].left_bytes


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
    """Replace the parameters and buffers of modules by fakes inside the context."""
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
    """Marks the events of blocks and the arrival of gradients while a model runs.

    Attributes:
        block_of: number of the block of each parameter, by its id.
        saved_bytes: of each block.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], watch: OpWatch, precision: str) -> None:
        self._watch = watch
        self._casts = precision == "bf16"
        self._modules = [model.get_submodule(path) for path in blocks]
        self.block_of = {id(param): ROOT for param in model.parameters()}
        for number in range(len(blocks) - 1, ROOT, -1):  # a tied parameter belongs to the first block
            self.block_of |= {id(param): number for param in self._modules[number].parameters()}
        self._order = {id(param): number for number, param in enumerate(model.parameters())}
        self.saved_bytes = [0] * len(blocks)
        self._entered = [0] * len(blocks)
        self._stand_ins: dict[int, StandIn] = {}

    @contextmanager
    def hooked(
        self, fakes: dict[int, nn.Parameter], recompute: bool, runs: Sequence[AlikeRun]
    ) -> Generator[None, None, None]:
        """Hook the modules, which recompute in backward if ``recompute``; modules that ``runs`` skip do nothing."""
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
                handles.append(
                    fake.register_post_accumulate_grad_hook(self._arriving(self._order[key], self.block_of[key]))
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in replaced:
                del module.forward

    def _entering(self, number: int) -> Callable[..., Any]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._watch.mark(StepMark(StepEvent.PRE_FORWARD, number))
            self._entered[number] = self._watch.live_bytes
            if number in self._stand_ins:
                self._stand_ins[number].entered(args, kwargs)
            return torch_private.map_tensors(self._cast, (args, kwargs)) if self._casts else (args, kwargs)

        return enter

    def _passing_on(self, number: int) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            self._watch.mark(StepMark(StepEvent.PRE_FORWARD, number))
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
        self._watch.mark(StepMark(StepEvent.POST_FORWARD, number))
        is_marked = False

        def enter_backward(_: torch.Tensor) -> None:
            nonlocal is_marked
            if not is_marked:
                is_marked = True
                self._watch.mark(StepMark(StepEvent.PRE_BACKWARD, number))

        for each in torch_private.leaves_of(output):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(enter_backward)

    def _arriving(self, number: int, block: int) -> Callable[[torch.Tensor], None]:
        def arrive(param: torch.Tensor) -> None:
            param.grad = None  # the memory of gradients from here on depends on the API: the plan adds it
            self._watch.mark(StepMark(None, block, number))

        return arrive
