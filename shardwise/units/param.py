"""One parameter of a unit: its sharded and its full form, and where it hangs on its modules."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise import torch_private
from shardwise.errors import ConfigError, StateError
from shardwise.layout.shard import ChunkShard
from shardwise.torch_private import DTensorSpec
from shardwise.units.beginning import Beginning
from shardwise.units.precision import GradDtype, MixedPrecisionPolicy, dtype_of_full
from shardwise.units.version_count import VersionCount


@dataclass(frozen=True, slots=True)
class Slot:
    """A place where a parameter hangs: a module's dict of parameters (which does not keep the module alive) and a name.

    Attributes:
        follower: the module, if its class has a ``__setattr__`` of its own to follow its parameters (as LSTMs do).
    """

    parameters: dict[str, nn.Parameter | None]
    name: str
    follower: Callable[[], nn.Module | None] | None = None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Slot:
        """Return the slot of parameter ``name`` of ``module``."""
        follows = type(module).__setattr__ is not nn.Module.__setattr__
        return cls(torch_private.parameters_of(module), name, weakref.ref(module) if follows else None)

    def put(self, parameter: nn.Parameter) -> None:
        """Hang ``parameter`` here.  What runs at every step does so itself and calls :meth:`tell`: calls cost."""
        self.parameters[self.name] = parameter
        if self.follower is not None:
            self.tell(parameter)

    def tell(self, parameter: nn.Parameter) -> None:
        """Let a module that follows its parameters know that ``parameter`` hangs here now."""
        module = self.follower() if self.follower is not None else None
        if module is not None:
            setattr(module, self.name, parameter)


_logger = logging.getLogger("shardwise")


def _have_same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    mine, other = torch_private.local_of(first).detach(), torch_private.local_of(second).detach()
    return mine.is_meta or other.is_meta or (mine.dtype is other.dtype and torch.equal(mine, other))


def _nothing() -> None:
    return None


@dataclass(eq=False)
class UnitParam:
    """A parameter that a unit manages.

    Attributes:
        fqn: its path; from the module it was found in until the first forward, from the root after.
        slots: every place that uses it; tied weights have several.
        shard: how the local tensor is cut over the shard axis.
        spec: the DTensor description of the sharded parameter and its gradients.
        inner_spec: that of the full parameter if it is itself a DTensor (tensor parallelism), else None.
        sharded: the registered parameter while sharded; what optimizers hold.
        full: the registered parameter while unsharded; made at the first unshard and then kept, because autograd's
            saved tensors and accumulators belong to it.
        subsharded: the registered parameter while resharded to a smaller mesh.
        hung: which of these forms hangs in the slots; None: the sharded one.  What is there besides, user code has put there.
        shard_shape: of this rank's shard.
        is_handed_out: user code can reach the shard; before, while it is being made, its memory may change at will.
        full_version, full_address: what torch had counted of writes to the full form, and where it lay, when it was registered.
        count: of the writes to the shard.
        ordinal: its index among the parameters of its unit.
        is_hooked: the full parameter reports its gradients.  hook_id: of the hook that does so.
        keeps_dtype: it is used in its own dtype whatever the precision of its unit.
        grad_dtype: what was assigned to ``grad_dtype`` of the sharded parameter, or of the one it was made from; None: nothing.
        module: weak reference to the module of the first slot.
        original: weak reference to the parameter it was made from, while someone holds that.
        is_touched: the full form has been written to in a way that torch does not count.  is_touchy: that has happened before.
        attributes: what users have set on it, one dict for all its forms; conversions and loading register one without.
        beginning: digests of its values before sharding, until ranks have compared them; None: there is nothing to compare.
        made_of: what told the storage of the sharded parameter apart, and its shard, when both were made.
    """

    fqn: str
    slots: list[Slot]
    shard: ChunkShard
    spec: DTensorSpec
    inner_spec: DTensorSpec | None
    sharded: nn.Parameter
    shard_shape: tuple[int, ...]
    is_handed_out: bool = True
    full: nn.Parameter | None = None
    subsharded: nn.Parameter | None = None
    hung: nn.Parameter | None = None
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
        """The dtype of ``.grad``; None: that of whatever arrives."""
        return torch_private.local_of(self.sharded).dtype if self.grad_dtype is None else self.grad_dtype.dtype

    def dtype_of_full(self, precision: MixedPrecisionPolicy) -> torch.dtype:
        """Return the dtype in which it is all-gathered and used."""
        return self.dtype if self.keeps_dtype else dtype_of_full(precision, self.dtype)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return torch_private.local_of(self.sharded)

    def lies_as_sharded(self, full: nn.Parameter) -> bool:
        """Return True if ``full`` is where this rank's shard is, element by element: user code may have moved that."""
        local = self.local
        return full.data_ptr() == local.data_ptr() and torch_private.local_of(full).stride() == local.stride()

    @property
    def is_strided(self) -> bool:
        """True for a plain parameter in another memory order than row-major: its gradient follows it."""
        return self.full is self.sharded and not self.sharded.is_contiguous()

    @property
    def is_its_full_form(self) -> bool:
        """True if the full form lies in the memory of the shard."""
        return self.full is not None and self.full_address == self.local.data_ptr()

    @property
    def version(self) -> int:
        """A number that changes whenever the shard is written to, as far as torch counts writes; asked at every step."""
        return self.sharded._version + self.local._version + self.count.base

    def replace_local(self, local: torch.Tensor) -> None:
        """Make ``local``, of the same values, the memory of the shard; that is no write."""
        before = self.version
        torch_private.set_local(self.sharded, local)
        self.count.keep(before, self.sharded, self.local)

    def register(self, parameter: nn.Parameter) -> None:
        """Hang ``parameter``, one of its forms, in every slot."""
        self.hung = parameter
        for slot in self.slots:
            slot.put(parameter)

    @property
    def is_registered(self) -> bool:
        """True if one of this parameter's own forms hangs in its first slot."""
        return self.is_own(self.slots[0].parameters.get(self.slots[0].name))

    def is_own(self, current: nn.Parameter | None) -> bool:
        """True if ``current`` is one of this parameter's forms, not what user code has put in its place."""
        return current is not None and any(
            current is form for form in (self.sharded, self.full, self.subsharded, self.hung)
        )

    def check_places(self, is_in_tree: Callable[[dict[str, nn.Parameter | None]], bool] = lambda _: True) -> None:
        """Raise StateError if a module, of those whose dict ``is_in_tree``, has no parameter of this name any more."""
        for slot in self.slots:
            if slot.parameters.get(slot.name) is None and is_in_tree(slot.parameters):
                raise StateError(
                    f"{self.fqn} was taken off its module after that was sharded, as torch.nn.utils.parametrize, weight_norm "
                    "and prune do, or set to None. Call them before fully_shard (or replicate), which then shards what they "
                    "train; take parameters off before it, too"
                )

    def check_ties(self) -> None:
        """Hang what user code has put in place of a shared parameter in all its slots.

        Loading with ``assign=True`` and ``to_empty`` from meta leave one parameter per module, of one value as a rule.

        Raises: StateError if some of the modules have got another parameter and others have not.
        """
        first, *others = [slot.parameters.get(slot.name) for slot in self.slots]
        if all(other is first for other in others):
            return
        mine = (self.sharded, self.full, self.subsharded)
        is_old = [any(each is form for form in mine) for each in (first, *others)]
        if any(is_old) and not all(is_old):
            raise StateError(
                f"{self.fqn} is shared by {len(self.slots)} places, of which only some have got another parameter since it "
                "was sharded. Put the same one in all of them (module.weight = other.weight), or build the model with two "
                "parameters before it is sharded"
            )
        if first is not None and not any(is_old):
            others = [other for other in others if other is not None and other is not first]
            if not all(_have_same_values(first, other) for other in others):
                _logger.warning(
                    "%s is shared by %d places, which have got parameters of different values since it was sharded: it stays "
                    "shared, with the values of the first. Tie them again yourself (module.weight = other.weight) after "
                    "to_empty() or load_state_dict(assign=True)",
                    self.fqn,
                    len(self.slots),
                )
            for slot in self.slots[1:]:
                slot.put(first)

    def adopt_registered(self) -> None:
        """Take the parameter that hangs in the first slot as the sharded one: user code may have replaced it.

        Raises: ConfigError if it is no parameter but a tensor, as ``torch.func.functional_call`` puts one there, StateError
        if there is none any more.
        """
        current = self.slots[0].parameters.get(self.slots[0].name)
        if current is None:
            self.check_places()
        elif current is not self.full and current is not self.subsharded:
            if current is not self.sharded and not isinstance(current, nn.Parameter):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"{self.fqn}: a {type(current).__name__} that is no Parameter has taken its place, as "
                    "torch.func.functional_call does; a sharded module runs with the parameters that it gathers. Call the "
                    "plain module with functional_call, or copy_ the values into the shards"
                )
            self.sharded = current
            self.hand_on_attributes()
            self.follow_grad_dtype()

    def hand_on_attributes(self) -> None:
        """Give the registered parameters the attributes that users have set on this one."""
        for slot in self.slots:
            current = slot.parameters.get(slot.name)
            if current is not None and vars(current) is not self.attributes:
                torch_private.give_attributes(self.attributes, current)

    def follow_grad_dtype(self) -> None:
        """Note what was assigned to ``grad_dtype``; hand it on to a parameter that conversions or loading have put in place."""
        if torch_private.has_chosen_grad_dtype(self.sharded):
            self.grad_dtype = GradDtype(self.sharded.grad_dtype)
        elif self.grad_dtype is not None:
            self.sharded.grad_dtype = self.grad_dtype.dtype
