"""The random generators of a process, saved and restored."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch


class RandomState:
    """The state of the random generators of Python, numpy and torch on this rank, as an entry of the state to save.

    At another number of ranks it cannot be restored: each rank gets a seed that depends on the save and its rank.

    Example:
        >>> state = {"random": RandomState()}
        >>> sorted(state["random"].state_dict())
        ['cuda', 'numpy', 'python', 'torch']
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators."""
        kind, keys, *rest = cast(Any, np.random.get_state())
        device = _device()
        numpy = (str(kind), np.asarray(keys).tobytes(), *[float(x) if isinstance(x, float) else int(x) for x in rest])
        return {
            "python": random.getstate(),
            "numpy": numpy,
            "torch": torch.get_rng_state(),
            "cuda": [] if device is None else [device.get_rng_state()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore that state."""
        random.setstate(state_dict["python"])
        kind, keys, *rest = state_dict["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state_dict["torch"])
        device = _device()
        if state_dict["cuda"] and device is not None:
            device.set_rng_state(state_dict["cuda"][0])


def set_seed(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch (all devices); ``seed`` has up to 63 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _device() -> Any:
    """Return torch's module of the accelerator, or None."""
    return torch.get_device_module() if torch.accelerator.is_available() else None
