"""Every message of an error, read from the code: ``python docs/list_messages.py`` prints them."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "shardwise"


def error_names() -> list[str]:
    """Return the public classes of errors, in the order of their file."""
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def text_of(node: ast.AST) -> str:
    """Return the text that an expression makes; what is put in are three dots."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "..."


def messages() -> dict[str, list[str]]:
    """Return the messages with which each class is made, sorted."""
    found: dict[str, set[str]] = {name: set() for name in error_names()}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found and node.args:
                text = " ".join(text_of(node.args[0]).split())
                if text.strip(" .:;,"):
                    found[node.func.id].add(text)
    return {name: sorted(texts, key=str.lower) for name, texts in found.items() if texts}


if __name__ == "__main__":
    for name, texts in messages().items():
        print(name, *texts, sep="\n  ")
