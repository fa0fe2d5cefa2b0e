"""Types as a user's checker sees them: every public name is in one script, and strict pyright has nothing to say about it."""

from __future__ import annotations

import ast
from pathlib import Path

from helpers.type_checker import SCRIPT, complaints

import shardwise
import shardwise.checkpoint

ROOT = Path(shardwise.__file__).parents[1]


def _names_in(script: Path) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Name)}


def test_the_script_uses_every_public_name() -> None:
    public = {*shardwise.__all__, *shardwise.checkpoint.__all__}
    assert public - _names_in(SCRIPT) == set()


def test_no_line_of_the_script_hides_a_complaint() -> None:
    text = SCRIPT.read_text()
    assert "ignore" not in text.replace("ignored_params", "")
    assert "Any" not in _names_in(SCRIPT)


def test_strict_pyright_has_nothing_to_say_about_it(tmp_path: Path) -> None:
    assert complaints(tmp_path, SCRIPT, ROOT) == []
