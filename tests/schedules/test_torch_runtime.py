"""Orders and cuts of pipec in torch's own pipelining runtime, and what is refused there."""

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_pipelining_script
from equality_rows import LOSSES
from forward_modules import model as module
from torch import nn
from torch.distributed import pipelining
from torch.optim import SGD
from torch_pipelining_script import MICROBATCHES, example
from typer.testing import CliRunner
from worker_processes import run_ranks

import pipec
from pipec.cli import app
from pipec.schedules import custom_schedule, make_schedule
from pipec.schedules.order_builder import PHASES

SCRIPT = Path(torch_pipelining_script.__file__)
LETTERS = {phase: letter for letter, phase in PHASES.items()}
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_orders_are_read_as_they_were(name: str, tmp_path: Path) -> None:
    """With replicas they are those of one pipeline, and each pipeline follows the file."""
    path, options = tmp_path / "order.csv", {"loss_fn": example().loss_fn, "replicas": 2}
    pipe = pipec.compile(example().model, 4, schedule=name, microbatches=8, **options)
    pipe.prepare(*example().args, target=example().target)
    path.write_text(pipe.plan.to_csv())
    assert custom_schedule(path, 2, 4) == replace(make_schedule(name, 2, 4), name="order")
    again = pipec.compile(example().model, 4, schedule=str(path), **options)
    again.prepare(*example().args, target=example().target)
    assert (again.plan.num_microbatches, again.plan.to_csv()) == (8, path.read_text())


def prepared(model: nn.Module, **options: Any) -> pipec.Pipeline:
    loss_fn = nn.functional.mse_loss
    pipe = pipec.compile(model, 2, **{"loss_fn": loss_fn, "microbatches": 2, **options})
    return pipe.prepare(torch.ones(4, 6), target=torch.ones(4, 6))


@module(layers=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(4)))
def Deep(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = x + layer(x).tanh()
    return x


def test_stages_are_lists_of_modules_or_are_refused() -> None:
    pipe = prepared(nn.Sequential(Deep(), nn.Linear(6, 6)))
    with pytest.raises(pipec.PlanError, match=r"stage 1 begins in 0 \(test_torch_runtime.py:\d+\)"):
        pipe.plan.module_fqns()
    whole = prepared(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), loss_fn=nn.MSELoss())
    assert whole.plan.module_fqns() == [["0"], ["1"]]
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    with pytest.raises(pipec.PlanError, match=r"several stages use 0\.weight, and .* a copy on each"):
        prepared(model).plan.module_fqns()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": LOSSES["mixing"]}, "a part of the loss needs the rows of all microbatches"),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pipelining.ScheduleLoopedBFS,
        pipelining.ScheduleInterleaved1F1B,
        pipelining.ScheduleInterleavedZeroBubble,
        pipelining.ScheduleZBVZeroBubble,
        pipelining.ScheduleDualPipeV,
    ],
)
def test_files_of_torch_are_read(kind: Any, tmp_path: Path) -> None:
    stages = [SimpleNamespace(group_rank=0, group_size=2, num_stages=4, submod=nn.Identity()) for _ in "ab"]
    theirs, path = kind(stages, MICROBATCHES), tmp_path / "theirs.csv"
    theirs._dump_csv(path, format="compute_only")
    given = example()
    pipe = pipec.compile(given.model, 2, loss_fn=given.loss_fn, schedule=path)
    loss = pipe.step(*given.args, target=given.target)
    expected = torch_pipelining_script.token_loss(example().model(*given.args), given.target)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert dict(enumerate(rank for (rank,) in pipe.plan.placement)) == theirs.stage_index_to_group_rank
    with_halves = "I" in path.read_text()
    read = custom_schedule(path, 2, MICROBATCHES)
    for order, actions in zip(read.orders, theirs.pipeline_order.values(), strict=True):
        cells = [str(each) for action in actions if action for each in action.sub_actions or (action,)]
        if with_halves:
            cells = [half for cell in cells for half in dict.fromkeys(cell.replace("B", x) for x in "IW")]
        assert [f"{each.stage}{LETTERS[each.phase]}{each.microbatch}" for each in order] == cells
    theirs._dump_csv(path)
    with pytest.raises(pipec.InputError, match="which computes nothing; pipec adds all communication itself"):
        pipec.compile(given.model, 2, loss_fn=given.loss_fn, schedule=path)
