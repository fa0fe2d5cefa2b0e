"""A case as data: a model, what is done with it, and who does it.  Frozen values that JSON can hold.

References in actions are numbers taken modulo what there is (parameters, units, losses), so that a case stays valid when
its model or its list of actions gets shorter.
"""

from __future__ import annotations

import json
import types
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fuzz.actions import ACTIONS, Action

T = TypeVar("T")
Arithmetic = Literal["integers", "reals"]
WIDTH = 6  # of the activations between all modules


@dataclass(frozen=True, slots=True)
class Segment:
    """Children that a stack calls one after another; ``recompute``: "" (keep activations), "reentrant" or "saved" hooks."""

    children: tuple[int, ...]
    recompute: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A module of :mod:`fuzz.zoo`.

    Attributes:
        kind: its class.  size: hidden rows, channels, ...  form: which variant of the class.
        segments: of a stack: the calls that make its forward; children may be missing or come twice.
        frozen: none of its parameters requires a gradient.
    """

    kind: str
    size: int = 3
    form: str = ""
    children: tuple[Node, ...] = ()
    segments: tuple[Segment, ...] = ()
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A module tree and how it is cut.

    Attributes:
        units: per unit the places of its modules, in the order in which they are sharded.  A place is a path of child
            numbers; () is the root.
        ties: pairs of places of modules of one kind and size: the second takes the weights of the first.
    """

    root: Node
    units: tuple[tuple[tuple[int, ...], ...], ...] = (((),),)
    ties: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Optim:
    """An optimizer: a name of :data:`fuzz.optims.OPTIMIZERS`; ``groups``: biases have other options.

    Attributes:
        marked: biases are found by an attribute that parameters have had since before they were sharded.
        later: numbers of parameters that no group has before an ``AddGroup``.
    """

    name: str = "sgd"
    groups: bool = False
    marked: bool = False
    later: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Own:
    """What a unit has for itself, beside the settings of the case.

    Attributes:
        other_api: it is replicated where the others are sharded, and sharded where they are replicated.
        flat: it is sharded over all ranks, whatever mesh the others have.
        reshard: its own argument ``reshard_after_forward``.
        half: it computes in bfloat16, unless it has others within it.
    """

    other_api: bool = False
    flat: bool = False
    reshard: bool | None = None
    half: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for a whole case.

    Attributes:
        arithmetic: "integers": everything is a small whole number, so any order of sums gives the same bits.
        batch: rows per rank and microbatch.
        mesh: "flat", "hybrid" (replicas of groups of two ranks) or "tensor" (pairs of ranks share the heads).
        reshard: the argument ``reshard_after_forward``.
        compute, reduce, output: dtypes of the mixed precision policy, "" for none.
        offload: shards live in host memory by policy.  columns: matrices are cut along their second dim.
        large_numel: parts of this size are sent in place; 0 leaves the library's constants as they are.
        bucket_view: ``gradient_as_bucket_view`` of DDP and ``parameters_as_bucket_view`` of ZeRO.
        sync_buffers: buffers are the first rank's before every forward in training, as DDP has it.
        hooks: parameters on whose gradients hooks of users are registered before anything is sharded: number, factor, and 1 for
            those that follow the accumulation, 0 for others.
        own: what units have for themselves, by turns: unit ``n`` has entry ``n`` modulo their number.
        ignored: numbers of parameters that the engine's APIs ignore: every rank has its own.
        meta: the model is made on the meta device and gets values after it was sharded: "init" (by ``init_parameters``),
            "reset" (``to_empty``, then its own initialization), "load" (``to_empty``, then a state dict), or "assign" (a
            state dict whose tensors replace those on meta); "" for none.
        apart: ranks begin with different values: "named" (nothing is done about it) or "synced" by the API; "" for none.
        bounded: steps are plain and all is recomputed: no more units are full at once than a part that is recomputed needs.
        compiled: blocks that are units are compiled whole after they were sharded, by this backend; "" for none.
    """

    arithmetic: Arithmetic = "integers"
    dtype: str = "float32"
    batch: int = 2
    mesh: str = "flat"
    reshard: bool | int | None = None
    compute: str = ""
    reduce: str = ""
    output: str = ""
    offload: bool = False
    columns: bool = False
    optim: Optim = Optim()
    large_numel: int = 0
    bucket_view: bool = False
    sync_buffers: bool = False
    compiled: str = ""
    hooks: tuple[tuple[float, ...], ...] = ()
    own: tuple[Own, ...] = ()
    ignored: tuple[int, ...] = ()
    meta: str = ""
    bounded: bool = False
    apart: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Contender:
    """Who carries a case out.

    Attributes:
        API: a name of :data:`fuzz.eligible.APIS`.
        transport: of the engine's APIs.
        update: "" for torch's own optimizer; "sharded" for ``ShardedOptimizer``; of ZeRO: "whole" or "even".
    """

    api: str
    transport: str = "auto"
    update: str = ""

    @property
    def name(self) -> str:
        """The name in reports."""
        parts = [self.api, self.transport if self.transport != "auto" else "", self.update]
        return "/".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Case:
    """One program with everything it needs.

    Attributes:
        seed: of the values of parameters and batches.
        num_ranks: in the first phase; a ``Restart`` begins another one on its own number of ranks and behind its own API.
    """

    seed: int
    area: str
    num_ranks: int
    model: Model
    settings: Settings
    actions: tuple[Action, ...]
    contenders: tuple[Contender, ...] = (Contender("fully_shard"),)


def node_at(root: Node, place: tuple[int, ...]) -> Node:
    """Return the node at ``place``."""
    for number in place:
        root = root.children[number]
    return root


# ---- JSON ----


def to_json(case: Case) -> str:
    """Return ``case`` as one line of JSON."""
    return json.dumps(encode(case))


def from_json(text: str) -> Case:
    """Return the case that :func:`to_json` wrote.  Raises: ValueError for what is none."""
    return cast(Case, decode(Case, json.loads(text)))


def encode(value: Any) -> Any:
    """Return ``value``, made of frozen values, as what JSON can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        return {"do": type(value).__name__, **found} if isinstance(value, Action) else found
    if isinstance(value, tuple):
        return [encode(each) for each in cast("tuple[Any, ...]", value)]
    return value


def decode(kind: Any, value: Any) -> Any:
    """Return the value of class ``kind`` that :func:`encode` turned into ``value``."""
    if isinstance(value, dict) and "do" in value:
        kind = ACTIONS.get(cast(str, value["do"]))
        if kind is None:
            raise ValueError(f"there is no action {value['do']!r}; known are {sorted(ACTIONS)}")
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        given = {name: each for name, each in cast("dict[str, Any]", value).items() if name != "do"}
        unknown = sorted(set(given) - set(hints))
        if unknown:
            raise ValueError(f"{kind.__name__} has no field {unknown}; it has {sorted(hints)}")
        return kind(**{name: decode(hints[name], each) for name, each in given.items()})
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(decode(get_args(kind)[0], each) for each in cast("list[Any]", value))
    if get_origin(kind) in (Union, types.UnionType) and isinstance(value, list):
        return tuple(cast("list[Any]", value))
    return value
