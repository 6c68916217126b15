"""What a script changes between two steps, ranks that are processes do as one process does, or refuse."""

import textwrap
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import copy, os
import torch, pipec
from torch import nn
rank = int(os.environ.get("RANK", "0"))
alone = "RANK" not in os.environ
torch.manual_seed(0)
x, y = torch.randn(8, 6), torch.randn(8, 3)

class Net(nn.Sequential):
    scale = 1.0
    def forward(self, x):
        return super().forward(x) * self.scale

class Loss:
    weight = 1.0
    def __call__(self, output, target):
        return self.weight * (output - target).square().mean()

def model():
    torch.manual_seed(1)
    return Net(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

net, loss_fn = model(), Loss()
pipe = pipec.compile(net, devices=2, loss_fn=loss_fn, microbatches=2, timeout=240.0)

def step(what):
    pipe.zero_grad()
    loss = pipe.step(x, target=y)
    print(what, float(loss).hex(), f"{float(pipe.clip_grad_norm_(1e9)):.6f}")

def attempt(call):
    try:
        call()
    except pipec.PipecError as error:
        print(f"{type(error).__name__}: {error}")
"""


def told(tmp_path: Path, body: str, num_ranks: int = 2) -> list[str]:
    """What each rank prints that runs the script; with ``num_ranks`` 0, what one process prints for all."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(body))
    return run_ranks(script, num_ranks, tmp_path)


def results(printed: str) -> list[str]:
    """Without what pipec logs, which rank 0 alone does."""
    return [line for line in printed.splitlines() if not line.startswith("pipec: ")]


CHANGES = """
    step("first")
    loss_fn.weight = 3.0
    step("loss")
    net.scale = 0.5
    step("attribute")
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_(not name.startswith("0."))
    step("frozen by the owner")
    net[0].requires_grad_(True)
    net[4].weight.requires_grad_(False)
    step("frozen by all")
    net[4].requires_grad_(True)
    step("unfrozen")
    print([parameter.requires_grad for parameter in net.parameters()])
    with torch.autocast("cpu", torch.bfloat16):
        step("autocast")
    net[2] = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    step("module")
    with torch.no_grad():
        net[0].weight = nn.Parameter(torch.ones(8, 6))
    step("parameter")
    torch.manual_seed(5)
    step("seeded")
    state = torch.get_rng_state()
    step("next")
    torch.set_rng_state(state)
    step("next again")
    pipe.double()
    x, y = x.double(), y.double()
    step("double")
    average = copy.deepcopy(pipe)
    step("after the copy")
    torch.manual_seed(5)
    print("copy", float(average.eval_step(x, target=y)).hex())
    pipe.eval()
    step("eval")
    print({name: f"{float(value.sum()):.6f}" for name, value in sorted(pipe.full_state_dict(True).items())})
"""


def test_ranks_do_what_one_process_does(tmp_path: Path) -> None:
    (expected,) = told(tmp_path, CHANGES, 0)
    lines = results(expected)
    assert len(lines) == 18
    for printed in told(tmp_path, CHANGES):
        assert results(printed) == lines


def test_what_one_rank_alone_changes_is_refused_on_all(tmp_path: Path) -> None:
    first, second = told(
        tmp_path,
        """
        step("first")
        if rank == 1:
            loss_fn.weight = 3.0
        attempt(lambda: step("loss"))
        loss_fn.weight = 1.0
        if rank == 1:
            net[1].p = 0.25
        attempt(lambda: step("attribute"))
        net[1].p = 0.5
        if rank == 0:
            net[3].register_forward_hook(lambda module, inputs, output: 2 * output)
        attempt(lambda: step("hook"))
        net[3]._forward_hooks.clear()
        net[0].weight.requires_grad_(rank == 0)
        attempt(lambda: step("frozen"))
        net[0].weight.requires_grad_(True)
        with torch.autocast("cpu", enabled=rank == 1):
            attempt(lambda: step("autocast"))
        torch.use_deterministic_algorithms(rank == 1)
        attempt(lambda: step("deterministic"))
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("high" if rank == 1 else "highest")
        attempt(lambda: step("precision"))
        torch.set_float32_matmul_precision("highest")
        if rank == 1:
            net[4] = nn.Linear(8, 3)
        attempt(lambda: step("module"))
        """,
    )
    first, second = results(first), results(second)
    assert first == second
    said = "\n".join(first)
    assert "  changed values: none on rank 0; loss_fn.weight changed from 1.0 to 3.0 on rank 1" in said
    assert "  changed values: none on rank 0; model.1.p changed from 0.5 to 0.25 on rank 1" in said
    assert "  hooks of the model: " in said
    assert "  autocast: none on rank 0; autocast to" in said
    assert "  deterministic algorithms: False on rank 0; True on rank 1" in said
    assert "  float32 matmul precision on CPUs: ieee on rank 0; tf32 on rank 1" in said
    assert "  replaced: none on rank 0; 4.weight, 4.bias on rank 1" in said
    assert "  frozen parameters: 'none' on rank 0; '0.weight' on rank 1" in said
    assert said.count("InputError: the ranks") == 8
