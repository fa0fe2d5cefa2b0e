"""Draw the packages: which layers there are, what stands in each, and which layer imports which.

``python docs/draw_house.py`` reads the imports of every file and writes the picture into docs/architecture.md, between its
two markers; it needs the standard library alone.  ``tests/test_pages.py`` fails while the page shows other packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "shardwise"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- drawn by docs/draw_house.py: change the code, then run it -->"
END = "<!-- end of the drawing -->"
LEAVES = "base"  # the files beside the folders, which every package may import
ALONE = (
    "reference",
    "transaction",
)  # files that are packages to themselves: they import from packages above the leaves
COMMAND = "cli"  # what ``python -m`` runs is a part of it
FRONT = "shardwise"  # the public names: what users import, and the packages that are users too
PURPOSES = {
    LEAVES: "What every package may import: events, errors, torch's private names, what one host needs, "
    "files in folders that other users may have made.",
    "reference": "`fully_shard` in its simplest form, which readers start with and tests compare the engine with.",
    "transaction": "A step that happens on all ranks or on none: agreement, copies of the state before it, and undo.",
    FRONT: "The public names, nothing else.",
}


@dataclass(frozen=True)
class Layer:
    """A folder of the package; ``files``: path in the package -> first line of its docstring."""

    name: str
    purpose: str
    files: Mapping[str, str]
    num_lines: int
    imports: frozenset[str]

    @property
    def node(self) -> str:
        """Its name in the picture, which takes no slash."""
        return self.name.replace("/", "_")

    @property
    def size(self) -> str:
        """Its lines, to the hundred: the page is not another one for every line that is added."""
        return f"{max(round(self.num_lines, -2), 100):,} lines"

    @property
    def count(self) -> str:
        """Its files, in words."""
        return f"{len(self.files)} file{'s' * (len(self.files) != 1)}"


def draw(package: Path = PACKAGE) -> str:
    """Return the picture as Markdown: packages and arrows, a table, and the files of every package."""
    layers = find_layers(package)
    return "\n".join([*_picture(layers), "", *_table(layers), "", *_files(layers)])


def embed(page: str, drawing: str) -> str:
    """Return ``page`` with ``drawing`` between its markers.  Raises: ValueError if a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks a marker; it needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{drawing}\n\n{END}{after}"


def find_layers(package: Path) -> list[Layer]:
    """Return all packages, the highest first: each stands above all that it imports.

    Raises: ValueError if packages import each other in a circle.
    """
    members: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        members.setdefault(_layer_of(path.relative_to(package)), []).append(path)
    layers = {name: _layer(name, paths, package, members) for name, paths in members.items()}
    heights = _heights(layers)
    return sorted(layers.values(), key=lambda layer: (-heights[layer.name], layer.name))


def _layer_of(path: Path) -> str:
    if len(path.parts) > 1:
        return path.parent.as_posix()
    if path.name == "__main__.py":
        return COMMAND
    if path.stem in ALONE:
        return path.stem
    return FRONT if path.name == "__init__.py" else LEAVES


def _layer(name: str, paths: list[Path], package: Path, members: Mapping[str, list[Path]]) -> Layer:
    files = {path.relative_to(package).as_posix(): _first_line(path) for path in paths}
    purpose = PURPOSES[name] if name in PURPOSES else files.pop(f"{name}/__init__.py")
    wanted = {target for path in paths for target in _imported(path, package, members)}
    return Layer(name, purpose, files, sum(map(_count, paths)), frozenset(wanted - {name}))


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].replace("``", "`")


def _count(path: Path) -> int:
    return len(path.read_text().splitlines())


def _imported(path: Path, package: Path, layers: Iterable[str]) -> Iterator[str]:
    """Yield the packages that ``path`` imports from, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] == package.name:
                yield _layer_named(name.split(".")[1:], package, layers)


def _layer_named(parts: list[str], package: Path, layers: Iterable[str]) -> str:
    if not parts:
        return FRONT
    inner = "/".join(parts[:2])
    if (package / parts[0]).is_dir():
        return inner if inner in layers else parts[0]
    if (package / f"{parts[0]}.py").is_file():
        return parts[0] if parts[0] in layers else LEAVES
    return FRONT


def _heights(layers: Mapping[str, Layer]) -> dict[str, int]:
    heights: dict[str, int] = {}

    def height(name: str, way: tuple[str, ...]) -> int:
        if name in way:
            raise ValueError(f"packages import each other in a circle: {' -> '.join((*way[way.index(name) :], name))}")
        if name not in heights:
            heights[name] = 1 + max((height(each, (*way, name)) for each in layers[name].imports), default=0)
        return heights[name]

    for name in layers:
        height(name, ())
    return heights


def _picture(layers: list[Layer]) -> Iterator[str]:
    """An arrow for an import that is not already implied by a longer way; the table has all of them."""
    by_name = {layer.name: layer for layer in layers}

    def below(name: str) -> set[str]:
        return {each for direct in by_name[name].imports for each in (direct, *below(direct))}

    yield "```mermaid"
    yield "flowchart TD"
    for layer in layers:
        yield f'    {layer.node}["<b>{layer.name}</b><br/>{layer.count}, {layer.size}"]'
    for layer in layers:
        implied = {each for direct in layer.imports for each in below(direct)}
        for target in sorted(layer.imports - implied):
            yield f"    {layer.node} --> {by_name[target].node}"
    yield "```"


def _table(layers: list[Layer]) -> Iterator[str]:
    order = {layer.name: number for number, layer in enumerate(layers)}
    yield "| package | what it is for | size | imports |"
    yield "| --- | --- | --- | --- |"
    for layer in layers:
        imports = ", ".join(sorted(layer.imports, key=order.__getitem__))
        yield f"| `{layer.name}` | {layer.purpose} | {layer.count}, {layer.size} | {imports} |"


def _files(layers: list[Layer]) -> Iterator[str]:
    for layer in layers:
        yield f"<details><summary><b>{layer.name}</b>: {layer.count}</summary>"
        yield ""
        yield from (f"- `{name}`: {line}" for name, line in layer.files.items())
        yield ""
        yield "</details>"
        yield ""


def main() -> None:
    """Bring the page up to date; say whether it was."""
    page = PAGE.read_text()
    drawn = embed(page, draw())
    PAGE.write_text(drawn)
    print(f"{PAGE.relative_to(ROOT)}: {'as it was' if drawn == page else 'drawn again'}")


if __name__ == "__main__":
    main()
