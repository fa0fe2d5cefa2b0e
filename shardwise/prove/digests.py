"""``RunDigests``: two reproducible runs beside each other, and the first tensor in which they differ."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import ShardwiseError, StateError
from shardwise.fsdp.attachment import attachment_of
from shardwise.prove.compare import Recording, digest_of, lines_of, times_of
from shardwise.prove.record import RunRecorder, Terms, packed
from shardwise.reproducible.reproducible import Reproducible
from shardwise.safe_files import open_append, replace_file

DIGESTS = "digests.jsonl"


class RunDigests:
    """Write digests of the parameters, outputs and gradients of each step, and compare them with those of another run.

    Digests do not depend on the number of ranks: the other run may have another one.  Within a step are compared: parameters
    before the first microbatch, the first output of each sharded module per microbatch, gradients before clipping, last
    parameter first.  At its end the context compares the parameters after the last step.  Collective, as are the steps.

    Args:
        fixed: of this run.
        folder: gets ``digests.jsonl``, a recording of a line per step; lines from ``fixed.step`` on are replaced.
        against: the folder of the other run; without it digests are written only.

    Raises: StateError on every rank at the first difference, with its step and tensor; also if a file cannot be used.

    Example:
        >>> with shardwise.RunDigests(fixed, "two_ranks", against="one_rank"):  # doctest: +SKIP
        ...     train(fixed)
    """

    def __init__(self, fixed: Reproducible, folder: str | Path, *, against: str | Path | None = None) -> None:
        self._fixed, self._folder, self._against = fixed, Path(folder), against
        self._recorder = RunRecorder(Terms(str(folder), exact=True))
        self._seen: set[tuple[int, str]] = set()  # outputs; blocks may be computed again in backward
        self._others: Iterator[dict[str, Any]] = iter(()) if against is None else lines_of(Path(against), DIGESTS)
        self._hooks: list[Any] = []

    def __enter__(self) -> RunDigests:
        for name, module in self._fixed.model.named_modules():
            if attachment_of(module) is not None:
                self._hooks.append(module.register_forward_hook(partial(self._note_output, name or "the model")))
        self._on_first_rank(self._open)
        self._fixed.observer = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._fixed.observer = None
        for each in self._hooks:
            each.remove()
        if kind is None:
            self.begin()
            self._settle()

    # ---- a step, as an observer of Reproducible

    def begin(self) -> None:
        """Note the parameters, and forget a step that was left."""
        self._recorder.take()
        self._seen.clear()
        self._recorder.counts["microbatch"] = 0
        self._recorder.add("parameter", dict(self._fixed.model.named_parameters()))

    def _note_output(self, name: str, module: nn.Module, args: Any, output: object) -> None:
        number = self._fixed.place.number
        if number is not None and (number, name) not in self._seen:
            self._seen.add((number, name))
            self._recorder.counts["microbatch"] = number
            self._recorder.add_all("output", name, output)

    def end_microbatch(self, number: int) -> None:
        """Note the random state, which shows draws that not every number of ranks makes here."""
        self._recorder.counts["microbatch"] = number
        self._recorder.add("random state", {"torch": torch.get_rng_state()})

    def end(self) -> None:
        """Note the gradients; write and compare the step."""
        self._recorder.counts["microbatch"] = 0
        params = reversed([*self._fixed.model.named_parameters()])
        self._recorder.add("step gradient", {name: each.grad for name, each in params if each.grad is not None})
        self._settle()

    def _settle(self) -> None:
        """Gather what all ranks have noted; write and compare it."""
        numbers, values = self._fixed.constants(), self._recorder.take()
        told = [(dist.get_rank(), {"step": self._fixed.step, "optimizer": 0, "numbers": numbers, "values": values})]
        mesh = self._fixed.axes.mesh
        for group in map(mesh.get_group, range(mesh.ndim)):
            of_ranks: list[Any] = [None] * group.size()
            dist.all_gather_object(of_ranks, told, group=group)
            told = [each for found in of_ranks for each in found]
        self._on_first_rank(lambda: self._write_and_compare(told))

    # ---- files, on the first rank

    def _on_first_rank(self, call: Callable[[], str]) -> None:
        """Run ``call`` on the first rank; raise the error that it returns, or its exception, on every rank."""
        mesh, said = self._fixed.axes.mesh, [""]
        if not any(mesh.get_coordinate() or ()):
            try:
                said = [call()]
            except (OSError, ShardwiseError) as error:
                said = [f"RunDigests cannot use {DIGESTS}: {error}"]
        for dim in range(mesh.ndim):
            dist.broadcast_object_list(said, group=mesh.get_group(dim), group_src=0)
        if said[0]:
            raise StateError(said[0])

    def _open(self) -> str:
        """Keep the lines of earlier steps, which a resumed run has."""
        self._folder.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            lines = lines_of(self._folder, DIGESTS)
            kept = [json.dumps(each) + "\n" for each in lines if each["step"] < self._fixed.step]
        replace_file(self._folder, DIGESTS, "".join(kept))
        return ""

    def _write_and_compare(self, told: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
        step, row = self._fixed.step, Recording.from_lines(told).rows[self._fixed.step, 0]
        later = {"number": 0, "parameter": 0, "step gradient": 2}  # outputs and random states are between
        keys = sorted(row, key=lambda each: (later.get(each.stage, 1), each.microbatch, each.stage == "output"))
        found = {key: digest_of(next(iter(row[key].values()))) for key in keys if key.stage != "number"}
        halves = {key: np.array(divmod(each, 1 << 32), np.float64) for key, each in found.items()}
        values = {"|".join(map(str, key)): ["", packed(each)] for key, each in halves.items()}
        with open_append(self._folder, DIGESTS) as file:
            file.write(json.dumps({**told[0][1], "values": values}) + "\n")
        if self._against is None:
            return ""
        line = next((each for each in self._others if each["step"] >= step), {"step": -1, "optimizer": 0, "values": {}})
        theirs = Recording.from_lines([(0, line)]).rows.get((step, 0), {})
        for key in keys:
            if key not in theirs and key.stage not in ("output", "number"):  # another strategy has other units
                return (
                    f"step {step}: the run in {self._against} has no digest of {key}; it ended before, began later, or has "
                    "another model or other frozen parameters"
                )
            if key in theirs and any(times_of(key, each, theirs[key][0]) for each in row[key].values()):
                return (
                    f"step {step}: the first difference from the run in {self._against} is {key}. Compared are parameters, "
                    "then outputs, then gradients of each step. Save both runs before this step, and see `shardwise "
                    "checkpoint diff`"
                )
        return ""
