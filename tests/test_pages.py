"""Pages say what is: pictures show what they are drawn from, what a page cites is there, and what is public has a page."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from helpers.each import of_each
from helpers.snippets import commands_of, read

import shardwise
import shardwise.checkpoint
import shardwise.testing
from shardwise.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardwise"
NOT_OURS = {".git", ".venv", ".venv-docs", ".venv-clients", "build", "runs"}
PAGES = sorted(page for page in ROOT.rglob("*.md") if not NOT_OURS & {*page.relative_to(ROOT).parts})
CODE = [
    path for folder in ("shardwise", "tests", "benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.*")
]
by_page = of_each(PAGES)

QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w./*}-])(?:[\w.*-]+/)*[\w*-]+\.(?:py|md|json|toml|c|txt)\b")
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([\w-]+))?\)")
# What the command writes, and no page of ours.
OF_A_RUN = {"config.json", "config.toml", "plan.json", "tokenizer.json"}


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
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == ["loft", "hall", "base", "shardwise"]


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


QUOTED = re.compile(r"<!-- not run: it is in (\S+) -->\n```python\n(.*?)```", re.DOTALL)


@by_page
def test_code_that_a_page_quotes_is_in_the_file(page: Path) -> None:
    for name, block in QUOTED.findall(page.read_text()):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        assert "\n".join(lines) in "\n".join(filter(None, map(str.strip, (ROOT / name).read_text().splitlines()))), (
            block
        )


def test_every_design_has_a_number_of_its_own() -> None:
    numbers = [path.name[:3] for path in (ROOT / "docs" / "design").glob("*.md")]
    assert len(numbers) == len(set(numbers))


ENTRY = re.compile(r"^::: ([\w.]+)$", flags=re.MULTILINE)
FRONTS = (shardwise, shardwise.checkpoint, shardwise.testing)


def entries() -> set[str]:
    """Return what the pages of docs/reference have an entry for."""
    return {name for page in (ROOT / "docs" / "reference").glob("*.md") for name in ENTRY.findall(page.read_text())}


@of_each(FRONTS)
def test_every_public_name_has_an_entry_in_the_reference(front: ModuleType) -> None:
    found = {name.rpartition(".")[2] for name in entries()}
    absent = sorted(set(front.__all__) - found)
    assert not absent, f"docs/reference has no lines {[f'::: {front.__name__}.{name}' for name in absent]}"


def thing_of(name: str) -> Any:
    """Return what an entry stands for."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_a_module_in_the_reference_does_not_show_all_that_is_in_it() -> None:
    """A module hides a function of its name: ``save.save`` with a heading shows the function."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text()
        for found in ENTRY.finditer(text):
            path = ROOT.joinpath(*found[1].split("."))
            is_module = path.is_dir() or path.with_suffix(".py").exists()
            options = text[found.end() :].lstrip("\n").partition("\n")[0]
            is_meant = isinstance(thing_of(found[1]), ModuleType) and "members: false" in options
            assert not is_module or is_meant, f"{page.name} shows the module {found[1]}"


def test_every_entry_of_the_reference_has_a_docstring_as_have_the_public_methods_behind_it() -> None:
    for name in sorted(entries()):
        thing = thing_of(name)
        assert thing.__doc__, name
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            is_method = isinstance(value, (FunctionType, classmethod, staticmethod, property))
            if is_method and not member.startswith("_"):
                assert value.__doc__, f"{name}.{member} has no docstring, so the reference leaves it out"


def test_arguments_of_a_docstring_are_each_a_name_and_a_description() -> None:
    """Or the site is not built: ``make docs`` counts warnings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
            for block in re.findall(r"^Args:\n((?: +.*\n?|\n)*)", text or "", flags=re.MULTILINE):
                for entry in re.findall(r"^ {4}(?! )(.*)$", block, flags=re.MULTILINE):
                    assert re.match(r"[*\w, ]+: \S", entry), f"{path.relative_to(ROOT)}: {entry}"


def test_what_users_read_is_not_long() -> None:
    user_part = (ROOT / "mkdocs.yml").read_text().partition("  - For contributors:")[0]
    pages = re.findall(r": ([\w/]+\.md)$", user_part, flags=re.MULTILINE)
    words = {name: len(re.findall(r"\S*\w\S*", (ROOT / "docs" / name).read_text())) for name in pages}
    searched = words.pop("errors.md")  # one row per message: searched, not read
    assert searched <= 7_650
    assert sum(words.values()) <= 23_400, f"shorten a page: {words}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name.startswith("design/") or f": {name}\n" in navigation, f"mkdocs.yml has no entry for {name}"


def test_every_class_of_errors_has_a_section_on_the_page_of_errors() -> None:
    page = ROOT / "docs" / "errors.md"
    for name, kind in vars(shardwise.errors).items():
        if (
            isinstance(kind, type)
            and issubclass(kind, shardwise.ShardwiseError)
            and kind is not shardwise.ShardwiseError
        ):
            assert name.lower() in anchors(page), name


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts in a file, what is put in as three dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.BinOp):
            yield "".join(texts_of(node.left)) + "".join(texts_of(node.right))


SECTION = re.compile(r"^## ([\w' ]+)$(.*?)(?=^## |\Z)", flags=re.MULTILINE | re.DOTALL)
EXPLAINED = re.compile(r"^\| `([^|]*)` \| [^|]+ \|$", flags=re.MULTILINE)  # the second cell: cause and what to do


def messages_in(text: str) -> list[str]:
    """Return the messages that the tables of ``text`` explain; one row may explain several, ``<br>`` between them."""
    return [message for cell in EXPLAINED.findall(text) for message in cell.split("` <br> `")]


def pattern_of(message: str) -> re.Pattern[str]:
    """Return what finds the fixed words of ``message``, in their order."""
    return re.compile("[^\\n]*".join(re.escape(part) for part in message.split("...") if part.strip(" :;,.")))


def test_messages_on_the_page_of_errors_are_those_that_are_raised() -> None:
    said = "\n".join(text for path in PACKAGE.rglob("*.py") for text in texts_of(ast.parse(path.read_text())))
    for message in messages_in((ROOT / "docs" / "errors.md").read_text()):
        assert pattern_of(message).search(said), f"nothing in the package says {message!r}"


def test_errors_that_are_raised_on_purpose_are_the_packages_own() -> None:
    kinds = {"ValueError", "TypeError", "AssertionError", "RuntimeError"}
    for path in (path for room in ("fsdp", "optim", "zero") for path in (PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            made = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Name):
                assert made.func.id not in kinds, f"{path}:{node.lineno} raises {made.func.id}, no ShardwiseError"


def test_every_message_of_an_error_is_explained_in_the_section_of_its_class() -> None:
    listed = runpy.run_path(str(ROOT / "docs" / "list_messages.py"))
    raised = listed["messages"]()
    page = (ROOT / "docs" / "errors.md").read_text()
    explained = {name: [pattern_of(each) for each in messages_in(text)] for name, text in SECTION.findall(page)}
    assert sum(map(len, raised.values())) > 300
    absent = [
        f"{name}: {text}"
        for name, texts in raised.items()
        for text in texts
        if not any(p.search(text) for p in explained[name])
    ]
    assert not absent, "docs/errors.md has no row for: " + "; ".join(absent)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command says to these words before it does anything; an empty text if it would begin."""
    try:
        build_parser().parse_args(words)
    except SystemExit as ended:
        return capsys.readouterr().err if ended.code else ""
    return ""


@by_page
def test_commands_on_a_page_are_such_as_the_command_takes(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (words for snippet in read(page) for words in commands_of(snippet)):
        said = refusal(words, capsys)
        assert not said, f"{page.name}: shardwise {' '.join(words)}: {said}"


def test_the_pictures_show_the_results() -> None:
    drawing = runpy.run_path(str(ROOT / "benchmarks" / "pictures.py"))
    for name in ("speed", "memory"):
        drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        assert drawn == drawing[name](), "the results have changed; run: python benchmarks/pictures.py"


def test_pictures_of_concepts_are_what_their_file_draws() -> None:
    for path, draw in runpy.run_path(str(ROOT / "docs" / "draw_concepts.py"))["drawings"]():
        assert path.read_text() == draw(), "run: python docs/draw_concepts.py"


def test_the_page_of_options_is_the_parsers() -> None:
    options = runpy.run_path(str(ROOT / "docs" / "list_options.py"))
    assert options["PAGE"].read_text() == options["page"](), "an option has changed; run: python docs/list_options.py"
