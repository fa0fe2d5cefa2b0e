"""``Reproducible``: a training loop whose bits do not depend on the number of ranks."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.collectives.owned import sum_bytes
from shardwise.errors import ConfigError, StateError, UsageError
from shardwise.fsdp.attachment import attachment_of
from shardwise.fsdp.clip import Limit
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.hooks import dynamo_disabled
from shardwise.fsdp.mesh import MeshAxes
from shardwise.fsdp.roots import bind_units
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.waiting_gradients import waits_for_sync
from shardwise.one_host import RandomState, set_seed
from shardwise.reproducible.optimizers import EqualSteps
from shardwise.reproducible.sums import GroupSums, clip_by_rows
from shardwise.reproducible.tree import BatchPlace
from shardwise.torch_private import versions_of


class StepObserver(Protocol):
    """Looks at a model before the first and after the last microbatch of a step, before gradients are clipped."""

    def begin(self) -> None:
        """No microbatch of the step has run."""

    def end_microbatch(self, number: int) -> None:
        """Microbatch ``number`` has run."""

    def end(self) -> None:
        """The gradients of the step are complete."""


class Reproducible:
    """Microbatches by number, and sums along one tree: the same bits at any number of ranks that divides their number.

    A step has ``num_microbatches`` microbatches of one shape, of which every rank computes equally many consecutive ones.
    Gradients are *summed* over all of them, so divide the loss by their number.  Random numbers follow the step and the
    microbatch.  A rank holds up to 2 log2(microbatches per rank) + 1 unsharded gradients until its last microbatch.

    Args:
        model: the root, sharded by ``fully_shard``, ``shard_model`` or ``replicate``.
        optimizer: is refused if its bits depend on how parameters are cut.
        num_microbatches: of a step, over all ranks.
        seed: of all random numbers.

    Attributes:
        step: the number of the next step; :meth:`microbatches` counts it.
        model, axes, place: the root, its data-parallel mesh, and the microbatches of this rank.
        observer: is called at the begin and the end of each step.

    Raises: ConfigError for a number of ranks that does not divide ``num_microbatches``, and for what cannot be reproducible.

    Example:
        >>> fixed = shardwise.Reproducible(model, optimizer, num_microbatches=12)  # doctest: +SKIP
        >>> losses = []
        >>> for number in fixed.microbatches():  # doctest: +SKIP
        ...     loss = loss_fn(model(inputs[number]), targets[number]) / 12
        ...     loss.backward()
        ...     losses.append(loss.detach())
        >>> fixed.clip_grad_norm_(1.0)  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
        >>> loss = fixed.sum(losses)  # doctest: +SKIP
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, num_microbatches: int, seed: int = 0
    ) -> None:
        attachments = {found: None for each in model.modules() if (found := attachment_of(each)) is not None}
        found = [unit for each in attachments for unit in each.units if unit.params]
        if not found:
            raise ConfigError(
                f"Reproducible: {type(model).__name__} contains no sharded module; call fully_shard or replicate on it first"
            )
        for unit in found:
            _refuse(unit)
        axes = {_axes_of(unit.settings.axes): unit.settings.axes for unit in found}
        if len(axes) > 1:
            raise ConfigError(
                f"Reproducible: parameters are on data-parallel meshes of {sorted(each[:2] for each in axes)} (shards, "
                "replicas); all must be on one mesh, since each rank computes the same microbatches for all of them"
            )
        ((num_shards, num_replicas, shard, replica), self.axes), *_ = axes.items()
        if optimizer is not None:
            own = {*map(id, [*model.parameters(), *(param.sharded for unit in found for param in unit.params)])}
            if any(id(param) not in own for each in optimizer.param_groups for param in each["params"]):
                raise ConfigError(
                    f"Reproducible: the optimizer has parameters of another model; give it those of this {type(model).__name__}"
                )
        self._equal_steps = None if optimizer is None else EqualSteps(optimizer)
        self.place = BatchPlace(num_microbatches, num_shards, num_replicas, shard, replica)
        self.model, self._seed, self.step = model, seed, 0
        self.observer: StepObserver | None = None
        self._units = found
        # The random state at the begin of the running microbatch; and whether each has drawn before the model's first forward.
        self._random: tuple[object, ...] = ()
        self._draws: dict[int, bool] = {}
        self._has_warned = False
        self._sums: list[GroupSums] = []
        for unit in found:
            sums = unit.settings.sums = GroupSums(self.place, unit.memory.is_collective)
            self._sums.append(sums)
        for engine in self._engines():
            bind_units(engine)

    # ---- a step ----

    def microbatches(self) -> Iterator[int]:
        """Yield the numbers of this rank's microbatches of one step, and set the random state of each.

        The step counts once the loop has ended; a loop that was left early begins the same step again.

        Raises:
            StateError: for a unit whose gradients were not reduced once in every microbatch, and for a buffer or a parameter
                that was written.
            UsageError: in a loop over microbatches.
            ConfigError: for options or groups of the optimizer that were changed, and by which its bits depend on shards.
        """
        place = self.place
        if place.number is not None:
            raise UsageError(
                f"Reproducible.microbatches() was called in microbatch {place.number} of a loop over it; end that loop first"
            )
        if self._equal_steps is not None:
            self._equal_steps.check()  # options and groups may have changed
        for unit in self._units:
            _refuse(unit)
        for engine in self._engines():
            engine.reductions.summed.clear()  # of a loop that was left early, whose gradients may have been cleared
        self._show_gradients()
        for unit in self._units:
            for param in (*unit.earlier.held, *unit.earlier.unsynced):
                raise StateError(waits_for_sync(param.fqn))
        for sums in self._sums:
            sums.clear()
        buffers, params = dict(self.model.named_buffers()), [each for unit in self._units for each in unit.params]
        tensors = [*buffers.values(), *(param.sharded for param in params)]
        versions, before = versions_of(tensors), {name: buffer.clone() for name, buffer in buffers.items()}
        if self.observer is not None:
            self.observer.begin()
        self._draws = {}
        hook = self.model.register_forward_pre_hook(self._note_draws, prepend=True)
        try:
            for number in place.own:
                place.number = number
                self._set_seed(number)
                self._random = _random_state()
                yield number
                if self.observer is not None:
                    self.observer.end_microbatch(number)
        finally:
            place.number = None
            hook.remove()
        for sums in self._sums:
            sums.end()
        names, present = [*buffers, *(param.fqn for param in params)], dict(self.model.named_buffers())
        changed = [name for name, *its in zip(names, versions, versions_of(tensors), strict=True) if its[0] != its[1]]
        # Replicas broadcast buffers before a forward, which writes the same values.
        written = [name for name in changed if name not in before or not torch.equal(before[name], buffers[name])]
        written += [name for name, buffer in buffers.items() if present.get(name) is not buffer]
        if written:
            raise StateError(
                f"{written[0]} was written in a microbatch: its values follow from the microbatches of this rank alone, as "
                "running statistics of BatchNorm do. Freeze such a buffer, or use a module without it (GroupNorm, LayerNorm); "
                "write parameters, and step optimizers, after the loop over microbatches()"
            )
        self._show_gradients()
        self._warn_of_draws()
        if self.observer is not None:
            self.observer.end()
        self._set_seed(place.num_microbatches)  # what follows draws the same numbers on every rank
        self.step += 1

    @dynamo_disabled
    def _note_draws(self, *_: Any) -> None:
        """Note whether the loop has drawn random numbers, at the first forward of a microbatch: its pre-hook."""
        number = self.place.number
        if number is not None and number not in self._draws:
            self._draws[number] = _random_state() != self._random

    def _warn_of_draws(self) -> None:
        """Warn, once, if only some microbatches of this rank drew: probably its first one, which another rank may have.

        It is no error, since draws that follow from the microbatch's number look the same and are right.
        """
        drew = [number for number, has_drawn in self._draws.items() if has_drawn]
        if self._has_warned or len(drew) in (0, len(self._draws)):
            return
        self._has_warned = True
        warnings.warn(
            f"Reproducible: in step {self.step} the loop drew random numbers before the forward of microbatches {drew}, and "
            f"not of {sorted({*self._draws} - {*drew})}. At another number of ranks other microbatches may draw: dropout and "
            "data would have other bits. A DataLoader draws where its iteration begins: call iter() before the loop, or "
            "give it generator=torch.Generator(). What draws by the microbatch's number is right",
            stacklevel=3,
        )

    def _engines(self) -> list[Engine]:
        return [*{engine: None for unit in self._units if (engine := engine_of(unit)) is not None}]

    def _show_gradients(self) -> None:
        """Show the sums in ``.grad``, which the loop has kept from use."""
        for engine in self._engines():
            engine.reductions.withdraw_waiting(engine.units)
            engine.reductions.summed.clear()
            engine.reductions.show_waiting(engine.units)

    def _set_seed(self, number: int) -> None:
        digest = hashlib.blake2b(f"{self._seed} {self.step} {number}".encode(), digest_size=8).digest()
        set_seed(int.from_bytes(digest, "big") >> 1)

    # ---- numbers of all ranks ----

    def sum(self, values: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all microbatches of ``values``, one number for each microbatch of this rank.  Collective.

        Raises: UsageError for another number of values, or other values.
        """
        given: list[object] = [*values]
        place = self.place
        own = [value.detach().reshape(()) for value in given if isinstance(value, torch.Tensor) and value.numel() == 1]
        if not len(own) == len(given) == place.per_rank:
            raise UsageError(
                f"Reproducible.sum got {len(given)} numbers, {len(own)} as tensors with one element; this rank computes "
                f"{place.per_rank} microbatches, and sum takes such a tensor of each, as loss.detach()"
            )
        mine = torch.stack(own)
        whole = mine.new_zeros(place.num_microbatches)
        whole[place.own.start : place.own.stop] = mine
        for dim in range(self.axes.mesh.ndim):
            sum_bytes(whole, self.axes.mesh.get_group(dim))
        return whole.sum()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of the model so that their total norm is at most ``max_norm``; return the norm before.

        Like :func:`shardwise.clip_grad_norm_`, in an order that does not depend on the number of ranks: each rank computes the
        norms of its rows, and all ranks sum the rows of all parameters.  Collective.
        """
        limit = Limit(max_norm, norm_type, error_if_nonfinite)
        return clip_by_rows([*self.model.parameters()], limit, self.axes)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next step, and what a run must continue with."""
        return {"step": self.step, "seed": self._seed, **self.constants()}

    def constants(self) -> dict[str, int]:
        """Return what the bits of a run depend on, apart from its model, data and seed; ``num_threads`` counts on CPUs."""
        num_threads = torch.get_num_threads() * (self.axes.device.type == "cpu")
        return {"num_microbatches": self.place.num_microbatches, "num_threads": num_threads}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the step of ``state_dict``, at any number of ranks.

        Raises: ConfigError if it has another number of microbatches, or, on CPUs, of threads of a rank.
        """
        for name, own in self.constants().items():
            if (saved := state_dict.get(name, own)) != own:
                raise ConfigError(f"Reproducible: the saved run has {name}={saved} and this one {own}: other bits")
        self.step, self._seed = int(state_dict["step"]), int(state_dict["seed"])


def _random_state() -> tuple[object, ...]:
    """Return the state of all random generators, as values that ``==`` compares."""
    state = RandomState().state_dict()
    return state["python"], state["numpy"], *(each.numpy().tobytes() for each in (state["torch"], *state["cuda"]))


def _axes_of(axes: MeshAxes) -> tuple[int, ...]:
    replica = 0 if axes.replicate_mesh_dim is None else axes.mesh.get_local_rank(axes.replicate_mesh_dim)
    return axes.num_shards, axes.num_replicas, axes.shard_rank, replica


def _refuse(unit: Unit) -> None:
    """Raise ConfigError for settings by which gradients depend on the number of ranks."""
    found = {
        "compression, whose errors follow from the shards": unit.settings.compression is not None,
        "set_custom_reduce_scatter": unit.settings.custom.reduce_scatter is not None,
        "set_all_reduce_hook": unit.settings.all_reduce_hook is not None,
        "set_gradient_divide_factor (divide the loss instead)": unit.policy.divide_factor is not None,
        "set_allow_rank_divergence": unit.settings.may_diverge or unit.engine_side.diverges,
    }
    for what, is_set in found.items():
        if is_set:
            raise ConfigError(
                f"Reproducible: unit '{unit.name}' has {what}; its sums would depend on the number of ranks"
            )
