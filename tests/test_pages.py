"""Pages say what is: the picture of the house is the house, and what a page cites is there."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardwise"
PAGES = sorted(page for page in ROOT.rglob("*.md") if not {".git", ".venv"} & {*page.relative_to(ROOT).parts})
CODE = [path for folder in ("shardwise", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.*")]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w./*}-])(?:[\w.*-]+/)*[\w*-]+\.(?:py|md|json|toml|c|txt)\b")
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([\w-]+))?\)")
OF_A_RUN = {"config.json", "tokenizer.json"}  # what the command writes, and no page of ours


def text_of(page: Path) -> str:
    """Return the page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def find(name: str, page: Path) -> Path | None:
    """Return the file that a page calls ``name``: from the repository, the package, its own folder, or by its end alone."""
    for folder in (ROOT, PACKAGE, page.parent):
        found = next(iter(sorted(folder.glob(name))), None)
        if found is not None:
            return found
    return next((path for path in CODE if path.as_posix().endswith(f"/{name}")), None)


def definitions(path: Path) -> set[str]:
    """Return the functions, classes and names of a module, and the methods and fields of its classes as ``Class.name``."""
    found: set[str] = set()

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")

    look(ast.parse(path.read_text()).body, "")
    return found


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_picture_is_the_house() -> None:
    house = runpy.run_path(str(ROOT / "docs" / "draw_house.py"))
    page = house["PAGE"].read_text()
    assert page == house["embed"](page, house["draw"]()), "the house has changed; run: python docs/draw_house.py"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "shardwise" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "shardwise"


HALL = {"__init__.py": "", "errors.py": "", "hall/__init__.py": '"""The hall."""', "loft/__init__.py": '"""Above."""'}


def test_who_imports_stands_above_who_is_imported(tmp_path: Path) -> None:
    package = write(
        tmp_path, {**HALL, "loft/a.py": "from shardwise.hall.b import c", "hall/b.py": "import shardwise.errors"}
    )
    draw = runpy.run_path(str(ROOT / "docs" / "draw_house.py"))["draw"]
    lines = draw(package).splitlines()
    assert "    loft --> hall" in lines
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == ["loft", "hall", "leaves", "shardwise"]


def test_rooms_that_import_each_other_are_not_drawn(tmp_path: Path) -> None:
    package = write(tmp_path, {**HALL, "loft/a.py": "import shardwise.hall", "hall/b.py": "import shardwise.loft.a"})
    draw = runpy.run_path(str(ROOT / "docs" / "draw_house.py"))["draw"]
    with pytest.raises(ValueError, match="hall -> loft -> hall"):
        draw(package)


@by_page
def test_files_that_a_page_cites_are_there(page: Path) -> None:
    for name in FILE.findall(LINK.sub("", text_of(page))):
        assert name in OF_A_RUN or find(name, page) is not None, f"{page.name} cites {name}: there is no such file"


@by_page
def test_definitions_that_a_page_cites_are_there(page: Path) -> None:
    for quoted in QUOTED.findall(text_of(page)):
        name, separator, wanted = quoted.partition("::")
        path = find(name, page) if separator and name.endswith(".py") else None
        if path is not None:
            wanted = wanted.partition("[")[0]
            assert wanted in definitions(path), f"{page.name} cites `{quoted}`: {path.name} defines no {wanted}"


@by_page
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(text_of(page)):
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {name}"
        assert not anchor or anchor in anchors(target), (
            f"{page.name} links to {name}#{anchor}: there is no such heading"
        )


def test_every_design_has_a_number_of_its_own() -> None:
    numbers = [path.name[:3] for path in (ROOT / "docs" / "design").glob("*.md")]
    assert len(numbers) == len(set(numbers))
