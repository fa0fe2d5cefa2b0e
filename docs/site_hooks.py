"""What `make docs` does to pages on their way to the site: links out of this folder, and the picture of the packages.

The pages themselves stay as they read in the repository.
"""

from __future__ import annotations

import re
import runpy
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
MERMAID = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
NODE = re.compile(r'^\s*(\w+)\["<b>(.*?)</b><br/>(.*?)"\]$', re.MULTILINE)
ARROW = re.compile(r"^\s*(\w+) --> (\w+)$", re.MULTILINE)
WIDE, HIGH, ACROSS, DOWN, LANE = 176, 44, 24, 46, 10  # of a box, of the gaps between boxes, of the lanes beside them


def on_config(config: Any) -> Any:
    """List every page of docs/design under Decisions, by its first heading."""
    pages = sorted((ROOT / "docs" / "design").glob("*.md"))
    decisions = [{page.read_text().partition("\n")[0].lstrip("# "): f"design/{page.name}"} for page in pages]
    inside = next(part["Inside"] for part in config["nav"] if "Inside" in part)
    inside.append({"Decisions": decisions})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the page that lies beside the README."""
    text = (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files beside the README into pages of the site, and flowcharts into pictures."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"]({up}../CONTRIBUTING.md", f"]({up}contributing.md")
    markdown = markdown.replace(f"]({up}../README.md", f"]({up}index.md")
    if page.file.src_uri == "errors.md":
        markdown += "\n".join(runpy.run_path(str(ROOT / "docs" / "list_messages.py"))["as_markdown"]())
    return MERMAID.sub(lambda found: draw(found[1]), markdown)


def on_post_build(config: Any) -> None:
    """Take out the places on the net from which the theme would fetch scripts for old browsers and for flowcharts."""
    for script in (Path(config["site_dir"]) / "assets" / "javascripts").glob("*.js"):
        script.write_text(re.sub(r"https://unpkg\.com/[\w@./-]*", "absent.js", script.read_text()))


def draw(chart: str) -> str:
    """Return a flowchart as SVG: who points stands above what is pointed at; one line, so that Markdown leaves it alone."""
    names = {name: (title, size) for name, title, size in NODE.findall(chart)}
    arrows = ARROW.findall(chart)
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for above, below in arrows:
            depth[below] = max(depth[below], depth[above] + 1)
    rows = [[name for name in names if depth[name] == level] for level in range(max(depth.values()) + 1)]
    width = max(len(row) for row in rows) * (WIDE + ACROSS)
    place = {
        name: (round((width - len(row) * (WIDE + ACROSS) + ACROSS) / 2 + at * (WIDE + ACROSS)), level * (HIGH + DOWN))
        for level, row in enumerate(rows)
        for at, name in enumerate(row)
    }
    near = [(above, below) for above, below in arrows if depth[below] == depth[above] + 1]
    parts = [_arrow(*place[above], *place[below]) for above, below in near]
    far = [(above, below) for above, below in arrows if depth[below] > depth[above] + 1]
    parts += [_detour(*place[above], *place[below], lane, width) for lane, (above, below) in enumerate(far)]
    parts += [_box(*place[name], *names[name]) for name in names]
    width += len(far) * LANE
    height = len(rows) * (HIGH + DOWN) - DOWN + 8
    head = '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += '<path d="M0 0L8 4L0 8z" fill="#78909c"/></marker></defs>'
    return f'<svg viewBox="-4 -4 {width + 8} {height}" role="img">{head}{"".join(parts)}</svg>'


def _arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    x, y, to_x = x + WIDE // 2, y + HIGH, to_x + WIDE // 2
    bend = (to_y - y) // 2
    way = f"M{x} {y}C{x} {y + bend} {to_x} {to_y - bend} {to_x} {to_y}"
    return f'<path d="{way}" fill="none" stroke="#78909c" marker-end="url(#tip)"/>'


def _detour(x: int, y: int, to_x: int, to_y: int, lane: int, width: int) -> str:
    """Draw an arrow over several rows: between rows, and down a lane beside all of them."""
    shift = (lane % 7 - 3) * 6
    x, to_x, far = x + WIDE // 2 + shift, to_x + WIDE // 2 + shift, width + lane * LANE
    way = f"M{x} {y + HIGH}V{y + HIGH + 14 + shift // 2}H{far}V{to_y - 16 + shift // 2}H{to_x}V{to_y}"
    return f'<path d="{way}" fill="none" stroke="#b0bec5" marker-end="url(#tip)"/>'


def _box(x: int, y: int, title: str, size: str) -> str:
    box = f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="4" fill="#eceff1" stroke="#546e7a"/>'
    style = 'text-anchor="middle" font-family="sans-serif" fill="#263238"'
    middle = x + WIDE // 2
    name = f'<text x="{middle}" y="{y + 18}" font-size="14" font-weight="bold" {style}>{escape(title)}</text>'
    return f'{box}{name}<text x="{middle}" y="{y + 35}" font-size="11" {style}>{escape(size)}</text>'
