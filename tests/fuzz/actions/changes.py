"""Parameters, changed from outside."""

from __future__ import annotations

from dataclasses import dataclass

from fuzz.actions.page import Action, Page

CHANGES: dict[str, tuple[str, ...]] = {
    "add": ("with torch.no_grad():", "    {p}.add_(1)"),
    "zero": ("with torch.no_grad():", "    {p}.zero_()"),
    "copy": ("with torch.no_grad():", "    {p}.copy_(1 - {p})"),
    "data_add": ("{p}.data.add_(1)",),
    "data_copy": ("{p}.data.copy_(1 - {p}.data)",),
    "data_set": ("{p}.data = {p}.data + 1",),
    "detach": ("{p}.detach().neg_()",),
    "local": ("s.local({p}).detach().sub_(1)",),
    "fill": ("torch.nn.init.constant_({p}, 2)",),
    "state": ("s.net.state_dict()[{name}].add_(1)",),
    "load": ("s.net.load_state_dict(s.changed(s.net.state_dict()))",),
    "assign": ("s.assign(s.changed(s.net.state_dict()))", "s.remake_optimizer()"),
    "lay": ("s.assign(s.laid_otherwise(s.net.state_dict()))", "s.remake_optimizer()"),
    "convert": ("s.net.to(torch.float64)", "s.net.to(s.dtype)"),
    "empty": (
        "values = {name: tensor.clone() for name, tensor in s.net.state_dict().items()}",
        "s.zero_grad()",
        "s.net.to_empty(device=s.device)",
        "s.net.load_state_dict(values)",
    ),
}
WHOLE_MODEL = ("load", "assign", "lay", "convert", "empty")


@dataclass(frozen=True, slots=True)
class Change(Action):
    """Change one parameter, or all, behind the back of everybody: ``how`` is a key of :data:`CHANGES`."""

    how: str = "add"
    param: int = 0

    def write(self, page: Page) -> None:
        name = repr(page.param(self.param))
        page.write("s.reshard_all()")  # what is unsharded refuses writes
        page.write(
            *(line.replace("{p}", f"s.param({name})").replace("[{name}]", f"[{name}]") for line in CHANGES[self.how])
        )
        page.mark(f"change {self.how}")


@dataclass(frozen=True, slots=True)
class ChangeKept(Action):
    """Change a parameter through an alias that was taken before."""

    param: int = 0
    alias: int = 0

    def write(self, page: Page) -> None:
        if page.kept:
            alias = page.kept[self.alias % len(page.kept)]
            page.write("s.reshard_all()")
            page.write("with torch.no_grad():", f"    s.kept[{alias!r}][{page.param(self.param)!r}].add_(1)")
            page.mark(f"change through {alias}")


@dataclass(frozen=True, slots=True)
class Freeze(Action):
    """Freeze or thaw one parameter, or all parameters of a unit."""

    index: int = 0
    on: bool = True
    whole_unit: bool = False

    def write(self, page: Page) -> None:
        target = f"s.param({page.param(self.index)!r})"
        if self.whole_unit:
            path = page.units[self.index % len(page.units)]
            target = f"s.net.get_submodule({path!r})" if path else "s.net"
        page.write(f"{target}.requires_grad_({not self.on})")
