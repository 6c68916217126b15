"""README.md, pages, workflows, recipes and the Makefile agree with the code, and links lead somewhere."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from bare_programs import lower, verify_programs
from doc_blocks import pages
from prose import faults
from typer.testing import CliRunner

import pipec
from pipec.artifact.artifact import FORMAT as ARTIFACT
from pipec.checkpoint.metadata import FORMAT as CHECKPOINT
from pipec.cli import app
from pipec.cli.target import load_example
from pipec.compiler import pass_list
from pipec.cost.profile import VERSION as PROFILE
from pipec.hardware.topology import FORMAT as TOPOLOGY
from pipec.passes.mark_recompute import MarkRecompute
from pipec.programs.lower import chain_links
from pipec.schedules import ENTRY_POINTS, Workload, one_f_one_b
from pipec.schedules.chain_simulation import simulate_schedule
from pipec.torch_compat.versions import untested_version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SITE = PROJECT["urls"]["Documentation"] + "/en/latest/"
EVERY_PAGE = [*ROOT.glob("*.md"), *pages()]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# links and names


def headings(page: Path) -> set[str]:
    """The anchors of a page, as the site and GitHub make them from its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def target_of(page: Path, link: str) -> Path | None:
    """The file that a link leads to, also one into the site or the repository; None for other places."""
    path = link.partition("#")[0]
    if path.startswith(SITE):
        return ROOT / "docs" / path.removeprefix(SITE).replace(".html", ".md")
    if in_repository := re.match(
        re.escape(PROJECT["urls"]["Homepage"]) + "/(?:blob|raw|tree)/main/(.*)", path
    ):
        return ROOT / in_repository[1]
    return None if ":" in path else page.parent / path if path else page


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target, anchor = target_of(page, link), link.partition("#")[2]
        assert target is None or target.exists(), link
        assert target is None or not anchor or anchor in headings(target), link


def test_links_of_the_readme_are_absolute() -> None:
    """A package index shows README.md without the repository."""
    assert [link for link in re.findall(r"\]\(([^)]+)\)", read("README.md")) if "https://" not in link] == []


def test_files_that_pages_name_are_there() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in EVERY_PAGE)
    paths = {*re.findall(r"`((?:\w+/)+\w+\.py)`", text)}
    paths |= {*re.findall(r"`((?:pipec|tests|docs|benchmarks)/[\w./-]+)`", text)}
    assert len(paths) > 50
    assert [
        path for path in paths if not any((ROOT / under / path).exists() for under in ("pipec", "."))
    ] == []


def test_prose_is_plain() -> None:
    assert list(faults()) == []


# figures and versions


def test_figures_are_those_of_the_pages_that_they_link_to() -> None:
    """A number of README.md, or of the answers in docs/benchmarks.md, is in the page with the method."""
    before, short, rest = re.split(
        r"^## (?:In short|Scripts and method)\n", whole := read("docs/benchmarks.md"), flags=re.MULTILINE
    )
    sections = [row for row in short.splitlines() if "](" in row]
    sections.append(read("README.md").split("## Figures\n")[1].split("\n## ")[0])
    for section in sections:
        named = re.findall(r"\]\((?:[\w:/.]*/)?(\w+)\.(?:md|html)", section)
        texts = [read(f"docs/{page}.md") for page in named]
        text = "".join(before + rest if page == whole else page for page in texts)
        rows = "".join(line for line in section.splitlines() if line.startswith("|"))
        for number in set(re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.,]*\d)", rows)):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text), f"{number} is not in {named}"


def test_pages_name_formats_and_versions_as_the_code_has_them() -> None:
    written = f"{ARTIFACT}, {CHECKPOINT}, pipec profile {PROFILE}, {TOPOLOGY}."
    assert written.replace("pipec ", "") in read("CHANGELOG.md")
    assert re.findall(r"^## (\S+) \(", read("CHANGELOG.md"), re.MULTILINE)[0] == pipec.__version__
    assert yaml.safe_load(read("CITATION.cff"))["version"] == pipec.__version__
    shown = re.findall(
        r"`(pipec (?:artifact|checkpoint|profile))`[^|]*\| (\d+) \|", read("docs/reference/formats.md")
    )
    assert [" ".join(each) for each in shown] == [ARTIFACT, CHECKPOINT, f"pipec profile {PROFILE}"]
    (torch_range,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    others = sorted(re.split(r"[<>=]", each)[0] for each in PROJECT["dependencies"] if each != torch_range)
    for each in (TOPOLOGY, torch_range, ENTRY_POINTS, f"pip install {' '.join(others)}"):
        assert each in read("docs/stability.md")


def test_the_picture_is_what_the_command_line_draws(tmp_path: Path) -> None:
    options = ("--stages", "4", "--microbatches", "8", "--communication", "0.2")
    result = CliRunner().invoke(app, ["schedule", "1f1b", *options, "-o", str(tmp_path / "timeline.svg")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "timeline.svg").read_text() == read("docs/images/timeline.svg")


# workflows, recipes and the Makefile


def test_workflows_run_targets_of_the_makefile_on_every_supported_version() -> None:
    text = read(".github/workflows/tests.yml") + read(".github/workflows/release.yml")
    targets = set(re.findall(r"^([\w-]+):.*##", read("Makefile"), re.MULTILINE))
    assert {"test", "full", "package"} <= {*re.findall(r"run: make ([\w-]+)", text)} <= targets
    job = yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]["test"]
    matrix, supported = (
        job["strategy"]["matrix"],
        set(re.findall(r":: (3\.\d+)'", str(PROJECT["classifiers"]))),
    )
    assert {*matrix["python"]} - {*re.findall(r"3\.\d+", job["continue-on-error"])} == supported
    versions = {*matrix["torch"], *(each["torch"] for each in matrix["include"])}
    assert {each.rpartition(".")[0] for each in versions} == {f"2.{minor}" for minor in range(11, 16)}
    assert all(untested_version(each) is None for each in versions)


def test_publishing_needs_no_token_and_the_tag_of_the_version() -> None:
    jobs = yaml.safe_load(read(".github/workflows/release.yml"))["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in read(".github/workflows/release.yml")
    (check,) = (
        each["run"] for each in jobs["build"]["steps"] if each.get("name") == "the tag is the version"
    )
    for tag, status in ((f"v{pipec.__version__}", 0), (f"v{pipec.__version__}.1", 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment).returncode == status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_files_are_valid_by_their_published_schemas(schema: str, files: str) -> None:
    checker = shutil.which("check-jsonschema", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("no `check-jsonschema`: it is in the extra dev")
    command = [checker, "--builtin-schema", schema, "--default-filetype", "yaml", *ROOT.glob(files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_recipes_of_clusters_parse_and_start_a_script_that_is_there() -> None:
    folder = ROOT / "examples" / "cluster"
    assert subprocess.run(["bash", "-n", folder / "slurm.sh"]).returncode == 0
    for recipe in ("slurm.sh", "kubernetes.yaml", "trainjob.yaml"):
        assert "examples/restartable_digits.py" in (folder / recipe).read_text(encoding="utf-8")
    (job,), (runtime, train_job) = (
        [*yaml.safe_load_all((folder / name).read_text(encoding="utf-8"))]
        for name in ("kubernetes.yaml", "trainjob.yaml")
    )
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = [job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]]
    pods.append(node["template"]["spec"]["template"]["spec"])
    for pod, name in zip(pods, ("pytorch", "node"), strict=True):  # the operators look for these
        (container,) = pod["containers"]
        assert container["name"] == name
        assert {each["name"] for each in container["volumeMounts"]} == {
            each["name"] for each in pod["volumes"]
        }


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_gpu_names_missing_packages(tmp_path: Path) -> None:
    """It takes an interpreter as it is, without pip and network."""
    venv.create(tmp_path, with_pip=False)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = ["make", "gpu", f"PYTHON={tmp_path / 'bin' / 'python'}", "VENV="]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "lacks torch, numpy, " in done.stderr


@pytest.mark.slow
def test_a_run_of_skipped_tests_of_gpus_is_not_green() -> None:
    command = [sys.executable, "-m", "pytest", "tests/cuda/test_gpu_memory.py", "-p", "no:cacheprovider"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


# the examples of pages do what the pages say


def first_block(page: str) -> SimpleNamespace:
    """The names that the first Python block of a page defines."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, page, "exec"), names)
    return SimpleNamespace(**names)


def test_the_pass_keeps_products_and_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = first_block("docs/tasks/write_a_pass.md").KeepProducts()
    example = load_example(f"{ROOT / 'tests' / 'helpers' / 'cli_models.py'}:mlp")

    def step() -> tuple[int, list[torch.Tensor | None]]:
        example.model.zero_grad()
        pipe = pipec.compile(example.model, 2, loss_fn=example.loss_fn, microbatches=2, recompute="full")
        pipe.step(*example.args, target=example.target)
        return pipe.plan.stages[1].cost.memory.saved, [parameter.grad for parameter in pipe.parameters()]

    def with_keep(*args: Any) -> list[Any]:
        return [
            one
            for each in original(*args)
            for one in ([each, keep] if type(each) is MarkRecompute else [each])
        ]

    saved_bytes, gradients = step()
    original = pass_list.make_passes
    monkeypatch.setattr(pass_list, "make_passes", with_keep)
    more_bytes, same = step()
    assert more_bytes > saved_bytes
    assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))


def test_the_schedule_verifies_and_hides_messages() -> None:
    eager = first_block("docs/tasks/write_a_schedule.md").eager_1f1b
    for num_ranks, num_microbatches in [(1, 1), (2, 3), (4, 8), (5, 2)]:
        schedule, links = eager(num_ranks, num_microbatches), chain_links(num_ranks)
        verify_programs(lower(schedule, links), schedule.placement, links, num_microbatches)
    work = Workload.uniform(4, message=0.5)
    spans = [simulate_schedule(make(4, 8), work)[0].makespan for make in (eager, one_f_one_b)]
    assert "36 units of time where 1F1B takes 41" in " ".join(read("docs/tasks/write_a_schedule.md").split())
    assert spans == [36, 41]
