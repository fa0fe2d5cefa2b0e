"""What an optimizer is asked."""

from __future__ import annotations

from dataclasses import dataclass

from fuzz.actions.page import Action, Page


@dataclass(frozen=True, slots=True)
class Step(Action):
    """A step of the optimizer; with a ``closure`` it computes the gradients itself."""

    closure: bool = False

    def write(self, page: Page) -> None:
        number = page.number()
        if self.closure:
            page.write(
                f"def closure{number}():",
                "    s.zero_grad()",
                f"    loss = s.loss(s.model(s.batch({number})))",
                "    s.backward(loss)",
                "    return loss",
                f"loss{number} = s.step(closure{number})",
            )
            page.mark(f"step {number} with closure", f"loss{number}")
        else:
            page.write("s.step()")
            page.mark(f"step {number}")


@dataclass(frozen=True, slots=True)
class ZeroGrad(Action):
    """Drop gradients or make them zero, by the optimizer or by the model."""

    to_none: bool = True
    by_model: bool = False

    def write(self, page: Page) -> None:
        page.write(f"s.zero_{'model' if self.by_model else 'grad'}({'' if self.to_none else 'set_to_none=False'})")
        page.mark("zero_grad")


@dataclass(frozen=True, slots=True)
class Clip(Action):
    """Clip gradients by their norm (``max_norm``; ``how``: "norm", "inf") or by value ("value")."""

    how: str = "norm"
    bound: float = 1.0

    def write(self, page: Page) -> None:
        number = page.number()
        page.write(f"norm{number} = s.clip({self.how!r}, {self.bound!r})")
        page.mark(f"clip {number}", f"norm{number}")


@dataclass(frozen=True, slots=True)
class Rate(Action):
    """Change an option of all groups that have it: by hand, or the learning rate by a scheduler, which halves it."""

    factor: float = 0.5
    option: str = "lr"
    scheduled: bool = False

    def write(self, page: Page) -> None:
        if self.scheduled:
            page.write("s.schedule()")
            return
        page.write("for group in s.optimizer.param_groups:")
        page.write(f"    if group.get({self.option!r}):", f"        group[{self.option!r}] *= {self.factor!r}")


@dataclass(frozen=True, slots=True)
class AddGroup(Action):
    """Give the optimizer the parameters that no group has, with ``rate`` times the learning rate of the first group."""

    rate: float = 2.0

    def write(self, page: Page) -> None:
        page.write("s.reshard_all()", f"s.add_group({self.rate!r})")  # full parameters may not be stepped


@dataclass(frozen=True, slots=True)
class Remake(Action):
    """Make a new optimizer over the parameters as they are registered now."""

    def write(self, page: Page) -> None:
        page.write("s.reshard_all()", "s.remake_optimizer()")  # one of full parameters may not step
