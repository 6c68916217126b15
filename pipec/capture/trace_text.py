"""The text of a trace: everything that the rest of a compilation reads of it. Equal texts compile alike.

What is not known to mean the same in another process has no text: functions of the user, objects, hooks. Then
``UnknownValueError`` says what it is.
"""

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from pipec.capture.normalize import output_structure
from pipec.capture.traced_step import TracedStep, named_tensors
from pipec.torch_compat import (
    CapturedGraph,
    FakeTensor,
    argument_tensors,
    exact_text,
    is_own,
    name_of,
    pytree,
    result_tree,
    shape_facts,
    symbol_texts,
)


class UnknownValueError(Exception):
    """A value has no text that means the same in every process."""


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


def describe(value: Any) -> str:
    """The text of plain values, tensors, pipec's dataclasses and containers; equal texts mean equal values.

    Raises:
        UnknownValueError: the value is, or holds, anything else.
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _OF_TORCH):
        return repr(value)
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"{kind.__name__} {exact_text(value.node.expr)}"
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{describe(key)}: {describe(held)}' for key, held in value.items())}}}"
    if isinstance(value, tuple | list) and kind.__module__ in _KNOWN:
        return f"{kind.__name__}({', '.join(map(describe, value))})"
    if kind in (set, frozenset):
        return f"set({', '.join(sorted(map(describe, value)))})"
    if kind is slice:
        return f"slice({', '.join(map(describe, (value.start, value.stop, value.step)))})"
    own = kind.__module__.startswith("pipec.")
    if own and isinstance(value, Enum):
        return f"{kind.__name__}.{value.name}"
    if own and is_dataclass(value):
        held = (f"{each.name}={describe(getattr(value, each.name))}" for each in fields(value))
        return f"{kind.__name__}({', '.join(held)})"
    if isinstance(value, type) and value.__module__ in _KNOWN:
        return value.__qualname__
    if isinstance(value, sympy.Basic):
        return f"sympy {exact_text(value)}"
    raise UnknownValueError(f"a {kind.__module__}.{kind.__qualname__}")


_KNOWN = ("builtins", "torch", "torch.fx.immutable_collections", "torch.return_types")


def _tensor(tensor: Tensor) -> str:
    """The metadata of a tensor, and a digest of its values if it has any."""
    if type(tensor) not in _TENSORS and not isinstance(tensor, FakeTensor):
        raise UnknownValueError(f"a tensor of class {type(tensor).__qualname__}")
    values = ""
    if not (isinstance(tensor, FakeTensor) or tensor.is_meta):
        try:
            held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        except RuntimeError as error:
            raise UnknownValueError(f"a tensor whose bytes cannot be read: {error}") from error
        values = hashlib.sha256(held.numpy().tobytes()).hexdigest()
    return f"{_metadata(tensor)} {values}"


def _known_text(value: Any) -> str:
    """The text of a value that the trace holds, and that is known: a fake tensor is not."""
    if isinstance(value, FakeTensor):
        raise UnknownValueError("a tensor without values")
    return describe(value)


def _metadata(tensor: Tensor) -> str:
    strided = tensor.layout is torch.strided
    layout = (*tensor.stride(), tensor.storage_offset()) if strided else tensor.layout
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    is_parameter = isinstance(tensor, nn.Parameter)
    sizes = describe(tuple(tensor.shape)), describe(layout)
    return f"{tensor.dtype} {tensor.device} {sizes} {flags} {is_parameter}"


def _shared_memory(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The tensors that share memory with an earlier one: what is written into one is read in the others."""
    storages = {name: x.untyped_storage() for name, x in tensors.items() if x.layout is torch.strided}
    first: dict[tuple[str, int], str] = {}
    for name, storage in storages.items():
        for kind, place in (("storage", id(storage)), ("address", storage.data_ptr())):
            owner = first.setdefault((kind, place), name) if place else name
            if owner != name:
                yield f"{name} has the {kind} of {owner}"


def model_text(model: nn.Module, canonical: Mapping[str, str]) -> Iterator[str]:
    """The modules of a model, and its parameters and buffers by all their names, without values."""
    for path, module in model.named_modules(remove_duplicate=False):
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
        yield f"{path} {module.training} {' '.join(kinds[: kinds.index('torch.nn.modules.module.Module')])}"
    first: dict[int, str] = {}
    for name, tensor in _all_tensors(model):
        if type(tensor) not in _TENSORS:
            raise UnknownValueError(f"{name}, a tensor of class {type(tensor).__qualname__}")
        yield f"{name} is {first.setdefault(id(tensor), name)}: {_metadata(tensor)}"
    yield describe(dict(sorted(canonical.items())))


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@dataclass(frozen=True)
class TraceText:
    """The text of a trace; of this process, the structure of the model's output, and tensors of the trace.

    ``tensors`` are those that are neither arguments nor in the model, by their names in the trace. A step
    reads them where they are, so that it sees what is written into them.
    """

    text: str
    output_spec: pytree.TreeSpec
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        captured: CapturedGraph,
        step: TracedStep,
        constants: Mapping[str, Tensor],
        changed: Sequence[tuple[str, str]],
        computed: bool = True,
    ) -> "TraceText":
        """The text of what Dynamo traced. ``constants`` are the tensors of the loss alone.

        ``changed`` is what the capture warns of: paths of objects, and their classes.

        Without ``computed``, the text leaves out what follows from the rest: the metadata of what the graph
        computes, which tells whether gradients were enabled, and the sizes of this call.

        Raises:
            UnknownValueError: the graph calls, or holds, what has no text.
        """
        given, arguments = argument_tensors(captured), pytree.tree_leaves(captured.args)
        registered = named_tensors(step)
        names = {id(tensor): name for name, tensor in registered.items()}
        names |= {id(leaf): f"leaf {k}" for k, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
        arguments_text = {node: names.get(id(value)) or _known_text(value) for node, value in given.items()}
        writer, shapes = _Writer(arguments_text, computed), captured.module.meta["fake_mode"].shape_env
        lines = [*writer.graph(captured.module), *shape_facts(shapes)]
        lines += symbol_texts(shapes, "\n".join([*lines, *writer.texts]), sizes=computed)
        leaves, spec = pytree.tree_flatten(result_tree(captured))
        results = {
            id(node.meta["example_value"]): f"%{node.name}" for node in _results(captured.module.graph)
        }
        known = {**names, **results}
        lines += [f"result {known.get(id(leaf)) or describe(leaf)}" for leaf in leaves]
        fixed = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        returned, _ = pytree.tree_unflatten(list(range(len(leaves))), spec)
        _, output_spec = output_structure(returned, fixed, step.mode)
        lines += [str(spec), f"changes {captured.changed_state}", f"asks {captured.depends_on_grad_mode}"]
        lines += [f"{name}: {_known_text(constant)}" for name, constant in constants.items()]
        lines += [f"step {step.moved_axes} {step.batched} {step.numbers} {step.equal_dimensions}"]
        others = {x.name: value for x, value in given.items() if id(value) not in names}
        tensors = {name: value for name, value in others.items() if isinstance(value, Tensor)}
        lines += [*map(repr, changed), *_shared_memory({**registered, **tensors})]
        return cls("\n".join([*lines, *map(repr, writer.texts)]), output_spec, {**tensors, **constants})


def _results(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in pytree.tree_leaves(graph.output_node().args[0]) if isinstance(node, fx.Node)]


_IGNORED_META = ("creation_timestamp", "source_fn_stack", "tensor_dict")
"""Metadata that nothing reads after the trace, and that differs between processes."""

_KNOWN_META = ("custom", "example_value", "val", "_fx_runtime_assert_preserve")


class _Writer:
    """Writes graphs line by line. Texts that repeat, such as stack traces, are written once, in ``texts``."""

    def __init__(self, arguments: Mapping[fx.Node, str], computed: bool) -> None:
        self._arguments = arguments
        self._computed = computed
        self._numbers: dict[str, int] = {}
        self._modules: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return [*self._numbers]

    def graph(self, module: fx.GraphModule) -> Iterator[str]:
        """The lines of a graph and of the graphs that it calls."""
        for node in module.graph.nodes:
            called = f"{self._target(module, node)} {describe(node.args)} {describe(node.kwargs)}"
            yield f"{node.op} {node.name} {called}"
            yield f"  {self._arguments.get(node, '')} {self._meta(node)}"
            held = getattr(module, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(held, fx.GraphModule):
                if unknown := held.meta.keys() - {"nn_module_stack"}:
                    raise UnknownValueError(
                        f"a graph in the graph, with {', '.join(sorted(map(str, unknown)))}"
                    )
                yield from self.graph(held)

    def _target(self, module: fx.GraphModule, node: fx.Node) -> str:
        match node.op:
            case "placeholder" | "output":
                return str(node.target)
            case "get_attr":
                held = operator.attrgetter(str(node.target))(module)
                return (
                    str(node.target)
                    if isinstance(held, fx.GraphModule)
                    else f"{node.target} {_known_text(held)}"
                )
            case "call_function" | "call_method" if is_own(node.target):
                return name_of(node.target)
        raise UnknownValueError(f"a call of {getattr(node.target, '__module__', '')} {node.target}")

    def _meta(self, node: fx.Node) -> str:
        texts = []
        for key, value in node.meta.items():
            match key:
                case "stack_trace":
                    texts.append(f"{key} {self._number(value)}")
                case "nn_module_stack":
                    texts.append(f"{key} {[self._module(*each) for each in value.items()]}")
                case "example_value" if not self._computed and node.op != "placeholder":
                    pass
                case _ if key in _KNOWN_META:
                    texts.append(f"{key} {self._number(describe(value))}")
                case _ if key not in _IGNORED_META:
                    raise UnknownValueError(f"a node with {key}")
        return ", ".join(texts)

    def _module(self, key: str, entry: tuple[str, Any]) -> int:
        path, kind = entry
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__} {kind.__name__}"
        place = self._modules.setdefault(key, len(self._modules))
        return self._number(f"{place} {path} {name}")

    def _number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))
