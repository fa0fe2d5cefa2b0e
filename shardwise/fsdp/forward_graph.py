"""The tensors by which a backward reaches a module's forward: what it returns, puts into its arguments, or keeps.

A hook on each of them announces the unit's backward.  Most forwards return all of them; auxiliary losses of experts stay in an
attribute, caches grow in an argument, and a backward may reach these first, or alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise import torch_private
from shardwise.containers import can_grow, tensors_in
from shardwise.fsdp.attachment import attachment_of
from shardwise.torch_private import innermost_transform

# Of a forward that runs: those arguments that it may put tensors into, the tensors that these held before with their nodes, and
# how many nodes this thread had made.
_Held = dict[int, tuple[torch.Tensor, torch.autograd.graph.Node | None]]
Begun = tuple[list[Any], _Held, int]
_MOST_SIZES = 32  # graphs of other sizes are not searched: modules whose every graph differs would pay in every step


class ForwardGraph:
    """Finds the ends of the graphs of one unit's forwards."""

    def __init__(self) -> None:
        self._sizes: set[int] = set()  # numbers of graph nodes of the forwards after which attributes were searched
        self._keepers: list[tuple[weakref.ref[nn.Module], str]] = []  # attributes that had a tensor of the graph then

    @staticmethod
    def begin(values: Iterable[Any]) -> Begun:
        """Note what there is when a forward with the arguments ``values`` begins."""
        growing: list[Any] = []
        for each in values:  # a comprehension would be one more call
            if not isinstance(each, torch.Tensor) and can_grow(each):
                growing.append(each)
        held = {id(each): (each, each.grad_fn) for each in tensors_in(growing)} if growing else {}
        return growing, held, torch_private.num_nodes_made()

    def ends(
        self, module: nn.Module, begun: Begun, returned: Any, put_in: list[torch.Tensor]
    ) -> tuple[list[tuple[torch.Tensor, int]], bool]:
        """Return the ends of the graph that a forward of ``module`` has made, and whether none of what it returns or keeps is.

        Each end has the number of its node.  To ask for it also regenerates the grad_fn of a view that is out of date: to
        register a hook would crash.

        Args:
            begun: what :meth:`begin` has noted.  returned: what the forward has returned.
            put_in: the tensors that were in its arguments when it had ended, before the caller's own are in there again.
        """
        _, held, num_nodes = begun
        if isinstance(returned, torch.Tensor) and innermost_transform() is None:
            found = [returned] if returned.requires_grad else []
        else:
            found = self._outputs_in_graph(returned)
        num_made = torch_private.num_nodes_made() - num_nodes
        if num_made and num_made not in self._sizes and len(self._sizes) < _MOST_SIZES:
            self._search(module, num_nodes, num_made)
        if self._keepers:
            found += self._kept(found, num_nodes)
        # What was there before this forward, leaves included, is not of its graph.
        numbered = [(each, number) for each in found if (number := torch_private.node_number(each)) >= num_nodes]
        is_unseen = not numbered and num_made > 0
        if put_in:
            ids = {id(each) for each, _ in numbered}
            added = [each for each in put_in if each.requires_grad and id(each) not in ids]
            added = [each for each in added if held.get(id(each)) != (each, each.grad_fn)]
            numbered += zip(added, map(torch_private.node_number, added), strict=True)
        return numbered, is_unseen

    def _search(self, module: nn.Module, num_nodes: int, num_made: int) -> None:
        """Note which attributes of the modules of ``module`` keep tensors of its forward, such as auxiliary losses."""
        self._sizes.add(num_made)
        todo = [module]
        for each in todo:
            todo += [child for child in each.children() if attachment_of(child) is None]
            for name, value in each.__dict__.items():
                place, numbers = (weakref.ref(each), name), map(torch_private.node_number, tensors_in(value))
                if place not in self._keepers and max(numbers, default=-1) >= num_nodes:
                    self._keepers.append(place)

    def _kept(self, known: list[torch.Tensor], num_nodes: int) -> list[torch.Tensor]:
        """Return tensors of this forward, other than ``known``, in attributes: a backward may reach them before the output."""
        ids = {*map(id, known)}
        values = [owner.__dict__.get(name) for ref, name in self._keepers if (owner := ref()) is not None]
        found = {id(each): each for each in tensors_in(values) if torch_private.node_number(each) >= num_nodes}
        return [each for number, each in found.items() if number not in ids]

    @staticmethod
    def _outputs_in_graph(returned: Any) -> list[torch.Tensor]:
        found = tensors_in(returned) or tensors_in(returned, everywhere=True)
        if innermost_transform() is not None:
            found = [each for tensor in found for each in torch_private.graphs_of(tensor)]
        return [each for each in found if each.requires_grad]
