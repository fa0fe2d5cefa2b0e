"""What an optimizer's step sends between ranks, call by call, as a trace finds it: the rank that sends first stands for all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.layout.bucket import align
from shardwise.layout.even import runs_of
from shardwise.layout.owners import assign_owners
from shardwise.layout.shard import ChunkShard
from shardwise.optim.registry import step_cost
from shardwise.planner.profile import ParamFacts, Profile
from shardwise.planner.setting import Setting

_ALIGNMENT = 16  # of tensors in an exchange, as in comm/matrices.py
_STATUS_BYTES = 8


@dataclass(frozen=True, slots=True)
class Transfer:
    """One call of an optimizer.

    Attributes:
        what: as spans name it: "reduction" and "all-gather" of ZeRO, "exchange" of whole matrices.
        num_bytes: of the buffer that goes out, this rank's own part included.
    """

    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The two exchanges of a step over whole matrices, as the first rank makes them.

    Attributes:
        gather_out, gather_in: bytes of shards that it sends to owners, and that it gets as one.
        scatter_out, scatter_in: of updated shards, likewise.
        whole_bytes: of the matrices that it owns, without gradients.
        owned_numel: their elements.  matrix_numel: of its shards of all matrices.
    """

    gather_out: int = 0
    gather_in: int = 0
    scatter_out: int = 0
    scatter_in: int = 0
    whole_bytes: int = 0
    owned_numel: int = 0
    matrix_numel: int = 0


def is_matrix(param: ParamFacts) -> bool:
    """Return True if an optimizer of whole matrices takes ``param``."""
    return param.is_trainable and len(param.shape) == 2


def optimizer_transfers(profile: Profile, setting: Setting) -> tuple[Transfer, ...]:
    """Return the calls of one step of the optimizer of ``setting``; DDP's own all-reduces are not among them."""
    if setting.ranks == 1:
        return ()
    trainable = [param for param in profile.params if param.is_trainable]
    everything = Transfer("all-gather", sum(param.num_bytes for param in trainable))
    if setting.door == "gradients":
        return (*[Transfer("reduction", size) for size in messages(trainable, setting.ranks)], everything)
    if setting.door == "optimizer":
        return (everything,)
    if not setting.matrices or setting.num_shards == 1:
        return ()
    found = exchanges_of(profile, setting)
    return (Transfer("exchange", found.gather_out), Transfer("exchange", found.scatter_out))


def hooked_transfers(
    profile: Profile, owners: bool, bucket_bytes: Sequence[int] = (1 << 20, 25 << 20)
) -> tuple[Transfer, ...]:
    """Return the calls of ``hook_with_zero_step``, bucket by bucket of DDP, once that has seen in which order gradients come.

    ``owners``: gradients are reduced to their owners (``reduce="owner"``), else by DDP's own hook.  ``bucket_bytes``: of
    DDP's first bucket and of the later ones.
    """
    arrivals = [stretch.mark.param for stretch in profile.stretches if stretch.mark.edge is None]
    sizes = list(_buckets([profile.params[number].num_bytes for number in arrivals], bucket_bytes))
    reductions = [Transfer("reduction", size) for size in sizes if owners]
    return (*reductions, *[Transfer("all-gather", size) for size in sizes])


def _buckets(sizes: Iterable[int], limits: Sequence[int]) -> Iterator[int]:
    filled, number = 0, 0
    for size in sizes:
        filled += size
        if filled >= limits[min(number, len(limits) - 1)]:
            yield filled
            filled, number = 0, number + 1
    if filled:
        yield filled


def messages(params: Sequence[ParamFacts], ranks: int) -> Iterator[int]:
    """Yield the bytes of each message that takes gradients of ``params`` to their owners: run by run, the last one first."""
    for run in reversed(runs_of([param.numel for param in params], ranks)):
        sizes: dict[str, int] = {}
        for param in params[run.start : run.stop]:
            sizes[param.dtype] = sizes.get(param.dtype, 0) + param.num_bytes
        yield from sizes.values()


def exchanges_of(profile: Profile, setting: Setting) -> Exchanges:
    """Return what the first rank exchanges in a step over whole matrices: closed form in ranks."""
    ranks, params = setting.num_shards, [param for param in profile.params if is_matrix(param)]
    owners = assign_owners([step_cost(torch.optim.Muon, param.shape) for param in params], ranks)
    counts: dict[int, int] = {}
    for owner in owners:
        counts[owner] = counts.get(owner, 0) + 1
    shards = [ChunkShard(param.shape, 0, ranks).shard_numel(0) for param in params]
    local = [_aligned(numel * param.itemsize) for numel, param in zip(shards, params, strict=True)]
    mine = [param for param, owner in zip(params, owners, strict=True) if not owner]
    from_all = sum(_of_all_ranks(param, ranks) for param in mine)
    return Exchanges(
        gather_out=sum(map(_aligned, counts.values())) + 2 * sum(local),
        gather_in=ranks * _aligned(counts.get(0, 0)) + 2 * from_all,
        scatter_out=ranks * _aligned(_STATUS_BYTES) + from_all,
        scatter_in=ranks * _aligned(_STATUS_BYTES) + sum(local),
        whole_bytes=sum(param.num_bytes for param in mine),
        owned_numel=sum(param.numel for param in mine),
        matrix_numel=sum(shards),
    )


def exchange_moments(found: Exchanges) -> Iterator[tuple[str, int]]:
    """Yield the moments of a step over whole matrices, with the bytes that are there for it alone."""
    values_and_gradients = 2 * found.whole_bytes
    yield "send shards to owners", found.gather_out + found.gather_in
    yield "put matrices together", found.gather_in + values_and_gradients
    yield "send matrices back", values_and_gradients + found.scatter_out + found.scatter_in


def update_flops(profile: Profile, setting: Setting) -> float:
    """Return the floating-point operations by which the first rank updates its matrices: five Newton-Schulz iterations.

    Source: Muon, kellerjordan.github.io/posts/muon: X X^T, its square, and the product with X, of the shorter side.
    """
    params = [param for param in profile.params if is_matrix(param)]
    owners = assign_owners([step_cost(torch.optim.Muon, param.shape) for param in params], setting.num_shards)
    shapes = [sorted(param.shape) for param, owner in zip(params, owners, strict=True) if not owner]
    return float(sum(5 * (4 * short**2 * long + 2 * short**3) for short, long in shapes))


def _of_all_ranks(param: ParamFacts, ranks: int) -> int:
    """Return the bytes of the shards of all ranks, each aligned: those of full ones, and of the one that is shorter."""
    rows, inner = param.shape[0], math.prod(param.shape[1:]) * param.itemsize
    each = -(-rows // ranks)
    full, rest = divmod(rows, each)
    return full * _aligned(each * inner) + _aligned(rest * inner)


def _aligned(num_bytes: int) -> int:
    return align(num_bytes, _ALIGNMENT)
