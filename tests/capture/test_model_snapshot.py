"""One look at a model finds every change that matters, and none where there is none."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipec.capture.model_snapshot import SnapshotCache
from pipec.capture.model_state import ModelState, torch_modes
from pipec.graph.model_guards import TracedConstants, describe_changes
from pipec.ir import Mode
from pipec.torch_compat import ValuePath


class Block(nn.Module):
    """A child, a parameter, a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))


class Other(Block):
    pass


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def _hook(*_: object) -> None:
    return None


def _swap(block: Block) -> None:
    """The same tensors and modules under each other's names."""
    parameters = block.layer._parameters
    parameters["weight"], parameters["bias"] = parameters["bias"], parameters["weight"]


def _rename(block: Block) -> None:
    block._modules["dropout"] = block._modules.pop("drop")


def _move(block: Block) -> None:
    """What one module held last is what the next one holds first."""
    block.drop.register_parameter("bias", block.layer._parameters.pop("bias"))


CHANGES: dict[str, Callable[[Block], object]] = {
    "mode": lambda block: block.drop.eval(),
    "class": lambda block: setattr(block, "__class__", Other),
    "child": lambda block: setattr(block, "layer", nn.Linear(2, 2)),
    "child gone": lambda block: setattr(block, "drop", None),
    "child renamed": _rename,
    "new child": lambda block: block.add_module("more", nn.Tanh()),
    "parameter": lambda block: setattr(block, "weight", nn.Parameter(torch.zeros(2))),
    "parameters swapped": _swap,
    "parameter moved": _move,
    "buffer": lambda block: setattr(block, "mean", torch.zeros(2)),
    "new buffer": lambda block: block.register_buffer("more", torch.zeros(2)),
    "requires_grad": lambda block: block.weight.requires_grad_(False),
    "shape": lambda block: setattr(block.weight, "data", torch.zeros(3)),
    "dtype": lambda block: block.half(),
    "forward hook": lambda block: block.layer.register_forward_hook(_hook),
    "forward pre-hook": lambda block: block.layer.register_forward_pre_hook(_hook),
    "backward hook": lambda block: block.layer.register_full_backward_hook(_hook),
    "backward pre-hook": lambda block: block.layer.register_full_backward_pre_hook(_hook),
    "hooks replaced": lambda block: setattr(block.layer, "_forward_hooks", OrderedDict({7: _hook})),
    "hook on a gradient": lambda block: block.weight.register_hook(_hook),
    "hook behind a gradient": lambda block: block.weight.register_post_accumulate_grad_hook(_hook),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_look_finds_a_change(change: Callable[[Block], object]) -> None:
    watched = model()
    snapshots = SnapshotCache(watched)
    before = snapshots.current()
    assert snapshots.current() is before
    block = watched[1]
    assert isinstance(block, Block)
    change(block)
    after = snapshots.current()
    assert after is not before
    assert snapshots.current() is after


def test_a_second_hook_in_the_place_of_the_first_is_another() -> None:
    watched = model()
    hook, snapshots = watched[0].register_forward_hook(_hook), SnapshotCache(watched)
    before = snapshots.current()
    hook.remove()
    watched[0].register_forward_hook(_hook)
    assert snapshots.current() is not before


def test_values_that_change_are_no_change() -> None:
    watched = model()
    snapshots = SnapshotCache(watched)
    before = snapshots.current()
    with torch.no_grad():
        for tensor in watched.state_dict().values():
            tensor += 1
    assert snapshots.current() is before


def test_states_of_equal_looks_are_equal() -> None:
    watched = model()
    snapshots = SnapshotCache(watched)
    training = ModelState.of(snapshots.current(), Mode.TRAIN, torch_modes())
    watched.eval()
    evaluating = ModelState.of(snapshots.current(), Mode.TRAIN, torch_modes())
    watched.train()
    again = ModelState.of(snapshots.current(), Mode.TRAIN, torch_modes())
    assert training != evaluating
    assert training == again
    assert hash(training) == hash(again)
    assert training.digest == again.digest
    assert training.digest["torch"] == torch.__version__


def test_a_precision_that_is_set_to_what_it_is_changes_nothing() -> None:
    before = torch_modes()
    torch.set_float32_matmul_precision("highest")
    assert torch_modes() == before


def test_constants_that_change_are_named() -> None:
    watched = model()
    drop = (("attribute", "_modules"), ("item", "0"), ("attribute", "_modules"), ("item", "drop"))
    constants = {
        ValuePath("", (*drop, ("attribute", "p"))): 0.1,
        ValuePath("", (*drop, ("attribute", "inplace"))): False,
        ValuePath("math", (("attribute", "tau"),)): 6.283185307179586,
    }
    read = TracedConstants(constants)
    assert read.changed(watched) == describe_changes(constants, watched) == ""
    watched[0].drop.p = 0.2
    assert read.changed(watched) == "0.drop.p changed from 0.1 to 0.2"
    del watched[0]._modules["drop"]
    assert read.changed(watched) == describe_changes(constants, watched)
    assert "to absent" in read.changed(watched)
