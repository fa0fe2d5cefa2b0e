"""``use_in``: code that calls torch's FSDP2 by name calls shardwise instead."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from shardwise.api.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardwise.api.replicate import replicate
from shardwise.errors import ConfigError

logger = logging.getLogger("shardwise")

# Classes need no replacement: torch's policies and meshes are understood, and ``isinstance`` of its FSDPModule is true.
_OURS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (fully_shard, replicate, register_fsdp_forward_method, share_comm_ctx)
}
_OLDER_PATHS = ("torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard")
_PLACES = ("torch.distributed.fsdp", "torch.distributed._composable.replicate_with_fsdp")


class use_in:
    """Replace torch's ``fully_shard`` and its companions in the namespaces of ``modules`` by those of shardwise.

    For code that calls ``fully_shard`` itself: a trainer's module that has imported the name, or ``torch.distributed.fsdp``
    for code that imports it when it runs (accelerate, Lightning, transformers), also from the older path
    ``torch.distributed._composable.fsdp``.  A warning names modules that have already imported torch's function by name.
    Only these namespaces change, from the call on, or within ``with``; call it before the model is sharded, on every rank.

    Attributes:
        replaced: pairs of a module and a name, in the order of replacement.

    Raises: ConfigError if a module has none of these names.

    Example: ``with use_in(their_trainer): their_trainer.main()``, or ``use_in(their_trainer)`` once at the start of a script.
    """

    def __init__(self, *modules: ModuleType) -> None:
        self.replaced: list[tuple[ModuleType, str]] = []
        self._before: list[Any] = []
        added = [each for module in modules for each in _at_older_paths(module) if each not in modules]
        found = [
            (module, name) for module in (*modules, *added) for name, value in vars(module).items() if _is_torchs(value)
        ]
        for module in modules:
            if not any(owner is module for owner, _ in found):
                raise ConfigError(
                    f"{module.__name__} has no name for torch's fully_shard, or it is replaced already; pass the module that "
                    "calls it, or torch.distributed.fsdp if that one imports it in a function"
                )
        for module, name in found:
            before = getattr(module, name)
            self._before.append(before)
            self.replaced.append((module, name))
            setattr(module, name, _OURS[before.__name__])
        left = _who_has_torchs() if added else []
        if left:
            logger.warning(
                "%s imported torch's function before use_in was called and still use it: pass these modules to use_in, too",
                ", ".join(left),
            )

    def __enter__(self) -> use_in:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put torch's names back."""
        while self.replaced:
            module, name = self.replaced.pop()
            setattr(module, name, self._before.pop())


def _at_older_paths(module: ModuleType) -> list[ModuleType]:
    """Return the modules in which torch has the names of ``module`` as well.

    They are imported here: if they were imported later, they would copy the replaced names and keep them for ever.
    """
    found: list[ModuleType] = []
    for name in _OLDER_PATHS if module.__name__ == "torch.distributed.fsdp" else ():
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name))
    return found


def _who_has_torchs() -> list[str]:
    """Return the names of modules outside torch and shardwise that have imported torch's ``fully_shard`` by name."""
    others = [(name, each) for name, each in list(sys.modules.items()) if not name.startswith(("torch.", "shardwise."))]
    return [name for name, each in others if _is_torchs(getattr(each, "__dict__", {}).get("fully_shard"))]


def _is_torchs(value: object) -> bool:
    place = getattr(value, "__module__", None)
    return (
        getattr(value, "__name__", None) in _OURS
        and callable(value)
        and isinstance(place, str)
        and place.startswith(_PLACES)
    )
