"""The jobs of a campaign, and several of them beside each other: they mostly wait."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import count, islice

from chaos.campaign import Campaign, Result, draw, matrix, until
from chaos.job import Job, warm_up


@dataclass(frozen=True, slots=True)
class Draw:
    """Which jobs to run: the same value draws the same.

    Attributes:
        minutes: after which no job is begun.
        sizes: world sizes of the matrix, whose every job is drawn once, in random order; none: random jobs without end.
        most: number of jobs; None: all.  only: jobs whose line has this text.
    """

    seed: int
    minutes: float
    sizes: tuple[int, ...] = ()
    most: int | None = None
    only: str = ""

    @property
    def num_jobs(self) -> int:
        """Number of jobs of the matrix that may be drawn."""
        return sum(self.only in job.text for job in matrix(self.sizes))

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs."""
        rng = random.Random(self.seed)
        every: Iterable[Job] = (draw(rng) for _ in count())
        if self.sizes:
            jobs = list(matrix(self.sizes))
            every = rng.sample(jobs, len(jobs))
        return islice((job for job in every if self.only in job.text), self.most)


def run_beside(what: Draw, at_once: int) -> Iterator[Result]:
    """Run the jobs of ``what``, ``at_once`` beside each other, with patience for that; yield results as they come."""
    campaign = Campaign()
    warm_up()
    patience = 1.0 + 0.1 * (at_once - 1)
    jobs = (replace(job, limit_s=patience * job.limit_s) for job in until(what.jobs(), what.minutes))
    with ThreadPoolExecutor(at_once) as threads:
        running: set[Future[Result]] = {threads.submit(campaign.run, job) for job in islice(jobs, at_once)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {threads.submit(campaign.run, job) for job in islice(jobs, len(done))}
            yield from (each.result() for each in done)
