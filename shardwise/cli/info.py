"""``shardwise info``: the capabilities of this host and installation, as plain text for a bug report, or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.cuda.nccl import version as nccl_version

from shardwise import __version__
from shardwise.checks.root import CHECKS, mode_of
from shardwise.collectives.host.local_peers import HEADER_BYTES, Segment, can_share_memory
from shardwise.formatting import format_bytes
from shardwise.loop.launch import private_network
from shardwise.one_host import UNKNOWN, cpu_model, find_version, host_memory_bytes, usable_cores

# ---- What this host and this installation offer to shardwise, and why not more: checked, never guessed.

PACKAGES = (
    "numpy", "safetensors", "xxhash", "rich", "tensorboard", "tokenizers", "datasets", "pyarrow",
    "transformers", "accelerate", "lightning",
)  # fmt: skip
VARIABLES = (
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS",
    "GLOO_DEVICE_TRANSPORT",
)  # fmt: skip
_BACKENDS: Mapping[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
}
_OPEN_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class HostFeature:
    """A capability of a host: ``why_not``: why it is missing, "" if it exists; ``detail``: more about it."""

    detail: str = ""
    why_not: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"no{detail}: {self.why_not}" if self.why_not else f"yes{detail}"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything that ``shardwise info`` prints, in order; nothing in it names the host or its user."""

    software: Mapping[str, str]
    backends: Mapping[str, HostFeature]
    devices: tuple[str, ...]
    cores: Mapping[str, str]
    transports: Mapping[str, HostFeature]
    packages: Mapping[str, str]
    environment: Mapping[str, str]


def look_at_host(environment: Mapping[str, str]) -> HostFacts:
    """Return the facts.  Takes about a second on a host with GPUs, which are initialized; starts one small process."""
    return HostFacts(
        software=_software(),
        backends={name: _backend(is_built) for name, is_built in _BACKENDS.items()},
        devices=tuple(map(_gpu, range(torch.cuda.device_count()))),
        cores=_cores(),
        transports=_transports() | _protections(),
        packages={name: find_version(name).replace(UNKNOWN, "not installed") for name in PACKAGES},
        environment={CHECKS: mode_of(environment)}
        | {name: environment[name] for name in VARIABLES if name in environment},
    )


def _software() -> dict[str, str]:
    cuda = torch.version.cuda or torch.version.hip
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")
    return {
        "shardwise": __version__,
        "torch": f"{torch.__version__} ({f'for GPUs, {cuda}' if cuda else 'a build without GPUs'})",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": " ".join((platform.system(), platform.release(), platform.machine(), *platform.libc_ver())).strip(),
        "compiler": compiler or "none found: torch.compile needs one on CPU",
    }


def _backend(is_built: Callable[[], bool]) -> HostFeature:
    if not dist.is_available():
        return HostFeature(why_not="this build of torch has no torch.distributed")
    if not is_built():
        return HostFeature(why_not="not in this build of torch")
    if is_built is dist.is_nccl_available:
        version = ".".join(map(str, nccl_version()))
        return HostFeature(version, "" if torch.cuda.is_available() else "torch finds no GPU")
    return HostFeature()


def _gpu(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {found.name}, {format_bytes(found.total_memory)}, capability {found.major}.{found.minor}"


def _cores() -> dict[str, str]:
    memory = host_memory_bytes()
    return {
        "processor": cpu_model(),
        "cores": f"{usable_cores()} usable by this process, {os.cpu_count()} in all",
        "threads": f"{torch.get_num_threads()} in torch",
        "memory": "not told by this system" if memory is None else f"{format_bytes(memory)} for all processes together",
    }


def _transports() -> dict[str, HostFeature]:
    gloo = _why_no_gloo()
    nccl = _backend(dist.is_nccl_available)
    shared = why_no_shared_memory()
    return {
        "shared memory": HostFeature("CPU ranks of one host; --transport auto", shared or gloo),
        "messages": HostFeature("CPU ranks, over gloo; --transport gloo", gloo),
        "gloo collectives": HostFeature("CPU ranks; --transport collective", gloo),
        "NCCL collectives": HostFeature("GPU ranks", nccl.why_not),
    }


def _protections() -> dict[str, HostFeature]:
    with private_network(True) as network:
        why_not = (
            "" if network else "the kernel does not let this user create one; owners of connections are still checked"
        )
    return {"a network of their own": HostFeature("CPU ranks of shardwise train on one host", why_not)}


def _why_no_gloo() -> str:
    offer = _backend(dist.is_gloo_available)
    if offer.why_not:
        return f"gloo: {offer.why_not}"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return f"nothing can listen on the loopback interface: {error.strerror or error}"
    return ""


def why_no_shared_memory() -> str:
    """Return "" if another process of this user can open memory of this one, as ranks of one host do, else the reason."""
    problem = can_share_memory()
    if problem:
        return problem
    try:
        segment = Segment.create(HEADER_BYTES)
    except (OSError, AttributeError) as error:
        return f"no nameless file in memory: {error}"
    place = f"/proc/{segment.address.pid}/fd/{segment.address.fd}"
    words = [sys.executable, "-IS", "-c", f"import os; os.open({place!r}, os.O_RDWR)"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_OPEN_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no second process could try it: {error}"
    last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return f"another process cannot open it: {last}" if done.returncode else ""


# ---- The options of ``shardwise info``.


def add_info_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add ``info``."""
    parser = commands.add_parser(
        "info",
        help="say what this host and installation offer",
        description="Print versions, backends, devices, cores, and which transports work here and why others do not. "
        "Nothing in it names the host or its user: paste it into a report of a bug.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_info(arguments: argparse.Namespace) -> int:
    """Print the facts; return 0."""
    facts = look_at_host(os.environ)
    print(json.dumps(asdict(facts), indent=2) if arguments.json else "\n".join(in_lines(facts)))
    return 0


def in_lines(facts: HostFacts) -> Iterator[str]:
    """Yield the facts as lines of text, with a heading for each kind."""
    yield from _named(facts.software)
    yield from _section("backends", facts.backends)
    devices = {f"GPU {number}": text for number, text in enumerate(facts.devices)}
    yield from _section("devices", {**facts.cores, **(devices or {"GPUs": "none that torch can use"})})
    yield from _section("transports", facts.transports)
    yield from _section("packages", facts.packages)
    yield from _section("environment", facts.environment or {"(none)": "no variable is set that changes how ranks run"})


def _section(heading: str, values: Mapping[str, object]) -> Iterator[str]:
    yield f"\n{heading}"
    for line in _named(values):
        yield f"  {line}"


def _named(values: Mapping[str, object]) -> Iterator[str]:
    width = max(map(len, values))
    for name, value in values.items():
        yield f"{name.ljust(width)}  {value}"
