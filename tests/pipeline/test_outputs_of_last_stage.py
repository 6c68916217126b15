"""With ``outputs="last"``, the ranks of the last stage alone get outputs; all run the same script."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from early_outputs import EarlyOutputs, X, mixed
from outside_losses import train
from torch import Tensor, nn
from worker_processes import run_lines

import pipec
from pipec.ir import Payload
from pipec.programs.rank_memory import memory_by_category


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("last", [nn.Tanh(), nn.Softmax(1), nn.ReLU(), nn.Identity()])
def test_outputs_of_earlier_stages(last: nn.Module, microbatches: int) -> None:
    """No backward of a stage writes into the gradients of outputs, which are the script's own."""
    plain, seen = EarlyOutputs(last), list[tuple[Tensor, Tensor]]()
    pipe = pipec.compile(copy.deepcopy(plain), devices=3, microbatches=microbatches)
    found = pipe.as_module(outputs="last")(X)
    for name in ("early", "scale", "last"):
        found[name].register_hook(lambda gradient: seen.append((gradient, gradient.clone())))
    mixed(found).backward()
    mixed(expected := plain(X)).backward()
    assert all(torch.equal(*pair) for pair in seen)
    for name in ("class", "x", "early", "last"):
        torch.testing.assert_close(found[name], expected[name])
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("preference_in_two", "gpipe"),
        ("one_head", "1f1b"),
        ("consistency", "zb-h1"),
        ("fairness", "interleaved-1f1b"),
        ("contrastive", "zb-v"),
    ],
)
def test_training(name: str, schedule: str) -> None:
    assert train(name, 4, 2, outputs="last", schedule=schedule) < 1e-9


def compiled(outputs: Any, **options: Any) -> pipec.Pipeline:
    pipe = pipec.compile(EarlyOutputs(nn.Tanh()), microbatches=4, recompute="none", **options)
    pipe.as_module(outputs)(X.repeat(64, 1))
    return pipe


@pytest.mark.parametrize("replicas", [1, 2])
def test_results_are_sent_among_the_replicas_of_the_last_stage_alone(replicas: int) -> None:
    pipe = compiled("last", devices=3 * replicas, replicas=replicas)
    last = pipe.plan.placement[-1]
    ends = {
        (program.rank, each.peer)
        for program in pipe.programs
        for each in program.instructions
        if each.link and each.link.payload is Payload.RESULT
    }
    assert ends == {(one, other) for one in last for other in last if one != other}


def test_other_ranks_hold_neither_outputs_nor_their_gradients() -> None:
    def most(outputs: str) -> list[float]:
        """By rank, the most bytes of results that it holds."""
        pipe = compiled(outputs, devices=3)
        found = [memory_by_category(pipe.plan, program)[0] for program in pipe.programs]
        return [float(each["results"][1].max()) if "results" in each else 0.0 for each in found]

    kept, sent = most("last"), most("differentiable")
    assert kept[:2] == [0.0, 0.0]
    assert kept[2] > 0.0
    assert all(sent)


def test_a_saved_artifact(tmp_path: Path) -> None:
    plain, pipe = EarlyOutputs(nn.Tanh()), compiled("last", devices=2)
    pipe.save(tmp_path, tensors=True)
    loaded = pipec.load(tmp_path)
    for model in (loaded, plain):
        mixed(model(X)).backward()
    for own, other in zip(loaded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11)


SCRIPT = """
import copy, os, sys
import torch, pipec
from torch import nn
from early_outputs import EarlyOutputs, X, mixed

rank = int(os.environ["RANK"])
plain = EarlyOutputs(nn.Tanh())
pipe = pipec.compile(copy.deepcopy(plain), devices=2, microbatches=2)
module = pipe.as_module(outputs="last")
adam = [torch.optim.AdamW(each.parameters(), 0.05) for each in (module, plain)]

def refused(call, *words):
    try:
        call()
    except (pipec.InputError, RuntimeError) as error:
        return type(error).__name__, *(word in str(error) for word in words)
    return "no error",

for step in range(3):  # one loop for all ranks
    losses = []
    for model, optimizer in zip((module, plain), adam):
        out = model(X + step)
        loss = mixed(out) / 2
        loss.backward()
        mixed(model(X - step)).backward()
        losses.append(loss)
        if model is module:
            print("norm", f"{pipe.clip_grad_norm_(0.5):.6f}")
        else:
            print("norm", f"{nn.utils.clip_grad_norm_(plain.parameters(), 0.5):.6f}")
        optimizer.step()
        optimizer.zero_grad()
    print("loss", f"{losses[0]:.9f}" == f"{losses[1]:.9f}", abs(losses[0].item() - losses[1].item()) < 1e-9)
state = pipe.full_state_dict(all_ranks=True)
print("weights", max(float((state[n] - x).abs().max()) for n, x in plain.state_dict().items()) < 1e-9)

def described(out):
    return [(x.dtype, tuple(x.shape), x.device, x.requires_grad) for x in [*out.pop("tuple"), *out.values()]]

print("described", described(module(X)))
print("shapes", [each[:3] for each in described(module(X))] == [each[:3] for each in described(plain(X))])
out = module(X)
print("shape", out["class"].dtype, tuple(out["tuple"][0].shape), (out["class"] == 3).sum().dtype)
print("item", refused(lambda: out["early"].mean().item(), "on rank 1 alone") if rank == 0 else "a number")
with torch.no_grad():
    print("evaluated", module(X)["last"].mean().item() != 0)

other = module(X)
print("order", refused(lambda: (mixed(out) if rank else mixed(other)).backward(), "the backward of forward"))
print("branch", refused(lambda: (out["last"] if rank else out["early"]).sum().backward(), "gradient"))
loss = mixed(out)
loss.backward()
print("again", refused(lambda: loss.backward()))
print("again", refused(lambda: mixed(out).backward(), "call the module again"))
print("in place", refused(lambda: out["last"].mul_(2), "modified inplace"))
print("scaler", refused(lambda: torch.amp.GradScaler("cpu").scale(module(X)["last"].sum()), "fp16-mixed"))
print("grad", refused(lambda: torch.autograd.grad(mixed(module(X)), [*module.parameters()])))
"""


def test_one_script_for_all_ranks(tmp_path: Path) -> None:
    first, last = run_lines(SCRIPT, 2, tmp_path)
    assert [line for line in first if not line.startswith("item")] == [
        line for line in last if not line.startswith("item")
    ]
    norms = [line for line in last if line.startswith("norm")]
    assert norms[::2] == norms[1::2]
    assert [line for line in first if not line.startswith(("norm", "described"))] == [
        *["loss True True"] * 3,
        "weights True",
        "shapes True",
        "shape torch.int64 (8, 8) torch.int64",
        "item ('InputError', True)",
        "evaluated True",
        "order ('InputError', True)",
        "branch ('InputError', True)",
        "again ('RuntimeError',)",
        "again ('InputError', True)",
        "in place ('RuntimeError', True)",
        "scaler ('InputError', True)",
        "grad ('InputError',)",
    ]


REPLICAS = """
import os
import torch, pipec
from torch import nn
from early_outputs import EarlyOutputs, X, mixed

rank = int(os.environ["RANK"])
pipe = pipec.compile(EarlyOutputs(nn.Tanh()), devices=4, replicas=2, microbatches=2)
module = pipe.as_module(outputs="last")
loss = mixed(module(X))
try:
    (loss * (1 + rank)).backward()
except pipec.InputError as error:
    print("computed other losses" in str(error))
mixed(module(X)).backward()
"""


def test_replicas_that_compute_other_losses_are_refused(tmp_path: Path) -> None:
    assert run_lines(REPLICAS, 4, tmp_path) == [["True"]] * 4
