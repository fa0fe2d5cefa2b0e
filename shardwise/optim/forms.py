"""The forms in which checkpoints name optimizer state: by parameter, by torch's flattened keys, by the plain indices."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal

from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim.pieces import in_order_of

# named: {"state": {NAME: {KEY: value}}, "param_groups": [{"params": [NAME, ...], OPTION: value}]}
# indexed: the same with the parameters' numbers for names, as plain optimizers have it.
# flat: {"state.NAME.KEY": value, "param_groups.NAME.OPTION": value}, torch's flatten_optimizer_state_dict.
StateForm = Literal["named", "indexed", "flat"]
FORMS: tuple[StateForm, ...] = ("named", "indexed", "flat")


def in_form(form: StateForm, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return named ``state`` and ``groups`` in another form.

    Raises: ConfigError for a form that is none.

    Example:
        >>> in_form("flat", {"a": {"step": 1}}, [{"params": ["a"], "lr": 0.1}])
        {'state.a.step': 1, 'param_groups.a.lr': 0.1}
    """
    if form not in FORMS:
        raise ConfigError(f"the form is {form!r}, expected one of {FORMS}")
    if form == "flat":
        entries = {f"state.{n}.{path}": v for n, values in state.items() for path, v in leaves_of(values)}
        for group in groups:
            for name in group["params"]:
                entries |= {f"param_groups.{name}.{key}": value for key, value in options_of(group).items()}
        return entries
    if form == "named":
        return {"state": dict(state), "param_groups": [dict(group) for group in groups]}
    number = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {number[name]: values for name, values in state.items()},
        "param_groups": [{**options_of(group), "params": [number[n] for n in group["params"]]} for group in groups],
    }


def is_flat(state_dict: Mapping[str, Any]) -> bool:
    """Return True if ``state_dict`` has torch's flattened keys."""
    return bool(state_dict) and "param_groups" not in state_dict


def unflattened(flat: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a flat state dict in the named form, with the parameters in ``groups``.

    Raises: ConfigError for entries of unknown parameters, a group without options, or one whose parameters have others.
    """
    names = sorted((name for group in groups for name in group), key=len, reverse=True)
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for entry, value in flat.items():
        kind, _, rest = entry.partition(".")
        name = next((name for name in names if rest.startswith(f"{name}.")), None)
        if kind not in ("state", "param_groups") or name is None:
            raise ConfigError(
                f"the loaded state dict has an entry {entry!r}, which belongs to no parameter of the optimizer"
            )
        if kind == "state":
            _put(state.setdefault(name, {}), rest[len(name) + 1 :].split("."), value)
        elif rest[len(name) + 1 :] != "param_names":
            options.setdefault(name, {})[rest[len(name) + 1 :]] = value
    found: list[dict[str, Any]] = []
    for group in groups:
        for name in group:
            if options.get(name) is None or options[name] != options.get(group[0]):
                raise ConfigError(
                    f"{name}: the loaded state dict has the options {options.get(name)} for it, but {options.get(group[0])} "
                    f"for {group[0]}, which is in the same param group here; make groups as those of the checkpoint"
                )
        found.append({**options.get(group[0] if group else "", {}), "params": list(group)})
    order = [name for group in groups for name in group]
    return {"state": {name: state[name] for name in order if name in state}, "param_groups": found}


def load_indexed(
    optimizer: Optimizer, states: Iterable[Mapping[str, Any] | None], options: Sequence[Mapping[str, Any]]
) -> None:
    """Let ``optimizer`` load ``states``, one per parameter in the order of its groups, and the options of its groups.

    State with one value per element gets the memory format of its parameter.
    """
    indices = count()
    groups = [
        {**options_of(option), "params": [next(indices) for _ in group["params"]]}
        for option, group in zip(options, optimizer.param_groups, strict=True)
    ]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        index: {key: in_order_of(param, value) for key, value in state.items()}
        for index, (param, state) in enumerate(zip(params, states, strict=True))
        if state is not None
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group, without the parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy the options of param groups, group by group."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))


@contextmanager
def synced_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> Generator[None, None, None]:
    """Copy the options of ``source`` to ``target`` on entry, and back on exit."""
    copy_options(source, target)
    try:
        yield
    finally:
        copy_options(target, source)


def step_in_sync(
    step: Callable[..., Any],
    closure: Callable[[], Any] | None,
    outer: Sequence[dict[str, Any]],
    inner: Sequence[dict[str, Any]],
) -> Any:
    """Run ``step``, which reads the groups ``inner``, with the options that users set in ``outer``, also within ``closure``."""

    def closure_of_user() -> Any:
        assert closure is not None
        with synced_options(inner, outer):
            return closure()

    with synced_options(outer, inner):
        return step() if closure is None else step(closure=closure_of_user)


def leaves_of(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the entries of a parameter's state with their keys, those of inner dicts joined by dots."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{path}", leaf) for path, leaf in leaves_of(value))
        else:
            yield str(key), value


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value
