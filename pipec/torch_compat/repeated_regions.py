"""Lets Dynamo trace one of many equal blocks, and copies its graph for the others.

Dynamo has this for functions that a model marks with ``torch.compiler.nested_compile_region``: a marked call
becomes a node that calls a subgraph, and a later call that meets the guards of an earlier one reuses its
subgraph. Here a module that has siblings of its class is such a region, and no model needs a mark. Afterwards
the subgraphs are inlined, so that the graph is the one that Dynamo makes without regions.
"""

import contextlib
import dataclasses
import functools
import logging
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from traceback import StackSummary
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import LocalSource
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable, record_nn_module_stack
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Guard, Source
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, is_accessor_node
from torch.utils import _pytree as pytree

try:
    from torch._dynamo.guards import GUARD_VALUE_DISPATCH, SKIP_GUARD, GuardCheckSpec
    from torch._dynamo.variables import invoke_subgraph

    regions: Any = invoke_subgraph
except ImportError:  # before torch 2.13, Dynamo traces each call of a region
    regions = None

log = logging.getLogger("pipec")

MIN_BLOCKS = 4
"""The fewest siblings of one class that are taken for blocks. A region costs more than a plain call."""

MAX_MISSES = 2
"""A class has no more regions when so many more calls could not reuse a subgraph than could."""

_BLOCK = "pipec_block"
"""Key in the metadata of a call of a region: the entry of its module in ``nn_module_stack``."""


def repeated_modules(module: nn.Module) -> frozenset[nn.Module]:
    """The modules below ``module`` that may be equal blocks: siblings of one class, with children."""
    if regions is None:
        return frozenset()
    found = set[nn.Module]()
    for parent in module.modules():
        siblings = defaultdict[type, set[nn.Module]](set)
        for child in parent.children():
            if any(True for _ in child.children()):
                siblings[type(child)].add(child)
        found.update(*(each for each in siblings.values() if len(each) >= MIN_BLOCKS))
    return frozenset(found)


def call_block(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The function that Dynamo traces as a region."""
    return module(*args, **kwargs)


call_block.__marked_compile_region_max_reuse_entries__ = 1_000_000  # type: ignore[attr-defined]


class RegionTracing:
    """Makes regions of the calls of some modules while Dynamo traces.

    ``failed`` says that the model must be traced without regions: an error has left one, even if the model
    caught it, or a subgraph cannot be copied, or none is reused.
    """

    def __init__(self, blocks: Collection[nn.Module]) -> None:
        self.failed = False
        self.blocks = blocks
        self._is_inside = False
        self._num_reused = 0
        self._misses = defaultdict[type, int](int)
        self._num_mutations = 0
        self._noted: dict[int, _Noted] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make regions within this context."""
        replaced: dict[tuple[Any, str], Callable[..., Any]] = {
            (UnspecializedNNModuleVariable, "call_function"): self._called,
            (regions, "build_fingerprint_with_pytree"): _flattened,
            (regions, "build_reuse_condition"): self._built,
            (regions, "is_reusable"): self._reusable,
            (SideEffects, "store_attr"): self._mutated,
            (SideEffects, "mutation"): self._mutated,
            (higher_order_ops, "are_same_graph_modules"): lambda *args: False,  # to it, 1 is True
        }
        with contextlib.ExitStack() as stack:
            for (owner, name), method in replaced.items():
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, _bound(method, original))
            yield

    def inline(self, module: fx.GraphModule) -> None:
        """Copy the subgraphs into the graph, so that it becomes the one without regions.

        A subgraph that cannot be copied counts as an error: the graph must be traced again. So must one
        without reused subgraphs, for Dynamo moves some nodes of a subgraph out of it.
        """
        self.failed |= not self._num_reused
        try:
            _inline(module)
        except _NotInlinedError as error:
            log.debug("%s", error)
            self.failed = True

    def _called(
        self, original: Any, block: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        is_region = (
            not self._is_inside
            and block.value in self.blocks
            and block.source is not None
            and self._misses[type(block.value)] <= MAX_MISSES
            and tx.output.current_tracer.parent is None
        )
        if not is_region:
            if self._misses[type(block.value)] > MAX_MISSES and not self._num_reused:
                self.failed = True
                raise RuntimeError("no subgraph is reused")
            return original(block, tx, args, kwargs)
        region = regions.InvokeSubgraphHigherOrderVariable(torch.ops.higher_order.invoke_subgraph)
        function: Any = call_block
        self._is_inside = True
        self._misses[type(block.value)] += 1
        state = _torch_state(tx)
        try:
            result = region.call_function(tx, [UserFunctionVariable(function), block, *args], {**kwargs})
        except BaseException:
            self.failed = True
            raise
        finally:
            self._is_inside = False
        if _torch_state(tx) != state:
            self.failed = True
            raise RuntimeError("a block changes settings of torch for what follows it")
        node = next(node for node in reversed(tx.output.graph.nodes) if _is_call(node))
        with record_nn_module_stack("", block.get_nn_module_stack_source(), tx, block.value):
            node.meta[_BLOCK] = [*tx.nn_module_stack.values()][-1]
        return result

    def _mutated(self, original: Any, effects: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        self._num_mutations += item.source is not None
        return original(effects, item, *args, **kwargs)

    def _built(self, original: Any, tx: Any, call: Any, sources: Collection[Source]) -> Any:
        """The condition for reusing a traced subgraph; None if it must not be reused."""
        aliases, guards = _aliases(tx, call, sources), _guards_of_block(tx, call)
        condition = None if aliases is None or guards is None else original(tx, call, sources)
        if condition is None:
            return None
        known = {guard for _, _, _, guard in condition.guards}
        condition.guards.extend(each for each in guards or () if each[-1] not in known)
        read = {source: tx.output.resolve_source_value(source) for source, *_ in condition.guards}
        kinds = {guard: _kind(guard, read[source]) for source, _, _, guard in condition.guards}
        distinct = [source for source, value in read.items() if isinstance(value, _MUTABLE)]
        self._noted[id(condition)] = _Noted(
            self._num_mutations,
            _torch_state(tx),
            aliases or {},
            kinds,
            _by_object(distinct, read.__getitem__),
        )
        return condition

    def _reusable(self, original: Any, tx: Any, condition: Any, call: Any, cached: Any) -> bool:
        """Whether a call may reuse a subgraph. Its block is guarded then as the traced one is."""
        without_guards = dataclasses.replace(condition, guards=[])
        noted = self._noted[id(condition)]
        if self._num_mutations != noted.num_mutations or _is_mutated(tx, call):
            return False
        if _torch_state(tx) != noted.torch_state:
            return False
        if call.treespec != condition.treespec or not _has_equal_constants(condition, call):
            return False
        if not _has_distinct_tensors(call) or not original(tx, without_guards, call, cached):
            return False
        of_call = _Renamed(regions.build_source_replacement(cached.arg_sources, call.arg_sources))
        value_of = _SourceReader(tx)
        added = []
        for (one, other), is_guarded in noted.aliases.items():
            if value_of(of_call(one)) is not value_of(of_call(other)):
                return False
            if is_guarded:
                guard = functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=of_call(other))
                added.append(Guard(of_call(one), guard, user_stack=StackSummary()))
        for source, handler, expected, guard in condition.guards:
            if (guarded := of_call(source)) is source:
                continue
            value = value_of(guarded)
            if not handler.eval_fn(value, expected) or _kind(guard, value) != noted.kinds[guard]:
                return False
            if guard.create_fn_name() != "TENSOR_MATCH":  # which comes with the argument of the graph
                added.append(Guard(guarded, guard.create_fn, stack=guard.stack, user_stack=guard.user_stack))
        if _by_object(noted.objects, lambda source: value_of(of_call(source))) != noted.objects:
            return False
        for each in added:
            tx.output.guards.add(each, collect_debug_stack=False)
        self._num_reused += 1
        self._misses[type(call.flat_vts[0][1].value)] -= 2
        return True


@dataclasses.dataclass(frozen=True)
class _Noted:
    """What a traced call found, besides its condition: a call that reuses its subgraph finds the same.

    ``kinds`` tells values apart that a guard takes for equal. ``objects`` has the sources of each object.
    """

    num_mutations: int
    torch_state: tuple[Any, ...]
    aliases: Mapping[tuple[Source, Source], bool]
    kinds: Mapping[Guard, Any]
    objects: Mapping[Source, Source]


_MUTABLE = (nn.Module, torch.Tensor, list, dict, set)


def _by_object(sources: Iterable[Source], value_of: Callable[[Source], Any]) -> dict[Source, Source]:
    """Each source with the first that reads the same object."""
    first = dict[int, Source]()
    return {source: first.setdefault(id(value_of(source)), source) for source in sources}


def _kind(guard: Guard, value: Any) -> Any:
    """The type of a value, and within constants that are compared by ==, for which 1 is True."""
    return _types(value) if guard.create_fn_name() in ("EQUALS_MATCH", "CONSTANT_MATCH") else type(value)


def _types(value: Any) -> Any:
    match value:
        case tuple() | list():
            return type(value), [*map(_types, value)]
        case dict():
            return type(value), [(_types(key), _types(each)) for key, each in value.items()]
        case bool() | int() | float() | complex():
            return type(value), repr(value)
    return type(value)


def _torch_state(tx: Any) -> tuple[Any, ...]:
    """The settings of torch that a block's operators and its code may depend on."""
    return (
        GlobalStateGuard().__getstate__(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        *(
            getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "math", "cudnn")
        ),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        *map(id, tx.symbolic_torch_function_state.mode_stack),
    )


class _Renamed:
    """Maps what one call reads to what another reads, given what differs. Remembers what it has mapped."""

    def __init__(self, sources: Mapping[Source, Source]) -> None:
        self._known = {**sources}

    def __call__(self, source: Source) -> Source:
        if source not in self._known:
            fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
            sources = {name: self(each) for name, each in fields.items() if isinstance(each, Source)}
            is_same = all(each is fields[name] for name, each in sources.items())
            self._known[source] = source if is_same else dataclasses.replace(source, **sources)
        return self._known[source]


class _SourceReader:
    """Reads sources. Raises what reading them raises."""

    def __init__(self, tx: Any) -> None:
        self._scope = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}, dict[str, Any]()
        self._known = dict[Source, Any]()

    def __call__(self, source: Source) -> Any:
        return source.get_value(*self._scope, self._known)


def _bound(method: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(original, *args, **kwargs)


def _flattened(original: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The leaves of a call's arguments, which Dynamo finds by tracing the code of ``pytree`` in each call.

    That code asks for the type of each, and so are types guarded here. Containers that come from elsewhere
    than the traced code are left to Dynamo.
    """
    named = {name: _as_tree(variable) for name, variable in kwargs.items()}
    leaves, structure = pytree.tree_flatten(([*map(_as_tree, args)], named))
    tags = [regions.classify_vt(leaf) for leaf in leaves]
    if None in tags:
        return original(tx, args, kwargs)
    sources = [leaf.source for leaf in leaves]
    for tag, source in zip(tags, sources, strict=True):
        if source is not None and tag is not regions.InputTag.TENSOR:
            install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))
    return regions.InputFingerprint([*zip(tags, leaves, strict=True)], sources, treespec=structure)


def _as_tree(variable: Any) -> Any:
    """A variable of Dynamo's, or what it holds in a tuple or list that the traced code makes."""
    variable = variable.realize()
    if type(variable) in (TupleVariable, ListVariable) and variable.source is None:
        return variable.python_type()(map(_as_tree, variable.items))
    return variable


_OTHER_BLOCK = LocalSource("other block")
"""A source that takes the place of a block's, to find out what is read through it."""


def _aliases(tx: Any, call: Any, sources: Collection[Source]) -> dict[tuple[Source, Source], bool] | None:
    """Sources that a region reads, each with an earlier source of the same object, by which Dynamo reads it.

    The value says whether Dynamo guards that they are one object.

    None if another call may differ in a way that guards do not tell: if two arguments are one tensor, if an
    argument is a module, or a tensor that the region also reads from elsewhere.
    """
    if _is_mutated(tx, call) or not _has_distinct_tensors(call):
        return None
    if any(tag is regions.InputTag.MODULE for tag, _ in call.flat_vts[1:]):
        return None
    renamed = _Renamed({call.arg_sources[0]: _OTHER_BLOCK})
    if any(source is not None and renamed(source) is not source for source in call.arg_sources[1:]):
        return None
    given, known = {each.as_proxy().node for each in _tensors(call)}, tx.output.side_effects
    aliases = dict[tuple[Source, Source], bool]()
    for guard in tx.output.guards:
        if guard.create_fn_name() == "DUPLICATE_INPUT":
            aliases[guard.originating_source, guard.create_fn.keywords["source_b"]] = True
    for source in sources:
        try:
            value = tx.output.resolve_source_value(source)
        except Exception:
            return None
        if value not in known:
            continue
        variable = known[value]
        if variable.source is None or (variable.is_tensor() and variable.as_proxy().node in given):
            return None
        if variable.source != source:
            aliases.setdefault((source, variable.source), False)
    return {(x, y): each for (x, y), each in aliases.items() if (renamed(x), renamed(y)) != (x, y)}


def _is_mutated(tx: Any, call: Any) -> bool:
    """Whether the model has changed the block of a call before, which no source tells."""
    renamed = _Renamed({call.arg_sources[0]: _OTHER_BLOCK})
    return any(renamed(source) is not source for source in tx.output.side_effects.mutated_sources)


def _guards_of_block(tx: Any, call: Any) -> list[tuple[Source, Any, Any, Guard]] | None:
    """The guards on everything in the block of a call, as a condition has them.

    Dynamo's own condition lacks those on what is read without a variable, such as the classes and hooks of
    modules within. None if a guard cannot be compared.
    """
    renamed = _Renamed({call.arg_sources[0]: _OTHER_BLOCK})
    found = []
    for guard in tx.output.guards:
        source = guard.originating_source
        if renamed(source) is source:
            continue
        handler = GUARD_VALUE_DISPATCH.get(guard.create_fn_name())
        if handler is SKIP_GUARD:
            continue
        if not isinstance(handler, GuardCheckSpec):
            return None
        try:
            expected = handler.get_metadata_fn(guard, tx.output.resolve_source_value(source))
        except Exception:
            return None
        found.append((source, handler, expected, guard))
    return found


def _tensors(call: Any) -> list[Any]:
    """Dynamo's variables of the tensors and sizes among the arguments of a region's call."""
    kinds = (regions.InputTag.TENSOR, regions.InputTag.SYMNODE)
    return [variable for tag, variable in call.flat_vts if tag in kinds]


def _has_distinct_tensors(call: Any) -> bool:
    """Whether no two arguments are one tensor, and none is of a subclass of tensors, or an array."""
    tensors = [variable.realize() for variable in _tensors(call)]
    nodes = {variable.as_proxy().node for variable in tensors}
    return len(nodes) == len(tensors) and {*map(type, tensors)} <= {TensorVariable, SymNodeVariable}


def _has_equal_constants(condition: Any, call: Any) -> bool:
    """Whether constants among the arguments are equal: 1 is not True, nor 0.0 -0.0."""
    pairs = zip(condition.input_checks, call.flat_vts, strict=True)
    constants = [(x, y.value) for (tag, x), (_, y) in pairs if tag is regions.InputTag.CONSTANT]
    return all(type(x) is type(y) and repr(x) == repr(y) for x, y in constants)


# inline


class _NotInlinedError(Exception):
    """A subgraph calls a graph, or has sizes that depend on values."""


def _inline(module: fx.GraphModule) -> None:
    graph = module.graph
    sizes, first = dict[sympy.Expr, fx.Node](), dict[str, fx.Node]()
    for node in [*graph.nodes]:
        if (size := _size(node)) is not None:
            sizes.setdefault(size, node)
        elif _is_call(node) and _BLOCK in node.meta:
            attribute, name, *arguments = node.args
            body: Any = module.get_submodule(attribute.target)
            _copy(node, first.setdefault(name, node), body.graph, arguments, sizes)
            graph.erase_node(node)
            graph.erase_node(attribute)
    for name in first:
        module.delete_submodule(name)
    _erase_unused_sizes(graph)
    module.recompile()


def _copy(
    call: fx.Node,
    first: fx.Node,
    body: fx.Graph,
    arguments: Sequence[fx.Node],
    sizes: dict[sympy.Expr, fx.Node],
) -> None:
    """Put the nodes of a body in place of a call. ``first`` is the call with which it was traced.

    A size is read from the node that is it, if ``sizes`` has one, as in a graph without subgraphs.
    """
    copies = dict(zip(body.find_nodes(op="placeholder"), arguments, strict=True))
    with call.graph.inserting_before(call):
        for node in body.nodes:
            size = _size(node)
            if size in sizes:
                copies[node] = sizes[size]
            elif node.op in ("call_function", "call_method"):
                if isinstance(node.target, torch._ops.HigherOrderOperator) or _has_unbacked_symbols(node):
                    raise _NotInlinedError(f"{node.format_node()} is no plain operator")
                copies[node] = call.graph.node_copy(node, copies.__getitem__)
                copies[node].meta["nn_module_stack"] = _module_stack(node, call, first)
                if size is not None:
                    sizes[size] = copies[node]
            elif node.op not in ("placeholder", "output"):
                raise _NotInlinedError(f"{node.format_node()} is of the subgraph alone")
    results: Any = body.output_node().args[0]
    for user in [*call.users]:
        item: Any = user.args[1]
        user.replace_all_uses_with(copies[results[item]])
        call.graph.erase_node(user)


def _module_stack(node: fx.Node, call: fx.Node, first: fx.Node) -> dict[str, tuple[str, type]]:
    """The modules of a copied node: those around the call, its block, and those within."""
    stacks: Any = [each.meta.get("nn_module_stack", {}) for each in (node, call, first)]
    stack, around, old_around = stacks
    (new, _), (old, _) = call.meta[_BLOCK], first.meta[_BLOCK]
    within = [*stack.items()][len(old_around) :]
    return {**around} | {key: (re.sub(f"^{re.escape(old)}", new, path), kind) for key, (path, kind) in within}


def _is_call(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph


def _size(node: fx.Node) -> sympy.Expr | None:
    """The size that a node is, for example as a dimension of an argument, or as a product of such."""
    value = node.meta.get("example_value")
    return value.node.expr if isinstance(value, torch.SymInt) else None


def _has_unbacked_symbols(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    return any(free_unbacked_symbols(each) for each in values if isinstance(each, _SYMBOLIC))


_SYMBOLIC = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def _erase_unused_sizes(graph: fx.Graph) -> None:
    """Erase unused sizes and items, as Dynamo does in graphs that are not subgraphs."""
    for node in reversed([*graph.nodes]):
        is_size = isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool)
        is_item = node.op == "call_function" and node.target is operator.getitem
        is_sum = node.op == "call_function" and is_size and all(map(_is_number, node.args))
        if not node.users and (is_item or is_sum or is_accessor_node(node)):
            graph.erase_node(node)


def _is_number(argument: Any) -> bool:
    if isinstance(argument, fx.Node):
        argument = argument.meta.get("example_value")
    return isinstance(argument, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
