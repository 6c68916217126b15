"""SimulationCosts: FLOPs against known counts, symbolic against concrete shapes, bytes touched, devices."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.flop_counter import flop_registry

from pipec.cost import operator_tables
from pipec.cost.formulas import OperatorCost, operator_name
from pipec.cost.symbolic_sizes import MICROBATCH as b
from pipec.cost.symbolic_sizes import evaluate_cost
from pipec.graph import Output, TrainingGraph
from pipec.hardware import calibration
from pipec.hardware.calibration import FALLBACK_GPU, UNKNOWN_GPU, calibrate, default_device_model
from pipec.hardware.devices import DEVICES, DeviceModel, LinkModel, find_device
from pipec.ir import Mode
from pipec.passes.annotate_cost import AnnotateCost
from pipec.torch_compat import pytree

aten = torch.ops.aten

DEVICE = DeviceModel(
    name="test",
    flops_per_second={"float32": 1e3, "bfloat16": 1e4},
    memory_bytes_per_second=100.0,
    launch_seconds=0.5,
    memory_bytes=1,
    link=LinkModel(1.0, 0.0),
    source="round figures",
)


def annotated(function: Callable[..., Any], *inputs: Tensor, batched: int = 1) -> TrainingGraph:
    """The ATen graph of a function, with costs; dimension 0 of the first ``batched`` inputs is symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = [
        mode.from_tensor(tensor, symbolic_context=dimensions(tensor, position < batched))
        for position, tensor in enumerate(inputs)
    ]
    with mode, enable_python_dispatcher():
        module = make_fx(lambda *given: pytree.tree_leaves(function(*given)))(*fake)
    symbol = fake[0].shape[0].node.expr if batched else None
    results = tuple(map(Output, range(len(module.graph.output_node().args[0]))))
    graph = TrainingGraph(module, Mode.TRAIN, (), results, batch_size=len(inputs[0]), batch=symbol)
    return AnnotateCost(DEVICE)(graph)


def dimensions(tensor: Tensor, batched: bool) -> StatelessSymbolicContext[Any, Any]:
    symbolic = [DimDynamic.DUCK if batched else DimDynamic.STATIC]
    return StatelessSymbolicContext((symbolic + [DimDynamic.STATIC] * tensor.ndim)[: tensor.ndim])


def with_gradients(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """The function and the gradients of its sum with respect to every floating-point input."""

    def step(*inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        loss = function(*leaves).sum()
        return [loss, *torch.autograd.grad(loss, [x for x in leaves if x.requires_grad])]

    return step


def costs(graph: TrainingGraph, *targets: object) -> list[OperatorCost]:
    """SimulationCosts of the nodes that call one of ``targets``, or of all nodes."""
    nodes = graph.module.graph.nodes
    return [node.meta["cost"] for node in nodes if not targets or node.target in targets]


def cost(graph: TrainingGraph, target: object) -> OperatorCost:
    (found,) = costs(graph, target)
    return found


def same(found: sympy.Expr, expected: sympy.Expr | int) -> bool:
    return bool(sympy.expand(found - expected) == 0)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = F.dropout(F.gelu(F.layer_norm(x, (8,)) @ up), 0.1)
    return F.log_softmax(hidden @ down + x, -1)


def classifier(x: Tensor, filters: Tensor, weight: Tensor) -> Tensor:
    features = F.max_pool2d(F.relu(F.batch_norm(F.conv2d(x, filters), None, None, training=True)), 2)
    return F.cross_entropy(features.flatten(1) @ weight, torch.arange(x.shape[0]) % 3)


def attention(x: Tensor, bias: Tensor) -> Tensor:
    scores = torch.einsum("bqd,bkd->bqk", x, x) + bias.expand(x.shape[0], -1, -1)
    return scores.masked_fill(torch.ones(6, 6).tril() == 0, -math.inf).softmax(-1) @ x


def language_model(tokens: Tensor, table: Tensor) -> Tensor:
    logits = F.embedding(tokens, table) @ table.t()
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def tokens(rows: int) -> Tensor:
    return torch.randint(0, 11, (rows, 6))


MODELS: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[Tensor]]]] = {
    "mlp": (mlp, lambda rows: [torch.randn(rows, 8), torch.randn(8, 32), torch.randn(32, 8)]),
    "classifier": (
        classifier,
        lambda rows: [torch.randn(rows, 3, 10, 10), torch.randn(4, 3, 3, 3), torch.randn(64, 3)],
    ),
    "attention": (attention, lambda rows: [torch.randn(rows, 6, 8), torch.randn(1, 6, 6)]),
    "language_model": (language_model, lambda rows: [tokens(rows), torch.randn(11, 8)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_costs_in_b_equal_those_of_concrete_shapes(name: str) -> None:
    function, inputs = MODELS[name]
    symbolic = costs(annotated(with_gradients(function), *inputs(4)))
    for size in (2, 7):
        concrete = costs(annotated(with_gradients(function), *inputs(size), batched=0))
        for field in ("flops", "bytes_moved", "output_bytes"):
            found = [evaluate_cost(getattr(item, field), size) for item in symbolic]
            # Sizes are nodes of the symbolic graph only: they cost nothing and have no tensor.
            assert [n for n in found if n] == [
                getattr(item, field) for item in concrete if getattr(item, field)
            ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(-1, 3),
        lambda x: x.t(),
        lambda x: x.unsqueeze(0).expand(5, -1, -1),
        lambda x: x.permute(1, 0)[1:],
        lambda x: x.split(2, 1)[0],
        lambda x: x.detach(),
        lambda x: aten._unsafe_view(x, [-1]),
        lambda x: torch.empty_like(x),
    ],
)
def test_views_sizes_and_allocations_are_free(function: Callable[[Tensor], Tensor]) -> None:
    graph = annotated(function, torch.randn(4, 6))
    assert all(item.flops == 0 and item.bytes_moved == 0 for item in costs(graph))
    assert sum(item.seconds(4) for item in costs(graph)) == 0
    assert any(node.meta["cost"].output_bytes != 0 for node in graph.nodes)


def filter_gradient(x: Tensor, w: Tensor) -> list[Tensor]:
    w = w.detach().requires_grad_()
    return list(torch.autograd.grad(F.conv2d(x, w).sum(), [w]))


def convolution(groups: int) -> Callable[..., Any]:
    return with_gradients(lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=groups))


CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_GRADIENT = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FORWARD, GRADIENT = aten.convolution.default, aten.convolution_backward.default


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (with_gradients(F.linear), [(4, 7), (5, 7)], {aten.mm.default: 3 * 2 * b * 7 * 5}),
        (
            with_gradients(lambda q: F.scaled_dot_product_attention(q, q, q)),
            [(4, 3, 8, 16)],
            {CPU_ATTENTION: 4 * b * 3 * 8 * 8 * 16, CPU_ATTENTION_GRADIENT: 10 * b * 3 * 8 * 8 * 16},
        ),
        *(
            (
                convolution(groups),
                [(3, 4, 9, 9), (8, 4 // groups, 3, 3)],
                {FORWARD: 2 * b * 200 * 4 // groups * 9, GRADIENT: 4 * b * 200 * 4 // groups * 9},
            )
            for groups in (1, 4)
        ),
        (filter_gradient, [(3, 4, 5, 5), (6, 4, 3, 3)], {GRADIENT: 2 * b * 6 * 3 * 3 * 4 * 3 * 3}),
    ],
    ids=["linear", "attention", "1 group", "4 groups", "one gradient"],
)
def test_products_count_their_multiplications(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: dict[object, sympy.Expr]
) -> None:
    graph = annotated(function, *map(torch.randn, shapes))
    for target, count in expected.items():
        assert same(sum(item.flops for item in costs(graph, target)), count)


WIDE, PAIR = torch.randn(4, 100), torch.randn(2, 100)
PUT = WIDE, torch.tensor([0, 2]), PAIR
TABLE = tokens(4), torch.randn(11, 8)


@pytest.mark.parametrize(
    ("function", "target", "inputs", "expected"),
    [
        (torch.mm, aten.mm.default, (WIDE, torch.randn(100, 5)), 4 * (b * 100 + 100 * 5 + b * 5)),
        (lambda i, w: F.embedding(i, w), aten.embedding.default, TABLE, 8 * 6 * b + 2 * 4 * 6 * 8 * b),
        # the gradient of a sum is one number, expanded: stored once
        (
            with_gradients(F.embedding),
            aten.embedding_dense_backward.default,
            TABLE,
            4 + 8 * 6 * b + 4 * 11 * 8,
        ),
        (lambda x, i, v: x.index_put_((i,), v), aten.index_put_.default, PUT, 2 * 8 + 3 * (4 * 2 * 100)),
        (lambda x, i, v: x.index_put((i,), v), aten.index_put.default, PUT, 16 + 800 + 2 * (4 * 100 * b)),
        (lambda x, y: x * y.expand(x.shape[0], 100), aten.mul.Tensor, (WIDE, PAIR[:1]), 400 * (2 * b + 1)),
        (lambda x: x * x, aten.mul.Tensor, (WIDE,), 2 * 4 * 100 * b),
        (torch.zeros_like, aten.zeros_like.default, (WIDE,), 4 * 100 * b),
    ],
)
def test_what_an_operator_touches_is_moved_once(
    function: Callable[..., Any], target: object, inputs: tuple[Tensor, ...], expected: sympy.Expr
) -> None:
    assert same(cost(annotated(function, *inputs), target).bytes_moved, expected)


@torch.library.custom_op("pipec_test::mystery", mutates_args=())
def mystery(x: Tensor, y: Tensor) -> Tensor:
    return x.clone()


@mystery.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_unknown_operator_costs_the_bytes_it_moves() -> None:
    graph = annotated(lambda x, y: mystery(x, y).relu(), torch.randn(4, 10), torch.randn(10))
    found = cost(graph, torch.ops.pipec_test.mystery.default)
    assert found.flops == 0
    assert same(found.bytes_moved, 4 * (2 * 10 * b + 10))
    assert found.seconds(4) == 0.5 + 360 / 100
    assert {operator_name(node) for node in graph.nodes if not node.meta["cost"].known} == {
        "pipec_test::mystery"
    }


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (lambda x, y, out_shape=None: 3 * x[0] * y[0], 30 * b),
        (lambda x, y, out_shape=None: int(x[0]), None),
    ],
    ids=["symbolic", "cannot do with symbols"],
)
def test_formulas_that_others_register_are_used(
    monkeypatch: pytest.MonkeyPatch, formula: Callable[..., Any], expected: sympy.Expr | None
) -> None:
    def wrapper(*args: Any, out_val: Any = None) -> Any:
        return formula(*args, out_shape=out_val)

    wrapper.__wrapped__ = formula  # type: ignore[attr-defined]
    monkeypatch.setitem(flop_registry, torch.ops.pipec_test.mystery, wrapper)
    graph = annotated(mystery, torch.randn(4, 10), torch.randn(10))
    found = cost(graph, torch.ops.pipec_test.mystery.default)
    assert found.known == (expected is not None)
    assert same(found.flops, expected or 0)


def test_tables_name_operators_that_exist_once() -> None:
    tables = operator_tables
    groups = tables.ALLOCATIONS, tables.DATA_MOVEMENT, tables.FLOPS_PER_INPUT, tables.FLOPS_PER_OUTPUT
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))
    for name in {*names, *tables.GATHER_SOURCES, *tables.SCATTER_SOURCES, *tables.SHAPE_ONLY}:
        namespace, _, operator = name.rpartition("::")
        assert hasattr(getattr(torch.ops, namespace or "aten"), operator), name


def test_seconds_are_launch_plus_the_slower_of_arithmetic_and_memory() -> None:
    graph = annotated(lambda x, w: (x @ w).relu(), torch.randn(4, 100), torch.randn(100, 1))
    product, relu = cost(graph, aten.mm.default), cost(graph, aten.relu.default)
    assert product.seconds(10) == 0.5 + max(2 * 10 * 100 / 1e3, 4 * (10 * 100 + 100 + 10) / 100)
    assert relu.seconds(10) == 0.5 + 2 * 4 * 10 / 100


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H20", None),
    ],
)
def test_devices_are_found_by_their_product_names(product: str, name: str | None) -> None:
    found = find_device(product)
    assert (found and found.name) == name


def test_default_models_are_entries_not_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_device_model(torch.device("cpu")) is DEVICES["cpu"]
    assert default_device_model(torch.device("meta")) is DEVICES[FALLBACK_GPU]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = SimpleNamespace(total_memory=10 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    slice_of_h100 = replace(DEVICES["h100"], memory_bytes=10 * 10**9)
    assert default_device_model(torch.device("cuda:1")) == slice_of_h100
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        assert default_device_model(torch.device("cuda:1")).flops_per_second["float32"] == 989e12 / 2
    finally:
        matmul.fp32_precision = before
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary 9000")
    assert default_device_model(torch.device("cuda")).name == UNKNOWN_GPU


def test_attention_is_compared_with_products_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs run it in bfloat16, where its kernels and its rate are others than in float32."""
    small = replace(calibration._ACCELERATOR, rows=8, width=8, copied_bytes=64, heads=1, tokens=4)
    found = list[torch.dtype]()

    def fastest(workloads: dict[str, Any], device: torch.device) -> dict[str, float]:
        found.append(workloads["attention"]().dtype)
        products = {"float32": 10.0 * 2 * 8**3, "bfloat16": 2.0 * 8**3}
        return {"launch": 0.0, "copy": 1.0, "others": 1.0, "attention": 4.0 * 4 * 4**2 * 64, **products}

    monkeypatch.setattr(calibration, "_CPU", small)
    monkeypatch.setattr(calibration, "_fastest", fastest)
    assert calibrate("cpu").attention_efficiency == 1 / 4
    assert found == [torch.bfloat16]
