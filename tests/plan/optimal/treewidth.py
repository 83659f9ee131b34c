"""A schedule by balanced separators of a tree decomposition, as an oracle.

Kumar, Purohit, Svitkina, Vee and Wang (2019), "Efficient rematerialization for deep networks", NeurIPS: a graph of treewidth w is
divided by a bag of its tree decomposition into parts of at most half the size; the separator is held while the parts are
differentiated one after the other, each in the same way from what its separators hold. O(w log n) tensors at a time, every op replayed
O(log n) times on trees. Here the separators are held from forward at the outermost level and retained by nested windows below it.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
from networkx.algorithms.approximation import treewidth_min_degree

from keepwise.ir import Phase, Schedule, Step
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.build import Span, build
from keepwise.plan.droppable import formally_droppable
from tests.plan.optimal.brute import reading_nodes


def data_graph(step: Step) -> nx.Graph:
    """Forward storages, joined where one is made from the other."""
    graph = nx.Graph()
    for op in step.ops:
        if op.phase != Phase.FORWARD:
            continue
        made, read = (
            {s for v in values if step.storages[s := step.values[v].storage].birth >= 0}
            for values in (op.outputs, op.inputs)
        )
        graph.add_nodes_from(made)
        graph.add_edges_from((a, b) for a in made for b in (made | read) if a != b)
    return graph


def separator(graph: nx.Graph) -> set[int]:
    """The bag of a tree decomposition whose removal leaves the smallest largest part."""
    _, tree = treewidth_min_degree(graph)

    def largest(bag: frozenset[int]) -> tuple[int, int]:
        rest = graph.subgraph(set(graph) - bag)
        return max((len(c) for c in nx.connected_components(rest)), default=0), len(bag)

    return set(min(tree.nodes, key=largest))


def treewidth_schedule(step: Step) -> Schedule:
    """The recursive schedule over the whole step."""
    return _Recursion(step).run()


class _Recursion:
    def __init__(self, step: Step) -> None:
        self.step = step
        self.formal = formally_droppable(step)
        self.nodes = reading_nodes(step)
        self.read_at: list[set[int]] = [set() for _ in self.nodes]
        for save in step.saves:
            storage = step.values[save.value].storage
            for read in save.reads:
                for i, (first, last) in enumerate(self.nodes):
                    if storage in self.formal and first <= read.first <= last:
                        self.read_at[i].add(storage)
        self.spans: list[Span] = []
        self.held: set[int] = set()

    def run(self) -> Schedule:
        if self.nodes:
            self.divide(data_graph(self.step), range(len(self.nodes)), NO_WINDOW, outermost=True)
        return build(self.step, held=self.held, spans=self.spans, planner="treewidth")

    def divide(self, graph: nx.Graph, nodes: Sequence[int], parent: int, *, outermost: bool = False) -> None:
        """Serve consecutive reading nodes, whose tensors lie in `graph`."""
        if len(nodes) <= 1 or len(graph) <= 1:
            self.span(nodes, parent)
            return
        middle = separator(graph)
        if outermost:
            self.held |= middle
        else:
            parent = self.span(nodes, parent, tuple(sorted(middle & self.formal)))
        part_of: dict[int, int] = {}
        parts = [set(c) for c in nx.connected_components(graph.subgraph(set(graph) - middle))]
        for i, part in enumerate(parts):
            part_of.update(dict.fromkeys(part, i))
        runs: list[tuple[int, list[int]]] = []
        for n in nodes:
            own = next((part_of[s] for s in sorted(self.read_at[n]) if s in part_of), -1)
            if runs and runs[-1][0] == own:
                runs[-1][1].append(n)
            else:
                runs.append((own, [n]))
        for own, members in runs:
            if own < 0:
                self.span(members, parent)
            else:
                self.divide(graph.subgraph(parts[own]).copy(), members, parent)

    def span(self, nodes: Sequence[int], parent: int, retain: tuple[int, ...] = ()) -> int:
        self.spans.append(
            Span(start=self.nodes[nodes[0]][0], stop=self.nodes[nodes[-1]][1], parent=parent, retain=retain)
        )
        return len(self.spans) - 1
