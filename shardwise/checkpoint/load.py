"""``load``: a checkpoint, or files of other tools, into models and optimizers of any API at any number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.arguments import explains_arguments
from shardwise.checkpoint.contents import LoadRequests, Request
from shardwise.checkpoint.files import (
    Files,
    list_checkpoints,
    read_all,
    read_header,
    read_manifest,
    read_requests,
)
from shardwise.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST,
    FileRecord,
    Manifest,
    PartRecord,
    TensorRecord,
    as_table,
    as_text,
    dtype_name,
    join,
    parse_json,
    plain,
    split,
    step_of,
    whole,
)
from shardwise.checkpoint.state import Apply, carriers_of, together
from shardwise.consistency.agreement import StoreGather, open_store_gather
from shardwise.errors import CheckpointError, DamagedCheckpointError, did_you_mean
from shardwise.observe import note

# ---- Files of other tools as a checkpoint: safetensors files with the tensors of one model, in Hugging Face's layout.

_BLOBS = "blobs"  # Hugging Face's cache has the files here that its snapshots link to
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_foreign(files: Files, path: Path) -> tuple[Path, list[str]] | None:
    """Return the folder and names of the safetensors files that ``path`` refers to; None if it is something else.

    ``path``: a file, or a folder with ``model.safetensors`` or its index.
    Raises: DamagedCheckpointError for an index that refers to files outside its folder.
    """
    path = path.resolve()  # the user may name a link
    if path.suffix == ".safetensors" or (path.is_file() and path.parent.name == _BLOBS):
        return path.parent, [path.name]
    names = files.names(path)
    if INDEX in names:
        what = str(path / INDEX)
        fields = parse_json(read_all(files, path / real_name(path, INDEX), 2**30), what)
        table = as_table(fields.get("weight_map"), f"{what}: weight_map")
        found = sorted({as_text(name, f"{what}: weight_map") for name in table.values()})
        outside = [name for name in found if "/" in name or "\\" in name or not name.endswith(".safetensors")]
        if outside:
            raise DamagedCheckpointError(f"{what}: weight_map: {outside[0][:80]!r} is not a file of this folder")
        return path, [real_name(path, name) for name in found]
    return (path, [real_name(path, SINGLE)]) if SINGLE in names else None


def real_name(folder: Path, name: str) -> str:
    """Return the file that ``name`` refers to: in a snapshot of Hugging Face's cache it is a link into ``blobs``."""
    place = folder / name
    target = os.path.normpath(folder / os.readlink(place)) if place.is_symlink() else ""
    places = [folder.parent / _BLOBS, folder.parent.parent / _BLOBS]
    is_own = Path(target).parent in places and not Path(target).parent.is_symlink()
    return os.path.relpath(target, folder) if is_own else name


def foreign_manifest(files: Files, folder: Path, names: list[str], prefix: str) -> Manifest:
    """Return the contents of these files, as tensors of the model called ``prefix``; they have no checksums.

    Raises: DamagedCheckpointError for what is not a safetensors file; CheckpointError for a tensor that two of them
    contain.
    """
    records: list[FileRecord] = []
    tensors: dict[str, TensorRecord] = {}
    for number, name in enumerate(names):
        with closing(files.open(folder / name)) as file:
            header = read_header(file.read_into, file.num_bytes, folder / name)
        records.append(FileRecord(name, file.num_bytes, BLOCK_BYTES, ()))
        for key, entry in header.entries.items():
            full = join(prefix, key)
            if full in tensors:
                raise CheckpointError(f"{folder / name}: {key!r} is in another file too")
            part = PartRecord(number, key, whole(entry.shape), entry.begin, entry.end)
            tensors[full] = TensorRecord(entry.dtype, entry.shape, (part,))
    return Manifest("0" * 32, 0, 1, tuple(records), tensors)


# ---- A state dict in a file of ``torch.save``: mapped into memory, so that a rank reads the ranges that it needs.

TORCH_FILES = (".pt", ".pth", ".bin")


def is_torch_file(path: Path) -> bool:
    """Return True if the name of ``path`` is that of a file of ``torch.save``."""
    return path.suffix in TORCH_FILES and path.is_file()


def read_torch_file(path: Path, key: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, or of the one called ``key`` in a dict of several; nothing in the file is run.

    Raises: CheckpointError for another content, DamagedCheckpointError for what ``torch.load`` cannot read.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, KeyError, UnpicklingError) as error:
        raise DamagedCheckpointError(
            f"{path}: torch.load(..., mmap=True, weights_only=True) cannot read it: {str(error)[:200]}"
        ) from error
    inner = found.get(key, found) if isinstance(found, dict) else found
    items = cast(dict[Any, Any], inner).items() if isinstance(inner, dict) else ()
    if not items or not all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in items):
        there = ", ".join(str(name) for name, _ in list(items)[:4]) or type(inner).__name__
        raise CheckpointError(
            f"{path}: expected a state dict of tensors, or a dict with one as {key!r}; found {there}. The name of the module "
            "in the state says which one to take"
        )
    return {plain(name): tensor.detach() for name, tensor in items}


def fill_requests(requests: Iterable[Request], tensors: Mapping[str, torch.Tensor]) -> int:
    """Fill the targets of ``requests`` from ``tensors``; return how many bytes were read."""
    total = 0
    for request in requests:
        source = request.window.cut(tensors[split(request.name)[-1]])
        request.target.copy_(source)
        total += source.numel() * source.element_size()
    return total


logger = logging.getLogger(__name__)

_MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of :func:`load`.

    Attributes:
        path: the checkpoint's folder.
        step: the checkpoint's; 0 for files of other tools, which have none.
        missing, unexpected: names that the checkpoint lacks, or that were not requested; empty after a strict load.
        skipped: newer checkpoints that did not verify, and their defects.
        num_bytes_read: by this rank.
    """

    path: Path
    step: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]
    num_bytes_read: int


@explains_arguments
def load(
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load the newest checkpoint of ``folder`` into ``state``, whatever API and number of ranks wrote it.

    Args:
        folder: where checkpoints are, or one checkpoint; or a model as Hugging Face has it (a folder with
            ``model.safetensors`` or its index, or one such file) or a state dict of ``torch.save``, which have no sums to
            be verified by.
        state: as for :func:`save`, or some entries of it.
        step: the checkpoint to load (default: the newest).
        strict: raise if names differ between the state and the checkpoint, in the requested entries.
        fallback: if a checkpoint does not verify, warn, and load the newest earlier one that does.
        group: as for :func:`save`.

    Each rank reads the ranges that it needs and verifies every block that it reads.  Nothing is changed before all ranks
    have read everything; memory is one copy of what a rank holds.  Collective.
    Raises: CheckpointError on every rank; DamagedCheckpointError if bytes are not those that were saved, naming file, block
    and tensor.

    Example:
        >>> step = load("run", {"model": model, "optimizer": optimizer}, fallback=True).step  # doctest: +SKIP
    """
    path = Path(folder).absolute()
    files = Files(path)
    store_gather = open_store_gather(group, f"checkpoint-load/{str(path)!a}")
    candidates = _candidates(path, step, files, store_gather)
    skipped: list[str] = []
    for place, candidate in enumerate(candidates):
        try:
            return _load_one(candidate, state, strict, tuple(skipped), store_gather)
        except DamagedCheckpointError as error:
            if not fallback or place == len(candidates) - 1:
                raise
            skipped.append(str(error))
            logger.warning("%s; going back to %s", error, candidates[place + 1])
    raise AssertionError


def _candidates(path: Path, step: int | None, files: Files, store_gather: StoreGather) -> list[Path]:
    """Return the checkpoints to try, newest first, as rank 0 sees them."""

    def look() -> list[str]:
        if store_gather.rank:
            return []
        if MANIFEST in files.names(path) or find_foreign(files, path) is not None or is_torch_file(path):
            return [str(path)]
        if path.is_file():
            raise CheckpointError(
                f"{path} is a file; name the folder of a checkpoint, or the one that checkpoints are in"
            )
        found = [each for each in list_checkpoints(files, path) if step is None or each.step <= step]
        if not found or (step is not None and found[-1].step != step):
            there = ", ".join(str(each.step) for each in list_checkpoints(files, path)) or "none"
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{path}: {wanted} is there; checkpoints of steps: {there}")
        return [str(each.path) for each in reversed(found)]

    return [Path(each) for each in together(store_gather, "load", "look", look)[0]]


def _load_one(
    path: Path, state: Mapping[str, Any], strict: bool, skipped: tuple[str, ...], store_gather: StoreGather
) -> Loaded:
    staged: list[tuple[LoadRequests, list[Apply], list[str], int]] = []

    def stage() -> str:
        """Read and verify everything that this rank needs, into new memory."""
        note("checkpoint load", str(path))
        try:
            order, read = _open(path, state)
            carriers = carriers_of(state, store_gather.rank, store_gather.size)
            applies = [carrier.ask(order) for carrier in carriers]
            unexpected = order.unexpected([carrier.prefix for carrier in carriers])
            if strict:
                _refuse_differences(order, state, unexpected)
            staged.append((order, applies, unexpected, read(order.requests)))
        except (CheckpointError, OSError) as error:
            if path.exists():
                raise
            raise CheckpointError(
                "it was removed meanwhile, as a save with keep= does: load again, or keep more"
            ) from error
        return order.manifest.save_id

    what = f"{path} was not loaded, nothing has changed"
    saves = sorted(set(together(store_gather, what, f"read of {path.name}", stage)))
    if len(saves) > 1:
        raise DamagedCheckpointError(f"{what}: ranks see different saves under this name: {', '.join(saves)}")
    ((order, applies, unexpected, num_bytes),) = staged
    failed = f"{path} was read, and putting it into place failed; the state may have changed in part"
    together(store_gather, failed, f"restore of {path.name}", lambda: [apply() for apply in applies])
    missing = (*order.missing, *order.unlike)
    if missing or unexpected:
        logger.warning("%s: missing: %s; unexpected: %s", path, _listing(missing), _listing(unexpected))
    return Loaded(path, order.manifest.step, missing, tuple(unexpected), skipped, num_bytes)


def _open(path: Path, state: Mapping[str, Any]) -> tuple[LoadRequests, Callable[[Iterable[Request]], int]]:
    """Return requests for what ``path`` contains, and a function that fills them and returns how many bytes it has read."""
    path = path.resolve()  # what the user names may be a link; what is found below may not
    if is_torch_file(path):
        key = _only_module(state)
        tensors = _without_prefix(read_torch_file(path, key), state[key])
        records = {
            join(key, name): TensorRecord(dtype_name(each.dtype, name), tuple(each.shape), ())
            for name, each in tensors.items()
        }
        return LoadRequests(Manifest("0" * 32, 0, 1, (), records)), lambda requests: fill_requests(requests, tensors)
    files = Files(path.parent)
    foreign = None if MANIFEST in files.names(path) else find_foreign(files, path)
    if foreign is not None:
        path, names = foreign
        manifest = foreign_manifest(files, path, names, _only_module(state))
    else:
        manifest = read_manifest(files, path)
        if step_of(path.name) not in (None, manifest.step):
            raise DamagedCheckpointError(f"{path / MANIFEST}: is that of step {manifest.step}")
    return LoadRequests(manifest), partial(read_requests, files, path, manifest)


def _refuse_differences(order: LoadRequests, state: Mapping[str, Any], unexpected: Sequence[str]) -> None:
    entries = order.entries()
    for key in state:
        if key not in entries and any(join(key) in name.split("/") for name in order.missing):
            raise CheckpointError(
                f"the checkpoint has no entry {key!r}.{did_you_mean(key, entries)} It has {', '.join(map(repr, entries))}. "
                "Leave the entry out of the state, or load what there is with strict=False"
            )
    if order.missing or order.unlike or unexpected:
        raise CheckpointError(
            f"the state and the checkpoint differ: missing there: {_listing(order.missing)}; unexpected: "
            f"{_listing(unexpected)}; of another shape: {_listing(order.unlike)}. Load with the model that was saved, or "
            "strict=False"
        )


def _only_module(state: Mapping[str, Any]) -> str:
    keys = [key for key, thing in state.items() if isinstance(thing, nn.Module)]
    if len(keys) != 1 or len(state) != 1:
        raise CheckpointError("files of other tools contain one model; pass a state of one module, as {'model': model}")
    return keys[0]


def _without_prefix(tensors: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return ``tensors`` by their names in ``model``: in the state dict of a DistributedDataParallel all have a prefix."""
    is_own = "module" in dict(model.named_children()) and not isinstance(model, DistributedDataParallel)
    has_prefix = not is_own and all(name.startswith("module.") for name in tensors)
    return {name.removeprefix("module."): each for name, each in tensors.items()} if has_prefix else tensors


def _listing(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
