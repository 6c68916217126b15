"""Tracing equal blocks once gives the graph, and the guards, of tracing each of them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_params import slow_but
from torch import Tensor, fx, nn
from torch._dynamo.guards import Guard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import pipec
from pipec.torch_compat import CapturedGraph, capture_with_dynamo, front_ends, repeated_regions
from pipec.torch_compat.repeated_regions import RegionTracing

pytestmark = pytest.mark.skipif(repeated_regions.regions is None, reason="needs torch 2.13")

NUM_BLOCKS = 5


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.scale = 1.0
        self.config: Any = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x + self.drop(self.inner(self.norm(x))) * self.scale


class Stack(nn.Module):
    """Blocks in a row, each called with what ``extra`` returns for its number."""

    def __init__(
        self, block: Callable[[], nn.Module] = Block, extra: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.extra = extra
        self.config = Config(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, *(self.extra(self, x, number) if self.extra is not None else ()))
        return x.sum()


class Config:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Counting:
    """Counts the calls that reuse a subgraph while the context is active."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reused = 0
        reusable = RegionTracing._reusable

        def counted(tracing: RegionTracing, *args: Any) -> bool:
            result = reusable(tracing, *args)
            self.reused += result
            return result

        monkeypatch.setattr(RegionTracing, "_reusable", counted)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def assert_as_without_regions(module: nn.Module, args: tuple[Any, ...], symbolic: Any) -> None:
    expected = front_ends._trace_with_dynamo(module, args, symbolic)
    captured = capture_with_dynamo(module, args, symbolic)
    assert lines(captured) == lines(expected)
    missing = guards(expected) - guards(captured)
    assert not {
        (name, kind) for name, kind in missing if not (kind == "DUPLICATE_INPUT" and "__class__" in name)
    }


def lines(captured: CapturedGraph) -> list[Any]:
    """What is known of each node, with numbers in place of names. Arguments are in the order of names."""
    nodes = captured.module.graph.nodes
    arguments = sorted((node for node in nodes if node.op == "placeholder"), key=lambda node: node.name)
    ordered = [*arguments, *(node for node in nodes if node.op != "placeholder")]
    numbers = {node: number for number, node in enumerate(ordered)}

    def line(node: fx.Node) -> Any:
        read = fx.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}")
        value = re.sub(r", (grad_fn=<\w+>|requires_grad=True)", "", repr(node.meta.get("example_value")))
        if node.op == "placeholder":
            return node.name, value
        modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        return node.op, node.target, repr(read), value, modules

    return [line(node) for node in ordered]


def guards(captured: CapturedGraph) -> set[tuple[str, str]]:
    assert captured.dynamo_output is not None
    found: set[Guard] = captured.dynamo_output.graph_capture_output.output_graph.guards
    return {(re.sub(r"_\d+_c\d+|dict___\d+", "", guard.name), guard.create_fn_name()) for guard in found}


def transformer(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.randint(32, (4, 8))
    small: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    match name:
        case "gpt2":
            return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_head=2, n_layer=NUM_BLOCKS)), (
                tokens,
            )
        case "llama":
            config = LlamaConfig(**small, num_hidden_layers=NUM_BLOCKS, num_key_value_heads=2)
            return LlamaForCausalLM(config), (tokens,)
        case "bert":
            return BertForSequenceClassification(BertConfig(**small, num_hidden_layers=NUM_BLOCKS)), (tokens,)
    config = ViTConfig(**small, num_hidden_layers=NUM_BLOCKS, image_size=8, patch_size=4)
    return ViTForImageClassification(config), (torch.randn(4, 3, 8, 8),)


class FirstOutput(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Any:
        return self.model(
            inputs, **({"use_cache": False} if hasattr(self.model.config, "use_cache") else {})
        )[0]


@pytest.mark.parametrize("training", slow_but([True, False], True))
@pytest.mark.parametrize("name", slow_but(["gpt2", "llama", "bert", "vit"], "llama"))
def test_blocks_of_transformers_are_traced_once(name: str, training: bool, counting: Counting) -> None:
    model, args = transformer(name)
    module = FirstOutput(model).train(training)
    assert_as_without_regions(module, args, [(args[0], 0)])
    assert counting.reused == NUM_BLOCKS - 1


def stack_with_another_scale() -> Stack:
    stack = Stack()
    stack.blocks[2].scale = 2.0
    return stack


def stack_with_another_class_within() -> Stack:
    stack = Stack()
    stack.blocks[2].inner.__class__ = NegatedLinear
    return stack


class NegatedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def stack_with_a_patched_forward() -> Stack:
    stack = Stack()
    stack.blocks[2].inner.forward = lambda x: x * 3
    return stack


def stack_with_a_hook() -> Stack:
    stack = Stack()
    stack.blocks[2].norm.register_forward_hook(lambda module, args, result: result * 2)
    return stack


def stack_with_tied_weights() -> Stack:
    stack = Stack()
    for block in stack.blocks[1:3]:
        block.inner.weight = stack.blocks[0].inner.weight
    return stack


def stack_with_a_frozen_weight() -> Stack:
    stack = Stack()
    stack.blocks[2].inner.weight.requires_grad_(False)
    return stack


def stack_in_eval_mode_in_part() -> Stack:
    stack = Stack()
    stack.blocks[2].drop.eval()
    return stack


class ConfiguredBlock(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.inner(x) * self.config.factor


class ConfiguredStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.config.factor)


def stack_with_another_config() -> Stack:
    stack = ConfiguredStack(ConfiguredBlock)
    for block in stack.blocks:
        block.config = stack.config  # read by the stack first
    stack.blocks[2].config = Config(0.25)
    return stack


class TensorBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(4)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.inner(x) * self.factor


class TensorStack(Stack):
    def __init__(self) -> None:
        super().__init__(TensorBlock)
        self.factor = self.blocks[0].factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.factor)


class SumBlock(Block):
    """Reads its second argument and its own weight."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.inner(x) - other.sum() * self.inner.weight.sum()


def first_is_given_twice(stack: Stack, x: Tensor, number: int) -> tuple[Tensor]:
    return (x,) if number == 0 else (x * 2,)


def weight_of_the_first(stack: Stack, x: Tensor, number: int) -> tuple[Tensor]:
    return (stack.blocks[0].inner.weight,)


def own_weight(stack: Stack, x: Tensor, number: int) -> tuple[Tensor]:
    return (stack.blocks[number].inner.weight,)


class FactorBlock(Block):
    def forward(self, x: Tensor, factor: Any) -> Tensor:
        return self.inner(x) * factor


def truth_and_one(stack: Stack, x: Tensor, number: int) -> tuple[Any]:
    return (True if number < 2 else 1,)


def zeros_of_both_signs(stack: Stack, x: Tensor, number: int) -> tuple[Any]:
    return (0.0 if number < 2 else -0.0,)


def number_of_the_block(stack: Stack, x: Tensor, number: int) -> tuple[Any]:
    return (number,)


def module_of_the_first(stack: Stack, x: Tensor, number: int) -> tuple[Any]:
    return (stack.blocks[0].norm,)


class NestedBlock(Block):
    """Does one thing with a tensor and another with a tuple of it."""

    def forward(self, x: Tensor, other: Any) -> Tensor:
        return self.inner(x) + (2 * other[0] if isinstance(other, tuple) else other)


def tensor_and_tuple(stack: Stack, x: Tensor, number: int) -> tuple[Any]:
    return (x * 2,) if number < 2 else ((x * 2,),)


class LeafStack(Stack):
    """Asks whether the result of the blocks is a leaf."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.sum() * (2 if x.is_leaf else 3)


class CalledBlock(Block):
    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        return other(self.inner(x))


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


class CountingBlock(Block):
    """Changes its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class AssigningStack(Stack):
    """Sets an attribute of each block before its call."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.scale = number
            x = block(self.first(x))
        return x.sum()


class EarlyAssigningStack(Stack):
    """Sets an attribute of all blocks before their calls."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.scale = number
        return super().forward(x)


class ConfiguringStack(Stack):
    """Changes an object that all blocks read, between their calls."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.config.factor = number
            x = block(self.first(x))
        return x.sum()


def configuring_stack() -> Stack:
    stack = ConfiguringStack(ConfiguredBlock)
    for block in stack.blocks:
        block.config = stack.config
    return stack


class BranchingBlock(Block):
    """Branches on values, which is decided while the model is traced."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.inner(x) if self.inner.bias.sum() > 0 else -self.inner(x)


class ReturningBlock(Block):
    """Returns its argument, which a subgraph of Dynamo cannot."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return x


class CheckpointBlock(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class NonzeroBlock(Block):
    """Has a size that depends on values."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.inner(x) + x[x > 0].sum()


class SettingStack(Stack):
    """Calls the block with number 2 in a context, and branches on the result."""

    def __init__(self, context: Callable[[], Any], block: Callable[[], nn.Module] = Block) -> None:
        super().__init__(block)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number == 2:
                with self.context():
                    y = block(x)
            else:
                y = block(x)
            x = y.float() * (2 if y.dtype is torch.float32 and y.requires_grad else 3)
        return x.sum()


class LeavingBlock(Block):
    """Leaves gradients disabled."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        result = self.inner(x)
        torch._C._set_grad_enabled(False)
        return result


class AttentionBlock(Block):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        y = self.inner(x)[None, None]
        return nn.functional.scaled_dot_product_attention(y, y, y)[0, 0]


class TableBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table: Any = [1.0, 2.0]

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        values = self.table.values() if isinstance(self.table, dict) else self.table
        return self.inner(x) * (1 if isinstance(self.table, tuple) else 2) + sum(values)


def tables(last: Any, *others: Any) -> Stack:
    stack = Stack(TableBlock)
    for block, table in zip(stack.blocks, (*others, last), strict=False):
        block.table = table
    return stack


def stack_with_a_shared_layer() -> Stack:
    stack = Stack(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    stack.blocks[2][1] = stack.blocks[2][0]
    return stack


STACKS: dict[str, tuple[Callable[[], Stack], int]] = {
    "equal": (Stack, 4),
    "another scale": (stack_with_another_scale, 3),
    "another class within": (stack_with_another_class_within, 3),
    "a patched forward": (stack_with_a_patched_forward, 3),
    "a hook": (stack_with_a_hook, 3),
    "tied weights": (stack_with_tied_weights, 4),
    "a frozen weight": (stack_with_a_frozen_weight, 3),
    "eval mode in part": (stack_in_eval_mode_in_part, 3),
    "another config": (stack_with_another_config, 3),
    "a tensor of the stack": (TensorStack, 3),
    "an argument twice": (lambda: Stack(SumBlock, first_is_given_twice), 3),
    "a block's weight as argument": (lambda: Stack(SumBlock, weight_of_the_first), 3),
    "its own weight as argument": (lambda: Stack(SumBlock, own_weight), 0),
    "True and 1": (lambda: Stack(FactorBlock, truth_and_one), 3),
    "0.0 and -0.0": (lambda: Stack(FactorBlock, zeros_of_both_signs), 3),
    "a tensor and a tuple": (lambda: Stack(NestedBlock, tensor_and_tuple), 3),
    "a leaf": (LeafStack, 4),
    "a number for each": (lambda: Stack(FactorBlock, number_of_the_block), 0),
    "a module as argument": (lambda: Stack(CalledBlock, module_of_the_first), 0),
    "batch norm": (lambda: Stack(NormBlock), 4),
    "state that changes": (lambda: Stack(CountingBlock), 0),
    "an attribute that is assigned": (AssigningStack, 0),
    "attributes that are assigned before": (EarlyAssigningStack, 0),
    "an object that is changed": (configuring_stack, 0),
    "a returned argument": (lambda: Stack(ReturningBlock), 0),
    "checkpoints": (lambda: Stack(CheckpointBlock), 4),
    "autocast": (lambda: SettingStack(lambda: torch.autocast("cpu", torch.bfloat16)), 3),
    "no gradients": (lambda: SettingStack(torch.no_grad), 2),
    "a kernel of attention": (
        lambda: SettingStack(lambda: sdpa_kernel(SDPBackend.MATH), AttentionBlock),
        3,
    ),
    "a setting that stays": (lambda: Stack(LeavingBlock), 0),
    "1 and 1.0 in a dict": (lambda: tables({"a": 1}, {"a": 1.0}, {"a": 1.0}), 1),
    "a list and a tuple": (lambda: tables((1.0, 2.0), [1.0, 2.0], [1.0, 2.0]), 3),
    "a shared layer": (stack_with_a_shared_layer, 3),
    "data-dependent sizes": (lambda: Stack(NonzeroBlock), 4),
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        STACKS, "another scale", "another class within", "True and 1", "an object that is changed", "autocast"
    ),
)
def test_what_differs_is_traced(name: str, counting: Counting) -> None:
    make, reused = STACKS[name]
    x = torch.randn(3, 4)
    assert_as_without_regions(make(), (x,), [(x, 0)])
    assert counting.reused == reused


def test_a_changed_block_is_captured_again() -> None:
    """The guards of blocks that were not traced themselves."""
    stack, x = Stack().eval(), torch.randn(4, 4)
    pipe = pipec.compile(stack, devices=2, microbatches=2)
    before = pipe.eval_step(x)
    stack.blocks[3].scale = 5.0
    after = pipe.eval_step(x)
    assert_close(after, stack(x))
    assert not torch.allclose(after, before)


def test_branches_in_blocks_are_decided_one_by_one() -> None:
    stack, x = Stack(BranchingBlock).eval(), torch.randn(4, 4)
    for number, block in enumerate(stack.blocks):
        nn.init.constant_(block.inner.bias, 1.0 if number % 2 else -1.0)
    pipe = pipec.compile(stack, devices=2, microbatches=2)
    assert_close(pipe.eval_step(x), stack(x))
