"""Coded sums over replicas: a part to each rank, which sums it; what it has summed, coded again, to all.

Two collectives, one after the other, with work of the host between them.  It waits for neither where the second is launched
after backward has gone on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise import torch_private
from shardwise.codec.coded_sections import CodedSection
from shardwise.comm.buffers import Lease
from shardwise.comm.c10d import C10dCommunicator, Launched, all_gather_single, all_to_all_rows
from shardwise.comm.coding_state import Compression, norm_of
from shardwise.comm.communicator import NamedTensor, Pending, Scale
from shardwise.layout.bucket import align

MOST_OPEN_BYTES = 1 << 26  # of sums that have not ended; one that is larger may have another of its size beside it


@dataclass(slots=True, eq=False)
class CodedSum:
    """One sum on its way: :meth:`begin`, :meth:`turn` and :meth:`end`, each once, on every rank in one order.

    Attributes:
        packed, compression: the ranks, and how what they send is coded.
        tensor: 1-D; what is summed, in place.  section, params: what of it is coded, and what it is of.
    """

    packed: C10dCommunicator
    compression: Compression
    section: CodedSection
    tensor: torch.Tensor
    params: Sequence[NamedTensor]
    scale: Scale
    has_turned: bool = False
    has_ended: bool = False
    _numel: int = field(init=False)  # of what one rank sums
    _rows: torch.Tensor = field(init=False)  # what is sent, then what coding has lost of it, then the sum
    _sent: torch.Tensor = field(init=False)
    _received: torch.Tensor = field(init=False)
    _rest: torch.Tensor | None = None
    _exact: Pending | None = None  # the sum of the rest
    _on_way: Pending | None = None
    _leases: list[Lease] = field(default_factory=list[Lease])

    def begin(self) -> None:
        """Send every rank the part that it sums, and what is exact to all."""
        packed, compression, section, params = self.packed, self.compression, self.section, self.params
        size, code = packed.size, section.code
        self._sum_rest()
        numel = self._numel = align(-(-section.coded_numel // size), code.block)
        num_bytes = align(code.num_bytes(numel), 16)
        whole = self._lend(size * numel, torch.float32).view(1, -1)
        section.take_coded(self.tensor.view(1, -1), whole)
        compression.add_residuals(whole, section, params)
        rows = self._rows = whole.view(size, numel)
        self._sent = self._lend(size * num_bytes, torch.uint8).view(size, num_bytes)
        self._received = self._lend(size * num_bytes, torch.uint8).view(size, num_bytes)
        was = norm_of([rows])
        code.encode(rows, self._codes(self._sent), rows)
        compression.reductions.see(was, norm_of([rows]), params)
        compression.reductions.count(
            2 * num_bytes * (size - 1), 2 * section.coded_numel * self.tensor.dtype.itemsize * (size - 1) // size
        )
        self._on_way = self._launched(all_to_all_rows(self._received, self._sent, packed.group, self._is_async))

    def turn(self) -> None:
        """Sum the part that this rank has got, and send that to all."""
        self.has_turned = True
        code, rows, numel = self.section.code, self._rows, self._numel
        self._wait()
        total = torch.zeros(1, numel, dtype=torch.float32, device=rows.device)
        for row in self._received.unsqueeze(1):
            total += code.decode(self._codes(row), numel)
        result = self._sent[:1]  # has been sent
        code.encode(total, self._codes(result), total)
        rows[self.packed.rank] += total[0]  # lost of the sum: its rank brings it with its own next gradient
        self.compression.keep_residuals(rows.view(1, -1), self.section, self.params)
        work = all_gather_single(self._received.view(-1), result.view(-1), self.packed.group, self._is_async)
        self._on_way = self._launched(work)

    def end(self) -> None:
        """Put the sum in its place."""
        self.has_ended = True
        self._wait()
        section = self.section
        section.code.decode_run(self._codes(self._received), self._numel, 0, self._rows)
        size = self.packed.size
        total = self._rows.view(1, -1).div_(float(size) if self.scale.divisor is None else self.scale.divisor)
        section.put_coded(total, self.tensor.view(1, -1))
        if self._exact is not None:
            self._exact.wait()
        if self._rest is not None:
            windows = self._windows()
            torch_private.copy_all(windows, list(self._rest.split([window.numel() for window in windows])))
        for lease in self._leases:
            lease.release()
        self._leases.clear()

    def cancel(self) -> None:
        """Let what is on its way end, if it can, and forget it; other ranks do at the same place."""
        self.has_turned = self.has_ended = True
        on_way, exact, self._on_way, self._exact = self._on_way, self._exact, None, None
        for pending in (on_way, exact):
            if pending is not None:
                pending.cancel()
        for lease in self._leases:
            lease.lose()  # what has not ended may still be written to
        self._leases.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes until it has ended, but for what is exact and for scales."""
        return 6 * self.section.coded_numel  # float32, and codes in two buffers

    def shares_with(self, other: CodedSum) -> bool:
        """Return True if both are of gradients of one parameter: what one of them has lost, the next is to bring."""
        return self.compression is other.compression and not {*map(id, self.params)}.isdisjoint(map(id, other.params))

    def _sum_rest(self) -> None:
        windows = self._windows()
        if not windows:
            return
        self._rest = torch.cat(windows)
        if self._is_async:
            self._exact = self.packed.all_reduce(self._rest, self.scale)
        else:
            self.packed.all_reduce_here(self._rest, self.scale)

    def _windows(self) -> list[torch.Tensor]:
        return [self.tensor.narrow(0, start, numel) for start, numel in self.section.rest]

    def _codes(self, messages: torch.Tensor) -> torch.Tensor:
        return messages[:, : self.section.code.num_bytes(self._numel)]

    def _lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        flat, lease = self.packed.pool.lend(numel, dtype)
        self._leases.append(lease)
        return flat

    @property
    def _is_async(self) -> bool:
        return not self.packed.lane.is_concurrent

    def _launched(self, work: torch.distributed.Work | None) -> Pending:
        return Launched(work, lambda: None, lambda: None, self.packed.group)

    def _wait(self) -> None:
        on_way, self._on_way = self._on_way, None
        if on_way is not None:
            on_way.wait()


class CodedSums:
    """Sums that have begun and not ended, in their order, of all groups of an engine.

    They turn when the next unit's have begun and end when those of the one after it have, or where somebody waits for them or
    for the one before, or where more would take too much memory: places to which every rank comes in the same order.  So they
    travel while backward goes on.

    Attributes:
        open: those sums.
    """

    def __init__(self) -> None:
        self.open: list[CodedSum] = []
        self._num_earlier = 0  # of those: begun before the last go_on()

    def launch(self, coded: CodedSum) -> Pending:
        """Begin ``coded``."""
        while self.open and sum([each.num_bytes for each in self.open]) > max(MOST_OPEN_BYTES, coded.num_bytes):
            self.end(self.open[0])
        for each in [each for each in self.open if each.shares_with(coded)]:
            self._turn(each)
        coded.begin()
        self.open.append(coded)
        return _CodedSum(self, coded)

    def go_on(self) -> None:
        """Let end what had turned, and let turn what had begun, before this was called the last time."""
        earlier = self.open[: self._num_earlier]
        turned = [each for each in earlier if each.has_turned]
        if earlier:
            self._turn(earlier[-1])
        for each in turned:
            self.end(each)
        self._num_earlier = len(self.open)

    def end(self, coded: CodedSum) -> None:
        """Let ``coded`` end, if it has not; let turn what comes before it, and the one after it."""
        if coded.has_ended:
            return
        self._turn(coded)
        following = self.open[self.open.index(coded) + 1 :][:1]
        for each in following:
            self._turn(each)
        self.forget(coded)
        coded.end()

    def forget(self, coded: CodedSum) -> None:
        """Leave ``coded`` out from here on."""
        if coded in self.open:
            number = self.open.index(coded)
            self._num_earlier -= number < self._num_earlier
            del self.open[number]

    def _turn(self, coded: CodedSum) -> None:
        """Let ``coded`` turn and those before it, if they have not."""
        for each in self.open[: self.open.index(coded) + 1]:
            if not each.has_turned:
                each.turn()


class _CodedSum:
    """A sum that was begun, for whoever waits for it."""

    __slots__ = ("_coded", "_sums")
    holds_input = False

    def __init__(self, sums: CodedSums, coded: CodedSum) -> None:
        self._sums = sums
        self._coded: CodedSum | None = coded

    def is_done(self) -> bool:
        return self._coded is None

    def wait(self) -> None:
        coded, self._coded = self._coded, None
        if coded is not None:
            self._sums.end(coded)

    def cancel(self) -> None:
        coded, self._coded = self._coded, None
        if coded is not None and not coded.has_ended:
            self._sums.forget(coded)
            coded.cancel()
