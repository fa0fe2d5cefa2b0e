"""A user's script with every public call: read by a type checker, never run; users may rely on the types that it names."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import (
    ActivationPolicy,
    ArgumentTypeError,
    CheckpointError,
    Choices,
    CodedTraffic,
    CompressionPolicy,
    CompressionState,
    ConfigError,
    CPUOffloadPolicy,
    DamagedCheckpointError,
    DataParallelMeshDims,
    DDPMeshInfo,
    DesyncError,
    DiskOffloadPolicy,
    FSDPMeshInfo,
    FSDPModule,
    GradientReductionHandle,
    Hardware,
    HSDPMeshInfo,
    LayoutError,
    MemoryLimit,
    Microbatches,
    MixedPrecisionPolicy,
    Mixture,
    OffloadPolicy,
    OffloadReport,
    OptimizerOffload,
    Packed,
    Plan,
    RankError,
    RejectedStep,
    ReplicateModule,
    Reproducible,
    RunDigests,
    ShardedOptimizer,
    ShardPlacementResult,
    ShardwiseError,
    Sleep,
    Span,
    StateError,
    StepError,
    StepMeter,
    Strategy,
    Trace,
    TransportError,
    UnitCompression,
    UnitRow,
    UnitTable,
    UnshardHandle,
    UsageError,
    WeightPublisher,
    WeightReader,
    Wire,
    ZeroRedundancyOptimizer,
    apply_activations,
    asleep,
    clip_grad_norm_,
    describe_units,
    elastic,
    full_state_dict,
    full_tensors,
    fully_shard,
    get_cls_to_fsdp_cls,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    init_parameters,
    notebook_launch,
    offload_report,
    plan,
    policy,
    record,
    recorded,
    register_fsdp_forward_method,
    replicate,
    set_default_transport,
    set_host_timeout,
    set_wait_report,
    shard_model,
    share_comm_ctx,
    trace,
    transaction,
    use_in,
)
from shardwise.checkpoint import Loaded, PerRank, RandomState, finish, load, save
from shardwise.checkpoint.convert import export_model
from shardwise.checkpoint.dcp import TorchDcpReader
from shardwise.elastic.run import ElasticRun
from shardwise.testing import WorkerPool, faults, prove


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def embed(self, x: Tensor) -> Tensor:
        return self.first(x)


def place(param: nn.Parameter) -> Shard | None:
    return Shard(0) if param.dim() > 1 else None


def weight_names(name: str) -> bool:
    return name.endswith("weight")


def shards() -> FSDPModule:
    mesh: DeviceMesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Net()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=offload)
    offload = DiskOffloadPolicy(folder="folder")
    sharded = fully_shard(
        model, mesh=mesh, offload_policy=offload, shard_placement_fn=place, ignored_params=set(), dp_mesh_dims=None
    )
    activations = ActivationPolicy({"blocks.0": "offload"}, keep_ops=[torch.ops.aten.mm.default], min_offload_bytes=0)
    chosen = apply_activations(model, activations)
    print(chosen["blocks.0"] == "offload")
    register_fsdp_forward_method(model, "embed")
    together: FSDPModule = shard_model(Net(), min_unit_bytes=0, mesh=mesh, reshard_after_forward=2)
    print(Strategy("hsdp").value, fully_shard(Net(), strategy=Strategy.ZERO2))
    print(shard_model(Net(), strategy="zero2"))
    init_parameters(together)
    init_parameters(together, lambda net: net.apply(print), device="cpu")
    share_comm_ctx([sharded, together])
    weights: dict[str, torch.Tensor] = full_state_dict(model, dtype=torch.bfloat16, only=weight_names, rank=0)
    weights |= dict(full_tensors(model, dtype=None, only=None))
    publisher = WeightPublisher(
        model, "publish", dtype=torch.bfloat16, anchor_every=50, only=weight_names, most_versions=9, most_bytes=2**40,
        send=print, group=None,
    )  # fmt: skip
    version: int = publisher.publish(wait=True)
    publisher.wait_for(1, version, timeout_s=1.0)
    publisher.close()
    reader = WeightReader("publish", receive=print)
    new_rows: dict[str, torch.Tensor] = reader.advance(weights, names={"qkv": ["q", "k", "v"], "a": "b"})
    pairs: list[tuple[str, torch.Tensor]] = reader.changed_tensors()
    is_mixed: bool = reader.is_mixed
    newest: int | None = reader.version
    reader.close()
    print(new_rows, pairs, is_mixed, newest)
    copied: ReplicateModule = replicate(Net(), mesh=mesh)
    several: list[FSDPModule] = fully_shard([nn.Linear(8, 8), nn.Linear(8, 8)], mesh=mesh)
    print(several, len(replicate([nn.Linear(8, 8)], mesh=mesh)), replicate([nn.Linear(8, 8)])[0].no_sync())
    with copied.no_sync():
        copied.require_backward_grad_sync = True
    copied.set_requires_gradient_sync(True)
    classes: dict[type, type] = get_cls_to_fsdp_cls()
    table: UnitTable = describe_units(model)
    rows: tuple[UnitRow, ...] = table.rows
    print(table, [(row.name, row.num_modules, row.numel, row.num_bytes, row.padding_ratio, row.route) for row in rows])
    print(len(classes), shardwise.__version__.split("."))
    print(DataParallelMeshDims(shard="dp"), FSDPMeshInfo, HSDPMeshInfo, DDPMeshInfo, ShardPlacementResult)
    set_default_transport("auto")
    set_host_timeout(5.0)
    set_wait_report(60.0, deadlock_s=20.0)
    return sharded


def configures(model: FSDPModule) -> None:
    handle: UnshardHandle | None = model.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    model.reshard()
    model.set_requires_gradient_sync(True, recurse=True)
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(True)
    model.set_modules_to_forward_prefetch([model])
    model.set_modules_to_backward_prefetch([model])
    model.set_gradient_divide_factor(2.0)
    model.set_reduce_scatter_divide_factor(2.0)
    model.set_force_sum_reduction_for_comms(False)
    model.set_unshard_in_backward(True)
    model.set_transport("gloo")
    model.set_allow_rank_divergence(True)
    with Join([model], divide_by_initial_world_size=False):
        pass
    model.set_gather_ahead_bytes(1 << 20)
    model.release_memory()
    with policy(model, sync=False):
        pass
    with use_in(fsdp):
        pass


def sends_fewer_bits(model: Net) -> int:
    coded: CompressionPolicy = CompressionPolicy(gather="int8", reduce="bf16", block=128, exact=("head",))
    sharded: FSDPModule = fully_shard(model, compression=coded, sync_module_states=True)
    state: CompressionState = sharded.compression_state()
    state.load_state_dict(state.state_dict())
    units: tuple[UnitCompression, ...] = sharded.compression_report()
    traffic: CodedTraffic = units[0].gathers
    return traffic.sent_bytes + units[0].reductions.plain_bytes


def trains(model: Net, data: Tensor) -> None:
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        loss: Tensor = model(data).sum()
        torch.autograd.backward([loss])  # torch leaves loss.backward() without types
        norm: Tensor = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(float(norm), float(optimizer.clip_grad_norm_(1.0)))
    memory = MemoryLimit("8 GiB", (4, 512), folder="/tmp", accumulate=2)
    shard_model(nn.Sequential(nn.Linear(4, 4)), memory=memory)
    shard_model(nn.Sequential(nn.Linear(4, 4)), memory="8 GiB")
    print(None if memory.plan is None else memory.plan.why(), memory.offload)
    offload = OptimizerOffload(fraction=0.6, undo=True, num_threads=2)
    offloaded = ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, offload=offload, lr=1e-3)
    OptimizerOffload(folder="/tmp")
    report: OffloadReport = offload_report(offloaded)
    print(report.num_units, report.num_early, report.num_redone, report.offloaded_bytes)
    optimizer.load_state_dict(optimizer.state_dict())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    zero.clip_grad_norm_(1.0)
    zero.step()
    zero.zero_grad()
    zero.consolidate_state_dict(to=0)
    ddp = DistributedDataParallel(model)
    print(hook_with_zero_step(None, ddp, zero), hook_with_zero_step_interleaved(None, ddp, zero, shard_buckets=True))


def undoes(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> str:
    with transaction(model, optimizer, skip=(RejectedStep, MemoryError), also=["rng"]) as step:
        if float(model(data).sum()) < 0:
            step.reject("negative")
        optimizer.step()
    cause: StepError | None = step.cause
    return (
        step.outcome
        if cause is None
        else f"{cause.rank} {cause.kind} {cause.place} {cause.text} {step.num_bytes} {step.again}"
    )


def is_reproducible(model: FSDPModule, optimizer: torch.optim.Optimizer, data: Tensor) -> Tensor:
    fixed = Reproducible(model, optimizer, num_microbatches=4, seed=1)
    losses: list[Tensor] = []
    for number in fixed.microbatches():
        losses.append(model(data[number]).sum())
    fixed.load_state_dict(fixed.state_dict())
    with RunDigests(fixed, "run", against="other") as digests, recorded("run", exact=True):
        print(digests)
    print(prove("train.py", ranks=2, args=["--small"]).notes)
    print(fixed.step, fixed.clip_grad_norm_(1.0, norm_type=2.0, error_if_nonfinite=False))
    return fixed.sum(losses)


def sleeps(model: FSDPModule, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    slept: Sleep
    with asleep(model, optimizer, to="host") as slept, asleep(model, to=Path("folder")):
        print(slept.num_bytes)
    return slept.held


def reads(dataset: torch.utils.data.Dataset[Tensor], mesh: DeviceMesh) -> int:
    data = Microbatches(
        dataset, num_microbatches=4, microbatch_size=2, seed=1, drop_last=True, mesh=mesh, num_workers=2
    )
    for batch in data.of_step(data.step):
        print(batch)
    mixture: Mixture = Mixture({"web": (dataset, 0.7), "code": (dataset, 0.3)})
    mixed = Microbatches(mixture, num_microbatches=4, microbatch_size=2, collate_fn=list)
    mixed.set_weights(10, {"web": 0.5, "code": 0.5})
    mixed.check_state(mixed.state_dict())
    mixed.load_state_dict(mixed.state_dict())
    packed = Packed([[1, 2], [3]], 2, key=None)
    packed.load_state_dict(packed.state_dict())
    windows: list[Tensor] = [window["tokens"] for window in packed]

    def stream_of(number: int) -> Packed:
        return Packed([[number], [3]], 2, key=None)

    streams = Microbatches(stream_of, num_microbatches=4, microbatch_size=2)
    print(windows, streams.num_microbatches, mixture.weights, mixture.sources)
    return len(data.batch_sampler(range(3), rank=0, num_ranks=2))


def plans(model: FSDPModule) -> str:
    wire = Wire(bytes_per_s=4e11, latency_s=1e-6)
    machine = Hardware("mine", "cuda", 80 << 30, {"fp32": 6e13, "bf16": 1e15}, 3e12, wire, wire, wire)
    halves = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    choices = Choices(strategies=("zero3",), tensor=(1, 2), tensor_plan=halves)
    found: Plan = plan(Net, (torch.empty(4, 8),), ranks=8, hardware=machine, choices=choices)
    print(found.to_json())
    with trace(model) as trail:
        pass
    seen: Trace = trail
    spans: list[Span] = seen.spans
    seen.save("trace.json")
    return f"{found.table()} {found.code()} {found.best} {seen.table()} {len(spans)}"


def saves(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = {"model": model, "optimizer": optimizer, "random": RandomState(), "loader": PerRank({"at": 3})}
    save("run", state, step=100, keep=3, wait=False)
    finish(Path("run"))
    loaded: Loaded = load("run", state, fallback=True)
    export_model("run", "exported")
    print(TorchDcpReader("a"), loaded.path, loaded.skipped)
    return loaded.step


def meters(model: nn.Module, batches: list[Tensor]) -> None:
    meter = StepMeter(model, 8.0, every=2, writers=(), peak_flops=1e12, device=torch.device("cpu"))
    for batch in meter.data(batches):
        with meter.step():
            loss = model(batch).sum()
        figures: dict[str, float | None] | None = meter.log(loss=loss, norm=1.0)
        print(figures, meter.figures(), meter.num_steps)


def outlives(batches: list[Tensor]) -> int:
    def build() -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.AdamW(model.parameters())

    def step(run: ElasticRun, model: Net, optimizer: torch.optim.Optimizer) -> float:
        loss = model(batches[run.number]).sum()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.1:
            run.stop()
        return loss.item()

    def log(run: ElasticRun, loss: float) -> None:
        print(run.number, loss)

    run = elastic(
        build, step, num_steps=len(batches), num_microbatches=12, on_commit=log, after=lambda run: None, folder="run"
    )
    seconds: list[float] = [each.seconds["groups"] for each in run.recoveries]
    print(run.num_bytes, seconds, run.state)
    return run.number


def launches() -> int:
    found: int = notebook_launch(saves, 2, Net(), None)
    return found


def fails() -> None:
    kinds: tuple[type[ShardwiseError], ...] = (
        CheckpointError, ConfigError, DamagedCheckpointError, DesyncError, LayoutError, StateError, TransportError,
        ArgumentTypeError, UsageError, RankError,
    )  # fmt: skip
    try:
        with record("run/black_box"), faults.kill_at("backward", rank=1, step=3):
            print(GradientReductionHandle)
    except kinds as error:
        print(str(error))
    with WorkerPool(2) as pool:
        pool.run(fails, num_ranks=2)
