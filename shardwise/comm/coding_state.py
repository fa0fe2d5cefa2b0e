"""What the coding of some tensors remembers: what it has lost of gradients, how far off it was, and what it has saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.codec.block_codes import BlockCode
from shardwise.codec.coded_sections import CodedSection
from shardwise.codec.compression_policy import Coding, CompressionPolicy, takes
from shardwise.comm.communicator import NamedTensor, SectionContents
from shardwise.layout.bucket import Bucket

_MOST_LAYOUTS = 64


@dataclass(slots=True)
class Meter:
    """How far coding was off, and the bytes that it has sent.

    Attributes:
        what: "gather" or "reduction".  bound: what to warn above.
        num_calls: collectives so far.
        last, worst: relative error, in the 2-norm, of the last one and the largest; 0-dim tensors where the tensors are.
        sent_bytes: that this rank has sent.  plain_bytes: that it would have sent uncoded, by the same collectives.
    """

    what: str
    bound: float
    num_calls: int = 0
    last: torch.Tensor | None = None
    worst: torch.Tensor | None = None
    sent_bytes: int = 0
    plain_bytes: int = 0
    has_warned: bool = False

    def see(self, was: torch.Tensor, lost: torch.Tensor, params: Sequence[NamedTensor]) -> None:
        """Note the :func:`norm_of` what was coded, and of what coding has lost of it, once for each collective.

        On an accelerator nobody waits for it.
        """
        last = lost / was.clamp_min(torch.finfo(torch.float32).tiny)
        self.worst = last if self.worst is None else torch.fmax(self.worst, last)
        self.last = last
        self.num_calls += 1
        if last.device.type == "cpu":
            self.warn(params)

    def warn(self, params: Sequence[NamedTensor]) -> None:
        """Warn, once, if the largest error is above the bound."""
        if self.has_warned or self.worst is None or not self.worst.item() > self.bound:
            return
        self.has_warned = True
        first = params[0].fqn if params else "?"
        warnings.warn(
            f"compression: coding has changed a {self.what} of the unit of '{first}' by {self.worst.item():.3g} of its 2-norm, "
            f"above warn_above={self.bound}. Take smaller blocks or 'bf16', or name what is so uneven in "
            "CompressionPolicy(exact=...)",
            stacklevel=2,
        )

    def count(self, sent: int, plain: int) -> None:
        """Count the bytes of one collective."""
        self.sent_bytes += sent
        self.plain_bytes += plain


def norm_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all elements of ``tensors``, float32, 0-dim."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))


@dataclass(slots=True, eq=False)
class Compression:
    """The coding of the parameters that gather and reduce together.

    Attributes:
        policy: what the user wants.
        residuals: by parameter, what coding has lost of its gradients and the next ones are to bring: float32 rows, one
            for each rank of the reduce-scatter (its section), or one alone between replicas.
        gathers, reductions: how far off they were.
    """

    policy: CompressionPolicy
    residuals: dict[NamedTensor, torch.Tensor] = field(default_factory=dict[NamedTensor, torch.Tensor])
    gathers: Meter = field(init=False)
    reductions: Meter = field(init=False)
    _sections: dict[tuple[int, torch.dtype, Coding], tuple[Bucket, CodedSection]] = field(init=False)

    def __post_init__(self) -> None:
        self.gathers = Meter("gather", self.policy.warn_above)
        self.reductions = Meter("reduction", self.policy.warn_above)
        self._sections = {}

    def section_of(self, contents: SectionContents, dtype: torch.dtype, coding: Coding) -> CodedSection:
        """Return how sections of ``contents`` in ``dtype`` become messages; without runs if none of the tensors is coded."""
        layout = contents.layout
        key = (id(layout), dtype, coding)
        known = self._sections.get(key)
        if known is None:
            if len(self._sections) >= _MOST_LAYOUTS:
                self._sections.clear()
            saves = dtype.is_floating_point and (coding == "int8" or dtype.itemsize > 2)
            shapes = [shard.shape for shard in layout.shards]
            named = zip(contents.params, shapes, strict=True)
            is_coded = [saves and takes(self.policy, param.fqn, shape, dtype.itemsize) for param, shape in named]
            made = CodedSection.of(layout, is_coded, dtype, BlockCode(coding, self.policy.block))
            known = self._sections[key] = (layout, made)  # with the layout: its id stays its own
        return known[1]

    def add_residuals(self, rows: torch.Tensor, section: CodedSection, params: Sequence[NamedTensor]) -> None:
        """Add what earlier gradients of ``params`` have lost to ``rows`` (R, coded elements or more)."""
        if self.policy.error_feedback:
            for tensor, _, numel, start in section.runs:
                residual = self.residuals.get(params[tensor])
                if residual is not None and residual.shape == (rows.shape[0], numel):
                    rows.narrow(1, start, numel).add_(residual)

    def keep_residuals(self, lost: torch.Tensor, section: CodedSection, params: Sequence[NamedTensor]) -> None:
        """Keep ``lost`` (as ``rows`` of :meth:`add_residuals`) for the next gradients; what is not finite is not kept."""
        if not self.policy.error_feedback:
            return
        for tensor, _, numel, start in section.runs:
            shape = (lost.shape[0], numel)
            residual = self.residuals.get(params[tensor])
            if residual is None or residual.shape != shape:
                residual = self.residuals[params[tensor]] = torch.empty(shape, dtype=torch.float32, device=lost.device)
            residual.copy_(lost.narrow(1, start, numel)).nan_to_num_(0.0, 0.0, 0.0)

    @property
    def residual_bytes(self) -> int:
        """Bytes of what is kept for the next gradients."""
        return sum(each.nbytes for each in self.residuals.values())

    def mark(self) -> Callable[[], None]:
        """Return what brings residuals back to what they are now."""
        was = {param: residual.clone() for param, residual in self.residuals.items()}

        def put_back() -> None:
            self.residuals.clear()
            self.residuals.update(was)

        return put_back

    def round_trip(self, shard: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return ``shard`` of the parameter ``name`` of ``shape`` as all ranks have it after an all-gather in ``dtype``."""
        cast = shard.detach().to(dtype)
        coding = self.policy.gather
        saves = coding == "int8" or dtype.itemsize > 2
        if coding is None or not (saves and takes(self.policy, name, shape, dtype.itemsize)) or not shard.numel():
            return cast
        code, block = BlockCode(coding, self.policy.block), self.policy.block
        numel = -(-shard.numel() // block) * block
        row = torch.zeros(1, numel, dtype=torch.float32, device=shard.device)
        row[0, : shard.numel()].copy_(cast.reshape(-1))
        coded = torch.empty(1, code.num_bytes(numel), dtype=torch.uint8, device=shard.device)
        code.encode(row, coded)
        return code.decode(coded, numel)[0, : shard.numel()].view(shard.shape).to(dtype)
