"""Pieces of code on pages, and what is taken for the reader's own in them."""

from __future__ import annotations

import os
import re
import runpy
import shlex
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import fully_shard, set_default_transport

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Examples that need packages which `make clients` alone installs; the second ones take more than steps and width.
EXAMPLES_OF_CLIENTS = ("qlora", "with_accelerate", "with_lightning")
RECIPES_OF_CLIENTS = (
    *("stateful_loader", "with_ray", "with_trainer"),
    *("data_with_accelerate", "data_with_lightning", "data_with_trainer"),
)
PAGES_OF_CLIENTS = (ROOT / "docs" / "tutorials" / "lora.md",)  # the same for pages
NOT_RUN = re.compile(r"<!-- not run: .+ -->\n\Z")


def main_of_example(name: str) -> Callable[..., list[float]]:
    """Return what ``examples/NAME.py`` calls when it is run."""
    main: Callable[..., list[float]] = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    return main


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block of a page.

    Attributes:
        line: of its first line in the page, from 1 on.
        is_run: no comment before it, ``<!-- not run: why -->``, says otherwise.
    """

    language: str
    text: str
    line: int
    is_run: bool


def read(page: Path) -> list[Snippet]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    return [
        Snippet(found[1], found[2], text.count("\n", 0, found.start()) + 2, not NOT_RUN.search(text[: found.start()]))
        for found in FENCE.finditer(text)
    ]


def python_of(snippet: Snippet) -> str | None:
    """Return what there is to run: a block of Python, or of a diff what it leads to; None of other languages."""
    if snippet.language == "python":
        return snippet.text
    if snippet.language == "diff":
        return "".join(line[1:] for line in snippet.text.splitlines(keepends=True) if not line.startswith("-"))
    return None


def commands_of(snippet: Snippet) -> Iterator[list[str]]:
    """Yield the words after ``shardwise`` of each command line that calls it: of shell blocks, and after $ in others."""
    is_shell = snippet.language == "bash"
    for line in snippet.text.replace("\\\n", " ").splitlines() if is_shell or snippet.language == "text" else ():
        if is_shell or line.startswith("$ "):
            yield from _calls(shlex.split(line.removeprefix("$ "), comments=True))


def _calls(words: list[str]) -> Iterator[list[str]]:
    if words[:2] in (["pip", "install"], ["docker", "build"]):
        return
    if "shardwise" in words:
        yield words[words.index("shardwise") + 1 :]
        return
    for word in words:
        if " " in word:  # a command in quotes, as of bash -c
            yield from _calls(shlex.split(word))


class Block(nn.Module):
    """A block as most models have it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class MyTransformer(nn.Module):
    """Tokens (batch, positions) to logits (batch, vocabulary, positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def my_batches(num: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of inputs and targets, others on every rank."""
    data = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.randint(16, (2, 4), generator=data), torch.randint(16, (2, 4), generator=data)) for _ in range(num)]


def train() -> None:
    """Train a sharded model for five steps."""
    model = MyTransformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in my_batches():
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def inside(folder: Path) -> Generator[None, None, None]:
    """Make ``folder`` the working directory for the length of a block."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_page(page: Path, folder: Path) -> int:
    """Run the blocks of a page in one namespace, one after the other, with ``folder`` as the working directory.

    Returns: how many were run.  A traceback has the lines of the page.
    """
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "Block": Block,
        "MyTransformer": MyTransformer,
        "batches": my_batches(),
        "train": train,
        "rank": dist.get_rank(),
    }
    num_run = 0
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    try:
        with inside(folder):
            for snippet in read(page):
                code = python_of(snippet) if snippet.is_run else None
                if code is not None:
                    exec(compile("\n" * (snippet.line - 1) + code, page.name, "exec"), names)
                    num_run += 1
    finally:
        set_default_transport("auto")
    return num_run
