"""Every option of the command, read from its parser: ``python docs/list_options.py`` writes docs/reference/options.md.

``tests/test_pages.py`` fails while the page is not what the parser has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from shardwise.cli.main import build_parser

PAGE = Path(__file__).resolve().parent / "reference" / "options.md"
HEAD = """\
# Options of the command, and config keys

`docs/list_options.py` writes this page from the parser. [The command](../command.md) explains what the subcommands do.
The long names of the options of `shardwise train`, without `--`, are also the keys of a [config file](../command.md#train).
"""


def page() -> str:
    """Return the page as Markdown: a section for each subcommand, a table for each group of its options."""
    return "\n".join([HEAD, *_of_subcommands(build_parser(), "shardwise", 2)])


def _of_subcommands(parser: argparse.ArgumentParser, name: str, level: int) -> Iterator[str]:
    for action in parser._actions:  # argparse has no public way to list what a parser takes
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                yield f"{'#' * level} {name} {word}\n"
                yield from (f"{_cell(text)}\n" for text in (sub.description,) if text)
                yield from _of_options(sub)
                yield from _of_subcommands(sub, f"{name} {word}", level + 1)


def _of_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        shown = [
            action
            for action in group._group_actions
            if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
            and action.help is not argparse.SUPPRESS
        ]
        if shown:
            yield f"| {group.title} | meaning |\n| --- | --- |"
            yield from (f"| {_words(action)} | {_cell(_meaning(action, parser))} |" for action in shown)
            yield ""


def _words(action: argparse.Action) -> str:
    """Return how the option is typed: its names, and its value or choices."""
    values = [action.metavar] if action.metavar else action.choices or [action.dest.upper()]
    value = ", ".join(f"`{each}`" for each in values)
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}".strip()


def _meaning(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
