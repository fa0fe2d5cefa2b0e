"""The ``s`` of a program: the same attributes and methods for every contender, each on its own model and optimizer."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from helpers.compare import full, gradient_of, local
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fuzz.case import WIDTH
from fuzz.from_meta import assign_tied
from fuzz.optims import OPTIMIZERS, groups_of
from fuzz.phases import Play, Seat
from fuzz.record import Held, Part, Record, part_of, parts_in
from fuzz.zoo import hook_module, unbox


def _multiplying(factor: float) -> Callable[[Tensor], None]:
    def follow(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(factor)

    return follow


class Side:
    """A model, its optimizer and what a program asks of them.

    Attributes:
        model: what is called.  net: the module itself, whose parameters have the names of the plain model's.
        kept: tensors that the program keeps, by name; compared at every moment.
        hidden: kinds of values that cannot be seen now.
        device: of parameters and batches.
    """

    model: nn.Module
    net: nn.Module
    optimizer: Optimizer

    def __init__(self, play: Play, seat: Seat, device: str = "cpu") -> None:
        self.play = play
        self.seat = seat
        self.settings = play.settings
        self.device = device
        self.rank = seat.data_rank
        self.dtype: torch.dtype = getattr(torch, play.settings.dtype)
        self.exact = play.settings.arithmetic == "integers"
        self.kept: dict[str, Any] = {}
        self.hidden: frozenset[str] = frozenset()
        self._watched: list[tuple[int, Tensor]] = []
        self._scheduler: torch.optim.lr_scheduler.ExponentialLR | None = None

    # ---- numbers in ----

    def batch(self, number: int, watched: bool = False) -> Tensor:
        """Return this rank's rows of batch ``number``; ``watched`` ones take gradients."""
        rows = self.settings.batch * self.seat.num_data_ranks
        generator = torch.Generator().manual_seed(1000 * self.play.seed + number)
        if self.exact:
            whole = torch.randint(-4, 4, (rows, WIDTH), generator=generator).to(self.dtype)
        else:
            whole = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)
        mine = whole.chunk(self.seat.num_data_ranks)[self.seat.data_rank].clone().to(self.device)
        if watched:
            mine.requires_grad_()
            self._watched.append((number, mine))
        return mine

    def loss(self, output: Any) -> Tensor:
        """Return the loss of what the model returned; for whole numbers one whose average over ranks is whole."""
        y = unbox(output).to(self.dtype)
        if not self.exact:
            return y.square().mean()
        generator = torch.Generator().manual_seed(self.play.seed)
        coefficients = torch.randint(-2, 3, y.shape, generator=generator).to(y)
        return (y * coefficients).sum() * self.seat.num_data_ranks

    # ---- what a program does ----

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward and let gradients reach ``.grad`` as this API has it."""
        loss.backward(retain_graph=retain_graph)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """Step the optimizer."""
        return self.optimizer.step() if closure is None else self.optimizer.step(cast(Any, closure))

    def join_loop(self, first: int, counts: tuple[int, ...]) -> None:
        """Step over batches ``first``, ``first + 1``, ...: as many as ``counts`` has for this rank."""
        for number in range(counts[self.rank % len(counts)]):
            self.backward(self.loss(self.model(self.batch(first + number))))
            self.step()
            self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients by the optimizer."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def zero_model(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients by the model."""
        self.net.zero_grad(set_to_none=set_to_none)

    def clip(self, how: str, bound: float) -> Tensor:
        """Clip gradients by value, or by norm; return the norm."""
        params = list(self.net.parameters())
        if how == "value":
            torch.nn.utils.clip_grad_value_(params, bound)
            return torch.zeros(())
        return self.clip_norm(params, bound, float("inf") if how == "inf" else 2.0)

    def clip_norm(self, params: list[nn.Parameter], bound: float, norm_type: float) -> Tensor:
        """Clip by norm as a user of this API does."""
        norm = torch.nn.utils.clip_grad_norm_(params, bound, norm_type)
        return full(norm)

    def unit(self, path: str) -> Any:
        """Return the module at ``path`` for its ``set_*`` and other methods."""
        return self.net.get_submodule(path)

    def unit_of(self, name: str) -> Any:
        """Return the first module of the unit of a parameter."""
        paths = next(
            each for each in self.play.units if any(f"{name}.".startswith(path and f"{path}.") for path in each)
        )
        return self.unit(paths[0])

    def round_trip(self, buffers: str) -> None:
        """Save all and load it again, where the package has a checkpoint for it."""

    def hook_reductions(self, path: str, factor: float, streamed: bool) -> None:
        """Let a hook multiply what has been reduced of the unit of the module at ``path``."""
        stream = torch.Stream(self.device) if streamed else None
        self.unit(path).set_all_reduce_hook(lambda flat: flat.mul_(factor), stream=stream)

    def hook_gradient(self, name: str, factor: float, follows: bool) -> None:
        """Let a hook of a user's multiply the gradient of a parameter: before it is accumulated, or what has been."""
        for module in self.net.modules():  # hooks on unsharded parameters are refused
            if hasattr(module, "reshard"):
                cast(Any, module).reshard()
        param = self.net.get_parameter(name)
        if not param.requires_grad:
            return
        if follows:
            param.register_post_accumulate_grad_hook(_multiplying(factor))
        else:
            param.register_hook(lambda gradient: gradient * factor)

    def hook_module(self, path: str, form: str) -> None:
        """Let a hook of a user's turn the sign of what goes through the module at ``path``, or of its gradient."""
        hook_module(self.net.get_submodule(path), form)

    def hooked(self, net: nn.Module) -> nn.Module:
        """Return ``net`` with the hooks of before it was sharded."""
        self.net = net
        self.mark(net)
        names = [name for name, _ in net.named_parameters()]
        later = list(dict.fromkeys(names[number % len(names)] for number in self.settings.optim.later))
        self.later = later[: len(names) - 1]  # no optimizer begins without parameters
        self.ignored = {names[number % len(names)] for number in self.settings.ignored}
        for number, factor, follows in self.settings.hooks:
            self.hook_gradient(names[int(number) % len(names)], factor, bool(follows))
        return net

    @torch.no_grad()
    def begin(self, net: nn.Module) -> nn.Module:
        """Return ``net`` with values of this rank's own, where ranks begin apart."""
        for param in net.parameters() if self.settings.apart else ():
            param.add_(self.seat.rank)
        return net

    def mark(self, net: nn.Module) -> None:
        """Set attributes on parameters, as users do whose optimizer groups are made of them."""
        for param in net.parameters() if self.settings.optim.marked else ():
            setattr(param, "is_thin", param.dim() <= 1)  # noqa: B010

    def gather_ahead(self, num_bytes: int) -> None:
        """Say within how many bytes units are gathered ahead, where there are any."""

    def param(self, name: str) -> nn.Parameter:
        """Return the parameter that is registered now."""
        return self.net.get_parameter(name)

    def reshard_all(self) -> None:
        """Reshard the units that are unsharded after a forward or by hand."""
        for module in self.net.modules():
            if hasattr(module, "reshard"):
                cast(Any, module).reshard()

    def local(self, tensor: Tensor) -> Tensor:
        """Return the local tensor."""
        return local(tensor)

    def locals(self) -> dict[str, Held]:
        """Return the local tensors of all parameters: like ``.data``, what a conversion leaves behind."""
        return {name: Held(self.local(param).detach(), param) for name, param in self.net.named_parameters()}

    def changed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return other values of the same kinds."""
        return {name: value + 1 if value.is_floating_point() else value.clone() for name, value in state.items()}

    def laid_otherwise(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return other values that are not contiguous: with gaps, or matrices column by column.

        Not those of norms: the backward of torch's batch norm takes a weight with gaps for a contiguous one.
        """
        found = self.changed(state)
        for index, (name, value) in enumerate(sorted(found.items())):
            local = self.local(value)
            if type(local) is not Tensor or not local.ndim or "norm" in name:
                continue
            is_matrix = local.ndim > 1 and index % 2
            local = local.mT.contiguous().mT if is_matrix else torch.stack([local, local], -1)[..., 0]
            if isinstance(value, DTensor):
                found[name] = DTensor.from_local(
                    local, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
                )
            else:
                found[name] = local
        return found

    def assign(self, state: Mapping[str, Tensor]) -> None:
        """Put the tensors of ``state`` in place of the parameters, and tie what was tied: torch assigns name by name."""
        assign_tied(self.net, state)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients there are, by name."""
        owners = {name: owner for name, (_, owner) in self.registered().items()}
        return {name: gradient for name, owner in owners.items() if (gradient := gradient_of(owner)) is not None}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the optimizer's state by parameter and key."""
        names = self.names_in_optimizer()
        found: dict[str, Tensor] = {}
        for param, entry in self.optimizer.state.items():
            for key, value in sorted(entry.items()):
                if isinstance(value, Tensor) and param in names:
                    found[f"{names[param]}:{key}"] = value
        return found

    def names_in_optimizer(self) -> dict[Tensor, str]:
        """Return the names of the parameters that the optimizer was made with."""
        return self._optimizer_names

    def saved_and_loaded(self, value: Any) -> Any:
        """Return ``value`` from a file."""
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def weigh(self, tensors: Mapping[str, Any]) -> None:
        """Raise unless every local tensor is alone in a storage of its own bytes."""
        for name, tensor in tensors.items():
            local = self.local(tensor).detach()
            found = (local.storage_offset(), local.untyped_storage().nbytes())
            assert found == (0, local.numel() * local.element_size()), (
                f"{name} of {local.numel() * local.element_size()} bytes has (offset, bytes of storage) {found}"
            )

    # ---- made again ----

    def make_optimizer(self) -> Optimizer:
        """Return a new optimizer over the parameters that are registered now."""
        optim = self.settings.optim
        kind = OPTIMIZERS[optim.name]
        make: Callable[..., Optimizer] = kind.make
        return make(groups_of(self.stepped(), optim), **kind.options)

    def stepped(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that the optimizer is made with: without those that a later group has."""
        return [pair for pair in self.net.named_parameters() if pair[0] not in self.later]

    def add_group(self, rate: float) -> None:
        """Give the optimizer what it has not stepped so far."""
        names, self.later = self.later, []
        if names:
            found = {name: self.net.get_parameter(name) for name in names}
            self.optimizer.add_param_group(
                {"params": self.as_group(found), "lr": rate * self.optimizer.param_groups[0]["lr"]}
            )

    def as_group(self, named: dict[str, nn.Parameter]) -> Any:
        """Return parameters as this optimizer takes those of another group."""
        return list(named.values())

    def schedule(self) -> None:
        """Let a scheduler halve the learning rates."""
        if self._scheduler is None or self._scheduler.optimizer is not self.optimizer:
            self._scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before the first step too
            self._scheduler.step()

    def remake_optimizer(self) -> None:
        """Make a new optimizer."""
        self._optimizer_names: dict[Tensor, str] = {param: name for name, param in self.net.named_parameters()}
        self.optimizer = self.make_optimizer()

    def adopt(self, model: nn.Module) -> None:
        """Go on with ``model`` and a new optimizer."""
        self.model = self.net = model
        self.remake_optimizer()

    def save(self) -> Any:
        """Return model and optimizer as they are now."""
        return copy.deepcopy({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, saved: Any) -> None:
        """Go back to what :meth:`save` returned."""
        self.net.load_state_dict(saved["model"])
        # torch's optimizers go on with the tensors that they are given, and would change what was saved.
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))

    # ---- numbers out ----

    def notes(self) -> list[str]:
        """Return what was found beside numbers."""
        return []

    def registered(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Return by name the parameter that is registered and the one that carries the gradient."""
        return {name: (param, param) for name, param in self.net.named_parameters()}

    def record(self, moment: str | tuple[str, Tensor]) -> Record:
        """Return all that can be seen now."""
        label, loss = (moment, None) if isinstance(moment, str) else moment
        shared: dict[str, Part | None] = {}
        for name, (param, owner) in self.registered().items():
            shared[f"param:{name}"] = part_of(owner)
            if param is not owner:
                shared[f"full:{name}"] = replace(part_of(param), dtype="")  # computed in another dtype
            gradient = None if "grad" in self.hidden else gradient_of(owner)
            shared[f"grad:{name}"] = None if gradient is None else part_of(gradient)
        if label.startswith(("step", "load", "copy of")):
            for name, tensor in self.optimizer_tensors().items():
                shared[f"state:{name}"] = part_of(tensor)
        own: dict[str, Part | None] = {f"buffer:{name}": part_of(buffer) for name, buffer in self.net.named_buffers()}
        mine = {name for name, _ in self.net.named_buffers()} | self.ignored
        for name, tensors in self.kept.items():
            for path, part in parts_in(tensors, f"kept:{name}").items():
                if path.endswith(":step]"):  # ShardedOptimizer gives copies of step counts
                    continue
                is_own = any(path.endswith(f"[{name}]") for name in mine)
                (own if is_own else shared)[path] = part
        own |= {key: shared.pop(key) for key in [*shared] if key.split(":")[1] in self.ignored}
        for number, tensor in self._watched:
            own[f"input:{number}"] = None if tensor.grad is None else part_of(tensor.grad)
        if loss is not None:
            own["loss:"] = part_of(loss)
        return Record(label, shared, own, self.hidden)
