"""The README is true: its scripts run, its commands print what it says, its pictures and links are there."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bare_programs import lower, verify_programs
from typer.testing import CliRunner

import pipec
from pipec.cli import app
from pipec.cli.target import load_example
from pipec.compiler import pass_list
from pipec.passes.mark_recompute import MarkRecompute
from pipec.programs.lower import chain_links
from pipec.schedules import Workload, one_f_one_b
from pipec.schedules.chain_simulation import simulate_schedule

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART, ADD_PASS, ADD_SCHEDULE = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
CONSOLE = re.findall(r"^```console\n\$ pipec (.*)\n((?:[^`$].*\n)+)", README, re.MULTILINE)
STAGE, PROGRAM, PLAN, CAPTURE_ERROR = (
    next(
        block
        for block in re.findall(r"^```text\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
        if word in block
    )
    for word in ("def backward", "recv        stage 1", "$ pipec plan", "error: the model")
)


def run_block(code: str) -> SimpleNamespace:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    return SimpleNamespace(**names)


def assert_excerpt(excerpt: str, text: str) -> None:
    """Every line of ``excerpt`` is in ``text``, in order, but for ``...`` and the width of blanks."""
    found = iter([" ".join(line.split()) for line in text.splitlines()])
    for line in excerpt.splitlines():
        wanted = " ".join(line.split()).removesuffix("...").rstrip()
        assert not wanted or any(actual.startswith(wanted) for actual in found), (
            f"not in the real text: {line}"
        )


def pipec_cli(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact that the README shows parts of."""
    directory = tmp_path_factory.mktemp("readme") / "gpt"
    target = str(ROOT / "examples" / "train_gpt.py:example")
    pipec_cli("dump", target, "--devices", "4", "--microbatches", "8", "-o", str(directory))
    return directory


@pytest.mark.slow
def test_the_quickstart_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(QUICKSTART, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if " loss " in line]
    first, *_, last = losses
    assert first > 5 > 1 > last
    assert "4 stages on 4 ranks, 1f1b, 8 microbatches of 2" in done.stdout
    assert pipec_cli("check", str(tmp_path / "artifact"))


@pytest.mark.parametrize(("command", "output"), CONSOLE, ids=[command for command, _ in CONSOLE])
def test_the_commands_print_what_is_shown(command: str, output: str) -> None:
    assert pipec_cli(*command.split(), status=2 if output.startswith("error") else 0) == output


@pytest.mark.slow
def test_the_stage_and_the_program_are_real(gpt: Path) -> None:
    assert_excerpt(STAGE, (gpt / "stage_1.py").read_text())
    assert_excerpt(PROGRAM, (gpt / "rank_1.txt").read_text())


@pytest.mark.slow
def test_the_plan_and_its_alternatives_are_real() -> None:
    command, excerpt = PLAN.removeprefix("$ pipec ").split("\n", 1)
    assert_excerpt(excerpt, pipec_cli(*command.split()))


def test_the_capture_error_is_real() -> None:
    target = ROOT / "tests" / "helpers" / "cli_models.py"
    output = pipec_cli("plan", f"{target}:undecided", "--devices", "2", status=1)
    assert_excerpt(CAPTURE_ERROR.replace("model.py", target.name, 1), output)


def test_the_picture_is_what_the_command_line_draws(tmp_path: Path) -> None:
    options = ("--stages", "4", "--microbatches", "8", "--communication", "0.2")
    pipec_cli("schedule", "1f1b", *options, "-o", str(tmp_path / "timeline.svg"))
    drawn, shown = (folder / "timeline.svg" for folder in (tmp_path, ROOT / "docs" / "images"))
    assert drawn.read_text() == shown.read_text()


def test_the_files_it_names_are_there() -> None:
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    modules = re.findall(r"`((?:\w+/)*\w+\.py|\w+/)`", README + architecture)
    assert links
    assert modules
    missing = [link for link in links if not (ROOT / link).exists()]
    modules = [name for name in modules if name not in ("train.py", "search/")]
    missing += [name for name in modules if not ((ROOT / "pipec" / name).exists() or (ROOT / name).exists())]
    assert not missing


def test_the_pass_keeps_products_and_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = run_block(ADD_PASS).KeepProducts()
    example = load_example(f"{ROOT / 'tests' / 'helpers' / 'cli_models.py'}:mlp")

    def step() -> tuple[int, list[torch.Tensor | None]]:
        example.model.zero_grad()
        pipe = pipec.compile(example.model, 2, loss_fn=example.loss_fn, microbatches=2, recompute="full")
        pipe.step(*example.args, target=example.target)
        return pipe.plan.stages[1].cost.memory.saved, [parameter.grad for parameter in pipe.parameters()]

    saved_bytes, gradients = step()
    original = pass_list.make_passes

    def with_keep(*args: Any) -> list[Any]:
        return [
            step
            for each in original(*args)
            for step in ([each, keep] if type(each) is MarkRecompute else [each])
        ]

    monkeypatch.setattr(pass_list, "make_passes", with_keep)
    more_bytes, same = step()
    assert more_bytes > saved_bytes
    assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))


def test_the_schedule_verifies_and_hides_messages() -> None:
    eager = run_block(ADD_SCHEDULE).eager_1f1b
    for num_ranks, num_microbatches in [(1, 1), (2, 3), (4, 8), (5, 2)]:
        schedule, links = eager(num_ranks, num_microbatches), chain_links(num_ranks)
        verify_programs(lower(schedule, links), schedule.placement, links, num_microbatches)
    work = Workload.uniform(4, message=0.5)
    spans = [simulate_schedule(make(4, 8), work)[0].makespan for make in (eager, one_f_one_b)]
    assert "36 units of\ntime where 1F1B takes 41" in README
    assert spans == [36, 41]
