"""What a run shows on its terminal, the figures that it writes, and ``report.html``, which has them as pictures."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, median
from types import TracebackType
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from shardwise import Span
from shardwise.errors import ConfigError
from shardwise.formatting import drop_output, format_bytes, plain
from shardwise.loop.meter import summary
from shardwise.recipes.run_folder import CONFIG_FILE, TrainRun, read_metrics
from shardwise.recipes.sharding import HeldBytes, fold_held
from shardwise.safe_files import read_text, replace_file

# ---- A console of rich that prints no command of a terminal that is in a text, and goes on where nobody reads any
# more.


class PlainConsole(Console):
    """Prints control characters of texts as text, and goes on without output where nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Say once that nobody reads, on standard error."""
        self.quiet = True
        drop_output()
        with contextlib.suppress(OSError):
            print("shardwise: standard output was closed; the work goes on without it", file=sys.stderr)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return what is printed, with control characters of texts written out."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)


# ---- The last table: what ranks held.

BYTES_OF = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer state": "optimizer_bytes"}


def columns_of(held: Sequence[HeldBytes]) -> dict[str, HeldBytes]:
    """Return the memory of each of two ranks, or the smallest and the largest of more."""
    if len(held) <= 2:
        return {f"rank {rank}": item for rank, item in enumerate(held)}
    return {"smallest rank": fold_held(min, held), "largest rank": fold_held(max, held)}


def memory_table(held: Sequence[HeldBytes], unsharded: HeldBytes, peak_name: str) -> Table:
    """Return the summary: per rank the bytes of each kind, beside what a rank holds without sharding."""
    columns = columns_of(held)
    table = Table(title=f"What each of {len(held)} rank(s) held, beside an unsharded run", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in (*columns, "unsharded", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    largest = fold_held(max, held)
    for name, field in (*BYTES_OF.items(), ("sum", "state_bytes")):
        whole = int(getattr(unsharded, field))
        saved = max(0.0, 1 - int(getattr(largest, field)) / whole)
        cells = [format_bytes(int(getattr(item, field))) for item in columns.values()]
        table.add_row(name, *cells, format_bytes(whole), f"{saved:.0%}", end_section=name in ("optimizer state", "sum"))
    table.add_row(peak_name, *(format_bytes(item.peak_bytes) for item in columns.values()), "", "")
    return table


# ---- What a run writes down as it goes: metrics.jsonl, TensorBoard events and the display.  Silent on all but rank
# 0.


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """The figures of one step and of no other.

    Attributes:
        step: how many are finished with this one.
        loss: over the whole batch, in nats per byte, or per token with a tokenizer.
        tokens_per_s: tokens of all ranks by the seconds of this step on rank 0.
        time: when it ended, in seconds since 1970.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float = 0.0
    time: float = 0.0


class RunLog:
    """What a run tells of itself: on its terminal, by a progress bar or in plain lines, and in its files.

    Args:
        steps: in all.  done: before this start.
        files: metrics.jsonl, and a SummaryWriter of TensorBoard; None: this log is silent, as on every rank but the first.

    ``bar`` is a context manager, after which the cursor is back.
    """

    def __init__(
        self, steps: int = 0, done: int = 0, unit: str = "byte", files: tuple[IO[str], Any] | None = None
    ) -> None:
        self._steps, self._unit, self._files = steps, unit, files
        self._console = PlainConsole(quiet=files is None, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=files is None or not self._console.is_terminal,
        )
        self._task = self.bar.add_task("train", total=steps, completed=done, figures="")

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        self.bar.update(self._task, completed=step)

    def trained(self, steps: Sequence[TrainedStep], speed: Mapping[str, float | None], eta_s: float) -> None:
        """Record steps since the last call; ``eta_s``: the time left.

        ``speed``: of :class:`StepMeter`, belongs to all of them together.
        """
        if self._files is None:
            return
        (lines, scalars), last = self._files, steps[-1]
        measured = {name: value for name in _SPEED_FIGURES if (value := speed.get(name)) is not None}
        for item in steps:
            figures = {"loss": item.loss, "grad_norm": item.grad_norm, "lr": item.learning_rate}
            own = {"tokens_per_s": round(item.tokens_per_s, 1), "time": round(item.time, 3)}
            own |= {name: float(f"{value:.4g}") for name, value in measured.items()} if item is last else {}
            lines.write(json.dumps({"kind": "train", "step": item.step, **figures, **own}) + "\n")
            for name, value in figures.items():
                scalars.add_scalar(f"train/{name}", value, item.step)
            scalars.add_scalar("speed/tokens_per_s", item.tokens_per_s, item.step)
        for name, value in measured.items():
            scalars.add_scalar(f"speed/{name}", value, last.step)
        scalars.add_scalar("memory/peak_bytes", speed["peak_memory_bytes"], last.step)
        shown = f"loss {last.loss:.4f}  {summary(speed)}"
        if self.bar.disable:
            eta = f"{int(eta_s) // 60}m{int(eta_s) % 60:02d}s"
            self._console.print(f"step {last.step}/{self._steps}  {shown}  ETA {eta}")
        else:
            self.bar.update(self._task, completed=last.step, figures=shown)

    def validated(self, step: int, loss: float) -> None:
        """Record a validation loss."""
        if self._files is not None:
            lines, scalars = self._files
            line = {"kind": "validation", "step": step, "loss": loss, "time": round(time.time(), 3)}
            lines.write(json.dumps(line) + "\n")
            scalars.add_scalar("validation/loss", loss, step)
            self.say(f"step {step}: validation loss {loss:.4f} nats per {self._unit}")

    def say(self, text: str) -> None:
        """Print a line, above the bar on a terminal."""
        self._console.print(text, markup=False)

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table, soft_wrap=False)

    def flush(self) -> None:
        """Bring everything to the disk, so that no checkpoint is ahead of the figures."""
        for each in self._files or ():
            each.flush()


_SPEED_FIGURES = ("step_s", "data_s", "mfu", "exposed_wait_s")  # of StepMeter; None of them is written if not measured


# ---- ``report.html``: the figures of a run as pictures, in one file that any browser opens without a network.

REPORT = "report.html"
_MOST_POINTS, _MOST_SPANS = 300, 1500
_ROWS = ("computation", "calls", "waits", "all-gathers", "reductions")
_SHADES = {"forward": "a", "backward": "b", "recompute": "b", "waits": "d", "all-gathers": "c", "reductions": "c"}
Points = Sequence[tuple[float, float]]  # (step, value)


@dataclass(slots=True)
class HtmlReport:
    """The page of a run; rank 0 writes it.

    Attributes:
        peak_name: what ``HeldBytes.peak_bytes`` counts.  about: lines that describe the run.  state: how it has ended.
        held: memory of each rank, once measured.  spans: of the traced steps, on this rank.
    """

    run: TrainRun
    unsharded: HeldBytes
    peak_name: str
    about: Sequence[str] = ()
    state: str = "This page was written while the run went on."
    held: Sequence[HeldBytes] = ()
    spans: Sequence[Span] = ()
    sample: str = ""
    written_s: float = -math.inf  # monotonic

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write the page at the end of a run, also after an error: ``ExitStack.push`` takes this method."""
        if kind is not None:
            self.state = f"The run has ended early, with {kind.__name__}: {error}"
        self.write()

    def write(self, every_s: float = 0.0) -> None:
        """Write the page if ``every_s`` have passed since the last time.  A failure is printed; the run goes on."""
        if time.monotonic() - self.written_s < every_s:
            return
        try:
            replace_file(self.run.folder, REPORT, self.to_html().encode(errors="backslashreplace"))
        except (OSError, ConfigError) as error:
            PlainConsole(soft_wrap=True).print(f"{REPORT} was not written: {error}", markup=False)
        self.written_s = time.monotonic()

    def to_html(self) -> str:
        """Return the page, made of these values and of the run's folder."""
        lines, unit = read_metrics(self.run.metrics), self.run.facts.unit
        loss, rate, speed = (_points(lines, "train", name) for name in ("loss", "lr", "tokens_per_s"))
        losses = {"training": loss, "validation": _points(lines, "validation", "loss")}
        tiles = {"steps": f"{loss[-1][0]:,} of {self.run.config.steps:,}"} if loss else {}
        tiles |= {f"{name} loss": f"{curve[-1][1]:.4f}" for name, curve in losses.items() if curve}
        tiles |= {"tokens/s (median)": _short(median(value for _, value in speed))} if speed else {}
        body = [
            _curves(f"Loss, nats per {unit}", losses),
            _curves("Tokens per second, all ranks", {"each step": speed}, lowest=0.0),
            _curves("Learning rate", {"AdamW": rate}, lowest=0.0),
        ]
        if self.held:
            tiles["of unsharded memory"] = f"{fold_held(max, self.held).state_bytes / self.unsharded.state_bytes:.0%}"
            body.append(_memory({**columns_of(self.held), "unsharded": self.unsharded}, self.peak_name))
        body += [_timeline(self.spans)] if self.spans else []
        body += [_section("A sample from the trained model", f"<pre>{_text(self.sample)}</pre>")] if self.sample else []
        options = f'<pre class="options">{_text(read_text(self.run.folder, CONFIG_FILE))}</pre>'
        body.append(_section("Configuration", options))
        title, about = _text(f"shardwise train: {self.run.folder}"), _text("\n".join((*self.about, self.state)))
        numbers = "".join(f"<div><dt>{name}<dd>{value}</div>" for name, value in tiles.items())
        return _PAGE.format(title=title, css=_CSS, about=about, tiles=numbers, body="\n".join(body))


def _points(lines: Sequence[Mapping[str, Any]], kind: str, name: str) -> Points:
    """Return the values that can be drawn: another person may have written the folder."""
    found = [(line["step"], line.get(name)) for line in lines if line.get("kind") == kind]
    return [(x, y) for x, y in found if isinstance(y, float) and (not y or 1e-30 < abs(y) < 1e30) and 0 <= x < 2**53]


def _means(points: Points) -> Points:
    """Return the means of as many neighbours as leave few enough to draw."""
    size = math.ceil(len(points) / _MOST_POINTS)
    groups = [zip(*points[at : at + size], strict=True) for at in range(0, len(points), size)]
    return [(fmean(steps), fmean(values)) for steps, values in groups]


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers, from one below ``low`` to one above ``high``."""
    rough = ((high - low) or abs(high) or 1.0) / 4
    power = 10 ** math.floor(math.log10(rough))
    apart = power * next(factor for factor in (1, 2, 5, 10, 20) if factor * power >= rough)
    first = math.floor(low / apart)
    return [apart * at for at in range(first, max(math.ceil(high / apart), first + 1) + 1)]


def _curves(title: str, curves: Mapping[str, Points], lowest: float | None = None) -> str:
    """Return a section with values over steps.  ``lowest``: where the axis begins, the lowest value if None."""
    curves = {name: points for name, points in curves.items() if points}
    every = [point for points in curves.values() for point in points]
    if not every:
        return ""
    last, values = max(x for x, _ in every) or 1, [y for _, y in every]
    up = _ticks(min(values) if lowest is None else lowest, max(values))
    drawn, told = list[str](), [title]

    def place(x: float, y: float) -> tuple[float, float]:
        return 60 + 380 * x / last, 196 - 184 * (y - up[0]) / (up[-1] - up[0])

    for value in up:
        at = place(0, value)[1]
        drawn.append(f'<path d="M60 {at:.1f}H440"/><text class="end" x="52" y="{at + 4:.1f}">{_short(value)}</text>')
    for step in (tick for tick in _ticks(0, last) if tick <= last and tick == int(tick)):
        drawn.append(f'<text class="mid" x="{place(step, 0)[0]:.1f}" y="217">{_short(step)}</text>')
    for shade, (name, points) in zip("ab", curves.items(), strict=False):
        told.append(f"{name}: from {_short(points[0][1])} to {_short(points[-1][1])} at step {points[-1][0]}")
        shown = [(*place(*point), *point) for point in _means(points)]
        drawn.append(f'<polyline class="{shade}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in shown)}"/>')
        for x, y, *point in shown if len(shown) <= 40 else ():
            about = "<title>step {:.0f}: {:.4g}</title>".format(*point)
            drawn.append(f'<circle class="{shade}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{about}</circle>')
    return _section(title, _keys(zip(curves, "ab", strict=False)) + _svg("; ".join(told), (460, 224), drawn))


def _memory(columns: Mapping[str, HeldBytes], peak_name: str) -> str:
    scale, drawn, told = 460 / max(each.state_bytes for each in columns.values()), list[str](), list[str]()
    for row, (name, item) in enumerate(columns.items()):
        told.append(f"{name}: {format_bytes(item.state_bytes)}")
        drawn.append(f'<text x="0" y="{56 * row + 16}">{told[-1]}</text>')
        left = 0.0
        for shade, (kind, field) in zip("abc", BYTES_OF.items(), strict=True):
            count = int(getattr(item, field))
            told.append(f"{kind} {format_bytes(count)}")
            drawn.append(_rect((left, 56 * row + 23, scale * count), shade, f"{name}, {told[-1]}"))
            left += scale * count
    peaks = ", ".join(f"{name} {format_bytes(each.peak_bytes)}" for name, each in columns.items() if each.peak_bytes)
    picture = _keys(zip(BYTES_OF, "abc", strict=True)) + _svg(", ".join(told), (460, 56 * len(columns)), drawn)
    return _section("Memory per rank", f"{picture}<p>{peak_name}: {peaks}</p>")


def _timeline(spans: Sequence[Span]) -> str:
    """Return a section with one row for each kind of spans in a trace; of too many spans the longest are drawn."""
    begin_s, end_s = min(each.begin_s for each in spans), max(each.end_s for each in spans)
    scale = 830 / (end_s - begin_s or 1.0)
    drawn = [f'<text x="0" y="{34 * row + 20}">{kind}</text>' for row, kind in enumerate(_ROWS)]
    for each in sorted(spans, key=lambda span: -span.seconds)[:_MOST_SPANS]:
        place = 100 + scale * (each.begin_s - begin_s), 34 * _ROWS.index(each.lane) + 3, max(2, scale * each.seconds)
        shade = _SHADES.get(each.what, _SHADES.get(each.lane, "e"))
        drawn.append(_rect(place, shade, f"{each.what} {each.unit or '(root)'}: {1e3 * each.seconds:.2f} ms"))
    for ms in _ticks(0, 1e3 * (end_s - begin_s))[:-1]:
        drawn.append(f'<text class="mid" x="{100 + scale * ms / 1e3:.1f}" y="188">{_short(ms)} ms</text>')
    names = "forward", "backward", "messages", "waits for other ranks", "other calls"
    waited_s = sum(each.seconds for each in spans if each.lane == "waits")
    told = f"{1e3 * (end_s - begin_s):.1f} ms, of which {1e3 * waited_s:.1f} ms are waits for other ranks"
    scrolled = f'<div tabindex="0" role="region" aria-label="Timeline">{_svg(told, (960, 194), drawn)}</div>'
    return _section("Timeline of a step, rank 0", f"{_keys(zip(names, 'abcde', strict=True))}{scrolled}<p>{told}</p>")


def _rect(place: tuple[float, float, float], shade: str, about: str) -> str:
    size = 'x="{:.1f}" y="{}" width="{:.1f}" height="26"'.format(*place)
    return f'<rect class="{shade}" {size}><title>{_text(about)}</title></rect>'


def _svg(told: str, size: tuple[int, int], drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{_text(told)}">{"".join(drawn)}</svg>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


def _keys(shades: Iterable[tuple[str, str]]) -> str:
    return "<p>" + "".join(f'<span class="key {shade}">{name}</span>' for name, shade in shades) + "</p>"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _text(value: str) -> str:
    """Return ``value`` as text of a page, whatever is in it."""
    return escape(plain(value))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{css}</style></head>
<body><header><h1>{title}</h1><p>{about}</p><dl>{tiles}</dl></header><main>{body}</main></body></html>
"""
_CSS = """:root{color-scheme:light dark;--page:#f4f6f8;--card:#fff;--ink:#1b2730;--dim:#56636d;--line:#dfe5ea;
--a:#2a6f97;--b:#b3500f;--c:#3b7d4a;--d:#b3261e}@media(prefers-color-scheme:dark){:root{--page:#12171c;--card:#1b2229;
--ink:#e6ebef;--dim:#a3b0ba;--line:#333e48;--a:#6db7e3;--b:#f0a060;--c:#83c792;--d:#f28b82}}*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:24px 16px;background:var(--page);color:var(--ink);overflow-wrap:anywhere;
font:15px/1.5 system-ui,sans-serif}h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:0}dl{display:flex;
flex-wrap:wrap;gap:16px;margin:16px 0}dl div{flex:1 1 140px}dd{margin:0;font-size:1.4rem}dt,p{color:var(--dim)}
p{margin:4px 0;white-space:pre-line}.a{color:var(--a)}.b{color:var(--b)}.c{color:var(--c)}.d{color:var(--d)}
main{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}.e{color:var(--dim)}
section,dl div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0}
section:has([tabindex],pre){grid-column:1/-1}[tabindex]{overflow-x:auto}[tabindex] svg{min-width:720px}
.key{margin-right:14px}.key::before{content:"";display:inline-block;width:.75em;height:.75em;margin-right:6px;
border-radius:3px;background:currentColor}svg{display:block;width:100%;height:auto;margin:6px 0}
text{font-size:14px;fill:var(--dim)}.mid{text-anchor:middle}.end{text-anchor:end}path{stroke:var(--line)}
rect,circle{fill:currentColor}rect{stroke:var(--card);stroke-width:.6}polyline{fill:none;stroke:currentColor;
stroke-width:2}polyline.b{stroke-dasharray:6 4}pre{white-space:pre-wrap;margin:8px 0 0}.options{columns:300px}"""
