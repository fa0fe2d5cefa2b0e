"""Draw cases.  Pure: a seed and an area give one case, on every machine and in every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from fuzz import actions as do
from fuzz.areas import AREAS
from fuzz.case import Case, Contender, Optim, Own, Settings
from fuzz.draw_model import MODULE_HOOKS, SIZES, draw_model, pick
from fuzz.eligible import HOLDING, OFFLOADED, OURS, is_ours, peer_of, suits
from fuzz.optims import OPTIMIZERS
from fuzz.weights import Weights

RANKS = {"one": 1, "two": 2, "three": 3, "four": 4}
RESHARDS: dict[str, bool | int | None] = {"none": None, "yes": True, "no": False, "two": 2}
POLICIES = {
    "none": ("", "", ""),
    "half": ("bfloat16", "", ""),
    "half_reduce": ("bfloat16", "float32", ""),
    "half_output": ("bfloat16", "float32", "float32"),
    "mixed": ("", "float64", ""),
    "float16": ("float16", "float32", ""),
}
METHODS = {
    "requires_gradient_sync": 4.0,
    "requires_all_reduce": 1.0,
    "reshard_after_forward": 2.0,
    "reshard_after_backward": 2.0,
    "gradient_divide_factor": 1.0,
    "reduce_scatter_unused_params": 1.0,
}


def draw(seed: int, area: str, max_ranks: int = 4) -> Case:
    """Return the case that ``seed`` stands for in ``area``."""
    weights = AREAS[area]
    random = Random(f"{area} {seed}")
    if random.random() < weights.turns:
        weights = weights.in_turns()
    ranks = {name: weight for name, weight in weights.ranks.items() if RANKS[name] <= max_ranks}
    num_ranks = RANKS[pick(random, ranks or {"one": 1.0})]
    settings = _draw_settings(random, weights, num_ranks)
    if num_ranks == 3:
        settings = _in_reals(random, replace(settings, compute="", output=""), weights)
    reals = settings.arithmetic == "reals"
    model = draw_model(random, weights, reals, (2, 4) if settings.mesh == "tensor" else SIZES)
    if settings.mesh == "tensor":
        model = replace(model, ties=())  # torch's tensor parallelism unties
    if any(own.half for own in settings.own):
        model = replace(model, ties=())  # a weight lies in the dtype of the unit that lends it
    actions = _Program(random, weights, settings, num_ranks).draw()
    if Random(f"{area} {seed} syncs").random() < 0.95:  # in the others a step may be refused while gradients wait
        actions = _synced(actions)
    if area == "resume":
        actions = _with_restart(random, actions, max_ranks)
    case = _with_able_apis(Case(seed, area, num_ranks, model, settings, tuple(actions), ()))
    if not any(suits(case, each) for each in OURS):  # none joins, sees .data or begins apart, and has the rest
        actions = [action for action in actions if not (isinstance(action, do.JoinLoop) or _assigns_data(action))]
        case = replace(case, settings=replace(settings, sync_buffers=False, apart=""), actions=tuple(actions))
    return replace(case, contenders=_draw_contenders(random, weights, case))


def _assigns_data(action: do.Action) -> bool:
    return isinstance(action, do.Change) and action.how == "data_set"


def _draw_settings(random: Random, weights: Weights, num_ranks: int) -> Settings:
    mesh = pick(random, weights.meshes)
    if (mesh == "hybrid" and num_ranks < 4) or (mesh == "tensor" and num_ranks % 2):
        mesh = "flat"
    reshard = RESHARDS[pick(random, weights.reshards)]
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        shards = num_ranks if mesh == "flat" else num_ranks // 2
        reshard = reshard if shards > reshard and shards % reshard == 0 else None
    compute, reduce, output = POLICIES[pick(random, weights.policies)]
    settings = Settings(
        dtype="float64" if random.random() < 0.3 else "float32",
        batch=random.choice((1, 2, 2, 3)) if not compute else 2,
        mesh=mesh,
        reshard=reshard,
        compute=compute,
        reduce=reduce,
        output=output,
        offload=random.random() < weights.offload,
        columns=mesh != "tensor" and random.random() < weights.columns,
        optim=_draw_optim(random, weights),
        compiled=pick(random, weights.compiled) if weights.compiled else "",
        large_numel=random.choice((1, 12)) if random.random() < weights.large else 0,
        bucket_view=random.random() < weights.bucket_view,
        sync_buffers=random.random() < weights.sync_buffers,
        **_draw_beside(random, weights),
    )
    if any(own.half for own in settings.own):
        settings = replace(settings, batch=2)
    # Half precision is compared where it is exact alone.
    return _in_reals(random, settings, weights) if not compute and random.random() < weights.reals else settings


def _draw_optim(random: Random, weights: Weights) -> Optim:
    optim = Optim(pick(random, weights.optims), random.random() < weights.groups)
    if weights.later and random.random() < weights.later:
        optim = replace(optim, later=tuple(random.randrange(60) for _ in range(random.randint(1, 3))))
    return replace(optim, marked=optim.groups and random.random() < weights.marked) if weights.marked else optim


def _draw_beside(random: Random, weights: Weights) -> dict[str, Any]:
    """Return what few areas have; the others draw nothing for it."""
    found = dict[str, Any]()
    if weights.hooks and random.random() < weights.hooks:
        found["hooks"] = tuple(
            (float(random.randrange(60)), -1.0, float(random.random() < 0.5)) for _ in range(random.randint(1, 3))
        )
    if weights.own:
        found["own"] = tuple(_draw_own(random, weights.own) for _ in range(random.randint(2, 4)))
    if weights.bounded:
        found["bounded"] = True
    if weights.ignored and random.random() < weights.ignored:
        found["ignored"] = tuple(random.randrange(60) for _ in range(random.randint(1, 4)))
    found |= {name: pick(random, each) for name in ("meta", "apart") if (each := getattr(weights, name))}
    return found


def _draw_own(random: Random, share: float) -> Own:
    return Own(
        other_api=random.random() < share,
        flat=random.random() < share,
        reshard=random.choice((None, True, False)),
        half=random.random() < share,
    )


def _in_reals(random: Random, settings: Settings, weights: Weights) -> Settings:
    optim = replace(settings.optim, name=pick(random, weights.real_optims))
    own = tuple(replace(each, half=False) for each in settings.own)
    batch = max(2, settings.batch)
    return replace(settings, arithmetic="reals", dtype="float64", batch=batch, optim=optim, own=own)


class _Program:
    """Draws actions in their order; keeps in mind what a sensible program would know."""

    def __init__(self, random: Random, weights: Weights, settings: Settings, num_ranks: int) -> None:
        self._random = random
        self._weights = weights
        self._exact = settings.arithmetic == "integers" and bool(OPTIMIZERS[settings.optim.name].is_exact)
        self._is_half = settings.compute == "bfloat16" or any(own.half for own in settings.own)
        self._num_ranks = num_ranks
        self._has_replicas = settings.mesh == "hybrid"
        self._may_defer = not any(own.other_api or own.flat for own in settings.own)
        self._found: list[do.Action] = []
        self._may_be_full = False
        self._reshards = True
        self._is_last = True
        self._extras: dict[str, Callable[[], do.Action | None]] = {
            "eval": lambda: do.Forward(random.choice(("eval", "no_grad", "no_grad", "inference"))),
            "take": self._take,
            "copy": lambda: do.Copy(
                random.choice(("state_dict", "params", "grads", "optim")), random.choice(tuple(do.COPIES))
            ),
            "weigh": lambda: do.Weigh(random.choice(("state_dict", "grads", "optim"))),
            "change": self._change,
            "convert": lambda: do.Change(random.choice(do.WHOLE_MODEL), 0),
            "change_kept": lambda: do.ChangeKept(self._index(), self._index()),
            "freeze": lambda: do.Freeze(self._index(), random.random() < 0.5, random.random() < 0.4),
            "switch": lambda: do.Switch(self._index(), random.choice(("no", "yes"))),
            "blow": lambda: do.Blow(self._index()),
            "input_gradient": do.InputGradient,
            "join": lambda: do.JoinLoop((*(random.randint(0, 3) for _ in range(num_ranks - 1)), 2)),
            "rate": lambda: do.Rate(random.choice((2.0, 0.5)) if not self._exact else 1.0),
            "option": lambda: do.Rate(0.5, random.choice(("momentum", "weight_decay", "lr")), self._chance(0.5)),
            "add_group": lambda: do.AddGroup(random.choice((0.5, 1.0, 2.0))),
            "grow": lambda: do.Grow(random.randint(0, 3)),
            "loss_of": lambda: do.LossOf(random.choice(self._weights.losses), self._index()),
            "save": do.Save,
            "load": do.Load,
            "remake": do.Remake,
            "copy_model": lambda: do.CopyModel(random.random() < 0.5),
            "call_unit": lambda: do.CallUnit(self._index()),
            "set": self._set,
            "hook": self._hook,
            "hook_gradient": lambda: do.HookGradient(
                self._index(), -1.0 if self._exact else random.choice((-1.0, 0.5)), random.random() < 0.5
            ),
            "hook_module": lambda: do.HookModule(self._index(), random.choice(MODULE_HOOKS)),
            "ahead": lambda: do.GatherAhead(random.choice((0, 0, 200, 1000, 100_000))),
            "unshard": lambda: do.Unshard(self._index(), random.random() < 0.5),
            "reshard": lambda: do.Reshard(self._index()),
            "wait": do.Wait,
            "prefetch": lambda: do.Prefetch(
                self._index(), tuple(self._index() for _ in range(random.randint(0, 3))), random.random() < 0.5
            ),
        }

    def draw(self) -> list[do.Action]:
        """Return the actions of a few steps."""
        for _ in range(self._random.randint(2, max(2, self._weights.steps))):
            self._draw_step()
        return self._found

    def _index(self) -> int:
        return self._random.randrange(60)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _add(self, action: do.Action | None) -> None:
        if action is not None:
            self._found.append(action)
        if isinstance(action, (do.Forward, do.Unshard, do.CallUnit)):
            self._may_be_full = True
        if isinstance(action, do.Backward) and self._reshards:
            self._may_be_full = False
        while self._chance(self._weights.gap):
            extra = self._extras[pick(self._random, self._weights.extras)]()
            if extra is not None:
                self._found.append(extra)
                self._may_be_full |= isinstance(extra, (do.Forward, do.Unshard, do.CallUnit))

    def _draw_step(self) -> None:
        weights = self._weights
        if weights.joins and self._chance(weights.joins):
            self._add(self._extras["join"]())
            return
        if self._chance(weights.closure):
            self._add(do.Step(closure=True))
            return
        count = self._random.randint(1, weights.microbatches)
        held = ""
        if count > 1 and self._chance(weights.hold):
            methods = ("requires_gradient_sync", *["requires_all_reduce"] * (self._has_replicas and self._may_defer))
            held = self._random.choice(methods)
        defers = count > 1 and self._chance(0.5 if held == "requires_all_reduce" else weights.hold / 4)
        for number in range(count):
            is_last = number == count - 1
            if held:
                self._add(do.Set(held, float(is_last)))
            if defers:
                self._add(do.Set("is_last_backward", float(is_last)))
            self._draw_microbatch()
        if self._chance(weights.clip):
            self._add(self._clip())
        self._add(do.Step())
        if weights.saves and self._chance(weights.saves):
            self._add(do.RoundTrip(self._random.choice(("", "per_rank"))))
        if not self._chance(weights.keep_grad):
            self._add(do.ZeroGrad(not self._chance(weights.grad_to_zero), self._chance(0.3)))

    def _draw_microbatch(self) -> None:
        weights = self._weights
        self._add(do.Forward(watched=self._chance(weights.watched)))
        together = self._chance(weights.together)
        if together:
            self._add(do.Forward())
        if self._chance(weights.retain):
            self._add(do.Backward(retain=True, together=together))
        self._add(do.Backward(0 if self._chance(0.05) else -1, together=together))

    def _clip(self) -> do.Action:
        if self._exact:
            return do.Clip("value", 4.0)
        return do.Clip(self._random.choice(("norm", "norm", "inf", "value")), self._random.choice((0.1, 1.0, 10.0)))

    def _change(self) -> do.Action:
        hows = [how for how in do.CHANGES if how != "data_set" or self._chance(0.1)]  # DTensors ignore it, torch's too
        return do.Change(self._random.choice(hows), self._index())

    def _take(self) -> do.Action:
        safe = ("state_dict", "grads", "optim")
        every = (*safe, "state_dict", "params", "data", "detach", "local")
        return do.Take(self._random.choice(safe if self._may_be_full else every))

    def _hook(self) -> do.Action | None:
        if self._has_replicas:  # what the hook sees there is another moment's
            return None
        return do.Hook(self._index(), -1.0 if self._exact else self._random.choice((-1.0, 0.5)), self._chance(0.7))

    def _set(self) -> do.Action:
        method = pick(self._random, METHODS)
        if method == "requires_all_reduce" and not self._may_defer:
            method = "requires_gradient_sync"
        value = float(self._chance(0.5))
        if method == "gradient_divide_factor":
            value = self._random.choice((1.0, 2.0, 4.0)) if self._exact else self._random.choice((1.0, 3.0, 0.5))
            value = 1.0 if self._exact and self._is_half else value  # fractions need more bits than bfloat16 has
        if method == "reshard_after_backward":
            self._reshards = bool(value)
        is_root = self._chance(0.5)
        return do.Set(method, value, -1 if is_root else self._index(), self._chance(0.7))


def _synced(actions: Sequence[do.Action]) -> list[do.Action]:
    """Return ``actions`` with sync on for the last backward before every step."""
    ends = [
        action for action in actions if isinstance(action, (do.Backward, do.CallUnit, do.LossOf, do.Step, do.JoinLoop))
    ]
    is_last = {id(first) for first, second in pairwise(ends) if isinstance(second, do.Step)}
    found: list[do.Action] = []
    off: dict[str, None] = {}
    for action in actions:
        if isinstance(action, do.Set) and action.method in HOLDING and not action.value:
            off[action.method] = None
        syncs = action.closure if isinstance(action, do.Step) else isinstance(action, do.JoinLoop)
        if syncs or (id(action) in is_last and not isinstance(action, do.Step)):
            found += [do.Set(method, 1.0) for method in off]
            off.clear()
        found.append(action)
    return found


def _with_restart(random: Random, actions: list[do.Action], max_ranks: int) -> list[do.Action]:
    ends = [number + 1 for number, action in enumerate(actions) if isinstance(action, do.ZeroGrad)] or [len(actions)]
    place = random.choice(ends)
    api = random.choice(("", "", "fully_shard", "replicate", "zero1", "ddp"))
    update = random.choice(("", "sharded")) if api in ("fully_shard", "replicate") else ""
    restart = do.Restart(random.randint(1, max_ranks), random.choice(("full", "dcp")), api, update)
    more: list[do.Action] = [do.Forward(), do.Backward(), do.Step(), do.ZeroGrad()]
    return [*actions[:place], restart, *more, *actions[place:]]


def _with_able_apis(case: Case) -> Case:
    """Let cases go on behind the API that began where the drawn one could not carry out the rest."""
    actions = list(case.actions)
    for number, action in enumerate(actions):
        if isinstance(action, do.Restart) and action.api:
            rest = replace(case, num_ranks=action.num_ranks, actions=tuple(actions[number + 1 :]))
            if not suits(rest, Contender(action.api, update=action.update)):
                actions[number] = replace(action, api="", update="")
    return replace(case, actions=tuple(actions))


def _draw_contenders(random: Random, weights: Weights, case: Case) -> tuple[Contender, ...]:
    ours = (*OFFLOADED, *OURS) if weights.offloads_optimizer else OURS
    able = [each for each in ours if suits(case, each) and weights.apis.get(each.api, 0.0)]
    able = able or [each for each in OURS if suits(case, each)]
    chosen: list[Contender] = []
    while able and len(chosen) < weights.num_contenders:
        by_api = {each.api: weights.apis.get(each.api, 1.0) for each in able}
        api = pick(random, by_api)
        contender = random.choice([each for each in able if each.api == api])
        able.remove(contender)
        chosen.append(contender)
    peers = dict.fromkeys(peer for each in chosen if suits(case, peer := peer_of(each)))
    return (*chosen, *(peer for peer in peers if not is_ours(peer)))
