"""ZeroRedundancyOptimizer: every rank stores and updates the optimizer state of its partition of the parameters (ZeRO-1).

Source: ZeRO, arXiv 1910.02054.  It behaves like the class of this name in ``torch.distributed.optim``, except for
defects of that class.  Design: docs/design/004-zero.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardwise.collectives.owned import OwnedSlice, broadcast_tensor, gather_objects_of, launch_broadcasts
from shardwise.collectives.streams import watch_device
from shardwise.consistency.agreement import GroupAgreement, open_agreement
from shardwise.consistency.store import Sketch, are_threads, digest_of, sample_of
from shardwise.errors import ConfigError, DesyncError, StateError
from shardwise.fsdp.clip import clip_grad_norm_, refuse_fixed_sums
from shardwise.observe import note
from shardwise.optim.sharded_optimizer import ShardedOptimizer, optimizer_backend, state_places
from shardwise.optim.slices import as_they_are, call_hooks
from shardwise.optim.state_dict import BlankState, HeldState, refuse_other_state
from shardwise.zero.partition import (
    Consolidated,
    LocalOptimizer,
    LocalSlice,
    Partition,
    RankPartition,
    ShardedState,
    addresses_of,
    agree_on,
    check_dense,
    check_partition,
    checked_optimizer_class,
    consolidate,
    describe_params,
    elements_of,
    flat_like,
    flat_view,
    flatten_groups,
    gradient_for,
    load_rank_partition,
    make_layout,
    make_local_optimizer,
    make_rank_partition,
    moving_of,
    trainable_of,
    whole_state_dict,
    with_gradients,
)

# ---- Once before the first step: all ranks have the same gradients and the same parameters.
# Each owner steps on its own copy of the gradients, and sends its values to all: without averaging, every owner would
# silently train on another batch, and parameters that differ at the start would become a mixture. Ranks compare digests
# of the bits through the store. Gradients with other last bits (ranks on different processors clip so) are compared by
# random projections, and only cause a warning.

logger = logging.getLogger(__name__)


def are_same(
    rank_partition: RankPartition,
    agreement: GroupAgreement,
    what: str,
    *,
    has_inputs: bool = True,
    only_warn: bool = False,
) -> bool:
    """Return True if all ranks have the same gradients, False if no rank has any (so that nothing is known).  Collective.

    ``has_inputs`` False: a rank in ``Join`` without gradients of its own; it is not compared.  ``only_warn``: for
    gradients of a closure, which torch's class does not check.

    Raises: DesyncError on every rank, with the first parameter that differs.
    """
    gradients = [_gradient(param) if has_inputs else None for param in rank_partition.params]
    is_known, rows = _compare(gradients, f"the gradients of {what}", agreement, has_inputs)
    complaint = _judge(rank_partition, f"{what}: gradients", rows)
    if complaint:
        text = (
            f"{what}: gradients differ between ranks: that of {complaint}. Each owner would train on its own: "
            "wrap the model in DistributedDataParallel, or average the gradients before step()"
        )
        if not only_warn:
            raise DesyncError(text)
        logger.warning("%s. A closure's gradients are taken as they are", text)
    return is_known


def check_same_params(
    rank_partition: RankPartition, moving: Sequence[bool], agreement: GroupAgreement, what: str
) -> None:
    """Compare the parameters of all ranks (samples of large ones) before the first step, which sends those ``moving``.

    Those become equal, to a mixture of the ranks' values: a warning, since torch's class does the same.  Collective.
    Raises: DesyncError on every rank, with the first parameter that differs and that no step makes equal.
    """
    params = [sample_of(flat_like(param.detach(), param)) for param in rank_partition.params]
    rows = _compare(params, f"the parameters before {what}", agreement)[1]
    text = (
        f"{what}: parameters differ between ranks before it: %s. %s: build the model with one seed on all ranks, load "
        "weights on every rank, or wrap the model in DistributedDataParallel, which broadcasts those of the first rank"
    )
    stay = _judge(rank_partition, f"{what}: parameters", {i: row for i, row in rows.items() if not moving[i]})
    if stay:
        raise DesyncError(text % (stay, "No step sends frozen parameters, so that ranks would keep different models"))
    complaint = _judge(rank_partition, f"{what}: parameters", {i: row for i, row in rows.items() if moving[i]})
    if complaint:
        logger.warning(text, complaint, "Each owner sends its own to all, so that the model becomes a mixture of them")


def _compare(
    tensors: Sequence[torch.Tensor | None], what: str, agreement: GroupAgreement, takes_part: bool = True
) -> tuple[bool, dict[int, dict[int, Sketch | None]]]:
    """Return whether ranks had tensors to compare, and the sketches of those that differ, by index and rank."""
    digests = [None if tensor is None else digest_of(tensor) for tensor in tensors]
    summary = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16] if takes_part else ""
    texts = agreement.gather(f"comparing {what}", json.dumps([summary, any(digests)]))
    summaries, are_there = zip(*(json.loads(text) for text in texts), strict=True)
    is_known = any(are_there) and sum(map(bool, summaries)) > 1
    if len({found for found in summaries if found}) <= 1:
        return is_known, {}
    every = [json.loads(text) for text in agreement.gather(f"comparing each of {what}", json.dumps(digests))]
    unlike = [index for index, column in enumerate(zip(*every, strict=True)) if len(set(column)) > 1]
    sketches = {index: astuple(Sketch.of(tensor)) for index in unlike if (tensor := tensors[index]) is not None}
    told = [json.loads(text) for text in agreement.gather(f"comparing some of {what}", json.dumps(sketches))]
    those = [rank for rank, summary in enumerate(summaries) if summary]
    rows = [{rank: Sketch(*found) if (found := told[rank].get(str(i))) else None for rank in those} for i in unlike]
    return is_known, dict(zip(unlike, rows, strict=True))


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    gradient = param.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce()
        return torch.cat([gradient.values().reshape(-1).double(), gradient.indices().reshape(-1).double()])
    return flat_like(gradient.detach(), param)


def _judge(rank_partition: RankPartition, what: str, rows: Mapping[int, dict[int, Sketch | None]]) -> str:
    """Return a text about the first tensor that differs, else ""; warn if only rounding differs."""
    largest = 0.0
    for index, row in rows.items():
        present = [sketch for sketch in row.values() if sketch is not None]
        lacking = [
            owned_slice.owner
            for owned_slice in rank_partition.by_param[index]
            if row.get(owned_slice.owner, present[0]) is None
        ]
        apart = [present[0].distance(sketch) for sketch in present]
        if lacking or not all(distance <= present[0].tolerance for distance in apart):  # nan counts as different
            listing = ", ".join(
                f"none on rank {rank}" if sketch is None else f"of norm {sketch.norm:.6g} on rank {rank}"
                for rank, sketch in list(row.items())[:8]
            )
            owners = f" (rank {', '.join(map(str, lacking))} owns it)" if lacking else ""
            return f"parameter {index} of shape {tuple(rank_partition.params[index].shape)} is {listing}{owners}"
        largest = max(largest, *apart)
    if largest:
        logger.warning(
            "%s are not the same to the bit on all ranks; they differ by %.1e of their norm at most", what, largest
        )
    return ""


# ---- Uneven inputs: how a ZeroRedundancyOptimizer takes part in torch's ``Join`` after a rank's inputs are exhausted.


class ZeroJoinHook(JoinHook):
    """Step with the active ranks.

    ``step`` takes part in their current step, with their gradients; ``end`` ends the exchange of gradients.
    """

    def __init__(self, step: Callable[[], object], end: Callable[[], object]) -> None:
        self._step, self._end = step, end

    def main_hook(self) -> None:
        """Update this rank's partition and send it."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the exchange of gradients: the inputs of all ranks are exhausted."""
        self._end()


def send_joined_gradients(
    rank_partition: RankPartition, agreement: GroupAgreement, is_active: bool, what: str
) -> dict[OwnedSlice, torch.Tensor] | None:
    """Send the gradients of their slices to ranks that have joined, from the first active rank.  Collective.

    Returns: the received gradients; None on active ranks, which have their own.  DDP leaves a joined rank with the
    gradients of its last input; steps on those, as torch's class makes them, would make its partition drift.
    """
    params = rank_partition.params
    told = gather_objects_of(agreement, [param.grad is not None for param in params] if is_active else None, what)
    active = {rank: has_gradient for rank, has_gradient in enumerate(told) if has_gradient is not None}
    if not active:
        return None
    source, has_gradient = next(iter(active.items()))
    received: dict[OwnedSlice, torch.Tensor] = {}
    own = {local.owned_slice: local for local in rank_partition.local_slices}
    for at in rank_partition.slices:
        if at.owner in active or not has_gradient[at.tensor]:
            continue
        param = params[at.tensor]
        dtype = param.grad_dtype or param.dtype
        if agreement.rank == source:
            assert param.grad is not None
            target = elements_of(at, param, param.grad).to(dtype).contiguous()
        elif not is_active and at in own:
            # Fused optimizers pair parameter and gradient elements in memory order, so equal shapes are not enough.
            received[at] = torch.empty_like(own[at].tensor, dtype=dtype, requires_grad=False)
            target = flat_view(received[at])
        else:
            target = torch.empty(at.numel, dtype=dtype, device=param.device)
        broadcast_tensor(target, source, agreement, what)
    return None if is_active else received


class ZeroBackend:
    """Make the steps of a rank's partition.  All methods are collective, except the properties and ``end_join``.

    Attributes:
        local: the partition and its optimizer; replaced when a group is added.
        agreement: where ranks agree and report failures.
        layout: the broadcasts, and where parameters were when they were planned.
        num_steps: steps so far.
        has_state: a step or a load has created state, on this rank or on others.
        consolidated: the state of the last consolidation; None once it is outdated.
        is_joining: inside ``Join``, where ranks without inputs take part in steps.
    """

    def __init__(self, local: LocalOptimizer, agreement: GroupAgreement) -> None:
        self.local, self.agreement = local, agreement
        self.num_steps = 0
        self.has_state = self.is_joining = False
        # Whether parameters were compared with other ranks', and gradients like those of the last step were equal on all.
        self._has_compared = self._knows_gradients = False
        self.consolidated: Consolidated | None = None
        self.layout = make_layout(self.rank_partition)

    @property
    def rank_partition(self) -> RankPartition:
        """This rank's partition."""
        return self.local.rank_partition

    # ---- what changes between steps ----

    def lay_out(self) -> None:
        """Plan the broadcasts for the current parameters."""
        self.layout = make_layout(self.rank_partition)
        self.consolidated = None

    def adopt_last_group(self) -> None:
        """Adopt the param group that users have added."""
        self.local = self.local.with_last_group()
        self._knows_gradients = False
        self.lay_out()

    def refresh(self) -> None:
        """Adapt to changes by users: replaced memory, frozen or unfrozen parameters.

        Raises: StateError if the parameters of param groups have changed.
        """
        layout, params = self.layout, self.rank_partition.params
        moving = moving_of(params)
        if moving != layout.moving or trainable_of(params) != layout.trainable:
            facts = [f"parameter {i} {'changes' if moves else 'stays'} in a step" for i, moves in enumerate(moving)]
            self.agreement.agree("a step after requires_grad changed", [*describe_params(self.local.groups), *facts])
            logger.info("the trainable parameters changed; laying out the broadcasts again")
            self._knows_gradients = False
            self.lay_out()
        elif addresses_of(params) != layout.addresses:
            self.lay_out()
        if not self._has_compared and self.agreement.size > 1 and not are_threads():
            check_same_params(self.rank_partition, moving, self.agreement, f"step() number {self.num_steps + 1}")
            self._has_compared = True
        self.local.members.check(self.local.groups)

    def begin_join(self) -> None:
        """Start to send gradients to ranks whose inputs are exhausted."""
        self.is_joining = self.agreement.size > 1

    def end_join(self) -> None:
        """Stop that: all ranks have inputs again."""
        self.is_joining = False

    def check_gradients(self, what: str, *, has_inputs: bool = True, only_warn: bool = False) -> None:
        """Check, unless known, that ranks have the same gradients; options as for :func:`are_same`.

        Raises: DesyncError on every rank if they differ between ranks.
        """
        if self.agreement.size > 1 and not self._knows_gradients:
            self._knows_gradients = are_same(
                self.rank_partition, self.agreement, what, has_inputs=has_inputs, only_warn=only_warn
            )

    # ---- the step ----

    def step(self, closure: Callable[[], float] | None, kwargs: Mapping[str, Any], is_active: bool = True) -> Any:
        """Make one step; ``is_active`` is False on a rank whose inputs are exhausted (in ``Join``).

        Raises: DesyncError if another rank failed or did not take part, with its rank.
        """
        what = f"step() number {self.num_steps + 1}"
        self.agreement.track.note("step", what)
        received = (
            send_joined_gradients(self.rank_partition, self.agreement, is_active, what) if self.is_joining else None
        )
        self.refresh()
        error: Exception | None = None
        loss: Any = None
        try:
            if closure is None:
                self.check_gradients(what, has_inputs=is_active)
            loss = self._update(closure, kwargs, received)
        except DesyncError:  # all ranks raise it
            raise
        except Exception as found:
            error = found
        try:
            if closure is not None:
                self.agreement.agree(f"the closure of {what}", error=error)
            elif error is not None:
                raised = f"rank {self.agreement.name} raised {type(error).__name__} in {what}: {error}"
                self.agreement.report_failure(raised, may_be_caught=True)
                raise error
        finally:
            del error
        # Broadcasts do not bump version counters; bump them so that a stale backward raises on every rank.
        torch.autograd.graph.increment_version(list(self.rank_partition.params))
        for pending in launch_broadcasts(self.layout.broadcasts, self.agreement, what):
            pending.wait()
        self.mark_stepped()
        return loss

    def mark_stepped(self) -> None:
        """Count a step, after which consolidated state is outdated."""
        self.num_steps += 1
        self.mark_loaded()

    def mark_loaded(self) -> None:
        """Record that the state has changed."""
        self.has_state = True
        self.consolidated = None

    def mark(self) -> Callable[[], None]:
        """Return a function that restores the step count and what is known of the state."""
        return as_they_are([self], "num_steps", "has_state", "consolidated")

    def renew(self) -> None:
        """Forget what is known of other ranks, after all have restored the state before a step."""
        self.agreement.renew()
        self._knows_gradients = False

    def _update(
        self,
        closure: Callable[[], float] | None,
        kwargs: Mapping[str, Any],
        received: Mapping[OwnedSlice, torch.Tensor] | None,
    ) -> Any:
        if closure is None:
            with attached(self.rank_partition, received):
                return self.local.step(None, kwargs)
        with ExitStack() as attachment:

            def closure_then_attach() -> float:
                attachment.close()
                result = closure()
                self.check_gradients(f"the closure of step {self.num_steps + 1}", only_warn=True)
                attachment.enter_context(attached(self.rank_partition, received))
                return result

            return self.local.step(closure_then_attach, kwargs)

    def consolidate(self, to: int) -> None:
        """Stream the full state to group rank ``to``, unless it is there already."""
        self.agreement.track.note("consolidation", f"to rank {to}")
        steps = f"{self.num_steps} step(s) so far"
        needed = self.consolidated is None or self.consolidated.to != to
        state = "the state is sent" if needed else f"rank {to} has the state: it was loaded, or consolidated before"
        self.agreement.agree(f"consolidate_state_dict(to={to})", [steps, state, *describe_params(self.local.groups)])
        if to not in range(size := self.agreement.size):
            raise ConfigError(f"consolidate_state_dict: to is {to}, expected a rank of the group, 0 to {size - 1}")
        if needed:
            self.local.push_options()
            self.consolidated = consolidate(self.local, self.agreement, to)


def attached(
    rank_partition: RankPartition, received: Mapping[OwnedSlice, torch.Tensor] | None
) -> AbstractContextManager[None]:
    """Return a context in which the local optimizer's tensors have their gradients; those that are parameters have them.

    ``received``: gradients from another rank, instead of this rank's.
    """
    slices = rank_partition.local_slices
    if received is not None:
        return with_gradients((local, received.get(local.owned_slice)) for local in slices)
    views = (local for local in slices if not local.is_param)
    return with_gradients(
        (local, None if local.param.grad is None else gradient_for(local, local.param.grad)) for local in views
    )


# ---- ZeroRedundancyOptimizer: every rank stores and updates the optimizer state of its partition of the parameters (ZeRO-1).


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Wrap an optimizer class so that each rank stores and updates about 1/W of its state; parameters are replicated.

    Args:
        params: parameters or parameter groups, the same on all ranks.
        optimizer_class: the class of the local optimizer, e.g. ``torch.optim.AdamW``.
        process_group: the ranks that share the state (default: all).
        parameters_as_bucket_view: accepted, as torch has it; parameters are sent from where they lie, small ones packed.
        overlap_with_ddp: the step happens in DDP's backward; register a hook made by
            :func:`~shardwise.zero.overlap.hook_with_zero_step`.
        partition: "whole" gives each tensor one owner; "even" gives each rank the same number of elements, for
            optimizers that treat every element separately (checked at construction).
        mixed_dtypes: allow several dense dtypes.
        **defaults: arguments of ``optimizer_class``.

    Attributes:
        rank, world_size: this rank in ``process_group``, and the number of its ranks.
        initialized: the constructor has ended.
        defaults: those of the local optimizer.

    Construction is collective.  An error on one rank raises DesyncError on all, with that rank and the cause.
    Raises: ConfigError for wrong arguments, and what torch's optimizers raise for parameters that are none; DesyncError if
    ranks pass different parameters.

    Example:
        >>> ddp = DistributedDataParallel(model)  # doctest: +SKIP
        >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP
        >>> ddp(inputs).sum().backward()  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """

    _backend: ZeroBackend

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Partition = "whole",
        mixed_dtypes: bool = False,
        **defaults: Any,
    ) -> None:
        Joinable.__init__(self)
        self.initialized = False
        agreement = open_agreement(process_group, "ZeroRedundancyOptimizer")
        self.process_group, self.rank, self.world_size = agreement.group, agreement.rank, agreement.size
        self.parameters_as_bucket_view, self.overlap_with_ddp = parameters_as_bucket_view, overlap_with_ddp
        self._mixed_dtypes = mixed_dtypes
        self._groups: list[dict[str, Any]] = []
        note("init", "ZeroRedundancyOptimizer")

        def build() -> list[str]:
            plain = checked_optimizer_class(optimizer_class, overlap_with_ddp)
            Optimizer.__init__(self, params, defaults)
            check_dense(flatten_groups(self._groups), mixed_dtypes)
            check_partition(partition, plain, self._groups, self.world_size)
            rank_partition = make_rank_partition(self._groups, partition, self.world_size, self.rank)
            local = make_local_optimizer(rank_partition, self._groups, lambda groups: plain(groups, **defaults))
            self.defaults = local.optim.defaults  # schedulers read the optimizer's options there
            self._backend = ZeroBackend(local, agreement)
            return [f"partition={partition!r}, {optimizer_class.__name__}", *describe_params(self._groups)]

        agree_on(agreement, "ZeroRedundancyOptimizer(...)", build)
        watch_device(self._groups[0]["params"][0].device)
        self.initialized = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; existing parameters keep their owners.  Collective.

        Raises: DesyncError on all ranks if a rank does not call it or passes something else.
        """
        if not self.initialized:
            self._append_group(param_group)
            return

        count = len(self._groups)

        def add() -> list[str]:
            self._backend.local.members.check(self._groups)
            self._append_group(param_group)
            check_dense(flatten_groups(self._groups), self._mixed_dtypes)
            return describe_params(self._groups)

        try:
            agree_on(self._backend.agreement, "add_param_group", add)
        except BaseException:
            del self._groups[count:]
            raise
        self._backend.adopt_last_group()

    def _append_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and "params" not in param_group:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "Each parameter group passed-in via `params` must have a 'params' key mapping to the parameters "
                f"in the group; found the keys {sorted(param_group)}"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:  # pyright: ignore
        """Update this rank's partition, then send every rank's partition to all.  Collective.

        Gradients must be equal on all ranks, as DDP makes them.  ``closure`` and ``kwargs`` go to the local optimizer,
        whose result is returned.  With ``overlap_with_ddp`` it only warns.
        Raises: DesyncError if another rank failed or did not take part, with its rank.
        """
        if self.overlap_with_ddp:
            logger.warning("`step()` should not be included in the training loop when `overlap_with_ddp=True`")
            return None
        Join.notify_join_context(self)
        return self._backend.step(closure, kwargs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; return the norm before scaling.

        Gradients must be equal on all ranks, as DDP makes them.  Arguments are those of ``torch.nn.utils.clip_grad_norm_``.

        Raises: DesyncError if gradients differ between ranks; RuntimeError, before anything is scaled, if
        ``error_if_nonfinite`` and the norm is nan or infinite; StateError with ``overlap_with_ddp``, whose step is in
        backward.
        """
        if self.overlap_with_ddp:
            raise StateError(
                "with overlap_with_ddp=True the step has been made when backward returns; make the optimizer without "
                "overlap to clip, or clip in the communication hook"
            )
        refuse_fixed_sums([param for group in self.param_groups for param in group["params"]])
        backend = self._backend
        backend.check_gradients(f"clip_grad_norm_() before step {backend.num_steps + 1}")
        return clip_grad_norm_(backend.rank_partition.params, max_norm, norm_type, error_if_nonfinite)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the full state to group rank ``to``, tensor by tensor, for :meth:`state_dict` there.  Collective.

        Extra memory: the state itself on ``to``, the largest tensor elsewhere.  It sends nothing if there was no step
        since the last call for the same rank.
        """
        self._backend.consolidate(to)

    def state_dict(self) -> dict[str, Any]:
        """Return the full state as the plain optimizer would, on the rank that it was consolidated to.

        Raises: StateError (a RuntimeError) on other ranks, or if there was a step since.
        """
        consolidated = self._backend.consolidated
        if consolidated is None or consolidated.state is None:
            raise StateError(
                f"Optimizer state has not been consolidated on this rank since the last step. Please call "
                f"`consolidate_state_dict(to={self.rank})` on all ranks beforehand if you meant to save the global "
                "state, or save `.sharded()` with torch.distributed.checkpoint without consolidation."
            )
        call_hooks(self, "state_dict_pre")
        return call_hooks(self, "state_dict_post", whole_state_dict(consolidated.state, self._groups))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a full state (of this class, torch's, or the plain optimizer); this rank copies its partition.

        Not collective; ``state_dict`` does not change.  Raises: ConfigError if groups do not match.
        """
        load_rank_partition(self._backend.local, call_hooks(self, "load_state_dict_pre", dict(state_dict)))
        self._backend.mark_loaded()
        call_hooks(self, "load_state_dict_post")

    def sharded(self, names: Mapping[str, torch.Tensor] | None = None, loading: bool = False) -> ShardedState:
        """Return this rank's partition of the state for ``torch.distributed.checkpoint``; see :class:`ShardedState`."""
        return ShardedState(self._backend.local, self._backend.mark_loaded, names, loading)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that takes part in steps on ranks without inputs; ``kwargs`` are not used.

        From here to the end of the ``Join`` every step costs one more small exchange: active ranks send reduced
        gradients to the ranks that have joined, which could not update their partition otherwise.
        """
        backend = self._backend
        backend.begin_join()
        if self.overlap_with_ddp:  # DDP's hook steps, in backward
            return ZeroJoinHook(lambda: None, backend.end_join)
        return ZeroJoinHook(lambda: backend.step(None, {}, is_active=False), backend.end_join)

    def __getattr__(self, name: str) -> Any:
        is_removed = name in ("reduce_gradients", "no_sync", "wait_for_params")
        hint = ", which was for ZeRO-2: shard_model(model, strategy='zero2') and a plain optimizer do that" * is_removed
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._backend.rank_partition.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group

    @property
    def partition(self) -> Partition:
        """How tensors are divided: "whole" or "even"."""
        return self._backend.rank_partition.partition

    @property
    def optim(self) -> Optimizer:
        """The local optimizer, which has this rank's slices and their state."""
        return self._backend.local.optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, of full parameters; the local optimizer follows their options."""
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Iterable[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._groups[:] = value  # keep the list: the local optimizer references it

    @property
    def state(self) -> Any:
        """The state on this rank, of each parameter; empty for parameters of other owners, and for all before the first step.

        torch's ``get_optimizer_state_dict`` steps on zero gradients if there is no state, so all ranks must have some.
        Raises: StateError if entries are added or removed.
        """
        return HeldState(self._backend.local.states()) if self._backend.has_state else BlankState()

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.initialized:  # torch's constructor assigns it too
            refuse_other_state()


def zero_backend(optimizer: ZeroRedundancyOptimizer) -> ZeroBackend:
    """Return the backend that steps ``optimizer`` on the partitions of all ranks."""
    return optimizer._backend  # pyright: ignore[reportPrivateUsage]


# ---- The state of an optimizer of any API, as checkpoints and transactions read and restore it.


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """The state of one optimizer: what there is, and how to put it back.

    Attributes:
        outer: the optimizer of the user.  inner: the one that updates; the same for a plain optimizer.
        state_dict, load_state_dict: by number of the parameter; of sharded ones each rank has its part.
        places: returns, by number, the parameters whose state this rank has: a tensor that their state is like, or a slice.
        mark: saves what is neither a tensor nor an option; returns a function that restores it.
        renew: runs on every rank after a step is undone, even if this rank has not reached the step.
    """

    outer: Optimizer
    inner: Optimizer
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    places: Callable[[], Mapping[int, torch.Tensor | LocalSlice]]
    mark: Callable[[], Callable[[], None]] = lambda: lambda: None
    renew: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerState:
        """Return the state of ``optimizer``."""
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            zero, state = zero_backend(optimizer), optimizer.sharded()
            slices = zero.rank_partition.local_slices
            places = {own.owned_slice.tensor: own.param if own.is_param else own for own in slices}
            put, load = state.state_dict, state.load_state_dict
            return cls(optimizer, optimizer.optim, put, load, lambda: places, zero.mark, zero.renew)
        if isinstance(optimizer, ShardedOptimizer):
            backend, places = optimizer_backend(optimizer), partial(state_places, optimizer)
            put, load = partial(optimizer.state_dict, "indexed"), partial(optimizer.load_state_dict, adopt=True)
            return cls(optimizer, backend.optimizer, put, load, places, backend.mark)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return cls(
            optimizer, optimizer, optimizer.state_dict, optimizer.load_state_dict, lambda: dict(enumerate(params))
        )

    def entries(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the number and the state of each parameter that has some.  Collective if owners of matrices have it.

        Raises: ConfigError for state of something else than a parameter.
        """
        for number, values in self.state_dict()["state"].items():
            if not isinstance(number, int):
                raise ConfigError(f"state of {number!r} belongs to no parameter; it cannot be named")
            yield number, values
