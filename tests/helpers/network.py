"""Which sockets listen, and a second network that a process can be looked at from."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

ADDRESS = "10.99.0.1"  # of the first network, as the second one sees it
_OTHER = "10.99.0.2"
_NOBODY = "02:00:00:00:00:99"  # no card has this address
_LISTENS = "0A"
_MAKE_TWO = f"""
set -e
ip link set lo up
ip link add inside type veth peer name outside
unshare --net sleep 300 & other=$!
for _ in $(seq 100); do [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ] && sleep 0.05 || break; done
ip link set outside netns $other
ip address add {ADDRESS}/24 dev inside
ip link set inside up
nsenter --target $other --net sh -c 'ip address add {_OTHER}/24 dev outside; ip link set outside up; ip link set lo up'
echo $other
read end || true
kill $other
"""
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
except ConnectionRefusedError:
    print("refused")
else:
    print("open")
"""
_LISTEN = "import socket; server = socket.create_server(('', 0)); print(server.getsockname()[1], flush=True); input()"


@dataclass(frozen=True)
class Listener:
    """A socket of process ``pid`` that waits for connections."""

    pid: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Return the TCP sockets that these processes listen on, by the kernel's tables of their networks."""
    found: list[Listener] = []
    for pid in pids:
        own = _sockets(pid)
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in own:
                    address, port = fields[1].split(":")
                    found.append(Listener(pid, _address(address), int(port, 16)))
    return found


def _sockets(pid: int) -> set[str]:
    links: set[str] = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.add(os.readlink(fd))
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read words of four bytes in the order of this machine, as the kernel writes them."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


@dataclass(frozen=True)
class Networks:
    """Two networks with a cable between them, each named by a process in it."""

    inside: int
    outside: int

    @staticmethod
    def enter(pid: int) -> list[str]:
        """Return the words that start a command in the network of ``pid``."""
        return ["nsenter", "--target", str(pid), "--user", "--preserve-credentials", "--net"]

    def cut_cable(self) -> None:
        """Let what each network sends to the other go nowhere, as behind a cable that is cut; connections within one last."""
        for pid, device, other in ((self.inside, "inside", _OTHER), (self.outside, "outside", ADDRESS)):
            words = ["ip", "neighbour", "replace", other, "lladdr", _NOBODY, "nud", "permanent", "dev", device]
            subprocess.run([*self.enter(pid), *words], check=True)

    def connect(self, port: int) -> str:
        """Return "open" or "refused": what a process of the second network finds at ``port`` of the first."""
        words = [*self.enter(self.outside), sys.executable, "-c", _CONNECT, ADDRESS, str(port)]
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    @contextlib.contextmanager
    def open_port(self) -> Generator[int, None, None]:
        """Listen on every interface of the first network."""
        words = [*self.enter(self.inside), sys.executable, "-c", _LISTEN]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            yield int(server.stdout.readline())
            server.communicate("\n")


@contextlib.contextmanager
def two_networks() -> Generator[Networks | None, None, None]:
    """Give two networks of their own, None where this user may not make them."""
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", _MAKE_TWO]
    try:
        holder = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except FileNotFoundError:  # no unshare on this system
        yield None
        return
    with holder:
        assert holder.stdout is not None
        other = holder.stdout.readline().strip()
        yield Networks(holder.pid, int(other)) if other else None
        holder.communicate("\n")
