"""``--model-from module:function``: a model of the user's own, built alike on every rank; ``--init``: weights to begin with."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.api.repeated_blocks import families_of
from shardwise.checkpoint import CheckpointError, load
from shardwise.errors import ConfigError
from shardwise.plan.grouping import repeated_blocks
from shardwise.recipes.gpt import GPT, logits_of
from shardwise.recipes.own_module import look_here
from shardwise.recipes.ranks import RunRanks


def check_module(model_from: str) -> None:
    """Refuse a module that Python does not find; nothing of it runs, but for the packages around it.  Raises: ConfigError."""
    name = model_from.partition(":")[0]
    look_here()
    try:
        is_there = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise ConfigError(
            f"--model-from {model_from}: there is no module {name!r} in this folder, nor installed. Start from the folder "
            f"that has {name.replace('.', '/')}.py."
        )


def build_own(model_from: str, seed: int, vocabulary: int, context: int) -> nn.Module:
    """Return the model that the user's function builds, with torch's generator seeded.

    The function gets those of ``vocabulary`` and ``context`` that it has parameters of that name for.
    Raises: ConfigError if it is not there, cannot be called like this, or returns no module; what it raises itself.
    """
    name, _, attribute = model_from.partition(":")
    check_module(model_from)
    function = getattr(importlib.import_module(name), attribute, None)
    if not callable(function):
        found = "has no such name" if function is None else f"has a {type(function).__name__} there"
        raise ConfigError(
            f"--model-from {model_from}: the module {found}, expected a function that returns a torch.nn.Module."
        )
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in (("vocabulary", vocabulary), ("context", context)) if key in parameters}
    missing = [
        each.name
        for each in parameters.values()
        if each.default is each.empty
        and each.name not in given
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if missing:
        raise ConfigError(
            f"--model-from {model_from}: the function needs {', '.join(missing)}, and is given vocabulary and context alone. "
            "Give the others defaults, or name a function that fills them in."
        )
    torch.manual_seed(seed)
    model = function(**given)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model-from {model_from} returned a {type(model).__name__}, expected a torch.nn.Module.")
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(f"--model-from {model_from} returned a model without parameters that require gradients.")
    return model


def try_own(model: nn.Module, model_from: str, vocabulary: int, window: Tensor) -> None:
    """Refuse a model that does not map tokens to logits over all of ``vocabulary``, before it is sharded.

    Shape: ``window`` (1, context) int64, on the model's device; one forward, without gradients.
    Raises: ConfigError.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output = model(window.fill_(vocabulary - 1))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"--model-from {model_from}: the model failed on int64 tokens of shape {tuple(window.shape)}, all "
            f"{vocabulary - 1}, the highest of this text ({type(error).__name__}: {reason}). "
            f"Build it for vocabulary={vocabulary}."
        ) from error
    finally:
        model.train(was_training)
    size = logits_of(output, window).shape[2]
    if size < vocabulary:
        raise ConfigError(
            f"--model-from {model_from}: the model has logits for {size} tokens, the text has {vocabulary}."
        )


def check_alike(model: nn.Module, ranks: RunRanks, model_from: str) -> None:
    """Refuse ranks that built models of other weights: each would train its own shards of another model.  Collective.

    Raises: ConfigError on every rank.
    """
    found = ranks.gather(_fingerprint(model))
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise ConfigError(
            f"--model-from {model_from}: rank {other} built other parameters than rank 0. Draw them from torch's generator, "
            "which is seeded with --seed, or load them from a file."
        )


def _fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            facts = (name, str(tensor.dtype), tuple(tensor.shape))
            digest.update(repr((*facts, tensor.double().sum().item(), tensor.double().abs().sum().item())).encode())
    return digest.hexdigest()


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the blocks of a model that are sharded and compiled one by one; none if it has no repeated ones."""
    if isinstance(model, GPT):
        return list(model.blocks)
    children = (child for family in families_of(model, frozenset()) for child in repeated_blocks(family))
    return [model.get_submodule(child.path) for child in children]


def load_init(path: str, plain: nn.Module) -> None:
    """Load safetensors weights, a file or a folder with ``model.safetensors`` or its index.  Collective.

    Raises: ConfigError on every rank, nothing changed, if names or shapes are others than the model's; it lists them.
    """
    try:
        load(Path(path), {"model": plain})
    except CheckpointError as error:
        raise ConfigError(f"--init {path} does not fit the model: {' '.join(str(error).split())}") from error
