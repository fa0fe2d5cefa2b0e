"""``OptimizerOffload``: an optimizer whose updates run unit by unit on a thread of their own, while backward runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.errors import ConfigError
from shardwise.fsdp.attachment import all_units
from shardwise.fsdp.gradients import early_readers
from shardwise.fsdp.param import ShardedParam
from shardwise.observe import Call, Listener, listeners
from shardwise.offload.disk import DiskTier, slot_bytes
from shardwise.offload.staging import Load, Staging
from shardwise.offload.units import Guess, UpdateUnit, drop
from shardwise.one_host import usable_cores
from shardwise.optim.elementwise import ElementwiseStep
from shardwise.optim.sharded_optimizer import ShardedOptimizer, optimizer_backend
from shardwise.optim.slices import (
    Closure,
    Groups,
    OptimizerBackend,
    Options,
    Params,
    ParamSlice,
    PerSlice,
    Values,
    gradient_of,
    local_of,
    loss_of,
    whole,
)
from shardwise.optim.state_dict import copy_options, options_of

__all__ = ["OffloadReport", "OptimizerOffload", "offload_report"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class OptimizerOffload:
    """Keep optimizer state on the host, and update there, unit by unit, while backward still runs.

    Pass it to :class:`shardwise.ShardedOptimizer` as ``offload=``; the optimizer must be element-wise.  Every update is
    equal to the bit to that of the plain optimizer.  An update that runs before ``step()`` is a guess: ``step()`` makes it
    again for the units whose gradients, parameters or options have changed since, for example by clipping.

    State that you read is for use until the next forward or backward; read it again to use or change it after that.
    With ``undo`` and a fused optimizer, a gradient that you replace by a tensor in other memory may change the last bits.

    Args:
        fraction: offload at least this part of the bytes of the parameters, in whole units, those first whose backward is
            first; the rest is updated in ``step()``, where it is.  Parameters of no unit are never offloaded.
        undo: False to update in ``step()`` only: needs no copies of state (and on CPU ranks none of parameters), and overlaps
            with nothing.  None: so with ``folder``, and on CPU ranks of one core each, where an early update would take its
            time from backward.
        num_threads: of the updates; None: the cores of this host divided by its ranks.
        folder: keep the state on a disk, in a file without a name that ends with the process; None: in memory.  The folder
            must exist: it is not made, so a disk that is not mounted is an error.

    On accelerators parameters and gradients stay on the device, with a copy of the parameters in page-locked memory; those
    sharded with ``CPUOffloadPolicy()`` are on the host, too.

    Example:
        >>> optimizer = shardwise.ShardedOptimizer(  # doctest: +SKIP
        ...     dict(model.named_parameters()),
        ...     torch.optim.AdamW,
        ...     lr=1e-3,
        ...     fused=True,
        ...     offload=shardwise.OptimizerOffload(),
        ... )
    """

    fraction: float = 1.0
    undo: bool | None = None
    num_threads: int | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.fraction, (int, float))  # pyright: ignore[reportUnnecessaryIsInstance]  from user code
        if not is_number or not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(
                f"OptimizerOffload(fraction={self.fraction!r}); expected a number from 0 to 1, or folder=..."
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"OptimizerOffload(num_threads={self.num_threads}); expected None, or 1 or more")
        if self.undo and self.folder is not None:
            raise ConfigError("OptimizerOffload(undo=True) keeps state in memory: leave out undo= or folder=")

    def over(self, backend: OptimizerBackend, groups: Groups, options: Callable[[], Options]) -> OptimizerBackend:
        """Return the backend that runs in place of ``backend``.  Raises: ConfigError if that is not element-wise."""
        if type(backend) is not ElementwiseStep:
            raise ConfigError(
                f"offload= is for element-wise optimizers, and {type(backend.optimizer).__name__} needs more than the elements "
                "of one unit. Leave offload= out"
            )
        return OffloadedStep(self, backend, groups, options)


class OffloadedStep:
    """Run an optimizer per unit, on one thread for all of them; see :class:`OptimizerOffload`.

    The thread is also the only one that uses the tier.  ``optimizer`` has the options; the units have the state.

    Attributes:
        units: those that are offloaded, in the order in which backward is expected to reach them.
        resident: all other parameters, which the user's thread updates.
    """

    is_elementwise = True

    def __init__(
        self, policy: OptimizerOffload, plain: ElementwiseStep, groups: Groups, options: Callable[[], Options]
    ) -> None:
        self.optimizer = plain.optimizer
        num_threads = policy.num_threads or cores_of_a_rank()
        if policy.undo is None:
            is_early = policy.folder is None and (num_threads > 1 or torch.accelerator.is_available())
            policy = replace(policy, undo=is_early)
        self._policy, self._plain, self._options = policy, plain, options
        self._disk = None if policy.folder is None else DiskTier(policy.folder)
        self.units: list[UpdateUnit] = []
        self.resident: list[UpdateUnit] = []
        # by id of the parameter: its unit, and index of its slice
        self._index_of: dict[int, tuple[UpdateUnit, int]] = {}
        self._staging: dict[tuple[torch.device, bool], Staging] = {}
        self._worker = _Worker(num_threads)
        self._add(dict(enumerate(groups)))
        if policy.undo:
            early_readers.append(_reader_of(weakref.ref(self)))
            weakref.finalize(self, early_readers.remove, early_readers[-1])
        if policy.folder is not None:
            listeners.append(_Return(weakref.ref(self)))
            weakref.finalize(self, listeners.remove, listeners[-1])

    def _add(self, groups: Mapping[int, tuple[Params, Mapping[str, Any]]]) -> None:
        """Add units for the parameters of ``groups``, which are by index."""
        found = [*enumerate(list(all_units))]
        number_of = {id(param.sharded): number for number, unit in found for param in unit.params}
        places = {number: unit.settings.storage for number, unit in found}
        members: dict[int, dict[int, list[Sequence[ParamSlice]]]] = {}  # by number of the FSDP unit; -1: of none
        num_bytes: dict[int, int] = {}
        for index, (params, _) in groups.items():
            for param in params:
                local, number = local_of(param[0]), number_of.get(id(param[0].param), -1)
                members.setdefault(number, {}).setdefault(index, []).append(param)
                num_bytes[number] = num_bytes.get(number, 0) + local.numel() * local.element_size()
        rest = members.pop(-1, {})
        left = self._policy.fraction * sum(num_bytes[number] for number in members)
        options, needed = {index: found for index, (_, found) in groups.items()}, 0
        for number in reversed(members):
            if left <= 0:
                for index, params in members[number].items():
                    rest.setdefault(index, []).extend(params)
                continue
            left -= num_bytes[number]
            for index, params in members[number].items() if self._disk is not None else ():
                needed += slot_bytes(_state_bytes(self._plain, params, options[index]))
            place = places[number]
            staging = self._staging.setdefault((place.device, place.is_offloaded), Staging(place))
            used = staging if self._policy.undo or staging.is_concurrent else None
            unit = UpdateUnit(len(self.units), self._disk, members[number], options, self._plain, used)
            self.units.append(unit)
            self._index_of.update({id(each.param): (unit, index) for index, each in enumerate(unit.slices)})
        if rest:
            self.resident.append(UpdateUnit(-1, None, rest, options, self._plain, None))
        if self._disk is not None:
            self._disk.reserve(needed)

    # ---- updates ----

    def read(self, params: Sequence[ShardedParam], gradients: Sequence[torch.Tensor], ready: Any) -> None:
        """Take gradients that the end of this backward will set; update the units that have all of theirs."""
        touched: dict[UpdateUnit, None] = {}
        for param, gradient in zip(params, gradients, strict=True):
            unit, index = self._index_of.get(id(param.sharded), (None, 0))
            if unit is not None:
                unit.arrivals.gradients[index] = gradient
                touched[unit] = None
        for unit in touched:
            arrivals = unit.arrivals
            # a guess of an earlier backward: a step was skipped, or there are more backwards than usual
            self._drop(unit)
            if len(arrivals.gradients) == sum(each.param.requires_grad for each in unit.slices):
                found, arrivals.gradients = arrivals.gradients, {}
                arrivals.num_backwards += 1
                if arrivals.num_backwards == arrivals.num_expected:
                    self._guess(unit, found, ready)

    def _guess(self, unit: UpdateUnit, found: Mapping[int, torch.Tensor], ready: Any) -> None:
        gradients: list[torch.Tensor | None] = []
        for index, param_slice in enumerate(unit.slices):
            earlier, gradient = param_slice.param.grad, found.get(index)
            local = None if gradient is None else torch_private.local_of(gradient).detach()
            if earlier is not None and local is not None:
                before = torch_private.local_of(earlier).detach()
                if ready is not None or before.shape != local.shape:
                    return  # the host would have to wait for the sum, or user code has set another gradient
                local = before + local
            gradients.append(local)
        unit.guess = Guess(unit.options(self._options()), Load(gradients, ready))
        assert unit.copies is not None
        unit.copies.staging.expect(unit.copies, unit.guess.load)
        self._worker.submit(unit.make, unit.guess)

    def _drop(self, unit: UpdateUnit) -> None:
        if unit.guess is not None:
            self._worker.submit(drop, unit.guess)
            unit.guess = None

    def step(self, closure: Closure | None = None) -> Any:
        """Run ``closure``, then update all parameters from their current gradients, or keep what was updated early."""
        loss = loss_of(closure)
        groups = self.optimizer.param_groups
        now = {staging: staging.begin() for staging in self._staging.values()}
        try:
            for unit in self.units:
                guess, unit.guess = unit.guess, None
                found = [gradient_of(each) for each in unit.slices]
                load = Load([None if each is None else each.detach() for each in found])
                if unit.copies is not None:
                    load.ready = now[unit.copies.staging]
                    if guess is None:
                        unit.copies.staging.expect(unit.copies, load)
                self._worker.submit(unit.finish, guess, load, unit.options(groups))
            for unit in self.resident:
                copy_options([groups[index] for index in unit.groups], unit.step.optimizer.param_groups)
                unit.step.step()
            self._worker.wait()
        finally:  # waits here where a step is interrupted: its updates would run beside the next forward
            errors = self._worker.errors()
            if self._disk is not None:
                self._worker.submit(self._disk.rest)  # forward and backward have its memory
            for staging in now:
                staging.end()
            for arrivals in [unit.arrivals for unit in self.units]:
                arrivals.num_expected, arrivals.num_backwards = max(1, arrivals.num_backwards), 0
                arrivals.gradients.clear()
            if errors:
                raise errors[0]
            for unit in (*self.units, *self.resident):  # an optimizer may count its steps in its groups
                for index, own in zip(unit.groups, unit.step.optimizer.param_groups, strict=True):
                    groups[index].update({k: v for k, v in options_of(own).items() if not isinstance(v, torch.Tensor)})
        return loss

    # ---- state ----

    def _each(self, job: Callable[[UpdateUnit], _T]) -> list[_T]:
        """Drop all guesses, call ``job`` with each unit on the thread of the updates, and return the results."""
        for unit in self.units:
            self._drop(unit)
        jobs = [self._worker.submit(job, unit) for unit in self.units]
        if errors := self._worker.errors():
            raise errors[0]
        return [*[each.result() for each in jobs], *map(job, self.resident)]

    def give_back(self) -> None:
        """Return state that was read to the disk, on the thread of the updates."""
        for unit in self.units if self.units and self.units[0].is_read else ():
            unit.is_read = False
            self._worker.submit(unit.give_back)

    def mark(self) -> Callable[[], None]:
        """Return a function that restores the state of all units, which has no other place."""
        undos = dict(zip([*self.units, *self.resident], self._each(UpdateUnit.keep), strict=True))

        def restore() -> None:
            self._each(lambda unit: undos[unit]())

        return restore

    def add_group(self, params: Params, options: Mapping[str, Any]) -> None:
        """Add a param group."""
        self._each(lambda unit: None)
        self._plain.add_group(params, options)
        index = len(self.optimizer.param_groups) - 1
        self._add({index: (params, options_of(self.optimizer.param_groups[index]))})

    def states(self, blank: bool = False) -> Values:
        """Return the state of every parameter that has state."""
        found = self._each(lambda unit: unit.read_state(blank))
        of = {name: values for each in found for name, values in each.items()}
        return {name: of[name] for name in self._plain.names if name in of}

    def local_states(self) -> Values:
        """Return :meth:`states`: all of it is local."""
        return self.states()

    def load(self, values: Values, options: Sequence[Mapping[str, Any]], adopt: bool = False) -> None:
        """Replace all state and options."""
        self._each(lambda unit: None)  # then the thread is idle
        for unit in (*self.units, *self.resident):
            unit.load(values, options, adopt)
        copy_options(options, self.optimizer.param_groups)


class _Worker:
    """The thread of the updates.  What its jobs raise is kept until :meth:`errors` returns it."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: list[Future[Any]] = []
        # A thread has its own number of threads, which also becomes the default of threads that start later: the second
        # call restores the default.
        self._thread = ThreadPoolExecutor(1, "shardwise-offload", torch.set_num_threads, (num_threads,))
        self._thread.submit(torch.get_num_threads).result()
        torch.set_num_threads(torch.get_num_threads())

    def submit(self, job: Callable[..., _T], *args: Any) -> Future[_T]:
        """Run ``job`` without a graph, after all earlier ones."""
        unread = [each for each in self._jobs if not each.done() or each.exception()]
        self._jobs = [*unread, self._thread.submit(torch.no_grad()(job), *args)]
        return self._jobs[-1]

    def wait(self) -> list[BaseException]:
        """Wait for all jobs; return what they have raised, as does the next call."""
        return [error for job in self._jobs if (error := job.exception()) is not None]

    def errors(self) -> list[BaseException]:
        """Wait for all jobs; return what those have raised that were submitted since the last call."""
        found = self.wait()
        self._jobs = []
        return found


class _Return(Listener):
    """Returns state that was read to its disk in the next forward, which needs the memory.  It does not own the optimizer."""

    def __init__(self, backend: weakref.ref[OffloadedStep]) -> None:
        self._backend = backend

    def end(self, track: str, what: str, subject: str, num_bytes: int, call: Call | None) -> None:
        if what == "reshard" and (found := self._backend()) is not None:
            found.give_back()


def _reader_of(backend: weakref.ref[OffloadedStep]) -> Callable[..., None]:
    """Return what the engine calls with gradients; it does not keep the optimizer alive."""

    def read(params: Sequence[ShardedParam], gradients: Sequence[torch.Tensor], ready: Any) -> None:
        if (found := backend()) is not None:
            found.read(params, gradients, ready)

    return read


def _state_bytes(plain: ElementwiseStep, params: Params, options: Mapping[str, Any]) -> list[int]:
    """Return the bytes of each tensor of ``params``' state, by a step of another optimizer on two elements of each dtype."""
    found, sizes = [local_of(each) for param in params for each in param], dict[torch.dtype, list[int]]()
    for dtype in {local.dtype for local in found}:
        probe = ParamSlice("", torch.zeros(2, dtype=dtype, device="cpu"), 0, whole(torch.Size([2])))
        state = plain.over([([[probe]], options)]).states(blank=True).get("", {})
        sizes[dtype] = [value[0].element_size() for value in state.values() if isinstance(value, PerSlice)]
    return [local.numel() * size for local in found for size in sizes[local.dtype]]


def cores_of_a_rank() -> int:
    """Return the number of cores of this host per rank: of all ranks of the job, or one per accelerator if these are fewer."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if torch.accelerator.is_available():
        num_ranks = min(num_ranks, torch.accelerator.device_count())
    return max(1, usable_cores() // max(1, num_ranks))


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What offloading has done so far on this rank.

    Attributes:
        num_units: units that are offloaded.  offloaded_bytes, resident_bytes: of parameters, in these units and in the others.
        num_updates: updates of units by ``step()``.  num_early: of these, the ones made while backward ran, and kept.
        num_redone: those made early and made again, since gradients, parameters or options had changed.
    """

    num_units: int
    offloaded_bytes: int
    resident_bytes: int
    num_updates: int
    num_early: int
    num_redone: int


def offload_report(optimizer: ShardedOptimizer) -> OffloadReport:
    """Return what offloading has done.  Raises: ConfigError for an optimizer without ``offload=``."""
    backend = optimizer_backend(optimizer)
    if not isinstance(backend, OffloadedStep):
        raise ConfigError("offload_report() got an optimizer made without offload=; pass OptimizerOffload() to it")
    done = [unit.arrivals for unit in backend.units]
    return OffloadReport(
        len(backend.units),
        _bytes_of(backend.units),
        _bytes_of(backend.resident),
        sum(each.num_steps for each in done),
        sum(each.num_kept for each in done),
        sum(each.num_redone for each in done),
    )


def _bytes_of(units: Iterable[UpdateUnit]) -> int:
    found = [local_of(each) for unit in units for each in unit.slices]
    return sum(local.numel() * local.element_size() for local in found)
