"""Orders and cuts of pipec in torch's own pipelining runtime, and what is refused there."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_pipelining_script
from torch import nn
from torch.optim import SGD
from torch_pipelining_script import MICROBATCHES, example
from typer.testing import CliRunner
from worker_processes import run_ranks

import pipec
from pipec.cli import app
from pipec.schedules import format_orders, make_schedule

SCRIPT = Path(torch_pipelining_script.__file__)
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v", "zb-1p", "auto", "looped-bfs-v3")


def plan(target: str, schedule: str, path: Path, *options: str) -> None:
    words = ["plan", target, "--devices", "2", "--schedule", schedule, "-o", str(path), *options]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "and the modules of each stage to" in result.stdout


@pytest.mark.slow
def test_torch_runs_orders_and_cuts_of_pipec(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.csv" for name in SCHEDULES]
    for name, path in zip(SCHEDULES, files, strict=True):
        plan(f"{SCRIPT}:example", name, path, "--microbatches", str(MICROBATCHES))
    run_ranks(SCRIPT, 2, tmp_path, [*map(str, files)])
    given = example()
    loss = torch_pipelining_script.token_loss(given.model(*given.args), given.target)
    loss.backward()
    expected = {name: x.grad for name, x in given.model.named_parameters()}
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)
    for path in files:
        given = example()
        pipe = pipec.compile(given.model, 2, loss_fn=given.loss_fn, schedule=str(path))
        own = pipe.step(*given.args, target=given.target)
        ranks = [torch.load(path.with_suffix(f".rank{rank}.pt")) for rank in range(2)]
        assert [each["orders"] for each in ranks] == [path.read_text()] * 2
        assert pipe.plan.to_csv() == path.read_text()
        close(torch.stack([*ranks[0]["losses"], *ranks[1]["losses"]]).mean(), own)
        theirs = ranks[0]["gradients"] | ranks[1]["gradients"]
        close(own, loss.detach())
        close(theirs, expected)
        close({name: x.grad for name, x in given.model.named_parameters()}, theirs)


def written(name: str, num_ranks: int, num_microbatches: int) -> str:
    return format_orders(make_schedule(name, num_ranks, num_microbatches))


def test_orders_are_those_of_one_replica() -> None:
    given = example()
    pipe = pipec.compile(given.model, 4, loss_fn=given.loss_fn, schedule="zb-h1", replicas=2, microbatches=6)
    pipe.prepare(*given.args, target=given.target)
    assert pipe.plan.to_csv() == written("zb-h1", 2, 3)


def test_a_file_has_the_microbatches_of_one_replica(tmp_path: Path) -> None:
    path, given = tmp_path / "order.csv", example()
    path.write_text(written("1f1b", 2, 3))
    pipe = pipec.compile(given.model, 4, loss_fn=given.loss_fn, schedule=str(path), replicas=2)
    pipe.prepare(*given.args, target=given.target)
    assert (pipe.plan.num_microbatches, pipe.plan.to_csv()) == (6, path.read_text())


def prepared(model: nn.Module, **options: Any) -> pipec.Pipeline:
    loss_fn = nn.functional.mse_loss
    pipe = pipec.compile(model, 2, **{"loss_fn": loss_fn, "microbatches": 2, **options})
    return pipe.prepare(torch.ones(4, 6), target=torch.ones(4, 6))


def test_a_cut_inside_of_a_module_is_named() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x).tanh()
            return x

    pipe = prepared(nn.Sequential(Deep(), nn.Linear(6, 6)))
    with pytest.raises(pipec.PlanError, match=r"stage 1 begins in 0 \(test_torch_runtime.py:\d+\)"):
        pipe.plan.module_fqns()
    assert prepared(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))).plan.module_fqns() == [["0"], ["1"]]


def test_weights_of_two_stages_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    with pytest.raises(pipec.PlanError, match=r"several stages use 0\.weight, and .* a copy on each"):
        prepared(model).plan.module_fqns()


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (
        nn.functional.cross_entropy(output @ output.T, torch.arange(len(output))) + (output * target).mean()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": contrastive}, "a part of the loss needs the rows of all microbatches"),
        (
            {"schedule": "pipedream", "microbatches": 1, "optimizer": functools.partial(SGD, lr=0.1)},
            "mini-batches overlap in it",
        ),
    ],
)
def test_what_torch_would_compute_differently_is_refused(options: dict[str, Any], message: str) -> None:
    pipe = prepared(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), **options)
    with pytest.raises(pipec.PlanError, match=message):
        pipe.plan.to_csv()


def test_too_few_modules_are_refused(tmp_path: Path) -> None:
    words = ["plan", f"{SCRIPT}:example", "--devices", "16", "-o", str(tmp_path / "order.csv")]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, "because stages are cut between modules" in result.stderr) == (1, True)
    assert not [*tmp_path.iterdir()]
