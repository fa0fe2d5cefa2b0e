"""A case as Python text: what every contender runs, and what a developer reads when it fails."""

from __future__ import annotations

import functools
import inspect
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuzz import initial_values, zoo
from fuzz.actions import Action, Page, Restart
from fuzz.case import WIDTH, Case, Contender, Node, Settings, node_at

ACTS = {"integers": ("wrap", zoo.wrap), "reals": ("torch.sin", torch.sin)}
TIED: dict[str, tuple[str, ...]] = {
    "Mlp": ("up.weight", "down.weight"),
    "Conv": ("wide.weight",),
    "Lookup": ("table.weight",),
    "Follower": ("first", "second"),
    "Lstm": ("cell.weight_ih_l0", "out.weight"),
}


def path_of(place: tuple[int, ...]) -> str:
    """Return the path of the module at ``place``."""
    return ".".join(f"c{number}" for number in place)


def expression(node: Node) -> str:
    """Return the Python expression that makes the module of ``node``."""
    inner = [expression(child) for child in node.children]
    if node.kind == "Stack":
        segments = ", ".join(f"({each.children!r}, {each.recompute!r})" for each in node.segments)
        text = f"Stack([{', '.join(inner)}], [{segments}])"
    elif node.kind in ("Boxed", "Touched", "Hooked"):
        text = f"{node.kind}({inner[0]}, {node.form!r})"
    elif node.kind in ("Gate", "Peek"):
        text = f"{node.kind}({inner[0]})"
    elif node.kind == "Oddments":
        text = f"Oddments({WIDTH}, {node.form!r}, act)"
    elif node.kind == "Conv" and node.form:
        text = f"Conv({WIDTH}, {node.size}, act, {node.form!r})"
    elif node.kind in ("Tally", "Norm", "Rope"):
        text = f"{node.kind}({WIDTH}, act)"
    else:
        text = f"{node.kind}({WIDTH}, {node.size}, act)"
    return f"{text}.requires_grad_(False)" if node.frozen else text


TESTS = str(Path(__file__).resolve().parents[1])  # where a script by itself finds this package


def render(case: Case, inline: bool = False, about: str = "") -> str:
    """Return the text of ``case``: a module with ``build``, ``PROGRAMS`` and what :class:`Play` reads beside them.

    Args:
        inline: hold the classes of the model instead of importing them, and run when it is the main module.
        about: what the docstring says.
    """
    build = _build_text(case)
    parts = [f'"""{about}"""' if about else "", _head(case, build, inline), build, *_programs(case), _tail(case)]
    if inline:
        parts.append('if __name__ == "__main__":\n    main(__file__)')
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _head(case: Case, build: str, inline: bool) -> str:
    lines = ["import copy", "import pickle", "", "import torch"]
    imports = ["from fuzz.case import Contender, Optim, Own, Settings"]
    act = f"act = {ACTS[case.settings.arithmetic][0]}"
    if not inline:
        names = ", ".join(name for name in ("wrap", *_classes(case.model.root)))
        imports += ["from fuzz.losses import loss_of"]
        imports += [
            "from fuzz.initial_values import fill, reset",
            f"from fuzz.zoo import {names}",
        ]
        return "\n".join([*lines, "", *imports, "", act])
    source = textwrap.dedent(_sources(case, build))
    lines = [
        "from __future__ import annotations",
        "",
        "import copy",
        "import dataclasses",
        "import functools",
        "import pickle",
        "import sys",
    ]
    lines += ["from collections.abc import Callable, Sequence", "from typing import Any, NamedTuple", ""]
    lines += ["import torch", "from torch import Tensor, nn", "from torch.nn import functional"]
    lines += ["from torch.utils.checkpoint import checkpoint", "", f"sys.path.insert(0, {TESTS!r})", *imports]
    lines += ["from fuzz.codes import Codes", "from fuzz.losses import loss_of"]
    lines += ["from fuzz.script import main", "", "Act = Callable[[Tensor], Tensor]"]
    return "\n".join(lines) + "\n\n\n" + source + "\n\n\n" + act


def _classes(node: Node) -> list[str]:
    names = {node.kind}
    for child in node.children:
        names.update(_classes(child))
    return sorted(names)


def _sources(case: Case, build: str) -> str:
    """Return the source of the classes and functions that the text of ``case`` uses, in the order of the zoo."""
    wanted = {"fill", "reset", *_classes(case.model.root)}
    if "Wrap" in build or case.settings.arithmetic == "integers":
        wanted |= {"Wrap", "wrap"}
    sources = _zoo_sources()
    grows = True
    while grows:
        found = {other for name in wanted for other in sources if other in sources[name].replace(f"class {name}", "")}
        grows = not found <= wanted
        wanted |= found
    return "\n\n\n".join(source.rstrip() for name, source in sources.items() if name in wanted)


@functools.cache
def _zoo_sources() -> dict[str, str]:
    """Return the text of every class and function that makes models, by name, in the order of the files."""
    members: list[Any] = []
    for module in (zoo, initial_values):
        own = [each for each in vars(module).values() if inspect.getmodule(each) is module]
        found = [each for each in own if inspect.isclass(each) or inspect.isfunction(each)]
        members += sorted(found, key=lambda each: inspect.getsourcelines(each)[1])
    return {each.__name__: inspect.getsource(each) for each in members}


def _build_text(case: Case) -> str:
    lines = ["def make():", f"    model = {expression(case.model.root)}"]
    for first, second in case.model.ties:
        for name in TIED[node_at(case.model.root, first).kind]:
            lines.append(f"    model.{path_of(second)}.{name} = model.{path_of(first)}.{name}  # tied")
    values = f"{case.seed}, exact={case.settings.arithmetic == 'integers'}, dtype=torch.{case.settings.dtype}"
    lines += ["    return model", "", "", "def build():"]
    lines.append(f"    return {'reset' if case.settings.meta else 'fill'}(make(), {values})")
    return "\n".join(lines)


def build_model(case: Case) -> nn.Module:
    """Return the model of ``case``, whole and plain."""
    names: dict[str, Any] = {
        **vars(zoo),
        **vars(initial_values),
        "act": ACTS[case.settings.arithmetic][1],
        "torch": torch,
    }
    exec(_build_text(case), names)
    model: nn.Module = names["build"]()
    return model


def phases_of(case: Case) -> list[tuple[Restart | None, list[Action]]]:
    """Return the actions between restarts, each list with the restart that it begins with."""
    found: list[tuple[Restart | None, list[Action]]] = [(None, [])]
    for action in case.actions:
        if isinstance(action, Restart):
            found.append((action, []))
        else:
            found[-1][1].append(action)
    return found


def page_of(case: Case) -> Page:
    """Return an empty page for the programs of ``case``."""
    model = build_model(case)
    gates = [name for name, module in model.named_modules() if isinstance(module, zoo.Gate)]
    units = [path_of(group[0]) for group in case.model.units]
    return Page([name for name, _ in model.named_parameters()], units, gates)


def _programs(case: Case) -> list[str]:
    page = page_of(case)
    texts: list[str] = []
    for number, (_, actions) in enumerate(phases_of(case)):
        page.begin()
        for action in actions:
            action.write(page)
        body = textwrap.indent("\n".join(page.lines or ["return"]), "    ")
        extra = "" if any(line.startswith("yield") for line in page.lines) else "\n    yield 'nothing'"
        texts.append(f"def program{number}(s):\n{body}{extra}")
    return texts


def _tail(case: Case) -> str:
    phases = [f"    ({case.num_ranks}, program0, None),"]
    for number, (restart, _) in enumerate(phases_of(case)[1:], start=1):
        assert restart is not None
        then = (restart.how, restart.api, restart.update)
        phases.append(f"    ({restart.num_ranks}, program{number}, {then!r}),")
    units = [tuple(path_of(place) for place in group) for group in case.model.units]
    contenders = [f"    {brief(each)}," for each in case.contenders]
    return "\n".join(
        [
            f"SEED = {case.seed}",
            f"SETTINGS = {brief(case.settings)}",
            f"UNITS = {units!r}",
            "PHASES = [",
            *phases,
            "]",
            "CONTENDERS = [",
            *contenders,
            "]",
        ]
    )


def brief(value: Settings | Contender) -> str:
    """Return the expression of a frozen value without the fields that are as by default."""
    given: list[str] = []
    for field in fields(value):
        each = getattr(value, field.name)
        if field.default is MISSING or each != field.default:
            given.append(f"{field.name}={each!r}")
    return f"{type(value).__name__}({', '.join(given)})"
