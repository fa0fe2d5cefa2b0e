"""Ways in which a checkpoint comes to harm, each at every class of place."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

PAGE = 4096
KINDS = ("flip", "flip", "zero", "truncate", "append", "delete", "duplicate", "swap")


def damage(checkpoint: Path, other: Path, seed: int) -> str:
    """Harm ``checkpoint``; ``other`` is one of another step.  Return what was done: the bytes are others after it."""
    chance = random.Random(seed)
    while True:
        path = chance.choice(sorted(checkpoint.iterdir()))
        kind = KINDS[seed % len(KINDS)]
        before = path.read_bytes()
        what = _harm(path, kind, before, other, chance)
        if not path.exists() or path.read_bytes() != before:
            return f"{seed}: {what}"


def _harm(path: Path, kind: str, before: bytes, other: Path, chance: random.Random) -> str:
    data = bytearray(before)
    if kind == "flip":
        place = _place(path, before, chance)
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        return f"{path.name}: one bit of byte {place} of {len(data)}"
    if kind == "zero":
        start = chance.randrange(0, len(data), PAGE)
        data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
        path.write_bytes(data)
        return f"{path.name}: zeros from byte {start}"
    if kind == "truncate":
        count = chance.choice((0, len(data) - 1, chance.randrange(len(data))))
        path.write_bytes(data[:count])
        return f"{path.name}: cut to {count} bytes"
    if kind == "append":
        path.write_bytes(before + chance.choice((b"\0", b"}", before)))
        return f"{path.name}: longer"
    if kind == "delete":
        path.unlink()
        return f"{path.name}: deleted"
    if kind == "duplicate":
        source = chance.choice(sorted(path.parent.iterdir()))
        shutil.copyfile(source, path) if source != path else None
        return f"{path.name}: a copy of {source.name}"
    source = other / path.name
    if source.exists():
        shutil.copyfile(source, path)
    return f"{path.name}: that of {other.name}"


def _place(path: Path, data: bytes, chance: random.Random) -> int:
    """Return an offset, each class of places as likely as another: length, header, its end, tensors, manifest, its sum."""
    size = len(data)
    if path.suffix == ".json":
        return chance.choice((chance.randrange(size), chance.randrange(size - 40, size), size - 1, 0))
    header = 8 + int.from_bytes(data[:8], "little")
    return chance.choice(
        (chance.randrange(8), chance.randrange(8, header), header - 1, chance.randrange(header, size), size - 1)
    )
