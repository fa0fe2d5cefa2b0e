"""Writes of user code to full parameters: those of a forward that torch counts reach the shards, all others are refused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup
from shardwise.observe import unit_in_words

_ADDRESS = torch.Tensor.data_ptr

Written = list[tuple[ParamGroup, ShardedParam]]


def find_writes(groups: Sequence[ParamGroup]) -> Written:
    """Return the parameters of a full unit that the running or last forward has written to; the same on every rank.

    Raises: StateError if ``.data`` was assigned to, or user code wrote between passes; such a write is dropped.
    """
    found: Written = []
    for group in groups:
        packing, (params, fulls, versions, addresses) = group.packing, group.registered
        assert packing is not None
        if group.is_kept and group.swap is not None:
            group.swap.follow_freezing()
        if [*map(torch_private.version_of, fulls)] == versions and [*map(_ADDRESS, fulls)] == addresses:
            continue
        for index, (param, full) in enumerate(zip(params, fulls, strict=True)):
            if full.data_ptr() != addresses[index]:  # point it to the memory that gathers fill again
                full.data = packing.make_full(param, group.comm.pool).detach()
                versions[index] = torch_private.version_of(full)
                raise uncounted(param)
            if torch_private.version_of(full) != versions[index] and not packing.aliases_shard(param):
                if group.is_kept:
                    versions[index] = torch_private.version_of(full)
                    torch.autograd.graph.increment_version(param.sharded)  # it is gathered again
                    raise StateError(
                        f"{param.fqn} was written to while it was unsharded after a forward or by unshard(): the write is "
                        "dropped. To write, call reshard() on the module, then write to the shards under torch.no_grad()"
                    )
                found.append((group, param))
    return found


def take_written(written: Written) -> None:
    """Copy this rank's rows of the written parameters to the shards.

    If a gather casts or compresses, only elements that differ from its result are copied: others would lose precision.
    """
    for group, param in written:
        full, local = param.full, param.local.detach()
        assert full is not None
        with torch.no_grad():
            rows, gathered = own_rows(group, param, full)
            if rows.dtype is not local.dtype or group.gather_coding is not None:
                rows = torch.where(rows != gathered, rows.to(local.dtype), local.to(rows.device))
            local.copy_(rows)
        group.is_written = True
        torch.autograd.graph.increment_version(param.sharded)
        param.gathered_version = param.version
        params, _, versions, _ = group.registered
        versions[params.index(param)] = torch_private.version_of(full)


def check_sub(name: str, params: Sequence[ShardedParam]) -> None:
    """Raise StateError if the sub-sharded parameters of unit ``name`` were written to, or have gradients."""
    for param in params:
        sub = param.subsharded
        if sub is None:
            continue
        version, (seen, was_trainable) = torch_private.versions_of([sub])[0], param.sub_seen
        is_changed = version != seen or sub.grad is not None or torch_private.gradient_hooks([sub])
        param.sub_seen, sub.grad = (version, sub.requires_grad), None
        if sub.requires_grad is not was_trainable:  # user code has frozen or thawed what was registered
            param.sharded.requires_grad_(sub.requires_grad)
        if is_changed:
            raise StateError(
                f"{param.fqn} ({unit_in_words(name)}) was written to, used in a loss or given a hook between forward and "
                "backward, when its form on the smaller mesh of reshard_after_forward was registered, which is not trained. "
                "Do so in forward or after backward, or call reshard() or unshard() on the module first"
            )


def own_rows(group: ParamGroup, param: ShardedParam, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of ``full``, and the shard after a gather: cast, or compressed and decompressed."""
    cut, whole = param.shard, torch_private.local_of(full).data
    rows = cut.rows(group.axes.shard_rank)
    mine = whole if cut.is_whole else whole.narrow(cut.dim, rows.start, len(rows))
    local = param.local.detach().to(whole.device)
    if group.compression is None or group.gather_coding is None:
        return mine, local.to(whole.dtype)
    return mine, group.compression.round_trip(local, param.fqn, cut.shape, whole.dtype)


def uncounted(param: ShardedParam) -> StateError:
    """Return the error for a write to a full parameter that torch has not counted."""
    return StateError(
        f"a write to {param.fqn} in forward, or while it was unsharded, through .data, has not reached the shards, since "
        f"torch does not count it. Write under torch.no_grad(): {param.fqn.rpartition('.')[2]}.copy_(values)"
    )


# ---- The events of a root that checks of user programs listen to; the checks themselves are in ``shardwise.checks``.


class StepChecks:
    """Checks nothing: the checks of an engine before its root's first forward.

    Attributes:
        is_on: checks that cost more than a comparison of lists are made in the running pass.
    """

    is_on = False

    def begin_forward(self) -> None:
        """A forward of the root begins."""

    def see_change(self) -> None:
        """User code has changed parameters since the last pass, as the comparison of ``Snapshot`` shows."""

    def end_unit(self, groups: Sequence[ParamGroup]) -> None:
        """The forward of a unit has ended, whose full parameters are still registered; called while ``is_on``."""

    def use_again(self, name: str, groups: Sequence[ParamGroup]) -> None:
        """Unit ``name`` begins another pass with the full parameters that it has; called while ``is_on``."""

    def see_writes(self, number: int, written: Written) -> None:
        """The forward of unit ``number`` has written to parameters."""

    def end_backward(self) -> None:
        """Gradients have been set: all ranks have finished their forwards."""
