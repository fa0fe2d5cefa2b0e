"""The modules that models of cases are built from: all map (batch, width) to (batch, width), each holds something awkward.

``act`` keeps numbers small: :func:`wrap` for whole numbers (then every sum is exact), ``torch.sin`` for others.  A script
that the fuzzer writes holds the source of the classes it needs, so each stands by itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fuzz.codes import Codes

Act = Callable[[Tensor], Tensor]


class Wrap(torch.autograd.Function):
    """Bring values into [-4, 4), gradients into [-8, 8), by multiples of 8 and 16: whole numbers stay whole and small.

    Their products and the sums over a batch are then whole numbers that even bfloat16 holds.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.remainder(x + 4, 8) - 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.remainder(gradients[0] + 8, 16) - 8


def wrap(x: Tensor) -> Tensor:
    """Return ``x`` modulo 8, see :class:`Wrap`."""
    found = Wrap.apply(x)
    assert isinstance(found, Tensor)
    return found


class Mlp(nn.Module):
    """Two linear layers around a residual; ``hidden`` rows are what no number of ranks divides."""

    def __init__(self, width: int, hidden: int, act: Act) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        return self.act(x + self.down(self.act(self.up(x))))


class Oddments(nn.Module):
    """Parameters that differ in everything: ``parts`` says which, separated by spaces."""

    def __init__(self, width: int, parts: str, act: Act) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {
            "scalar": (),
            "tiny": (1, width),
            "wide": (3, width),
            "frozen": (width,),
            "unused": (5, 3),
            "empty": (0, 4),
            "strided": (width, width),
        }
        self.parts, self.act = parts.split(), act
        for part in self.parts:
            value = torch.zeros(shapes[part], dtype=torch.float64 if part == "wide" else torch.float32)
            value = value.t() if part == "strided" else value
            self.register_parameter(part, nn.Parameter(value, requires_grad=part != "frozen"))

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        for part in self.parts:
            param = self.get_parameter(part)
            if part == "strided":
                x = x + self.act(self.act(x) @ param.to(x.dtype))  # small again: products of sums are not exact
            elif part == "scalar":
                x = x + self.act(param.to(x.dtype) * x)
            elif part in ("tiny", "wide"):
                x = x + param.sum(0).to(x.dtype)
            elif part == "empty":
                x = x + param.sum().to(x.dtype)
            elif part == "frozen":
                x = x + param.to(x.dtype)
        return self.act(x)


class Conv(nn.Module):
    """Convolutions; ``form`` is the order of the dims of their weights in memory, channels last by default."""

    def __init__(self, width: int, channels: int, act: Act, form: str = "0231") -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, channels, (2, 1), padding=(1, 0))  # sums of six, which bfloat16 holds
        self.back = nn.Conv2d(channels, 3, 1, bias=False)
        order = [int(dim) for dim in form]
        for conv in (self.wide, self.back):
            packed = conv.weight.detach().permute(order).contiguous()
            conv.weight = nn.Parameter(packed.permute([order.index(dim) for dim in range(4)]))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width); the width is a multiple of 3."""
        image = x.reshape(len(x), 3, -1, 1)
        wide = self.wide(image)[:, :, : image.shape[2]]
        return self.act(x + self.back(self.act(wide)).reshape(x.shape))


class Lookup(nn.Module):
    """An embedding of ``rows`` rows, indexed by the inputs themselves."""

    def __init__(self, width: int, rows: int, act: Act) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        index = x.detach().double().sum(1).abs().long() % self.table.num_embeddings
        return self.act(x + self.table(index).to(x.dtype))


class Tally(nn.Module):
    """Counts calls and sums inputs in buffers, which its output reads; every rank has its own."""

    def __init__(self, width: int, act: Act) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.register_buffer("total", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        total, calls = self.get_buffer("total"), self.get_buffer("calls")
        if self.training:
            with torch.no_grad():
                total.copy_(self.act(total + x.sum(0)))
                calls.add_(1)
        return self.act(x * self.scale + total.to(x.dtype, copy=True))


class Rope(nn.Module):
    """A linear layer whose output is multiplied by a table that no state dict holds."""

    def __init__(self, width: int, act: Act) -> None:
        super().__init__()
        self.out, self.act = nn.Linear(width, width), act
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the table; parameters are those of the layer."""
        self.register_buffer("table", 1 + torch.arange(self.out.in_features) % 3, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        return self.act(x + self.out(x) * self.get_buffer("table").to(x.dtype))


class Norm(nn.Module):
    """Batch normalization: running statistics in buffers, a count of batches, weights of one dimension."""

    def __init__(self, width: int, act: Act) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=0.5)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        return self.act(x + self.norm(x))


class Follower(nn.Module):
    """Keeps a list of its weights up to date in ``__setattr__``, as recurrent modules do, and computes with that list."""

    def __init__(self, width: int, hidden: int, act: Act) -> None:
        super().__init__()
        self.flat: list[Tensor] = []
        self.first = nn.Parameter(torch.zeros(width, hidden))
        self.second = nn.Parameter(torch.zeros(hidden, width))
        self.act = act

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("first", "second") and hasattr(self, "second"):
            self.flat = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        return self.act(x + self.act(x @ self.flat[0]) @ self.flat[1])


class Lstm(nn.Module):
    """torch's LSTM, which follows its weights in ``__setattr__``."""

    def __init__(self, width: int, hidden: int, act: Act) -> None:
        super().__init__()
        self.cell = nn.LSTM(width, hidden, batch_first=True)
        self.out = nn.Linear(hidden, width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        hidden, _ = self.cell(x.unsqueeze(1))
        return self.act(x + self.out(hidden.squeeze(1)))


class Quant(nn.Module):
    """A frozen weight of a tensor subclass beside a trainable scale."""

    def __init__(self, width: int, hidden: int, act: Act) -> None:
        super().__init__()
        self.weight = nn.Parameter(Codes(torch.zeros(hidden, width, dtype=torch.int8)), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(width))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        weight = self.weight
        assert isinstance(weight, Codes)
        whole = weight.dequantize().to(x.dtype)
        return self.act(x * self.scale + self.act(x @ whole.t()) @ whole)


class Pair(NamedTuple):
    """Two outputs, of which nobody reads the second."""

    y: Tensor
    spare: Tensor


@dataclasses.dataclass
class Box:
    """An output beside what is no tensor."""

    y: Tensor
    note: str


class Boxed(nn.Module):
    """Returns its child's output in a container, as a view, or changed in place: ``form`` says how."""

    def __init__(self, child: nn.Module, form: str) -> None:
        super().__init__()
        self.c0 = child
        self.form = form
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        """Shape: (batch, width) -> (batch, width) in a container; :func:`unbox` takes it out."""
        inner = unbox(self.c0(x))
        y = inner + self.scale.to(inner.dtype) - self.scale.to(inner.dtype).detach()
        spare = y * 2
        if self.form == "view":
            return y.reshape(-1).view(y.shape)
        if self.form == "slice":
            return torch.cat([y, spare], dim=1)[:, : y.shape[1]]
        if self.form == "list":
            return [spare, [None, y]]
        if self.form == "dict":
            return {"spare": {"deep": (spare, 3)}, "y": y}
        return {"pair": Pair(y, spare), "box": Box(y, "note"), "tuple": (y, spare, None)}.get(self.form, y)


def unbox(output: Any) -> Tensor:
    """Return the tensor to go on with from what any module of a model has returned."""
    if isinstance(output, dict):
        return unbox(output["y"])
    if isinstance(output, list):
        return unbox(output[-1])
    if isinstance(output, (Pair, Box)):
        return output.y
    return unbox(output[0]) if isinstance(output, tuple) else output


class Touched(nn.Module):
    """Changes what its child returned in place: ``form`` says by which operation."""

    def __init__(self, child: nn.Module, form: str) -> None:
        super().__init__()
        self.c0 = child
        self.form = form

    def forward(self, x: Any) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        y = unbox(self.c0(x))
        if self.form == "add":
            y += 1
        elif self.form == "view":
            y.view(-1).add_(1)
        elif self.form == "fill":
            y[:, :1] = 1
        return y


class Gate(nn.Module):
    """Calls its child only while ``on``, which programs change between calls; raises while that is "raise"."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.c0 = child
        self.on: bool | str = True

    def forward(self, x: Any) -> Any:
        """Shape: (batch, width) -> (batch, width)."""
        if self.on == "raise":
            raise ValueError("blown")
        return self.c0(x) if self.on else x


def hook_module(module: nn.Module, form: str) -> None:
    """Register a hook on ``module`` that turns the sign of something: ``form`` says of what, and when."""

    def turned(value: Any) -> Any:
        return -value if isinstance(value, Tensor) else value

    def turn_all(_: nn.Module, gradients: Any, *others: Any) -> Any:
        return tuple(turned(each) for each in gradients)

    if form == "pre":
        module.register_forward_pre_hook(lambda _, args: tuple(turned(each) for each in args))
    elif form == "pre with kwargs":
        module.register_forward_pre_hook(
            lambda _, args, kwargs: ((turned(args[0]), *args[1:]), kwargs), with_kwargs=True
        )
    elif form == "forward":
        module.register_forward_hook(lambda _, args, output: turned(output))
    elif form == "forward first":
        module.register_forward_hook(lambda _, args, output: turned(output), prepend=True)
    elif form == "backward":
        module.register_full_backward_hook(turn_all)
    elif form == "backward pre":
        module.register_full_backward_pre_hook(turn_all)
    else:
        raise ValueError(f"no hook is called {form!r}")


class Hooked(nn.Module):
    """Has a hook of its user's on its child, registered before anything is sharded."""

    def __init__(self, child: nn.Module, form: str) -> None:
        super().__init__()
        self.c0 = child
        hook_module(child, form)

    def forward(self, x: Any) -> Any:
        """Shape: (batch, width) -> (batch, width)."""
        return self.c0(unbox(x))


class Stack(nn.Module):
    """Calls its children segment by segment: some twice, some never, some recomputed in backward.

    A segment is (children, recompute) with recompute one of "", "reentrant", "saved".
    """

    def __init__(self, children: Sequence[nn.Module], segments: Sequence[tuple[tuple[int, ...], str]]) -> None:
        super().__init__()
        for number, child in enumerate(children):
            self.add_module(f"c{number}", child)
        self.segments, self.extra = list(segments), 0  # nodes that its graph has besides

    def run(self, x: Any, numbers: Sequence[int]) -> Tensor:
        """Return the output of the children ``numbers``, one after another."""
        for number in numbers:
            x = unbox(self.get_submodule(f"c{number}")(x))
        return x

    def forward(self, x: Any) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        x = unbox(x)
        for numbers, recompute in self.segments:
            if recompute and torch.is_grad_enabled():
                x = checkpoint(self.run, x, numbers, use_reentrant=recompute == "reentrant")
            else:
                x = self.run(x, numbers)
        return functools.reduce(lambda y, _: y * 1, range(self.extra), x)


class Peek(nn.Module):
    """A linear layer that uses the table of a :class:`Lookup` elsewhere in the model, as tied heads do by hand."""

    def __init__(self, child: Lookup) -> None:
        super().__init__()
        self.c0 = child

    def forward(self, x: Any) -> Tensor:
        """Shape: (batch, width) -> (batch, width)."""
        y = unbox(self.c0(x))
        logits = functional.linear(y, self.c0.table.weight.to(y.dtype))
        return self.c0.act(y + logits.sum(1, keepdim=True))
