"""What a program does, one frozen value per action, and how each is written down as Python.

The text is what every contender runs: ``s`` is its side of the comparison (:mod:`fuzz.sides`), each
``yield`` is a moment at which all that can be seen is recorded and compared.
"""

from __future__ import annotations

from fuzz.actions.changes import CHANGES, WHOLE_MODEL, Change, ChangeKept, Freeze
from fuzz.actions.kept import (
    COPIES,
    TAKES,
    Copy,
    CopyModel,
    Load,
    Restart,
    RoundTrip,
    Save,
    Take,
    Weigh,
)
from fuzz.actions.methods import (
    GatherAhead,
    Hook,
    HookGradient,
    HookModule,
    Prefetch,
    Reshard,
    Set,
    Unshard,
    Wait,
)
from fuzz.actions.page import Action, Page
from fuzz.actions.passes import (
    Backward,
    Blow,
    CallUnit,
    Forward,
    Grow,
    InputGradient,
    JoinLoop,
    LossOf,
    Switch,
)
from fuzz.actions.steps import AddGroup, Clip, Rate, Remake, Step, ZeroGrad

_ALL: tuple[type[Action], ...] = (
    *(Forward, LossOf, Grow, Backward, CallUnit, InputGradient, Blow, JoinLoop, Switch),
    *(Step, ZeroGrad, Clip, Rate, AddGroup, Remake, Change, ChangeKept, Freeze),
    *(Take, Copy, Weigh, CopyModel, Save, Load, RoundTrip, Restart),
    *(Set, Hook, HookGradient, HookModule, GatherAhead, Unshard, Wait, Reshard, Prefetch),
)
ACTIONS: dict[str, type[Action]] = {each.__name__: each for each in _ALL}

__all__ = [
    "ACTIONS", "Action", "AddGroup", "Backward", "Blow", "CHANGES", "COPIES", "CallUnit", "Change", "ChangeKept",
    "Clip", "Copy", "CopyModel", "Forward", "Freeze", "GatherAhead", "Grow", "Hook", "HookGradient", "HookModule",
    "InputGradient", "JoinLoop", "Load", "LossOf", "Page", "Prefetch", "Rate", "Remake", "Reshard", "Restart",
    "RoundTrip", "Save", "Set", "Step", "Switch", "TAKES", "Take", "Unshard", "WHOLE_MODEL", "Wait", "Weigh",
    "ZeroGrad",
]  # fmt: skip
