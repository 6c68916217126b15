"""A script computes any loss of the outputs of a pipeline, and gets the gradients of the unsplit model."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outside_losses
import pytest
import torch
from huggingface_models import VOCABULARY
from outside_losses import LOSSES, ActorCritic, train
from slow_params import slow
from torch import Tensor, nn
from worker_processes import run_ranks

import pipec
from pipec import InputError

SCRIPT = Path(outside_losses.__file__)
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("number", "name"), [*enumerate(LOSSES)])
def test_a_training_with_any_loss_is_that_of_the_model(number: int, name: str) -> None:
    assert train(name, 4, 2, schedule=SCHEDULES[number % len(SCHEDULES)]) < 1e-9


LAYOUTS = {"2 ranks": (2, 1), "2x2 replicas": (4, 2)}


@pytest.mark.parametrize("outputs", ["differentiable", "last"])
@pytest.mark.parametrize(
    ("layout", "schedule", "steps"),
    [("2 ranks", "1f1b", 2), *(slow(layout, schedule, 20) for layout in LAYOUTS for schedule in SCHEDULES)],
)
def test_ranks_compute_the_same_loss_of_the_same_outputs(
    layout: str, schedule: str, steps: int, outputs: str, tmp_path: Path
) -> None:
    ranks, replicas = LAYOUTS[layout]
    names = ["preference_in_two", "one_head", "decorrelation"] if steps == 2 else [*LOSSES]
    arguments = [outputs, schedule, str(replicas), str(steps), *names]
    for printed in run_ranks(SCRIPT, ranks, tmp_path, arguments):
        off = dict(line.split() for line in printed.splitlines() if line.split()[0] in LOSSES)
        assert [*off] == names
        assert all(float(each) < 1e-9 for each in off.values()), off


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", LOSSES)
def test_twenty_steps_of_each_schedule(name: str, schedule: str) -> None:
    assert train(name, 20, 2, schedule=schedule) < 1e-9


def net(*, dropout: float = 0.0, norm: bool = False, last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(8)] if norm else [nn.Dropout(dropout)]
    layers = [nn.Linear(6, 8), nn.Tanh(), *between, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
    return nn.Sequential(*layers, *([last] if last else [])).double()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {fqn: None if x.grad is None else x.grad.clone() for fqn, x in model.named_parameters()}


def assert_same(found: nn.Module, expected: nn.Module, rounding: float = 1e-11) -> None:
    wanted = gradients(expected)
    for fqn, gradient in gradients(found).items():
        torch.testing.assert_close(gradient, wanted[fqn], rtol=1e-9, atol=rounding)


def spread(output: Any) -> Tensor:
    """A loss that mixes rows."""
    return output.std(0).sum() + output.logsumexp(0).mean()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one microbatch": {"microbatches": 1, "devices": 1},
    "recompute": {"recompute": "full", "schedule": "zb-h1"},
    "replicas": {"replicas": 2, "devices": 4, "microbatches": 4},
    "uneven": {"microbatches": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    """Two forwards of different numbers of rows wait for one backward."""
    plain = net()
    pipe = pipec.compile(copy.deepcopy(plain), **{"devices": 2, "microbatches": 2, **OPTIONS[name]})
    for model in (pipe, plain):
        (spread(model(X)) * spread(model(X[:7] + 1))).backward()
    assert_same(pipe, plain)


def test_saved_values_wait_on_the_host() -> None:
    plain = nn.Sequential(*(x for _ in range(6) for x in (nn.Linear(8, 8), nn.Tanh()))).double()
    rows = torch.randn(512, 8, dtype=torch.float64)
    options = {"devices": 2, "microbatches": 8, "schedule": "gpipe", "recompute": "none"}
    options |= {"offload": "activations", "memory_limit": 180_000}
    pipe = pipec.compile(copy.deepcopy(plain), **options)
    for model in (pipe, plain):
        spread(model(rows)).backward()
    assert_same(pipe, plain)
    assert all(stage.offloaded for stage in pipe.plan.stages)


@pytest.mark.parametrize("level", ["optimizer", "gradients", "parameters"])
def test_the_pipelines_own_optimizer_updates_with_the_gradients(level: str) -> None:
    plain = net()
    make = functools.partial(torch.optim.AdamW, lr=0.05)
    pipe = pipec.compile(
        copy.deepcopy(plain),
        devices=4,
        replicas=2,
        microbatches=4,
        shard=level,
        optimizer=make,
        clip_grad_norm=0.1,
    )
    module, optimizer = pipe.as_module(), make(plain.parameters())
    for step in range(3):
        for model in (module, plain):
            (spread(model(X + step)) + spread(model(X - step)).square()).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        pipe.optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    for fqn, value in pipe.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[fqn], rtol=1e-9, atol=1e-11)


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


@pytest.mark.parametrize("options", [{}, {"devices": 1}, {"recompute": "full"}])
def test_dropout_is_that_of_a_step(options: dict[str, Any]) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    pipes = [
        pipec.compile(net(dropout=0.5), **{"devices": 2, "microbatches": 2, **options}, loss_fn=given)
        for given in (loss, None)
    ]
    for pipe in pipes:
        torch.manual_seed(1)
        for view in (X, X + 1):
            if pipe.has_loss_fn:
                pipe.step(view, target=X[:, :4])
            else:
                loss(pipe(view), X[:, :4]).backward()
    assert_same(*pipes)


def test_buffers_change_with_the_forward_and_backwards_read_the_old_ones() -> None:
    plain = net(norm=True)
    pipe = pipec.compile(copy.deepcopy(plain), devices=2, microbatches=2)
    with pytest.warns(pipec.PipecWarning, match="batch norms"):
        outputs = [pipe(view) for view in (X, X + 1)]
    expected = [torch.cat([*map(plain, view.split(4))]) for view in (X, X + 1)]
    for one, two in (outputs, expected):
        (one.square().mean() * two.mean()).backward()
    assert_same(pipe, plain)
    torch.testing.assert_close(pipe.state_dict()["2.running_mean"], plain.state_dict()["2.running_mean"])


@pytest.mark.parametrize("last", [nn.Tanh(), nn.Softmax(1), nn.ReLU(), nn.Flatten(0)])
def test_gradients_of_outputs_are_the_scripts_own(last: nn.Module) -> None:
    """No backward of a stage writes into them."""
    plain, seen = net(last=last), list[tuple[Tensor, Tensor]]()
    pipe = pipec.compile(copy.deepcopy(plain), devices=2, microbatches=1)
    output = pipe(X)
    output.register_hook(lambda gradient: seen.append((gradient, gradient.clone())))
    (output * output.square()).sum().backward()
    plain(X).pow(3).sum().backward()
    assert_same(pipe, plain)
    assert torch.equal(*seen[0])


def test_calls_come_between_a_forward_and_its_backward() -> None:
    plain = net()
    pipe = pipec.compile(copy.deepcopy(plain), devices=2, microbatches=2)
    output, dropped = pipe(X), pipe(X * 2)
    del dropped
    with torch.no_grad():
        assert not pipe(X * 2).requires_grad
    pipe.eval()
    pipe(X * 3)
    pipe.train()
    spread(pipe(X[:4])).backward()
    spread(output).backward()
    (spread(plain(X[:4])) + spread(plain(X))).backward()
    assert_same(pipe, plain)


def test_what_a_loss_does_not_reach_gets_no_gradient() -> None:
    plain = ActorCritic().double()
    plain.body[0].weight.requires_grad_(False)
    pipe = pipec.compile(copy.deepcopy(plain), devices=2, microbatches=2)
    for model in (pipe, plain):
        model(X)["value"].square().sum().backward()
    assert_same(pipe, plain)
    assert pipe.policy.weight.grad is None


def language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config).double()


@pytest.mark.parametrize(
    ("given", "loss", "rounding"),
    [
        ({}, lambda found: found.logits[:, -1].softmax(-1).var(0).sum(), 1e-11),
        ({"labels": True}, lambda found: found.loss.exp() + found.logits.logsumexp(-1).std(), 1e-5),
        ({"output_hidden_states": True}, lambda found: sum(map(spread, found.hidden_states)), 1e-11),
    ],
)
def test_a_model_of_transformers(
    given: dict[str, Any], loss: Callable[[Any], Tensor], rounding: float
) -> None:
    """Its own loss is computed in float32."""
    plain = language_model()
    ids = torch.randint(VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids).tril(4)
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False, **given}
    if given.pop("labels", False):
        given["labels"] = ids.masked_fill(mask == 0, -100)
    pipe = pipec.compile(copy.deepcopy(plain), devices=2, microbatches=3)
    module = pipe.as_module(outputs="differentiable")
    for model in (module, plain):
        loss(model(**given)).backward()
    assert_same(pipe, plain, rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(dtype: torch.dtype) -> None:
    """In float16 gradients are scaled up for the backwards, and down for the script."""
    plain, sgd = net().float(), functools.partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"precision": "bf16-mixed"}
    if dtype == torch.float16:
        options = {"precision": "fp16-mixed", "optimizer": sgd}
    pipe = pipec.compile(copy.deepcopy(plain), devices=2, microbatches=2, **options)
    spread(pipe(X.float()).float()).backward()
    with torch.autocast("cpu", dtype):
        output = plain(X.float())
    spread(output.float()).backward()
    for fqn, gradient in gradients(pipe).items():
        torch.testing.assert_close(gradient, gradients(plain)[fqn], rtol=0.05, atol=0.02)


def test_a_saved_artifact_has_both_halves(tmp_path: Path) -> None:
    plain = net()
    pipe = pipec.compile(copy.deepcopy(plain), devices=2, microbatches=2)
    pipe(X)
    pipe.save(tmp_path, tensors=True)
    loaded = pipec.load(tmp_path)
    for model in (loaded, plain):
        spread(model(X + 1)).backward()
    assert_same(loaded, plain)


def test_a_trace_has_both_halves() -> None:
    pipe = pipec.compile(net(), devices=2, microbatches=2)
    with pipe.trace() as trace:
        spread(pipe(X)).backward()
    shown = pipe.visualize(trace=trace)
    assert "measured before the loss" in shown
    assert "measured behind the loss" in shown


def refusals() -> dict[str, Callable[[nn.Module], object]]:
    def second(module: nn.Module) -> None:
        loss = spread(module(X))
        loss.backward(retain_graph=True)
        loss.backward()

    def changed_weight(module: nn.Module) -> None:
        loss = spread(module(X))
        with torch.no_grad():
            next(module.parameters()).mul_(2)
        loss.backward()

    def replaced_data(module: nn.Module) -> None:
        loss = spread(module(X))
        weight = next(module.parameters())
        weight.data = weight.data * 2
        loss.backward()

    def changed_batch(module: nn.Module) -> None:
        given = X.clone()
        loss = spread(module(given))
        given.zero_()
        loss.backward()

    def one_gradient(module: nn.Module) -> object:
        return torch.autograd.grad(spread(module(X)), [next(module.parameters())])

    return {
        "again": second,
        "0.weight was changed": changed_weight,
        "give back the .data": replaced_data,
        r"args\[0\] was changed": changed_batch,
        "some tensors alone": one_gradient,
        "inputs=": lambda module: spread(module(X)).backward(inputs=[*module.parameters()]),
        "gradients of gradients": lambda module: spread(module(X)).backward(create_graph=True),
        "leave one of both out": lambda module: module(X, target=X),
    }


@pytest.mark.parametrize("what", refusals())
@pytest.mark.filterwarnings("ignore:Using backward")
def test_refusals(what: str) -> None:
    module = pipec.compile(net(), devices=2, microbatches=2).as_module(outputs="differentiable")
    with pytest.raises(InputError, match=what):
        refusals()[what](module)


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
