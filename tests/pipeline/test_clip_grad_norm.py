"""Clipping by the norm of the whole model, outside of programs."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pipec


class _Copies(TorchDispatchMode):
    """Counts copies from one tensor into another, which on a GPU the host waits for."""

    num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        return func(*args, **(kwargs or {}))


def test_the_norms_of_a_device_are_copied_together() -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)), nn.Linear(4, 4, bias=False))
    model = copy.deepcopy(expected)
    x = torch.randn(4, 4)
    pipe = pipec.compile(model, ["cpu"] * 2, loss_fn=nn.functional.mse_loss, microbatches=2)
    pipe.step(x, target=x)
    nn.functional.mse_loss(expected(x), x).backward()
    with _Copies() as copies:
        norm = pipe.clip_grad_norm_(0.01)
    on_the_host = len(list(expected.parameters()))  # the norms are rounded to the types of their parameters
    assert copies.num_copies == on_the_host + 1
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.01))
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
