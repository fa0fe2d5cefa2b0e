"""Every private name of torch that the package uses: ``python docs/list_private_names.py`` writes the end of docs/torch.md.

Docstrings in ``shardwise/torch_private.py`` end with why an entry is there, and until when.
``tests/inproc/test_torch_private.py`` fails while the page is not what they say.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGE = ROOT / "shardwise" / "torch_private.py", ROOT / "docs" / "torch.md"
HEAD = """\
## Every entry of `torch_private.py`

`docs/list_private_names.py` writes this table from the docstrings, which also say what each entry does.

| entry | why | until |
| --- | --- | --- |
"""


def entries() -> dict[str, tuple[str, str]]:
    """Return why each function or value of the file is there, and until when.  Raises: ValueError if it does not say."""
    found: dict[str, tuple[str, str]] = {}
    body = ast.parse(SOURCE.read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
        name = getattr(target, "name", getattr(target, "id", "_"))
        if not name.startswith("_"):
            first = node.body[0] if isinstance(node, ast.FunctionDef | ast.ClassDef) else after
            text = (
                str(first.value.value) if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else ""
            )
            match = re.search(r"Why: (.*)\. Until (.*)\.$", " ".join(text.split()))
            if match is None:
                raise ValueError(f"{name} says neither why nor until when")
            found[name] = match[1], match[2]
    return found


def page() -> str:
    """Return the whole page: what is before the table, and the table."""
    rows = [f"| `{name}` | {why} | {until} |\n" for name, (why, until) in sorted(entries().items())]
    text = PAGE.read_text().partition(HEAD.partition("\n")[0])[0] + HEAD + "".join(rows)
    return re.sub(r":\w+:`(\w+)`", r"`\1`", text).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
