"""Docstrings as this package writes them, for mkdocstrings: read as Google's style, with what this package does otherwise.

``Example:`` is a section, ``a, b: ...`` under ``Args:`` stands for both, ``Raises: ...`` on one line is a paragraph of its own,
and roles (``:func:``) are names.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, Object

ROLE = re.compile(r":(?:meth|class|func|attr|mod):`~?(?:[\w.]*\.)?(\w+)`")
PARAGRAPH = re.compile(r"^(Raises|Returns|Source|Shape|Cost|Design): +(\S.*)$")
ARGUMENTS = re.compile(r"^    ((?:\w+, )*\w+): (.*)$")


class DocstringStyle(Extension):
    """Rewrite every docstring that was found, before it is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = rewrite(obj.docstring.value, starred(obj))


def starred(obj: Object) -> dict[str, str]:
    """Return the arguments that have stars in the signature: name -> name with stars."""
    function = obj.members.get("__init__") if isinstance(obj, Class) else obj
    names = [each.name for each in function.parameters] if isinstance(function, Function) else []
    return {name.lstrip("*"): name for name in names if name.startswith("*")}


def rewrite(text: str, stars: dict[str, str]) -> str:
    """Return a docstring as Google's style has it."""
    lines: list[str] = []
    joins = section = False
    entry: list[str] = []  # what stands under several names, until it is whole
    names: list[str] = []

    def end() -> None:
        for name in names:
            lines.append(f"    {stars.get(name, name)}: {entry[0]}")
            lines.extend(entry[1:])
        names.clear()
        entry.clear()

    for line in ROLE.sub(r"`\1`", text).split("\n"):
        found, argument = PARAGRAPH.match(line), ARGUMENTS.match(line) if section else None
        joins = bool(found) or (joins and line.startswith(" "))
        if not line.startswith(" "):
            end()
            section = line in ("Args:", "Attributes:")
        if argument:
            end()
            names.extend(argument[1].split(", "))
            entry.append(argument[2])
        elif names:
            entry.append(line)
        elif found:
            lines.extend(["", f"**{found[1]}:** {found[2]}"])
        else:
            lines.append("Examples:" if line == "Example:" else line.strip() if joins else line)
    end()
    return "\n".join(lines)
