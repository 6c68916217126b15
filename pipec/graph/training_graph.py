"""The training graph: one flat ATen graph, whose nodes have an operator, a stage and a phase."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import sympy
import torch
from torch import fx

from pipec.graph.assignment import UNASSIGNED, Assignment
from pipec.graph.branch_checks import NO_INPUT_BRANCHES, InputBranches
from pipec.graph.findings import NO_FINDINGS, BatchFindings
from pipec.graph.model_guards import NO_MODEL_GUARDS, ModelGuards
from pipec.graph.nodes import ResultRole
from pipec.graph.size_text import SymbolNames
from pipec.ir import Mode, Sizes, Variable
from pipec.ir.batch_axis import BatchAxis
from pipec.torch_compat import pytree


@dataclass(frozen=True, slots=True)
class Operator:
    """One torch-level call of the model's forward, in program order: the unit in which stages are cut."""

    name: str
    module: str
    module_type: str
    source: str


class LoweringLevel(IntEnum):
    """How far the passes have brought a graph. ``RULES`` in ``invariants`` lists what holds of each level."""

    CAPTURED = 0
    CUT = 1
    COMMUNICATION_INSERTED = 2
    BACKWARD_SPLIT = 3


@dataclass(frozen=True)
class TrainingGraph:
    """Forward, loss and backward as one graph, with its symbols, guards and findings.

    ``results`` describes the graph's outputs in order; ``output_spec`` is the tree whose leaves they are.
    ``batch`` is the symbol of the microbatch size in every shape; it is None if the graph is for
    ``batch_size`` rows alone. ``variables`` are the other sizes and the numbers that may change from call to
    call, and ``planned_sizes`` has those of the call that was captured, for which costs are predicted.
    ``variable_symbols`` names their symbols; a variable without one is as planned in every call. The graph is
    valid for sizes and numbers for which all ``guards`` hold. ``data_dependent_sizes`` are the sizes that
    depend on values, each with a prediction. ``batch_counts`` computes, once a step, what the stages must
    know of the whole mini-batch; no pass changes it. ``precomputed`` computes, once for each version of the
    weights, what depends on them and on fixed buffers. ``findings`` say what was proved of the batch.
    ``logs`` names the results that follow the loss; those after them, of which ``output_spec`` is the tree,
    are the model's output. ``first_collective`` is the first model collective, if any: replicas run it at the
    same time. ``squeezed_at`` is where eager torch would squeeze the batch dimension of a batch of one row,
    if anywhere. ``model_guards`` say whether capturing again would give the same, and ``input_branches``
    whether the values of a call's arguments make it branch in the same way; passes leave them alone.
    ``assignment`` has the stages of a graph that is cut. ``paths`` names the leaves of the arguments,
    ``axes`` says where the user has the rows of those that are split, and ``training`` is the mode of the
    model.
    """

    module: fx.GraphModule
    mode: Mode
    operators: tuple[Operator, ...]
    results: tuple[ResultRole, ...]
    batch_size: int
    batch: sympy.Symbol | None = None
    guards: tuple[sympy.Basic, ...] = ()
    variables: tuple[Variable, ...] = ()
    planned_sizes: Sizes = field(default_factory=dict)
    variable_symbols: SymbolNames = field(default_factory=dict)
    data_dependent_sizes: Mapping[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    level: LoweringLevel = LoweringLevel.CAPTURED
    assignment: Assignment = UNASSIGNED
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    batch_counts: fx.Graph | None = None
    precomputed: fx.Graph | None = None
    findings: BatchFindings = NO_FINDINGS
    first_collective: str = ""
    squeezed_at: str = ""
    logs: tuple[str, ...] = ()
    output_spec: pytree.TreeSpec | None = None
    paths: tuple[str, ...] = ()
    axes: tuple[BatchAxis | None, ...] = ()
    training: bool = True
    model_guards: ModelGuards = NO_MODEL_GUARDS
    input_branches: InputBranches = NO_INPUT_BRANCHES

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """Every node that computes something, in order."""
        return (node for node in self.module.graph.nodes if node.op == "call_function")

    @property
    def arguments(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> list[tuple[ResultRole, fx.Node]]:
        """Each result with its node. A parameter that does not influence the loss has no gradient."""
        nodes = self.module.graph.output_node().args[0]
        return list(zip(self.results, nodes, strict=True))  # type: ignore[arg-type]

    @property
    def num_stages(self) -> int:
        return self.assignment.num_stages

    @property
    def symbols(self) -> SymbolNames:
        """The names of the symbols in the graph: ``b``, and the variables."""
        return {**({self.batch: "b"} if self.batch is not None else {}), **self.variable_symbols}

    @property
    def symbol_names(self) -> tuple[str, ...]:
        """Each name once: a number has two symbols."""
        return tuple(dict.fromkeys(self.symbols.values()))

    @property
    def fixed_sizes(self) -> Sizes:
        """The variables that have one value in all calls for which the graph is valid."""
        symbolic = {*self.variable_symbols.values()}
        return {name: size for name, size in self.planned_sizes.items() if name not in symbolic}

    def is_valid_for(self, microbatch_size: int, values: Sizes | None = None) -> bool:
        """Whether the captured graph is valid for this microbatch size and these variables."""
        if self.batch is None and microbatch_size != self.batch_size:
            return False
        if values and any(values[name] != size for name, size in self.fixed_sizes.items()):
            return False
        sizes = {"b": microbatch_size, **(values or {})}
        known = self._known(sizes)
        return all(guard.subs(known) != sympy.false for guard in self.guards)

    def findings_for(self, batch_size: int, values: Sizes) -> BatchFindings:
        """The findings of a batch of so many rows, for which a branch on sizes may go another way."""
        known = self._known({"b": batch_size, **values})
        names = {symbol: sympy.Symbol(name) for symbol, name in self.symbols.items()}
        for condition, line in self.findings.branches:
            if condition.subs(known) == sympy.false and not self.findings.mixed_rows:
                why = f"({condition.subs(names)} for a microbatch of b rows, and not for all {batch_size})"
                return replace(self.findings, mixed_rows=f"{line} {why}")
        return self.findings

    def guard_failure(self, leaves: Sequence[Any] | None, sizes: Sizes) -> str:
        """The guard that a call of these leaves violates, in words; empty if there is none.

        ``sizes`` are those of the call, its rows among them. Without leaves, the model alone is looked at.
        """
        changed = self.model_guards.violation()
        if changed or leaves is None or not self.input_branches.branches:
            return changed
        return self.input_branches.changed(leaves, self._known(sizes))

    def _known(self, sizes: Sizes) -> dict[sympy.Symbol, float]:
        return {symbol: sizes[name] for symbol, name in self.symbols.items() if name in sizes}


def copy_graph(graph: TrainingGraph) -> TrainingGraph:
    """A graph with nodes of its own, which passes may change."""
    return replace(graph, module=fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph)))
