"""Proves how every value depends on the batch, and rewrites the graph where that makes microbatches right.

The graph runs node by node on tensors without memory, under a ``DependenceTracker``. Where a value can be
made right, nodes are inserted, and the analysis goes on with them::

    loss = cross_entropy(logits, labels)          n = batch_counts((labels != -100).sum())
                                            ->    s = cross_entropy(logits, labels, reduction="sum")
                                                  loss = s / (n * batch_fraction)

* A value without rows that follows from the arguments of ``step`` alone, such as a count, is computed once of
  the whole batch.
* A sum over rows that is used as a mean is divided by the microbatch's fraction of the rows.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from pipec.capture.batch.branch_conditions import refuse_ambiguous_branch
from pipec.capture.batch.dependence import (
    MEAN,
    Dependence,
    MixedRows,
    PerRow,
    SelectedRows,
    SumOverRows,
    Unproven,
    Whole,
    is_whole,
)
from pipec.capture.batch.dependence_tracker import NUM_SELECTED, DependenceTracker, TensorFact, tracking
from pipec.capture.batch.operator_call import ROW_COUNT_PRIME, NeedsMeanError, tensors_in
from pipec.capture.batch.tail import TailNodes, find_tail, insert_tail_inputs, writes
from pipec.capture.captured_collectives import (
    ALL_GATHERS,
    ALL_REDUCES,
    BROADCASTS,
    MODEL_COLLECTIVES,
    sync_batch_norm,
)
from pipec.capture.graph_calls import (
    HOLDING_NUMBERS,
    INHERITED_META,
    NodeInserter,
    describe_call,
    fake_value,
    insert_after,
    mutates_argument,
    named_arguments,
    operator_name,
    reduction_of,
)
from pipec.capture.markers import BATCH_COUNT, BATCH_FRACTION
from pipec.capture.microbatch_checks import nodes_for_checks, require_equal_counts
from pipec.capture.model_call import plain_name
from pipec.capture.output_merge import mark_output_merge
from pipec.graph import BatchFindings, is_branch_check
from pipec.ir.batch_axis import BatchAxis
from pipec.torch_compat import pytree
from pipec.torch_compat.differentiation import size_of_symbol, unbacked_symbols
from pipec.torch_compat.run_time import OpOverload, is_higher_order, memory_id
from pipec.torch_compat.symbolic_numbers import formula

_COUNTED = {"cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
"""Losses whose mean is over targets that are not ignored, each with the weight of its class."""

MAX_TAIL_BYTES = 2**28
"""The largest size of what the tail reads, of the rows of all microbatches."""

_SHAPING = {"empty", "expand", "new_empty", "new_zeros", "reshape", "unflatten", "view", "zeros"}
"""Calls that read a number as a size."""


def analyse_batch(
    module: fx.GraphModule,
    batched: Collection[str],
    size: int,
    has_loss: bool,
    num_replicas: int = 1,
    batch_size: int = 0,
) -> BatchFindings:
    """Rewrite the graph in place so that microbatches make what the unsplit model makes of the batch.

    Args:
        module: What a front end captured of one microbatch.
        batched: The paths of the arguments that are split.
        size: The rows of the microbatch, if the graph is for these alone.
        has_loss: The first output is the loss.
        num_replicas: How many replicas take part in the model's own collectives.
        batch_size: The rows of the batch, if what mixes them may run once, of all of them.
    """
    walk = _BatchAnalysis(module, {plain_name(path) for path in batched}, size, num_replicas)
    walk.run()
    found = walk.finish(has_loss, batch_size)
    module.recompile()
    return found


def batch_symbol_of(graph: fx.Graph, batched: Collection[str]) -> sympy.Symbol | None:
    """The symbol for the number of rows in a captured graph; None if the number is a constant."""
    rows = _argument_with_rows(graph, {plain_name(path) for path in batched})
    return formula(fake_value(rows).shape[0]) if rows else None


def _argument_with_rows(graph: fx.Graph, names: Collection[str]) -> fx.Node | None:
    """The first batched argument with a symbol for the number of rows."""
    arguments: list[fx.Node] = graph.find_nodes(op="placeholder")
    for node in arguments:
        value = fake_value(node)
        if isinstance(value, Tensor) and plain_name(str(node.target)) in names and value.shape[:1]:
            rows: Any = value.shape[0]
            if isinstance(formula(rows), sympy.Symbol):
                return node
    return None


@dataclass
class _BatchAnalysis:
    """Visits the nodes of a graph in order."""

    module: fx.GraphModule
    batched: Collection[str]
    size: int
    num_replicas: int
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """What each node returned: tensors without memory, and numbers."""
    _odd: set[fx.Node] = field(default_factory=set)
    """Numbers that come from the number of rows, or from values, and are no power of the former."""
    _causes: dict[int, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._symbol = batch_symbol_of(self.module.graph, self.batched)
        self._sizes: dict[Any, Any] = {} if self._symbol is None else {self._symbol: ROW_COUNT_PRIME}
        self._is_exact = self._symbol is not None
        self.tracker = DependenceTracker(ROW_COUNT_PRIME if self._is_exact else self.size, self._is_exact)
        self._checks = nodes_for_checks(self.module.graph)
        self._leading = _leading_to_collectives(self.module.graph)
        self._written = _written_through(self.module.graph)

    def run(self) -> None:
        with tracking(self.tracker):
            node = next(iter(self.module.graph.nodes))
            while node.op != "output":
                self.visit(node)
                node = node.next

    def visit(self, node: fx.Node) -> None:
        match node.op:
            case "placeholder":
                self.values[node] = self._argument(node)
            case "get_attr":
                held = operator.attrgetter(str(node.target))(self.module)
                self.values[node] = self._constant_tensor(held) if isinstance(held, Tensor) else held
            case "call_function" if is_branch_check(node):
                rows = None if self._is_exact else self.size
                refuse_ambiguous_branch(node, self.dependence_of, rows)
            case "call_function" | "call_method" if node in self._checks:
                pass  # each microbatch is checked by itself
            case "call_function" | "call_method" | "call_module":
                if not self._make_count(node):
                    self._call(node)

    def dependence_of(self, node: fx.Node) -> Dependence:
        """How a node depends on the batch; of several tensors, the first that is mixed or unproven."""
        if node not in self.values:
            return Unproven("is not computed")
        if node in self._odd:
            return Unproven("is a number that depends on the rows of the microbatch")
        result = self.values[node]
        if isinstance(result, int | float) and not isinstance(result, bool):
            return Whole(self.tracker.degrees.get(result, 0))
        found = [self.tracker.dependence_of(tensor) for tensor in tensors_in(result)]
        unknown = [value for value in found if isinstance(value, MixedRows | Unproven)]
        return (unknown or found or [Whole()])[0]

    def _argument(self, node: fx.Node) -> Any:
        value = fake_value(node)
        if not isinstance(value, Tensor):
            return self._number(node, value)
        tensor = self._like(value)
        has_rows = plain_name(str(node.target)) in self.batched
        if self._symbol is not None:
            has_rows = value.ndim > 0 and formula(value.shape[0]) == self._symbol
        given = not isinstance(value, nn.Parameter) and not any(map(mutates_argument, node.users))
        return self.tracker.record(tensor, TensorFact(PerRow(0) if has_rows else Whole(), given))

    def _constant_tensor(self, tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return self.tracker.record(made, TensorFact(Whole(), not isinstance(tensor, nn.Parameter)))

    def _like(self, value: Tensor) -> Tensor:
        """A meta tensor of the same dtype, in the sizes of the analysis."""
        shape = [self._size(size) for size in tuple[Any, ...](value.shape)]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def _size(self, size: Any) -> int:
        if not hasattr(size, "node"):
            return int(size)
        found = self._worked_out(size)
        return 1 if found is None else int(found)

    def _worked_out(self, number: Any) -> Any:
        """The value of a symbolic number in the analysis. Other symbols have their values of this call."""
        expression = sympy.sympify(number.node.expr)
        for symbol in expression.free_symbols - self._sizes.keys():
            size = size_of_symbol(symbol, number)
            if size is None:
                return None
            self._sizes[symbol] = size
        try:
            found = sympy.sympify(expression.xreplace(self._sizes))
        except ZeroDivisionError:
            return None
        if found in (sympy.true, sympy.false):
            return bool(found)
        if not found.is_number:
            return None
        return int(found) if isinstance(number, torch.SymInt) else float(found)

    def _number(self, node: fx.Node, value: Any) -> Any:
        """The value of a number in the analysis. Records the degree of a power of the rows."""
        if not hasattr(value, "node"):
            return value
        expression = sympy.sympify(value.node.expr)
        if unbacked_symbols(value) or (isinstance(value, torch.SymBool) and expression.free_symbols):
            self._odd.add(node)
        elif self._symbol is not None and self._symbol in expression.free_symbols:
            expression = expression.replace(lambda x: type(x).__name__ == "ToFloat", lambda x: x.args[0])
            powers = [k for k in (1, -1, 2, -2) if self._symbol not in _free(expression / self._symbol**k)]
            if not powers:
                self._odd.add(node)
            elif (found := self._worked_out(value)) is not None:
                self.tracker.degrees[found] = powers[0]
                return found
        found = self._worked_out(value)
        if found is None:
            self._odd.add(node)
        return 1 if found is None else found

    def _call(self, node: fx.Node) -> None:
        value = fake_value(node)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float):
            self.values[node] = self._number(node, value)
            if not self._odd.isdisjoint(node.all_input_nodes):
                self._odd.add(node)
            return
        if operator_name(node) in _NOT_FOLLOWED:
            self.values[node] = None
            return
        for _ in range(4):
            try:
                divided = self._divided_again(node)
                result = divided if divided is not None else self._run(node)
                if isinstance(value, tuple | list) and len(result) != len(value):
                    result = self._stand_in(
                        node, MixedRows("has another number of results for another number of rows")
                    )
                break
            except NeedsMeanError as needed:
                if not self._divide(node, needed.tensors):
                    result = self._stand_in(
                        node, MixedRows("adds sums over the rows of a microbatch to means")
                    )
                    break
            except Exception as error:
                result = self._stand_in(
                    node, Unproven(f"could not be followed: {type(error).__name__}: {error}")
                )
                break
        else:
            result = self._stand_in(node, Unproven("could not be made right"))
        self.values[node] = result
        self._check_sizes(node, result)
        self._note(node, result)
        if self.tracker.drew_random and self._is_exact and "dropout" not in operator_name(node):
            self._drawn.append(node)
        self.tracker.drew_random = False
        self._take_of_batch(node, result)

    def _run(self, node: fx.Node) -> Any:
        mapped: Any = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        args, kwargs = mapped
        if node.target in MODEL_COLLECTIVES and self.num_replicas > 1:
            return self._collective_result(node, args[0] if args else next(iter(kwargs.values())))
        if node.target is sync_batch_norm:
            return self.normalized(args[0])
        if is_higher_order(node.target):
            return self._higher_order(node, args)
        if operator_name(node) in HOLDING_NUMBERS:
            return self._constant(node, args, kwargs)
        if operator_name(node) == "embedding_bag" and args[0].ndim == 2:
            made = torch.nn.functional.embedding(*args[:2])[..., 0]
            for weights in tensors_in((args[2:], kwargs)):
                made = made * weights
            return made.sum(1)[:, None].expand(-1, args[1].shape[1])
        odd = [source for source in node.all_input_nodes if source in self._odd]
        if any(self._grows(source) for source in odd):
            return self._stand_in(node, MixedRows(_OF_ANOTHER_NUMBER))
        if odd and operator_name(node) not in _SHAPING:
            return self._stand_in(
                node, Unproven("computes with a number that depends on the rows of the microbatch")
            )
        if node.op == "call_module":
            raise TypeError("a call of a module")
        read = node.all_input_nodes
        if _is_foreign(node) and all(is_whole(self.dependence_of(source)) for source in read):
            self._assume_backward(node)
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        if odd and operator_name(node) not in ("reshape", "unflatten", "view"):
            chosen = [dim for dim, size in enumerate(result.shape) if size % NUM_SELECTED == 0]
            reason = Unproven("has a size that depends on the rows of the microbatch")
            value = SelectedRows() if chosen == [0] and len(odd) == 1 else reason
            known = self.tracker.fact(result)
            if isinstance(known.value, Whole | PerRow):
                self.tracker.record(result, replace(known, value=value))
        return result

    def _divided_again(self, node: fx.Node) -> Tensor | None:
        """Handle ``x[mask].view(rows, -1)``: microbatches check that rows have equally many elements."""
        if operator_name(node) not in ("view", "reshape") or len(node.args) < 2:
            return None
        chosen, size = node.args[0], node.args[1]
        size = size[0] if isinstance(size, list | tuple) and size else size
        if not isinstance(chosen, fx.Node) or self.dependence_of(chosen) != SelectedRows():
            return None
        index = chosen.args[1] if operator_name(chosen) == "getitem" else None
        mask = index[0] if isinstance(index, tuple) and index else index
        if not isinstance(mask, fx.Node) or self.dependence_of(mask) != PerRow(0):
            return None
        if not self.tracker.fact(self.values[mask]).from_arguments:
            return None
        if not isinstance(size, fx.Node) or self.values.get(size) != ROW_COUNT_PRIME or self._symbol is None:
            return None
        require_equal_counts(chosen, mask)
        return self.tracker.record(self._like(fake_value(node)), TensorFact(PerRow(0)))

    def _grows(self, number: fx.Node) -> bool:
        """Whether a number comes from the number of rows, and not from values alone."""
        value = fake_value(number)
        return hasattr(value, "node") and self._symbol in sympy.sympify(value.node.expr).free_symbols

    def normalized(self, x: Tensor) -> Tensor:
        """The result of a batch norm over the rows of all replicas: a declared exception."""
        return self.tracker.record(torch.empty_like(x), self.tracker.fact(x))

    def _constant(self, node: fx.Node, args: Sequence[Any], kwargs: Any) -> Any:
        """Handle ``torch.tensor`` of numbers, for which torch dispatches no operator."""
        read = [source for source in node.all_input_nodes if not isinstance(self.values[source], Tensor)]
        values = {self.dependence_of(source) for source in read}
        data = next(iter([*args[-1:], *kwargs.values()]), None)
        if not read or all(map(is_whole, values)):
            return (
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
                if node.op == "call_method"
                else (
                    node.target(*args, **kwargs)  # type: ignore[operator]
                )
            )
        value = values.pop() if len(values) == 1 and not isinstance(data, list | tuple) else None
        reason = MixedRows("computes with the number of rows, which is another one in a microbatch")
        return self._stand_in(node, value if isinstance(value, Whole) else reason)

    def _higher_order(self, node: fx.Node, args: Sequence[Any]) -> Any:
        """Run the graph that an operator calls. Nothing is proved of the backward of an autograd function."""
        name = str(node.target)
        if name in ("tag_activation_checkpoint", "wrap", "invoke_subgraph"):
            inner, *rest = args
            rest = rest[1:] if name == "invoke_subgraph" else rest
            return _Inner(inner, self).run(*rest)
        if name == "autograd_function_apply":
            self._assume_backward(node)
            forward, _, *read = args
            output, _ = forward(*_as_many(forward, read))
            return output
        raise TypeError(f"a call of {name}")

    def _assume_backward(self, node: fx.Node) -> None:
        if any(getattr(fake_value(source), "requires_grad", False) for source in node.all_input_nodes):
            self._assumed.append(f"the backward of {describe_call(node)} adds up over microbatches")

    def _collective_result(self, node: fx.Node, own: Tensor) -> Tensor:
        """The result of a collective over one round of microbatches."""
        known = self.tracker.fact(own)
        sizes = (self.num_replicas * own.shape[0], *own.shape[1:]) if own.ndim else ()
        made = torch.empty(sizes, dtype=own.dtype, device="meta")
        in_front = isinstance(known.value, PerRow) and known.value == PerRow(0, known.value.outer)
        if in_front and node.target in ALL_GATHERS:
            self.tracker.gathered_sizes.add(made.shape[0])
            if known.value != PerRow(0):
                self._assumed.append(
                    f"the order does not matter of the rows that {describe_call(node)} gathers"
                )
            return self.tracker.record(made, TensorFact(Whole()))
        fits = known.value == SumOverRows() if node.target in ALL_REDUCES else isinstance(known.value, Whole)
        if node.target in BROADCASTS or node.target in ALL_REDUCES:
            value: Dependence = (
                Whole() if fits else MixedRows("reduces what is no sum over the rows of a replica")
            )
            return self.tracker.record(torch.empty_like(own), TensorFact(value))
        value = (
            known.value
            if isinstance(known.value, Whole | MixedRows | Unproven)
            else MixedRows("gathers what has no rows")
        )
        return self.tracker.record(made, TensorFact(value))

    def _stand_in(self, node: fx.Node, value: Dependence) -> Any:
        """Tensors of the captured shapes, recorded as ``value``, for a call that is not run."""
        read = tensors_in(fx.map_arg((node.args, node.kwargs), self.values.get))
        known = [self.tracker.fact(tensor) for tensor in read]
        unknown: list[Dependence] = [k.value for k in known if isinstance(k.value, MixedRows)] or [value]
        given = all(k.from_arguments for k in known)

        written = self.values.get(node.args[0]) if mutates_argument(node) else None  # type: ignore[arg-type]
        for tensor in tensors_in(written):
            self.tracker.overwrite(tensor, unknown[0])

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            try:
                return self.tracker.record(self._like(leaf), TensorFact(unknown[0], given))
            except RuntimeError:  # more elements than torch can count
                pairs = MixedRows("makes something for every pair of rows")
                return self.tracker.record(torch.empty((), device="meta"), TensorFact(pairs, given))

        return pytree.tree_map(made, fake_value(node))

    def _has_rows(self, size: Any) -> bool:
        """Whether a size depends on the number of rows, and on no value."""
        is_of_rows = self._symbol in sympy.sympify(formula(size)).free_symbols
        return is_of_rows and not unbacked_symbols(size)

    def _check_sizes(self, node: fx.Node, result: Any) -> None:
        """Mark results with a size such as ``rows - 1``, which is no multiple of the rows, as mixed."""
        for tensor, seen in zip(tensors_in(result), tensors_in(fake_value(node)), strict=False):
            is_known = not isinstance(self.tracker.dependence_of(tensor), MixedRows | Unproven)
            sizes = zip(tensor.shape, tuple[Any, ...](seen.shape), strict=False)
            is_odd = any(made % ROW_COUNT_PRIME and self._has_rows(size) for made, size in sizes)
            if is_known and is_odd:
                why = "has a size that depends on the number of rows, which is another one in a microbatch"
                self.tracker.record(tensor, replace(self.tracker.fact(tensor), value=MixedRows(why)))

    def _note(self, node: fx.Node, result: Any) -> None:
        """Remember the node at which a value became unproven, and the sizes that values decide."""
        for tensor in tensors_in((result, self._read(node))):
            value = self.tracker.dependence_of(tensor)
            if isinstance(value, MixedRows | Unproven) and id(value) not in self._causes:
                self._kept_causes.append(value)
                self._causes[id(value)] = node
        if self.tracker.assumes_rows:
            self._assumed.append(f"{describe_call(node)} computes each row by itself")
            self.tracker.assumes_rows = False
        for tensor, seen in zip(tensors_in(result), tensors_in(fake_value(node)), strict=False):
            for size, made in zip(tuple[Any, ...](seen.shape), tensor.shape, strict=False):
                if isinstance(formula(size), sympy.Symbol):
                    self._sizes.setdefault(formula(size), made)

    def _read(self, node: fx.Node) -> Any:
        """The values of a node's inputs, which it may have written to."""
        return [self.values.get(source) for source in node.all_input_nodes]

    _kept_causes: list[Dependence] = field(default_factory=list)
    _drawn: list[fx.Node] = field(default_factory=list)
    _assumed: list[str] = field(default_factory=list)

    def _divide(self, node: fx.Node, sums: Sequence[Tensor]) -> bool:
        """Let a node read means in place of the ``sums``. Returns whether that is possible."""
        wanted = {id(tensor) for tensor in sums}
        found = [x for x in node.all_input_nodes if id(self.values.get(x)) in wanted]
        replaced = [self._mean_of(source, node) for source in found]
        return bool(found) and all(replaced)

    def _mean_of(self, total: fx.Node, reader: fx.Node) -> bool:
        """Let ``reader`` read the sum divided by the microbatch's fraction of the rows."""
        is_written = mutates_argument(reader) and reader.args[0] is total
        is_shared = len(total.users) > 1 or self.tracker.shares_memory(self.values[total])
        if (is_written and is_shared) or not fake_value(total).is_floating_point():
            return False
        share = self._before(reader, total, BATCH_FRACTION, fake_value(total).device)
        cast = self._before(
            reader, total, torch.ops.aten._to_copy.default, share, dtype=fake_value(total).dtype
        )
        mean = self._before(reader, total, operator.truediv, total, cast)
        mean.meta["example_value"] = fake_value(total)
        share.meta["example_value"] = cast.meta["example_value"] = torch.empty((), device="meta")
        for each in (share, cast, mean):
            self.visit(each)
        reader.replace_input_with(total, mean)
        mean.args = (total, cast)
        return True

    def _before(
        self, reader: fx.Node, source: fx.Node, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Insert a call of the operator of ``source`` right before ``reader``, after all writes into it."""
        with reader.graph.inserting_before(reader):
            node = reader.graph.create_node("call_function", function, args, kwargs)
        node.meta = {key: source.meta[key] for key in INHERITED_META if key in source.meta}
        return node

    def _take_of_batch(self, node: fx.Node, result: Any) -> None:
        """Let the users of a node read its value of the whole batch, if it follows from the arguments."""
        if not isinstance(result, Tensor) or node in self._leading or node.target is BATCH_COUNT:
            return
        if any(user.target is BATCH_COUNT for user in node.users):
            return  # as the count of a cross entropy
        known = self.tracker.fact(result)
        seen = fake_value(node)
        fixed = seen is None or not any(map(unbacked_symbols, seen.shape))
        grows = seen is not None and any(map(self._has_rows, seen.shape))
        takes = (
            isinstance(known.value, SumOverRows | MixedRows)
            if self._symbol is not None
            else known.value == SumOverRows()
        )
        if not (known.from_arguments and takes and fixed and not grows) or self._is_written_view(
            node, result
        ):
            return
        users = [user for user in node.users if user not in self._checks]
        whole = insert_after(node, "batch_counts", BATCH_COUNT, node, known.value == SumOverRows())
        whole.meta["example_value"] = fake_value(node)
        for user in users:
            user.replace_input_with(node, whole)

    def _is_written_view(self, node: fx.Node, result: Tensor) -> bool:
        """Whether a node is a view that is written through later."""
        shown = tensors_in(self._read(node))
        return memory_id(result) in map(memory_id, shown) and node in self._written

    def _make_count(self, node: fx.Node) -> bool:
        """Replace a mean over counted targets by their sum divided by the count of the whole batch.

        Returns whether it was done; the inserted nodes are visited next.
        """
        if operator_name(node) not in _COUNTED:
            return False
        arguments = named_arguments(node)
        target, weight = arguments.get("target"), arguments.get("weight")
        if not isinstance(target, fx.Node) or fake_value(target).is_floating_point():
            return False
        if reduction_of(arguments) != "mean" or not isinstance(
            self.dependence_of(target), PerRow | SelectedRows
        ):
            return False
        tensors = [self.values[x] for x in (target, weight) if isinstance(x, fx.Node)]
        if not all(self.tracker.fact(x).from_arguments for x in tensors):
            return False
        if isinstance(weight, fx.Node) and not is_whole(self.dependence_of(weight)):
            return False
        chain = NodeInserter(node)
        valid = chain("valid", torch.ne, target, arguments["ignore_index"])
        counted = valid
        if weight is not None:
            invalid = chain("invalid", torch.logical_not, valid)
            index = chain("index", torch.flatten, chain("index", torch.masked_fill, target, invalid, 0))
            weights = chain("weights", torch.gather, weight, 0, index)
            counted = chain("weights", torch.masked_fill, weights, chain("flat", torch.flatten, invalid), 0)
        count = chain("count", torch.sum, counted)
        # Of scores of which nothing is proved, too: they are no sum that another rule would divide.
        share = chain.scale_by_batch_fraction(chain("count", BATCH_COUNT, count, True), node)
        total = chain.repeat_call(node, reduction=2 if isinstance(arguments["reduction"], int) else "sum")
        mean = chain(node.name, operator.truediv, total, share)
        total.meta["example_value"] = mean.meta["example_value"] = fake_value(node)
        node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not total)
        return True

    def finish(self, has_loss: bool, batch_size: int = 0) -> BatchFindings:
        """Turn a loss that is a sum into a mean, mark outputs that are no means, return the findings.

        What mixes rows becomes the tail, if its inputs of the ``batch_size`` rows are small enough.
        """
        output = self.module.graph.output_node()
        leaves = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)]
        loss = leaves[0] if has_loss and leaves else None
        problem: MixedRows | Unproven | None = None
        with tracking(self.tracker):
            if loss is not None and self.dependence_of(loss) == SumOverRows() and self._mean_of(loss, output):
                loss = next(x for x in pytree.tree_leaves(output.args) if isinstance(x, fx.Node))
        if loss is not None and self.dependence_of(loss) != MEAN and not is_whole(self.dependence_of(loss)):
            value = self.dependence_of(loss)
            problem = MixedRows("is no sum or mean over the rows of the batch")
            if isinstance(value, MixedRows | Unproven):
                problem = value
        if isinstance(problem, MixedRows) and not self._is_exact:
            cause = self._causes.get(id(problem))
            problem = Unproven(f"{problem.why}, or computes with other sizes that equal the number of rows")
            self._causes |= {id(problem): cause} if cause else {}
        others = [leaf for leaf in leaves if leaf is not loss]
        tail = self._find_tail(loss if problem is not None else None, others, batch_size)
        nodes = tail.nodes if isinstance(tail, TailNodes) else frozenset[fx.Node]()
        output.args = fx.map_arg(
            output.args, lambda node: node if node is loss or node in nodes else self._marked(node)
        )
        if loss in nodes:
            problem = None
        elif problem is not None and isinstance(tail, str):
            cause = self._causes.get(id(problem))
            problem = replace(problem, why=problem.why + tail)
            self._causes |= {id(problem): cause} if cause else {}
        return BatchFindings(
            self._placed(problem, loss) if isinstance(problem, MixedRows) else "",
            self._placed(problem, loss) if isinstance(problem, Unproven) else "",
            tuple(dict.fromkeys(self._assumed)),
            num_batch_norms=self.tracker.num_batch_norms,
            has_norm_over_rows_alone=self.tracker.has_norm_over_rows_alone,
            unordered_random=tuple(
                dict.fromkeys(
                    describe_call(x) for x in self._drawn if x in _leading_to(output) and x not in nodes
                )
            ),
            tail=self._with_tail(tail) if isinstance(tail, TailNodes) else "",
        )

    def _find_tail(self, loss: fx.Node | None, others: Sequence[fx.Node], batch_size: int) -> TailNodes | str:
        """What is to run once, of all rows: a ``loss`` that mixes rows, and if possible also other results.

        Otherwise the reason why a loss cannot, as a clause.
        """
        if not batch_size or self._symbol is None or self._leading:
            return ""
        wanted = [] if loss is None else [loss]
        outputs = [node for node in others if self._needs_all_rows(node)]
        reason = ""
        for nodes in ([*wanted, *outputs, *self._buffer_writes()], [*wanted, *outputs], wanted):
            found = find_tail(self.module.graph, nodes, self.dependence_of, self._memory_of) if nodes else ""
            if isinstance(found, TailNodes):
                num_bytes = sum(self.values[x].nbytes for x in found.inputs) // ROW_COUNT_PRIME * batch_size
                num_bytes += sum(self.values[x].nbytes for x in found.sums) * batch_size
                if num_bytes <= MAX_TAIL_BYTES:
                    return found
                found = f"it would read {num_bytes} bytes, and {MAX_TAIL_BYTES} at most"
            reason = f"; the rest cannot run once of all rows: {found}" if found else ""
        return reason

    def _needs_all_rows(self, output: fx.Node) -> bool:
        """Whether the results of microbatches do not make the batch's result."""
        value = self.dependence_of(output)
        if not isinstance(fake_value(output), Tensor) or value in (MEAN, SumOverRows()) or is_whole(value):
            return False
        return not isinstance(value, PerRow) or bool(value.degree) or value.is_row_number

    def _buffer_writes(self) -> list[fx.Node]:
        """The calls that write what depends on rows into memory that the model keeps."""
        graph = self.module.graph
        kept = {self._memory_of(x) for x in graph.nodes if x.op in ("placeholder", "get_attr")}
        return [
            node
            for node in writes(graph)
            if self._memory_of(node.all_input_nodes[0]) in kept
            and not all(isinstance(self.dependence_of(x), Whole) for x in node.all_input_nodes[1:])
        ]

    def _with_tail(self, tail: TailNodes) -> str:
        """Let the tail run once a step. Returns with what it begins, in words."""
        first = next(node for node in self.module.graph.nodes if node in tail.nodes)
        rows = _argument_with_rows(self.module.graph, self.batched)
        assert rows is not None, "there is no tail without a symbol for the number of rows"
        insert_tail_inputs(self.module.graph, tail, rows, self.dependence_of)
        return describe_call(first)

    def _memory_of(self, node: fx.Node) -> object:
        """Identifies the memory of a node's value, in which views and their base are."""
        tensors = tensors_in(self.values.get(node))
        return memory_id(tensors[0]) if tensors else node

    def _placed(self, value: Dependence, node: fx.Node | None = None) -> str:
        """The reason for a value, with the line of the model where it arose."""
        found = self._causes.get(id(value), node)
        assert isinstance(value, MixedRows | Unproven)
        return f"{describe_call(found)} {value.why}" if found is not None else value.why

    def _marked(self, node: fx.Node) -> fx.Node:
        """The node to return in place of an output, marked with how microbatches make up the batch's."""
        value = self.dependence_of(node)
        tensor = fake_value(node)
        of_round = any(
            size in self.tracker.gathered_sizes for x in tensors_in(self.values[node]) for size in x.shape
        )
        if not isinstance(tensor, Tensor) or value == MEAN or (is_whole(value) and not of_round):
            return node
        if isinstance(value, PerRow) and not value.degree and not value.is_row_number:
            axis = BatchAxis(value.dim, value.outer, value.inner)
            return node if axis.is_leading else mark_output_merge(node, axis=axis)
        if isinstance(value, Unproven) and tensor.ndim == 0 and tensor.is_floating_point():
            self._assumed.append(f"{self._placed(value, node)}, and that {node.name} is a mean over rows")
            return node
        if isinstance(value, Unproven) and (taken := self._axis_of_rows(tensor)) is not None:
            self._assumed.append(f"{self._placed(value, node)}, and that dimension {taken.dim} has the rows")
            return node if taken.is_leading else mark_output_merge(node, axis=taken)
        reason = (
            ""
            if value == SumOverRows()
            else self._placed(value, node)
            if isinstance(value, MixedRows | Unproven)
            else (f"{describe_call(node)} is no sum or mean over the rows of the batch")
        )
        return mark_output_merge(node, reason)

    def _axis_of_rows(self, tensor: Tensor) -> BatchAxis | None:
        """The one dimension that grows with the batch, whose rows are taken to come one after the other."""
        sizes = tuple[Any, ...](tensor.shape)
        dims = [dim for dim, size in enumerate(sizes) if self._symbol is not None and self._has_rows(size)]
        if len(dims) != 1:
            return None
        return BatchAxis(dims[0], inner=1 if formula(sizes[dims[0]]) == self._symbol else 0)


class _Inner(fx.Interpreter):
    """Runs a graph that an operator calls."""

    def __init__(self, module: fx.GraphModule, walk: _BatchAnalysis) -> None:
        super().__init__(module)
        self._walk = walk

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is sync_batch_norm:
            return self._walk.normalized(args[0])
        return super().call_function(target, args, kwargs)


_OF_ANOTHER_NUMBER = "computes with the number of rows, which is another one in a microbatch"

_NOT_FOLLOWED = {
    *("enter_autocast", "exit_autocast", "set_grad_enabled", "assert_scalar", "assert_async", "check"),
    *("sym_constrain_range_for_size", "sym_constrain_range", "manual_seed"),
}
"""Calls that compute nothing."""


def _is_foreign(node: fx.Node) -> bool:
    """Whether an operator is neither of torch nor of pipec, so that nobody knows its backward."""
    return isinstance(node.target, OpOverload) and node.target.namespace not in _KNOWN_NAMESPACES


_KNOWN_NAMESPACES = ("aten", "prims", "pipec", "_c10d_functional", "torchvision")


def _as_many(module: fx.GraphModule, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments for a graph, preceded by None for a context if it takes one."""
    return [None] * (len(module.graph.find_nodes(op="placeholder")) - len(args)) + list(args)


def _free(expression: Any) -> set[Any]:
    found: set[Any] = sympy.cancel(expression).free_symbols
    return found


def _leading_to(output: fx.Node) -> set[fx.Node]:
    """A node and all nodes that it depends on."""
    needed = {output}
    for node in reversed(output.graph.nodes):
        written = [x for x in node.args[:1] if isinstance(x, fx.Node)] if mutates_argument(node) else []
        if node in needed or not needed.isdisjoint(written):
            needed.update([node, *node.all_input_nodes])
    return needed


def _written_through(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that calls write to, and the nodes that they may be views of."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if mutates_argument(node) or node in found:
            found.update(x for x in node.args[:1] if isinstance(x, fx.Node))
    return found


def _leading_to_collectives(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of model collectives: each replica must compute its own."""
    leading: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target in MODEL_COLLECTIVES or any(user in leading for user in node.users):
            leading.add(node)
    return leading
