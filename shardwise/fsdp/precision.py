"""The dtypes of a unit (mixed precision), and the device of its shards (offloading).

``torch.autocast`` casts each use; here the all-gather casts, once and before it sends, so that half the bytes travel and no
second copy of a weight stays.  Source: FSDP2's policies, whose objects are accepted as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import nn

from shardwise.arguments import explains_fields
from shardwise.errors import ArgumentTypeError, ConfigError


@explains_fields
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit computes, reduces gradients and returns outputs.

    Attributes:
        param_dtype: dtype of the all-gather and of forward and backward; None: the parameter's own.
        reduce_dtype: dtype of the gradient reduction and of unsynced gradients; None: the same as torch's FSDP2
            of the installed version: ``param_dtype`` up to torch 2.14, the parameter's own dtype from 2.15 on.
        output_dtype: dtype to which floating-point outputs of forward are cast; None: no cast.
        cast_forward_inputs: cast floating-point inputs of forward to ``param_dtype``, in containers too, which hold the
            caller's own tensors again after forward, with what it has written there.
        param_dtype_override_fn: called once for each parameter.  If it returns the parameter's own dtype, forward and
            backward use that; None or ``param_dtype`` changes nothing.

    Sharded parameters, gradients and optimizer states keep the parameter's own dtype.
    Source: torch.distributed.fsdp.MixedPrecisionPolicy.

    Example:
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).cast_forward_inputs
        True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value: object = getattr(self, name)
            is_dtype = isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex)
            if value is not None and not is_dtype:
                raise ArgumentTypeError(f"mp_policy: {name} is {value!r}; expected None or a floating dtype")


@dataclass(frozen=True)
class OffloadPolicy:
    """The device of sharded parameters, gradients and optimizer states; this base class keeps them on the mesh's device."""


@explains_fields
@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters and gradients, and so optimizer states, in host memory.

    Attributes:
        pin_memory: page-lock them, so that copies overlap with compute; ignored on a host without an accelerator.
    """

    pin_memory: bool = True


def precision_from(policy: object) -> MixedPrecisionPolicy:
    """Return ``policy`` as a MixedPrecisionPolicy; torch's class is accepted.  Raises: ArgumentTypeError for other objects."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = [each.name for each in fields(MixedPrecisionPolicy)]
    found = [name for name in names if hasattr(policy, name)]
    # By attributes and not by class: torch's module of FSDP2 is not imported (``tests/test_architecture.py``).
    if not {*names} - {*found} <= {"param_dtype_override_fn"}:  # torch has that from 2.15 on
        raise ArgumentTypeError(
            f"mp_policy is {policy!r}; expected a MixedPrecisionPolicy with {names}, such as "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    return MixedPrecisionPolicy(**{name: getattr(policy, name) for name in found})


def offload_from(policy: object) -> OffloadPolicy:
    """Return ``policy`` as an OffloadPolicy; torch's classes are accepted, and None means no offloading.

    Raises: ConfigError for other objects.
    """
    if policy is None or isinstance(policy, OffloadPolicy):
        return policy or OffloadPolicy()
    if type(policy).__name__ not in ("OffloadPolicy", "CPUOffloadPolicy"):
        raise ConfigError(
            f"offload_policy is {policy!r}; expected OffloadPolicy(), CPUOffloadPolicy(), DiskOffloadPolicy(folder) or None"
        )
    pin_memory = getattr(policy, "pin_memory", None)
    return OffloadPolicy() if pin_memory is None else CPUOffloadPolicy(bool(pin_memory))


def keeps_dtype(policy: MixedPrecisionPolicy, param: nn.Parameter, fqn: str) -> bool:
    """Return True if ``param_dtype_override_fn`` returns the own dtype of ``param``.

    Raises: ConfigError if it returns another dtype than that or ``param_dtype``.
    """
    ask = policy.param_dtype_override_fn
    wanted = None if ask is None else ask(param)
    if wanted not in (None, policy.param_dtype, param.dtype):
        raise ConfigError(
            f"param_dtype_override_fn returned {wanted} for {fqn}, not None, {policy.param_dtype} or {param.dtype}"
        )
    # None is no answer: such a parameter follows the policy, also if that is its own dtype.
    return wanted is param.dtype and wanted is not policy.param_dtype


def dtype_of_full(policy: MixedPrecisionPolicy, original: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter of dtype ``original`` is all-gathered and used."""
    return original if policy.param_dtype is None or not original.is_floating_point else policy.param_dtype


def dtype_of_reduction(policy: MixedPrecisionPolicy, original: torch.dtype, full: torch.dtype) -> torch.dtype:
    """Return the reduce dtype for a parameter of dtype ``original``, used in dtype ``full``."""
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    return full if torch.__version__ < "2.15" else original  # as FSDP2 of this torch does
