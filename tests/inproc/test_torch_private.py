"""Every private torch name that the package relies on does what the package thinks it does."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import runpy
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.one_process import alone, standing_for
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _random, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

from shardwise import torch_private as private
from shardwise.collectives import c10d
from shardwise.fsdp.full_buffer import ReportedStorage
from shardwise.fsdp.hooks import dynamo_disabled


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    with standing_for(0, 4):
        yield


MOST_ENTRIES = 80  # it only falls


def test_every_entry_has_a_reason_a_test_and_a_row_on_the_page() -> None:
    listed = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "list_private_names.py"))
    names, tests = [*listed["entries"]()], Path(__file__).read_text()
    assert not [name for name in names if f"private.{name}" not in tests]
    assert len(names) <= MOST_ENTRIES, "take a public way"
    assert listed["PAGE"].read_text() == listed["page"](), "run: python docs/list_private_names.py"


def test_swapped_storages_exchange_bytes_under_their_tensors() -> None:
    swap = private.swap_storage
    left, right = torch.zeros(4), torch.ones(8)
    empty = torch.empty(0, dtype=torch.uint8).untyped_storage()
    swap(empty, right.untyped_storage())
    assert (empty.nbytes(), right.untyped_storage().nbytes()) == (32, 0)
    swap(empty, right.untyped_storage())
    assert right.tolist() == [1.0] * 8
    swap(left.untyped_storage(), torch.full((4,), 2.0).untyped_storage())
    assert left.tolist() == [2.0] * 4
    # Memory is freed once, with the storage that has it last.
    empty, large = torch.empty(0), torch.ones(1 << 20)
    swap(empty.untyped_storage(), large.untyped_storage())
    del large
    assert empty.untyped_storage().nbytes() == 4 << 20
    empty.untyped_storage().resize_(0)


def test_a_region_under_a_checkpoint_is_called_again_in_backward() -> None:
    calls: list[float] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.item())
        return x.exp().exp()

    x = torch.tensor(0.5, requires_grad=True)
    with private.checkpoint_region(forward, noop_context_fn, (x,)):
        y = forward(x)
    y.backward()
    assert calls == [0.5, 0.5]
    plain = x.detach().requires_grad_()
    forward(plain).backward()
    assert torch.equal(x.grad, plain.grad)  # pyright: ignore[reportArgumentType]


def test_the_last_pre_hook_of_a_module_and_a_compiled_module_are_known() -> None:
    module, hook = nn.Linear(1, 1), _nothing
    module.register_forward_pre_hook(functools.partial(hook))
    module.register_forward_pre_hook(lambda *_: None, prepend=True)
    assert private.is_last_pre_hook(module, hook)
    module.register_forward_pre_hook(lambda *_: None)
    assert not private.is_last_pre_hook(module, hook)
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert private.is_compiled_in_place(module)


def _nothing(*_: object) -> None:
    return None


def test_weights_that_lstms_share_can_be_exchanged_where_their_weak_references_are_set_aside() -> None:
    first, second = nn.LSTM(2, 3), nn.LSTM(2, 3)
    for name, _ in list(first.named_parameters()):
        setattr(second, name, getattr(first, name))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="Couldn't swap"):
            nn.ModuleList([first, second]).double()
        with private.convertible([first, nn.Linear(1, 1), second], lambda tensor: tensor.double()) as convert:
            nn.ModuleList([first, second])._apply(convert)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for lstm in (first, second):
        kept = [None if ref is None else ref() for ref in lstm._flat_weight_refs]
        assert [id(weight) for weight in kept] == [id(weight) for weight in lstm._flat_weights]
        assert [id(weight) for weight in kept] == [id(weight) for weight in first.parameters()]
        assert lstm(torch.ones(1, 1, 2, dtype=torch.float64))[0].dtype is torch.float64


def test_sharing_memory_reaches_local_tensors_and_nothing_else_is_changed() -> None:
    seen: list[object] = []

    class Watching(nn.Module):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            seen.append(fn)
            return self

    Watching().share_memory()
    Watching().double()
    tensor = torch.ones(2)
    with private.convertible([], seen[0]) as share:
        assert share(tensor) is tensor
    assert tensor.is_shared()
    for convert in (seen[1], torch.Tensor.double):
        with private.convertible([], convert) as same:
            assert same is convert


def test_hooks_that_follow_an_accumulation_are_set_aside_and_come_back() -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), list[str]()
    assert private.remove_later_hooks(parameter, -1) == {}
    handles = {
        name: parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name)) for name in "abc"
    }
    taken = private.remove_later_hooks(parameter, handles["b"].id)
    assert list(taken) == [handles["a"].id, handles["c"].id]
    assert private.remove_later_hooks(parameter, handles["b"].id) == {}
    parameter.sum().backward()
    assert calls == ["b"]
    private.restore_hooks(parameter, taken)
    handles["c"].remove()
    assert [hook for _, hook in private.post_accumulate_hooks([parameter], {handles["b"].id})] == [
        taken[handles["a"].id]
    ]
    parameter.sum().backward()
    assert sorted(calls) == ["a", "b", "b"]


_READS: dict[str, Any] = {
    "sum": torch.sum,
    "clone": torch.clone,
    "array": torch.Tensor.numpy,
    "write": lambda tensor: tensor.add_(1),
    "source": lambda tensor: torch.zeros(4, 6).copy_(tensor),
    "product": lambda tensor: tensor @ torch.ones(6, 2),
    "text": repr,
    "several": lambda tensor: torch._foreach_norm([tensor]),
    "view": lambda tensor: tensor.view(-1).sum(),
}


@pytest.mark.parametrize("read", _READS)
def test_what_has_no_memory_raises_where_it_is_read_and_is_ordinary_when_it_has_some_again(read: str) -> None:
    tensor, bare = torch.ones(4, 6), torch.empty(0, dtype=torch.uint8).untyped_storage()
    storage = tensor.untyped_storage()
    private.refuse_reads(bare, "gone")
    assert private.can_refuse_reads()
    private.swap_storage(storage, bare)
    assert storage.nbytes() == 0
    with pytest.raises(RuntimeError, match=r"Cannot access data pointer|gone"):
        _READS[read](tensor)
    private.swap_storage(storage, bare)
    _READS[read](tensor)
    assert tensor.shape == (4, 6)


def test_reports_of_memory_read_that_a_storage_has_none_and_it_pickles_as_one_of_torch() -> None:
    tensor, reported = torch.arange(4.0), ReportedStorage(0, device=torch.device("cpu"))
    private.refuse_reads(reported, "gone")
    private.swap_storage(reported, tensor.untyped_storage())
    alias = torch.empty(0).set_(reported, 0, (4,), (1,))
    assert alias.untyped_storage() is reported
    assert alias.untyped_storage().data_ptr() == alias.data_ptr() > 0
    file = io.BytesIO()
    torch.save([alias, reported], file)
    sent = ForkingPickler.loads(ForkingPickler.dumps(reported))
    assert type(sent) is torch.UntypedStorage
    for found in (sent, copy.deepcopy(reported)):
        assert torch.equal(torch.empty(0).set_(found, 0, (4,), (1,)), torch.arange(4.0))
    private.swap_storage(reported, tensor.untyped_storage())
    assert (alias.untyped_storage().data_ptr(), alias.untyped_storage().nbytes()) == (0, 0)
    with pytest.raises(RuntimeError, match=r"Cannot access data pointer|gone"):
        alias.sum()


def test_holders_of_a_storage_are_counted() -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    assert private.storage_use_count(storage) == private.storage_use_count(tensor.untyped_storage()) == 1
    alias, parameter = tensor.detach(), nn.Parameter(tensor)
    assert private.storage_use_count(storage) == 3
    del alias
    array = parameter.detach().numpy()
    assert private.storage_use_count(storage) == 3
    del array, parameter
    assert private.storage_use_count(storage) == 1
    del tensor
    assert private.storage_use_count(storage) == 0


def test_holders_of_a_tensor_beside_python_are_counted() -> None:
    parameter, gradient = nn.Parameter(torch.zeros(3)), torch.zeros(3)
    parameter.grad = gradient
    count = private.use_counter([parameter, gradient], [gradient.untyped_storage()])
    before = count()
    parameter.grad = None
    assert count() < before, "of C++"
    before, more = count(), [gradient]
    assert count() == before + 1, more


def test_chunks_of_tensors_are_rows_of_one() -> None:
    first, second, rows = torch.arange(4.0).view(4, 1), torch.arange(8.0).view(4, 2), torch.empty(2, 6)
    private.chunk_cat([first, second], 0, 2, out=rows)
    assert rows.tolist() == [[0, 1, 0, 1, 2, 3], [2, 3, 4, 5, 6, 7]]


def test_a_frame_that_is_skipped_runs_as_it_is_with_all_that_it_calls() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    compiled = torch.compile(outer, backend=backend)
    private.skip_frames(outer, "it is slow")
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    assert not graphs


class Refusing(torch.Tensor):
    """Raises for every operator."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_tensor_without_memory_is_described_like_its_model() -> None:
    like = torch.zeros(2, 3, dtype=torch.float64).t()
    found = private.tensor_without_memory(Refusing, like, torch.float32)
    assert (found.shape, found.stride(), found.dtype, found.device) == (like.shape, (1, 3), torch.float32, like.device)
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = found
    assert parameter.grad is found


def test_copy_all_and_add_all() -> None:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
    private.copy_all(targets, [torch.ones(2), torch.ones(3)])
    private.add_all(targets[:1], [torch.ones(2)])
    assert [t.tolist() for t in targets] == [[2.0, 2.0], [1.0, 1.0, 1.0]]


def test_scale_all_and_norms_of() -> None:
    tensors = [torch.full((2,), 2.0, dtype=torch.bfloat16), torch.ones((1, 4), dtype=torch.bfloat16)]
    private.scale_all(tensors, torch.tensor(0.5, dtype=torch.bfloat16))
    assert [t.tolist() for t in tensors] == [[1.0, 1.0], [[0.5] * 4]]
    assert torch.equal(torch.stack(private.norms_of(tensors, 2.0, torch.float32)), torch.tensor([2.0**0.5, 1.0]))
    assert [norm.item() for norm in private.norms_of(tensors, float("inf"), torch.float32)] == [1.0, 0.5]


def test_graph_task_and_end_of_backward() -> None:
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(private.graph_task_id()))
    y.register_hook(lambda _: private.call_after_backward(lambda: seen.append("end")))
    assert private.graph_task_id() == -1
    y.sum().backward()
    assert seen[0] != -1
    assert seen[1] == "end"


def test_a_failed_backward_drops_its_callback() -> None:
    import weakref

    class End:
        ran = False

        def __call__(self) -> None:
            End.ran = True

    refs: list[weakref.ref[End]] = []

    def queue(_: torch.Tensor) -> None:
        end = End()
        refs.append(weakref.ref(end))
        private.call_after_backward(end)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    z = y * 3
    z.register_hook(queue)
    y.register_hook(fail)
    with pytest.raises(ArithmeticError):
        z.sum().backward()
    assert refs[0]() is None
    assert not End.ran


def test_views_know_their_base() -> None:
    x = torch.ones(4)
    assert private.base_of_view(x.view(2, 2)) is x
    assert private.base_of_view(x) is None


def test_module_parameters_and_hooks() -> None:
    layer = nn.Linear(2, 2)
    assert private.parameters_of(layer)["weight"] is layer.weight
    assert private.post_accumulate_hooks([layer.weight]) == []
    layer.weight.register_post_accumulate_grad_hook(print)
    assert private.post_accumulate_hooks([layer.weight]) == [(layer.weight, print)]


def test_hooks_on_gradients_move_with_their_handles() -> None:
    source, target = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert private.have_gradient_hooks([source, target]) == (False, False)
    private.move_hooks(source, target)  # of one that has none
    assert private.have_gradient_hooks([target]) == (False, False)
    double = source.register_hook(lambda gradient: gradient * 2)
    follow = source.register_post_accumulate_grad_hook(print)
    private.move_hooks(source, target)
    assert private.have_gradient_hooks([target]) == (True, True)
    assert private.have_gradient_hooks([source]) == (False, True)
    source.register_hook(lambda gradient: gradient * 3)
    assert [index for index, _ in private.gradient_hooks([nn.Parameter(torch.ones(1)), target])] == [1]
    target.sum().backward()
    assert target.grad is not None
    assert target.grad.tolist() == [2.0, 2.0]
    double.remove()
    follow.remove()
    assert private.have_gradient_hooks([target]) == (False, False)


class Tagged(torch.Tensor):
    """Keeps something of its own among its attributes, also in what is made of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.own = True
        return result


def test_attributes_of_users_are_told_from_what_a_class_keeps_of_its_own(fake_ranks: object) -> None:
    spec = private.make_spec(init_device_mesh("cpu", (4,)), (Shard(0),), torch.Size((8, 2)), (2, 1), torch.float32)
    plain, wrapper = nn.Parameter(torch.ones(2)), private.parameter_from_local(torch.ones(2, 2), spec, True)
    tagged = nn.Parameter(torch.ones(2).as_subclass(Tagged))
    for each in (plain, wrapper, tagged):
        each.mark = type(each).__name__  # pyright: ignore[reportAttributeAccessIssue]
        assert private.attributes_of(each)["mark"] == type(each).__name__
    assert private.attributes_of(plain) is vars(plain)
    assert "own" in vars(tagged)
    assert "own" not in private.attributes_of(tagged)
    wrapper.mine = 1  # pyright: ignore[reportAttributeAccessIssue]
    private.give_attributes(private.attributes_of(plain), wrapper)
    assert vars(plain) is vars(wrapper)
    assert plain.mark == "DTensor"  # pyright: ignore[reportAttributeAccessIssue]  its own stays
    assert isinstance(wrapper, nn.Parameter)
    private.give_attributes(private.attributes_of(plain), tagged)
    assert (tagged.mark, tagged.mine, tagged.own) == ("Tagged", 1, True)  # pyright: ignore[reportAttributeAccessIssue]


def test_an_assignment_to_data_changes_the_storage_also_of_a_wrapper(fake_ranks: object) -> None:
    spec = private.make_spec(init_device_mesh("cpu", (4,)), (Shard(0),), torch.Size((8, 2)), (2, 1), torch.float32)
    param = private.parameter_from_local(torch.ones(2, 2), spec, True)
    before = private.storage_id(param)
    with torch.no_grad():
        param.add_(1)
    assert private.storage_id(param) == before
    param.data = param.data * 2
    assert private.storage_id(param) != before
    assert param.to_local().tolist() == [[2.0, 2.0], [2.0, 2.0]]  # what was assigned is not what it computes with


def test_the_children_of_a_module_are_a_live_dict() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    assert list(private.children_of(module).values()) == [module[0]]


def test_parameters_made_from_local_tensors_are_what_nn_parameter_makes(fake_ranks: object) -> None:
    mesh = init_device_mesh("cpu", (4,))
    spec = private.make_spec(mesh, (Shard(0),), torch.Size((8, 2)), (2, 1), torch.float32)
    for requires_grad in (True, False):
        local = torch.ones(2, 2)
        made = private.parameter_from_local(local, spec, requires_grad)
        expected = nn.Parameter(private.dtensor_from_local(local, spec), requires_grad)
        for each in (made, expected):
            assert isinstance(each, nn.Parameter)
            assert type(each) is DTensor
            assert each.is_leaf
            assert each.requires_grad is requires_grad
            assert each.to_local().data_ptr() == local.data_ptr()
        assert made.__dict__.keys() == expected.__dict__.keys()
        layer = nn.Linear(2, 8)
        layer.weight = made
        assert dict(layer.named_parameters())["weight"] is made
        assert isinstance(copy.deepcopy(layer).weight, nn.Parameter)


def test_parameters_made_from_windows_are_seen_to_have_no_memory_of_their_own(fake_ranks: object) -> None:
    spec = private.make_spec(init_device_mesh("cpu", (4,)), (Shard(0),), torch.Size((8, 2)), (2, 1), torch.float32)
    window = torch.arange(8.0)[4:].view(2, 2)
    made = private.parameter_from_local(window, spec, requires_grad=True)
    assert (made.data_ptr(), made.storage_offset()) == (0, 0)
    assert made.to_local().data_ptr() == window.data_ptr()
    assert copy.deepcopy(made).to_local().tolist() == window.tolist()


def test_dtensors(fake_ranks: object) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    spec = private.make_spec(mesh["a"], (Shard(0),), torch.Size((6, 2)), (2, 1), torch.float32)
    local = torch.ones(3, 2)
    tensor = private.dtensor_from_local(local, spec, requires_grad=False)
    assert isinstance(tensor, DTensor)
    assert tuple(tensor.shape) == (6, 2)
    assert private.local_of(tensor) is local
    assert private.local_of(local) is local
    assert private.specs_of([tensor, local]) == [spec, None]
    assert private.locals_of([tensor, local]) == [local, local]
    other = torch.zeros(3, 2)
    private.set_local(tensor, other)
    assert tensor.to_local().data_ptr() == other.data_ptr()
    private.set_local(local, other)
    assert local.data_ptr() == other.data_ptr()
    assert spec.num_shards_map[0] == 2
    assert private.strided_shard(0, 2).split_factor == 2
    assert private.join_meshes([mesh["a"], mesh["b"]]).mesh_dim_names == ("a", "b")
    assert private.flatten_mesh(mesh, "flat").size() == 4
    assert private.wait_tensor(local) is local
    assert not private.is_gloo(mesh.get_group("a"))
    assert private.timeout_s_of(mesh.get_group("a")) == 1800.0, "of a backend that does not say"
    assert Replicate() != Shard(0)


def test_process_groups() -> None:
    with alone(timeout_s=7):
        group = dist.group.WORLD
        assert group is not None
        assert private.timeout_s_of(group, torch.device("cpu")) == private.timeout_s_of(group) == 7.0
        assert private.backend_of(group, torch.device("cpu")) is not None
        assert private.is_gloo(group)
        private.store_of(group).set("key", "text")
        assert private.store_of(group).get("key") == b"text"


def test_dispatch_modes_are_seen() -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not private.has_dispatch_mode()
    with Watch():
        assert private.has_dispatch_mode()
        with CommDebugMode():
            assert private.has_dispatch_mode()
        assert private.has_dispatch_mode()
    assert not private.has_dispatch_mode()


def test_dynamo_disabled_keeps_signature_and_result() -> None:
    def double(x: int) -> int:
        return 2 * x

    wrapped = dynamo_disabled(double)
    assert wrapped(3) == 6
    assert inspect.signature(wrapped) == inspect.signature(double)


def test_same_version_hides_a_refill_from_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    full = x.detach().clone()
    y = x * full
    with private.same_version(full):
        full.copy_(torch.ones(2))
    y.sum().backward()
    assert x.grad is not None


def test_profiling_is_seen() -> None:
    assert not private.is_profiling()
    with torch.profiler.profile(acc_events=True):
        assert private.is_profiling()


def test_subclasses_do_not_intercept() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object) -> None:
            raise ArithmeticError

    loud = torch.ones(2).as_subclass(Loud)
    with pytest.raises(ArithmeticError):
        loud + 1
    with private.without_torch_function():
        assert (loud + 1).sum() == 4


def test_the_default_dtype_of_reductions_is_that_of_the_installed_torch(fake_ranks: object) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert "2.15" in (MixedPrecisionPolicy.__doc__ or "") or torch.__version__ < "2.15"
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    seen: list[torch.dtype] = []
    model.set_all_reduce_hook(lambda reduced: seen.append(reduced.dtype))
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [torch.bfloat16 if torch.__version__ < "2.15" else torch.float32]


def test_a_spec_may_be_had_for_another_dtype(fake_ranks: object) -> None:
    mesh = init_device_mesh("cpu", (4,))
    spec = private.make_spec(mesh, [Shard(0)], torch.Size([4, 3]), (3, 1), torch.bfloat16)
    tensor = private.dtensor_from_local(torch.zeros(1, 3, dtype=torch.bfloat16), spec)
    assert private.spec_of(tensor, torch.bfloat16) is spec
    other = private.spec_of(tensor, torch.float32)
    assert (other.mesh, other.placements) == (spec.mesh, spec.placements)
    assert other.tensor_meta is not None
    assert (other.tensor_meta.shape, other.tensor_meta.dtype) == (torch.Size([4, 3]), torch.float32)


def test_a_forgotten_mesh_is_freed(fake_ranks: object) -> None:
    mesh = init_device_mesh("cpu", (4,))
    DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)]).full_tensor().add(1)
    (DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)]) + 1).redistribute(placements=[Replicate()])
    columns = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)])
    columns @ DTensor.from_local(torch.zeros(8, 2), mesh, [Shard(1)])  # two ways, of which torch takes the cheaper one
    del columns
    freed = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert freed() is not None, "torch keeps no mesh any more: forget_meshes can go"
    private.forget_meshes()
    gc.collect()
    assert freed() is None


def test_a_dispatch_mode_sees_operations_that_collectives_are_too(fake_ranks: object) -> None:
    seen: list[tuple[str, str]] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            objects = [
                each for each in args if isinstance(each, torch.ScriptObject)
            ]  # the group, then what to reduce by
            seen.append((func._schema.name, dist.ProcessGroup.unbox(objects[0]).group_name if objects else ""))
            return func(*args, **(kwargs or {}))

    with Names():
        dist.all_reduce(torch.ones(2))
    world = dist.distributed_c10d._get_default_group().group_name
    assert seen == [("aten::ones", ""), ("c10d::allreduce_", world)]


@pytest.fixture
def one_rank() -> Iterator[None]:
    with alone():
        yield


def test_the_collectives_of_a_gloo_group_are_counted(one_rank: object) -> None:
    group = dist.group.WORLD
    assert group is not None
    before = private.sequence_of(group)
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    assert private.sequence_of(group) == before + 2


def test_a_group_is_the_same_object_over_another_backend(one_rank: object) -> None:
    group = dist.group.WORLD
    assert group is not None
    assert private.all_groups() == [group]
    for kind in (8, 9):
        old = private.backend_of(group, torch.device("cpu"))
        private.replace_gloo(group, f"again/{kind}", kind)
        new = private.backend_of(group, torch.device("cpu"))
        assert new is not old
        assert new.options is not None
        assert private.timeout_s_of(group) == 1800.0
        assert private.is_gloo(group)
    ones = torch.ones(2)
    dist.all_reduce(ones, group=group)
    assert (ones.tolist(), dist.get_backend(group)) == ([1.0, 1.0], "gloo")


def test_ddp_begins_again_after_a_backward_that_has_not_ended(one_rank: object) -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    private.settle_buckets(ddp)

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise KeyError

    output = ddp(torch.ones(1, 2))
    output.register_hook(fail)
    hidden = ddp.module[1].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError):
        output.sum().backward()
    hidden.remove()
    private.settle_buckets(ddp, has_failed=True)
    ddp.zero_grad()
    for _ in range(3):
        ddp(torch.ones(1, 2)).sum().backward()
        private.settle_buckets(ddp)
    assert ddp.module[0].weight.grad is not None


def test_the_buffers_of_a_module_are_a_live_dict() -> None:
    module = nn.BatchNorm1d(2)
    private.buffers_of(module)["running_mean"] = torch.ones(2)
    assert module.running_mean is not None
    assert module.running_mean.tolist() == [1.0, 1.0]


def test_saved_buffers_are_those_of_the_state_dict() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    module.register_buffer("nothing", None)
    assert private.buffers_of(module, saved=True).keys() == module.state_dict().keys() == {"kept"}


def test_fake_tensors_have_sizes_and_no_memory() -> None:
    with private.fake_mode():
        huge = torch.empty(1 << 50, dtype=torch.uint8)
        assert huge.untyped_storage().nbytes() == 1 << 50
        assert (huge + 1).shape == huge.shape


def test_a_storage_keeps_its_python_object_while_it_lives() -> None:
    ended: list[bool] = []
    tensor = torch.zeros(4)
    weakref.finalize(tensor.untyped_storage(), ended.append, True)
    view = tensor[:2]
    del tensor
    gc.collect()
    assert not ended
    del view
    assert ended


def test_watching_hears_of_every_operation() -> None:
    heard: list[str] = []
    with private.watching(lambda op, given, out: heard.append(f"{op} {len(given[0])}")):
        torch.ones(2).add_(1)
    assert heard == ["aten.ones.default 1", "aten.add_.Tensor 2"]


def test_trees_are_changed() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    assert private.map_tensors(float, tree) == {"a": [1.0, 2], "b": (0.0,)}


def test_watching_hears_of_the_local_parts_of_dtensors_and_of_nothing_that_torch_tries_out() -> None:
    heard: list[str] = []
    with private.fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        with private.fake_mode():
            weight = DTensor.from_local(torch.empty(2, 8), mesh, [Shard(0)], run_check=False)
            x = DTensor.from_local(torch.empty(6, 8), mesh, [Replicate()], run_check=False)
            for _ in range(2):
                heard.clear()  # torch tries an operation once, and the first time counts that, too
                with private.watching(lambda op, given, out: heard.append(f"{op} {[*getattr(out, 'shape', ())]}")):
                    parts = torch.mm(x, weight.t())
                    assert parts.redistribute(mesh, [Replicate()]).shape == (6, 8)
    products = [each for each in heard if "aten.mm" in each]
    assert products == ["aten.mm.default [6, 2]"]
    assert [each for each in heard if "all_gather" in each] == [
        "_c10d_functional.all_gather_into_tensor.default [24, 2]"
    ]


def test_a_fake_world_leaves_no_process_group() -> None:
    assert not dist.is_initialized()
    with private.fake_world(1 << 14):
        assert dist.get_world_size() == 1 << 14
        assert dist.get_rank() == 0
    assert not dist.is_initialized()


def test_nodes_of_graphs_are_counted() -> None:
    before = private.num_nodes_made()
    (torch.ones(2, requires_grad=True) * 2).sum()
    assert private.num_nodes_made() - before == 2
    torch.ones(2) * 2
    assert private.num_nodes_made() - before == 2


def test_nodes_of_graphs_have_numbers() -> None:
    leaf = torch.ones(2, requires_grad=True)
    first, before = leaf * 2, private.num_nodes_made()
    second = first * 2
    assert private.node_number(leaf) == -1
    assert private.node_number(first) < before <= private.node_number(second)


def test_tools_of_torch_find_what_is_put_for_them() -> None:
    from torch.distributed import fsdp

    module, state = nn.Linear(2, 2), object()
    assert private.class_that_tools_ask_for() is fsdp.FSDPModule
    private.show_to_tools(module, state)
    assert fsdp.fully_shard.state(module) is state


def test_torchs_registry_of_composable_apis_has_what_is_entered() -> None:
    from torch.distributed._composable import replicate
    from torch.distributed._composable.contract import _get_registry

    module = nn.Linear(2, 2)
    assert private.composable_apis_of(module) == []
    private.show_to_tools(module, None)
    assert list(_get_registry(module)) == private.composable_apis_of(module) == ["fully_shard", "replicate"]
    assert private.composable_apis_of(replicate(nn.Linear(2, 2))) == ["replicate"]


def test_launched_collectives_are_those_of_torchs_functions(fake_ranks: object) -> None:
    group, found = dist.distributed_c10d._get_default_group(), []
    shard, packed = torch.ones(2), torch.zeros(8)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for calls in (
        (
            lambda: c10d.all_gather_single(packed, shard, group),
            lambda: c10d.reduce_scatter_single(shard, packed, group, dist.ReduceOp.AVG),
        ),
        (
            lambda: gather(packed, shard, group=group, async_op=True),
            lambda: scatter(shard, packed, op=dist.ReduceOp.AVG, group=group, async_op=True),
        ),
    ):
        packed.zero_()
        with CommDebugMode() as mode:
            works = [call() for call in calls]
        assert all(work.wait() for work in works)
        found.append((dict(mode.get_comm_counts()), packed.tolist()))
    assert found[0] == found[1]
    assert found[0][0]


@pytest.mark.parametrize("name", ["all_gather_single", "reduce_scatter_single"])
def test_who_takes_the_place_of_a_collective_of_torchs_is_called(
    fake_ranks: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    for each in (name, name.replace("gather_single", "gather_into_tensor").replace("scatter_single", "scatter_tensor")):
        monkeypatch.setattr(dist, each, lambda *args, **kwargs: heard.append(args), raising=False)
    group, shard, packed = dist.distributed_c10d._get_default_group(), torch.ones(2), torch.zeros(8)
    if name == "all_gather_single":
        c10d.all_gather_single(packed, shard, group)
    else:
        c10d.reduce_scatter_single(shard, packed, group, dist.ReduceOp.SUM)
    assert len(heard) == 1


def test_process_groups_that_define_a_collective_anew_are_asked() -> None:
    heard: list[str] = []

    class Own(dist.ProcessGroup):
        pass

    def hear(name: str) -> Any:
        return lambda *_: heard.append(name)

    names = ["all_gather_single", "reduce_scatter_single"]
    for name in names:
        setattr(Own, name, hear(name))
    group, shard, packed = Own(0, 4), torch.ones(2), torch.zeros(8)
    c10d.all_gather_single(packed, shard, group)
    c10d.reduce_scatter_single(shard, packed, group, dist.ReduceOp.SUM)
    assert heard == names


def test_all_groups_are_aborted_between_the_group_calls_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU: ``tests/gpu/test_lost_ranks.py``."""
    done: list[str] = []

    class Backend:
        def _group_start(self) -> None:
            done.append("start")

        def _group_end(self) -> None:
            done.append("end")

    class Group:
        _device_types = (torch.device("cpu"),)

        def __init__(self, name: str) -> None:
            self._name = name

        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

        def abort(self) -> None:
            done.append(self._name)
            raise RuntimeError("it is gone already")

    monkeypatch.setattr(private, "all_groups", lambda: [Group("first"), Group("second")])
    private.abort_groups()
    assert done == ["start", "first", "second", "end"]
    assert hasattr(dist.ProcessGroup, "abort")


def test_hooks_on_saved_tensors_are_seen_while_they_are_on() -> None:
    assert private.saved_tensor_hooks(True) is None
    with torch.autograd.graph.save_on_cpu():
        assert private.saved_tensor_hooks(True) is not None
    assert private.saved_tensor_hooks(True) is None


def test_what_a_transform_wraps_is_found_with_its_tangent() -> None:
    plain, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    assert private.graphs_of(plain)[0] is plain
    assert len(private.graphs_of(plain)) == 1
    found: list[bool] = []

    def through(x: torch.Tensor) -> torch.Tensor:
        y = x * weight
        found.extend(each.grad_fn is not None for each in private.graphs_of(y))
        return y

    torch.func.jvp(through, (plain,), (torch.ones(2),))
    assert found.count(True) > 1  # the value's and the tangent's


def test_tensors_beside_transforms_are_plain_ones_and_the_transform_goes_on() -> None:
    assert private.innermost_transform() is None
    with private.beside_transforms():
        assert private.innermost_transform() is None
    made: list[tuple[int, int]] = []

    def through(x: torch.Tensor) -> torch.Tensor:
        assert private.innermost_transform() is not None
        with private.beside_transforms():
            assert private.innermost_transform() is None
            made.append((torch.empty(3).untyped_storage().nbytes(), torch.ones(2).data_ptr()))
        assert private.innermost_transform() is not None
        return x.square().sum()

    assert torch.equal(torch.func.grad(through)(torch.ones(2)), torch.full((2,), 2.0))
    assert made[0][0] == 12
    assert made[0][1]


def test_both_halves_of_clipping_mixed_gradients_are_done_by_others(
    one_rank: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_")
    for name in names:
        original = getattr(torch.nn.utils, name).__wrapped__
        monkeypatch.setattr(torch.nn.utils, name, original)
        inner = name if hasattr(torch.nn.utils.clip_grad, name) else f"_{name}"
        monkeypatch.setattr(torch.nn.utils.clip_grad, inner, original)
    by_name = torch.nn.utils.clip_grad_norm_
    calls: list[Any] = []
    private.clip_mixed_by(
        lambda gradients, *args: calls.append((len(gradients), *args)) or torch.ones(()),
        lambda gradients, limit, norm: calls.append((len(gradients), limit, norm.item())),
        lambda params: calls.append(f"before {len(params)}") or params,
        lambda params: calls.append(f"check {len(params)}"),
    )
    plain = nn.Parameter(torch.ones(4))
    shard = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
    for param in (plain, shard):
        param.grad = param.detach().clone()
    for params in ([plain], [shard], plain):
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    assert torch.allclose(plain.grad, torch.full((4,), 0.5))
    assert calls == ["before 1", "check 1"] * 3
    calls.clear()
    torch.nn.utils.clip_grad_norm_(iter([plain, shard]), 1.0, 2.0, False, None)
    assert calls == ["before 2", (2, 2.0, False), "check 2", (2, 1.0, 1.0)]
    calls.clear()
    by_name([plain, shard], 1.0, norm_type=1.0, foreach=False)
    by_name([shard], 1.0, float("inf"), True)
    assert calls == [(2, 1.0, False), "check 2", (2, 1.0, 1.0), (1, float("inf"), True), "check 1"]
    calls.clear()
    norm = torch.nn.utils.get_total_norm([plain.grad, shard.grad])
    torch.nn.utils.clip_grads_with_norm_([plain, shard], 1.0, norm)
    assert calls == [(2, 2.0, False), "check 2", (2, 1.0, 1.0)]


def test_an_object_in_no_join_tells_none(one_rank: object) -> None:
    class Alone(Joinable):
        def __init__(self) -> None:
            super().__init__()
            self._join_config: Any = "of a Join"
            private.leave_join(self)

        def join_hook(self, **kwargs: Any) -> JoinHook:
            return JoinHook()

        join_device = torch.device("cpu")
        join_process_group = None

    assert Join.notify_join_context(Alone()) is None


def test_random_operations_on_shards_go_through_the_place_that_torch_keeps_for_them(
    fake_ranks: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = init_device_mesh("cpu", (4,))
    monkeypatch.setattr(_random, "_rng_tracker", None)
    as_torch: list[bool] = []
    private.draw_as_one_process(lambda: bool(as_torch))
    tracker = _random._rng_tracker
    private.draw_as_one_process(lambda: True)
    assert _random._rng_tracker is tracker
    for draw in (
        torch.Tensor.normal_,
        torch.Tensor.exponential_,
    ):  # the second has a handler, because torch has no place for it
        for placement, rows in ((Shard(0), 3), (Replicate(), 12)):
            torch.manual_seed(0)
            drawn = draw(DTensor.from_local(torch.empty(rows), mesh, [placement], run_check=False))
            torch.manual_seed(0)
            assert torch.equal(drawn.to_local(), draw(torch.empty(12))[:rows])
    as_torch.append(True)
    torch.manual_seed(0)
    drawn = DTensor.from_local(torch.empty(3), mesh, [Shard(0)], run_check=False).normal_()
    torch.manual_seed(0)
    assert torch.equal(drawn.to_local(), torch.empty(3).normal_())


def test_the_version_of_a_tensor_counts_writes() -> None:
    tensor = torch.zeros(2)
    before = private.version_of(tensor)
    tensor[0].add_(1)
    assert private.version_of(tensor) == before + 1


def test_a_mixin_applies_a_function_as_the_class_behind_it_does() -> None:
    class Mixin:
        pass

    class Mixed(Mixin, nn.Linear):
        pass

    module = Mixed(2, 2)
    assert private.apply_to_tensors(module, lambda tensor: tensor.double(), after=Mixin) is module
    assert module.weight.dtype is torch.float64


def test_a_dtensor_has_a_spec_and_counts_writes_to_itself_and_to_its_memory(fake_ranks: object) -> None:
    mesh = init_device_mesh("cpu", (4,))
    tensor = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
    assert private.spec_of(tensor).placements == tensor.placements
    (before,) = private.versions_of([tensor])
    private.local_of(tensor).add_(1)
    (after,) = private.versions_of([tensor])
    assert after > before


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_a_sharded_tensor_is_made_like_another_one_over_its_group(one_rank: object) -> None:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    like = sharded_tensor.zeros(spec, 3, 2)
    found = private.sharded_tensor_like(like, [torch.ones(3, 2, dtype=torch.float64)])
    assert private.process_group_of(found) is private.process_group_of(like)
    assert (found.size(), found.dtype) == (torch.Size([3, 2]), torch.float64)
    assert found.local_tensor().sum() == 6


def test_an_optimizer_steps_inside_another_one_without_global_hooks() -> None:
    weight, calls = nn.Parameter(torch.ones(1)), list[object]()
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(None))
    try:
        private.step_inside(optimizer)
        assert (weight.item(), calls) == (0.5, [])
        own = optimizer.register_step_post_hook(lambda *_: calls.append(None))
        private.step_inside(optimizer)  # its own hooks run
        assert calls
        own.remove()
    finally:
        handle.remove()


def test_the_hooks_of_an_optimizer_on_state_dicts_are_known() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    assert private.state_dict_hooks(optimizer, "state_dict_pre") == []
    optimizer.register_state_dict_pre_hook(print)
    assert private.state_dict_hooks(optimizer, "state_dict_pre") == [print]
