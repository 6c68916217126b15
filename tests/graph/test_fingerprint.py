"""What later calls compare of a model and torch: every change that matters is found, and nothing else."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipec.graph import Fingerprint, ModelSnapshot, difference, torch_values
from pipec.ir import Mode


class Block(nn.Module):
    """A child, a parameter, a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))


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


CHANGES: dict[str, tuple[Callable[[Block], object], str]] = {
    "child gone": (lambda block: setattr(block, "drop", None), "class of model.1.drop changed"),
    "child renamed": (_rename, "class of model.1.drop changed from Dropout to absent, and 5 more"),
    "parameters swapped": (_swap, "shape of model.1.layer.weight changed from"),
    "parameter moved": (_move, "shape of model.1.layer.bias changed"),
    "buffer": (lambda block: setattr(block, "mean", torch.zeros(2)), ""),
    "new buffer": (lambda block: block.register_buffer("more", torch.zeros(2)), "shape of model.1.more"),
    "tie": (lambda block: setattr(block, "mean", block.weight), "requires_grad of model.1.mean changed"),
    "shape": (lambda block: setattr(block.weight, "data", torch.zeros(3)), "shape of model.1.weight"),
    "pre-hook": (lambda block: block.layer.register_forward_pre_hook(_hook), "hooks of model.1.layer"),
    "backward hook": (lambda block: block.layer.register_full_backward_hook(_hook), "hooks of model.1"),
    "hooks replaced": (
        lambda block: setattr(block.layer, "_forward_hooks", OrderedDict({7: _hook})),
        "hooks of model.1.layer changed from () to (7,)",
    ),
    "hook on a gradient": (lambda block: block.weight.register_hook(_hook), "gradient hooks of model.1"),
    "hook behind a gradient": (
        lambda block: block.weight.register_post_accumulate_grad_hook(_hook),
        "gradient hooks of model.1.weight",
    ),
}
"""Changes, and what is said of them: nothing where another tensor of the same kind takes a tensor's place."""


def fingerprint(snapshot: ModelSnapshot) -> Fingerprint:
    return snapshot.fingerprint(Mode.TRAIN, torch_values())


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES.keys())
def test_a_snapshot_finds_a_change(change: Callable[[Block], object], told: str) -> None:
    watched = model()
    before = ModelSnapshot(watched)
    assert before.current() is before
    values = fingerprint(before)
    block = watched[1]
    assert isinstance(block, Block)
    change(block)
    after = before.current()
    assert after is not before
    assert after.current() is after
    assert (fingerprint(after) != values) == bool(told)
    assert difference(values.values, fingerprint(after).values).startswith(told)


def test_a_second_hook_in_the_place_of_the_first_is_another() -> None:
    watched = model()
    hook = watched[0].register_forward_hook(_hook)
    before = ModelSnapshot(watched)
    hook.remove()
    watched[0].register_forward_hook(_hook)
    assert before.current() is not before


def test_fingerprints_of_equal_models_are_equal() -> None:
    """``requires_grad`` counts in training alone, and is not compared with other ranks."""
    watched = model()
    training = fingerprint(ModelSnapshot(watched))
    assert training.digest["torch"] == torch.__version__
    assert training != fingerprint(ModelSnapshot(watched.eval()))
    again = fingerprint(ModelSnapshot(watched.train()))
    assert (training, hash(training), training.digest) == (again, hash(again), again.digest)
    evaluating = ModelSnapshot(watched).fingerprint(Mode.LOSS, torch_values())
    frozen = ModelSnapshot(watched.requires_grad_(False))
    assert fingerprint(frozen) != training
    assert frozen.fingerprint(Mode.LOSS, torch_values()) == evaluating
    assert fingerprint(frozen).digest == training.digest == evaluating.digest
