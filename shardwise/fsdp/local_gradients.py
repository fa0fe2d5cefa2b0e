"""Gradients as backward leaves them on this rank, and as hooks of users follow them: before and after they are reduced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.mesh import names_of
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.param_group import ParamGroup

Gradients = dict[ShardedParam, torch.Tensor]


def take_gradients(group: ParamGroup, some: Iterable[ShardedParam] | None = None) -> Gradients:
    """Return the local gradients of the full parameters, in the dtypes that they are reduced in, and clear them there.

    ``some``: of these parameters of the group; None: of all.
    """
    taken: Gradients = {}
    for param in group.params if some is None else some:
        full = param.full
        if full is None:
            continue
        gradient = full.grad
        if gradient is None:
            continue
        if type(gradient) is not torch.Tensor and not lies_as(full, gradient):
            continue  # between calls a full parameter that stays shows the gradient of its shard: it has been reduced
        full.grad = None
        if gradient.is_sparse:  # of an embedding: other ranks have other rows, and a section has all of them
            gradient = gradient.to_dense()
        if not param.sharded.requires_grad:
            continue  # frozen since forward
        if type(gradient) is not torch.Tensor:
            gradient = _local_gradient(gradient, param, group)
        dtype = (
            group.dtypes.by_gradient.get(gradient.dtype) if param.grad_dtype is None and not param.keeps_dtype else None
        )
        if dtype is None:
            dtype = group.dtypes.of_reduction(param, gradient.dtype)
        taken[param] = gradient if gradient.dtype is dtype else gradient.to(dtype)
    return taken


_GRAD, _REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")
_KIND = operator.attrgetter("dtype", "layout")
_TENSORS = {torch.Tensor}


def take_at_once(group: ParamGroup) -> Gradients | None:
    """Return the gradients of all parameters and clear them; None, with nothing done, where each must be looked at."""
    bucket = group.packing.buckets[0] if group.packing is not None and len(group.packing.buckets) == 1 else None
    swap = bucket.swap if bucket is not None and len(bucket.params) == len(group.params) else None
    if bucket is None or swap is None:
        return None
    gradients: list[torch.Tensor] = [*map(_GRAD, swap.fulls)]
    if {*map(type, gradients)} != _TENSORS:
        return None
    kinds = {*map(_KIND, gradients)}
    dtype = gradients[0].dtype
    if kinds != {(dtype, torch.strided)} or group.dtypes.by_gradient.get(dtype) is not dtype:
        return None
    if not all(map(_REQUIRES_GRAD, swap.shards)):
        return None
    for full in swap.fulls:
        full.grad = None
    return dict(zip(bucket.params, gradients, strict=True))


def lies_as(full: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return True if ``gradient`` is one of the full parameter, not of its shard."""
    if not isinstance(gradient, DTensor):
        return not isinstance(full, DTensor)
    return isinstance(full, DTensor) and gradient.device_mesh == full.device_mesh


def _local_gradient(gradient: torch.Tensor, param: ShardedParam, group: ParamGroup) -> torch.Tensor:
    gradient = torch_private.wait_tensor(gradient)
    if not isinstance(gradient, DTensor):
        return gradient
    assert param.inner_spec is not None
    placements = list(param.inner_spec.placements)
    dims, names = group.axes.dims, gradient.device_mesh.mesh_dim_names
    if dims is not None and names is not None:
        # On a full SPMD mesh the sum over the data-parallel axes is the reduction's to make.
        for name in (*names_of(dims.shard), *names_of(dims.replicate)):
            placements[names.index(name)] = gradient.placements[names.index(name)]
    if gradient.placements != tuple(placements):
        gradient = gradient.redistribute(placements=placements)
    return torch_private.wait_tensor(torch_private.local_of(gradient))


def add_gradients(old: Mapping[ShardedParam, torch.Tensor], new: Mapping[ShardedParam, torch.Tensor]) -> Gradients:
    """Return the sum per parameter; tensors of one side alone are taken over, neither side is changed."""
    total: Gradients = dict(old)
    for param, gradient in new.items():
        total[param] = total[param] + gradient if param in total else gradient
    return total


def change_by_hooks(params: Sequence[ShardedParam], gradients: Sequence[torch.Tensor]) -> BaseException | None:
    """Let the hooks that users registered on sharded parameters see, and change, what is about to be accumulated.

    Of parameters that are their own full form autograd has run them.
    Returns: what a hook has raised: ``gradients`` are as they were for it and those after it.
    """
    hooked = torch_private.gradient_hooks([p.sharded for p in params])
    try:
        for index, hook in hooked:
            if params[index].full is not params[index].sharded:
                with torch.no_grad():
                    changed = hook(gradients[index])
                if changed is not None:
                    _take_changed(params[index], gradients[index], changed)
    except BaseException as error:
        return error
    return None


def _take_changed(param: ShardedParam, gradient: torch.Tensor, changed: torch.Tensor) -> None:
    is_alike = isinstance(changed, DTensor) is isinstance(gradient, DTensor) and changed.shape == gradient.shape
    if not is_alike:
        raise StateError(
            f"a hook on the gradient of {param.fqn} was given a {type(gradient).__name__} of shape {tuple(gradient.shape)} and "
            f"returned a {type(changed).__name__} of shape {tuple(changed.shape)}: hooks on sharded parameters get the reduced "
            "gradient as a DTensor and return one like it, or None"
        )
    if isinstance(changed, DTensor) and isinstance(gradient, DTensor) and changed.placements != gradient.placements:
        changed = changed.redistribute(gradient.device_mesh, gradient.placements)
    torch_private.local_of(gradient).copy_(torch_private.wait_tensor(torch_private.local_of(changed)))


def run_gradient_hooks(params: Iterable[ShardedParam], failed: BaseException | None = None) -> None:
    """Run the hooks that users registered on sharded parameters to follow the accumulation of their gradients.

    ``failed``: what an earlier hook has raised; it is raised here, when all else of the backward is done.
    """
    if failed is not None:
        raise failed
    followed = dict.fromkeys(params)  # each once, however many backwards have waited to be set
    ours = {param.hook_id for param in followed if param.full is param.sharded}
    for sharded, hook in torch_private.post_accumulate_hooks([param.sharded for param in followed], ours):
        hook(sharded)


# ---- What earlier backwards have left of a unit's gradients, until a later one sums it all.


class EarlierGradients:
    """Gradients that are neither on their way nor in ``.grad`` of a shard.  The methods alone write the attributes.

    Attributes:
        held: of backwards without sync, per parameter, in the reduce dtype.
        partial: sums over the shard axis that replicas have not been summed into.
        stashed: of plain parameters that stay registered, taken away while a backward adds new ones.
        unsynced: plain parameters whose gradients, which users see, are of this rank alone.
        deferred_hooks: hooks of users that are to follow the accumulation of plain parameters' gradients, put off
            until it is done, with the parameter that has them.
        apart: of those that hold sums of ranks, too: what users see, and both parts of it.
    """

    def __init__(self) -> None:
        self.held: Gradients = {}
        self.partial: Gradients = {}
        self.stashed: Gradients = {}
        self.unsynced: set[ShardedParam] = set()
        self.deferred_hooks: dict[ShardedParam, tuple[torch.Tensor, dict[int, Callable[[torch.Tensor], None]]]] = {}
        self.apart: dict[ShardedParam, _Apart] = {}

    def hold(self, gradients: Gradients) -> None:
        """Keep ``gradients`` for a later backward."""
        self.held = add_gradients(self.held, gradients)

    def keep_partial(self, sums: Gradients) -> None:
        """Keep ``sums`` over the shard axis for a later backward; they hold what was kept before."""
        self.partial.update(sums)

    def take(self, params: Iterable[ShardedParam]) -> tuple[Gradients, Gradients]:
        """Give up all that is held, and the partial sums of ``params`` and of what is held: return both."""
        held, self.held = self.held, {}
        if not self.partial:
            return held, {}
        wanted = {*params, *held}
        return held, {param: self.partial.pop(param) for param in list(self.partial) if param in wanted}

    def put_back(self, held: Gradients, partial: Gradients) -> None:
        """Undo :meth:`take`."""
        self.held, self.partial = {**self.held, **held}, {**self.partial, **partial}

    def forget(self) -> None:
        """Drop what no user can see."""
        self.held, self.partial = {}, {}

    def stash(self, params: Sequence[ShardedParam], is_exact: bool, first: int | None = None) -> None:
        """Take the gradients of plain ``params`` from where a backward is about to accumulate new ones.

        ``first``: number of the parameter whose new gradient is there already, since nobody saw backward begin.  What was
        there before stays with it: the mean over ranks of a sum is that of its parts.
        ``is_exact``: the sum that is to come divides by another number than that of ranks, so what is a sum already must
        not go through it again.
        Raises: StateError if somebody has changed a gradient that is both.
        """
        changed: list[str] = []
        for param in params:
            param.adopt_registered()  # what was put in its place since the forward has gradients of its own
            if first is not None and param.ordinal == first:
                self._keep_first(param, is_exact)
                continue
            # Autograd would run them on this backward's own gradient alone, or when it has been taken already.
            if found := torch_private.remove_later_hooks(param.sharded, param.hook_id):
                self.deferred_hooks[param] = param.sharded, found
            gradient, param.sharded.grad = param.sharded.grad, None
            apart = self.apart.pop(param, None)
            if gradient is None:
                self.unsynced.discard(param)
            elif param not in self.unsynced:
                self.stashed[param] = gradient
            elif apart is not None and apart.is_as_shown(gradient):
                self.stashed[param], self.held[param] = gradient.copy_(apart.synced), apart.held
            elif apart is not None and is_exact and gradient.any():
                self.stashed[param], self.apart[param] = gradient, apart  # as it was, once that is shown
                changed.append(param.fqn)
            else:
                self.held[param] = gradient
        if changed:
            raise StateError(
                f"the gradient of {changed[0]} holds what ranks have summed and what this rank has added since without "
                "sync, and was changed: set_gradient_divide_factor would divide the first part twice. Change gradients "
                "after a backward with sync, or set them to None"
            )

    def _keep_first(self, param: ShardedParam, is_exact: bool) -> None:
        gradient = param.sharded.grad
        self.unsynced.discard(param)
        self.apart.pop(param, None)
        found = torch_private.remove_later_hooks(param.sharded, param.hook_id)
        torch_private.restore_hooks(param.sharded, found)
        if found or (is_exact and gradient is not None and gradient._version):
            raise StateError(
                f"a backward began with the gradient of {param.fqn} before it came to an output of the replicated module, as "
                "where that was not called itself or returns no tensor. Hooks that follow the accumulation have seen it "
                "without those of other ranks, and one that is to be divided by another factor cannot be told from "
                "earlier ones: call the module, and return the tensors that losses are made of"
            )

    def unstash(self, params: Sequence[ShardedParam]) -> None:
        """Put them back, with what a backward has added."""
        for param in [param for param in params if param in self.deferred_hooks] if self.deferred_hooks else ():
            torch_private.restore_hooks(*self.deferred_hooks.pop(param))
        for param in params:
            synced, held = _sum_of(self.stashed.pop(param, None), param.sharded.grad), self.held.pop(param, None)
            if held is None:
                if param not in self.apart:
                    self.unsynced.discard(param)
            else:
                self.unsynced.add(param)
            if synced is None or held is None:
                gradient = synced if held is None else held
                wanted = param.sharded.grad_dtype  # another one if the parameter was converted after its forward
                param.sharded.grad = gradient if gradient is None or wanted is None else gradient.to(wanted)
            else:
                alone = synced.clone()
                param.sharded.grad = shown = synced.add_(held)  # in place, as autograd accumulates: users may hold it
                self.apart[param] = _Apart(shown, shown._version, alone, held)


@dataclass(frozen=True, slots=True)
class _Apart:
    """A gradient that users see, and what it is the sum of: sums of all ranks, and this rank's own since."""

    shown: torch.Tensor
    version: int
    synced: torch.Tensor
    held: torch.Tensor

    def is_as_shown(self, gradient: torch.Tensor) -> bool:
        return gradient is self.shown and gradient._version == self.version


def _sum_of(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)
