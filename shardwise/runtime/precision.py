"""Dtypes of a unit, and where its shards live."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes, reduces and returns.

    Attributes:
        param_dtype: dtype of the all-gather and of forward and backward; None: the parameter's own.
        reduce_dtype: dtype of the gradient reduction and of gradients held back; None: ``param_dtype``.
        output_dtype: dtype that floating-point outputs of forward are cast to; None: no cast.
        cast_forward_inputs: cast floating-point inputs of forward to ``param_dtype``.

    Sharded parameters, their gradients and optimizer states keep the parameter's own dtype.
    Source: torch.distributed.fsdp.MixedPrecisionPolicy.

    Example:
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).cast_forward_inputs
        True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @classmethod
    def of(cls, policy: object) -> MixedPrecisionPolicy:
        """Return ``policy``, or what torch's policy object of the same fields says.  Raises: ConfigError for other things."""
        if isinstance(policy, cls):
            return policy
        names = [each.name for each in fields(cls)]
        if not all(hasattr(policy, name) for name in names):
            raise ConfigError(f"mp_policy is {policy!r}; expected a MixedPrecisionPolicy with {names}")
        return cls(**{name: getattr(policy, name) for name in names})

    def dtype_of_full(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of dtype ``original`` is all-gathered and used."""
        if self.param_dtype is None or not original.is_floating_point:
            return original
        return self.param_dtype

    def dtype_of_reduction(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype in which its gradients are reduced."""
        return self.reduce_dtype if self.reduce_dtype is not None else self.dtype_of_full(original)


@dataclass(frozen=True)
class OffloadPolicy:
    """Where sharded parameters, gradients and optimizer states live; this base class: on the mesh's device."""

    @staticmethod
    def of(policy: object) -> OffloadPolicy:
        """Return ``policy``, or what torch's policy object says.  Raises: ConfigError for other things."""
        if isinstance(policy, OffloadPolicy):
            return policy
        if type(policy).__name__ not in ("OffloadPolicy", "CPUOffloadPolicy"):
            raise ConfigError(f"offload_policy is {policy!r}; expected OffloadPolicy() or CPUOffloadPolicy()")
        pin_memory = getattr(policy, "pin_memory", None)
        return OffloadPolicy() if pin_memory is None else CPUOffloadPolicy(bool(pin_memory))


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters and gradients, and so optimizer states, in host memory.

    Attributes:
        pin_memory: page-lock them, so that copies overlap with compute; ignored on a host without an accelerator.
    """

    pin_memory: bool = True

    @property
    def can_pin(self) -> bool:
        """True when page-locking is asked for and possible."""
        return self.pin_memory and torch.accelerator.is_available()
