"""How far the running backward has come through a unit, and which buckets of a lone unit can be reduced already.

Autograd says when it has left a unit, so nothing is counted or learned.  It runs the nodes of a graph in the opposite order of
their creation, and torch numbers them.  So the hooks on inputs and outputs of units say where autograd is: all nodes that were
made later have run, and units whose forwards began later have ended (``Engine.reach``).  They can be resharded, and
their gradients reduced.  FSDP2 stands an autograd ``Function`` in the inputs' way for this, which waits for the gradients of
all inputs and forbids forwards that change an input in place.

A unit of several modules ends at the inputs of the module that ran first.  A unit whose inputs need no gradient ends with the
whole backward, and so does one whose parameters other units use, too.
"""

from __future__ import annotations

from shardwise.plan.schedule import Buckets

# A place in a graph: a thread, and how many nodes that had made.  Each thread counts for itself: on an accelerator a reentrant
# checkpoint recomputes on a thread of autograd, whose numbers say nothing about the forward's.
Place = tuple[int, int]
NOWHERE: Place = (-1, -1)


class UnitBackward:
    """The progress of one unit's backward.

    Attributes:
        is_running: autograd has reached an output of the unit and has not left its inputs: it reads the parameters.
        began_at: where in the graph the forward began whose backward runs; its own nodes come after that.
        task: the backward of autograd in which it began; those that run inside of others have higher numbers.
        keeps_for_graph: a backward ran with ``create_graph=True``.  Its graph reads the parameters, so they stay full until a
            backward without it has ended.
        is_unseen: the last forward returned no tensor whose hook would announce the unit's backward, so its parameters stay
            full.
        arrived: ordinals of parameters whose gradients have arrived and have hooks; see ``Unit.listen``.
        buckets: of a lone unit, those that may be reduced before its backward ends; None if there are none.
    """

    def __init__(self) -> None:
        self.began_at, self.task = NOWHERE, -1
        self.is_running = self.keeps_for_graph = self.is_unseen = False
        self.arrived: set[int] = set()
        self.buckets: Buckets | None = None
