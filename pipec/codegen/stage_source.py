"""The Python source of one stage: a header that describes it, then the functions of each phase."""

import itertools
import operator
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from pipec.codegen.expressions import expression, free_names, output_argument
from pipec.codegen.formatting import (
    LINE_LENGTH,
    break_lines,
    format_statement,
    tuple_source,
    with_note,
    wrap_items,
)
from pipec.codegen.inlined_views import inlined_views
from pipec.codegen.names import safe_comment
from pipec.codegen.tensor_names import name_tensors
from pipec.graph import (
    BatchCount,
    BatchFraction,
    ModelInput,
    OutputGradient,
    TailGradient,
    TailInput,
    TrainingGraph,
    is_branch_check,
    is_data_dependent_number,
    is_view,
)
from pipec.graph.lifetimes import defined_by, is_statement, num_items
from pipec.graph.phase_functions import (
    PhaseFunction,
    StageFunctions,
    batch_count_nodes,
    belongs_to_phase,
    precomputed_nodes,
)
from pipec.graph.size_text import format_size
from pipec.ir import Phase
from pipec.ir.text_format import format_dtype

MAX_NAMES_BEFORE_STAR = 255

RUNTIME = {
    "pipec.runtime.branch_checks": {"check_branch"},
    "pipec.runtime.random_operators": {"call_with_generator", "dropout"},
    "pipec.runtime.memory.block_cache": {"empty_cached"},
    "pipec.runtime.sparse_gradients": {"embedding_row_gradient"},
}
"""The names that generated code may import from pipec, by module."""

RETURN_VALUES = {
    Phase.FORWARD: ("sent", "saved", "updates"),
    Phase.RECOMPUTE: ("saved",),
    Phase.BACKWARD: ("sent", "gradients"),
    Phase.BACKWARD_INPUT: ("sent", "saved", "gradients"),
    Phase.BACKWARD_WEIGHT: ("gradients",),
    Phase.TAIL: ("sent", "updates", "gradients"),
}
"""The values that the function of each phase returns, as the interpreter unpacks them."""

OF_THE_BATCH = ModelInput | OutputGradient | BatchFraction | BatchCount
"""The roles of what a step brings, and no function makes."""


def return_values(function: PhaseFunction) -> tuple[str, ...]:
    """The values that a function returns: those of its phase, and values saved for the next segment."""
    returned = RETURN_VALUES[function.phase]
    if function.is_last or "saved" in returned:
        return returned
    return tuple(kind for kind in ("sent", "saved", "gradients") if kind in {*returned, "saved"})


@dataclass(frozen=True)
class StageSource:
    """Writes one stage. ``names`` are the ``shared`` names, with others for the stage's own tensors.

    Messages use the ``shared`` names. The stage's links carry the values ``sent``, some of which it has
    received itself: it hands these on.
    """

    graph: TrainingGraph
    stage: StageFunctions
    shared: Mapping[fx.Node, str]
    names: Mapping[fx.Node, str]
    title: str
    sent: Collection[str] = ()

    @classmethod
    def of(
        cls,
        graph: TrainingGraph,
        stage: StageFunctions,
        names: Mapping[fx.Node, str],
        title: str,
        sent: Collection[str] = (),
    ) -> "StageSource":
        """The source of a stage, with names for the stage's own tensors."""
        return cls(graph, stage, names, {**names, **name_tensors(graph, stage, names)}, title, sent)

    def write(self) -> str:
        """The source of the whole module. The same graph and plan give the same bytes."""
        lines = ['"""' + self.title, '"""', "", *self._imports(), ""]
        lines += self._table("PARAMETERS", self.stage.parameters, described=True)
        lines += self._table("BUFFERS", self.stage.buffers, described=True)
        changed = [node for node in self.stage.buffers if node.meta["role"].fqn in self.updated]
        lines += self._table("UPDATED_BUFFERS", changed, described=False)
        lines += break_lines(f"INPUTS = {tuple_source(map(repr, self._inputs()))}", 0)
        return "\n".join([*lines, *self._functions()]) + "\n"

    def _functions(self) -> Iterator[str]:
        """The lines of each function, ``constants``, ``batch_counts`` and ``precompute`` among them."""
        graph, stage = self.graph, self.stage
        if stage.constants:
            about = "Values that depend on nothing but sizes."
            read = self.used_constants()
            yield from ("", "", *self._apart("constants", about, stage.constants, read, ["device"]))
        if graph.batch_counts is not None and stage.batch_counts:
            about = "Values of the whole mini-batch, which has b rows: computed once a step."
            nodes, made = (
                batch_count_nodes(graph, stage.batch_counts),
                _values(graph.batch_counts, stage.batch_counts),
            )
            yield from ("", "", *self._apart("batch_counts", about, nodes, made, []))
        if graph.precomputed is not None and stage.precomputed:
            about = "What depends on nothing but these: computed once for each version of the weights."
            nodes, made = (
                precomputed_nodes(graph, stage.precomputed),
                _values(graph.precomputed, stage.precomputed),
            )
            yield from ("", "", *self._apart("precompute", about, nodes, made, []))
        for function in self.stage.all_functions:
            yield from ("", "", *_FunctionSource(self, function).lines())

    @property
    def tail_names(self) -> Mapping[object, str]:
        """The names of the tail's inputs and of its gradients."""
        tail = self.graph.tail.find_nodes(op="placeholder") if self.graph.tail else ()
        return {node.meta["role"]: self.shared[node] for node in (*tail, *self.graph.arguments)}

    @property
    def parameters(self) -> Sequence[str]:
        """The FQNs of ``PARAMETERS``."""
        return [node.meta["role"].fqn for node in self.stage.parameters]

    @property
    def updated(self) -> Sequence[str]:
        """The buffers that forwards change."""
        changed = {fqn for function in self.stage.all_functions for fqn, _ in function.buffer_updates}
        return [n.meta["role"].fqn for n in self.stage.buffers if n.meta["role"].fqn in changed]

    def _inputs(self) -> list[str]:
        """The names of what functions read of the mini-batch, in order."""
        read = (node for function in self.stage.all_functions for node in function.inputs)
        return list(dict.fromkeys(self.names[x] for x in read if isinstance(x.meta["role"], OF_THE_BATCH)))

    def used_constants(self) -> list[fx.Node]:
        """The constants that functions read, in the order ``constants`` returns them."""
        read = {node for function in self.stage.functions for node in function.read_nodes}
        return [node for node in self.stage.constants if node in read]

    def assignment(self, node: fx.Node, source: str, read: Container[fx.Node]) -> list[str]:
        """``ln, _, rstd = torch.native_layer_norm(...)    # f32[b, 8], f32[b, 1]``

        Items of a tuple that no node in ``read`` takes are called ``_``.
        """
        if is_branch_check(node):
            condition, outcome, branch = source.split(", ", 2)
            return [f"    {condition}, {outcome},", f"                 {branch}"]
        if node.meta["val"] is None:
            return [f"    {source}"]
        if not isinstance(node.meta["val"], list | tuple):
            return format_statement(self.names[node], source, self.type_of(node))
        items = {u.args[1]: u for u in node.users if u.target is operator.getitem and u in read}
        targets = [self.names[items[i]] if i in items else "_" for i in range(len(node.meta["val"]))]
        note = ", ".join(self.type_of(item) for _, item in sorted(items.items()))
        return format_statement(", ".join(targets) + "," * (len(targets) == 1), source, note)

    def free_names(self, nodes: Iterable[fx.Node]) -> set[str]:
        """The names in the source of these nodes, without nodes and ``torch``."""
        return {name for node in nodes for name in free_names(node, self.graph.symbols)}

    def type_of(self, node: fx.Node) -> str:
        """``f32[b, 128]``; empty for a number."""
        value = node.meta["val"]
        if is_data_dependent_number(node):
            return ""
        sizes = ", ".join(format_size(size, self.graph.symbols) for size in value.shape)
        return f"{format_dtype(str(value.dtype).removeprefix('torch.'))}[{sizes}]"

    def _imports(self) -> list[str]:
        """The imports that the code uses. ``math`` is for sizes, such as ``math.ceil(b / 2)``."""
        bodies = (function.body for function in self.stage.all_functions)
        apart = precomputed_nodes(self.graph, self.stage.precomputed)
        batch_counts = self.graph.batch_counts.nodes if self.graph.batch_counts is not None else ()
        of_batch_calls = (node for node in batch_counts if node.op == "call_function")
        named = self.free_names(itertools.chain(self.stage.constants, apart, *bodies))
        named |= self.free_names(of_batch_calls) & {"math"}
        lines = [*(["import math", ""] if "math" in named else []), "import torch"]
        own = ["from pipec import primitives"] if "primitives" in named else []
        imported = {module: sorted(named & names) for module, names in RUNTIME.items()}
        own += [f"from {module} import {', '.join(used)}" for module, used in imported.items() if used]
        return [*lines, "", *own] if own else lines

    def _table(self, name: str, nodes: Sequence[fx.Node], *, described: bool) -> list[str]:
        """The FQNs of the stage's tensors; if ``described``, with the names used below, and types."""
        if not nodes:
            return [f"{name} = ()"]
        notes = [f"{self.names[node]}  {self.type_of(node)}" if described else "" for node in nodes]
        rows = (
            with_note(f"    {node.meta['role'].fqn!r},", note)
            for node, note in zip(nodes, notes, strict=True)
        )
        return [f"{name} = (", *rows, ")"]

    def unpack(self, variable: str, held: Sequence[fx.Node], read: Collection[fx.Node]) -> list[str]:
        """``c_fc_weight, c_fc_bias, *_ = w``: all up to the last one read.

        Python allows 255 names before a star. With more it is ``... = w[:300]``.
        """
        last = max((index for index, node in enumerate(held) if node in read), default=-1)
        names = [self.names[node] for node in held[: last + 1]]
        if not names:
            return []
        if len(names) == len(held):
            return wrap_items("    ", names, f" = {variable}")
        if len(names) > MAX_NAMES_BEFORE_STAR:
            return wrap_items("    ", names, f" = {variable}[:{len(names)}]")
        return wrap_items("    ", [*names, "*_"], f" = {variable}")

    def _apart(
        self,
        head: str,
        about: str,
        nodes: Sequence[fx.Node],
        results: Sequence[fx.Node],
        needed: Collection[str],
    ) -> list[str]:
        """The lines of a function apart from the phases, whose ``nodes`` compute ``results``.

        It takes the stage's tensors that it reads, as ``w`` and ``buffers``, then its other arguments, sizes,
        and the device. It takes what is ``needed`` in any case.
        """
        tables = {"w": self.stage.parameters, "buffers": self.stage.buffers}
        tensors = {node.meta["role"]: node for table in tables.values() for node in table}
        arguments = [node for node in nodes if node.op == "placeholder"]
        held = {node: tensors[node.meta["role"]] for node in arguments if node.meta["role"] in tensors}
        body, read = [node for node in nodes if node.op != "placeholder"], {*held.values()}
        named = self.free_names(body) | {*needed}

        def name(node: fx.Node) -> str:
            return self.names[held.get(node, node)]

        views = inlined_views(body, results, name, self.graph.symbols)
        statements = [node for node in body if is_statement(node) and node not in views]
        parameters = [
            *(key for key, table in tables.items() if read.intersection(table)),
            *(self.names[node] for node in arguments if node not in held),
            *(each for each in (*self.graph.symbol_names, "device") if each in named),
        ]
        lines = [f"def {head}({', '.join(parameters)}):", f'    """{about}"""']
        for key, table in tables.items():
            lines += self.unpack(key, table, read)
        for node in statements:
            source = expression(node, lambda n: views.get(n) or name(n), self.graph.symbols)
            lines += self.assignment(node, source, body)
        return [*lines, *break_lines(f"return {tuple_source(map(name, results))}", 4)]


@dataclass(frozen=True)
class _FunctionSource:
    module: StageSource
    function: PhaseFunction

    def lines(self) -> list[str]:
        return [f"def {self.function.name}(frame):", *self._take(), *self._body(), *self._return()]

    def _take(self) -> Iterator[str]:
        """``b, x = frame["b"], frame.pop("x")``: what no later function and no message reads is popped."""
        function, names = self.function, self.module.names
        named = self.module.free_names(function.body)
        read = [name for name in (*self.module.graph.symbol_names, "device", "rng") if name in named]
        values = (*function.received, *function.inputs)
        popped = [names[node] for node in values if self._reads_last(node)]
        read += [names[node] for node in values if not self._reads_last(node)]
        yield from _assignments(read, [f'frame["{name}"]' for name in read])
        yield from _assignments(popped, [f'frame.pop("{name}")' for name in popped])
        reads = self._tensors_read()
        for table, nodes in self._tensor_lists().items():
            yield from self.module.unpack(f'frame["{table}"]', nodes, reads)
        if function.takes_saved:
            saved, taken = [names[node] for node in function.saved_in], 'frame.pop("saved")'
            yield from wrap_items("    ", saved, f" = {taken}") if saved else [f"    {taken}"]

    def _reads_last(self, node: fx.Node) -> bool:
        """Whether nothing reads a value of the frame after this function."""
        if node in self.function.received:
            is_handed_on = self.module.names[node] in {*self.module.sent}.difference(self._sent())
            return not is_handed_on
        readers = [each for each in self.module.stage.functions if node in each.inputs]
        is_made = isinstance(node.meta["role"], TailInput | TailGradient | OutputGradient)
        return is_made and (not readers or readers[-1] is self.function)

    def _tensor_lists(self) -> dict[str, Sequence[fx.Node]]:
        """The stage's tensors, by the argument that passes them."""
        stage = self.module.stage
        return {
            "w": stage.parameters,
            "precomputed": stage.precomputed,
            "buffers": stage.buffers,
            "constants": self.module.used_constants(),
        }

    def _tensors_read(self) -> set[fx.Node]:
        """The values that the function reads and that were not saved; a buffer's may be of a microbatch."""
        reads = {*self.function.read_nodes}.difference(self.function.saved_in)
        if self.function.phase is not Phase.TAIL:
            return reads
        tensors = (*self.module.stage.parameters, *self.module.stage.buffers)
        of_stage = {node.meta["role"]: node for node in tensors}
        return {of_stage.get(node.meta.get("role"), node) for node in reads}

    def _body(self) -> Iterator[str]:
        """The operators, grouped under comments that name their module.

        Memory is freed right after the statement that reads it last.
        """
        lifetimes = self.function.lifetimes
        group, read = None, set(self.function.body)
        symbols = self.module.graph.symbols
        names = self.module.names
        twice = [operand for node, operand in lifetimes.in_place.items() if output_argument(node)]
        kept = [*self.function.result_nodes, *twice]
        views = inlined_views(self.function.body, kept, names.__getitem__, symbols)

        def name(node: fx.Node) -> str:
            return views.get(node) or names[node]

        for statement in lifetimes.statements:
            node = statement.node
            if node in views:
                continue
            is_view_copy = is_view(node) and not belongs_to_phase(node, self.function.phase)
            if not is_view_copy and (title := self._title(node)) != group:
                group = title
                yield with_note(f"    # {title}", self._source_line(node))
            source = expression(node, name, symbols, lifetimes.in_place.get(node))
            yield from self.module.assignment(node, source, read)
            dead = [names[each] for each in statement.deleted if each not in views]
            if num_items(node) > sum(1 for _ in defined_by(node, read)) and not is_view(node):
                dead.append("_")
            if dead:
                yield from wrap_items("    del ", dead, "")

    def _sent(self) -> dict[str, str]:
        """The names of the values that the function returns for messages, and as results."""
        function, names, keys = self.function, self.module.names, self.module.shared
        sent = {keys[n]: names[n.all_input_nodes[0]] for n in function.sent}
        sent |= {keys[n]: names[n] for n in function.outputs}
        sent |= {keys[n]: names[n.all_input_nodes[0]] for n in function.collectives}
        return sent | {self.module.tail_names[role]: names[node] for role, node in function.tail_values}

    def _return(self) -> Iterator[str]:
        function, names = self.function, self.module.names
        updates, gradients = dict(function.buffer_updates), dict(function.gradients)
        parts = {
            "sent": "{" + ", ".join(f'"{key}": {value}' for key, value in self._sent().items()) + "}",
            "saved": "[" + ", ".join(map(names.__getitem__, function.saved_out)) + "]",
            "updates": tuple_source(
                names[updates[fqn]] if fqn in updates else "None" for fqn in self.module.updated
            ),
            "gradients": tuple_source(
                names[gradients[fqn]] if fqn in gradients else "None" for fqn in self.module.parameters
            ),
        }
        returned = [parts[key] for key in return_values(function)]
        code = ", ".join(returned)
        is_long = len(code) + len("    return ") > LINE_LENGTH
        yield from break_lines(f"return ({code})" if is_long and len(returned) > 1 else f"return {code}", 4)

    def _title(self, node: fx.Node) -> str:
        operators = self.module.graph.operators
        made_by = operators[node.meta["operator"]] if operators else None
        if made_by is None or not made_by.module_type:
            return "loss"
        return safe_comment(f"{made_by.module or 'model'} · {made_by.module_type}")

    def _source_line(self, node: fx.Node) -> str:
        operators = self.module.graph.operators
        return safe_comment(operators[node.meta["operator"]].source) if operators else ""


def _values(apart: fx.Graph, read: Sequence[fx.Node]) -> list[fx.Node]:
    """The results of a graph apart that the arguments ``read`` are."""
    made: tuple[fx.Node, ...] = apart.output_node().args[0]  # type: ignore[assignment]
    return [made[node.meta["role"].index] for node in read]


def _assignments(names: Sequence[str], sources: Sequence[str]) -> list[str]:
    """``a, b = x, y`` on one line, or on one for each name."""
    line = f"    {', '.join(names)} = {', '.join(sources)}"
    if len(line) > LINE_LENGTH:
        return [f"    {name} = {source}" for name, source in zip(names, sources, strict=True)]
    return [line] if names else []
