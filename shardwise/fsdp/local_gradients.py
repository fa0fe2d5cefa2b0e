"""Local gradients before they are reduced, unsynced gradients of earlier backwards, and the users' gradient hooks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.errors import StateError
from shardwise.fsdp.mesh import DataParallelMeshDims, names_of
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.waiting_gradients import WaitingGradient, is_summed_later, waits_for_sync

Gradients = dict[ShardedParam, torch.Tensor]
_USUAL = frozenset([torch.Tensor])
_DTYPE, _IS_SPARSE, _KEEPS_DTYPE = map(operator.attrgetter, ("dtype", "is_sparse", "keeps_dtype"))


def are_usual(gradients: Gradients, reduce_dtypes: Mapping[torch.dtype, torch.dtype]) -> bool:
    """Return True if ``gradients`` are plain dense tensors in their reduce dtypes already."""
    values, dtypes = gradients.values(), {*map(_DTYPE, gradients.values())}
    are_plain = {*map(type, values)} <= _USUAL and all(map(operator.is_, map(reduce_dtypes.get, dtypes), dtypes))
    return are_plain and not (any(map(_IS_SPARSE, values)) or any(map(_KEEPS_DTYPE, gradients)))


def local_form(gradient: torch.Tensor, param: ShardedParam, dims: DataParallelMeshDims | None) -> torch.Tensor:
    """Return ``gradient`` of the full parameter as a dense local tensor; ``dims``: of the data-parallel mesh."""
    if gradient.is_sparse:  # of an embedding: ranks have different rows, so reduce all of them
        gradient = gradient.to_dense()
    if type(gradient) is torch.Tensor:
        return gradient
    gradient = torch_private.wait_tensor(gradient)
    if not isinstance(gradient, DTensor):
        return gradient
    assert param.inner_spec is not None
    placements = list(param.inner_spec.placements)
    names = gradient.device_mesh.mesh_dim_names
    if dims is not None and names is not None:
        # On a full SPMD mesh leave the data-parallel axes as they are: the reduction sums over them.
        for name in (*names_of(dims.shard), *names_of(dims.replicate)):
            placements[names.index(name)] = gradient.placements[names.index(name)]
    # Autograd may leave a gradient in partial sums over the axes of tensor parallelism; those are summed before ours.
    if gradient.placements != tuple(placements):
        gradient = gradient.redistribute(placements=placements)
    return torch_private.wait_tensor(torch_private.local_of(gradient))


def add_gradients(old: Mapping[ShardedParam, torch.Tensor], new: Mapping[ShardedParam, torch.Tensor]) -> Gradients:
    """Return the sum per parameter, without changing either side; the tensor of one side alone is not copied."""
    return {**old, **{param: old[param] + value if param in old else value for param, value in new.items()}}


def change_by_hooks(params: Sequence[ShardedParam], gradients: Sequence[torch.Tensor]) -> BaseException | None:
    """Run the hooks that users registered on sharded parameters; they may change ``gradients``.

    Autograd has run the hooks of parameters that are their own full form.

    Returns: the exception of a hook.  Its gradient, and those after it, are unchanged.
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
    if isinstance(changed, DTensor) is not isinstance(gradient, DTensor) or changed.shape != gradient.shape:
        raise StateError(
            f"a hook on the gradient of {param.fqn} was given a {type(gradient).__name__} of shape {tuple(gradient.shape)} and "
            f"returned a {type(changed).__name__} of shape {tuple(changed.shape)}: return a DTensor of the same shape, or None"
        )
    if isinstance(changed, DTensor) and isinstance(gradient, DTensor) and changed.placements != gradient.placements:
        changed = changed.redistribute(gradient.device_mesh, gradient.placements)
    torch_private.local_of(gradient).copy_(torch_private.wait_tensor(torch_private.local_of(changed)))


def run_gradient_hooks(params: Iterable[ShardedParam], failed: BaseException | None = None) -> None:
    """Run the post-accumulate-grad hooks that users registered on sharded parameters.

    ``failed``: the exception of an earlier gradient hook; it is raised here, when everything else of the backward is done.
    """
    if failed is not None:
        raise failed
    followed = dict.fromkeys(params)  # each parameter once, even if gradients of several backwards were set together
    # Ours is what has brought this gradient; it must not run a second time.
    ours = {param.hook_id for param in followed if param.full is param.sharded}
    for sharded, hook in torch_private.post_accumulate_hooks([param.sharded for param in followed], ours):
        hook(sharded)


# ---- Gradients of a unit from earlier backwards, which a later backward reduces.


class EarlierGradients:
    """Gradients that are neither in a reduction nor in ``.grad`` of a shard.

    Attributes:
        held: unsynced gradients (``no_sync``) per parameter, in the reduce dtype.
        partial: gradients that are reduced over the shard axis only.
        waiting: what ``.grad`` of shards shows while gradients wait; see :class:`WaitingGradient`.
        stashed: ``.grad`` of plain parameters that stay registered, removed while a backward accumulates from zero.
        unsynced: plain parameters whose ``.grad`` contains unsynced gradients of this rank.
        deferred_hooks: post-accumulate-grad hooks of plain parameters that were removed until gradients are accumulated,
            with the parameter that has them.
    """

    def __init__(self) -> None:
        self.held, self.partial, self.stashed = Gradients(), Gradients(), Gradients()
        self.waiting: dict[ShardedParam, WaitingGradient] = {}
        self.unsynced: set[ShardedParam] = set()
        self.deferred_hooks: dict[ShardedParam, tuple[torch.Tensor, dict[int, Callable[[torch.Tensor], None]]]] = {}

    def take(self, params: Iterable[ShardedParam]) -> tuple[Gradients, Gradients]:
        """Remove and return all unsynced gradients, and the partial sums of their parameters and of ``params``."""
        held, self.held = self.held, {}
        if not self.partial:
            return held, {}
        wanted = {*params, *held}
        return held, {param: self.partial.pop(param) for param in list(self.partial) if param in wanted}

    def put_back(self, held: Gradients, partial: Gradients) -> None:
        """Undo :meth:`take`, after a backward that raised."""
        self.held, self.partial = {**self.held, **held}, {**self.partial, **partial}

    def show(self, params: Iterable[ShardedParam] = (), summed: Collection[ShardedParam] = ()) -> None:
        """Show in ``.grad`` of shards that gradients wait: those held here, and those of ``params`` and ``summed``."""
        for param in (*summed, *self.held, *self.partial, *params):
            if param.full is param.sharded and param not in summed:
                continue  # a plain parameter that stays registered: its ``.grad`` holds what waits, as with DDP
            if param not in self.waiting:
                why = is_summed_later if param in summed else waits_for_sync
                self.waiting[param] = WaitingGradient.of(param, why(param.fqn))
            self.waiting[param].show(param)

    def withdraw(self) -> set[ShardedParam]:
        """Undo :meth:`show`; drop the gradients that user code has cleared meanwhile, and return their parameters."""
        waiting, self.waiting = self.waiting, {}
        cleared = {param for param, mark in waiting.items() if not mark.withdraw(param)}
        for param in cleared:
            self.held.pop(param, None)
            self.partial.pop(param, None)
        return cleared

    def stash(self, params: Sequence[ShardedParam], first: ShardedParam | None = None) -> None:
        """Stash ``.grad`` of plain ``params``, so that a backward accumulates from zero.

        Args:
            first: the parameter whose new gradient was accumulated already, since no hook announced the backward.  Its earlier
                gradient stays in the sum: the mean over ranks of a sum is the sum of the means.

        Raises: StateError if a hook has seen that gradient before it is reduced.
        """
        for param in params:
            param.adopt_registered()  # a parameter that user code has registered since the forward has its own ``.grad``
            # Autograd would run these hooks before the gradient is reduced and added to the earlier one.
            found = torch_private.remove_later_hooks(param.sharded, param.hook_id)
            if param is first:
                self.unsynced.discard(param)
                torch_private.restore_hooks(param.sharded, found)
                if found:
                    raise StateError(
                        f"a backward accumulated the gradient of {param.fqn} before it reached an output of the replicated "
                        "module: hooks have seen it unreduced. Call the module itself, and compute losses from its output"
                    )
                continue
            if found:
                self.deferred_hooks[param] = param.sharded, found
            gradient, param.sharded.grad = param.sharded.grad, None
            if gradient is None:
                self.unsynced.discard(param)
            elif param in self.unsynced:
                self.held[param] = gradient  # the mean over ranks of a sum is the sum of the means
            else:
                self.stashed[param] = gradient

    def unstash(self, params: Sequence[ShardedParam], adds_means: bool = True) -> None:
        """Restore stashed gradients and hooks, and add the gradients of this backward.

        Args:
            adds_means: a later reduction takes means over ranks, which leave the reduced part of a sum as it is.

        Raises: StateError if that is false, and a sum has a reduced part and one of this rank.
        """
        for param in [param for param in params if param in self.deferred_hooks] if self.deferred_hooks else ():
            torch_private.restore_hooks(*self.deferred_hooks.pop(param))
        for param in params:
            old, synced, held = self.stashed.pop(param, None), param.sharded.grad, self.held.pop(param, None)
            if old is not None:
                synced = old if synced is None else old.add_(synced)
            if held is None:
                self.unsynced.discard(param)
            else:
                self.unsynced.add(param)
            if synced is None or held is None:
                gradient = synced if held is None else held  # its dtype differs if the parameter was converted since
                param.sharded.grad = gradient if gradient is None else gradient.to(param.sharded.dtype)
            else:
                param.sharded.grad = synced.add_(held)  # in place like autograd, for references of user code
                if not adds_means:
                    raise StateError(
                        f".grad of {param.fqn} has the sum of an earlier loop over Reproducible.microbatches(), to which a "
                        "backward without sync has added: call zero_grad() before each loop, or leave out policy(sync=False)"
                    )
