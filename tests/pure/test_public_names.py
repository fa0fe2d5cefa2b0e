"""Every attribute of a public class without an underscore is on a list: a new one is put there on purpose, or underscored."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

import shardwise
import shardwise.checkpoint

_MESH = "dp_mesh_dims mesh replicate_mesh_dim shard_mesh_dim spmd_mesh"
_MODULE = """compression_report compression_state finalize_backward release_memory
    join_device join_hook join_process_group
    reset_iter_state reshard set_all_reduce_hook set_allow_rank_divergence
    set_allocate_memory_from_process_group_for_comm set_custom_all_gather set_custom_reduce_scatter
    set_force_sum_reduction_for_comms set_gather_ahead_bytes set_gradient_divide_factor set_is_last_backward
    set_keep_unsharded_storage set_manual_backward_finalization set_modules_to_backward_prefetch
    set_modules_to_forward_prefetch set_post_optim_event
    set_reduce_scatter_divide_factor set_reduce_scatter_max_input_buffers set_reduce_scatter_unused_params
    set_requires_all_reduce set_requires_gradient_sync set_reshard_after_backward set_reshard_after_forward
    set_separate_reduce_scatter_group set_symm_mem_for_comm set_transport set_unshard_in_backward unshard
    zero_grad"""
_OPTIMIZER = "add_param_group clip_grad_norm_ load_state_dict param_groups state state_dict step zero_grad"
FOR_USERS = {
    "ActivationPolicy": "blocks keep_ops min_offload_bytes",
    "CodedTraffic": "last_error num_calls plain_bytes sent_bytes worst_error",
    "CompressionPolicy": "block error_feedback exact gather min_bytes reduce warn_above",
    "CompressionState": "load_state_dict state_dict",
    "CPUOffloadPolicy": "pin_memory",
    "Choices": "accumulate disk keep_blocks offload optimizer precision recompute replicas strategies tensor tensor_plan "
    "unit_bytes",
    "DDPMeshInfo": _MESH,
    "DataParallelMeshDims": "replicate shard",
    "DiskOffloadPolicy": "folder pin_memory",
    "FSDPMeshInfo": _MESH,
    "FSDPModule": f"{_MODULE} load_state_dict",
    "GradientReductionHandle": "wait",
    "HSDPMeshInfo": _MESH,
    "Hardware": """between data_ranks_per_host device disk efficiency flops_per_s host_memory host_s_per_op host_s_per_unit
        host_s_per_update inside library_bytes limit_bytes memory_bytes memory_bytes_per_s name overlaps ranks_per_host
        shared usable""",
    "Loaded": "missing num_bytes_read path skipped step unexpected",
    "MemoryLimit": "accumulate fit folder inputs limit loss offload optimizer plan",
    "Microbatches": """batch_sampler check_state load_state_dict num_microbatches of_step set_weights state_dict step""",
    "Mixture": "sources weights",
    "MixedPrecisionPolicy": "cast_forward_inputs output_dtype param_dtype param_dtype_override_fn reduce_dtype",
    "OffloadReport": "num_early num_redone num_units num_updates offloaded_bytes resident_bytes",
    "OptimizerOffload": "folder fraction num_threads over undo",
    "Packed": "load_state_dict state_dict",
    "Plan": "batch best candidates changes code hardware left_out model num_parameters ranks table to_json why",
    "RandomState": "load_state_dict state_dict",
    "ReplicateModule": f"{_MODULE} load_state_dict no_sync require_backward_grad_sync",
    "Reproducible": "axes clip_grad_norm_ constants load_state_dict microbatches model observer place state_dict step sum",
    "RunDigests": "begin end end_microbatch",
    "ShardPlacementResult": "mesh_info placement",
    "ShardedOptimizer": f"{_OPTIMIZER} blank_state_dict full_state_dict named_params",
    "Sleep": "held num_bytes",
    "Span": "begin_s end_s lane num_bytes seconds unit what",
    "StepError": "kind place rank text",
    "Strategy": "DDP HFSDP HSDP ZERO1 ZERO2 ZERO3",
    "StepMeter": "data figures log num_steps step",
    "Trace": "calls exposed_s save spans table to_json",
    "UnitCompression": "gathers name reductions",
    "UnitRow": "name num_bytes num_modules numel padding_ratio route",
    "UnitTable": "rows",
    "UnshardHandle": "wait",
    "WeightPublisher": "close publish wait_for",
    "WeightReader": "advance changed_tensors close is_mixed version",
    "Wire": "bytes_per_s latency_s",
    "use_in": "replaced",
    "ZeroRedundancyOptimizer": f"""{_OPTIMIZER.removesuffix(" zero_grad")} consolidate_state_dict defaults initialized
        join_device join_hook join_process_group optim overlap_with_ddp parameters_as_bucket_view partition process_group rank
        sharded world_size""",
}
CLASSES = {
    name: found
    for module in (shardwise, shardwise.checkpoint)
    for name in module.__all__
    if inspect.isclass(found := getattr(module, name))
}


def _attributes(cls: type) -> set[str]:
    """Return the names without underscore that our classes in its ancestry define, or set on ``self``."""
    found: set[str] = set()
    for each in cls.__mro__:
        if each.__module__.partition(".")[0] != "shardwise":
            continue
        found |= set(vars(each))
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        found |= {
            node.target.id
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_attributes_of_a_public_class_are_listed(name: str) -> None:
    assert _attributes(CLASSES[name]) == {*FOR_USERS.get(name, "").split()}
