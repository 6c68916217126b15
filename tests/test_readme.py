"""README.md is short, figures are those of their pages, and the examples of pages do what the pages say."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bare_programs import lower, verify_programs
from typer.testing import CliRunner

import pipec
from pipec.artifact import artifact
from pipec.checkpoint import metadata
from pipec.cli import app
from pipec.cli.target import load_example
from pipec.compiler import pass_list
from pipec.cost import profile
from pipec.passes.mark_recompute import MarkRecompute
from pipec.programs.lower import chain_links
from pipec.schedules import Workload, one_f_one_b
from pipec.schedules.chain_simulation import simulate_schedule

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TASKS = ROOT / "docs" / "tasks"
WRITE_A_PASS = (TASKS / "write_a_pass.md").read_text(encoding="utf-8")
WRITE_A_SCHEDULE = (TASKS / "write_a_schedule.md").read_text(encoding="utf-8")


def first_block(page: str) -> SimpleNamespace:
    """The names that the first Python block of ``page`` defines."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "page", "exec"), names)
    return SimpleNamespace(**names)


def pipec_cli(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    return result.output


def test_the_picture_is_what_the_command_line_draws(tmp_path: Path) -> None:
    options = ("--stages", "4", "--microbatches", "8", "--communication", "0.2")
    pipec_cli("schedule", "1f1b", *options, "-o", str(tmp_path / "timeline.svg"))
    drawn, shown = (folder / "timeline.svg" for folder in (tmp_path, ROOT / "docs" / "images"))
    assert drawn.read_text() == shown.read_text()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 180


def test_its_links_are_absolute() -> None:
    """A package index shows README.md without the repository: a relative link leads nowhere there."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 30
    assert [link for link in links if not link.startswith("https://")] == []


def test_figures_are_those_of_the_pages_that_they_link_to() -> None:
    """A number of README.md, or of the answers in docs/benchmarks.md, is in the page with the method."""
    whole = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    before, short, rest = re.split(r"^## (?:In short|Scripts and method)\n", whole, flags=re.MULTILINE)
    sections = [row for row in short.splitlines() if "](" in row]
    sections.append(README.split("## Figures\n")[1].split("\n## ")[0])
    assert len(sections) > 8
    for section in sections:
        pages = re.findall(r"\]\((?:[\w:/.]*/)?(\w+)\.(?:md|html)", section)
        texts = [(ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in pages]
        text = "".join(before + rest if page == whole else page for page in texts)
        rows = "".join(line for line in section.splitlines() if line.startswith("|"))
        numbers = set(re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.,]*\d)", rows))
        assert numbers, section
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text), f"{number} is not in {pages}"


def test_formats_have_the_versions_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    shown = re.findall(r"`(pipec (?:artifact|checkpoint|profile))`[^|]*\| (\d+) \|", page)
    assert [" ".join(each) for each in shown] == [
        artifact.FORMAT,
        metadata.FORMAT,
        f"pipec profile {profile.VERSION}",
    ]


def test_the_modules_that_pages_name_are_there() -> None:
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    modules = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert len(modules) > 50
    assert not [
        name for name in modules if not any((ROOT / under / name).exists() for under in ("pipec", "."))
    ]


def test_the_pass_keeps_products_and_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = first_block(WRITE_A_PASS).KeepProducts()
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
    eager = first_block(WRITE_A_SCHEDULE).eager_1f1b
    for num_ranks, num_microbatches in [(1, 1), (2, 3), (4, 8), (5, 2)]:
        schedule, links = eager(num_ranks, num_microbatches), chain_links(num_ranks)
        verify_programs(lower(schedule, links), schedule.placement, links, num_microbatches)
    work = Workload.uniform(4, message=0.5)
    spans = [simulate_schedule(make(4, 8), work)[0].makespan for make in (eager, one_f_one_b)]
    assert "36 units of time where 1F1B takes 41" in " ".join(WRITE_A_SCHEDULE.split())
    assert spans == [36, 41]
