"""Average gradients to their owners in runs of parameters: after backward, or during it.

Which runs are sent during a backward depends on what the ranks agreed to average in the previous step.  Runs are sent
in a fixed order, the last parameters first.  So every rank makes the same calls, in whatever order its gradients
arrive.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.collectives.buffer_pool import BufferPool, suballocate
from shardwise.collectives.owned import Owned, ReduceHandle, reduce_to_owners
from shardwise.consistency.agreement import GroupAgreement
from shardwise.consistency.store import Sketch, digest_of, sample_of
from shardwise.errors import DesyncError, StateError
from shardwise.fsdp.clip import GradientOwner, Limit, OwnedGradient, make_owned
from shardwise.layout import OwnedSlice
from shardwise.zero.partition import LocalSlice, RankPartition, elements_of, flat_like, gradient_for, with_gradients

# ---- Checks, once before the first step, that all ranks have the same gradients and the same parameters.
# Each owner steps on its own copy of the gradients. Without averaging, every owner would silently train on another
# batch. Each owner then sends its values to all, so parameters that differ at the start would make the model a mixture.
# Ranks therefore compare digests of the bits through the store, at the first step only.
#
# All-reduces return equal bits (every rank gets sums that one rank computed), but programs may change them: ranks on
# different processors clip with other last bits. So gradients with different bits are compared by random projections,
# and such small differences only cause a warning: owners' values are sent to all anyway.

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
            "wrap the model in DistributedDataParallel, or call reduce_gradients() before step()"
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
    sketches = {index: Sketch.of(tensor).told for index in unlike if (tensor := tensors[index]) is not None}
    texts = agreement.gather(f"comparing some of {what}", json.dumps(sketches))
    rows = [{rank: _sketch_in(text, index) for rank, text in enumerate(texts) if summaries[rank]} for index in unlike]
    return is_known, dict(zip(unlike, rows, strict=True))


def _sketch_in(text: str, index: int) -> Sketch | None:
    found = json.loads(text).get(str(index))
    return None if found is None else Sketch(*found)


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    gradient = param.grad
    if gradient is None or isinstance(gradient, OwnedGradient):
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


COPY_BELOW_BYTES = 8 * 1024  # a copy of this size is as fast as a new storage on the same memory
MOST_IN_FLIGHT = 4  # messages in flight; each is copied once to send and once to receive

OwnerRef = Callable[[], GradientOwner | None]
Presence = tuple[torch.dtype | None, ...]


def own_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's unaveraged gradient since the last averaging."""
    gradient = param.grad
    return gradient.fresh if isinstance(gradient, OwnedGradient) else gradient


def is_whole(local_slices: Sequence[LocalSlice]) -> bool:
    """Return True if ``local_slices``, those of one parameter, are a single slice that covers it."""
    return len(local_slices) == 1 and local_slices[0].owned_slice.numel == local_slices[0].param.numel()


@dataclass(frozen=True, slots=True, eq=False)
class AveragingContext:
    """The context of an averaging.

    Attributes:
        staging: returns the pool for message buffers on a device.
        owner_ref: weak reference to the optimizer, for the gradients that it owns.
    """

    rank_partition: RankPartition
    agreement: GroupAgreement
    staging: Callable[[torch.device], BufferPool]
    owner_ref: OwnerRef


@dataclass(frozen=True, slots=True)
class _SentGradient:
    """What ``.grad`` was when its gradient was sent, and what replaced it.

    ``before``: an earlier average, to add to.  ``left``: None, or a placeholder while the average is in flight.
    """

    before: OwnedGradient | None
    dtype: torch.dtype
    left: OwnedGradient | None


@dataclass(slots=True, eq=False)
class Averaging:
    """One averaging, from its first message until :meth:`end`.

    Attributes:
        averages: received averages of this rank's slices.
        early: number of runs sent before all gradients had arrived.
    """

    context: AveragingContext
    what: str
    early: int = 0
    averages: dict[OwnedSlice, torch.Tensor] = field(default_factory=dict[OwnedSlice, torch.Tensor])
    _sent: dict[int, _SentGradient] = field(default_factory=dict[int, _SentGradient])
    _in_flight: list[tuple[list[OwnedSlice], ReduceHandle]] = field(
        default_factory=list[tuple[list[OwnedSlice], ReduceHandle]]
    )

    def presence(self) -> Presence:
        """Return the dtype of each parameter's gradient, sent or to be sent; None for parameters without one."""
        found: list[torch.dtype | None] = []
        for index, param in enumerate(self.context.rank_partition.params):
            gradient, sent = own_gradient(param), self._sent.get(index)
            found.append(gradient.dtype if gradient is not None else sent.dtype if sent is not None else None)
        return tuple(found)

    def again(self) -> tuple[int, ...]:
        """Return the parameters that got another gradient after theirs was sent."""
        params = self.context.rank_partition.params
        return tuple(index for index in self._sent if own_gradient(params[index]) is not None)

    def send_early(self, indices: Sequence[int]) -> None:
        """Send the gradients of a run during backward; ``.grad`` then is a placeholder for the average."""
        self.early += 1
        while len(self._in_flight) >= MOST_IN_FLIGHT or (self._in_flight and self._in_flight[0][1].is_done):
            self._receive()
        self._send(indices, leaves_placeholder=True)

    def end(self) -> None:
        """Send the remaining gradients, and replace all gradients by averages.

        The next message is packed while the one before is in flight.
        """
        own = map(own_gradient, self.context.rank_partition.params)
        dtypes = tuple(None if gradient is None else gradient.dtype for gradient in own)
        for indices in _messages(self.context.rank_partition, dtypes):
            if len(self._in_flight) > 1:
                self._receive()
            self._send(indices)
        self.receive_all()
        rank_partition = self.context.rank_partition
        for index, sent in self._sent.items():
            param = rank_partition.params[index]
            if param.grad is not sent.left:
                continue  # user code has dropped or replaced it
            local_slices = rank_partition.local_by_param[index]
            parts = [self.averages[local.owned_slice] for local in local_slices]
            if sent.before is not None:
                parts = [old.add_(new) for old, new in zip(sent.before.parts, parts, strict=True)]
            dtype = param.grad_dtype or sent.dtype  # the dtype may have changed after the forward
            parts = [part.to(dtype) for part in parts]
            param.grad = make_owned(param, parts, is_whole(local_slices), self.context.owner_ref, dtype)

    def receive_all(self) -> None:
        """Wait for all messages in flight."""
        while self._in_flight:
            self._receive()

    def _send(self, indices: Sequence[int], leaves_placeholder: bool = False) -> None:
        context = self.context
        self._forget_dropped(indices)
        slices = context.rank_partition.slices_of(indices)
        owned = [self._owned(owned_slice) for owned_slice in slices]
        dtype, device = owned[0].tensor.dtype, owned[0].tensor.device
        pending = reduce_to_owners(owned, context.agreement, self.what, context.staging(device))
        del owned
        self._in_flight.append((slices, pending))
        for index in indices:  # free what other ranks own while the remaining messages are in flight
            param = context.rank_partition.params[index]
            gradient = param.grad
            if index in self._sent and isinstance(gradient, OwnedGradient):
                gradient.fresh = None  # it was sent for the second time
                continue
            before = gradient if isinstance(gradient, OwnedGradient) else None
            left = None
            if leaves_placeholder:
                left = (
                    before
                    if before is not None
                    else make_owned(param, [], False, context.owner_ref, param.grad_dtype or dtype)
                )
                left.is_sent = True
            if before is not None:
                before.fresh = None
            self._sent[index] = _SentGradient(before, dtype, left)
            param.grad = left

    def _forget_dropped(self, indices: Sequence[int]) -> None:
        rank_partition = self.context.rank_partition
        dropped = [
            index
            for index in indices
            if index in self._sent and self._sent[index].left is not rank_partition.params[index].grad
        ]
        if dropped:
            self.receive_all()
        for index in dropped:
            del self._sent[index]
            for local in rank_partition.local_by_param[index]:
                self.averages.pop(local.owned_slice, None)

    def _owned(self, owned_slice: OwnedSlice) -> Owned:
        param = self.context.rank_partition.params[owned_slice.tensor]
        gradient = own_gradient(param)
        if gradient is None:
            raise StateError(f"{self.what}: parameter {owned_slice.tensor} lost its gradient meanwhile")
        return Owned(owned_slice.owner, elements_of(owned_slice, param, gradient))

    def _receive(self) -> None:
        slices, pending = self._in_flight.pop(0)
        averages, start = pending.wait(), 0
        for owned_slice in slices:
            if owned_slice.owner != self.context.rank_partition.rank:
                continue
            param = self.context.rank_partition.params[owned_slice.tensor]
            shape, stride = (
                (param.shape, param.stride()) if owned_slice.numel == param.numel() else ((owned_slice.numel,), (1,))
            )
            if owned_slice.numel * averages.element_size() < COPY_BELOW_BYTES:
                window = averages[start : start + owned_slice.numel].clone().as_strided(shape, stride)
            else:
                window = suballocate(averages, start, shape, None if param.is_contiguous() else stride)
            start += owned_slice.numel
            if owned_slice in self.averages:
                self.averages[owned_slice] += window
            else:
                self.averages[owned_slice] = window.detach()


def _messages(rank_partition: RankPartition, dtypes: Presence) -> Iterator[list[int]]:
    """Yield the parameters of each message, the last run first: those of a run whose gradients have one dtype and device."""
    for run in reversed(rank_partition.runs):
        kinds: dict[tuple[torch.dtype | None, torch.device], list[int]] = {}
        for index in run:
            if dtypes[index] is not None:
                kinds.setdefault((dtypes[index], rank_partition.params[index].device), []).append(index)
        yield from kinds.values()


class EarlySends:
    """Send each run of gradients as soon as backward has completed it; one object per optimizer.

    ``begin`` returns the open averaging, or starts one; the reference to it dies with the optimizer.

    Attributes:
        is_paused: gradients of this backward stay in place (``no_sync``), so that a later one adds to them.
    """

    def __init__(self, begin: weakref.WeakMethod[Callable[[], Averaging]]) -> None:
        self.is_paused = False
        self._begin = begin
        self._rank_partition: RankPartition | None = None
        self._handles: dict[int, RemovableHandle] = {}
        self._expected: list[tuple[int, ...]] = []
        self._dtypes: Presence = ()
        self._place: dict[int, int] = {}
        self._missing: list[set[int]] = []
        self._next = 0

    def listen(self, rank_partition: RankPartition) -> None:
        """Register hooks on the trainable parameters of ``rank_partition``; nothing is expected before :meth:`expect`."""
        self._rank_partition = rank_partition
        self.expect(())
        for index, param in enumerate(rank_partition.params):
            if index not in self._handles and param.is_leaf and param.requires_grad:
                self._handles[index] = param.register_post_accumulate_grad_hook(_make_hook(weakref.ref(self), index))

    def __del__(self) -> None:
        for handle in self._handles.values():
            handle.remove()

    def expect(self, presence: Presence) -> None:
        """Send, in the next backwards, the gradients that ranks agreed they had in this step; nothing for ()."""
        self._dtypes = presence
        assert self._rank_partition is not None  # listen() comes first
        self._expected = [*map(tuple, _messages(self._rank_partition, presence))] if presence else []
        self.expect_again()

    def expect_again(self) -> None:
        """Restart with no gradient arrived."""
        self._place = {index: place for place, indices in enumerate(self._expected) for index in indices}
        self._missing = [set(indices) for indices in self._expected]
        self._next = 0

    def arrived(self, index: int) -> None:
        """Record that ``.grad`` of parameter ``index`` is set; send the runs that are complete."""
        place = self._place.get(index)
        if self.is_paused or place is None or index not in self._missing[place]:
            return
        self._missing[place].discard(index)
        while self._next < len(self._expected) and not self._missing[self._next]:
            indices = self._expected[self._next]
            if not self._are_as_expected(indices):
                self._place = {}  # end() checks and sends what is not sent now
                return
            begin = self._begin()
            assert begin is not None  # the owner of this object is alive, and owns it
            self._next += 1
            begin().send_early(indices)

    def _are_as_expected(self, indices: Sequence[int]) -> bool:
        assert self._rank_partition is not None
        for index in indices:
            gradient = own_gradient(self._rank_partition.params[index])
            if gradient is None or gradient.dtype != self._dtypes[index] or gradient.layout != torch.strided:
                return False
        return True


def _make_hook(sends_ref: weakref.ref[EarlySends], index: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(_: torch.Tensor) -> None:
        sends = sends_ref()
        if sends is not None:
            sends.arrived(index)

    return on_gradient


# ---- The gradients of a partition: compared between ranks, attached to the local optimizer, clipped by the global
# norm.


def _describe_presence(rank_partition: RankPartition, presence: Sequence[torch.dtype | None]) -> list[str]:
    """Return a description of ``presence``, one line per parameter."""
    return [
        f"parameter {index} of shape {tuple(param.shape)} has {'no gradient' if dtype is None else f'one of {dtype}'}"
        for index, (param, dtype) in enumerate(zip(rank_partition.params, presence, strict=True))
    ]


@dataclass(slots=True)
class KnownGradients:
    """What ranks have agreed on about each other's gradients, so that not every step has to.

    Attributes:
        is_compared: gradients like those of the last step were equal on all ranks.
        presences: agreed combinations of: the parameters with gradients to average, those sent twice, and the number of
            messages sent early.
    """

    is_compared: bool = False
    presences: set[tuple[Presence, tuple[int, ...], int]] = field(
        default_factory=set[tuple[Presence, tuple[int, ...], int]]
    )

    def check(
        self,
        rank_partition: RankPartition,
        agreement: GroupAgreement,
        what: str,
        *,
        has_inputs: bool = True,
        only_warn: bool = False,
    ) -> None:
        """Check, unless known, that a step may use the gradients; options as for :func:`are_same`.

        Raises: DesyncError on every rank if they differ between ranks; StateError if only some are averaged.
        """
        if agreement.size > 1 and not check_averaged(rank_partition, what) and not self.is_compared:
            self.is_compared = are_same(rank_partition, agreement, what, has_inputs=has_inputs, only_warn=only_warn)

    def agree_on_presence(self, run: Averaging, presence: Presence) -> None:
        """Agree with the other ranks on which gradients to average.

        Raises: DesyncError on every rank if ranks have gradients of different parameters.
        """
        rank_partition, again = run.context.rank_partition, run.again()
        key = (presence, again, run.early)
        if key not in self.presences:
            facts = _describe_presence(rank_partition, presence)
            facts += [f"{run.early} messages were sent in backward", f"parameters {again} got gradients after that"]
            run.context.agreement.agree(run.what, facts)
            self.presences.add(key)


def mark_spent(rank_partition: RankPartition, owner_ref: OwnerRef) -> None:
    """Mark all gradients as used by a step in backward, and free those that this rank does not have in full."""
    for index, param in enumerate(rank_partition.params):
        gradient = param.grad
        if gradient is None:
            continue
        local_slices = rank_partition.local_by_param[index]
        here = rank_partition.partition == "whole" and is_whole(local_slices)
        # make_owned gets the gradient for its shape: the parameter's new values may be in flight
        owned = make_owned(gradient, [gradient] if here else [], here, owner_ref, gradient.dtype)
        owned.is_spent = True
        param.grad = owned


def attached(
    rank_partition: RankPartition, received: Mapping[OwnedSlice, torch.Tensor] | None = None
) -> AbstractContextManager[None]:
    """Return a context in which the local optimizer's tensors have plain gradients.

    ``received``: gradients from another rank, instead of this rank's.
    """
    slices = rank_partition.local_slices
    if received is not None:
        return with_gradients((local, received.get(local.owned_slice)) for local in slices)
    chosen = (each for each in slices if not each.is_param or isinstance(each.param.grad, OwnedGradient))
    return with_gradients((local, _plain(rank_partition, local)) for local in chosen)


def _plain(rank_partition: RankPartition, local: LocalSlice) -> torch.Tensor | None:
    gradient = local.param.grad
    if gradient is None:
        return None
    if not isinstance(gradient, OwnedGradient):
        return gradient_for(local, gradient)
    parts = gradient.usable_parts()
    if gradient.is_whole:
        return gradient_for(local, parts[0])
    return parts[rank_partition.local_by_param[local.owned_slice.tensor].index(local)]


def check_averaged(rank_partition: RankPartition, what: str) -> bool:
    """Return True if gradients are averaged to their owners, False if they are plain or there are none.

    Raises: StateError if some arrived after the averaging; a step would skip them or use them as if they were averages.
    """
    if OwnedGradient not in {type(param.grad) for param in rank_partition.params}:
        return False
    for index, param in enumerate(rank_partition.params):
        if isinstance(param.grad, OwnedGradient):
            param.grad.usable_parts()
        elif param.grad is not None:
            raise StateError(
                f"{what}: parameter {index} of shape {tuple(param.shape)} has a gradient of this rank only, others have "
                "been averaged to their owners; call reduce_gradients() after the last backward"
            )
    return True


def clip_gradients(rank_partition: RankPartition, owner: GradientOwner | None, limit: Limit) -> torch.Tensor:
    """Scale all gradients to ``limit``; each rank reads only its own elements.  Return the norm before scaling.

    ``owner`` sums the norm over ranks; then plain gradients must be equal on all ranks.  None: use local gradients
    only.
    """
    gradients = [param.grad for param in rank_partition.params if param.grad is not None]
    usable = {id(each): each.usable_parts() for each in gradients if isinstance(each, OwnedGradient)}
    counted: list[torch.Tensor] = gradients
    if owner is not None:
        plain = ((local, local.param.grad) for local in rank_partition.local_slices)
        own = [gradient_for(local, each) for local, each in plain if each is not None and id(each) not in usable]
        counted = own + [part for parts in usable.values() for part in parts]
    power = limit.power(counted, rank_partition.params[0].device)
    if owner is not None:
        power = owner.sum_over_ranks(power, limit.is_max)
    scaled = [part for each in gradients for part in usable.get(id(each), [each])]
    return limit.hold(power, scaled, [gradient.dtype for gradient in gradients])
