"""Mutated files for everything that reads a folder, in a process of its own.

Each mutation must be read as it is or end in a named error; memory is limited, and what hangs or crashes ends this process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import finish, load, save
from shardwise.checkpoint.convert import convert, export_model
from shardwise.checkpoint.format import LENGTH_BYTES, sum_of
from shardwise.cli.main import main as command
from shardwise.consistency.recorder import diagnose, in_words, read_record
from shardwise.errors import ShardwiseError
from shardwise.recipes.data import read_facts
from shardwise.recipes.run_folder import Start, check_start, read_metrics, read_progress, read_run_config

_SPARE_BYTES = 2**30
_DEEP: list[Any] = []
for _ in range(200):
    _DEEP = [_DEEP]
_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**48, 2**63, 10**40, 1e308, -0.5, "", "x", "../../x", "\x1b[2J", [], {}, [[]], {"$": "dict"},
    {"$": "tuple", "v": 3}, {"$": "number", "dtype": "F32", "shape": [2**60], "v": ""}, _DEEP, {"a": _DEEP},
]  # fmt: skip
_OPCODES = [
    b"r\xff\xff\xff\x7f", b"\x85" * 300, b"}b", b"(" * 50, b"\x96\xff\xff\xff\xff\xff\x00\x00\x00", b"\x94", b"h\x05", b"0",
    b"cos\nsystem\n", b"R", b"\x81", b"ctorch.distributed.checkpoint.metadata\nMetadata\n}b",
]  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def change_json(draw: random.Random, data: bytes) -> bytes:
    """Return JSON with one value in it changed, or gone."""
    body = json.loads(data)
    holder, key = draw.choice(list(_places(body)))
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(_VALUES)
    return json.dumps(body).encode()


def change_bytes(draw: random.Random, data: bytes) -> bytes:
    """Return other bytes: some flipped, cut off, doubled, or with something put between."""
    begin, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    end = min(end, begin + draw.choice([1, 4, 64, 4096]))
    return draw.choice(
        [
            data[:begin] + draw.randbytes(end - begin) + data[end:],
            data[:begin],
            data[:begin] + data[end:],
            data[:end] + data[begin:],
            data[:begin] + draw.choice(_OPCODES) + data[begin:],
            data + bytes(64),
        ]
    )


def change_lines(draw: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    index = draw.randrange(len(lines))
    lines[index] = change_json(draw, lines[index]) + b"\n"
    return b"".join(lines)


def change_manifest(draw: random.Random, data: bytes) -> bytes:
    """Return a manifest whose own sum is right."""
    body = json.loads(data)
    body.pop("sum")
    changed = change_json(draw, json.dumps(body).encode())[:-1]
    return changed + b',"sum":"' + sum_of(changed).encode() + b'"}\n'


def change_header(draw: random.Random, data: bytes) -> bytes:
    """Return a safetensors file with another header, whose length is right."""
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    header = change_json(draw, data[LENGTH_BYTES:end])
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + data[end:]


def _state() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra": {"a": [1, (2.5, None)], "b": {3: b"x"}}}


def _loaded(place: Path) -> None:
    load(place, _state(), strict=False)


def _loaded_model(place: Path) -> None:
    load(place, {"model": torch.nn.Linear(2, 2)}, strict=False)


def _commands(place: Path) -> None:
    for words in (["show", str(place), "--sums"], ["verify", str(place)], ["diff", str(place), str(place)]):
        command(["checkpoint", *words])


def _exported(place: Path) -> None:
    with tempfile.TemporaryDirectory() as to:
        export_model(place, to)


def _converted(place: Path) -> None:
    with tempfile.TemporaryDirectory() as to:
        convert(place, to, step=1)


def _resumed(run: Path) -> None:
    check_start(Start(resume=run), read_run_config(run))


def _told(run: Path) -> None:
    record = read_record(run / "black_box" / "rank-00000.jsonl")
    list(in_words(diagnose([record] if record else [])))


def cases(
    run: Path, dcp: Path
) -> list[tuple[Path, Callable[[random.Random, bytes], bytes], Callable[[Path], object], Path]]:
    """Return files, how each is changed, and what reads them, from which folder."""
    step = sorted((run / "checkpoints").glob("step-*"))[-1]
    part = next(step.glob("part-*"))
    data = next(dcp.glob("*.distcp"))
    single = run / "exported" / "model.safetensors"
    saved = save(run / "saved", _state(), step=1)
    finish(run / "saved")
    assert saved is not None
    found: list[Any] = [
        (saved / "manifest.json", change_manifest, _loaded, saved),
        (saved / "manifest.json", change_manifest, _exported, saved),
        (run / "config.json", change_json, _resumed, run),
        (run / "metrics.jsonl", change_lines, lambda at: read_metrics(at / "metrics.jsonl"), run),
        (run / "text" / "facts.json", change_json, read_facts, run / "text"),
        (run / "black_box" / "rank-00000.jsonl", change_lines, _told, run),
        (dcp / ".metadata", change_bytes, _converted, dcp),
        (data, change_bytes, _converted, dcp),
        (single, change_header, _loaded_model, single.parent),
        (single, change_bytes, _loaded_model, single.parent),
    ]
    for read in (read_progress, _commands, _exported):
        found += [(step / "manifest.json", change_manifest, read, step), (part, change_header, read, step)]
        found.append((step / "manifest.json", change_bytes, read, step))
    return found


def main(count: int, seed: int, run: Path, dcp: Path) -> int:
    """Return 0 if every mutation was read or refused by name; else print each that was not, once."""
    draw, ends, wrong = random.Random(seed), Counter[str](), dict[str, str]()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    table = cases(run, dcp)
    for number in range(count):
        file, change, read, place = table[number % len(table)]
        before = file.read_bytes()
        try:
            file.write_bytes(change(draw, before))
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                read(place)
            ends["read"] += 1
            if "\x1b" in out.getvalue():
                wrong["an escape reached the screen"] = f"{number}: {file.name}"
        except (ShardwiseError, FileNotFoundError, FileExistsError) as error:
            ends[type(error).__name__] += 1
        except BaseException as error:
            frames = error.__traceback__
            while frames is not None and frames.tb_next is not None:
                frames = frames.tb_next
            where = f"{frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}" if frames else ""
            wrong.setdefault(f"{file.name} {type(error).__name__} {where}", f"mutation {number}: {str(error)[:200]}")
        finally:
            file.write_bytes(before)
        for left in place.glob(".saving-*"):
            shutil.rmtree(left)
    print(dict(ends))
    for name, text in wrong.items():
        print(f"WRONG {name}: {text}")
    return len(wrong)
