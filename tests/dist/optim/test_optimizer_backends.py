"""What every way to run an optimizer keeps to: on pieces, whole matrices, plain tensors, and on shares of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.compare import full
from helpers.ranks import FOUR, on_ranks
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise import ZeroRedundancyOptimizer
from shardwise.optim.sharded_optimizer import make_backend
from shardwise.optim.slices import OptimizerBackend, UpdateRule, copied, slices_of
from shardwise.optim.state_dict import wrap

SHAPES = {"weight": (5, 3), "bias": (3,), "even": (4, 2), "last": (1, 6)}
OPTIONS = {"lr": 0.1, "weight_decay": 0.01}
Tensors = dict[str, torch.Tensor]
Groups = list[tuple[list[str], dict[str, Any]]]


def whole(name: str, seed: int) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name)))


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, foreach=False)


class Case:
    """The parameters of one way and who steps them; ``sharded``: they are DTensors."""

    def __init__(self, sharded: bool, groups: Groups) -> None:
        self.mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
        self.params: Tensors = {}
        for name in (name for names, _ in groups for name in names):
            self.add(name)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.mesh is None else distribute_tensor(tensor, self.mesh, [Shard(0)])

    def add(self, name: str) -> None:
        self.params[name] = self.placed(whole(name, 0)).requires_grad_()

    def set_gradients(self, seed: int, *without: str) -> None:
        for name, param in self.params.items():
            param.grad = None if name in without else self.placed(whole(name, seed))

    def wholes(self) -> Tensors:
        return {name: full(param.detach()).clone() for name, param in self.params.items()}


class OwnCase(Case):
    """A stepper of the optimizers over shards."""

    backend: OptimizerBackend

    def __init__(self, sharded: bool, groups: Groups, declared: UpdateRule, is_flat: bool) -> None:
        super().__init__(sharded, groups)
        given = [(self.slices(*names), options) for names, options in groups]
        self.backend = make_backend(adamw, torch.optim.AdamW, given, declared, is_flat)

    def slices(self, *names: str) -> list[Any]:
        return [slices_of(name, self.params[name]) for name in names]

    def add_group(self, name: str, options: Mapping[str, Any]) -> None:
        self.add(name)
        self.backend.add_group(self.slices(name), options)


class ZeroCase(Case):
    """ZeRO's stepper behind its API; gradients are the same on all ranks."""

    backend: ZeroRedundancyOptimizer

    def __init__(self, sharded: bool, groups: Groups) -> None:
        super().__init__(sharded, groups)
        given = [{**options, "params": [self.params[name] for name in names]} for names, options in groups]
        self.backend = ZeroRedundancyOptimizer(given, torch.optim.AdamW, foreach=False)

    def add_group(self, name: str, options: Mapping[str, Any]) -> None:
        self.add(name)
        self.backend.add_param_group({**options, "params": [self.params[name]]})


OWN: dict[str, Callable[[Groups], OwnCase]] = {
    "pieces, joined": lambda groups: OwnCase(True, groups, "elementwise", True),
    "pieces, alone": lambda groups: OwnCase(True, groups, "elementwise", False),
    "whole matrices": lambda groups: OwnCase(True, groups, "whole_matrix", True),
    "as it is": lambda groups: OwnCase(False, groups, "whole_matrix", True),
}
ALL: dict[str, Callable[[Groups], OwnCase | ZeroCase]] = {**OWN, "shares": lambda groups: ZeroCase(False, groups)}
ONE_GROUP: Groups = [(["weight", "bias", "even", "last"], OPTIONS)]


class Plain(Case):
    """The plain optimizer on whole tensors: what all others are compared with."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(False, groups)
        self.optimizer = adamw([{**options, "params": [self.params[n] for n in names]} for names, options in groups])


def assert_same(case: Case, plain: Case, what: object) -> None:
    for name, found in case.wholes().items():
        same = torch.allclose(found, plain.params[name], rtol=1e-6, atol=1e-7)
        assert same, f"{what}: {name} is {found}, in the plain optimizer {plain.params[name]}"


@on_ranks(2, 4)
def test_steps_are_those_of_the_plain_optimizer() -> None:
    for kind, make in ALL.items():
        groups: Groups = [(["weight", "bias"], OPTIONS), (["even", "last"], {"lr": 0.01})]
        case, plain = make(groups), Plain(groups)
        for seed in range(1, 4):
            for each in (case, plain):
                each.set_gradients(seed)
            case.backend.step()
            plain.optimizer.step()
            assert_same(case, plain, (kind, seed))


@on_ranks(2, FOUR)
def test_a_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    for kind, make in ALL.items():
        case, plain = make(ONE_GROUP), Plain(ONE_GROUP)

        def closure(case: Case = case) -> float:
            assert torch.is_grad_enabled()
            case.set_gradients(1)
            return 7.5

        with torch.no_grad():
            assert case.backend.step(closure) == 7.5, kind
        plain.set_gradients(1)
        plain.optimizer.step()
        assert_same(case, plain, kind)


@on_ranks(2, FOUR)
def test_what_a_closure_raises_comes_back_and_nothing_has_changed() -> None:
    for kind, make in ALL.items():
        case = make(ONE_GROUP)
        case.set_gradients(1)
        before = case.wholes()

        def closure() -> float:
            raise KeyError("of the closure")

        with pytest.raises(KeyError):
            case.backend.step(closure)
        assert all(torch.equal(found, before[name]) for name, found in case.wholes().items()), kind


@on_ranks(2, FOUR)
def test_a_parameter_without_a_gradient_stays_and_others_step() -> None:
    for kind, make in ALL.items():
        case, plain = make(ONE_GROUP), Plain(ONE_GROUP)
        for seed, without in ((1, "even"), (2, "bias")):
            for each in (case, plain):
                each.set_gradients(seed, without)
            case.backend.step()
            plain.optimizer.step()
            assert_same(case, plain, (kind, seed))


@on_ranks(2, FOUR)
def test_an_added_group_steps_with_options_of_its_own() -> None:
    for kind, make in ALL.items():
        case, plain = make([(["weight"], OPTIONS)]), Plain([(["weight"], OPTIONS), (["even"], {"lr": 0.5})])
        case.add_group("even", {"lr": 0.5})
        for seed in (1, 2):
            for each in (case, plain):
                each.set_gradients(seed)
            case.backend.step()
            plain.optimizer.step()
        assert_same(case, plain, kind)


def as_users_have(case: OwnCase, values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return copies of ``values`` as a state dict has them: values per element are tensors of the parameters' kind."""
    return {
        name: {key: copied(wrap(case.slices(name)[0], value)) for key, value in state.items()}
        for name, state in values.items()
    }


@on_ranks(2, FOUR)
def test_loaded_state_and_options_go_on_as_the_run_they_are_of() -> None:
    for kind, make in OWN.items():
        first, second = make(ONE_GROUP), make([(ONE_GROUP[0][0], {"lr": 9.0})])
        for seed in (1, 2):
            first.set_gradients(seed)
            first.backend.step()
        with torch.no_grad():
            for name, param in second.params.items():
                param.copy_(first.params[name])
        second.backend.load(as_users_have(first, first.backend.states()), first.backend.optimizer.param_groups)
        for case in (first, second):
            case.set_gradients(3)
            case.backend.step()
        found = second.wholes()
        assert all(torch.equal(each, found[name]) for name, each in first.wholes().items()), kind


def forms(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return ``values`` without what they are: kinds, shapes and dtypes."""

    def form(value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype
        return [form(each) for each in value] if isinstance(value, tuple) else type(value)

    return {name: {key: form(value) for key, value in state.items()} for name, state in values.items()}


@on_ranks(2, FOUR)
def test_blank_states_look_like_live_ones_and_making_them_changes_nothing() -> None:
    for kind, make in OWN.items():
        case = make(ONE_GROUP)
        assert case.backend.states() == {}, kind
        before = case.wholes()
        blank = forms(case.backend.states(blank=True))
        assert case.backend.states() == {}, kind
        assert all(torch.equal(found, before[name]) for name, found in case.wholes().items()), kind
        case.set_gradients(1)
        case.backend.step()
        assert blank == forms(case.backend.states()), kind


@on_ranks(2, FOUR)
def test_local_states_need_nobody_else_and_have_the_names_of_all() -> None:
    for kind, make in OWN.items():
        case = make(ONE_GROUP)
        case.set_gradients(1)
        case.backend.step()
        if dist.get_rank() == 0:
            assert set(case.backend.local_states()) == set(SHAPES), kind
        dist.barrier()
