"""Safe reads of the folders of ``torch.distributed.checkpoint`` (DCP), whose metadata is a pickle."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardwise.checkpoint.format import MOST_SIZE
from shardwise.errors import CheckpointError
from shardwise.safe_files import MOST_BYTES, opened, read_bytes

# ---- The ``.metadata`` of a DCP folder, which is a pickle: it is scanned before it is unpickled, and checked after.

NAME = ".metadata"
_MOST_DEEP = 32  # DCP's own nests eight deep; Python hashes deep tuples on the process's stack
_DCP = "torch.distributed.checkpoint.metadata"
_STATEFUL = {
    **dict.fromkeys(
        (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
            "TensorProperties", "StorageMeta",
        ),
        _DCP,
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
}  # fmt: skip
_CLASSES = {
    **_STATEFUL,
    "_MEM_FORMAT_ENCODING": _DCP,
    "_get_layout": "torch.serialization",
    "Size": "torch",
    "OrderedDict": "collections",
}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "Path")
_MADE = "made by "  # precedes the class of an object; the text of a global is the class only
_HAVE_STATE = {f"{_MADE}{module} {name}" for name, module in _STATEFUL.items()}
_INTO = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")  # opcodes that change a value on the stack


class _Item(NamedTuple):
    """A value on a pickle's stack: its nesting depth, and its text or its class."""

    depth: int = 0
    text: str = ""


def _scan(data: bytes) -> None:
    """Refuse a pickle that nests deeply, jumps in its memo, or sets attributes on objects of classes other than DCP's.

    Raises: UnpicklingError; ValueError and IndexError for what is not a pickle.
    """
    stack: list[_Item] = []
    marks: list[int] = []
    memo: dict[int, _Item] = {}
    for code, given, _ in pickletools.genops(data):
        argument: Any = given
        if code.name == "MARK":
            marks.append(len(stack))
        elif code.name == "MEMOIZE" or code.name.endswith("PUT"):
            index = len(memo) if argument is None else int(argument)
            if index > len(memo):
                raise pickle.UnpicklingError(f"entry {index} of its memo follows entry {len(memo) - 1}")
            memo[index] = stack[-1]
        elif code.name.endswith("GET"):
            stack.append(memo[int(argument)])
        else:
            needs = [each.name for each in code.stack_before]
            begin = len(stack) - len(needs) if "mark" not in needs else marks.pop() - needs.index("mark")
            taken = stack[begin:]
            del stack[begin:]
            item = _result(code.name, argument, taken)
            if item.depth > _MOST_DEEP:
                raise pickle.UnpicklingError(f"it nests more than {_MOST_DEEP} deep")
            stack += [item] * len(code.stack_after)


def _result(name: str, argument: Any, taken: list[_Item]) -> _Item:
    if name == "BUILD" and taken[0].text not in _HAVE_STATE:
        raise pickle.UnpicklingError(f"it sets attributes of {taken[0].text or 'a value'!r}")
    if name in _INTO:
        return taken[0]._replace(depth=max(taken[0].depth, *(item.depth + 1 for item in taken[1:]), 0))
    text = argument if isinstance(argument, str) else ""
    if name == "STACK_GLOBAL":
        text = f"{taken[0].text} {taken[1].text}"
    elif name in ("NEWOBJ", "REDUCE"):
        text = f"{_MADE}{taken[0].text}"
    elif name == "DUP":
        return taken[0]
    return _Item(1 + max((item.depth for item in taken), default=-1), text)


def _check_storage(folder: Path, found: Metadata) -> None:
    sizes: dict[str, int] = {}
    for info in cast(Mapping[Any, Any], found.storage_data or {}).values():
        name = str(info.relative_path)
        if os.sep in name or name in ("", ".", ".."):
            raise CheckpointError(f"{folder / NAME}: names a file {name!r} that is not in the folder")
        if name not in sizes:
            with opened(folder, name) as fd:
                sizes[name] = os.fstat(fd).st_size
        if not 0 <= int(info.offset) <= int(info.offset) + int(info.length) <= sizes[name]:
            raise CheckpointError(
                f"{folder / name}: has {sizes[name]} bytes, .metadata names {info.length} from {info.offset} on"
            )


def _check_tensors(found: Metadata) -> None:
    """Refuse other types, and tensors with more bytes than the files."""
    held: dict[str, int] = {}
    for index, info in cast(Mapping[MetadataIndex, Any], found.storage_data or {}).items():
        compressed = 1024 if getattr(info, "transform_descriptors", None) else 1
        held[index.fqn] = held.get(index.fqn, 0) + int(info.length) * compressed
    for key, kind in cast(Mapping[Any, Any], found.state_dict_metadata).items():
        if isinstance(key, str) and isinstance(kind, BytesStorageMetadata):
            continue
        is_tensor = isinstance(key, str) and isinstance(kind, TensorStorageMetadata)
        if not is_tensor or not isinstance(kind.properties.dtype, torch.dtype):
            raise CheckpointError(f"{NAME}: {str(key)[:80]!r} is a {type(kind).__name__}, expected a tensor or bytes")
        sizes = [*kind.size]
        for chunk in cast(list[ChunkStorageMetadata], kind.chunks):
            sizes += [*chunk.offsets, *chunk.sizes]
        if any(type(size) is not int or not 0 <= size <= MOST_SIZE for size in sizes):
            raise CheckpointError(f"{NAME}: {key[:80]!r} has sizes {str(sizes)[:80]}, expected whole numbers")
        if prod(max(size, 1) for size in kind.size) > MOST_SIZE or (
            prod(kind.size) * kind.properties.dtype.itemsize > held.get(key, 0)
        ):
            raise CheckpointError(
                f"{NAME}: {key[:80]!r} has sizes {str(list(kind.size))[:80]}, and {held.get(key, 0)} bytes in files"
            )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if _CLASSES.get(name) == module:
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return Path
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP's metadata does not")


class TorchDcpReader(FileSystemReader):
    """Read torch's own DCP folders without executing anything in them: metadata may refer to DCP's classes only.

    Example:
        >>> dcp.load(state, storage_reader=TorchDcpReader("old/step-100"))  # doctest: +SKIP
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata.  Nothing in it is executed; memory is a small multiple of its files.

        Raises: CheckpointError if it is anything but what DCP writes, or refers to files outside the folder.
        """
        folder = Path(self.path)
        try:
            data = read_bytes(folder, NAME, MOST_BYTES)
            _scan(data)
            found = _MetadataUnpickler(io.BytesIO(data)).load()
            if not isinstance(found, Metadata):
                raise CheckpointError(f"{folder / NAME}: holds a {type(found).__name__}, expected DCP's Metadata")
            _check_storage(folder, found)
            _check_tensors(found)
        except CheckpointError:
            raise
        except Exception as error:  # an unpickler can raise anything
            raise CheckpointError(f"{folder / NAME}: not the metadata of a DCP checkpoint: {error}") from error
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan requests; objects other than tensors may only be plain values."""
        return super().read_data(plan, cast(LoadPlanner, _PlainValues(planner)))


class _PlainValues:
    """A planner whose bytes are checked first: DCP's own unpickles whatever they contain."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{read_item.storage_index.fqn}: contains more than plain values: {error}") from error
        buffer = io.BytesIO()
        torch.save(found, buffer)
        buffer.seek(0)
        self._planner.load_bytes(read_item, buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)
