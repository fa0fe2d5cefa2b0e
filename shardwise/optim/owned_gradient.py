"""Gradients that were averaged to their owners: what ``.grad`` is then, on owners and on everybody else.

After it each rank holds the average of its own elements and nothing of the rest.  A plain tensor there would let a norm,
or a test for infinite values, see one rank's part and say something else on every rank, and a gradient that is missing
on the others would be passed over.  So every rank gets a tensor of the parameter's shape that computes what is right
element by element, and refuses what would need all ranks.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch

from shardwise import torch_private
from shardwise.errors import StateError


class GradientOwner(Protocol):
    """The optimizer that averaged gradients, over whose ranks they lie."""

    def sum_over_ranks(self, value: torch.Tensor, is_max: bool = False) -> torch.Tensor:
        """Return the sum (or maximum) of ``value`` over the ranks, the same bits on each.  Collective."""
        ...

    def report_failure(self, text: str) -> None:
        """Tell ranks that wait for this one alone (in Join) why it will not come."""
        ...


class OwnedGradient(torch.Tensor):
    """The average of a parameter's gradients over ranks, of which this rank holds ``parts``.

    Where this rank owns the whole parameter it is a tensor like others, with memory of its own: it is read, saved,
    pickled and copied.  Elsewhere it has no memory.  In-place operations with numbers (``mul_(0.5)``, ``clamp_(-1, 1)``,
    ``clip_grad_value_``) change the parts, on every rank its own.  ``GradScaler`` may unscale it: what it finds is agreed
    on by all ranks.  Norms, sums and the like raise StateError on every rank; see :func:`shardwise.clip_grad_norm_`.

    A backward over it does not touch the average: the new gradient waits in ``fresh`` to be averaged and added.
    ``is_spent``: a step in backward has used it; it is there to be read.  ``is_sent``: its average is on its way.
    """

    parts: tuple[torch.Tensor, ...]
    fresh: torch.Tensor | None
    is_whole: bool
    is_spent: bool
    is_sent: bool
    owner_ref: Callable[[], GradientOwner | None]

    @property
    def owner(self) -> GradientOwner:
        """The optimizer that averaged it.  Raises: StateError if that is gone."""
        owner = self.owner_ref()
        if owner is None:
            raise StateError("the optimizer that averaged this gradient is gone; keep it as long as its gradients")
        return owner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in _COMPARISONS:
            args = [_readable(arg) for arg in args]
        if func is torch.Tensor.is_pinned:
            return args[0].is_whole and args[0].parts[0].is_pinned()
        with torch_private.without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        first, others, options = args[0], args[1:], kwargs or {}
        if func is torch_private.unscale_op():
            return _unscale(func, first, *others)
        gradients = list(first) if isinstance(first, list | tuple) else [first]
        if not any(isinstance(other, torch.Tensor | list | tuple) for other in (*others, *options.values())):
            if func in torch_private.copying_ops() and isinstance(first, OwnedGradient):
                return first.changed(lambda part: func(part, **options), options.get("dtype", first.dtype))
            if func in torch_private.elementwise_ops():
                parts = _parts(gradients)
                if isinstance(first, OwnedGradient):
                    for part in parts:
                        func(part, *others, **options)
                elif parts:
                    func(parts, *others, **options)
                return first
        elif torch_private.is_accumulation(func) and isinstance(first, OwnedGradient):
            first.fresh = others[0] if first.fresh is None else first.fresh + others[0]
            return first
        if (
            torch_private.graph_task_id() != -1
        ):  # this backward ends here; in Join others may wait for what it would send
            for owner in (each.owner_ref() for each in (*gradients, *others) if isinstance(each, OwnedGradient)):
                if owner is not None:
                    owner.report_failure(
                        f"{func} in backward found gradients that were averaged to their owners before"
                    )
        refuse(str(func))

    def usable_parts(self) -> tuple[torch.Tensor, ...]:
        """Return ``parts``.  Raises: StateError if they are not the whole gradient, or a step has used them."""
        if self.is_spent:
            raise StateError(
                "the step that used these gradients was made in backward (overlap_with_ddp=True), so that they cannot be "
                "clipped or used again; make the optimizer without overlap, or change gradients in the communication hook"
            )
        if self.is_sent:
            raise StateError(
                f"gradients (here of shape {tuple(self.shape)}) are on their way to their owners, where backward has sent them "
                "(overlap_grad_reduce=True); call reduce_gradients() before they are read, clipped or stepped on"
            )
        if self.fresh is not None:
            raise StateError(
                f"a backward ran after gradients (here of shape {tuple(self.shape)}) were averaged to their owners; "
                "call reduce_gradients() again, which adds it, or zero_grad() before the backward"
            )
        return self.parts

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> OwnedGradient:
        """Return the gradient whose parts are those of this one, each through ``change``."""
        if self.fresh is not None:
            refuse("a copy")
        found = make_owned(self, [change(part) for part in self.parts], self.is_whole, self.owner_ref, dtype)
        found.is_spent = self.is_spent
        return found

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array on the same memory.  Raises: StateError where this rank has not all of them."""
        return _readable(self).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as lists.  Raises: StateError where this rank has not all of them."""
        return _readable(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _readable(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedGradient:
        memo[id(self)] = found = self.changed(torch.Tensor.clone, self.dtype)
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        held = "all" if self.is_whole else sum(part.numel() for part in self.parts)
        return f"OwnedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, elements on this rank: {held})"


def make_owned(
    param: torch.Tensor,
    parts: Sequence[torch.Tensor],
    is_whole: bool,
    owner_ref: Callable[[], GradientOwner | None],
    dtype: torch.dtype,
) -> OwnedGradient:
    """Return the averaged gradient of ``param``; ``parts`` are this rank's: one of the parameter's shape if it is whole."""
    if is_whole:
        found = parts[0].as_subclass(OwnedGradient)
    else:
        found = torch_private.tensor_without_memory(OwnedGradient, param, dtype)
    found.parts, found.is_whole, found.owner_ref = tuple(parts), is_whole, owner_ref
    found.fresh, found.is_spent, found.is_sent = None, False, False
    return found


def refuse(what: str) -> NoReturn:
    """Raises: StateError."""
    raise StateError(
        f"{what}: gradients have been averaged to their owners, so this rank has only a part of them, and other ranks "
        "would find something else. To clip by the norm of all, or to know it, call optimizer.clip_grad_norm_(max_norm) "
        "of the ZeroRedundancyOptimizer or shardwise.clip_grad_norm_(parameters, max_norm), on every rank; "
        "before the next backward that is not to be added up, call zero_grad()"
    )


def _parts(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for gradient in gradients:
        found.extend(gradient.usable_parts() if isinstance(gradient, OwnedGradient) else [gradient])
    return found


def _unscale(
    func: Any, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Unscale what this rank holds; whether anything is not finite is agreed on, or ranks would not step together."""
    parts = _parts(gradients)
    if parts:
        func(parts, found_inf, inverse_scale)
    owners = {id(g.owner): g.owner for g in gradients if isinstance(g, OwnedGradient)}
    for owner in owners.values():
        found_inf.copy_(owner.sum_over_ranks(found_inf.clone(), is_max=True))


def _readable(value: Any) -> Any:
    if not isinstance(value, OwnedGradient):
        return value
    if not value.is_whole or value.fresh is not None or value.is_sent:
        refuse("reading")
    return value.parts[0]


_COMPARISONS = (torch.equal, torch.isclose, torch.allclose, torch.Tensor.equal, torch.Tensor.isclose)
