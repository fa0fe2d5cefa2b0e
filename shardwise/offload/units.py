"""The optimizer of one unit: it updates copies of the parameters, which become the parameters when the user steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise import torch_private
from shardwise.observe import span
from shardwise.offload.disk import DiskTier, State
from shardwise.offload.staging import Copies, Digests, Gradients, Load, Staging, digests_of
from shardwise.optim.elementwise import ElementwiseStep, is_per_element
from shardwise.optim.slices import Options, Params, ParamSlice, PerSlice, Values, whole
from shardwise.optim.state_dict import copy_options, options_of, unwrap

# ---- What an update depends on.


def _are_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_are_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_are_equal, left, right))
    return type(left) is type(right) and bool(left == right)


@dataclass(slots=True, eq=False)
class Guess:
    """An update made before ``step()``, which keeps it if everything that it depends on is still the same.

    Attributes:
        options: of each param group of the unit.
        load: its gradients.
        digests: of the gradients, and of the parameters.
        undo: restores the state and the options; None if the optimizer raised, as it will again in ``step()``.
    """

    options: Options
    load: Load
    digests: Digests | None = None
    undo: Callable[[], None] | None = None


@dataclass(slots=True)
class Arrivals:
    """What is known of the running step of one unit, and of all its steps.

    Attributes:
        gradients: those that have arrived in this backward, by index of the slice.
        num_backwards: how many of this step have given all gradients.  num_expected: how many the last step had.
        num_steps, num_kept, num_redone: updates of all steps; those that were made early and kept, or made again.
    """

    gradients: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    num_backwards: int = 0
    num_expected: int = 1
    num_steps: int = 0
    num_kept: int = 0
    num_redone: int = 0


# ---- One unit.


class UpdateUnit:
    """The parameters of one FSDP unit in an optimizer of their own, so that a step of the user is one step of it.

    With ``staging`` the optimizer runs over copies in host memory, which ``step()`` copies into the parameters: until then no
    reader sees an update, and to drop one costs its state only.  Without, it updates the parameters in place, in ``step()``.

    Attributes:
        number: in ``disk``, where the state lives between updates; None: in memory.  groups: indices of its param groups.
        slices: of its parameters.
        guess: the update made early, if there is one; only the user's thread writes it.
        is_read: the state was brought into memory, for a checkpoint or by the user.
    """

    def __init__(
        self,
        number: int,
        disk: DiskTier | None,
        groups: Mapping[int, Params],
        options: Mapping[int, Mapping[str, Any]],
        plain: ElementwiseStep,
        staging: Staging | None,
    ) -> None:
        self.number, self.disk, self.groups = number, disk, sorted(groups)
        self.slices = [each for group in self.groups for param in groups[group] for each in param]
        self.copies = None if staging is None else Copies(self.slices, staging)
        wanted = [(groups[group], options[group]) for group in self.groups]
        if self.copies is not None:
            pairs = zip(self.slices, self.copies.tensors, strict=True)
            inner = iter([ParamSlice(each.name, tensor, 0, whole(tensor.shape)) for each, tensor in pairs])
            wanted = [([[next(inner) for _ in param] for param in params], found) for params, found in wanted]
        self.step = plain.over(wanted)
        self.guess: Guess | None = None
        self.is_read = False
        self._kept: list[torch.Tensor] = []  # the memory of the state before a guess
        self.arrivals = Arrivals()

    # ---- on the user's thread ----

    def options(self, options: Options) -> Options:
        """Return a copy of the options of the unit's groups."""
        return [_copied(options_of(options[group])) for group in self.groups]

    # ---- on the thread of the updates ----

    def make(self, guess: Guess) -> None:
        """Update early."""
        copies = self.copies
        assert copies is not None
        with span("offload", "update", self.slices[0].name), copies.staging.staged(copies, guess.load):
            guess.digests = digests_of([*[each.grad for each in copies.tensors], *copies.tensors])
            undo = self.keep(self._kept)
            try:
                self._update(guess.options)
                guess.undo = undo
            except Exception:  # as in ``step()``
                undo()

    def finish(self, guess: Guess | None, load: Load, options: Options) -> None:
        """Keep ``guess`` if it is right, or update from ``load``; then copy the result into the parameters."""
        copies, arrivals = self.copies, self.arrivals
        if not self._is_right(guess, load.gradients, options):
            with span("offload", "update" if guess is None else "redo", self.slices[0].name):
                drop(guess)
                with nullcontext() if copies is None else copies.staging.staged(copies, load):
                    self._update(options)
            arrivals.num_redone += guess is not None
        else:
            arrivals.num_kept += 1
        arrivals.num_steps += 1
        if copies is not None:
            copies.staging.send(copies)

    def _is_right(self, guess: Guess | None, gradients: Gradients, options: Options) -> bool:
        if guess is None or guess.undo is None or self.copies is None or not _are_equal(options, guess.options):
            return False
        return _are_equal(self.copies.staging.digests([*gradients, *self.copies.params()]), guess.digests)

    def _update(self, options: Options) -> None:
        copy_options(options, self.step.optimizer.param_groups)
        self._load()
        self.step.step()
        self._release()

    # ---- the state: values per element, which may be on disk, and numbers such as step counts ----

    def _places(self) -> Iterator[tuple[dict[str, Any], str]]:
        optimizer = self.step.optimizer
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            entry: dict[str, Any] = optimizer.state.get(param, {})
            for key, value in entry.items():
                if is_per_element(value, param.shape):
                    yield entry, key

    def _state(self) -> State:
        return [entry[key] for entry, key in self._places()]

    def _hold(self, state: State) -> None:
        for (entry, key), value in zip([*self._places()], state, strict=True):
            entry[key] = value

    def keep_numbers(self) -> Callable[[], None]:
        """Return a function that restores all of the optimizer's state but the values per element."""
        optimizer, mark = self.step.optimizer, self.step.mark()
        lists = [group["params"] for group in optimizer.param_groups]
        places = {(id(entry), key) for entry, key in self._places()}
        entries = [
            (param, entry, dict(entry), {k: _copied(v) for k, v in entry.items() if (id(entry), k) not in places})
            for param, entry in optimizer.state.items()
        ]

        def restore() -> None:
            mark()
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = params
            optimizer.state.clear()
            for param, entry, was, copies in entries:
                entry.clear()
                entry.update(was)
                for key, value in copies.items():
                    entry[key] = was[key].copy_(value) if isinstance(value, torch.Tensor) else value
                optimizer.state[param] = entry

        return restore

    def read_state(self, blank: bool = False) -> Values:
        """Return the state by name of the parameter, in memory."""
        if not blank:
            self._load(is_read=True)
            self.is_read = True
        return self.step.states(blank)

    def give_back(self) -> None:
        """Store the state, if it is in memory."""
        if not all(each.is_meta for each in self._state()):
            self._release()

    def load(self, values: Values, options: Options, adopt: bool) -> None:
        """Replace the state by ``values``, by name, and the options; on the user's thread, since it may be collective."""
        found = {each.name: values[each.name] for each in self.slices if each.name in values}
        if self.copies is not None:  # each of these parameters has one slice
            for each in (each for each in self.slices if each.name in found):
                cut = {key: unwrap(each.name, key, value, [each], adopt) for key, value in found[each.name].items()}
                found[each.name] = {k: value[0] if isinstance(value, PerSlice) else value for k, value in cut.items()}
        self.step.load(found, [options[group] for group in self.groups], adopt or self.copies is not None)
        self._release()

    def _load(self, is_read: bool = False) -> None:
        if self.disk is not None:
            self._hold(self.disk.load(self.number, self._state(), is_read))

    def _release(self) -> None:
        if self.disk is not None:
            self._hold(self.disk.store(self.number, self._state()))

    def keep(self, copies: list[torch.Tensor] | None = None) -> Callable[[], None]:
        """Return a function that restores the state of now, however many updates have followed.

        Args:
            copies: those of an earlier call, whose function is no longer needed: their memory is used again.
        """
        self._load(is_read=True)
        found, restore = self._state(), self.keep_numbers()
        copies = [] if copies is None else copies
        if [(each.shape, each.dtype) for each in copies] != [(each.shape, each.dtype) for each in found]:
            copies[:] = [torch.empty_like(each) for each in found]
        torch_private.copy_all(copies, list(found))

        def undo() -> None:
            restore()
            torch_private.copy_all(list(found), copies)
            self._hold(found)
            self._release()

        return undo


def drop(guess: Guess | None) -> None:
    """Undo ``guess``, if there is one that did not raise."""
    if guess is not None and guess.undo is not None:
        guess.undo()
        guess.undo = None


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value if isinstance(value, int | float | str | bool | None) else copy.deepcopy(value)
