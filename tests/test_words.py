"""Names and comments speak torch's language: words that this package once had for itself do not come back.

The glossary in docs/architecture.md (section Words) says what is said instead.  A word goes into these lists once
nothing has it any more.
"""

from __future__ import annotations

import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Parts of identifiers and of file names, in lower case.
NAMES = re.compile(
    r"boards?|borrow(s|ers?)?|bulletins?|cables?|carve|desk|doors?|edges?|eras?|farewells?|followers?|hangs?|home|house|hung|"
    r"journals?|lanes?|leases?|lends?|lenders?|lent|loose|mates?|mend(s|ed|ing)?|pieces?|posts|roll|rooms?|steppers?|trial|"
    r"visits?|witness(es|ing)?"
)
# Nouns of comments and docstrings.
NOUNS = re.compile(
    r"\b(boards?|bulletins?|doors?|edges?|farewells?|houses?|journals?|lanes?|leases?|lenders?|loans?|mates|pieces?|"
    r"roll calls?|rooms|steppers?|witness(es)?)\b",
    re.IGNORECASE,
)
# Turns of phrase: a comment says which rank, tensor or call does what, not that somebody hears of it.
PHRASES = re.compile(
    r"\b(anew|anybody|as far as|everybody|farther|hears?|heard|nobody|of before|on (its|their) way|somebody|strangers?|"
    r"takes? note|whoever|whomever)\b",
    re.IGNORECASE,
)
# Files and folders whose comments still have such phrases.
NOT_YET = (
    "cli/train.py",
    "loop/",
    "recipes/report.py",
)
# (file, word) -> why it stays
EXCEPTIONS = {
    ("loop/meter.py", "lane"): "shardwise.Span.lane is public: a row of a trace, as Perfetto calls it",
    ("loop/meter.py", "on its way"): "shardwise.Span.what is public, and has these words",
    ("recipes/report.py", "lane"): "shardwise.Span.lane",
    ("cli/checkpoint.py", "edge"): "options of rich's tables",
}


def is_excepted(path: str, word: str) -> bool:
    return (path, word.removesuffix("s")) in EXCEPTIONS


def parts_of(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)]


@functools.cache
def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


def test_names_are_torchs_words() -> None:
    found: set[str] = set()
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        used = {token.string for token in tokens_of(path) if token.type == tokenize.NAME} | {path.stem}
        found |= {
            f"{name}: {each} (of {identifier})"
            for identifier in used
            for each in parts_of(identifier)
            if NAMES.fullmatch(each) and not is_excepted(name, each)
        }
    assert not found, "\n".join(sorted(found))


def test_files_of_tests_have_torchs_words_in_their_names() -> None:
    stems = {path.stem for path in Path(__file__).parent.rglob("*.py")}
    assert not [stem for stem in sorted(stems) for part in parts_of(stem) if NAMES.fullmatch(part)]


def prose_of(path: Path) -> list[tuple[int, str]]:
    """The lines of a file's comments and docstrings, with their numbers."""
    return [
        (number, line)
        for token in tokens_of(path)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and '"""' in token.string[:5])
        for number, line in enumerate(token.string.split("\n"), token.start[0])
    ]


@pytest.mark.parametrize(("words", "but"), [(NOUNS, ()), (PHRASES, NOT_YET)], ids=["torch's words", "plain English"])
def test_comments_and_docstrings_are_in_words_that_readers_know(words: re.Pattern[str], but: tuple[str, ...]) -> None:
    found = [
        f"{name}:{number}: {each[0]}"
        for path in FILES
        for name in [path.relative_to(ROOT).as_posix()]
        if not name.startswith(but)
        for number, line in prose_of(path)
        for each in words.finditer(line)
        if not is_excepted(name, each[0].lower())
    ]
    assert not found, "\n".join(found)


def test_no_exception_is_left_over() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
    assert [(name, word) for name, word in EXCEPTIONS if word not in texts[name]] == []
