"""What state is called in a checkpoint, and which names of files may stand in one."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LOCK = ".lock"
VERIFIED = ".verified"
SAVING = ".saving-"
REMOVING = ".removing-"
REPLACED = ".replaced-"

_STEP = re.compile(r"step-(\d{8,18})")
_PART = re.compile(r"part-\d{5,9}\.safetensors")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # what torch.compile and checkpoint_wrapper put into names


def join(*parts: str) -> str:
    """Return one name of several parts; slashes within a part stay tellable.

    Example:
        >>> join("optimizer", "state", "head/weight", "exp_avg")
        'optimizer/state/head%2Fweight/exp_avg'
    """
    return "/".join([part.replace("%", "%25").replace("/", "%2F") for part in parts])


def split(name: str) -> list[str]:
    """Return the parts that :func:`join` was given.

    Example:
        >>> split("optimizer/state/head%2Fweight/exp_avg")
        ['optimizer', 'state', 'head/weight', 'exp_avg']
    """
    return [part.replace("%2F", "/").replace("%25", "%") for part in name.split("/")]


def plain(fqn: str) -> str:
    """Return the name that a parameter has in the model without wrappers.

    Example:
        >>> plain("_orig_mod.blocks.0._checkpoint_wrapped_module.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def step_folder(step: int) -> str:
    """Return the name of the folder of the checkpoint after ``step`` steps.

    Example:
        >>> step_folder(1234)
        'step-00001234'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder of that name; None for other names.

    A checkpoint that was to be replaced by one of the same step, which never came, counts under its own step.
    """
    found = _STEP.fullmatch(name.removeprefix(REPLACED))
    return int(found[1]) if found else None


def part_file(number: int) -> str:
    """Return the name of the file with the tensors of one rank."""
    return f"part-{number:05d}.safetensors"


def is_part_file(name: str) -> bool:
    """Return True for names that :func:`part_file` makes: nothing else in a manifest leads to a file."""
    return _PART.fullmatch(name) is not None
