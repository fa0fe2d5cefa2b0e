"""A transaction around a step: the step happens on all ranks, or on none."""

from __future__ import annotations

import copy
import json
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.consistency import store
from shardwise.consistency.agreement import begin_generation, open_exchange
from shardwise.consistency.failure_report import cited, naming_lost_peers
from shardwise.consistency.process_groups import abort_all_connections, all_have_come, groups_within, reconnect_group
from shardwise.errors import ConfigError, DesyncError, RejectedStep, StateError, StepError, TransportError
from shardwise.fsdp.attachment import Attachment, attachment_of
from shardwise.fsdp.engine import Engine, engine_of
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.waiting_gradients import withdrawn
from shardwise.observe import Track, note
from shardwise.one_host import RandomState
from shardwise.optim.slices import as_they_are, copied
from shardwise.torch_private import ShardedTensor
from shardwise.zero.optimizer import OptimizerState, ZeroRedundancyOptimizer

# ---- What a step changes, saved and restored: units, gradients, buffers, parameters, optimizer state and options.

Undo = Callable[[], None]


class Saved:
    """The state before a step: copies of tensors, and functions that restore everything else.

    Attributes:
        num_bytes: bytes copied since :meth:`begin`.
        stepped: ids of the optimizers whose parameters and state are among it.
        undo_forward: restores the parameters that forward writes.
    """

    def __init__(self) -> None:
        self.num_bytes, self.stepped = 0, set[int]()
        self._memory: dict[Hashable, list[torch.Tensor]] = {}
        self._undo: list[Undo] = []
        self.undo_forward: Undo = lambda: None

    def begin(self) -> None:
        """Forget the state before the last step."""
        self._undo, self.num_bytes, self.stepped = [], 0, set()

    def copy(self, what: Hashable, tensors: Iterable[torch.Tensor]) -> Undo:
        """Copy ``tensors``; of a DTensor, the local tensor.  They are restored in place: every reference sees the old values.

        Returns the function that restores them.

        ``what`` names the memory of the copies, which is reused for tensors of the same shapes, as in the next step.
        """
        found = torch_private.locals_of(list(tensors))
        copies = self._memory.get(what, [])
        with torch.no_grad():
            if _fit(copies, found):
                torch_private.copy_all(copies, found)
            else:
                copies = self._memory[what] = [copied(tensor.detach()) for tensor in found]
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in found)

        def restore() -> None:
            with torch.no_grad():
                for tensor, was in zip(found, copies, strict=True):
                    tensor.detach().copy_(was)

        self._undo.append(restore)
        return restore

    def then(self, undo: Undo) -> None:
        """Call ``undo`` when the state is restored, after what was saved before."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Restore everything, in the order in which it was saved.  Does not communicate."""
        for undo in self._undo:
            undo()

    def clear(self) -> None:
        """Drop all references to what was saved; keep the memory of the copies."""
        self._undo, self.undo_forward = [], lambda: None


def _fit(copies: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Return True if ``found``, all plain tensors, can be copied into ``copies`` of earlier ones."""
    return len(found) == len(copies) and all(
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and (tensor.shape, tensor.dtype, tensor.device) == (copy.shape, copy.dtype, copy.device)
        for tensor, copy in zip(found, copies, strict=True)
    )


# ---- Units.  Ranks that stopped at different places know different things about each other: plans, numbers of exchanges,
# passes of links. All of that belongs to the engine, so after a failure it is created again as at the first forward.


def attachments_of(model: nn.Module) -> list[Attachment]:
    """Return what ``fully_shard`` has attached to the modules of ``model``."""
    found = {id(each): each for module in model.modules() if (each := attachment_of(module)) is not None}
    return list(found.values())


def save_units(saved: Saved, attachments: Sequence[Attachment]) -> None:
    """Save what a step changes in units besides tensors.  Raises: StateError if gradients of a backward are pending."""
    is_last: dict[int, bool] = {}
    for engine in _engines(attachments):
        if engine.is_in_step or engine.reductions.deferred or engine.manual.awaits_completion:
            raise StateError(
                "a transaction begins between steps, without pending gradients: found a forward or backward that "
                "has not ended, one with set_is_last_backward(False), or one that waits for finalize_backward(). Begin "
                "the transaction before it"
            )
        is_last[id(engine)] = engine.is_last_backward

    def forget_step() -> None:
        for engine in _engines(attachments):
            engine.forget_step()
            engine.is_last_backward = is_last.get(id(engine), True)

    def drop_engines() -> None:
        for attachment in attachments:
            attachment.is_root = None  # the next forward creates the engine

    saved.then(forget_step)
    for attachment in attachments:
        for unit in attachment.units:
            saved.then(_unit_as_it_is(unit))
            if (compression := unit.settings.compression) is not None:
                saved.num_bytes += sum(each.nbytes for each in compression.residuals.values())
                saved.then(compression.mark())
    saved.then(drop_engines)


def _engines(attachments: Sequence[Attachment]) -> list[Engine]:
    found = {id(engine): engine for each in attachments if (engine := engine_of(each.unit)) is not None}
    return list(found.values())


def _unit_as_it_is(unit: Unit) -> Undo:
    earlier = unit.earlier
    # gradients of earlier backwards never change in place
    held, partial, unsynced = dict(earlier.held), dict(earlier.partial), set(earlier.unsynced)
    undos = [
        as_they_are([unit], "policy"),
        as_they_are([unit.reduction], "num_replica_sums"),
    ]

    def restore() -> None:
        unit.earlier.put_back(held, partial)
        unit.earlier.unsynced = unsynced
        for undo in undos:
            undo()

    return restore


# ---- Gradients and buffers.


def holders_of(param: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's tensors that have ``param`` and its gradient: itself, or the shards of a ShardedTensor."""
    return [shard.tensor for shard in param.local_shards()] if isinstance(param, ShardedTensor) else [param]


def save_gradients(saved: Saved, holders: Sequence[torch.Tensor]) -> None:
    """Save the gradients of ``holders``: accumulated from earlier microbatches, if any."""
    found: dict[int, tuple[Any, Any]] = {}  # by id of the holder: the gradient, and what lies in it
    parts: list[torch.Tensor] = []
    for holder in holders:
        gradient = holder.grad
        if gradient is not None:
            found[id(holder)] = gradient, torch_private.local_of(gradient)
            parts.append(found[id(holder)][1])

    def restore() -> None:
        for holder in holders:
            gradient, inside = found.get(id(holder), (None, None))
            if gradient is not None and torch_private.local_of(gradient) is not inside:
                torch_private.set_local(gradient, inside)
            if holder.grad is not gradient:
                holder.grad = gradient

    saved.then(restore)
    saved.copy("gradients", parts)


def save_buffers(saved: Saved, places: Sequence[dict[str, torch.Tensor | None]]) -> None:
    """Save buffers, such as running statistics, which a forward changes; ``places``: of each module, by name."""
    found = [(place, dict(place)) for place in places]

    def restore() -> None:
        for place, was in found:
            place.update(was)

    saved.then(restore)
    buffers = {id(buffer): buffer for _, was in found for buffer in was.values() if buffer is not None}
    saved.copy("buffers", buffers.values())


# ---- Other state that users want restored: a gradient scaler, a schedule, anything with a state dict, random numbers.


def check_others(others: Sequence[Any]) -> None:
    """Check that all objects can be saved and restored.

    Raises: ConfigError if one cannot.
    """
    for each in others:
        is_rng = isinstance(each, str) and each == "rng"
        if not is_rng and not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(
                "also= takes objects with state_dict() and load_state_dict(): a GradScaler, a schedule, a data loader; and "
                f"'rng' for random numbers; found {each!r}"
            )


def _keep(each: Any) -> Undo:
    if isinstance(each, torch.amp.GradScaler):
        # its state dict lacks which optimizers it has unscaled in the step
        was = copy.deepcopy(vars(each))
        return lambda: vars(each).update(was)
    state = copy.deepcopy(each.state_dict())
    return lambda: each.load_state_dict(state)


def save_options(saved: Saved, each: OptimizerState) -> None:
    """Save the options of an optimizer and its lists of parameters."""
    optimizers = [each.outer] if each.inner is each.outer else [each.outer, each.inner]
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        saved.then(_options_as_they_are(group))
        saved.copy(("options", id(group)), [value for value in group.values() if isinstance(value, torch.Tensor)])
    saved.then(each.renew)


def save_step(saved: Saved, each: OptimizerState) -> None:
    """Save parameters and state of an optimizer that is about to step."""
    params = [param for group in each.outer.param_groups for param in group["params"]]
    saved.copy(("parameters", id(each)), [holder for param in params for holder in holders_of(param)])
    state = each.inner.state
    found = [(key, entry, {name: _kept(value) for name, value in entry.items()}) for key, entry in state.items()]
    values = [value for _, _, was in found for value in was.values()]
    saved.copy(("state", id(each)), [value for value in values if isinstance(value, torch.Tensor)])

    def restore() -> None:
        state.clear()
        for key, entry, was in found:
            entry.clear()
            entry.update(was)
            state[key] = entry

    saved.then(restore)
    saved.then(each.mark())


def _kept(value: Any) -> Any:
    return value if isinstance(value, (torch.Tensor, int, float, str, bool, type(None))) else copy.deepcopy(value)


def _options_as_they_are(group: dict[str, Any]) -> Undo:
    was, params = dict(group), list(group["params"])

    def restore() -> None:
        for name in [name for name in group if name not in was]:
            del group[name]
        group.update(was)
        cast(list[Any], group["params"])[:] = params

    return restore


def optimized(optimizer: Optimizer) -> OptimizerState:
    """Return the state of an optimizer.  Raises: ConfigError for one that steps inside backward."""
    if isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer.overlap_with_ddp:
        raise ConfigError(
            "an optimizer made with overlap_with_ddp=True steps inside backward, bucket by bucket, so that no "
            "state before its step exists that could be restored; make it without overlap to use transactions"
        )
    return OptimizerState.of(optimizer)


# ---- A rank's report of the exception that ended its step, and which of several was the first cause.

Choice = Literal["retry", "skip", "raise"]
_PACKAGE = str(Path(__file__).parent)
_INSIDE = (_PACKAGE, str(Path(torch.__file__).parent))
_LIMIT = 400  # characters of a quoted text


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's exception.

    Attributes:
        rank: global.  order: how many ranks had reported by then, this one included.
        follows: another rank's exception may have caused it.
        kind, text, place: name of the class, first line, and the line of user code that raised it.
        choice: what the user of this rank wants to do about it.
    """

    rank: int
    order: int
    follows: bool
    kind: str
    text: str
    place: str
    choice: Choice


def make_report(error: BaseException, rank: int, order: int, choice: Choice) -> Report:
    """Return the report of ``error`` on ``rank``."""
    text = (str(error).splitlines() or [""])[0][:_LIMIT]
    return Report(rank, order, _follows(error, order), type(error).__name__, text, place_of(error), choice)


def first_cause(reports: Iterable[Report]) -> Report:
    """Return the report that no other rank's exception has visibly caused; of several, the first that arrived."""
    return min(reports, key=lambda report: (report.follows, report.order))


def place_of(error: BaseException) -> str:
    """Return where ``error`` was raised: the innermost line outside torch and this package, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_INSIDE)]
    if not frames:
        return "no line of Python"
    frame = (outside or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def _follows(error: BaseException, order: int) -> bool:
    if isinstance(error, (StepError, TransportError, DesyncError)):
        return True
    # When connections are closed because of the first report, backends raise plain RuntimeErrors.
    words = ("gloo", "Connection", "connection")
    return order > 1 and isinstance(error, RuntimeError) and any(word in str(error) for word in words)


# ---- Ranks agree that all have reached the end of a step, or that one will not.
# Without a fault: one all-reduce of one number. With a fault: reports through the store, and connections are closed so
# that ranks that wait in a collective notice at once.

_LOOK_S = 0.1  # seconds between two store requests


class Agreement:
    """The ranks of ``group``, which make the same numbered steps.  Creating one is collective.

    Attributes:
        members: global ranks.  rank: this one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.members = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank()
        self._exchange = open_exchange(group, "transaction")
        self._track = Track(self._exchange.prefix)
        self._looked = 0.0

    # ---- without a fault ----

    def arrive(self) -> None:
        """Return once all ranks have reached the end of the step.

        Raises: StepError if one has failed in it, TransportError if one is gone or not in time; any RuntimeError of the
        backend.
        """
        self._track.note("agreement", "step")
        all_have_come(self.group)

    # ---- with a fault ----

    def check(self, number: int) -> None:
        """Raise StepError if a rank has failed in step ``number``; queries the store from time to time."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            if self._exchange.store.check([self._key(number, "order")]):
                raise StepError(f"another rank has failed; rank {self.rank} stops its step")

    def claim(self, number: int) -> int:
        """Publish that this rank has failed in step ``number``; return how many ranks have by now."""
        self._exchange.post(f"{number - 1}/committed", "")
        return self._exchange.store.add(self._key(number, "order"), 1)

    def was_committed(self, number: int) -> bool:
        """Return True if a rank has committed step ``number``: then all had reached its end."""
        return any(
            self._exchange.store.check([f"{self._exchange.prefix}/{number}/committed/{r}"])
            for r in self._exchange.peers()
        )

    def exchange_reports(self, number: int, mine: Report) -> Report | None:
        """Report ``mine``; return the first cause once all ranks have reported, or None if the step was committed after all.

        Closes this rank's connections, so that no rank waits for it in a collective. Raises: TransportError on every
        rank if one is gone, or does not report in time.
        """
        exchange = self._exchange
        abort_all_connections(self.members)

        def is_enough(_: Mapping[int, str]) -> bool:
            return mine.follows and self.was_committed(number)

        found = exchange.gather(f"{number}/report", json.dumps(asdict(mine)), is_enough)
        if absent := exchange.absent(found):
            if mine.follows and self.was_committed(number):
                return None
            late = (
                f"{exchange.named(absent)} did not finish its step within {exchange.timeout_s:g} s of rank "
                f"{mine.rank}, which failed: {mine.kind}: {mine.text}"
            )
            raise self._named(absent, late)
        return first_cause(Report(**json.loads(text)) for text in found.values())

    def wait_restored(self, number: int, problem: str) -> None:
        """Wait until all ranks have restored the state before step ``number``.

        ``problem``: why this rank could not.  Raises: TransportError on every rank if one has a problem or is gone.
        """
        exchange = self._exchange
        found = exchange.gather(f"{number}/back", problem)
        if absent := exchange.absent(found):
            late = f"{exchange.named(absent)} did not undo its step within {exchange.timeout_s:g} s"
            raise self._named(absent, late)
        wrong = {exchange.members[rank]: text for rank, text in found.items() if text}
        if wrong:
            what = "; ".join(f"rank {rank}: {text}" for rank, text in wrong.items())
            raise TransportError(f"the step could not be undone on all ranks; start again from a checkpoint. {what}")

    def _named(self, absent: Sequence[int], late: str) -> TransportError:
        gone = self._exchange.gone(absent)
        if not gone:
            return TransportError(self._exchange.absence(absent, late))
        names = [self._exchange.members[rank] for rank in gone]
        return TransportError(
            f"rank {names[0]} is gone in a transaction{cited(self._exchange.notes, names)}; what the others hold of the step "
            "is not undone. Start again from a checkpoint (shardwise train --max-restarts does)"
        )

    def _key(self, number: int, what: str) -> str:
        return f"{self._exchange.prefix}/{number}/{what}"


# ---- State shared by the transactions over one model: the ranks, the number of the current one, and the state before
# it.


class Ledger:
    """The state before each step of ``model`` and ``optimizers``; all ranks of the job take part.

    Creating one is collective.  Raises: ConfigError for groups whose collectives cannot be aborted.

    Attributes:
        agreement: how the ranks agree; None without other ranks.
        number: of transactions begun.  is_open: one is running.  saved: the state before it.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], also: tuple[Any, ...]) -> None:
        check_others(also)
        self.agreement = _agreement()
        self.number = 0
        self.is_open = False
        self._outer: Callable[[], None] | None = None
        self._also = also
        self._model = weakref.ref(model)
        self._ddps = [weakref.ref(each) for each in model.modules() if isinstance(each, DistributedDataParallel)]
        self._attachments = attachments_of(model)
        self._optimizers = {id(each): optimized(each) for each in optimizers}
        self.saved = Saved()
        before_step = weakref.WeakMethod(self.before_step)
        for each in optimizers:
            hook = each.register_step_pre_hook(lambda optimizer, *_: (save := before_step()) and save(optimizer))
            weakref.finalize(self, hook.remove).atexit = False

    def is_for(self, optimizers: Sequence[Optimizer], also: Sequence[Any]) -> bool:
        """Return True if this ledger is for these optimizers and objects, and for the current ranks."""
        same = list(self._optimizers) == [id(each) for each in optimizers]
        same = same and [id(each) for each in self._also] == [id(each) for each in also]
        return same and (self.agreement.group if self.agreement is not None else None) is _several_ranks()

    # ---- one transaction ----

    def begin(self) -> None:
        """Save the current state.  Raises: StateError inside another transaction, or with pending gradients."""
        if self.is_open:
            raise StateError("a transaction over this model runs already; leave it first")
        note("transaction")
        model = self._model()
        assert model is not None
        self._attachments = attachments_of(model)  # modules may have been added since the last one
        for ddp in self._living_ddps():
            members = self.agreement.members if self.agreement is not None else (0,)
            mine = self.agreement.rank if self.agreement is not None else 0
            settle = partial(torch_private.settle_buckets, ddp)
            naming_lost_peers(settle, "a transaction cannot begin", members, mine)
        saved, earlier = self.saved, [unit.earlier for each in self._attachments for unit in each.units]
        saved.begin()
        saved.undo_forward = saved.copy("forward", self._written_by_forward())
        with withdrawn(each.waiting for each in earlier):
            save_units(saved, self._attachments)
            save_gradients(saved, list(self._holders()))
        for each in earlier:
            saved.then(each.show)
        for ddp in self._living_ddps():
            saved.then(partial(torch_private.settle_buckets, ddp, has_failed=True))
        save_buffers(saved, [torch_private.buffers_of(module) for module in model.modules()])
        for each in self._optimizers.values():
            save_options(saved, each)
        for each in self._also:
            saved.then(_keep(RandomState() if isinstance(each, str) else each))
        self.number += 1
        self.is_open = True
        agreement, number = self.agreement, self.number
        if agreement is not None:
            self._outer = store.listen(lambda: agreement.check(number))

    def before_step(self, optimizer: Optimizer) -> None:
        """Save the parameters and the state of ``optimizer``, which is about to change them."""
        if self.is_open and id(optimizer) not in self.saved.stepped:
            self.saved.stepped.add(id(optimizer))
            save_step(self.saved, self._optimizers[id(optimizer)])
            self.saved.then(self.saved.undo_forward)  # again: what was saved just now has the writes of the forward

    def close(self) -> None:
        """End the transaction, committed or not."""
        self.is_open = False
        self.stop_listening()
        self.saved.clear()

    def stop_listening(self) -> None:
        """Let this thread wait without a look at the other ranks, but for that of a block around this one."""
        if self.agreement is not None:
            store.leave(self._outer)

    def reconnect(self) -> None:
        """Reconnect the groups, and restart the numbers of exchanges.  Collective."""
        if self.agreement is not None:
            for group in groups_within(self.agreement.members):
                reconnect_group(group)
            begin_generation(self.agreement.members)

    def _living_ddps(self) -> list[DistributedDataParallel]:
        return [ddp for ref in self._ddps if (ddp := ref()) is not None]

    def _written_by_forward(self) -> list[torch.Tensor]:
        """Return the parameters that the model itself writes: embeddings with ``max_norm`` do; shards of those that are."""
        model, units = self._model(), [unit for each in self._attachments for unit in each.units]
        params = [param for unit in units for param in unit.params]
        shards = {id(form): param.sharded for param in params for form in (param.full, param.registered_form)}
        modules = (
            [each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)] if model else []
        )
        return [shards.get(id(each.weight), each.weight) for each in modules if each.max_norm is not None]

    def _holders(self) -> Iterator[torch.Tensor]:
        model = self._model()
        params = list(model.parameters()) if model is not None else []
        params += [
            param
            for each in self._optimizers.values()
            for group in each.outer.param_groups
            for param in group["params"]
        ]
        for param in {id(param): param for param in params}.values():
            yield from holders_of(param)


def _several_ranks() -> dist.ProcessGroup | None:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return world if world is not None and world.size() > 1 and dist.get_backend(world) != "fake" else None


def _agreement() -> Agreement | None:
    world = _several_ranks()
    if world is None:
        return None
    for group in torch_private.all_groups():
        backends = {each.rpartition(":")[2] for each in dist.get_backend_config(group).split(",")}
        if group.size() > 1 and backends != {"gloo"}:
            raise ConfigError(
                f"a transaction needs groups whose collectives end when a rank leaves; group {group.group_name} talks "
                f"{dist.get_backend(group)}, which waits in kernels that cannot be interrupted. Use gloo, or restart from a "
                "checkpoint (shardwise train --max-restarts)"
            )
    return Agreement(world)


# ---- One step in a transaction: the context manager that users get.

Types = tuple[type[BaseException], ...]
Outcome = Literal["running", "committed", "again", "skipped", "undone"]


class Transaction:
    """A step that happens on all ranks or on none.

    Attributes:
        outcome: "committed": it happened on all ranks.  On none: "again": it is to be repeated; "skipped"; "undone":
            its exception was raised.
        cause: the exception that ended it, if any: its rank, class, text and place, as the error on other ranks has it.
        num_bytes: bytes copied to save the state before it.
    """

    def __init__(self, ledger: Ledger, retry: Types, skip: Types) -> None:
        self._ledger, self._retry, self._skip = ledger, retry, skip
        self.outcome: Outcome = "running"
        self.cause: StepError | None = None

    @property
    def again(self) -> bool:
        """True if an exception of a type in ``retry`` has undone the step: all ranks must repeat it."""
        return self.outcome == "again"

    @property
    def num_bytes(self) -> int:
        """Bytes copied to save the state before the last transaction."""
        return self._ledger.saved.num_bytes

    def reject(self, reason: str) -> NoReturn:
        """Reject this step, on all ranks.  Raises: RejectedStep."""
        raise RejectedStep(reason)

    def __enter__(self) -> Transaction:
        self._ledger.begin()
        self.outcome, self.cause = "running", None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        ledger = self._ledger
        try:
            if error is None and ledger.agreement is not None:
                try:
                    ledger.agreement.arrive()
                except BaseException as raised:
                    error = raised
            if error is None:
                self.outcome = "committed"
                return False
            return self._fail(error, is_own=kind is not None)
        finally:
            ledger.close()
            del error, trace  # they reference this frame

    def _fail(self, error: BaseException, is_own: bool) -> bool:
        """Undo the step with all ranks; return True to suppress the exception."""
        ledger, agreement = self._ledger, self._ledger.agreement
        ledger.stop_listening()  # from here on all ranks meet
        cause = self._report(error)
        mine = cause.order
        if agreement is not None:
            found = agreement.exchange_reports(ledger.number, cause)
            if found is None:
                self.outcome = "committed"
                if not isinstance(error, Exception):
                    raise error
                return False
            mine, cause = cause.order, found
        is_suppressed = cause.choice != "raise"
        if is_suppressed:
            traceback.clear_frames(error.__traceback__)  # its frames reference activations
        self._restore_all()
        self.cause = StepError(_text_of(cause, is_suppressed), cause.rank, cause.kind, cause.text, cause.place)
        self.outcome = "undone" if not is_suppressed else "skipped" if cause.choice == "skip" else "again"
        if is_suppressed or (is_own and mine == cause.order):
            return is_suppressed  # a rank's own exception is re-raised by ``with``
        raise self.cause from error

    def _report(self, error: BaseException) -> Report:
        ledger, agreement = self._ledger, self._ledger.agreement
        choice: Choice = "skip" if isinstance(error, self._skip) else "raise"
        choice = "retry" if isinstance(error, self._retry) else choice
        rank, order = (0, 1) if agreement is None else (agreement.rank, agreement.claim(ledger.number))
        return make_report(error, rank, order, choice)

    def _restore_all(self) -> None:
        ledger, agreement = self._ledger, self._ledger.agreement
        problem: Exception | None = None
        try:
            ledger.saved.restore()
        except Exception as found:
            problem = found
        try:
            if agreement is not None:
                agreement.wait_restored(
                    ledger.number, "" if problem is None else f"{type(problem).__name__}: {problem}"
                )
            elif problem is not None:
                raise problem
        finally:
            del problem
        ledger.reconnect()


def _text_of(cause: Report, is_suppressed: bool) -> str:
    advice = " To continue without raising, name the exception in retry= or skip= of shardwise.transaction"
    return (
        f"rank {cause.rank} raised {cause.kind} at {cause.place}: {cause.text}\nAll ranks have undone the step: parameters, "
        f"gradients, buffers and optimizer state are those before it.{'' if is_suppressed else advice}"
    )


# One per model: ``with shardwise.transaction(...)`` around every step sets up agreement once, not in each step.
_ledgers: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()


def transaction(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    retry: Types | type[BaseException] = (),
    skip: Types | type[BaseException] = (),
    also: Sequence[Any] = (),
) -> Transaction:
    """Return a context for one step (data, forward, backward, optimizer) that happens on all ranks, or on none.

    If a rank raises inside, all ranks notice within about a second, wherever they wait, and restore the state before
    the step:
    parameters, accumulated gradients, buffers, state and options of the optimizer.  Then they continue together, or
    raise together:
    the rank that raised re-raises its exception, the others raise :class:`shardwise.StepError` (rank, class, text,
    place).  If a process has ended, nothing is undone: :class:`shardwise.TransportError` names its rank on all ranks.

    Args:
        model: with any of the APIs of this package, in torch's DistributedDataParallel, or plain on one rank.
        optimizer: what steps inside the block, one or several.
        retry: exceptions after which all ranks continue, and ``step.again`` tells them to repeat the step.
        skip: exceptions after which all ranks continue without the step.
        also: other objects to restore: a ``GradScaler``, schedules, anything with ``state_dict`` and
            ``load_state_dict``; "rng" for random numbers of torch (CPU and accelerator), ``random`` and numpy.

    All ranks of the job must make the same transactions.  Only the optimizer may change parameters, and embeddings with
    ``max_norm`` their own; what other modules write to parameters in forward is not undone.
    Cost: one agreement per step; copies of buffers at its begin, and of existing gradients (call ``zero_grad`` before
        the block); copies of this rank's parameters and optimizer state when the optimizer steps (``step.num_bytes``).
        The memory of the copies is reused in every step.
    Raises: ConfigError for groups of other backends than gloo, and for an optimizer that steps inside backward;
        StateError in a transaction over the same model.

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
    optimizers = list(
        {id(each): each for each in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)}.values()
    )
    ledger = _ledgers.get(model)
    if ledger is None or not ledger.is_for(optimizers, also):
        ledger = _ledgers[model] = Ledger(model, optimizers, tuple(also))
    return Transaction(ledger, _types(retry, "retry"), _types(skip, "skip"))


def _types(given: Any, name: str) -> Types:
    found = (given,) if isinstance(given, type) else tuple(given)
    wrong = [each for each in found if not (isinstance(each, type) and issubclass(each, BaseException))]
    if wrong:
        raise ConfigError(f"{name}= takes classes of exceptions; found {wrong[0]!r}")
    return found
