"""Messages between ranks that are threads of this process, as gloo sends them: taken in order, and only by who receives."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import torch


class Message:
    """One side of a message; ``wait`` returns when the other has come."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.done = threading.Event()

    def wait(self) -> None:
        assert self.done.wait(20.0), "nobody is at the other end"


class Wires:
    """What the groups of all ranks are connected by."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent: dict[tuple[int, int, int], deque[Message]] = defaultdict(deque)
        self.wanted: dict[tuple[int, int, int], deque[Message]] = defaultdict(deque)
        self.num_bytes: dict[int, int] = defaultdict(int)  # by tag

    def put(self, way: tuple[int, int, int], message: Message, is_sent: bool) -> Message:
        with self.lock:
            (self.sent if is_sent else self.wanted)[way].append(message)
            if is_sent:
                self.num_bytes[way[2]] += message.tensor.nbytes
            while self.sent[way] and self.wanted[way]:
                source, target = self.sent[way].popleft(), self.wanted[way].popleft()
                target.tensor.copy_(source.tensor)  # of another size: another message, which is a bug
                source.done.set()
                target.done.set()
        return message


class FakeGroup:
    """What links ask of a process group."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self._wires, self._rank, self._size = wires, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        return self._wires.put((self._rank, peer, tag), Message(tensors[0]), is_sent=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        return self._wires.put((peer, self._rank, tag), Message(tensors[0]), is_sent=False)
