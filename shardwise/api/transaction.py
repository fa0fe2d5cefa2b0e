"""A door around a step: it happens on all ranks, or on none."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.api.sharded_optimizer import ShardedOptimizer, stepper_of
from shardwise.api.zero import ZeroRedundancyOptimizer, share_stepper
from shardwise.errors import ConfigError
from shardwise.transaction.kept_optimizer import Optimized, distinct, optimized_as_it_is
from shardwise.transaction.ledger import Ledger, Wanted
from shardwise.transaction.step import Transaction, Types

# By model: who writes ``with shardwise.transaction(...)`` around every step meets the other ranks once, not in each.
_ledgers: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()


def transaction(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    retry: Types | type[BaseException] = (),
    skip: Types | type[BaseException] = (),
    also: Sequence[Any] = (),
    undoes_optimizer: bool = True,
) -> Transaction:
    """Return a context for one step (data, forward, backward, optimizer) that happens on all ranks, or on none.

    If a rank raises inside, all ranks hear of it within about a second, wherever they wait, and go back to the state before:
    parameters, gradients that had been accumulated, buffers, state and options of the optimizer.  Then they go on together,
    or raise together: the exception itself where it was raised, :class:`shardwise.StepError` (rank, class, text, place) on
    the others.  A rank whose process has ended is not undone: :class:`shardwise.TransportError` names it on all.

    Args:
        model: with any of the doors of this package, in torch's DistributedDataParallel, or plain on one rank.
        optimizer: what steps inside the block, one or several.
        retry: exceptions after which all ranks go on, and ``step.again`` says that the step is to be made once more.
        skip: exceptions after which all ranks go on without the step.
        also: what else is put back: a ``GradScaler``, schedules, anything with ``state_dict`` and ``load_state_dict``;
            "rng" for random numbers, of torch (CPU and accelerator), ``random`` and numpy.
        undoes_optimizer: False: nothing is copied for the optimizer's step.  Ranks agree right before it that all have come so
            far, and whoever raises within it, or after it, ends the job: :class:`shardwise.StepError` on all ranks.

    All ranks of the job make the same transactions.  Parameters are changed by the optimizer alone.
    Cost: one agreement per step; copies of buffers at its begin, and of gradients that are there then (call ``zero_grad``
    before the block); of this rank's parameters and optimizer state when the optimizer steps (``step.num_bytes``).  The
    memory of the copies is kept from step to step.
    Raises: ConfigError for groups of other backends than gloo, and for an optimizer that steps inside backward; StateError in
    a transaction over the same model.

    Example:
        >>> import torch
        >>> from shardwise import RejectedStep
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> for batch in torch.ones(2, 3, 2), torch.full((3, 2), float("nan")):
        ...     with transaction(model, optimizer, skip=RejectedStep) as step:
        ...         optimizer.zero_grad()
        ...         loss = model(batch).sum()
        ...         if loss.isnan():
        ...             step.reject("the loss is NaN")
        ...         loss.backward()
        ...         optimizer.step()
        ...     print(step.outcome)
        committed
        skipped
    """
    optimizers = distinct([optimizer] if isinstance(optimizer, Optimizer) else list(optimizer))
    wanted = Wanted(tuple(also), undoes_optimizer)
    ledger = _ledgers.get(model)
    if ledger is None or not ledger.is_for(optimizers, wanted):
        ledger = _ledgers[model] = Ledger(model, [_optimized(each) for each in optimizers], wanted)
    return Transaction(ledger, _types(retry, "retry"), _types(skip, "skip"))


def _types(given: Any, name: str) -> Types:
    found = (given,) if isinstance(given, type) else tuple(given)
    wrong = [each for each in found if not (isinstance(each, type) and issubclass(each, BaseException))]
    if wrong:
        raise ConfigError(f"{name}= takes classes of exceptions; found {wrong[0]!r}")
    return found


def _optimized(optimizer: Optimizer) -> Optimized:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        if optimizer.overlap_with_ddp:
            raise ConfigError(
                "an optimizer made with overlap_with_ddp=True steps inside backward, bucket by bucket: there is no moment "
                "before its step at which all is as it was; make it without overlap to use transactions"
            )
        if optimizer.overlap_grad_reduce or optimizer.overlap_param_gather:
            raise ConfigError(
                "an optimizer made with overlap_grad_reduce=True or overlap_param_gather=True has gradients and parameters on "
                "their way beyond backward and step(), which cannot be put back; make it without them to use transactions"
            )
        shares = share_stepper(optimizer)
        return Optimized(optimizer, optimizer.optim, shares.mark, shares.renew)
    if isinstance(optimizer, ShardedOptimizer):
        stepper = stepper_of(optimizer)
        return Optimized(optimizer, stepper.optimizer, stepper.mark, _nothing)
    return optimized_as_it_is(optimizer)


def _nothing() -> None:
    return None
