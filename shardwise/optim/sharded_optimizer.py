"""``ShardedOptimizer``: any torch optimizer over sharded parameters of any kind."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import astuple
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import torch_private
from shardwise.arguments import check_kind
from shardwise.checks.optimizers import after_optimizer_step, before_optimizer_step
from shardwise.consistency.agreement import open_exchange
from shardwise.consistency.store import Sketch, are_threads, digest_of, sample_of
from shardwise.errors import ArgumentTypeError, ConfigError, StateError, TransportError
from shardwise.fsdp.clip import Limit, Part, clip_parts, part_of, refuse_fixed_sums
from shardwise.observe import note
from shardwise.optim.elementwise import ElementwiseStep, SummedStep, empty_states
from shardwise.optim.slices import (
    Groups,
    MakeOptimizer,
    Members,
    Offload,
    OptimizerBackend,
    ParamSlice,
    UpdateRule,
    call_hooks,
    clear_gradient,
    gradient_of,
    is_sharded_tensor,
    known_base,
    local_of,
    reason_for_refusal,
    slices_of,
    update_rule,
)
from shardwise.optim.state_dict import (
    ByName,
    HeldState,
    NamedGroup,
    OwnGroup,
    Probe,
    StateForm,
    copy_options,
    full_value,
    in_form,
    options_of,
    refuse_other_state,
    step_in_sync,
    synced_options,
    why_other_class,
    wrap,
)
from shardwise.optim.whole_matrix import WholeMatrixStep

# ---- Plain parameters whose gradients nothing averages: the model was sharded by no API, and each rank trains one of its own.

_SAMPLE_NUMEL = 4096  # of each gradient
_MOST_STEPS = 64  # after which ranks have begun at other times, and are not compared


def has_only_plain(params: Iterable[torch.Tensor]) -> bool:
    """Return True if no parameter can be a part of a sharded one, and there are other ranks."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    is_plain = all(type(param) in (torch.Tensor, nn.Parameter) for param in params)
    return is_plain and dist.get_backend() != "fake" and not are_threads()


def compare_gradients(params: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Compare the gradients of a rank's first step with those of the next rank, without waiting for it; advance in each step.

    Parameters of other names or shapes, such as those of stages, are not compared.  Raises: StateError if gradients differ.
    """
    while (mine := _sample_gradients(params)) is None:
        yield
    own, own_bits = Sketch.of(mine[1]), digest_of(mine[1])
    world = dist.group.WORLD
    assert world is not None
    exchange = open_exchange(world, "gradients of plain parameters")
    exchange.post("gradients", json.dumps([mine[0], astuple(own), own_bits]))
    other = (exchange.rank + 1) % exchange.size
    for _ in range(_MOST_STEPS):
        text = exchange.collect("gradients", [other], 0.0).get(other)
        if text is not None:
            break
        yield
    else:
        return
    names, sketch, bits = json.loads(text)
    theirs = Sketch(*sketch)
    # Gradients of the same bits may be NaN, as after an overflow on all ranks, and then have no distance.
    if names == mine[0] and bits != own_bits and not own.distance(theirs) <= own.tolerance:
        raise StateError(
            "ShardedOptimizer: the gradients of plain parameters differ between ranks (at the first step: of norm "
            f"{own.norm:.6g} on rank {exchange.rank} and {theirs.norm:.6g} on rank {other}), and nothing averages them, so "
            "each rank trains a model of its own. Call fully_shard or replicate on the model before the optimizer is made, or "
            "wrap it in DistributedDataParallel. Stages of a pipeline need names of their own, such as f'{rank}.{name}'. "
            "Parameters that each rank is to train alone (experts, local steps) need no "
            "ShardedOptimizer: use the class of torch.optim itself"
        )


def _sample_gradients(params: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor] | None:
    """Return a digest of names and shapes, and a sample of the gradients, 1-D float32; None if there is no dense one."""
    samples: list[torch.Tensor] = []
    facts: list[str] = []
    for name, param in params.items():
        gradient = param.grad
        if gradient is not None and gradient.layout is torch.strided:
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            samples.append(sample_of(real.detach(), _SAMPLE_NUMEL).to("cpu", torch.float32))
            facts.append(f"{name} {tuple(param.shape)}")
    if not samples:
        return None
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16], torch.cat(samples)


# ---- Optimizer backends: on slices, on slices with sums over ranks, or on whole matrices.


def make_backend(
    make: MakeOptimizer, optimizer_class: type[Optimizer], groups: Groups, declared: UpdateRule | None, is_flat: bool
) -> OptimizerBackend:
    """Return the backend that runs ``optimizer_class`` over ``groups``.

    Raises: ConfigError if none would be right.
    """
    is_plain = not any(map(_is_sharded_kind, (slices for params, _ in groups for slices in params)))
    has_sums = False
    try:
        rule = update_rule(optimizer_class, declared)
        if rule == "elementwise" and not known_base(optimizer_class):
            probe = Probe(make, groups[0][1], local_of(groups[0][0][0][0]).device)
            _check_cut(probe, optimizer_class.__name__)
            has_sums = probe.takes_sums()
    except ConfigError:
        if not is_plain or reason_for_refusal(optimizer_class) is not None:
            raise
        rule = "whole_matrix"
    if rule == "elementwise" and not has_sums:
        return ElementwiseStep(make, groups, is_flat, known_base(optimizer_class) is not None)
    if has_sums and not is_plain:
        return SummedStep(make, groups)
    return WholeMatrixStep(make, optimizer_class, groups)  # plain tensors are whole on every rank


def _is_sharded_kind(slices: Sequence[ParamSlice]) -> bool:
    return isinstance(slices[0].param, DTensor) or is_sharded_tensor(slices[0].param)


def _check_cut(probe: Probe, name: str) -> None:
    advice = (
        "update='whole_matrix' gathers each parameter to one rank for the step, which is right for any such optimizer"
    )
    try:
        reason = probe.why_not_cut()
    except Exception as error:
        raise ConfigError(
            f"{name} is declared 'elementwise' but cannot step on parts of tensors ({error}); {advice}"
        ) from error
    if reason is not None:
        raise ConfigError(
            f"{name} is declared 'elementwise' but {reason}: over shards it would train something else; {advice}"
        )


# ---- Param groups by parameter names, as users write them and as state dicts contain them.


def checked_params(params: Any) -> dict[str, torch.Tensor]:
    """Return parameters by name from a mapping or from pairs.

    Raises: ArgumentTypeError for anything else; ConfigError for no parameters, and for a name or tensor that occurs twice.
    """
    if isinstance(params, torch.Tensor):
        raise ArgumentTypeError("parameters need names: pass dict(model.named_parameters()), not a tensor")
    pairs = list(cast(Mapping[str, Any], params).items()) if isinstance(params, Mapping) else list(params)
    if not pairs:
        raise ConfigError("ShardedOptimizer got no parameters")
    found: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(cast(tuple[Any, ...], pair)) != 2:
            raise ArgumentTypeError(
                f"parameters need names: expected (name, tensor), found "
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


def unpacked_groups(params: Any, groups: Sequence[Mapping[str, Any]]) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """Return the parameters and groups of ``[{"params": [...], "lr": ...}, ...]``, as torch's optimizers take it.

    Parameters without names are named by their numbers.  Other ``params`` are returned as they are.
    """
    if isinstance(params, torch.Tensor | Mapping):
        return params, groups
    items: list[Any] = list(params)
    if not items or not isinstance(items[0], Mapping):
        return items, groups
    pairs: list[tuple[str, Any]] = []
    found: list[dict[str, Any]] = []
    for group in items:
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        named = [each if isinstance(each, tuple) else (str(len(pairs) + i), each) for i, each in enumerate(members)]
        pairs += named
        found.append({**group, "params": [param for _, param in named]})
    return pairs, [*found, *groups]


def split_by_group(
    params: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, Any]]
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the names and options of every group; parameters that are in none form the last one, with the defaults.

    Raises: ConfigError for a malformed group, and for one that matches nothing.
    """
    rest = list(params)
    split: list[tuple[list[str], dict[str, Any]]] = []
    for group in groups:
        if ("names" in group) == ("params" in group):
            raise ConfigError(f'a group needs "names" (a pattern or several) or "params"; found {sorted(group)}')
        if "params" in group:
            members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
            wanted = {id(each[1] if isinstance(each, tuple) else each) for each in members}
            taken, what = [name for name in rest if id(params[name]) in wanted], '"params"'
            if taken and len(taken) < len(wanted):
                raise ConfigError(
                    'a group has "params" that are not among those of the optimizer, or in an earlier group'
                )
        else:
            what = [group["names"]] if isinstance(group["names"], str) else list(group["names"])
            taken = [name for name in rest if any(fnmatch.fnmatchcase(name, pattern) for pattern in what)]
        if not taken:
            raise ConfigError(f"no parameter (that is not in an earlier group) matches {what}")
        rest = [name for name in rest if name not in set(taken)]
        split.append((taken, {key: value for key, value in group.items() if key not in ("names", "params")}))
    return [*split, (rest, {})] if rest else split


def match_groups(
    saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]
) -> tuple[list[Mapping[str, Any]], dict[Any, str]]:
    """Return the saved groups in the order of ``own``, and the parameter name of each of their keys.

    Raises: ConfigError if the number of groups differs, or the parameters of one.
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


__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(Optimizer):
    """Run ``optimizer_class`` over sharded parameters: DTensors, ShardedTensors, plain tensors, or a mix.

    Element-wise optimizers run on local tensors, with one update for all shards that are contiguous in flat memory
    (those of ``fully_shard`` are).  Optimizers that need whole matrices (Muon, Adafactor) get them: each matrix is
    gathered to one owner rank, updated there and scattered back.  Optimizers that cannot be right on shards are
    refused.

    Args:
        named_params: parameters by name, as ``dict(model.named_parameters())``; pairs are accepted too, and torch's
            groups, ``[{"params": [...], "lr": ...}]``, of parameters or of pairs.
        optimizer_class: a class of ``torch.optim``, or any other.
        optimizer_args, optimizer_kwargs: its arguments after the parameters.
        groups: options per name pattern, ``[{"names": ["*.bias", "norm*"], "weight_decay": 0.0}]``.  A parameter
            belongs to the first group that it matches; the others form a last group with the defaults.  A group may have
            ``"params"`` instead of names.
        update: ``"elementwise"`` or ``"whole_matrix"`` for an unknown class (or set the class attribute
            ``sharded_update``); see :func:`shardwise.optim.slices.update_rule`.
        flat: False to update every shard separately.
        offload: a :class:`shardwise.OptimizerOffload`: where the state lives, and whether updates run while backward runs.

    Attributes:
        named_params: the live parameters by name.
        param_groups: as in any optimizer; ``"params"`` are the parameters themselves, ``"param_names"`` their names.
        state: a read-only mapping from parameters to their state, as it is now.  Tensors with a number per element are
            the live ones; a step count may be a copy, and what is written to it until the next step counts there.

    Raises: ConfigError for wrong arguments and for optimizers that cannot be right on shards.

    Source: the constructor of ``ShardedOptimizer`` of torch's ``sharded_optim``; code that calls it can use
    this class.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = ShardedOptimizer(
        ...     dict(model.named_parameters()),
        ...     torch.optim.AdamW,
        ...     lr=0.1,
        ...     groups=[{"names": "*bias", "weight_decay": 0.0}],
        ... )
        >>> [group["param_names"] for group in optimizer.param_groups]
        [['bias'], ['weight']]
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state_dict()["state"]["weight"])
        ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        named_params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[Mapping[str, Any]],
        optimizer_class: type[Optimizer],
        *optimizer_args: Any,
        groups: Sequence[Mapping[str, Any]] = (),
        update: UpdateRule | None = None,
        flat: bool = True,
        offload: Offload | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        note("init", "ShardedOptimizer")
        params, groups = unpacked_groups(named_params, groups)
        self.named_params: dict[str, torch.Tensor] = checked_params(params)
        self._slices: dict[str, list[ParamSlice]] = {n: slices_of(n, p) for n, p in self.named_params.items()}
        split = split_by_group(self.named_params, groups)

        def make(param_groups: list[dict[str, Any]]) -> Optimizer:
            return optimizer_class(param_groups, *optimizer_args, **optimizer_kwargs)

        wanted = [([self._slices[name] for name in names], options) for names, options in split]
        backend = make_backend(make, optimizer_class, wanted, update, flat)
        if offload is not None:
            check_kind("ShardedOptimizer: offload", offload, Offload, "OptimizerOffload(), or None")
            backend = offload.over(backend, wanted, lambda: self.param_groups)
        self._backend: OptimizerBackend = backend
        inner = backend.optimizer
        outer = [
            {**options_of(group), "params": [self.named_params[name] for name in names]}
            for group, (names, _) in zip(inner.param_groups, split, strict=True)
        ]
        self._is_built = False
        super().__init__(outer, inner.defaults)
        self.param_groups = [OwnGroup(g, names) for g, (names, _) in zip(self.param_groups, split, strict=True)]
        self._members = Members(self.param_groups)
        self._is_built = True
        is_compared = has_only_plain(self.named_params.values())
        self._comparison = compare_gradients(self.named_params) if is_compared else None

    # ---- stepping ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters from their gradients; return what ``closure`` returned.

        Raises: StateError on every rank if a whole-matrix optimizer fails on an owner.
        """
        self._members.check(self.param_groups)
        backend = self._backend
        with torch.no_grad():
            loss = step_in_sync(backend.step, closure, self.param_groups, backend.optimizer.param_groups)
            if self._comparison is not None:
                with suppress(TransportError):  # the process that keeps the store may have ended
                    next(self._comparison, None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters and local shards to None, or to zero."""
        for slices in self._slices.values():
            clear_gradient(slices, set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``; return the norm before scaling.

        Like :func:`shardwise.clip_grad_norm_`, and also over ShardedTensors.  Collective.
        """
        refuse_fixed_sums([*self.named_params.values()])
        limit = Limit(max_norm, norm_type, error_if_nonfinite)
        parts: list[Part] = []
        for name, param in self.named_params.items():
            if is_sharded_tensor(param):
                group = torch_private.process_group_of(param)
                gradients = [
                    gradient_of(param_slice) for param_slice in self._slices[name] if param_slice.stand_in is None
                ]
                parts += [Part(g.detach(), group, group.size()) for g in gradients if g is not None] or [
                    Part(local_of(self._slices[name][0]).detach()[:0], group, group.size())
                ]
            elif param.grad is not None:
                parts.append(part_of(param.grad))
        return clip_parts(parts, limit)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: ``{"params": {name: tensor, ...}, "lr": ...}``, or pairs of name and tensor.

        Collective for whole-matrix optimizers.  Raises: ConfigError for parameters without names or with names in use.
        """
        if not self._is_built:
            super().add_param_group(param_group)
            return
        self._members.check(self.param_groups)
        found = checked_params(param_group["params"])
        known = sorted(set(found) & set(self.named_params))
        tensors = {id(param): name for name, param in self.named_params.items()}
        again = sorted(name for name, param in found.items() if id(param) in tensors)
        if known or again:
            raise ConfigError(f"parameters {known or again} are in the optimizer already; leave them out of the group")
        if computed := sorted(name for name, param in found.items() if not param.is_leaf):
            raise ConfigError(f"{computed} are results of operations; give the parameters that they were made from")
        slices = {name: slices_of(name, param) for name, param in found.items()}
        sharded = [name for name, of in slices.items() if _is_sharded_kind(of)]
        if sharded and not self._backend.is_elementwise and not any(map(_is_sharded_kind, self._slices.values())):
            raise ConfigError(
                f"{type(self._backend.optimizer).__name__} was set up for plain tensors and {sharded} are sharded; put them "
                "into a ShardedOptimizer of their own"
            )
        self._backend.add_group(list(slices.values()), options_of(param_group))
        super().add_param_group(
            {**options_of(self._backend.optimizer.param_groups[-1]), "params": list(found.values())}
        )
        self.param_groups[-1] = OwnGroup(self.param_groups[-1], list(found))
        self._members = Members(self.param_groups)
        self.named_params.update(found)
        self._slices.update(slices)

    # ---- state ----

    @property
    def state(self) -> Any:
        """A read-only mapping from parameters to their state of now; see the class."""
        return HeldState(self._state_by_param())

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._is_built:  # torch's constructor assigns it too
            refuse_other_state()

    def state_dict(self, form: StateForm = "named") -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], ...}]}``.

        Values per element are DTensors or ShardedTensors like their parameters, on the live memory, so that
        ``torch.distributed.checkpoint`` saves and reshards them.  Collective for whole-matrix optimizers, whose owners
        send copies of their state.

        ``form``: "indexed" names parameters as a plain optimizer's state dict does.
        """
        call_hooks(self, "state_dict_pre")
        result = call_hooks(self, "state_dict_post", self._named_dict(self._backend.states()))
        return result if form == "named" else in_form(form, result["state"], result["param_groups"])

    def blank_state_dict(self, form: StateForm = "named") -> dict[str, Any]:
        """Return a state dict with all entries that a step would create, for a checkpoint to be read into.

        The values are meaningless until they are read; parameters and state of this optimizer do not change.  ``form``:
        that of the checkpoint, see :meth:`state_dict`.

        Example:
            >>> found = optimizer.blank_state_dict()  # doctest: +SKIP
            >>> torch.distributed.checkpoint.load({"optimizer": found}, checkpoint_id=path)  # doctest: +SKIP
            >>> optimizer.load_state_dict(found)  # doctest: +SKIP
        """
        with self._synced_options():
            found = self._named_dict(self._backend.states(blank=True))
        return found if form == "named" else in_form(form, found["state"], found["param_groups"])

    def full_state_dict(self, by_index: bool = False, cpu_offload: bool = False) -> dict[str, Any]:
        """Return the state dict of the plain optimizer: full tensors, as copies, on every rank.  Collective.

        A plain optimizer over the same groups can load it.  ``by_index``: keys are indices as in ``torch.optim``'s own;
        ``cpu_offload``: each tensor moves to the CPU as soon as it is complete.
        """
        found = self.state_dict()
        state = {
            name: {key: full_value(value, cpu_offload) for key, value in values.items()}
            for name, values in found["state"].items()
        }
        return in_form("indexed" if by_index else "named", state, found["param_groups"])

    def load_state_dict(self, state_dict: Mapping[str, Any], *, adopt: bool = False) -> None:
        """Load what :meth:`state_dict`, :meth:`full_state_dict` or a plain optimizer returned; copy the tensors.

        ``adopt``: tensors placed like their parameters become the state itself; nothing else may use them.
        Whole-matrix optimizers adopt full tensors, for :func:`state_places`; entries of other parameters are
        empty, and the call is not collective.

        Values may be DTensors or ShardedTensors of any layout, or full tensors.  Keys may be names, or indices in the
        order of ``param_groups`` (of their ``param_names`` if the loaded groups have them).
        Options come from the dict. Collective where layouts differ, and for whole-matrix optimizers.

        Raises: ConfigError if groups or names differ, LayoutError if a value does not fit its parameter.
        """
        loaded = call_hooks(self, "load_state_dict_pre", dict(state_dict))
        own = self._names_by_group()
        groups, names = match_groups(loaded["param_groups"], own)
        by_name: dict[str, Mapping[str, Any]] = {}
        for saved_key, values in loaded["state"].items():
            name = names.get(saved_key)
            if name is None:
                raise ConfigError(f"state of {saved_key!r} belongs to no parameter of the loaded param_groups")
            by_name[name] = values
        options = [options_of(group) for group in groups]
        self._check_class(by_name, options)
        self._backend.load(by_name, options, adopt)
        copy_options(options, self.param_groups)
        copy_options(self._backend.optimizer.param_groups, self.param_groups)
        call_hooks(self, "load_state_dict_post")

    def _check_class(self, states: Mapping[str, Mapping[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        for names, own, saved in zip(self._names_by_group(), self.param_groups, options, strict=True):
            found = [(self.named_params[name].dim(), states.get(name, {})) for name in names]
            reason = why_other_class(self._backend.optimizer, options_of(own), saved, found)
            if reason is not None:
                raise ConfigError(f"the loaded state of {names[0]}: {reason}")

    # ---- other attributes of the inner optimizer ----

    def __getattr__(self, name: str) -> Any:
        """Return attribute ``name`` of the inner optimizer; a method is wrapped so that the parameters get what it writes.

        Raises: AttributeError if there is none; ConfigError for a method of a whole-matrix optimizer over shards, which
        has full
            parameters only during a step.
        """
        backend: OptimizerBackend | None = self.__dict__.get("_backend")
        if backend is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found: Any = getattr(backend.optimizer, name)
        if not inspect.ismethod(found):
            return found
        if not isinstance(backend, ElementwiseStep):
            raise ConfigError(
                f"{type(backend.optimizer).__name__}.{name}() needs full parameters, which a whole-matrix optimizer has "
                "only during a step, or all parameters at once, which one with offload= never has; pass update='elementwise' "
                "if it updates every element separately, and leave offload= out"
            )

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            before_optimizer_step(self)
            try:
                with self._synced_options():
                    return found(*args, **kwargs)
            finally:
                after_optimizer_step(self)

        return method

    # ---- inside ----

    def _synced_options(self) -> AbstractContextManager[None]:
        self._members.check(self.param_groups)
        return synced_options(self.param_groups, self._backend.optimizer.param_groups)

    def _names_by_group(self) -> list[list[str]]:
        self._members.check(self.param_groups)
        names = {id(param): name for name, param in self.named_params.items()}
        return [[names[id(param)] for param in group["params"]] for group in self.param_groups]

    def _names(self) -> list[str]:
        return [name for names in self._names_by_group() for name in names]

    def _named_dict(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        names = self._names()
        entries = {
            name: {key: wrap(self._slices[name], value) for key, value in states[name].items()}
            for name in names
            if name in states
        }
        groups = [
            NamedGroup(names, {**options_of(group), "params": own})
            for group, own in zip(self.param_groups, self._names_by_group(), strict=True)
        ]
        return {"state": ByName(names, entries), "param_groups": groups}

    def _state_by_param(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        return {
            self.named_params[name]: HeldState({key: wrap(self._slices[name], value) for key, value in entry.items()})
            for name, entry in self._backend.local_states().items()
        }


def optimizer_backend(optimizer: ShardedOptimizer) -> OptimizerBackend:
    """Return the backend that runs the inner optimizer."""
    return optimizer._backend  # pyright: ignore[reportPrivateUsage]


def state_places(optimizer: ShardedOptimizer) -> dict[int, torch.Tensor]:
    """Return, by number, the parameters of which this rank has state; of whole matrices, full tensors in their place."""
    backend, params = optimizer_backend(optimizer), optimizer.named_params
    held = backend.leaves if isinstance(backend, WholeMatrixStep) else params
    names = optimizer._names()  # pyright: ignore[reportPrivateUsage]
    return {number: held[name] for number, name in enumerate(names) if name in held}


def empty_state_of(
    optimizer: ShardedOptimizer, dtypes: Mapping[int, Mapping[str, torch.dtype]]
) -> dict[int, dict[str, list[torch.Tensor]]]:
    """Return new memory for state with a number per element, by parameter and key: one tensor per local slice.

    It is laid out as such state will be in ``optimizer``, so that ``load_state_dict`` with ``adopt`` copies nothing.
    ``dtypes``: by number of the parameter, and key.  The tensors are on the devices of the slices.
    """
    if isinstance(optimizer_backend(optimizer), WholeMatrixStep):
        return {}
    names = optimizer._names()  # pyright: ignore[reportPrivateUsage]
    slices = {number: optimizer._slices[names[number]] for number in dtypes}  # pyright: ignore[reportPrivateUsage]
    of_slices = {param_slice: dtypes[number] for number, of in slices.items() for param_slice in of}
    targets = empty_states(of_slices)
    return {
        number: {key: [targets[param_slice][key] for param_slice in of] for key in dtypes[number]}
        for number, of in slices.items()
    }
