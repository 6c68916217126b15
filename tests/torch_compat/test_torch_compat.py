"""Every private name of torch that ``torch_compat`` uses is there, and does what is relied upon."""

import ast
import importlib
import logging
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._functorch._aot_autograd import descriptors
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv, Mod

from pipec import torch_compat
from pipec.graph import PlainValues, ReadValues
from pipec.primitives import recurrent_network
from pipec.torch_compat import differentiation, dynamo_front_end, module_state, operator_patches
from pipec.torch_compat.captured_graph import CapturedGraph
from pipec.torch_compat.differentiation import JointGraph, differentiate, is_data_dependent, unbacked_symbols
from pipec.torch_compat.dynamo_front_end import capture_with_dynamo, model_raised, reason_of, user_frames
from pipec.torch_compat.guards import Guards
from pipec.torch_compat.make_fx_front_end import CAUSE, capture_with_make_fx
from pipec.torch_compat.module_contents import has_gradient_hook
from pipec.torch_compat.module_state import dry_run, quiet_logging, replace_with_fake_tensors, restore_module
from pipec.torch_compat.operator_patches import (
    bound_ctc_loss_workspace,
    skip_distribution_validation,
    traced_otherwise,
)
from pipec.torch_compat.operators import is_higher_order
from pipec.torch_compat.symbolic_numbers import python_expression
from pipec.torch_compat.values import ABSENT, evaluate, fqn_of

SOURCES = sorted(Path(torch_compat.__file__).parent.glob("*.py"))
NODES = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


log = logging.getLogger("model")


class Net(nn.Module):
    """A parameter, a buffer that changes, and a branch on the batch that becomes a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x).sum() * (2 if x.shape[0] > 2 else 3)


# names


def imported_names() -> list[tuple[str, str]]:
    """Every (module, name) that the package imports from torch."""
    return [
        (node.module, alias.name)
        for node in NODES
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch")
        for alias in node.names
    ]


def attribute_names() -> list[str]:
    """Every dotted name of torch that the package mentions, such as ``torch._dynamo.mark_dynamic``."""
    found = {ast.unparse(node) for node in NODES if isinstance(node, ast.Attribute)}
    return sorted(name for name in found if name.startswith("torch.") and "(" not in name)


@pytest.mark.parametrize(("module", "name"), imported_names())
def test_an_imported_name_exists(module: str, name: str) -> None:
    parent = importlib.import_module(module)
    assert hasattr(parent, name) or importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("name", attribute_names())
def test_a_mentioned_name_exists(name: str) -> None:
    value: Any = torch
    for part in name.split(".")[1:]:
        assert hasattr(value, part), f"{name}: there is no {part}"
        value = getattr(value, part)


@pytest.mark.parametrize("option", [*dynamo_front_end.DYNAMO_CONFIG, "ignore_logger_methods"])
def test_a_dynamo_option_exists(option: str) -> None:
    assert hasattr(torch._dynamo.config, option)


@pytest.mark.parametrize("name", module_state.LOGGERS)
def test_a_silenced_logger_is_a_package_of_torch(name: str) -> None:
    assert importlib.import_module(name)


# Dynamo


def capture(module: nn.Module, x: Tensor, dynamic: bool = True) -> CapturedGraph:
    return capture_with_dynamo(module, (x,), [(x, 0)] if dynamic else [])


@pytest.fixture(scope="module")
def captured() -> CapturedGraph:
    return capture(Net(), torch.zeros(4, 4))


def test_dynamo_returns_a_graph_with_what_differentiation_needs(captured: CapturedGraph) -> None:
    assert isinstance(captured.module, fx.GraphModule)
    assert isinstance(captured.module.meta["tracing_context"], TracingContext)
    assert isinstance(captured.module.meta["fake_mode"].shape_env, ShapeEnv)
    assert dict(captured.module.named_parameters()).keys() == {"layer.weight", "layer.bias"}
    assert dict(captured.module.named_buffers()).keys() == {"count"}


def test_a_node_of_dynamo_knows_its_module_and_its_line(captured: CapturedGraph) -> None:
    (linear,) = [node for node in captured.module.graph.nodes if node.target is torch._C._nn.linear]
    path, module_type = list(linear.meta["nn_module_stack"].values())[-1]
    assert fqn_of(path) == "layer"
    assert getattr(module_type, "__name__", module_type).endswith("Linear")
    assert f'File "{__file__}"' in linear.meta["stack_trace"]
    assert isinstance(linear.meta["example_value"], FakeTensor)


@pytest.mark.parametrize(
    ("source", "fqn"),
    [
        ("L['self']._modules['model']._modules['h']._modules['0']", "model.h.0"),
        ("L['self'].model.h[0]", "model.h.0"),
        ("getattr(L['self'].model.h, '0')", "model.h.0"),
        ("getattr(getattr(L['self'].h, '0').mlp, '1')", "h.0.mlp.1"),
        ("getattr(getattr(getattr(L['self'].h, '0'), '1'), '2')", "h.0.1.2"),
        ("L['self']", ""),
        ("L['self'].loss_fn.__closure__[1].cell_contents", "loss_fn.__closure__.1.cell_contents"),
        ("G['__import_a_dot_b'].FACTOR", "a.b.FACTOR"),
    ],
)
def test_a_path_as_dynamo_writes_it(source: str, fqn: str) -> None:
    assert fqn_of(source) == fqn


class Reads(nn.Module):
    """Its forward reads a plain attribute, one of the class, an item, and a tensor of no module."""

    kind = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.options, self.held, self.unread = 1.0, {"power": 1}, torch.ones(4), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale ** self.options["power"] * self.held + self.kind


class Around(nn.Module):
    """Stands around a module as pipec's step stands around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Reads()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def read_values(module: nn.Module) -> ReadValues:
    noted = capture(module, torch.zeros(4, 4)).dynamo_output
    assert noted is not None
    return ReadValues.of(module, Guards(noted, module), (), lambda module: {})


def test_guards_know_what_a_forward_read() -> None:
    module = Around()
    values = read_values(module)
    assert {fqn_of(source): value for source, value in values.plain.items()} == {
        "model.scale": 1.0,
        "model.options.power": 1,
        "model.kind": 3,
    }
    assert PlainValues(values.plain).difference(module) == ""
    assert values.difference() == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda module: setattr(module, "scale", 2.0), "model.scale changed from 1.0 to 2.0"),
        (lambda module: setattr(module, "kind", 4), "model.kind changed from 3 to 4"),
        (lambda module: module.options.update(power=2), "model.options.power changed from 1 to 2"),
        (lambda module: module.held.add_(1), "model.held changed from a tensor ("),
        (lambda module: setattr(module, "forward", lambda x: x), "model"),
        (lambda module: setattr(module, "layer", nn.Identity()), "layer"),
    ],
    ids=["attribute", "attribute of the class", "item", "tensor", "forward", "class of a module"],
)
def test_guards_break_where_something_else_would_be_traced(
    change: Callable[[nn.Module], object], told: str
) -> None:
    module = Around()
    values = read_values(module)
    change(module.model)
    assert told in values.difference()


def test_guards_hold_whatever_the_arguments_the_tensors_and_the_modes_are() -> None:
    module = Around()
    values = read_values(module)
    module.model.unread = 5
    module.model.layer.weight = nn.Parameter(torch.zeros(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert values.difference() == ""


def test_an_expression_of_dynamos_is_evaluated_in_every_process() -> None:
    """Whatever the name of a module is, it is a string in an expression."""
    module = Around()
    odd = "__import__('os')|1"
    module.model.add_module(odd, nn.Dropout(0.25))
    for source, value in {
        "L['self'].model.scale": 1.0,
        f"L['self']._modules['model']._modules[{odd!r}].p": 0.25,
        "dict(type(L['self'].model).__mro__[0].__dict__)['kind']": 3,
        "list(dict.keys(L['self'].model.options))[0]": "power",
        "G['__import_os_dot_path'].sep": "/",
        "G['os'].sep": ABSENT,
        "L['x']": ABSENT,
        "no expression": ABSENT,
    }.items():
        assert evaluate(source, module) == value


def test_only_the_marked_dimension_is_symbolic() -> None:
    for dynamic, sizes in ((True, ["s", "4"]), (False, ["4", "4"])):
        module = capture(Net(), torch.zeros(4, 4), dynamic).module
        (x,) = [node for node in module.graph.find_nodes(op="placeholder") if node.name.startswith("l_x")]
        assert [str(size)[0] for size in x.meta["example_value"].shape] == sizes


def test_capture_leaves_dynamos_cache_to_the_user() -> None:
    """What the user compiled is neither forgotten nor used, so nothing needs a reset between captures."""
    compilations: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        compilations.append(graph)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    for _ in range(2 * torch._dynamo.config.recompile_limit):
        capture(model, torch.zeros(4, 4))
    compiled(x)
    assert len(compilations) == 1


def test_loggers_are_no_part_of_the_graph_and_side_effects_are_reported() -> None:
    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            log.warning("seen %s", x.shape)
            self.inner.calls = 1
            return x + 1

    found = capture(Talking(), torch.zeros(4, 4))
    assert found.changed_state == ("inner",)
    calls = [node for node in found.module.graph.nodes if node.op == "call_function"]
    assert len(calls) == 1


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 3:
            raise ValueError("three columns, please")
        return x


class Misshapen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(3)


def failure(module: nn.Module) -> Exception:
    with pytest.raises((Unsupported, TorchRuntimeError)) as caught, warnings.catch_warnings():
        capture(module, torch.zeros(4, 4))
    return caught.value


def test_an_unsupported_error_says_why_and_where() -> None:
    error = failure(Branching())
    assert not model_raised(error)
    assert reason_of(error).startswith("Data-dependent branching. Detected data-dependent branching")
    assert [frame.line for frame in user_frames(error)][-1] == "if x.sum() > 0:"


@pytest.mark.parametrize("module", [Failing(), Misshapen()], ids=lambda module: type(module).__name__)
def test_an_error_of_the_model_itself_is_told_from_a_limit_of_dynamo(module: nn.Module) -> None:
    assert model_raised(failure(module))


# make_fx


def traced(module: nn.Module, x: Tensor) -> CapturedGraph:
    """The graph of a module that is given its arguments as a traced step is."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, args: tuple[Tensor], kwargs: dict[str, Any], target: None) -> Any:
            return self.model(*args)

    return capture_with_make_fx(Step(), ((x,), {}, None), [(x, 0)])


def test_make_fx_returns_fake_arguments_of_its_own_mode() -> None:
    found = traced(Net(), torch.zeros(4, 4))
    fake = found.args[0]
    assert isinstance(fake, FakeTensor)
    assert fake.fake_mode is found.module.meta["fake_mode"]
    assert isinstance(fake.shape[0], torch.SymInt)
    assert fake.shape[1] == 4


class WithRegions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
            with torch.autocast("cpu", torch.bfloat16):
                scale = self.linear(x)
            with torch.enable_grad():
                x = self.linear(x)
        return self.linear(x) * scale


def test_make_fx_traces_no_grad_and_autocast_as_calls() -> None:
    found = traced(WithRegions(), torch.randn(4, 4))
    targets = [node.target for node in found.module.graph.nodes]
    assert not any(is_higher_order(target) for target in targets)
    assert targets.count(torch._C._set_grad_enabled) == 4
    assert not found.has_backward
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.layer(x)).sum()


class WithHook(WithFunction):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y.sum()


class Penalized(WithFunction):
    """Takes a gradient, and hides that it could not."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        try:
            (gradient,) = torch.autograd.grad(self.layer(x).sum(), x, create_graph=True)
        except Exception:
            return self.layer(x).sum()
        return gradient.square().sum()


@pytest.mark.parametrize("make", [WithFunction, WithHook, Penalized])
def test_make_fx_traces_a_backward_of_the_models_own(make: type[nn.Module]) -> None:
    found = traced(make(), torch.zeros(4, 4))
    assert found.trained == ("model.layer.weight", "model.layer.bias")
    assert any(CAUSE in node.meta for node in found.module.graph.nodes)


# differentiation


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    found = capture(Net(), torch.zeros(4, 4))
    for number, node in enumerate(found.module.graph.nodes):
        node.meta["custom"] = {"number": number}
    return differentiate(found, training=True)


@pytest.mark.slow
@pytest.mark.slow
def test_every_argument_and_result_of_a_joint_graph_is_described(joint: JointGraph) -> None:
    assert sorted(joint.arguments) == [
        ("buffer", "count"),
        ("input", 0),
        ("parameter", "layer.bias"),
        ("parameter", "layer.weight"),
        ("tangent", 0),
    ]
    kinds = [result for result in joint.results if result[0] != "ignored"]
    assert sorted(kinds) == [
        ("buffer", "count"),
        ("gradient", "layer.bias"),
        ("gradient", "layer.weight"),
        ("output", 0),
    ]
    assert len(joint.module.graph.find_nodes(op="placeholder")) == len(joint.arguments)


def test_annotations_reach_forward_and_backward(joint: JointGraph) -> None:
    nodes = joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    nodes += joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert len(nodes) == 2
    assert len({node.meta["custom"]["number"] for node in nodes}) == 1
    assert [node.meta.get("partitioner_tag") for node in nodes].count("is_backward") == 1


def test_a_branch_on_the_batch_is_a_guard(joint: JointGraph) -> None:
    (batch,) = {symbol for guard in joint.guards for symbol in guard.free_symbols}
    assert all(guard.subs(batch, 4) == sympy.true for guard in joint.guards)
    assert any(guard.subs(batch, 2) == sympy.false for guard in joint.guards)
    assert joint.specialized_by == "the model"


def test_what_makes_a_constant_of_the_batch_is_named() -> None:
    class Unrolled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(4, -1).sum()

    found = differentiate(capture(Unrolled(), torch.zeros(4, 4)), training=False)
    assert found.specialized_by.startswith("return x.view(4, -1).sum()  # ")
    assert set(found.replacements.values()) == {sympy.Integer(4)}


def test_without_training_there_is_no_backward() -> None:
    found = differentiate(capture(Net(), torch.zeros(4, 4)), training=False)
    assert not [kind for kind, _ in found.arguments + found.results if kind in ("tangent", "gradient")]


@pytest.mark.parametrize(
    ("descriptor", "described"),
    [
        (descriptors.ParamAOTInput(target="w"), ("parameter", "w")),
        (descriptors.BufferAOTInput(target="w"), ("buffer", "w")),
        (descriptors.PlainAOTInput(idx=1), ("input", 1)),
        (descriptors.TangentAOTInput(output=descriptors.PlainAOTOutput(idx=0)), ("tangent", 0)),
    ],
)
def test_an_argument_is_read_from_its_descriptor(descriptor: object, described: tuple[str, object]) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["desc"] = descriptor
    assert differentiation._argument(node) == described


@pytest.mark.parametrize(
    ("descriptor", "described"),
    [
        (descriptors.PlainAOTOutput(idx=1), ("output", 1)),
        (descriptors.GradAOTOutput(grad_of=descriptors.ParamAOTInput(target="w")), ("gradient", "w")),
        (descriptors.GradAOTOutput(grad_of=descriptors.PlainAOTInput(idx=1)), ("ignored", 0)),
        (
            descriptors.InputMutationAOTOutput(mutated_input=descriptors.BufferAOTInput(target="w")),
            ("buffer", "w"),
        ),
        (
            descriptors.InputMutationAOTOutput(mutated_input=descriptors.ParamAOTInput(target="w")),
            ("changed parameter", "w"),
        ),
        (
            descriptors.InputMutationAOTOutput(mutated_input=descriptors.PlainAOTInput(idx=1)),
            ("changed input", 1),
        ),
    ],
)
def test_a_result_is_read_from_its_descriptor(descriptor: object, described: tuple[str, object]) -> None:
    assert differentiation._result(descriptor) == described


# small things


def test_sizes_known_from_values_alone_are_told_from_those_of_the_batch(
    captured: CapturedGraph,
) -> None:
    class Selecting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    def depends(found: CapturedGraph) -> bool:
        nodes = differentiate(found, training=False).module.graph.nodes
        return any(is_data_dependent(node.meta.get("val")) for node in nodes)

    assert not depends(captured)
    assert depends(capture(Selecting(), torch.zeros(4, 4)))
    assert free_unbacked_symbols(3) == set()
    assert not is_data_dependent((None, 1, "text", [torch.zeros(2)]))


def test_what_values_tell_is_found_with_what_was_asserted_of_it() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            chosen = x[x > 0]
            torch._check(chosen.shape[0] % 2 == 0)
            return torch.unique(chosen.reshape(-1, 2))

    joint = differentiate(capture(Pairs(), torch.zeros(4, 4)), training=False)
    chosen, distinct = joint.data_dependent_sizes
    assert (chosen.node.target, chosen.item, chosen.dim) == (torch.ops.aten.index.Tensor, None, 0)
    assert (distinct.item, distinct.dim) == (0, 0)
    assert unbacked_symbols(chosen.node.meta["val"])
    assert any(condition.has(Mod) for condition in joint.asserted)


def test_recurrent_networks_stay_whole_for_any_length() -> None:
    network = nn.GRU(4, 3, bidirectional=True, batch_first=True)
    x = torch.zeros(5, 7, 4)
    with traced_otherwise(recurrent_network):
        graph = capture_with_dynamo(network, (x,), [(x, 0), (x, 1)]).module.graph
    (call,) = [node for node in graph.nodes if node.target is torch.gru]
    output, last = call.meta["example_value"]
    assert isinstance(output.shape[1], torch.SymInt)
    assert (output.shape[2], last.shape[0], output.requires_grad) == (6, 2, True)


def test_a_data_dependent_guard_has_a_short_reason() -> None:
    error = GuardOnDataDependentSymNode(sympy.Symbol("u0"), "Could not guard ...\nmany lines")
    assert reason_of(error).startswith("Data-dependent size or branch")


def test_hooks_on_a_gradient_are_seen() -> None:
    plain, hooked, after = (torch.zeros(2, requires_grad=True) for _ in range(3))
    hooked.register_hook(lambda gradient: gradient)
    after.register_post_accumulate_grad_hook(lambda tensor: None)
    assert [has_gradient_hook(tensor) for tensor in (plain, hooked, after)] == [
        False,
        True,
        True,
    ]


def test_an_overload_is_what_nodes_call() -> None:
    target = torch.ops.aten.add.Tensor
    assert isinstance(target, OpOverload)
    assert (target.namespace, target._schema.name, target._overloadname) == ("aten", "aten::add", "Tensor")


def test_trees_are_taken_apart_in_one_order() -> None:
    leaves, spec = pytree.tree_flatten({"a": (1, [2, None]), "b": 3})
    assert leaves == [1, 2, None, 3]
    assert pytree.tree_unflatten(leaves, spec) == {"a": (1, [2, None]), "b": 3}
    assert [str(path[-1]) for path, _ in pytree.tree_flatten_with_path({"a": 1, "b": 2})[0]] == [
        "['a']",
        "['b']",
    ]


B = sympy.Symbol("b", integer=True, positive=True)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (128 * B, lambda b: 128 * b),
        (B**2 + 1, lambda b: b**2 + 1),
        (5 * FloorDiv(B + 1, 2), lambda b: (b + 1) // 2 * 5),
        (Mod(B, 5), lambda b: b % 5),
        (sympy.Min(B, 6), lambda b: min(b, 6)),
        (sympy.Max(2, B), lambda b: max(2, b)),
    ],
    ids=lambda value: str(value) if isinstance(value, sympy.Basic) else "",
)
def test_an_expression_of_sizes_prints_as_python(
    expression: sympy.Expr, expected: Callable[[int], int]
) -> None:
    code = compile(python_expression(expression), "expression", "eval")
    for size in (1, 4, 7, 12):
        assert eval(code, {"b": size}) == expected(size)


def test_quiet_spares_loggers_that_the_user_turned_up() -> None:
    dynamo, other = logging.getLogger("torch._dynamo"), logging.getLogger("torch.fx")
    before = dynamo.level, other.level
    dynamo.setLevel(logging.DEBUG)
    try:
        with quiet_logging():
            assert dynamo.isEnabledFor(logging.WARNING)
            assert not other.isEnabledFor(logging.CRITICAL)
        assert (dynamo.level, other.level) == (logging.DEBUG, before[1])
    finally:
        dynamo.setLevel(before[0])


def test_unchanged_puts_everything_back() -> None:
    model = Net()
    weight, attributes = model.layer.weight, dict(vars(model))
    with restore_module(model):
        model.layer.weight = nn.Parameter(torch.ones(1))
        model.extra, model.training = 1, False
        weight.mark = 1
        del model._buffers["count"]
    assert model.layer.weight is weight
    assert dict(vars(model)) == attributes
    assert "count" in model._buffers
    assert not vars(weight)


class Caching(nn.Module):
    """Keeps what it computes in every way there is, and notes that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.kept: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.called, self.last, self.holder = True, x, types.SimpleNamespace(x=x)
        self.kept.append(x)
        self.by_name["x"] = x
        return self.layer(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dry_run_keeps_what_holds_no_tensors(device: str) -> None:
    module = Caching().to(device)
    parameters = dict(module.named_parameters())
    with restore_module(module):
        replace_with_fake_tensors(module, torch.device("cpu"))
        found = dry_run(module, (torch.zeros(3, 4),))
        assert (found.error, found.failed, found.changed) == (None, False, True)
        assert module.called
        assert not hasattr(module, "last")
        assert not hasattr(module, "holder")
        assert (module.kept, module.by_name) == ([], {})
        assert not dry_run(module, (torch.zeros(3, 4),)).changed
    assert not hasattr(module, "called")
    assert dict(module.named_parameters()) == parameters
    assert device == "meta" or module.count == 0


@pytest.mark.parametrize(("width", "failed"), [(4, False), (5, True)])
def test_a_dry_run_tells_a_model_that_fails_from_one_that_needs_values(width: int, failed: bool) -> None:
    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * int(x.sum())

    found = dry_run(Counted(4, 4), (torch.zeros(3, width),))
    assert found.error is not None
    assert (found.failed, found.changed) == (failed, False)


def test_distributions_validate_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile clears it
    with skip_distribution_validation():
        assert not torch.distributions.Normal(0.0, 1.0)._validate_args
    assert torch.distributions.Normal(0.0, 1.0)._validate_args


def test_recurrent_networks_are_taken_apart_again_afterwards() -> None:
    whole = [getattr(torch.ops.aten, name).input for name in operator_patches.RECURRENT.values()]
    before = [dict(operator.py_kernels) for operator in whole]
    with traced_otherwise(recurrent_network):
        assert all(operator.py_kernels != kernels for operator, kernels in zip(whole, before, strict=True))
    assert [operator.py_kernels for operator in whole] == before


def test_torch_refuses_to_trace_the_workspace_of_ctc_loss_again_afterwards() -> None:
    def trace() -> Tensor:
        with FakeTensorMode():
            scores, lengths = torch.zeros(5, 3, 4), torch.ones(3, dtype=torch.int64)
            return nn.functional.ctc_loss(scores, torch.ones(3, 2, dtype=torch.int64), 5 * lengths, lengths)

    with bound_ctc_loss_workspace():
        assert trace().shape == ()
    with pytest.raises(DynamicOutputShapeException):
        trace()


def test_a_dry_run_says_nothing_of_a_model_that_needs_memory() -> None:
    class Numpy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.from_numpy(x.numpy()))

    found = dry_run(Numpy(4, 4), (torch.zeros(3, 4),))
    assert found.error is not None
    assert not found.failed
