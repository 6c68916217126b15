"""A script computes any loss of the outputs of a pipeline, and gets the gradients of the unsplit model."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outside_losses
import pytest
import torch
from awkward_modules import Pair, assert_near
from huggingface_models import llama
from outside_losses import LOSSES, EarlyOutputs, X, mixed, train
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import Plain
from worker_processes import run_ranks

import pipec
from pipec import InputError
from pipec.ir import Payload
from tests.pipeline.test_ranks import told

SCRIPT = Path(outside_losses.__file__)
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b")
TRAININGS = [(name, outputs) for outputs in ("differentiable", "last") for name in LOSSES]


@pytest.mark.parametrize(("number", "training"), [*enumerate(TRAININGS)])
def test_a_training_with_any_loss_is_that_of_the_model(number: int, training: tuple[str, Any]) -> None:
    name, outputs = training
    assert train(name, 4, 2, outputs, schedule=(*SCHEDULES, "zb-v")[number % 5]) < 1e-9


@pytest.mark.parametrize("outputs", ["differentiable", "last"])
@pytest.mark.parametrize(
    ("ranks", "replicas", "schedule", "steps"),
    [(2, 1, "1f1b", 2), *(slow(2 * k, k, schedule, 20) for k in (1, 2) for schedule in SCHEDULES)],
)
def test_ranks_compute_the_same_loss_of_the_same_outputs(
    ranks: int, replicas: int, schedule: str, steps: int, outputs: str, tmp_path: Path
) -> None:
    for printed in run_ranks(SCRIPT, ranks, tmp_path, [outputs, schedule, str(replicas), str(steps)]):
        off = dict(line.split() for line in printed.splitlines() if line.split()[0] in LOSSES)
        assert [*off] == [*LOSSES]
        assert all(float(each) < 1e-9 for each in off.values()), off


def net(between: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), between or nn.Identity(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


def spread(output: Any) -> Tensor:
    """A loss that mixes rows."""
    return output.std(0).sum() + output.logsumexp(0).mean()


def train_both(pair: Pair, loss: Callable[[Any], Tensor], error: float = 1e-9) -> None:
    """Compare gradients of what ``loss`` computes by a pipeline, and by the unsplit model."""
    for model in (pair.pipe.as_module("differentiable"), pair.unsplit):
        loss(model).backward()
    pair.check_gradients(error)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {},
    "one microbatch": {"microbatches": 1, "devices": 1},
    "recompute": {"recompute": "full", "schedule": "zb-h1"},
    "replicas": {"replicas": 2, "devices": 4, "microbatches": 4},
    "uneven": {"microbatches": 3},
    "weights on the host": {"devices": 1, "offload": "weights", "schedule": "looped-bfs-v3"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    """Two forwards of different numbers of rows wait for one backward."""
    model = net()
    model[0].weight.requires_grad_(name != "frozen")
    train_both(Pair(model, **OPTIONS[name]), lambda model: spread(model(X)) * spread(model(X[:7] + 1)))


def test_saved_values_wait_on_the_host() -> None:
    layers = nn.Sequential(*(x for _ in range(6) for x in (nn.Linear(8, 8), nn.Tanh()))).double()
    rows = torch.randn(512, 8, dtype=torch.float64)
    options = {"microbatches": 8, "schedule": "gpipe", "recompute": "none"}
    pair = Pair(layers, **options, offload="activations", memory_limit=180_000)
    train_both(pair, lambda model: spread(model(rows)))
    assert all(stage.offloaded for stage in pair.pipe.plan.stages)


@pytest.mark.parametrize("level", [slow("optimizer"), "gradients", slow("parameters")])
def test_the_pipelines_own_optimizer_updates_with_the_gradients(level: str) -> None:
    update = {"optimizer": functools.partial(torch.optim.AdamW, lr=0.05), "clip_grad_norm": 0.1}
    plain = Plain(net(), **update)
    pipe = pipec.compile(net(), **OPTIONS["replicas"], **update, shard=level)
    for step in range(3):
        for model in (pipe.as_module(), plain.as_module()):
            (spread(model(X + step)) + spread(model(X - step)).square()).backward()
        pipe.optimizer.step()
        plain.update()
    for fqn, value in pipe.full_state_dict().items():
        assert_near(value, plain.state_dict()[fqn], fqn, 1e-9)


def test_memory_for_waiting_forwards() -> None:
    rows, options = X.repeat(64, 1), {"devices": 2, "microbatches": 2, "recompute": "none"}
    pipe = pipec.compile(net(), **options)
    pipe(rows)
    pipe = pipec.compile(net(), **options, memory_limit=int(1.3 * pipe.memory().peak_bytes))
    kept = pipe(rows)
    with pytest.raises(InputError, match="1 forwards that wait for a backward"):
        pipe(rows)
    spread(kept).backward()
    spread(pipe(rows)).backward()


def test_memory_has_the_outputs_and_once_their_gradients() -> None:
    """Here they take nearly all of it."""
    pipe = pipec.compile(nn.Sequential(net(), nn.Linear(4, 512).double()), devices=2, microbatches=2)
    outputs = pipe(X.repeat(64, 1)).nbytes
    assert 2 < pipe.memory().peak_bytes / outputs < 2.2


@pytest.mark.parametrize("options", [{}, {"devices": 1}, {"recompute": "full"}])
def test_dropout_is_that_of_a_step(options: dict[str, Any]) -> None:
    mse = nn.functional.mse_loss
    inside, outside = (Pair(net(nn.Dropout(0.5)), loss_fn, **options) for loss_fn in (mse, None))
    torch.manual_seed(1)
    for view in (X, X + 1):
        inside.pipe.step(view, target=X[:, :4])
    torch.manual_seed(1)
    for view in (X, X + 1):
        mse(outside.pipe(view), X[:, :4]).backward()
    inside.unsplit = outside.model
    inside.check_gradients()


def test_buffers_change_with_the_forward_and_backwards_read_the_old_ones() -> None:
    pair = Pair(net(nn.BatchNorm1d(8)))
    with pytest.warns(pipec.PipecWarning, match="batch norms"):
        outputs = [pair.pipe(view) for view in (X, X + 1)]
    expected = [torch.cat([*map(pair.unsplit, view.split(4))]) for view in (X, X + 1)]
    for one, two in (outputs, expected):
        (one.square().mean() * two.mean()).backward()
    pair.check_gradients(1e-9)
    assert_near(pair.pipe.state_dict()["2.running_mean"], pair.unsplit[2].running_mean, "mean")
    assert pair.pipe.state_dict()["2.num_batches_tracked"] == 2


@pytest.mark.parametrize(("outputs", "microbatches"), [("differentiable", 1), slow("last", 1), ("last", 2)])
@pytest.mark.parametrize("last", [nn.Tanh(), nn.Softmax(1), slow(nn.ReLU()), nn.Identity()])
def test_gradients_of_outputs_are_the_scripts_own(last: nn.Module, outputs: Any, microbatches: int) -> None:
    """No backward of a stage writes into them, also if they are those of an earlier stage, or of a view."""
    pair, seen = Pair(EarlyOutputs(last), devices=3, microbatches=microbatches), list[tuple[Tensor, Tensor]]()
    found = pair.pipe.as_module(outputs)(X)
    for name in ("early", "scale", "last", "turned"):
        found[name].register_hook(lambda gradient: seen.append((gradient, gradient.clone())))
    mixed(found).backward()
    mixed(expected := pair.unsplit(X)).backward()
    assert len(seen) == 4
    assert all(torch.equal(*pair) for pair in seen)
    for name in ("class", "x", "early", "last", "turned"):
        torch.testing.assert_close(found[name], expected[name])
    pair.check_gradients(1e-9)


def test_calls_come_between_a_forward_and_its_backward() -> None:
    pair = Pair(net())
    pipe = pair.pipe
    output, dropped = pipe(X), pipe(X * 2)
    del dropped
    with torch.no_grad():
        assert not pipe(X * 2).requires_grad
    pipe.eval()
    pipe(X * 3)
    pipe.train()
    spread(pipe(X[:4])).backward()
    spread(output).backward()
    (spread(pair.unsplit(X[:4])) + spread(pair.unsplit(X))).backward()
    pair.check_gradients(1e-9)


@pytest.mark.parametrize(
    ("given", "loss", "error"),
    [
        slow({}, lambda found: found.logits[:, -1].softmax(-1).var(0).sum(), 1e-9),
        ({"labels": True}, lambda found: found.loss.exp() + found.logits.logsumexp(-1).std(), 1e-5),
        slow({"output_hidden_states": True}, lambda found: sum(map(spread, found.hidden_states)), 1e-9),
    ],
)
def test_a_model_of_transformers(given: dict[str, Any], loss: Callable[[Any], Tensor], error: float) -> None:
    """Its own loss is computed in float32."""
    model, inputs = llama()
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids).tril(4)
    given = {"input_ids": ids, "attention_mask": mask, **given}
    if given.pop("labels", False):
        given["labels"] = ids.masked_fill(mask == 0, -100)
    train_both(Pair(model.double(), microbatches=3), lambda model: loss(model(**given)), error)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"precision": "bf16-mixed"}),
        (torch.float16, {"precision": "fp16-mixed", "optimizer": torch.optim.SGD}),
    ],
)
def test_mixed_precision(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """In float16 gradients are scaled up for the backwards, and down for the script."""
    pair = Pair(net().float(), **options)
    pair.unsplit.forward = torch.autocast("cpu", dtype)(pair.unsplit.forward)
    train_both(pair, lambda model: spread(model(X.float()).float()), 0.03)


def compiled(outputs: Any, **options: Any) -> Pair:
    pair = Pair(EarlyOutputs(nn.Tanh()), microbatches=4, recompute="none", **options)
    pair.pipe.as_module(outputs)(X.repeat(64, 1))
    return pair


@pytest.mark.parametrize("outputs", ["differentiable", "last"])
def test_a_saved_artifact_has_both_halves(outputs: str, tmp_path: Path) -> None:
    pair = compiled(outputs)
    pair.pipe.save(tmp_path, tensors=True)
    loaded = pipec.load(tmp_path)
    for model in (loaded, pair.unsplit):
        mixed(model(X)).backward()
    pair.model = loaded
    pair.check_gradients(1e-9)


def test_a_trace_has_both_halves() -> None:
    pipe = pipec.compile(net(), devices=2, microbatches=2)
    with pipe.trace() as trace:
        spread(pipe(X)).backward()
    shown = pipe.visualize(trace=trace)
    assert "measured before the loss" in shown
    assert "measured behind the loss" in shown


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def with_change(module: nn.Module, change: Callable[[Tensor, Tensor], object]) -> None:
    """A weight or the batch changes between the forward and the backward."""
    rows = X.clone()
    loss = spread(module(rows))
    change(next(module.parameters()), rows)
    loss.backward()


REFUSALS: dict[str, Callable[[nn.Module], object]] = {
    "again": lambda module: twice(spread(module(X))),
    "0.weight was changed": lambda module: with_change(module, lambda weight, _: weight.detach().mul_(2)),
    "give back the .data": lambda module: with_change(
        module, lambda weight, _: setattr(weight, "data", 2 * weight.data)
    ),
    r"args\[0\] was changed": lambda module: with_change(module, lambda _, rows: rows.zero_()),
    "some tensors alone": lambda module: torch.autograd.grad(spread(module(X)), [next(module.parameters())]),
    "inputs=": lambda module: spread(module(X)).backward(inputs=[*module.parameters()]),
    "gradients of gradients": lambda module: spread(module(X)).backward(create_graph=True),
    "leave one of both out": lambda module: module(X, target=X),
}


@pytest.mark.parametrize("what", REFUSALS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_refusals(what: str) -> None:
    module = pipec.compile(net(), devices=2, microbatches=2).as_module(outputs="differentiable")
    with pytest.raises(InputError, match=what):
        REFUSALS[what](module)


def test_a_backward_of_some_parameters_is_refused_of_a_loss_inside() -> None:
    module = pipec.compile(net(), devices=2, microbatches=2, loss_fn=nn.functional.mse_loss).as_module()
    with pytest.raises(InputError, match="some tensors alone"):
        module(X, target=X[:, :4]).backward(inputs=[*module.parameters()])


@pytest.mark.parametrize(
    "options", [{"schedule": "pipedream", "optimizer": torch.optim.SGD}, {"batch": "local"}]
)
def test_where_no_script_can_compute_the_loss(options: dict[str, Any]) -> None:
    pipe = pipec.compile(net(), devices=2, **options)
    with pytest.raises(InputError, match=r"asynchronous|local"):
        pipe.as_module(outputs="differentiable")(X)


# outputs on the last stage alone


@pytest.mark.parametrize("replicas", [1, 2])
def test_results_are_sent_among_the_replicas_of_the_last_stage_alone(replicas: int) -> None:
    pipe = compiled("last", devices=3 * replicas, replicas=replicas).pipe
    last = pipe.plan.placement[-1]
    ends = {
        (program.rank, each.peer)
        for program in pipe.programs
        for each in program.instructions
        if each.link and each.link.payload is Payload.RESULT
    }
    assert ends == {(one, other) for one in last for other in last if one != other}


ONE_SCRIPT = """
from outside_losses import EarlyOutputs, X, mixed

plain = EarlyOutputs(nn.Tanh())
pipe = compiled(copy.deepcopy(plain), None)
module = pipe.as_module(outputs="last")

def described(out):
    return [(x.dtype, tuple(x.shape), x.device, x.requires_grad) for x in [*out.pop("tuple"), *out.values()]]

print(described(module(X)))
assert [each[:3] for each in described(module(X))] == [each[:3] for each in described(plain(X))]
for model in (module, plain):
    mixed(model(X)).backward()
plain_grads = {name: p.grad for name, p in plain.named_parameters()}
pairs = [(p.grad, plain_grads[name]) for name, p in pipe.named_parameters() if p.grad is not None]
assert len(pairs) > 2 and all(torch.allclose(*pair, rtol=1e-9) for pair in pairs)
pipe.zero_grad()
out, other = module(X), module(X)
assert (out["class"] == 3).sum().dtype == torch.int64
if rank == 0:
    refused(lambda: out["early"].mean().item(), "on rank 1 alone")
with torch.no_grad():
    assert module(X)["last"].mean().item() != 0

refused(lambda: (mixed(out) if rank else mixed(other)).backward(), "the backward of forward")
refused(lambda: (out["last"] if rank else out["early"]).sum().backward(), "gradient")
loss = mixed(out)
loss.backward()
refused(lambda: loss.backward(), "a second time" if rank else "does not require grad", RuntimeError)
refused(lambda: mixed(out).backward(), "call the module again")
refused(lambda: out["last"].mul_(2), "modified inplace", RuntimeError)
refused(lambda: torch.amp.GradScaler("cpu").scale(module(X)["last"].sum()), "fp16-mixed")
alone = lambda: torch.autograd.grad(mixed(module(X)), [*module.parameters()])
refused(alone, "grad cannot use first.weight" if rank else "gradients of some tensors alone")
"""


def test_one_script_for_all_ranks(tmp_path: Path) -> None:
    first, last = told(tmp_path, ONE_SCRIPT)
    assert first == last


def test_replicas_that_compute_other_losses_are_refused(tmp_path: Path) -> None:
    body = """
    from outside_losses import EarlyOutputs, X, mixed
    module = compiled(EarlyOutputs(nn.Tanh()), None, devices=4, replicas=2).as_module(outputs="last")
    loss = mixed(module(X))
    refused(lambda: (loss * (1 + rank)).backward(), "computed other losses")
    mixed(module(X)).backward()
    """
    told(tmp_path, body, 4)
