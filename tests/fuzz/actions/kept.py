"""Tensors that users keep, copy, save and load."""

from __future__ import annotations

from dataclasses import dataclass

from fuzz.actions.page import Action, Page

TAKES: dict[str, str] = {
    "state_dict": "s.net.state_dict()",
    "params": "dict(s.net.named_parameters())",
    "data": "{name: param.data for name, param in s.net.named_parameters()}",
    "detach": "{name: param.detach() for name, param in s.net.named_parameters()}",
    "local": "s.locals()",
    "grads": "s.gradients()",
    "optim": "s.optimizer_tensors()",
}
COPIES: dict[str, str] = {
    "deepcopy": "copy.deepcopy({it})",
    "pickle": "pickle.loads(pickle.dumps({it}))",
    "save": "s.saved_and_loaded({it})",
}


@dataclass(frozen=True, slots=True)
class Take(Action):
    """Keep tensors that share memory with parameters, gradients or optimizer state; compared at every later moment."""

    what: str = "state_dict"

    def write(self, page: Page) -> None:
        name = f"{self.what}{page.number()}"
        if self.what in ("params", "data", "detach"):
            page.write("s.reshard_all()")  # what is unsharded has no ``.data``, and aliases of it do not last
        page.write(f"s.kept[{name!r}] = {TAKES[self.what]}")
        if self.what not in ("grads", "optim", "local"):
            page.kept.append(name)
        page.mark(f"take {name}")


@dataclass(frozen=True, slots=True)
class Copy(Action):
    """Copy tensors; what came out is kept too, and must not change any more."""

    what: str = "state_dict"
    how: str = "deepcopy"

    def write(self, page: Page) -> None:
        name = f"copy{page.number()}"
        if self.what in ("params", "data", "detach"):
            page.write("s.reshard_all()")
        page.write(f"s.kept[{name!r}] = {COPIES[self.how].format(it=TAKES[self.what])}")
        page.mark(f"{self.how} of {self.what}")


@dataclass(frozen=True, slots=True)
class Weigh(Action):
    """Check that shards look like any tensors: offset 0, a storage of exactly their own bytes."""

    what: str = "state_dict"

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        page.write(f"s.weigh({TAKES[self.what]})")


@dataclass(frozen=True, slots=True)
class CopyModel(Action):
    """Go on with a deep copy of the model and a new optimizer; the old ones stay alive if ``keeps_old``."""

    keeps_old: bool = False

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        number = page.number()
        if self.keeps_old:
            page.write(f"old{number} = s.model")
        page.write("s.adopt(copy.deepcopy(s.model))")
        page.losses.clear()
        page.handles.clear()
        page.mark(f"copy of the model {number}")


@dataclass(frozen=True, slots=True)
class Save(Action):
    """Remember model and optimizer as a checkpoint would."""

    def write(self, page: Page) -> None:
        page.write("saved = s.save()")


@dataclass(frozen=True, slots=True)
class Load(Action):
    """Go back to what the last :class:`Save` remembered."""

    def write(self, page: Page) -> None:
        if "saved = s.save()" in page.lines:
            page.write("s.load(saved)")
            page.mark("load")


@dataclass(frozen=True, slots=True)
class RoundTrip(Action):
    """Save and load with ``shardwise.checkpoint``: all is as before.  ``buffers``: its argument of that name; "" for none."""

    buffers: str = ""

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        page.write(f"s.round_trip({self.buffers!r})")
        page.mark("load of what was saved")


@dataclass(frozen=True, slots=True)
class Restart(Action):
    """Save everything, end all ranks, and go on with ``num_ranks`` of them behind another API.

    Attributes:
        how: "full" (whole tensors through a file) or "dcp" (``torch.distributed.checkpoint``).
        API, update: of the contender that goes on; "" for the same.
    """

    num_ranks: int = 1
    how: str = "full"
    api: str = ""
    update: str = ""

    def write(self, page: Page) -> None:
        """Write nothing: programs end and begin here."""
