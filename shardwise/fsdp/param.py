"""A sharded parameter: its sharded and its full form, and the places where modules register it."""

from __future__ import annotations

import logging
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import torch_private
from shardwise.consistency.store import Sketch, digest_of, sample_of
from shardwise.errors import ConfigError, StateError
from shardwise.fsdp.precision import GradDtype, MixedPrecisionPolicy, dtype_of_full
from shardwise.layout import ChunkShard
from shardwise.torch_private import DTensorSpec

# ---- Digests of parameters before sharding.  Ranks compare them to check that all of them sharded the same values.

_SAMPLE_NUMEL = 1 << 14


@dataclass(frozen=True, slots=True)
class Beginning:
    """Digests of one parameter when it was sharded; of a large parameter they cover a sample.

    Attributes:
        digest: the digest of the full values.
        sketch: the sketch of the full values.
        shard: the sketch of this rank's shard.
    """

    digest: int
    sketch: Sketch
    shard: Sketch

    @classmethod
    def of(cls, whole: torch.Tensor, shard: torch.Tensor) -> Beginning | None:
        """Return the digests of ``whole``; None if it has no values (meta) or is a tensor subclass."""
        if type(whole) not in (torch.Tensor, nn.Parameter) or whole.is_meta:
            return None
        sample = sample_of(whole.detach(), _SAMPLE_NUMEL)
        return cls(digest_of(sample), Sketch.of(sample), _sketch_of(shard))

    def was_overwritten(self, shard: torch.Tensor) -> bool:
        """Return True if ``shard`` was written to after sharding, so that the initial values no longer matter.

        Conversions to another dtype or device do not count as writes.
        """
        if shard.is_meta:
            return True
        now = _sketch_of(shard)
        return not self.shard.distance(now) <= max(self.shard.tolerance, now.tolerance)


def _sketch_of(shard: torch.Tensor) -> Sketch:
    return Sketch.of(sample_of(shard.detach(), _SAMPLE_NUMEL))


# ---- The version of a shard: a count of writes to it that continues when user code gives it other memory.


def _nothing() -> None:
    return None


class VersionCount:
    """The version of one shard.

    Torch's version counters restart with every local tensor that user code puts in place; this count continues.

    Attributes:
        base: the offset that is added to torch's counters.
        last: the version at the last check.
        gathered: the version from which the full parameter was last gathered; conversions since then are included.
        local: weak reference to the local tensor whose counter is read, if the shard is a DTensor.
        has_kept_values: user code has replaced ``local`` by a tensor of the same values, on all ranks.
    """

    __slots__ = ("base", "gathered", "has_kept_values", "last", "local")

    def __init__(self) -> None:
        self.base = 0
        self.last = 0
        self.gathered = -1
        self.has_kept_values = False
        self.local: Callable[[], torch.Tensor | None] = _nothing

    def of(self, sharded: torch.Tensor, local: torch.Tensor) -> int:
        """Return the version of ``sharded``, whose local tensor is ``local``."""
        return sharded._version + local._version + self.base

    def keep(self, version: int, sharded: torch.Tensor, local: torch.Tensor) -> None:
        """Set the version of ``sharded`` to ``version``; its new local tensor is ``local``, of the same values."""
        self.base += version - self.of(sharded, local)
        if local is not sharded:
            self.local = weakref.ref(local)

    def continue_with(self, sharded: torch.Tensor, local: torch.Tensor) -> None:
        """Continue counting after user code has put ``local`` in the place of another local tensor.

        The version increases, whatever was written to either tensor.  If the values are the same, the full parameter counts
        no write: on one process, conversions do not change the tensors that a graph has saved.
        """
        if local is sharded:
            return  # a plain parameter keeps its own counter
        before, is_same, self.has_kept_values = self.last, self.has_kept_values, False
        self.keep(before + 1, sharded, local)
        if self.gathered == before and is_same and not (sharded._version or local._version):
            self.gathered += 1


@dataclass(frozen=True, slots=True)
class Registration:
    """A place where a parameter is registered: a module's dict of parameters and a name.

    Attributes:
        parameters: ``_parameters`` of the module; the dict does not keep the module alive.
        name: the parameter's name in the module.
        setattr_module: weak reference to the module if its class overrides ``__setattr__`` (as LSTM does, which stores its
            flat weights there); else None.
    """

    parameters: dict[str, nn.Parameter | None]
    name: str
    setattr_module: Callable[[], nn.Module | None] | None = None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Registration:
        """Return the registration of parameter ``name`` of ``module``."""
        follows = type(module).__setattr__ is not nn.Module.__setattr__
        return cls(torch_private.parameters_of(module), name, weakref.ref(module) if follows else None)

    def put(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` here.  The hot path inlines this and calls :meth:`call_setattr` only where needed."""
        self.parameters[self.name] = parameter
        if self.setattr_module is not None:
            self.call_setattr(parameter)

    def call_setattr(self, parameter: nn.Parameter) -> None:
        """Call the module's own ``__setattr__`` with ``parameter``, which is registered here now."""
        module = self.setattr_module() if self.setattr_module is not None else None
        if module is not None:
            setattr(module, self.name, parameter)


_logger = logging.getLogger("shardwise")


def _have_same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    mine, other = torch_private.local_of(first).detach(), torch_private.local_of(second).detach()
    return mine.is_meta or other.is_meta or (mine.dtype is other.dtype and torch.equal(mine, other))


@dataclass(eq=False)
class ShardedParam:
    """A parameter that a unit manages, in its three forms: sharded, full, and sharded on a smaller mesh.

    Attributes:
        fqn: its path; until the first forward from the module that was sharded, then from the root.
        registrations: the places that use it; a tied parameter has several.
        shard: the layout of the local tensor over the shard axis.
        spec: the DTensorSpec of the sharded parameter and its gradients.
        inner_spec: the DTensorSpec of the full parameter if that is a DTensor (tensor parallelism), else None.
        sharded: the parameter that is registered while sharded, and that optimizers have.
        full: the parameter that is registered while unsharded.  It is made at the first unshard and stays the same object,
            since autograd's saved tensors and accumulators refer to it.
        subsharded: the parameter that is registered while resharded to a smaller mesh.
        registered_form: the form that shardwise has registered; None: the sharded one.  Any other registered parameter comes
            from user code.
        shard_shape: the shape of this rank's shard.
        is_handed_out: user code can reach the shard; until then its memory may be replaced.
        full_version, full_address: version counter and address of the full parameter when it was registered.
        count: the version of the shard.
        ordinal: its index among the parameters of its unit.
        is_hooked: the full parameter has the hook that reports its gradient; ``hook_id`` identifies the hook.
        keeps_dtype: it is used in its own dtype, whatever the mixed precision of its unit.
        grad_dtype: the value that was assigned to ``grad_dtype`` of the sharded or the original parameter; None: none was.
        module: weak reference to the module of the first registration.
        original: weak reference to the parameter that it was made from, which user code may still reference.
        is_touched: a write to the full parameter that torch does not count was found and not copied to the shard yet.
        is_touchy: such a write was found at some time, so every forward looks for one.
        attributes: the attributes that users have set on it, one dict for all forms; a parameter that conversions or loading
            register lacks them.
        beginning: digests of its values before sharding, until ranks have compared them; None: there is nothing to compare.
        made_of: the identity of the sharded parameter's storage, and its shard, when both were made.
    """

    fqn: str
    registrations: list[Registration]
    shard: ChunkShard
    spec: DTensorSpec
    inner_spec: DTensorSpec | None
    sharded: nn.Parameter
    shard_shape: tuple[int, ...]
    is_handed_out: bool = True
    full: nn.Parameter | None = None
    subsharded: nn.Parameter | None = None
    registered_form: nn.Parameter | None = None
    full_version: int = 0
    full_address: int = 0
    count: VersionCount = field(default_factory=VersionCount)
    ordinal: int = 0
    is_hooked: bool = False
    hook_id: int = -1
    keeps_dtype: bool = False
    grad_dtype: GradDtype | None = None
    module: Callable[[], nn.Module | None] = field(default=_nothing)
    original: Callable[[], nn.Parameter | None] = field(default=_nothing)
    beginning: Beginning | None = None
    made_of: tuple[int, Callable[[], torch.Tensor | None]] = (0, _nothing)
    is_touched: bool = False
    is_touchy: bool = False
    attributes: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = torch_private.attributes_of(self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's own dtype."""
        return torch_private.local_of(self.sharded).dtype

    @property
    def dtype_of_gradient(self) -> torch.dtype | None:
        """The dtype of ``.grad``; None: any dtype that backward produces."""
        return torch_private.local_of(self.sharded).dtype if self.grad_dtype is None else self.grad_dtype.dtype

    def dtype_of_full(self, precision: MixedPrecisionPolicy) -> torch.dtype:
        """Return the dtype in which the parameter is all-gathered and used."""
        return self.dtype if self.keeps_dtype else dtype_of_full(precision, self.dtype)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return torch_private.local_of(self.sharded)

    def lies_as_sharded(self, full: nn.Parameter) -> bool:
        """Return True if ``full`` has the address and strides of this rank's shard, which user code may have moved."""
        local = self.local
        return full.data_ptr() == local.data_ptr() and torch_private.local_of(full).stride() == local.stride()

    @property
    def is_strided(self) -> bool:
        """True for a plain parameter whose memory is not row-major; its gradient gets the same strides."""
        return self.full is self.sharded and not self.sharded.is_contiguous()

    @property
    def is_its_full_form(self) -> bool:
        """True if the full parameter shares the memory of the shard."""
        return self.full is not None and self.full_address == self.local.data_ptr()

    @property
    def version(self) -> int:
        """A number that changes with every write to the shard that torch counts."""
        return self.sharded._version + self.local._version + self.count.base

    def replace_local(self, local: torch.Tensor) -> None:
        """Make ``local``, of the same values, the local tensor of the shard; the version stays."""
        before = self.version
        torch_private.set_local(self.sharded, local)
        self.count.keep(before, self.sharded, self.local)

    def register(self, parameter: nn.Parameter) -> None:
        """Register ``parameter``, one of the forms, at every place."""
        self.registered_form = parameter
        for registration in self.registrations:
            registration.put(parameter)

    @property
    def is_registered(self) -> bool:
        """True if one of this parameter's own forms is registered at its first place."""
        return self.is_own(self.registrations[0].parameters.get(self.registrations[0].name))

    def is_own(self, current: nn.Parameter | None) -> bool:
        """Return True if ``current`` is one of this parameter's forms, not a parameter from user code."""
        return current is not None and any(
            current is form for form in (self.sharded, self.full, self.subsharded, self.registered_form)
        )

    def check_places(self, is_in_tree: Callable[[dict[str, nn.Parameter | None]], bool] = lambda _: True) -> None:
        """Raise StateError if a module has no parameter of this name any more; of modules for whose dict ``is_in_tree``."""
        for registration in self.registrations:
            if registration.parameters.get(registration.name) is None and is_in_tree(registration.parameters):
                raise StateError(
                    f"{self.fqn} was removed from its module or set to None after the module was sharded; "
                    "torch.nn.utils.parametrize, weight_norm and prune remove it. Call them before fully_shard (or replicate), "
                    "which then shards the parameters that they train; remove parameters before it, too"
                )

    def check_ties(self) -> None:
        """Tie a shared parameter again after user code has replaced it at all its places; the first one is registered.

        ``load_state_dict(assign=True)`` and ``to_empty`` from meta put one parameter into each module, usually of the same
        values.

        Raises: StateError if only some of the places have another parameter.
        """
        first, *others = [registration.parameters.get(registration.name) for registration in self.registrations]
        if all(other is first for other in others):
            return
        mine = (self.sharded, self.full, self.subsharded)
        is_old = [any(each is form for form in mine) for each in (first, *others)]
        if any(is_old) and not all(is_old):
            raise StateError(
                f"{self.fqn} is shared by {len(self.registrations)} places, and only some of them were given another parameter "
                "after it was sharded. Register the same one in all of them (module.weight = other.weight), or build the "
                "model with two parameters before it is sharded"
            )
        if first is not None and not any(is_old):
            others = [other for other in others if other is not None and other is not first]
            if not all(_have_same_values(first, other) for other in others):
                _logger.warning(
                    "%s is shared by %d places, which were given parameters of different values after it was sharded: it stays "
                    "shared, with the values of the first. Tie them again yourself (module.weight = other.weight) after "
                    "to_empty() or load_state_dict(assign=True)",
                    self.fqn,
                    len(self.registrations),
                )
            for registration in self.registrations[1:]:
                registration.put(first)

    def adopt_registered(self) -> None:
        """Make the parameter that is registered at the first place the sharded one; user code may have replaced it.

        Raises: ConfigError if it is a tensor but no parameter (``torch.func.functional_call`` registers those), StateError if
        there is none any more.
        """
        current = self.registrations[0].parameters.get(self.registrations[0].name)
        if current is None:
            self.check_places()
        elif current is not self.full and current is not self.subsharded:
            if current is not self.sharded and not isinstance(current, nn.Parameter):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"{self.fqn}: a {type(current).__name__} that is no Parameter is registered in its place, as "
                    "torch.func.functional_call does; a sharded module runs with the parameters that it gathers. Call the "
                    "plain module with functional_call, or copy_ the values into the shards"
                )
            self.sharded = current
            self.hand_on_attributes()
            self.follow_grad_dtype()

    def hand_on_attributes(self) -> None:
        """Give the registered parameters the attributes that users have set on this one."""
        for registration in self.registrations:
            current = registration.parameters.get(registration.name)
            if current is not None and vars(current) is not self.attributes:
                torch_private.give_attributes(self.attributes, current)

    def follow_grad_dtype(self) -> None:
        """Store an assigned ``grad_dtype``, or set the stored one on a parameter that user code has registered."""
        if torch_private.has_chosen_grad_dtype(self.sharded):
            self.grad_dtype = GradDtype(self.sharded.grad_dtype)
        elif self.grad_dtype is not None:
            self.sharded.grad_dtype = self.grad_dtype.dtype


# ---- Classes of full parameters while no forward or backward uses them; ``__class__`` of the parameter is swapped.
# FreedParameter: the memory is back in the pool, and reading it raises an error with the parameter's name instead of
# crashing the process.  KeptParameter: the full parameter stays registered between passes, where user code finds it.  Its
# ``.grad`` is the shard's, writes to it are detected, and a read of stale values raises.

# Keys in ``__dict__``, which all forms of a parameter share and which also has the attributes that users set.
_KEPT, _SUB = "shardwise_kept", "shardwise_sub"
_ATTRIBUTES = ("__get__", "__set__", "__delete__")
# Names of functions that read no values.
_FACTS = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "storage_offset",
        "data_ptr",
        "untyped_storage",
        "__len__",
        "__hash__",
        "type",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "get_device",
        "retain_grad",
        "is_shared",
    ]
)


class FreedParameter(nn.Parameter):
    """The class of a full parameter between reshard and the next unshard.

    Autograd may save such a tensor for backward, which unshards it again first; user code must not use it.
    """

    shardwise_fqn: str
    shardwise_has_memory: bool

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow reads and writes of attributes, and queries of the address if the memory is kept; refuse all else."""
        name = getattr(func, "__name__", "")
        if name in _ATTRIBUTES or (name in _FACTS and isinstance(args[0], cls) and args[0].shardwise_has_memory):
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        names = sorted(
            {tensor.shardwise_fqn for tensor in _idle_in(FreedParameter, (args, list((kwargs or {}).values())))}
        )
        raise StateError(
            f"{names} was resharded: the unsharded memory of a parameter is freed after forward and backward. Read the "
            "parameter from its module inside forward, or call unshard() on the module first"
        )


class _Standing(torch.Tensor):
    """Base of tensors that are registered in the place of a shard: gradient, hooks and ``requires_grad`` are the shard's."""

    __slots__ = ()

    @property
    def kept(self) -> _StandsFor:
        raise NotImplementedError

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradient of the shard."""
        return self.kept.sharded().grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.kept.sharded().grad = value

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.kept.sharded().grad = None

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """``requires_grad`` of the shard."""
        return self.kept.sharded().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.kept.sharded().requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> _Standing:  # pyright: ignore
        """Set ``requires_grad`` of the shard; return this tensor."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:  # pyright: ignore
        """Register ``hook`` on the shard, so that it receives the reduced gradient."""
        return self.kept.sharded().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Register ``hook`` on the shard, so that it runs after the reduced gradient was accumulated."""
        return self.kept.sharded().register_post_accumulate_grad_hook(hook)

    @property
    def is_leaf(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True.  Raises: StateError in the constructor of an optimizer, whose steps would not reach the model."""
        if sys._getframe(1).f_code.co_name == "add_param_group":  # pyright: ignore[reportPrivateUsage]
            raise StateError(
                f"an optimizer was given the {self.kept.form} form of {self.kept.fqn}, which stays registered after a "
                "forward; its steps would not reach the model. Build the optimizer before the first forward, or call "
                "reshard() on the module first"
            )
        return True


class _Idle(_Standing):
    """Base of the classes of a full parameter that stays registered while no forward or backward runs."""

    __slots__ = ()

    @property
    def kept(self) -> _Kept:
        return vars(self)[_KEPT]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse reads of values that are older than the shards; copy writes to the shards."""
        name = getattr(func, "__name__", "")
        if name in _ATTRIBUTES or name in _FACTS:
            with torch_private.without_torch_function():
                result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):  # .T, .real
                _guard(result, args[:1])
            return result
        given = (args, list(kwargs.values())) if kwargs else args
        kept = _idle_in(_Idle, given)
        has_shards = any(not isinstance(each, _Idle) for each in _idle_in(DTensor, given))
        if has_shards and name in ("backward", "grad"):
            raise StateError(
                f"autograd was asked for the gradient of {kept[0].kept.fqn} and of shards, but shards are not in the graph: "
                "forward uses the unsharded parameters, and shards get .grad when gradients are reduced. Call loss.backward() "
                "without inputs; for one gradient per loss, clone .grad and call zero_grad() between the losses"
            )
        if has_shards:
            # In an operation with other shards (an average of weights is updated, for example) use the shard instead.
            for tensor in kept:
                tensor.kept.follow()
            with torch_private.without_torch_function():
                result = func(
                    *_with_shards(args), **{key: _with_shards(value) for key, value in (kwargs or {}).items()}
                )
            if name.endswith("_"):  # torch's multi-tensor functions count no writes to DTensors
                torch.autograd.graph.increment_version([tensor.kept.sharded() for tensor in kept])
            return result
        states = [tensor.kept for tensor in kept]
        for state in states:
            state.check()
        with torch_private.without_torch_function():
            result = func(*args, **(kwargs or {}))
        for state in states:
            state.follow()
        _guard(result, [tensor for tensor in kept if isinstance(tensor, _Idle)])  # a backward has resharded the others
        return result

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tensor's values.  User code may write to them, and torch does not count that, so the access is recorded."""
        self.kept.check()
        self.kept.is_touched = True
        data = torch_private.data_of(self)
        _guard(data, [self])
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.kept.is_touched = True
        torch_private.set_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(torch_private.data_of(self).clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch_private.without_torch_function():
            plain = nn.Parameter(torch_private.data_of(self), self.requires_grad)
        return plain.__reduce_ex__(protocol)


class _Alias(torch.Tensor):
    """An alias of a kept full parameter, made by user code between passes; the alias may outlive the memory."""

    kept: _Kept

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise StateError on a read of memory that was freed; the read would crash the process."""
        aliases = _idle_in(_Alias, (args, list(kwargs.values())) if kwargs else args)
        if getattr(func, "__name__", "") not in _FACTS and func not in _SHAPES:
            for alias in aliases:
                with torch_private.without_torch_function():
                    is_gone = alias.numel() > 0 and not alias.untyped_storage().nbytes()
                if is_gone:
                    raise StateError(
                        f"this tensor shared memory with the full form of {alias.kept.fqn}, which was freed since. Keep "
                        "clone() of it, or an alias of the shard: call reshard() on the module first"
                    )
        with torch_private.without_torch_function():
            result = func(*args, **(kwargs or {}))
        _guard(result, aliases)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


_SHAPES = frozenset({torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__})  # pyright: ignore


def _guard(result: Any, sources: Iterable[Any]) -> None:
    """Make tensors in ``result`` that share memory with one of ``sources`` an :class:`_Alias`."""
    found = result if isinstance(result, (list, tuple)) else (result,)
    for each in found:  # pyright: ignore[reportUnknownVariableType]
        if type(each) is torch.Tensor:  # pyright: ignore[reportUnknownArgumentType]
            for source in sources:
                if torch_private.storage_id(each) == torch_private.storage_id(source):
                    kept = source.kept
                    each.__class__ = _Alias
                    each.kept = kept  # pyright: ignore[reportAttributeAccessIssue]  of _Alias
                    break


class KeptParameter(_Idle, nn.Parameter):  # pyright: ignore
    """The class of a kept full parameter that is a plain tensor."""


class KeptDTensor(_Idle, DTensor):  # pyright: ignore
    """The class of a kept full parameter that is itself a DTensor (tensor parallelism)."""


class SubShard(_Standing, DTensor):  # pyright: ignore
    """The class of a shard on the smaller mesh of ``reshard_after_forward``, registered between forward and backward."""

    @property
    def kept(self) -> _StandsFor:
        return vars(self)[_SUB]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class _StandsFor:
    """The sharded parameter in whose place a tensor is registered; ``form`` is the tensor's form of it, for messages."""

    __slots__ = ("_param", "form", "fqn")

    def __init__(self, param: ShardedParam, form: str) -> None:
        self._param, self.fqn, self.form = weakref.ref(param), param.fqn, form

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        return set, ()  # copies and files get an empty set, which torch.load(weights_only=True) reads

    def sharded(self) -> nn.Parameter:
        """Return the sharded parameter, which optimizers have."""
        param = self._param()
        if param is None:
            raise StateError(f"{self.fqn} belongs to a model that is gone")
        return param.sharded


class _Kept(_StandsFor):
    """The state of a kept parameter: its sharded parameter, its version, and whether user code may have written to it.

    ``take``: copies writes to the full parameter into this rank's shard.
    """

    __slots__ = ("_before", "_take", "_version", "is_touched")

    def __init__(self, param: ShardedParam, take: Callable[[ShardedParam], None]) -> None:
        super().__init__(param, "full")
        self.renew(param, take)

    def renew(self, param: ShardedParam, take: Callable[[ShardedParam], None]) -> None:
        """Start watching ``param``, whose full parameter has the values of the shards now."""
        self._take = take
        self._version = param.version
        self.fqn = param.fqn
        self.is_touched = False
        # A rank with an empty shard has no rows to compare with it, so it needs a copy to detect writes.
        full = param.full
        self._before: torch.Tensor | None = None
        if full is not None and not param.local.numel():
            self._before = torch_private.local_of(full).detach().clone()

    def check(self) -> None:
        """Raise StateError if the shard was written to after the full parameter was gathered."""
        param = self._param()
        if param is not None and param.version != self._version and not param.is_its_full_form:
            raise StateError(
                f"the full form of {self.fqn} is older than its shards, which were written to since. Call reshard() "
                "on its module, then read the shards, or unshard() on every rank"
            )

    def follow(self) -> None:
        """Copy a write to the full parameter into the shard, if there was one."""
        param = self._param()
        if param is not None and param.full is not None and param.full._version != param.full_version:
            self._take(param)

    def is_as_before(self, full: torch.Tensor) -> bool:
        """Return True if nothing was written; only for a rank with an empty shard."""
        return self._before is not None and torch.equal(
            torch_private.data_of(torch_private.local_of(full)), self._before
        )


def _idle_in(kind: type[Any], args: Any) -> list[Any]:
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, kind):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _idle_in(kind, arg)
    return found


def _with_shards(value: Any) -> Any:
    if isinstance(value, _Idle):
        return value.kept.sharded()
    return type(value)(map(_with_shards, value)) if type(value) in (list, tuple) else value


def mark_freed(params: Iterable[ShardedParam], has_memory: bool = False) -> None:
    """Refuse uses of the full parameters of ``params`` until :func:`mark_full`; ``has_memory``: their memory stays."""
    for param in params:
        full = param.full
        if type(full) in _KINDS and (type(full) is not FreedParameter or full.shardwise_has_memory is not has_memory):
            assert full is not None
            full.__class__ = FreedParameter
            full.shardwise_fqn = param.fqn  # pyright: ignore[reportAttributeAccessIssue]  of FreedParameter
            full.shardwise_has_memory = has_memory  # pyright: ignore[reportAttributeAccessIssue]


def mark_kept(param: ShardedParam, take: Callable[[ShardedParam], None]) -> None:
    """Watch the full parameter of ``param`` until it is freed or in use again; ``take``: see :class:`_Kept`."""
    full = param.full
    idle = _IDLE.get(type(full))
    if full is not None and idle is not None:
        kept = vars(full).get(_KEPT)
        if isinstance(kept, _Kept):
            kept.renew(param, take)
        else:
            vars(full)[_KEPT] = _Kept(param, take)
        full.__class__ = idle  # pyright: ignore[reportAttributeAccessIssue]


def mark_sub(param: ShardedParam) -> None:
    """Redirect gradients, hooks and ``requires_grad`` of the sub-sharded form of ``param`` to its shard."""
    sub = param.subsharded
    assert sub is not None
    vars(sub)[_SUB] = _StandsFor(param, "sub-sharded")
    sub.__class__ = SubShard  # pyright: ignore[reportAttributeAccessIssue]


def may_be_written(parameter: nn.Parameter) -> bool:
    """Return True if user code may have written to ``parameter`` through ``.data`` since :func:`mark_kept`."""
    if not isinstance(parameter, _Idle) or not parameter.kept.is_touched:
        return False
    return not parameter.kept.is_as_before(parameter)


def mark_full(params: Iterable[ShardedParam]) -> None:
    """Make the full parameters of ``params`` ordinary parameters again."""
    for param in params:
        used = _USED.get(type(param.full))
        if used is not None:
            param.full.__class__ = used  # pyright: ignore


_IDLE: dict[type[Any], type[_Idle]] = {nn.Parameter: KeptParameter, DTensor: KeptDTensor}
_USED: dict[type[Any], type[torch.Tensor]] = {
    FreedParameter: nn.Parameter,
    KeptParameter: nn.Parameter,
    KeptDTensor: DTensor,
}
_KINDS = (nn.Parameter, FreedParameter, KeptParameter)


# ---- Checks and registration for all parameters of a bucket at once.  ``map`` queries the tensors, since a Python loop takes
# several times as long, and every forward and backward does this for every unit.

_ADDRESS = torch.Tensor.data_ptr
_FACTS_OF_LOCAL, _GRAD_DTYPE = operator.attrgetter("dtype", "device"), operator.attrgetter("grad_dtype")
_DICT, _VERSION = operator.attrgetter("__dict__"), operator.attrgetter("_version")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


@dataclass(slots=True)
class Snapshot:
    """The shards of a bucket at a time when all of them were registered and packed; lists have one entry per shard.

    Attributes:
        shards: the sharded parameters.
        registries: the ``_parameters`` dicts in which they were registered.
        names: their names in these dicts.
        locals: weak references to the local tensors, so that memory is freed when user code replaces it.
        facts: dtype and device of the local tensors.
        addresses: addresses of the local tensors; None if they may move, since the full parameters are the shards.
        grad_dtypes: ``grad_dtype`` of the sharded parameters.
        counted: the version counters when :meth:`is_current` last returned True.
    """

    shards: list[nn.Parameter]
    registries: list[dict[str, nn.Parameter | None]]
    names: list[str]
    locals: list[weakref.ref[torch.Tensor]]
    facts: list[object]
    addresses: list[int] | None
    grad_dtypes: list[torch.dtype | None]
    counted: list[int]

    @classmethod
    def of(cls, params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor], has_place: bool) -> Snapshot | None:
        """Return a snapshot of ``params``, whose local tensors are ``locals_``; None if not all are DTensors."""
        refs = [ref for param in params if isinstance(ref := param.count.local, weakref.ref)]
        if len(refs) < len(params):
            return None
        return cls(
            [param.sharded for param in params],
            [param.registrations[0].parameters for param in params],
            [param.registrations[0].name for param in params],
            refs,
            [*map(_FACTS_OF_LOCAL, locals_)],
            [*map(_ADDRESS, locals_)] if has_place else None,
            [param.sharded.grad_dtype for param in params],
            [],
        )

    def is_current(self, in_step: bool) -> bool:
        """Return True if nothing has changed.

        ``in_step``: the backward begins whose forward has made the full check.  Then dtype, device, ``grad_dtype`` and
        attributes are not checked again.
        """
        locals_ = [*map(torch_private.LOCAL, self.shards)]
        if not (
            all(map(operator.is_, self.shards, map(dict.get, self.registries, self.names)))
            and all(map(operator.is_, locals_, map(weakref.ref.__call__, self.locals)))
            and (self.addresses is None or [*map(_ADDRESS, locals_)] == self.addresses)
        ):
            return False
        if not (
            in_step
            or (
                [*map(_FACTS_OF_LOCAL, locals_)] == self.facts
                and [*map(_GRAD_DTYPE, self.shards)] == self.grad_dtypes
                and not any(map(_DICT, locals_))
            )
        ):
            return False
        self.counted = [*map(operator.add, map(_VERSION, self.shards), map(_VERSION, locals_))]
        return True


class Swap:
    """Registers the full parameters of a bucket, and the sharded ones again, by ``dict.update`` without a Python loop.

    It is made after the parameters were registered one by one, if registration is all that remains to be done in later
    steps: each parameter has one place, a full parameter whose gradient is hooked, and no dtype of its own.

    Attributes:
        fulls, shards: the full and the sharded parameters, in the bucket's order.
        num_trainable: how many of them are trainable.
    """

    def __init__(self, params: Sequence[ShardedParam], fulls: list[nn.Parameter], wants: list[bool]) -> None:
        self.fulls, self._wants, self.num_trainable = fulls, wants, sum(wants)
        self.shards = [param.sharded for param in params]
        self._registries = [param.registrations[0].parameters for param in params]
        self._names = [param.registrations[0].name for param in params]
        self._fulls_of: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter]]] = []
        self._shards_of: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter]]] = []
        self._has_memory: bool | None = None  # ``shardwise_has_memory`` of the freed parameters; None: not marked yet
        by_registry: dict[int, tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]] = {}
        for registry, name, full, sharded in zip(self._registries, self._names, fulls, self.shards, strict=True):
            if id(registry) not in by_registry:
                by_registry[id(registry)] = {}, {}
                self._fulls_of.append((registry, by_registry[id(registry)][0]))
                self._shards_of.append((registry, by_registry[id(registry)][1]))
            by_registry[id(registry)][0][name], by_registry[id(registry)][1][name] = full, sharded

    @staticmethod
    def suits(params: Sequence[ShardedParam], fulls: Sequence[nn.Parameter]) -> bool:
        """Return True if a swap can register ``params`` and their full parameters ``fulls``."""
        return all(
            len(param.registrations) == 1
            and param.registrations[0].setattr_module is None
            and param.grad_dtype is None
            and not param.keeps_dtype
            and type(full) is nn.Parameter
            and (param.is_hooked or not param.sharded.requires_grad)
            for param, full in zip(params, fulls, strict=True)
        )

    def register_full(self) -> bool:
        """Register the full parameters; return False, with nothing registered, if user code has changed something."""
        shards, wants, fulls = self.shards, self._wants, self.fulls
        if not all(map(operator.is_, shards, map(dict.get, self._registries, self._names))):
            return False
        if [*map(_REQUIRES_GRAD, shards)] != wants:
            return False
        for full in fulls:
            full.__class__ = nn.Parameter
        if [*map(_REQUIRES_GRAD, fulls)] != wants:
            return False
        for registry, forms in self._fulls_of:
            registry.update(forms)
        return True

    def register_sharded(self) -> bool:
        """Register the sharded parameters; return False, with nothing done, if the full ones are not what is registered."""
        if not all(map(operator.is_, self.fulls, map(dict.get, self._registries, self._names))):
            return False
        for registry, forms in self._shards_of:
            registry.update(forms)
        return True

    def mark_freed(self, params: Iterable[ShardedParam], has_memory: bool) -> None:
        """Do the same as :func:`~shardwise.fsdp.param.mark_freed`, with less work if ``has_memory`` is as before."""
        if self._has_memory is not has_memory:
            mark_freed(params, has_memory)
            self._has_memory = has_memory
            return
        for full in self.fulls:
            full.__class__ = FreedParameter
