"""Groups of parameters by their names: as users write them, and as state dicts hold them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from shardwise.errors import ArgumentTypeError, ConfigError


def checked_params(params: Any) -> dict[str, torch.Tensor]:
    """Return parameters by name from a mapping or pairs.

    Raises: TypeError for anything else; ConfigError for none at all, and for a name or tensor that is given twice.
    """
    if isinstance(params, torch.Tensor):
        raise ArgumentTypeError("parameters come with names: pass dict(model.named_parameters()), not a tensor")
    pairs = list(cast(Mapping[str, Any], params).items()) if isinstance(params, Mapping) else list(params)
    if not pairs:
        raise ConfigError("ShardedOptimizer got no parameters")
    found: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(cast(tuple[Any, ...], pair)) != 2:
            raise ArgumentTypeError(
                f"parameters come with names: expected (name, tensor), found "
                f"{type(pair).__name__}. Pass dict(model.named_parameters()), not model.parameters()"
            )
        name, param = cast(tuple[str, Any], pair)
        if not isinstance(param, torch.Tensor):
            raise ArgumentTypeError(
                f"{name}: expected a Tensor, DTensor or ShardedTensor, found {torch.typename(param)}"
            )
        if name in found or id(param) in first_name:
            raise ConfigError(f"{name} is given twice (first as {first_name.get(id(param), name)}); pass it once")
        found[name] = param
        first_name[id(param)] = name
    return found


def split_by_pattern(
    names: Sequence[str], groups: Sequence[Mapping[str, Any]]
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the names and options of every group, those that no pattern matches last, with the defaults.

    Raises: ConfigError for a group of another form, or one that matches nothing.
    """
    rest = list(names)
    split: list[tuple[list[str], dict[str, Any]]] = []
    for group in groups:
        if "names" not in group or "params" in group:
            raise ConfigError(f'a group needs "names" (a pattern or several) and no "params"; found {sorted(group)}')
        patterns = [group["names"]] if isinstance(group["names"], str) else list(group["names"])
        taken = [name for name in rest if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        if not taken:
            raise ConfigError(f"no parameter (that is not in an earlier group) matches {patterns}")
        rest = [name for name in rest if name not in set(taken)]
        split.append((taken, {key: value for key, value in group.items() if key != "names"}))
    return [*split, (rest, {})] if rest else split


def match_groups(
    saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]
) -> tuple[list[Mapping[str, Any]], dict[Any, str]]:
    """Return the saved groups in the order of ``own`` and the name for each of their keys.

    Raises: ConfigError if their number, or the parameters of one, differ.
    """
    if len(saved) != len(own):
        raise ConfigError(f"loaded state dict has a different number of parameter groups: {len(saved)}, not {len(own)}")
    saved_names = [key for group in saved for key in group.get("param_names", group["params"])]
    if all(isinstance(key, str) for key in saved_names):
        saved_keys = [key for group in saved for key in group["params"]]
        by_names = {frozenset(group.get("param_names", group["params"])): group for group in saved}
        missing = [list(names) for names in own if frozenset(names) not in by_names]
        if missing:
            raise ConfigError(
                f"loaded state dict contains a parameter group that doesn't match: none has exactly {missing[0]}"
            )
        return [by_names[frozenset(names)] for names in own], dict(zip(saved_keys, saved_names, strict=True))
    matched: dict[Any, str] = {}
    for group, names in zip(saved, own, strict=True):
        if len(group["params"]) != len(names):
            raise ConfigError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"{len(group['params'])} parameters, expected {len(names)}"
            )
        matched.update(zip(group["params"], names, strict=True))
    return list(saved), matched
