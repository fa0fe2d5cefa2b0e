"""Carry cases out on pools of ranks that are used again and again, and judge what they show."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import peers
from fuzz.case import Case, Contender
from fuzz.eligible import is_engines, is_ours, peer_of
from fuzz.judge import Verdict, bound_of, is_chaotic, judge
from fuzz.phases import Play, Seat
from fuzz.play import Told, run_rank, warm_up
from fuzz.record import Tale
from fuzz.reference import run_reference
from fuzz.render import render
from shardwise.testing.pool import WorkerPool

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "fuzz.play",
    "helpers.frozen",
)
LIMIT_S = 20.0  # of one contender; a hang is told from slowness by it
Tales = list[list[Tale]]  # by phase, then by rank


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: a verdict per contender of ours, and which of torch's own classes differ from one process."""

    verdicts: dict[Contender, Verdict]
    torch_differs: dict[Contender, Verdict]

    @property
    def failures(self) -> dict[Contender, Verdict]:
        """The verdicts that somebody should look at."""
        return {contender: verdict for contender, verdict in self.verdicts.items() if verdict.is_failure}


class Runner:
    """Pools of ranks, one per world size, each with a process group that lives as long as its processes.

    Args:
        limit_s: how long one contender may take before it counts as hanging.
        device: "cpu" or "cuda", of the ranks; one process alone computes on the host.
        fault: a name of :data:`fuzz.faults.FAULTS` to plant in the ranks, for the test of the fuzzer.

    Attributes:
        is_careful: replace the processes after every error that is not ours.
    """

    def __init__(self, limit_s: float = LIMIT_S, fault: str = "", device: str = "cpu") -> None:
        self._limit_s = limit_s
        self._device = device
        self._backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
        self._fault = fault
        self._pools: dict[int, WorkerPool] = {}
        self._warm: set[int] = set()
        self._threads = ThreadPoolExecutor(1)
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-fuzz-")
        self._number = 0
        self.is_careful = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()
        self._threads.shutdown()
        self._folder.cleanup()

    def run(self, case: Case) -> Outcome:
        """Carry out ``case`` as all its contenders and return the verdicts."""
        return self.run_text(render(case))

    def run_text(self, text: str, contenders: Sequence[Contender] | None = None) -> Outcome:
        """Carry out the text of a case; ``contenders``: instead of its own."""
        play = Play.load(text)
        chosen = peers.able(play.contenders if contenders is None else contenders)
        told = self._threads.submit(run_reference, play)
        tales: dict[Contender, Tales | Verdict] = {}
        if len(play.phases) == 1:
            tales.update(self._run_together(text, play, chosen))
        else:
            tales.update({each: self._run_phases(text, play, each) for each in chosen})
        reference = told.result()
        verdicts: dict[Contender, Verdict] = {}
        for contender in chosen:
            peer = tales.get(peer_of(contender)) if is_ours(contender) else None
            verdicts[contender] = _judge(play, reference, tales[contender], peer, is_engines(contender))
        if play.settings.arithmetic == "reals" and any(verdict.kind == "numbers" for verdict in verdicts.values()):
            nudged = self._threads.submit(run_reference, play, is_nudged=True).result()
            verdicts = {
                each: _without_chaos(play, reference, nudged, tales[each], verdict)
                for each, verdict in verdicts.items()
            }
        return Outcome(
            {each: verdict for each, verdict in verdicts.items() if is_ours(each)},
            {each: verdict for each, verdict in verdicts.items() if not is_ours(each) and verdict.kind != "equal"},
        )

    def confirm(self, text: str, contender: Contender) -> Verdict:
        """Carry the text out once more as ``contender``, in fresh processes: what was before cannot be to blame."""
        for num_ranks in {phase.num_ranks for phase in Play.load(text).phases}:
            self._replace(num_ranks)
        peer = peer_of(contender)
        play = Play.load(text)
        chosen = [contender, *([peer] if peer in play.contenders else [])]
        return self.run_text(text, chosen).verdicts[contender]

    # ---- ranks ----

    def _run_together(self, text: str, play: Play, contenders: Sequence[Contender]) -> dict[Contender, Tales | Verdict]:
        """Run contenders one after another in one call, as far as it goes; after one that raised, begin a new call."""
        found: dict[Contender, Tales | Verdict] = {}
        rest = list(contenders)
        num_ranks = play.phases[0].num_ranks
        together = True
        while rest:
            batch = rest if together else rest[:1]
            answers = self._ask(num_ranks, text, batch, 0)
            if isinstance(answers, Verdict):
                if len(batch) == 1:
                    found[rest.pop(0)] = answers
                together = False
                continue
            count = min(len(told.tales) for told in answers)
            for number in range(count):
                found[batch[number]] = [[told.tales[number] for told in answers]]
            rest = rest[count:]
            if not self._is_clean([told.tales[count - 1] for told in answers]):
                self._replace(num_ranks)
        return found

    def _run_phases(self, text: str, play: Play, contender: Contender) -> Tales | Verdict:
        """Run the phases of one contender, each on ranks of its own, with a checkpoint between."""
        self._number += 1
        folder = str(Path(self._folder.name) / f"checkpoint-{self._number}")
        tales: Tales = []
        for number, phase in enumerate(play.phases):
            answers = self._ask(phase.num_ranks, text, [contender], number, folder)
            if isinstance(answers, Verdict):
                return answers
            tales.append([told.tales[0] for told in answers])
            if not self._is_clean(tales[-1]):
                self._replace(phase.num_ranks)
            if any(tale.raised for tale in tales[-1]):
                break
        return tales

    def _ask(
        self, num_ranks: int, text: str, contenders: Sequence[Contender], phase: int, folder: str = ""
    ) -> list[Told] | Verdict:
        """Return what every rank told, or the verdict "gone" if one hung or died."""
        pool = self._pool(num_ranks)
        answers = pool.attempt(
            run_rank,
            num_ranks=num_ranks,
            backend=self._backend,
            timeout_s=self._limit_s * (1 + len(contenders) / 4),
            group_timeout_s=4 * self._limit_s,
            is_failure=_is_broken,
            text=text,
            contenders=list(contenders),
            phase=phase,
            folder=folder,
            device=self._device,
        )
        if not any(answer.error for answer in answers):
            return [answer.value for answer in answers]
        self._warm.discard(num_ranks)
        stacks = [f"--- rank {rank} ---\n{_last_word(answer)}" for rank, answer in enumerate(answers)]
        died = [answer for answer in answers if answer.error and "the process ended" in answer.error]
        return Verdict("gone", "\n".join(stacks), "died" if died else "hang")

    def _pool(self, num_ranks: int) -> WorkerPool:
        if num_ranks not in self._pools:
            self._pools[num_ranks] = WorkerPool(num_ranks, 120.0, keeps_group=True, preload=PRELOAD)
        pool = self._pools[num_ranks]
        if num_ranks not in self._warm:
            times: dict[str, Any] = {"timeout_s": 120.0, "group_timeout_s": 4 * self._limit_s}
            asked: dict[str, Any] = {"fault": self._fault, "device": self._device}
            pool.attempt(warm_up, num_ranks=num_ranks, backend=self._backend, **times, **asked)
            self._warm.add(num_ranks)
        return pool

    def _is_clean(self, tales: Sequence[Tale]) -> bool:
        """True if the ranks can go on together: none raised, or all with the same words in the same place.

        If errors are not ours that is a guess, which :attr:`is_careful` forbids; failures are confirmed by fresh processes.
        """
        words = {(tale.raised.kind, tale.raised.text, len(tale.records)) for tale in tales if tale.raised is not None}
        if not words:
            return True
        alike = len(words) == 1 and all(tale.raised for tale in tales)
        return alike and (not self.is_careful or all(tale.raised and tale.raised.is_named for tale in tales))

    def _replace(self, num_ranks: int) -> None:
        if num_ranks in self._pools:
            self._pools[num_ranks].replace()
        self._warm.discard(num_ranks)


def _is_broken(told: object) -> bool:
    return isinstance(told, Told) and told.is_broken


def _last_word(answer: object) -> str:
    error = getattr(answer, "error", None)
    if error:
        return str(error)
    told: Told = getattr(answer, "value")  # noqa: B009
    last = told.tales[-1]
    return f"raised {last.raised.trace}" if last.raised else "returned"


def _judge(
    play: Play, reference: Tales, told: Tales | Verdict, peer: Tales | Verdict | None, is_engine: bool
) -> Verdict:
    if isinstance(told, Verdict):
        return told
    verdict = Verdict("equal")
    for number, tales in enumerate(told):
        if number >= len(reference):
            return verdict
        bound = _bound(play, number)
        theirs = peer[number] if isinstance(peer, list) and number < len(peer) else None
        verdict = judge(reference[number], tales, theirs, bound, is_engine)
        if verdict.kind != "equal":
            return verdict
    return verdict


def _without_chaos(play: Play, reference: Tales, nudged: Tales, told: Tales | Verdict, verdict: Verdict) -> Verdict:
    """Return ``verdict``, or "excused" where its difference is what one process makes of its own rounding errors."""
    if verdict.kind != "numbers" or isinstance(told, Verdict):
        return verdict
    for number, phase in enumerate(zip(reference, nudged, told, strict=False)):
        if is_chaotic(*phase, _bound(play, number)):
            return Verdict("excused", f"one process, nudged, is no nearer to itself: {verdict.text}", verdict.what)
    return verdict


def _bound(play: Play, number: int) -> float:
    seat = Seat.of(0, play.phases[number].num_ranks, play.settings.mesh)
    return bound_of(play.settings, seat.num_data_ranks)
