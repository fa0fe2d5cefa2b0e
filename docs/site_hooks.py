"""What `make docs` does to pages on their way to the site: links out of this folder, pages of examples, flowcharts.

The pages themselves stay as they read in the repository.
"""

from __future__ import annotations

import ast
import os
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
EDIT = "edit/main/docs/"
CONTRIBUTORS = "For contributors"
MOVED = {"doors.html": "apis.html", "reference/doors.html": "apis.html"}  # old -> new
MERMAID = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
NODE = re.compile(r'^\s*(\w+)\["<b>(.*?)</b><br/>(.*?)"\]$', re.MULTILINE)
ARROW = re.compile(r"^\s*(\w+) --> (\w+)$", re.MULTILINE)
WIDE, HIGH, ACROSS, DOWN, LANE = 176, 44, 24, 46, 10  # of a box, of the gaps between boxes, of the lanes beside them


def on_config(config: Any) -> Any:
    """Add to the navigation the examples and the decisions; with an address of the repository, links to edit pages.

    Builds of ``mike`` get its list of versions: it is looked for on the server, so there is none on the disk.
    """
    pages = sorted((ROOT / "docs" / "design").glob("*.md"))
    decisions = [{page.read_text().partition("\n")[0].lstrip("# "): f"design/{page.name}"} for page in pages]
    sections = {name: part for entry in config["nav"] for name, part in entry.items()}
    sections[CONTRIBUTORS].append({"Decisions": decisions})
    examples = [{title_of(path): f"examples/{path.stem}.md"} for path in sorted((ROOT / "examples").glob("*.py"))]
    sections["Tutorials"].append({"Examples": examples})
    if config["repo_url"]:
        config["edit_uri"] = EDIT
    if "MIKE_DOCS_VERSION" in os.environ:
        config["extra"]["version"] = {"provider": "mike"}
    return config


def title_of(example: Path) -> str:
    """Return what stands before the first comma, colon or semicolon of the docstring."""
    return re.split("[:;,]", _docstring(example))[0]


def _docstring(example: Path) -> str:
    return ast.get_docstring(ast.parse(example.read_text())) or ""


def on_files(files: Files, config: Any) -> Files:
    """Add the page that lies beside the README, and a page for each example: its docstring, then its code."""
    text = (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    for path in sorted((ROOT / "examples").glob("*.py")):
        about, _, commands = _docstring(path).partition("\n\n")
        code = path.read_text().split('"""', 2)[2].strip()
        blocks = [f"# {title_of(path)}", about, f"```bash\n{commands}\n```", f"`examples/{path.name}`:"]
        content = "\n\n".join([*blocks, f"```python\n{code}\n```\n"])
        files.append(File.generated(config, f"examples/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links to files beside the README into pages of the site, and flowcharts into pictures."""
    source = page.file.src_uri
    up = "../" * source.count("/")
    markdown = markdown.replace(f"]({up}../CONTRIBUTING.md", f"]({up}contributing.md")
    markdown = markdown.replace(f"]({up}../README.md", f"]({up}index.md")
    markdown = re.sub(rf"\]\({re.escape(up)}\.\./examples/(\w+)\.py\)", rf"]({up}examples/\1.md)", markdown)
    origin = "CONTRIBUTING.md" if source == "contributing.md" else source.replace(".md", ".py")
    if page.ancestors and page.ancestors[-1].title == CONTRIBUTORS:
        page.meta.setdefault("search", {"boost": 0.1})  # pages for users are found first
    if page.file.generated_by is not None and config["repo_url"]:
        page.edit_url = f"{config['repo_url'].rstrip('/')}/{EDIT.removesuffix('docs/')}{origin}"
    return MERMAID.sub(lambda found: draw(found[1]), markdown)


def on_post_build(config: Any) -> None:
    """Take out the places on the net from which the theme would fetch scripts, and lead old addresses to new ones."""
    for script in (Path(config["site_dir"]) / "assets" / "javascripts").glob("*.js"):
        script.write_text(re.sub(r"https://unpkg\.com/[\w@./-]*", "absent.js", script.read_text()))
    for old, new in MOVED.items():
        (Path(config["site_dir"]) / old).write_text(f'<meta http-equiv="refresh" content="0; url={new}">')


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
