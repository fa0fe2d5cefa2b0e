"""``shardwise train --config FILE``: a TOML, YAML or JSON file of options, turned into the words of a command line."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.errors import ConfigError, did_you_mean

_PARSERS = {".toml": ("tomllib", "tomli"), ".yaml": ("yaml",), ".yml": ("yaml",), ".json": ("json",)}
_NOT_IN_FILES = ("help", "config", "print_config")


def config_words(path: Path, options: Sequence[argparse.Action], given: Mapping[str, Any]) -> list[str]:
    """Return the words for the options in the file ``path``; ``given``: the options of the command line, which come later.

    Raises: ConfigError that names the file, and the key if one is wrong.
    """
    known = {each.option_strings[0].removeprefix("--"): each for each in options if each.dest not in _NOT_IN_FILES}
    words: dict[str, str] = {}
    for key, value in _read(path).items():
        name = str(key).replace("_", "-")
        if name not in known:
            raise ConfigError(f"{path}: there is no option {str(key)!r}.{did_you_mean(name, known)}")
        if name in words:
            raise ConfigError(f"{path}: {name} is given twice, also as {name.replace('-', '_')}.")
        words[name] = _word(path, name, known[name], value)
    if "resume" in given:  # it names the folder
        words.pop("out", None)
    return [word for word in words.values() if word]


def _read(path: Path) -> Mapping[str, Any]:
    names = _PARSERS.get(path.suffix.lower())
    if names is None:
        raise ConfigError(f"--config {path}: expected a file that ends in {', '.join(_PARSERS)}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({error}).") from error
    parser = _parser(path, names)
    try:
        found = parser.safe_load(text) if parser.__name__ == "yaml" else parser.loads(text)
        _check_keys(text, parser)
    except (ValueError, RecursionError, getattr(parser, "YAMLError", ValueError)) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}.") from error
    if found is None:  # an empty YAML file
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds a {type(found).__name__}, expected names of options and their values.")
    return found


def _check_keys(text: str, parser: ModuleType) -> None:
    """Raise ValueError if JSON or YAML has a key twice: their parsers keep the last one and say nothing."""
    keys: list[str] = []
    if parser.__name__ == "json":
        parser.loads(text, object_pairs_hook=lambda pairs: keys.__setitem__(slice(None), [key for key, _ in pairs]))
    elif parser.__name__ == "yaml" and hasattr(node := parser.compose(text, parser.SafeLoader), "value"):
        keys = [key.value for key, _ in node.value] if isinstance(node.value, list) and node.id == "mapping" else []
    twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")


def _parser(path: Path, names: Sequence[str]) -> ModuleType:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError(
        f"--config {path}: needs {names[-1]}. Install it (pip install {names[-1].replace('yaml', 'pyyaml')})."
    )


def _word(path: Path, name: str, action: argparse.Action, value: object) -> str:
    """Return ``--name=value``; an empty text for None, and for a flag that is off."""
    if value is None:
        return ""
    shown = repr(value) if isinstance(value, dict) else json.dumps(value, default=str)
    wrong = ConfigError(f"{path}: {name} is {shown}, expected {_expected(action)}.")
    if action.nargs == 0:  # a flag
        if not isinstance(value, bool):
            raise wrong
        has_no = isinstance(action, argparse.BooleanOptionalAction)
        return f"--{name}" if value else f"--no-{name}" * has_no
    takes_text = action.type is not int
    takes_number = action.type is not None
    if isinstance(value, bool) or not isinstance(value, (str,) * takes_text + (int, float) * takes_number):
        raise wrong
    if "\0" in str(value):  # no command line can hold it
        raise wrong
    if isinstance(value, float) and action.type is not float:
        raise wrong
    try:
        if action.type is not None:
            action.type(str(value))  # pyright: ignore[reportCallIssue]  never the name of a type in a registry
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise wrong from error
    if action.choices is not None and value not in action.choices:
        raise wrong
    return f"--{name}={value}"


def _expected(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "true or false"
    if action.choices is not None:
        return f"one of {', '.join(map(str, action.choices))}"
    return {int: "a whole number", float: "a number", None: "a text"}.get(action.type, "a size such as 512k or 1.5M")  # pyright: ignore
