"""``RunDigests``: two reproducible runs beside each other, and the first tensor in which they differ."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardwise import torch_private
from shardwise.collectives.owned import sum_bytes, sum_of
from shardwise.containers import tensors_in
from shardwise.errors import ShardwiseError, StateError
from shardwise.fsdp.attachment import attachment_of
from shardwise.prove.compare import lines_of
from shardwise.prove.sketch import Box, digest
from shardwise.reproducible.reproducible import Reproducible
from shardwise.reproducible.sums import cut_of
from shardwise.safe_files import open_append, replace_file

FILE = "digests.jsonl"
_MOST_TEXT = 2000  # bytes of an error that the first rank tells the others
_ODD = -7046029254386353131  # 2**64 / golden ratio, as a signed number: spreads consecutive integers over all bits


class RunDigests:
    """Write digests of the parameters, outputs and gradients of each step, and compare them with those of another run.

    Digests do not depend on the number of ranks: the other run may have another one.  Within a step are compared: parameters
    before the first microbatch, the first output of each sharded module per microbatch, gradients before clipping, last
    parameter first.  At its end the context compares the parameters after the last step.  Collective, as are the steps.

    Args:
        fixed: of this run.
        folder: gets ``digests.jsonl``, a line per step; lines from ``fixed.step`` on are replaced.
        against: the folder of the other run; without it digests are written only.

    Raises: StateError on every rank at the first difference, with its step and tensor; also if a file cannot be used.

    Example:
        >>> with shardwise.RunDigests(fixed, "two_ranks", against="one_rank"):  # doctest: +SKIP
        ...     train(fixed)
    """

    def __init__(self, fixed: Reproducible, folder: str | Path, *, against: str | Path | None = None) -> None:
        self._fixed, self._folder, self._against = fixed, Path(folder), against
        self._params = dict(fixed.model.named_parameters())
        self._outputs: dict[str, torch.Tensor] = {}
        self._found: dict[str, torch.Tensor] = {}
        self._others = None if against is None else lines_of(Path(against), FILE, "digests")
        self._other: dict[str, Any] = {"step": -1}  # the last line that was read
        self._hooks: list[Any] = []

    def __enter__(self) -> RunDigests:
        modules = {name: each for name, each in self._fixed.model.named_modules() if attachment_of(each) is not None}
        numbers = self._fixed.place.num_microbatches
        for name, module in modules.items():
            self._outputs[name] = torch.zeros(numbers, dtype=torch.int64, device=self._fixed.axes.device)
            self._hooks.append(module.register_forward_hook(partial(self._note_output, name)))
        self._on_first_rank(self._open)
        self._fixed.observer = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fixed.observer = None
        for each in self._hooks:
            each.remove()
        if kind is None:
            self.begin()
            self._settle(self._found, self._fixed.step)
        if self._others is not None:
            self._others.close()

    # ---- a step, as an observer of Reproducible

    def begin(self) -> None:
        """Take the digests of the parameters."""
        for each in self._outputs.values():
            each.zero_()
        self._drawn = torch.zeros(self._fixed.place.num_microbatches, dtype=torch.int64, device="cpu")
        self._found = {f"parameter {name}": self._digest(param) for name, param in self._params.items()}

    def _note_output(self, name: str, module: nn.Module, args: Any, output: object) -> None:
        number = self._fixed.place.number
        if number is None or self._outputs[name][number]:  # blocks that are computed again in backward
            return
        tensors = tensors_in(output)
        self._outputs[name][number] = sum(digest(torch_private.local_of(each.detach())) for each in tensors)
        self._outputs[name] = self._outputs.pop(name)  # after the last microbatch the order is that of the outputs

    def end_microbatch(self, number: int) -> None:
        """Take the digest of the random state, which shows draws that not every number of ranks makes here."""
        self._drawn[number] = digest(torch.get_rng_state())

    def end(self) -> None:
        """Take the digests of the gradients; write and compare the step."""
        fixed = self._fixed
        found = dict(self._found)
        for number in range(fixed.place.num_microbatches):
            found[f"torch's random state after microbatch {number}"] = self._drawn[number]
            for name, each in self._outputs.items():
                found[f"output of {name or 'the root'} in microbatch {number}"] = each[number]
        for name, param in reversed(self._params.items()):
            if param.grad is not None:
                found[f"gradient of {name}"] = self._digest(param.grad)
        self._settle(found, fixed.step)

    @torch.no_grad()
    def _digest(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the digest of a parameter or a gradient.

        Weights of copies add up to one: equal copies count once, and another one changes the sum.
        """
        cut, place = cut_of(values), self._fixed.place
        shard, copies = (place.shard, place.num_replicas) if cut.num_shards > 1 else (0, place.num_ranks)
        local, first = torch_private.local_of(values).detach(), cut.rows(shard).start
        offsets = tuple(first * (dim == cut.dim) for dim in range(values.ndim))
        part = digest(local, Box(tuple(values.shape), offsets, tuple(local.shape)))
        return part * _ODD if place.replica or shard != place.shard else part - part * _ODD * (copies - 1)

    def _settle(self, found: Mapping[str, torch.Tensor], step: int) -> None:
        """Add the digests of all ranks; write them, and compare them."""
        names = sorted(found)  # ranks have seen outputs in orders of their own
        total = torch.stack([found[name].to(self._fixed.axes.device) for name in names])
        for dim in range(self._fixed.axes.mesh.ndim):
            sum_of(total, self._fixed.axes.mesh.get_group(dim), False)
        values = dict(zip(names, total.tolist(), strict=True))
        self._on_first_rank(lambda: self._write_and_compare({name: values[name] for name in found}, step))

    # ---- files, on the first rank

    def _on_first_rank(self, call: Callable[[], str]) -> None:
        """Run ``call`` on the first rank; raise the error that it returns, or its exception, on every rank."""
        axes = self._fixed.axes
        text = ""
        if not any(axes.mesh.get_coordinate() or ()):
            try:
                text = call()
            except (OSError, ShardwiseError) as error:
                text = f"RunDigests cannot use {FILE}: {error}"
        content = text.encode()[:_MOST_TEXT]
        said = torch.tensor([*content, *bytes(_MOST_TEXT - len(content))], dtype=torch.uint8, device=axes.device)
        for dim in range(axes.mesh.ndim):
            sum_bytes(said, axes.mesh.get_group(dim))
        if text := bytes(said.tolist()).rstrip(b"\0").decode(errors="replace"):
            raise StateError(text)

    def _open(self) -> str:
        """Keep the lines of earlier steps, which a resumed run has."""
        self._folder.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            kept = [
                json.dumps(each) + "\n"
                for each in lines_of(self._folder, FILE, "digests")
                if each["step"] < self._fixed.step
            ]
        replace_file(self._folder, FILE, "".join(kept))
        return ""

    def _write_and_compare(self, values: Mapping[str, int], step: int) -> str:
        values = {**self._fixed.constants(), **values}
        with open_append(self._folder, FILE) as file:
            file.write(json.dumps({"step": step, "digests": values}) + "\n")
        if self._others is None:
            return ""
        while self._other["step"] < step and (line := next(self._others, None)) is not None:
            self._other = line
        others = self._other["digests"] if self._other["step"] == step else {}
        for name, value in values.items():
            if name not in others and name.startswith("output "):
                continue  # another strategy has other units
            if name not in others:
                return (
                    f"step {step}: the run in {self._against} has no digest of {name}; it ended before, began later, or "
                    "has another model or other frozen parameters"
                )
            if others[name] != value:
                return (
                    f"step {step}: the first difference from the run in {self._against} is {name}. Compared are parameters, "
                    "then outputs, then gradients of each step. Save both runs before this step, and see `shardwise "
                    "checkpoint diff`"
                )
        return ""
