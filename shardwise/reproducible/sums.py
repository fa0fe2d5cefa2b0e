"""Gradients are summed over microbatches and ranks along one tree, in place of the sums of a backend.

A rank adds its microbatches locally, unsharded, where the tree allows it.  After its last one it sends the partial sums of
each shard to the shard's owner, which adds them in the order of the tree: one exchange per unit and step.  In all other
microbatches units send nothing and deliver -0.0, which changes no sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise import torch_private
from shardwise.collectives.c10d import GroupCommunicator, StreamWork
from shardwise.collectives.owned import Expected, exchange, ranks_of_group, sum_bytes
from shardwise.collectives.routes import Handle, LeftOut, PassTracker, Scale, ScatterEnds, SumContents
from shardwise.collectives.streams import PooledBuffer
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.clip import Limit
from shardwise.fsdp.mesh import MeshAxes
from shardwise.layout import Bucket, ChunkShard, align
from shardwise.reproducible.tree import BatchPlace, Counter, Node, most_parts

_NOTHING = -0.0  # the number that changes no sum, whatever the sign of a zero
_CHUNK = 1 << 17  # elements that are added at once, so that sums of several terms stay in the cache
_ALIGNMENT = 64

Summed = tuple[str, torch.dtype]  # what is summed, as ``ScatterEnds.label`` says, and its dtype


class PartialSum(NamedTuple):
    """A partial sum: a 1-D tensor, and the buffer that it lies in."""

    tensor: torch.Tensor
    buffer: PooledBuffer

    def add(self, other: PartialSum) -> PartialSum:
        """Add ``other`` to this one, and release it."""
        self.tensor.add_(other.tensor)
        other.buffer.release()
        return self


class GroupSums:
    """The partial sums of one unit, by what is summed.

    Args:
        place: the microbatches of this rank.
        is_sharded: a reduce-scatter over shards comes first.

    Attributes:
        most_parts: see :class:`shardwise.collectives.routes.OrderedSums`.
        sharded: sums over the ranks of this replica that its replicas have not received yet.
    """

    def __init__(self, place: BatchPlace, is_sharded: bool) -> None:
        self.place, self.is_sharded = place, is_sharded
        self.most_parts = max(most_parts(place.of_shards()), most_parts(place.of_replicas()))
        self._counters: dict[Summed, Counter[PartialSum]] = {}
        self.sharded: dict[Summed, list[tuple[Node, torch.Tensor]]] = {}

    def of_copy(self) -> GroupSums:
        """Return the sums of a copy of the parameters: they are refused until a ``Reproducible`` of its own takes them."""
        return GroupSums(replace(self.place, number=None), self.is_sharded)

    def communicator(self, way: GroupCommunicator, passes: PassTracker) -> GroupCommunicator:
        """Return the communicator that sums over the ranks of ``way``."""
        return TreeCommunicator(self, way, passes)

    @property
    def is_last(self) -> bool:
        """True in the last microbatch of this rank."""
        return self.place.number == self.place.own[-1]

    def push(self, key: Summed, part: PartialSum) -> None:
        """Take the gradients of the microbatch that runs.  Raises: StateError unless it is the next one of ``key``."""
        counter = self._counters.setdefault(key, Counter(PartialSum.add, self.place.own.start))
        if self.place.number != counter.stop:
            part.buffer.release()
            raise StateError(_why_not_next(key[0], self.place.number, counter.stop))
        counter.push(Node(counter.stop, 1), part)

    def take(self, key: Summed) -> list[PartialSum]:
        """Return the partial sums of all microbatches of this rank, and forget them."""
        parts, self._counters[key].parts = self._counters[key].parts, []
        return [part for _, part in parts]

    def end(self) -> None:
        """Check that everything was reduced in every microbatch.  Raises: StateError."""
        stop = self.place.own.stop
        for (label, _), counter in self._counters.items():
            if counter.stop != stop:
                raise StateError(_why_not_next(label, stop, counter.stop))

    def clear(self) -> None:
        """Forget the sums of a step that did not end."""
        for counter in self._counters.values():
            for _, part in counter.parts:
                part.buffer.release()
        self._counters, self.sharded = {}, {}


def _why_not_next(label: str, number: int | None, expected: int) -> str:
    if number is None:
        return (
            f"gradients of {label} were reduced outside of Reproducible.microbatches(); run each backward in the loop over "
            "them, which says which microbatch it belongs to. A copy of a model takes a Reproducible of its own"
        )
    if number < expected:
        return (
            f"gradients of {label} were reduced twice in microbatch {number}; run all of its backwards but the last under "
            "shardwise.policy(model, sync=False), or add its losses"
        )
    return (
        f"gradients of {label} were not reduced in microbatch {expected}: each microbatch takes one backward with sync, which "
        "gives the same parameters a gradient. Call backward in the loop over microbatches()"
    )


# ---- The exchange of partial sums, and the communicator that makes it.


class _Exchange:
    """Both ends of the exchange of partial sums (``ScatterEnds``): a section has a slice of each partial sum of a rank.

    Args:
        contents: what is summed.
        parts: the partial sums of this rank, in the order of ``nodes`` of its rank; each has a slice for every rank.
        nodes: the nodes of every rank.
        target, deliver: as those of ``ScatterEnds``.
        use: ``use(partial sums of all ranks, target)`` adds them.
    """

    def __init__(
        self,
        contents: ScatterEnds | SumContents,
        parts: Sequence[PartialSum],
        nodes: Sequence[tuple[Node, ...]],
        target: Callable[[], torch.Tensor],
        deliver: Callable[[torch.Tensor], None],
        use: Callable[[list[tuple[Node, torch.Tensor]], torch.Tensor], None],
    ) -> None:
        self.label, self.params, self.dtype = contents.label, contents.params, parts[0].tensor.dtype
        self.target, self._deliver = target, deliver
        self._parts, self._nodes, self._use = parts, nodes, use
        self._numel = parts[0].tensor.numel() // len(nodes)
        section_numel = most_parts(nodes) * self._numel
        # One small tensor, and no padding to speak of: transports copy the section as a whole.
        small = ChunkShard((len(nodes),), 0, len(nodes))
        self.layout = Bucket((small,), (0,), section_numel, (0,), section_numel * len(nodes))

    @property
    def section_numel(self) -> int:
        return self.layout.section_numel

    def slices(self) -> list[list[torch.Tensor]]:
        """Return what each rank is to get of each partial sum."""
        return [[part.tensor.split(self._numel)[rank] for part in self._parts] for rank in range(len(self._nodes))]

    def fill(self, packed: torch.Tensor) -> None:
        sections = packed.view(len(self._nodes), -1, self._numel)
        for number, part in enumerate(self._parts):
            sections[:, number].copy_(part.tensor.view(-1, self._numel))
        self.drop()

    def full_parts(self, rank: int) -> list[torch.Tensor]:
        return []  # nothing travels in parts

    def drop(self) -> None:
        for part in self._parts:
            part.buffer.release()
        self._parts = ()

    def deliver(self, section: torch.Tensor) -> None:
        self._deliver(section)

    def add(self, sections: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Add the sections of all ranks (``Scale.add``)."""
        self.add_slices([section.split(self._numel) for section in sections], out)

    def add_slices(self, slices: Sequence[Sequence[torch.Tensor]], out: torch.Tensor) -> None:
        """Add the partial sums of all ranks in the order of the tree."""
        pairs = zip(self._nodes, slices, strict=True)
        self._use([found for nodes, its in pairs for found in zip(nodes, its, strict=False)], out)

    def expected(self) -> list[list[Expected]]:
        """Return what arrives from every rank."""
        return [[Expected((self._numel,), self.dtype)] * len(nodes) for nodes in self._nodes]


class TreeCommunicator(GroupCommunicator):
    """The communicator of a group whose gradients are summed along the tree.

    Args:
        sums: the partial sums of the group.  way: the communicator whose ranks and streams it uses.
    """

    def __init__(self, sums: GroupSums, way: GroupCommunicator, passes: PassTracker) -> None:
        super().__init__(way.group, way.stream, way.pool, passes, way.custom, way.fetch)
        self._sums = sums

    def reduce_scatter(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Add the gradients of a microbatch to those before; after the last one, exchange partial sums."""
        sums, key = self._sums, (ends.label, ends.dtype)
        buffer = self.pool.acquire(ends.section_numel * self.size * ends.dtype.itemsize, ends.dtype)
        ends.fill(buffer.flat)
        sums.push(key, PartialSum(buffer.flat, buffer))
        if not sums.is_last:
            self.stream.wait_current()
            with self.stream.run():
                ends.deliver(ends.target().fill_(_NOTHING))
            return LeftOut()  # nothing is in flight
        has_replicas = sums.place.num_replicas > 1

        def use(found: list[tuple[Node, torch.Tensor]], out: torch.Tensor) -> None:
            if has_replicas:
                sums.sharded[key] = add_alike(found)
                out.fill_(_NOTHING)
            else:
                add_up(found, out)

        exchanged = _Exchange(ends, sums.take(key), sums.place.of_shards(), ends.target, ends.deliver, use)
        return super().reduce_scatter(exchanged, Scale(1.0, add=exchanged.add))

    def all_reduce(self, tensor: torch.Tensor, scale: Scale, contents: SumContents | None = None) -> Handle:
        """Do the same for gradients that replicas sum: each rank adds a slice, then all ranks exchange their slices."""
        assert contents is not None
        sums, key = self._sums, (contents.label, tensor.dtype)
        each = align(-(-tensor.numel() // self.size), _ALIGNMENT)
        if not sums.is_sharded:
            sums.push(key, self._part(tensor, each))
        if not sums.is_last:
            tensor.fill_(_NOTHING)
            self.stream.wait_current()
            return LeftOut()
        parts = [self._part(part, each) for _, part in sums.sharded.pop(key)] if sums.is_sharded else sums.take(key)
        own = torch.empty(each, dtype=tensor.dtype, device=tensor.device)

        def deliver(section: torch.Tensor) -> None:
            target = tensor.fill_(_NOTHING)[self.rank * each :][:each]
            target.copy_(section[: target.numel()])

        exchanged = _Exchange(contents, parts, sums.place.of_replicas(), lambda: own, deliver, add_up)
        super().reduce_scatter(exchanged, Scale(1.0, add=exchanged.add)).wait()
        return super().all_reduce(tensor, Scale(1.0), contents)

    def reduce_scatter_by_backend(self, ends: ScatterEnds, scale: Scale) -> Handle:
        """Exchange partial sums by one all-to-all."""
        assert isinstance(ends, _Exchange)
        self.stream.wait_current()
        with self.stream.run():
            arrived = exchange(ends.slices(), ends.expected(), ranks_of_group(self.group), self.pool.device)
            ends.add_slices(arrived, ends.target())
            ends.deliver(ends.target())
        handle = StreamWork(self.stream, ends.drop, ends.drop, None)  # the stream reads the partial sums
        if not self.stream.is_concurrent:
            handle.wait()
        return handle

    def _part(self, tensor: torch.Tensor, each: int) -> PartialSum:
        """Return a copy of ``tensor`` with ``each`` elements for every rank; the last ones are padding."""
        numel = each * self.size
        buffer = self.pool.acquire(numel * tensor.dtype.itemsize, tensor.dtype)
        buffer.flat[: tensor.numel()].copy_(tensor)
        return PartialSum(buffer.flat, buffer)


# ---- Sums in the order of the tree.


def add_up(parts: Sequence[tuple[Node, torch.Tensor]], out: torch.Tensor) -> None:
    """Write the sum of all microbatches to ``out``; the last elements of the parts may be padding."""
    for start in range(0, out.numel(), _CHUNK):
        target = out[start : start + _CHUNK]
        found = _neighbours_added([(node, value[start : start + target.numel()]) for node, value in parts])
        target.copy_(functools.reduce(torch.add, (value for _, value in found)))


def add_alike(parts: Sequence[tuple[Node, torch.Tensor]]) -> list[tuple[Node, torch.Tensor]]:
    """Return the parts that are left when all neighbours of the tree are added; none is a view of ``parts``."""
    given = {id(value) for _, value in parts}
    return [(node, value.clone() if id(value) in given else value) for node, value in _neighbours_added(parts)]


def _neighbours_added(parts: Sequence[tuple[Node, torch.Tensor]]) -> list[tuple[Node, torch.Tensor]]:
    counter: Counter[torch.Tensor] = Counter(torch.add)
    for node, value in parts:
        counter.push(node, value)
    return counter.parts


# ---- Norms of sharded gradients whose bits do not depend on how the gradients are cut.
# Shards are cut between rows, so each rank computes the norms of its rows; one kernel then sums the rows of all parameters, in
# the order of the parameters, on every rank alike.


def clip_by_rows(params: Sequence[torch.Tensor], limit: Limit, axes: MeshAxes) -> torch.Tensor:
    """Scale the gradients of ``params``, sharded along ``axes``, to ``limit``; return their norm before.  Collective.

    Raises: ConfigError for a gradient that is not cut along one dimension.
    """
    gradients = [param.grad.detach() for param in params if param.grad is not None]
    if not gradients:
        return torch.tensor(0.0, device=axes.device)
    cuts = [cut_of(gradient) for gradient in gradients]
    found: list[torch.Tensor] = []
    for gradient, cut in zip(gradients, cuts, strict=True):
        rows = torch.zeros(cut.size, dtype=torch.float64, device=axes.device)
        if cut.num_shards > 1 or axes.shard_rank == 0:  # of what all ranks have, as scalars, one gives the norms
            own = cut.rows(axes.shard_rank)
            rows[own.start : own.stop] = _norms_of_rows(torch_private.local_of(gradient), cut.dim, limit)
        found.append(rows)
    whole = torch.cat(found)
    if axes.shard_mesh_dim is not None:
        sum_bytes(whole, axes.mesh.get_group(axes.shard_mesh_dim))
    power = whole.max() if limit.is_max else (whole**limit.norm_type).sum()
    return limit.hold(power, [*map(torch_private.local_of, gradients)], [gradient.dtype for gradient in gradients])


def cut_of(gradient: torch.Tensor) -> ChunkShard:
    """Return how ``gradient``, or a parameter, is cut.  Raises: ConfigError unless it is cut along one dimension at most."""
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True) if isinstance(gradient, DTensor) else ()
    cuts = [(size, each) for size, each in axes if not isinstance(each, Replicate)]
    shape = tuple(gradient.shape) or (1,)
    if not cuts:
        return ChunkShard(shape, 0, 1)
    size, placement = cuts[0]
    if len(cuts) > 1 or type(placement) is not Shard:
        raise ConfigError(
            f"Reproducible: a parameter or gradient has placements {[each for _, each in cuts]}; norms and digests do not "
            "depend on the number of ranks only if it is cut along one dimension. Clip or compare it outside, from its full "
            "tensor"
        )
    return ChunkShard(shape, placement.dim, size)


def _norms_of_rows(local: torch.Tensor, dim: int, limit: Limit) -> torch.Tensor:
    """Return the norm of each slice of ``local`` along ``dim``.  A row has the same bits, whatever rows are beside it."""
    values = local.abs() if local.is_complex() else local
    if values.ndim <= 1:
        return values.abs().reshape(-1).double()
    rows = values.movedim(dim, 0).flatten(1).contiguous()
    precise = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(rows, limit.norm_type, dim=1, dtype=precise).double()
