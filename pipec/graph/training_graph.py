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
from pipec.graph.fingerprint import NOTHING_READ, ReadValues
from pipec.graph.nodes import Output, ResultRole, UpdatedBuffer, is_same_for_all
from pipec.graph.size_text import SymbolNames
from pipec.ir import Mode, Sizes, Variable
from pipec.ir.batch_axis import BatchAxis
from pipec.torch_compat import pytree


@dataclass(frozen=True, slots=True)
class Operator:
    """One torch-level call of the model's forward, in program order: the unit in which stages are cut.

    ``checkpoint`` numbers the call of ``torch.utils.checkpoint`` around it, from 1; 0 if there is none.
    ``callers`` are the modules in whose forward it is, the outermost first, without the model itself.
    """

    name: str
    module: str
    module_type: str
    source: str
    checkpoint: int = field(default=0, compare=False)
    callers: tuple[str, ...] = field(default=(), compare=False)


class LoweringLevel(IntEnum):
    """How far passes have transformed a graph. ``RULES`` in ``invariants`` has the rules of each level."""

    CAPTURED = 0
    CUT = 1
    COMMUNICATION_INSERTED = 2
    BACKWARD_SPLIT = 3


@dataclass(frozen=True)
class TrainingGraph:
    """Forward, loss and backward as one graph, with its symbols, guards and findings.

    * ``results`` has the role of each output of the graph, in order. ``logs`` names the results that follow
      the loss. The results of the model's output come after these; ``output_spec`` is their tree.
    * ``batch`` is the symbol of the microbatch size in every shape, or None if the graph is valid for
      ``batch_size`` rows only.
    * ``variables`` are the other sizes and the numbers that may change from call to call. ``planned_sizes``
      has their values in the captured call, for which costs are predicted. ``variable_symbols`` names their
      symbols; a variable without a symbol has its planned value in every call.
    * The graph is valid for sizes and numbers that meet all ``guards``.
    * ``data_dependent_sizes`` are the sizes that depend on values, each with a prediction.
    * ``batch_counts`` computes, once a step, the values of the whole mini-batch that stages read. No pass
      changes it.
    * ``precomputed`` computes, once for each version of the weights, the values that depend on weights and
      fixed buffers alone.
    * ``tail`` computes, once a step, what needs all rows of the batch: ``tail_results`` are the roles of its
      results. No pass changes it.
    * ``findings`` say what capture proved of the batch.
    * ``first_collective`` is the first model collective, if any: replicas run it at the same time.
    * ``squeezed_at`` is the place where eager torch would squeeze the batch dimension of a batch of one row,
      if any.
    * ``repeated`` are the arguments that are one tensor in the captured call, pairs of positions, if the
      model compares arguments; else None.
    * ``reads`` tell whether capturing again would give the same graph, and ``input_branches`` whether
      the arguments of a call lead to the same branches. Passes do not change them.
    * ``assignment`` has the stages of a graph that is cut.
    * ``paths`` names the leaves of the arguments, and ``axes`` says where the user has the rows of the leaves
      that are split. ``training`` is the mode of the model.
    * ``microbatches_are_batches`` if each is a batch of its own, whose loss the user has weighted.
    * ``keeps_outputs`` if the ranks of the stage that returns the outputs keep them for themselves.
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
    tail: fx.Graph | None = None
    tail_results: tuple[ResultRole, ...] = ()
    findings: BatchFindings = NO_FINDINGS
    first_collective: str = ""
    squeezed_at: str = ""
    logs: tuple[str, ...] = ()
    output_spec: pytree.TreeSpec | None = None
    paths: tuple[str, ...] = ()
    axes: tuple[BatchAxis | None, ...] = ()
    training: bool = True
    reads: ReadValues = NOTHING_READ
    input_branches: InputBranches = NO_INPUT_BRANCHES
    repeated: tuple[tuple[int, int], ...] | None = None
    microbatches_are_batches: bool = False
    keeps_outputs: bool = False

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """The nodes that call functions, in order."""
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
    def tail_outputs(self) -> list[tuple[ResultRole, fx.Node]]:
        """Each result of the tail with its node."""
        nodes = self.tail.output_node().args[0] if self.tail else ()
        return list(zip(self.tail_results, nodes, strict=True))  # type: ignore[arg-type]

    @property
    def returned(self) -> list[tuple[Output, fx.Node]]:
        """The loss, the logs and the leaves of the model's output, in their order, each with its node."""
        found = [(role, node) for role, node in self.outputs + self.tail_outputs if isinstance(role, Output)]
        return sorted(found, key=lambda each: each[0].position)

    @property
    def step_buffers(self) -> frozenset[str]:
        """The buffers to which every microbatch of a step gives the same new value: such as counters.

        There are none if the batch has no symbol, for any number may then be that of its rows, nor if each
        microbatch is a batch of its own.
        """
        changed = {role.fqn: node for role, node in self.outputs if isinstance(role, UpdatedBuffer)}
        is_divided = self.batch is not None and not self.microbatches_are_batches
        found = {*changed} if is_divided else set[str]()
        known = {*self.variable_symbols}
        while varying := {x for x in found if not is_same_for_all(changed[x], known, {*changed} - found)}:
            found -= varying
        return frozenset(found)

    @property
    def has_given_microbatches(self) -> bool:
        """Whether each microbatch is given as a batch of its own, because no argument is split."""
        return bool(self.axes) and not any(self.axes)

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
        """The variables without a symbol, with the one value for which the graph is valid."""
        symbolic = {*self.variable_symbols.values()}
        return {name: size for name, size in self.planned_sizes.items() if name not in symbolic}

    def is_valid_for(self, microbatch_size: int, values: Sizes | None = None) -> bool:
        """Whether the graph is valid for this microbatch size and these values of its variables.

        Every graph is valid for a microbatch without rows, which is not computed.
        """
        if not microbatch_size:
            return True
        if self.batch is None and microbatch_size != self.batch_size:
            return False
        if values and any(values[name] != size for name, size in self.fixed_sizes.items()):
            return False
        sizes = {"b": microbatch_size, **(values or {})}
        symbolic = {*self.variable_symbols.values()}
        if any(sizes[x] in (0, 1) for x in symbolic & sizes.keys() if type(self.planned_sizes[x]) is int):
            return False
        values_of = self._symbol_values(sizes)
        return all(guard.subs(values_of) != sympy.false for guard in self.guards)

    def findings_for(self, batch_size: int, values: Sizes) -> BatchFindings:
        """The findings for a batch of ``batch_size`` rows, whose size may lead to other branches."""
        if self.findings.tail and not self.is_valid_for(batch_size, values) and not self.findings.mixed_rows:
            reason = (
                f"{self.findings.tail} needs all rows, but what was captured does not hold for {batch_size}"
            )
            return replace(self.findings, mixed_rows=reason)
        values_of = self._symbol_values({"b": batch_size, **values})
        names = {symbol: sympy.Symbol(name) for symbol, name in self.symbols.items()}
        for condition, line in self.findings.branches:
            if condition.subs(values_of) == sympy.false and not self.findings.mixed_rows:
                reason = f"({condition.subs(names)} for a microbatch of b rows, and not for all {batch_size})"
                return replace(self.findings, mixed_rows=f"{line} {reason}")
        return self.findings

    def guard_failure(self, leaves: Sequence[Any] | None, sizes: Sizes) -> str:
        """The guard that a call with these leaves violates, in words; empty if it violates none.

        ``sizes`` are the sizes of the call, among them its rows. Without leaves only the model is checked.
        """
        changed = self.reads.difference()
        if changed or leaves is None or not self.input_branches.branches:
            return changed
        return self.input_branches.changed(leaves, self._symbol_values(sizes))

    def _symbol_values(self, sizes: Sizes) -> dict[sympy.Symbol, float]:
        return {symbol: sizes[name] for symbol, name in self.symbols.items() if name in sizes}


def copy_graph(graph: TrainingGraph) -> TrainingGraph:
    """A copy with its own nodes, which passes may change."""
    return replace(graph, module=fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph)))
