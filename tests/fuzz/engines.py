"""The engine's APIs, ours and torch's own: the same calls on ``fully_shard``, ``shard_model`` or ``replicate``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

import shardwise
from fuzz import peers
from fuzz.case import Contender, Own
from fuzz.from_meta import give_values
from fuzz.initial_values import convert
from fuzz.most_alive import Watch
from fuzz.optims import OPTIMIZERS, is_wide
from fuzz.phases import Play, Seat
from fuzz.record import Record
from fuzz.sides import Side
from fuzz.zoo import Mlp, Stack
from shardwise.checkpoint import finish, load, save
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.roots import live_engine

Meshes = dict[tuple[int, str], DeviceMesh]


@dataclass(frozen=True, slots=True)
class Maker:
    """How an API cuts a model.

    Attributes:
        shard: takes the modules of a unit and the arguments.  is_whole_model: called on the root alone.
    """

    shard: Callable[..., Any]
    mixed_precision: Callable[..., Any]
    cpu_offload: Callable[[], Any]
    is_whole_model: bool = False
    reshards: bool = True
    is_ours: bool = True


def _ours(api: str) -> Callable[..., Any]:
    def shard(modules: Any, **arguments: Any) -> None:
        getattr(shardwise, api)(modules, **arguments)

    return shard


def _older_replicate(modules: Any, **arguments: Any) -> None:
    shardwise.replicate(modules, device_ids=None, broadcast_buffers=arguments["sync_buffers"])


MAKERS: dict[str, Maker] = {
    "fully_shard": Maker(_ours("fully_shard"), shardwise.MixedPrecisionPolicy, shardwise.CPUOffloadPolicy),
    "shard_model": Maker(_ours("shard_model"), shardwise.MixedPrecisionPolicy, shardwise.CPUOffloadPolicy, True),
    "replicate": Maker(_ours("replicate"), shardwise.MixedPrecisionPolicy, shardwise.CPUOffloadPolicy, reshards=False),
    "replicate_older": Maker(
        _older_replicate, shardwise.MixedPrecisionPolicy, shardwise.CPUOffloadPolicy, reshards=False
    ),
    "within_replicate": Maker(_ours("fully_shard"), shardwise.MixedPrecisionPolicy, shardwise.CPUOffloadPolicy),
    "torch_fully_shard": Maker(peers.fully_shard, peers.mixed_precision, peers.cpu_offload, is_ours=False),
}
_OTHERS = {"fully_shard": "replicate", "replicate": "fully_shard"}


def mesh_of(meshes: Meshes, num_ranks: int, kind: str, device: str) -> DeviceMesh | None:
    """Return the mesh that settings name; made once, for groups are not given back."""
    if kind == "flat":
        return None
    if (num_ranks, kind) not in meshes:
        names = ("replica", "shard") if kind == "hybrid" else ("data", "heads")
        meshes[num_ranks, kind] = init_device_mesh(device, (num_ranks // 2, 2), mesh_dim_names=names)
    return meshes[num_ranks, kind]


class EngineSide(Side):
    """A rank of an engine's API.

    Attributes:
        watch: counts full parameters, behind APIs that shard.
    """

    def __init__(self, play: Play, seat: Seat, contender: Contender, meshes: Meshes, device: str = "cpu") -> None:
        super().__init__(play, seat, device)
        self.contender = contender
        self._maker = MAKERS[contender.api]
        self._meshes = meshes
        is_on_meta = bool(self.settings.meta) and self._maker.is_ours
        with torch.device("meta") if is_on_meta else nullcontext():
            model = (
                convert(play.make(), self.dtype) if is_on_meta and play.make is not None else self.begin(play.build())
            )
        self.model = self.net = self._sharded(self.hooked(model if is_on_meta else model.to(device)))
        if is_on_meta:
            give_values(model, play)
        if contender.api in ("fully_shard", "shard_model"):
            cast(Any, self.model).set_transport(contender.transport)
        shards = self.settings.mesh != "tensor" and seat.num_ranks > 1  # else full parameters may be DTensors too
        # On an accelerator units are padded for its kernels: more is planned than modules have registered.
        shards &= contender.api != "within_replicate"  # whose own parameters stay full, too
        shards &= not any(own.other_api for own in self.settings.own)  # replicas stay full
        self._is_counted = self._maker.is_ours and self._maker.reshards and shards and device == "cpu"
        self.watch = Watch(self.net, self.ignored, self._most_units()) if self._is_counted else None
        # Of parameters that stay what they are every rank's own gradients show until they are averaged, as under DDP.
        self._shows_unsynced = contender.api == "replicate_older"
        if not self._maker.is_ours:
            self.mark(self.net)  # torch's own class loses attributes
        self.remake_optimizer()

    def _sharded(self, model: nn.Module) -> nn.Module:
        mesh = mesh_of(self._meshes, self.seat.num_ranks, self.settings.mesh, self.device)
        if mesh is not None and self.settings.mesh == "tensor":
            plan = {
                f"{path}.{name}".removeprefix("."): how
                for path, module in model.named_modules()
                if isinstance(module, Mlp)
                for name, how in (("up", "columns"), ("down", "rows"))
            }
            peers.tensor_parallel(model, mesh["heads"], plan)
            mesh = mesh["data"]
        units = (("",),) if self._maker.is_whole_model else self.play.units
        for number, paths in enumerate(units):
            if self.contender.api == "within_replicate" and "" in paths:
                continue
            modules = [model.get_submodule(path) for path in paths]
            own = self._own(number)
            maker = MAKERS[_OTHERS.get(self.contender.api, self.contender.api)] if own.other_api else self._maker
            arguments = self._arguments(maker, mesh, own, paths)
            maker.shard(modules if len(modules) > 1 else modules[0], **arguments)
            if self.settings.compiled and self._maker.is_ours:
                self._compile(modules)
        if self.contender.api == "within_replicate":
            peers.replicate(model)
        return model

    def _compile(self, modules: list[nn.Module]) -> None:
        torch.compiler.reset()  # the same few classes in case after case would reach the limit of recompilations
        for module in modules:
            if isinstance(module, Mlp):
                module.compile(backend=self.settings.compiled, fullgraph=True)

    def _most_units(self) -> int | None:
        """Return how many units may be full at once: the root, those of one segment, and two that are gathered ahead."""
        if not self.settings.bounded or not isinstance(self.net, Stack):
            return None
        return 3 + max(len(numbers) for numbers, _ in self.net.segments)

    def _own(self, number: int) -> Own:
        return self.settings.own[number % len(self.settings.own)] if self.settings.own else Own()

    def _arguments(self, maker: Maker, mesh: DeviceMesh | None, own: Own, paths: tuple[str, ...]) -> dict[str, Any]:
        settings, found = self.settings, dict[str, Any]()
        if mesh is not None and not (own.flat or own.other_api):
            found["mesh"] = mesh
        reshard = settings.reshard if own.reshard is None else own.reshard
        if reshard is not None and maker.reshards:
            found["reshard_after_forward"] = reshard
        is_root = "" in paths
        if settings.compute or settings.reduce or (settings.output and is_root):
            found["mp_policy"] = maker.mixed_precision(
                param_dtype=peers.dtype_of(settings.compute),
                reduce_dtype=peers.dtype_of(settings.reduce),
                output_dtype=peers.dtype_of(settings.output if is_root else ""),  # others' go on into plain modules
            )
        elif any(each.half for each in settings.own):  # then each takes what comes and hands out the same dtype
            compute = "bfloat16" if own.half and self._is_alone(paths) else settings.dtype
            found["mp_policy"] = maker.mixed_precision(
                param_dtype=peers.dtype_of(compute), output_dtype=peers.dtype_of(settings.dtype)
            )
        if settings.columns and maker.reshards:
            found["shard_placement_fn"] = lambda param: Shard(1) if param.dim() > 1 else None
        if settings.apart == "synced" and maker.is_ours:
            found["sync_module_states"] = True
        if self.ignored:
            found["ignored_params"] = {self.net.get_parameter(name) for name in self.ignored}
        if settings.offload:
            found["offload_policy"] = maker.cpu_offload()
        if self.contender.api == "replicate_older":
            found["sync_buffers"] = settings.sync_buffers
        if self._maker.is_whole_model:
            found["min_unit_bytes"] = 0 if self.play.seed % 2 else 400
        return found

    def _is_alone(self, paths: tuple[str, ...]) -> bool:
        """True for a unit of one module that has no other unit within it."""
        below = paths[0] + "." if paths[0] else ""
        inner = [path for others in self.play.units for path in others if path.startswith(below) and path not in paths]
        return len(paths) == 1 and not inner

    def make_optimizer(self) -> Optimizer:
        if not self.contender.update:
            return super().make_optimizer()
        optim = self.settings.optim
        kind = OPTIMIZERS[optim.name]
        named = dict(self.stepped())
        wide = [name for name, param in named.items() if is_wide(param, optim)]
        groups = [{"names": wide}, {"names": "*", **kind.bias}] if optim.groups else []
        groups = groups if 0 < len(wide) < len(named) else groups[not wide :][:1]
        options = dict(kind.options)
        if self.contender.update == "offloaded":
            fraction = (1.0, 0.6)[self.play.seed % 2]
            options["offload"] = shardwise.OptimizerOffload(fraction, undo=self.play.seed % 4 < 3)
        if kind.is_block_wise:
            options["update"] = "whole_matrix" if self.play.seed % 2 else "elementwise"
        return shardwise.ShardedOptimizer(named, kind.make, groups=groups, flat=self.play.seed % 3 > 0, **options)

    def as_group(self, named: dict[str, nn.Parameter]) -> Any:
        return named if isinstance(self.optimizer, shardwise.ShardedOptimizer) else super().as_group(named)

    def clip_norm(self, params: list[nn.Parameter], bound: float, norm_type: float) -> torch.Tensor:
        if self.contender.update and isinstance(self.optimizer, shardwise.ShardedOptimizer):
            return self.optimizer.clip_grad_norm_(bound, norm_type)
        if self._maker.is_ours and (self.play.seed % 2 or norm_type != 2.0 or self.settings.own):
            return shardwise.clip_grad_norm_(params, bound, norm_type)
        return super().clip_norm(params, bound, norm_type)

    def hook_reductions(self, path: str, factor: float, streamed: bool) -> None:
        super().hook_reductions(path, factor, streamed and self._maker.is_ours)  # torch's own asks for an accelerator

    def round_trip(self, buffers: str) -> None:
        if not self._maker.is_ours:
            return
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        try:
            state = {"model": self.net, "optimizer": self.optimizer}
            save(folder[0], state, step=1, buffers=cast(Any, buffers or None))
            load(folder[0], state)
        finally:
            finish(folder[0])
            shutil.rmtree(folder[0], ignore_errors=True)

    def gather_ahead(self, num_bytes: int) -> None:
        if self._maker.is_ours and self._maker.reshards:
            cast(Any, self.model).set_gather_ahead_bytes(num_bytes)

    def adopt(self, model: nn.Module) -> None:
        super().adopt(model)
        if self._is_counted:
            self.watch = Watch(model, self.ignored, self._most_units())

    def registered(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        # While a unit is unsharded others are registered than those that the optimizer steps, which have the gradients.
        stepped = {name: param for param, name in self.names_in_optimizer().items()}
        found: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, param in self.net.named_parameters():
            found[name] = (param, cast(nn.Parameter, stepped.get(name, param)))
        return found

    def record(self, moment: str | tuple[str, torch.Tensor]) -> Record:
        if self.watch is not None:
            self.watch.listen()
        if self._shows_unsynced:
            attachment = attachment_of(self.model)
            units = live_engine(attachment).units if attachment is not None else []
            self.hidden = frozenset({"grad"}) if any(unit.earlier.unsynced for unit in units) else frozenset()
        if self.settings.meta == "reset" and self._maker.is_ours:
            # The first forward refuses values that every rank has drawn by itself.
            attachment = attachment_of(self.model)
            self.hidden = frozenset({"param", "kept"} if attachment is not None and attachment.is_root is None else ())
        return super().record(moment)

    def notes(self) -> list[str]:
        """Return what was found beside numbers."""
        return self.watch.findings() if self.watch is not None else []
