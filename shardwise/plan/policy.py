"""What a unit does with its parameters and gradients: values, replaced whole, never changed in place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """The behaviour of one unit.

    Attributes:
        reshard_after_forward: True: give full parameters back after forward; False: keep them until backward has used
            them; an int: keep shards on a mesh of that many ranks.
        reshard_after_backward: give full parameters back after backward.
        keeps_full_memory: leave the memory of full parameters where it is when they are given back: the next ones lie there
            too.
        unshard_in_backward: False when backward of this unit reads no parameter (an embedding).
        sync: reduce gradients in this backward; False holds them for a later one.
        syncs_replicas: on a mesh with a replica axis, sum over it too; False keeps partial sums.
        divide_factor: what summed gradients are divided by; None: the number of data-parallel ranks.
        sum_only: collectives may use nothing but sums.
        reduces_unused: send zeros for trainable parameters that got no gradient, so that ranks may use different ones.
    """

    reshard_after_forward: bool | int = True
    reshard_after_backward: bool = True
    keeps_full_memory: bool = False
    unshard_in_backward: bool = True
    sync: bool = True
    syncs_replicas: bool = True
    divide_factor: float | None = None
    sum_only: bool = False
    reduces_unused: bool = False
