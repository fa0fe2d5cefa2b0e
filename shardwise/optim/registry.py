"""Which optimizers may see shards: decided by class, never guessed."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim import Optimizer

from shardwise.errors import ConfigError

UpdateRule = Literal["elementwise", "whole_matrix"]
RULES: tuple[UpdateRule, ...] = ("elementwise", "whole_matrix")

# Every element is updated from its own gradient and state alone (and numbers equal for all elements).
_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Every parameter is updated from its own gradient and state, but as a whole: norms, factors, orthogonalisation.
_WHOLE_MATRIX: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
_REFUSED: tuple[tuple[type[Optimizer], str], ...] = (
    (
        torch.optim.LBFGS,
        "its line search and history take inner products over all parameters at once, so each rank would take another "
        "step; no sharding of parameters makes it right",
    ),
    (
        torch.optim.SparseAdam,
        "it takes sparse gradients only and gradients of shards are dense; give it the plain embeddings in an optimizer "
        "of their own and the shards to Adam",
    ),
)


def known_classes() -> tuple[type[Optimizer], ...]:
    """Return the classes of torch.optim that have a rule or a reason for refusal."""
    return (*_ELEMENTWISE, *_WHOLE_MATRIX, *(refused for refused, _ in _REFUSED))


def update_rule(optimizer_class: type[Optimizer], declared: UpdateRule | None = None) -> UpdateRule:
    """Return how ``optimizer_class`` may be run over shards.

    Known are the classes of torch.optim and subclasses that override no method of theirs but ``__init__``.  Others say
    it: ``declared``, or a class attribute ``sharded_update = "elementwise"`` or ``"whole_matrix"``.

    Raises: ConfigError for a class that cannot be right on shards, an unknown one that declares nothing (a guess could
    train something else in silence), and a declaration that contradicts what is known.

    Example:
        >>> update_rule(torch.optim.AdamW), update_rule(torch.optim.Muon)
        ('elementwise', 'whole_matrix')
    """
    name = optimizer_class.__name__
    reason = reason_for_refusal(optimizer_class)
    if reason is not None:
        raise ConfigError(f"{name} cannot be run over sharded parameters: {reason}")
    said = declared if declared is not None else _declaration(optimizer_class)
    if said is not None and said not in RULES:
        raise ConfigError(f"{name}: the update rule is {said!r}, expected one of {RULES}")
    known = _known_rule(optimizer_class)
    if said == "elementwise" and known == "whole_matrix":
        raise ConfigError(
            f"{name} is declared 'elementwise' but updates matrices as a whole; leave the declaration out"
        )
    found = said or known
    if found is None:
        raise ConfigError(
            f"{name} is not known, and whether it may see shards cannot be told by looking. Say update='elementwise' if "
            "it updates every element from its own gradient and state alone, update='whole_matrix' if it updates every "
            "parameter by itself but as a whole (norms, factors); or set the class attribute sharded_update to that"
        )
    return found


def is_known(optimizer_class: type[Optimizer]) -> bool:
    """Return True if the rule of the class is known, whatever it declares."""
    return _known_rule(optimizer_class) is not None


def reason_for_refusal(optimizer_class: type[Optimizer]) -> str | None:
    """Return why ``optimizer_class`` can never be right over shards; None if it can or nothing is known."""
    for refused, reason in _REFUSED:
        if issubclass(optimizer_class, refused):
            return reason
    return None


def step_cost(optimizer_class: type[Optimizer], shape: tuple[int, ...]) -> int:
    """Return the relative cost of updating one whole parameter: multiplications of Muon's products, else elements."""
    numel = 1
    for size in shape:
        numel *= size
    return numel * min(shape) if issubclass(optimizer_class, torch.optim.Muon) and shape else numel


def _declaration(optimizer_class: type[Optimizer]) -> UpdateRule | None:
    return getattr(optimizer_class, "sharded_update", None)


def _known_rule(optimizer_class: type[Optimizer]) -> UpdateRule | None:
    for known in optimizer_class.__mro__:
        if known in _ELEMENTWISE or known in _WHOLE_MATRIX:
            if not _overrides(optimizer_class, known):
                return "elementwise" if known in _ELEMENTWISE else "whole_matrix"
            return None
    return None


def _overrides(derived: type[Any], known: type[Any]) -> bool:
    between = derived.__mro__[: derived.__mro__.index(known)]
    names = {name for owner in between for name, value in vars(owner).items() if callable(value)}
    names -= {"__init__", "__new__"}
    return any(_without_hooks(getattr(derived, n)) is not _without_hooks(getattr(known, n, None)) for n in names)


def _without_hooks(method: Any) -> Any:
    # torch replaces ``step`` of every class that is instantiated by a wrapper that runs the step hooks.
    return method.__wrapped__ if getattr(method, "hooked", False) else method
