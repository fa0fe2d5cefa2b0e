"""Methods of the engine's APIs."""

from __future__ import annotations

from dataclasses import dataclass

from fuzz.actions.page import Action, Page


@dataclass(frozen=True, slots=True)
class Set(Action):
    """Call a ``set_*`` method of a unit's module.

    Attributes:
        method: without "set_".  value: what it is given; a number for a divide factor.
        recurse: passed on where the method has that argument.
    """

    method: str = "requires_gradient_sync"
    value: float = 0
    unit: int = -1
    recurse: bool = True

    @property
    def is_engines(self) -> bool:
        return not (self.method == "requires_gradient_sync" and self.recurse and self.unit == -1)

    def write(self, page: Page) -> None:
        has_recurse = self.method not in ("is_last_backward", "unshard_in_backward", "gradient_divide_factor")
        value = repr(self.value) if self.method == "gradient_divide_factor" else repr(bool(self.value))
        page.write(
            f"{page.unit(self.unit)}.set_{self.method}({value}{'' if self.recurse or not has_recurse else ', recurse=False'})"
        )


@dataclass(frozen=True, slots=True)
class Hook(Action):
    """Let a hook multiply the reduced gradients of a unit by ``factor``; ``streamed``: on a stream of its own."""

    unit: int = 0
    factor: float = -1.0
    streamed: bool = True

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        path = page.units[self.unit % len(page.units)]
        page.write(f"s.hook_reductions({path!r}, {self.factor!r}, streamed={self.streamed!r})")


@dataclass(frozen=True, slots=True)
class HookGradient(Action):
    """Let a hook of a user's multiply the gradient of one parameter by ``factor``.

    Attributes:
        follows: it runs after the gradient has been accumulated, and changes ``.grad``; else before.
    """

    param: int = 0
    factor: float = -1.0
    follows: bool = False

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        page.write(f"s.hook_gradient({page.param(self.param)!r}, {self.factor!r}, follows={self.follows!r})")


@dataclass(frozen=True, slots=True)
class HookModule(Action):
    """Register a hook of a user's on the first module of a unit; ``form``: see ``zoo.hook_module``."""

    unit: int = 0
    form: str = "forward"

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        path = page.units[self.unit % len(page.units)]
        page.write(f"s.hook_module({path!r}, {self.form!r})")


@dataclass(frozen=True, slots=True)
class GatherAhead(Action):
    """Say within how many bytes units are gathered ahead."""

    num_bytes: int = 0

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        page.write(f"s.gather_ahead({self.num_bytes!r})")


@dataclass(frozen=True, slots=True)
class Unshard(Action):
    """Unshard a unit by hand; ``waits``: now, or with the next :class:`Wait`."""

    unit: int = 0
    waits: bool = True

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        if self.waits:
            page.write(f"{page.unit(self.unit)}.unshard()")
            return
        name = f"handle{page.number()}"
        page.handles.append(name)
        page.write(f"{name} = {page.unit(self.unit)}.unshard(async_op=True)")


@dataclass(frozen=True, slots=True)
class Wait(Action):
    """Wait for unshards that were launched by hand."""

    def write(self, page: Page) -> None:
        for name in page.handles:
            page.write(f"if {name} is not None:", f"    {name}.wait()")
        page.handles.clear()


@dataclass(frozen=True, slots=True)
class Reshard(Action):
    """Reshard a unit by hand."""

    unit: int = 0

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        page.write(f"{page.unit(self.unit)}.reshard()")


@dataclass(frozen=True, slots=True)
class Prefetch(Action):
    """Name the units that are to be unshard ahead of one in forward or backward."""

    unit: int = 0
    targets: tuple[int, ...] = ()
    backward: bool = False

    @property
    def is_engines(self) -> bool:
        return True

    def write(self, page: Page) -> None:
        targets = ", ".join(dict.fromkeys(page.unit(target) for target in self.targets))
        which = "backward" if self.backward else "forward"
        page.write(f"{page.unit(self.unit)}.set_modules_to_{which}_prefetch([{targets}])")
