"""``report.html``: what it shows of a run, also of one that was resumed or interrupted, and that texts stay texts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Generator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.runs import metrics_of
from test_train_ends import _asks_at, _config, _train

from shardwise import Span
from shardwise.recipes.config import TrainConfig
from shardwise.recipes.data import TextFacts
from shardwise.recipes.report import HtmlReport
from shardwise.recipes.run_folder import Start, TrainRun
from shardwise.recipes.sharding import HeldBytes
from shardwise.recipes.train import DivergedError

EMPTY = {"meta", "path", "polyline"}  # elements that nothing closes, or that have an end of their own
TAGS = EMPTY | {
    "html", "head", "title", "style", "body", "header", "h1", "p", "dl", "div", "dt", "dd", "main", "section", "h2",
    "span", "svg", "text", "rect", "circle", "pre",
}  # fmt: skip


class Page(HTMLParser):
    """What a browser makes of a page: elements by name with their attributes, and texts by heading."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._within, self._heading = "", ""
        self.feed(self.source)
        self.close()
        assert {tag for tag, _ in self.found} <= TAGS

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._within = tag
        if tag in ("h1", "h2"):
            self._heading = ""

    def handle_data(self, data: str) -> None:
        if self._within in ("h1", "h2") and not self._heading:
            self._heading = data
        self.texts[self._heading] = self.texts.get(self._heading, "") + data

    def pictures(self) -> list[str]:
        return [str(attrs["aria-label"]) for tag, attrs in self.found if tag == "svg"]


@on_ranks(2)
def test_the_page_shows_the_run_and_after_a_resume_all_of_it(tmp_path: Path) -> None:
    config, run = _config(tmp_path, sample_bytes=20), tmp_path / "run"
    said = _train(Start(out=run), config)[1]
    if dist.get_rank() == 0:
        assert said.rstrip().splitlines()[-1] == f"pictures: {run / 'report.html'}"
        page, lines = Page(run / "report.html"), metrics_of(run)
        assert not re.search(r"https?:|//|src=|href=|@import|url\(|<script", page.source), "it needs no network"
        loss, speed, rate, memory, timeline = page.pictures()
        train = [line["loss"] for line in lines if line["kind"] == "train"]
        validation = [line["loss"] for line in lines if line["kind"] == "validation"]
        for name, values in (("training", train), ("validation", validation)):
            assert f"{name}: from {values[0]:.3g} to {values[-1]:.3g} at step 8" in loss
        assert speed.startswith("Tokens per second")
        assert rate == f"Learning rate; AdamW: from 0.005 to {lines[-2]['lr']:.3g} at step 8"
        # as in the table on the terminal
        cells = dict(re.findall(r"│ (parameters|optimizer state) +│ +([\d.]+ \w+) │", said))
        assert f"rank 0: {re.findall(r'│ sum +│ +([^│]+?) +│', said)[0]}, parameters {cells['parameters']}" in memory
        assert "unsharded: " in memory
        assert "waits for other ranks" in timeline
        titles = page.texts["Timeline of a step, rank 0"]
        assert all(f"{what} (root)" in titles for what in ("forward", "backward"))
        sample = said[said.index("trained model:") + 16 :][:20]
        assert sample in page.texts["A sample from the trained model"]
        assert (run / "config.toml").read_text() in page.texts["Configuration"]
        assert "The run has finished." in page.source
    _train(Start(resume=run), dataclasses.replace(config, steps=12))
    if dist.get_rank() == 0:
        resumed = Page(run / "report.html").pictures()[0]
        assert f"from {train[0]:.3g} to {metrics_of(run)[-2]['loss']:.3g} at step 12" in resumed


@on_ranks(2)
def test_a_run_that_is_interrupted_leaves_a_page_too(tmp_path: Path) -> None:
    config, run = _config(tmp_path), tmp_path / "stopped"
    said = _train(Start(out=run), config, _asks_at(5))[1]
    if dist.get_rank() == 0:
        assert said.rstrip().splitlines()[-1] == f"pictures: {run / 'report.html'}"
        page = Page(run / "report.html")
        assert "stopped and saved after step 5; go on with: shardwise train --resume" in page.source
        assert len(page.pictures()) == 5, "memory and timeline, too"
        assert "at step 5" in page.pictures()[0]
    run = tmp_path / "diverged"
    with pytest.raises(DivergedError):
        _train(Start(out=run), dataclasses.replace(config, lr=1e38, weight_decay=1e38, warmup=0, save_every=1))
    if dist.get_rank() == 0:
        assert "ended early, with DivergedError: step 1: parameters are not finite" in Page(run / "report.html").source


@on_ranks(1)
def test_a_run_that_is_killed_has_left_the_page_of_its_last_minute(tmp_path: Path) -> None:
    found: list[Path] = []

    @contextlib.contextmanager
    def look() -> Generator[Callable[[], int], None, None]:
        yield lambda: found.extend(tmp_path.glob("run/report.html")) or 0
        assert "while the run went on" in found[0].read_text()

    _train(Start(out=tmp_path / "run"), _config(tmp_path, steps=4), look)
    assert len(found) == 2, "since the first checkpoint, after the second of four steps"


@on_ranks(1)
def test_a_page_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    config, run = _config(tmp_path, steps=2), tmp_path / "run"
    _train(Start(out=run), config)
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    number, said = _train(Start(resume=run), dataclasses.replace(config, steps=4))
    assert number == 0
    assert "report.html was not written: " in said
    shutil.rmtree(run)


HOSTILE = "</pre></title><script>alert(1)</script><img src=x onerror=alert(1)> \"'&\x1b[2J\x00 \ud800"


def test_hostile_texts_are_texts(tmp_path: Path) -> None:
    folder = tmp_path / "<b onclick=alert(1)>&amp;"
    folder.mkdir()
    values = [1e300, 5e-324, 10**400, -1, "<script>", None, float("nan"), {"a": 1}, True]
    lines = [{"kind": "train", "step": step, "loss": value} for step in (1, 10**400, -1) for value in values]
    lines += [{"kind": "train", "step": 3, "loss": 2.5, "lr": 0.1}, {"kind": HOSTILE, "step": 1, "loss": 9.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_bytes(HOSTILE.encode(errors="surrogatepass"))
    run = TrainRun(folder, TrainConfig(), TextFacts(HOSTILE, 1, 1, 1, 1.0, ""), None, None)
    report = HtmlReport(run, HeldBytes(4, 4, 8), "peak", about=[HOSTILE], sample=HOSTILE, held=[HeldBytes(2, 2, 4, 9)])
    report.spans = [Span("forward", HOSTILE, "computation", 0.0, 1.0)]
    with pytest.raises(ValueError, match="<script>"):
        report.close(ValueError, ValueError("<script>"), None)
        raise ValueError("<script>")
    page = Page(folder / "report.html")
    assert page.source.count("<svg") == 4
    assert "<script" not in page.source
    assert not {name for _, attrs in page.found for name in attrs if name.startswith("on")}
    assert "\x1b" not in page.source
    assert r"</pre></title><script>alert(1)</script>" in page.texts["A sample from the trained model"]
    assert page.texts["Loss, nats per byte"].count("step 3: 2.5") == 1


def test_the_page_of_a_long_run_stays_small_and_one_of_no_steps_is_a_page(tmp_path: Path) -> None:
    run = TrainRun(tmp_path, TrainConfig(), TextFacts("", 1, 1, 1, 1.0, ""), None, None)
    (tmp_path / "config.toml").write_text("steps = 1\n")
    (tmp_path / "metrics.jsonl").write_text("")
    report = HtmlReport(run, HeldBytes(4, 4, 8), "peak")
    report.write()
    assert Page(tmp_path / "report.html").pictures() == []
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"kind": "train", "step": step, "loss": 3.0, "lr": 0.0, "tokens_per_s": 1e6}) + "\n")
    report.spans = [Span("wait", f"unit{n}", "waits", 1e-3 * n, 1e-3 * n + 1e-4) for n in range(9000)]
    report.write(every_s=60.0)
    assert Page(tmp_path / "report.html").pictures() == [], "it was written a moment ago"
    report.write()
    page = Page(tmp_path / "report.html")
    assert "training: from 3 to 3 at step 19999" in page.pictures()[0]
    assert len(page.source) < 400_000
