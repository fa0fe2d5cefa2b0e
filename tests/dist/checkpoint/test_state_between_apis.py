"""State saved with one API is read with every other, on another number of ranks, and training goes on to the bit."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.compare import comparable
from helpers.sharded import step_on_drawn_gradients
from helpers.state_apis import OPTIONS, Api, adamw, fully_sharded, itself, sharded, zero
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardwise import ShardedOptimizer, ZeroRedundancyOptimizer, replicate
from shardwise.testing import WorkerPool

NUM_SAVED, NUM_STEPS = 2, 3

# How a checkpoint names things.  named, flat, indexed: in torch.distributed.checkpoint, by name, by torch's flattened
# keys, by the plain optimizer's indices.  file: one plain optimizer's state dict, whole, written by torch.save.
Form = Literal["named", "flat", "indexed", "file"]
FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 9)
        self.second = nn.Linear(9, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(7))


APIS: dict[str, Api] = {
    "fully_shard": Api(fully_sharded, adamw),
    "sharded elementwise": Api(fully_sharded, sharded()),
    "sharded whole matrix": Api(fully_sharded, sharded("whole_matrix")),
    "sharded over replicas": Api(lambda model: replicate(model), sharded()),
    "zero whole": Api(itself, zero("whole")),
    "zero even": Api(itself, zero("even")),
    "replicate": Api(lambda model: replicate(model), adamw),
    "plain": Api(itself, adamw),
    "plain with names": Api(itself, lambda model: torch.optim.AdamW(model.named_parameters(), **OPTIONS)),
    "fully_shard with names": Api(fully_sharded, lambda model: torch.optim.AdamW(model.named_parameters(), **OPTIONS)),
}


# ---- writing ----


def _written(optimizer: Any, model: nn.Module, form: Form) -> Any:
    """Return what goes into the checkpoint."""
    named = dict(model.named_parameters())
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.sharded(None if form == "indexed" else named)
    if form == "flat":
        return get_optimizer_state_dict(model, optimizer, options=FLAT)
    if form == "indexed":
        return (
            optimizer.state_dict(form="indexed") if isinstance(optimizer, ShardedOptimizer) else optimizer.state_dict()
        )
    return (
        optimizer.state_dict()
        if isinstance(optimizer, ShardedOptimizer)
        else get_optimizer_state_dict(model, optimizer)
    )


def _whole(optimizer: Any, model: nn.Module) -> Any:
    """Return the state dict of a plain optimizer, on rank 0 at least."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        return optimizer.state_dict() if dist.get_rank() == 0 else None
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.full_state_dict(by_index=True)
    names = [name for name, _ in model.named_parameters()]
    found = get_optimizer_state_dict(model, optimizer, options=FULL)
    state = {index: found["state"][name] for index, name in enumerate(names)}
    return {"state": state, "param_groups": [{**found["param_groups"][0], "params": list(range(len(names)))}]}


def save(apis: list[str], form: Form, folder: str) -> None:
    """Train behind each of ``apis`` and save into a folder of its name."""
    for api in apis:
        own = Path(folder) / api
        own.mkdir(exist_ok=True)
        model = APIS[api].wrap(Net())
        optimizer = APIS[api].make(model)
        for seed in range(NUM_SAVED):
            step_on_drawn_gradients(model, optimizer, seed)
        for group in optimizer.param_groups:
            group["lr"] = 0.07  # options travel too
        if form == "file":
            whole = _whole(optimizer, model)
            if dist.get_rank() == 0:
                torch.save(whole, own / "file")
        else:
            dcp.save({"optimizer": _written(optimizer, model, form)}, checkpoint_id=own / "state")
        weights = get_model_state_dict(model, options=FULL)
        if dist.get_rank() == 0:
            torch.save(weights, own / "weights")


# ---- reading ----


def _read(optimizer: Any, model: nn.Module, form: Form, folder: Path) -> None:
    named = dict(model.named_parameters())
    if form == "file":
        _read_whole(optimizer, model, torch.load(folder / "file"))
        return
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        state = optimizer.sharded(None if form == "indexed" else named, loading=True)
        dcp.load({"optimizer": state}, checkpoint_id=folder / "state")
        return
    if isinstance(optimizer, ShardedOptimizer) and form != "flat":
        content = {"optimizer": optimizer.blank_state_dict(form=form)}
        dcp.load(content, checkpoint_id=folder / "state")
        optimizer.load_state_dict(content["optimizer"])
        return
    options = FLAT if form == "flat" else None
    get_optimizer_state_dict(model, optimizer)  # makes state
    if form == "indexed":
        content = {"optimizer": optimizer.state_dict()}
        for group in content["optimizer"]["param_groups"]:
            group.pop("param_names", None)
        dcp.load(content, checkpoint_id=folder / "state")
        optimizer.load_state_dict(content["optimizer"])
        return
    content = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    for group in () if form == "flat" else content["optimizer"]["param_groups"]:
        group.pop("param_names", None)  # asked for only where torch's optimizer was given names
    if form == "flat":
        content["optimizer"] = {k: v for k, v in content["optimizer"].items() if not k.endswith(".param_names")}
    dcp.load(content, checkpoint_id=folder / "state")
    if form == "flat" and "param_names" in optimizer.param_groups[0]:
        content["optimizer"] |= {f"param_groups.{name}.param_names": list(named) for name in named}
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)


def _read_whole(optimizer: Any, model: nn.Module, whole: Any) -> None:
    if isinstance(optimizer, ZeroRedundancyOptimizer | ShardedOptimizer):
        optimizer.load_state_dict(whole)
        return
    names = [name for name, _ in model.named_parameters()]
    state = {names[index]: values for index, values in whole["state"].items()}
    by_name = {"state": state, "param_groups": [{**whole["param_groups"][0], "params": names}]}
    set_optimizer_state_dict(model, optimizer, by_name, options=FULL)


def load(form: Form, folder: str, pairs: list[tuple[str, str]]) -> list[str]:
    """Go on from each (API that saved, API); return what went wrong."""
    expected = Net()
    reference = adamw(expected)
    for seed in range(NUM_STEPS):
        if seed == NUM_SAVED:
            reference.param_groups[0]["lr"] = 0.07
        step_on_drawn_gradients(expected, reference, seed)
    wrong: list[str] = []
    for saved, name in pairs:
        what, own = f"{saved} -> {name} on {dist.get_world_size()}", Path(folder) / saved
        model = APIS[name].wrap(Net())
        set_model_state_dict(model, torch.load(own / "weights"), options=FULL)
        optimizer = APIS[name].make(model)
        try:
            _read(optimizer, model, form, own)
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            continue
        assert optimizer.param_groups[0]["lr"] == 0.07, what
        for seed in range(NUM_SAVED, NUM_STEPS):
            step_on_drawn_gradients(model, optimizer, seed)
        for param, (fqn, value) in zip(model.parameters(), expected.named_parameters(), strict=True):
            mine, wanted = comparable(param, value)
            if not torch.equal(mine, wanted):
                wrong.append(f"{what}: {fqn} differs by {(mine - wanted).abs().max():.2e}")
    return wrong


PLAIN = [name for name in APIS if name.startswith("plain")]
ON_TWO = [name for name in APIS if name not in PLAIN]
FORMS: dict[str, tuple[Form, ...]] = {
    "fully_shard": ("named", "flat", "indexed", "file"),
    "sharded elementwise": ("named", "flat", "indexed", "file"),
    "sharded whole matrix": ("named", "indexed", "file"),
    "sharded over replicas": ("named", "flat", "indexed", "file"),
    "zero whole": ("named", "indexed", "file"),
    "zero even": ("named", "indexed", "file"),
    "replicate": ("named", "flat", "indexed", "file"),
    "plain": ("named", "flat", "indexed", "file"),
    "plain with names": ("named", "indexed"),
    "fully_shard with names": ("named", "indexed"),
}


ALIKE = [  # cases whose files are written by the same code as those of another case
    *(("sharded over replicas", form) for form in ("named", "flat", "indexed", "file")),
    *(("sharded whole matrix", form) for form in ("indexed", "file")),
    *(("replicate", form) for form in ("flat", "indexed", "file")),
    *(("zero whole", form) for form in ("named", "indexed")),
    *(("plain", form) for form in ("flat", "indexed")),
    *((api, "indexed") for api in ("plain with names", "fully_shard with names")),
    ("zero even", "file"),
]


@pytest.mark.parametrize("are_alike", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("form", ["named", "flat", "indexed", "file"])
def test_what_one_api_saves_all_apis_read(pool: WorkerPool, tmp_path: Path, form: Form, are_alike: bool) -> None:
    savers = [api for api, forms in FORMS.items() if form in forms and ((api, form) in ALIKE) is are_alike]
    pairs: dict[int, list[tuple[str, str]]] = {1: [], 2: []}
    for api in savers:
        # An API reads every second file: some forms of every API, and every form of some APIs.
        number = FORMS[api].index(form) + list(FORMS).index(api)
        on_two = [name for place, name in enumerate(ON_TWO) if (place + number) % 2 == 0]
        on_one = list(APIS) if api == "zero even" else PLAIN  # what is in the files does not depend on who reads them
        if form == "flat":
            # torch's functions flatten: not for ZeroRedundancyOptimizer, and not for whole matrices, a named error
            on_two = [name for name in on_two if not name.startswith("zero") and "matrix" not in name]
        pairs[2] += [(api, name) for name in on_two]
        pairs[1] += [(api, name) for name in on_one]
    for num_ranks, apis in ((4, [*filter(ON_TWO.__contains__, savers)]), (1, [*filter(PLAIN.__contains__, savers)])):
        pool.run(save, num_ranks=num_ranks, apis=apis, form=form, folder=str(tmp_path))
    for num_ranks, chosen in pairs.items():
        for wrong in pool.run(load, num_ranks=num_ranks, form=form, folder=str(tmp_path), pairs=chosen):
            assert wrong == [], "\n".join(wrong)
