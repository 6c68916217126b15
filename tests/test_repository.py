"""Pages, workflows and the package agree with the code; a wheel works where it is installed."""

import os
import re
import site
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
from doc_blocks import pages
from packaging.requirements import Requirement
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
from pipec.schedules import ENTRY_POINTS, Workload, one_f_one_b
from pipec.schedules.chain_simulation import simulate_schedule
from pipec.torch_compat.private_symbols import NEWEST, OLDEST, untested_version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
SITE, CODE = PROJECT["urls"]["Documentation"] + "/en/latest/", PROJECT["urls"]["Homepage"]
EVERY_PAGE = [*ROOT.glob("*.md"), *pages()]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# pages


def headings(page: Path) -> set[str]:
    """The anchors of a page, as the site and GitHub make them from its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def target_of(page: Path, path: str) -> Path | None:
    """The file that a link leads to, also one into the site or the repository; None for other places."""
    if path.startswith(SITE):
        return ROOT / "docs" / path.removeprefix(SITE).replace(".html", ".md")
    if in_repository := re.match(re.escape(CODE) + "/(?:blob|raw|tree)/main/(.*)", path):
        return ROOT / in_repository[1]
    return None if ":" in path else page.parent / path if path else page


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_names_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([^)\s#]*)#?([^)\s]*)\)", text):
        target = target_of(page, link)
        assert target is None or target.exists(), link
        assert target is None or not anchor or anchor in headings(target), (link, anchor)
        assert page.name != "README.md" or "https://" in link, "a package index shows it without the rest"
    for path in re.findall(r"`((?:\w+/)+\w+\.py|(?:pipec|tests|docs|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / "pipec" / path).exists() or (ROOT / path).exists(), path


def test_figures_are_those_of_the_pages_that_they_link_to() -> None:
    """A number of README.md, or of the answers in docs/benchmarks.md, is in the page with the method."""
    before, short, rest = re.split(
        r"^## (?:In short|Scripts and method)\n", whole := read("docs/benchmarks.md"), flags=re.MULTILINE
    )
    sections = [row for row in short.splitlines() if "](" in row]
    for section in (*sections, read("README.md").split("## Figures\n")[1].split("\n## ")[0]):
        named = re.findall(r"\]\((?:[\w:/.]*/)?(\w+)\.(?:md|html)", section)
        texts = [read(f"docs/{name}.md") for name in named]
        text = "".join(before + rest if page == whole else page for page in texts)
        rows = "".join(line for line in section.splitlines() if line.startswith("|"))
        for number in set(re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.,]*\d)", rows)):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text), f"{number} is not in {named}"


def test_the_picture_is_what_the_command_line_draws(tmp_path: Path) -> None:
    words = "schedule 1f1b --stages 4 --microbatches 8 --communication 0.2 -o"
    assert CliRunner().invoke(app, [*words.split(), str(tmp_path / "timeline.svg")]).exit_code == 0
    assert (tmp_path / "timeline.svg").read_text() == read("docs/images/timeline.svg")


def first_block(page: str) -> SimpleNamespace:
    """The names that the first Python block of a page defines."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, page, "exec"), names)
    return SimpleNamespace(**names)


def test_the_pass_of_a_page_keeps_products_and_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    keep, made = first_block("docs/tasks/write_a_pass.md").KeepProducts(), pass_list.make_passes
    example = load_example(f"{ROOT / 'tests' / 'helpers' / 'cli_models.py'}:mlp")

    def step() -> tuple[int, list[torch.Tensor | None]]:
        example.model.zero_grad()
        pipe = pipec.compile(example.model, 2, loss_fn=example.loss_fn, microbatches=2, recompute="full")
        pipe.step(*example.args, target=example.target)
        return pipe.plan.stages[1].cost.memory.saved, [parameter.grad for parameter in pipe.parameters()]

    saved_bytes, gradients = step()
    monkeypatch.setattr(pass_list, "make_passes", lambda *given: with_keep(made(*given)))

    def with_keep(passes: list[Any]) -> list[Any]:
        return [x for each in passes for x in ([each, keep] if type(each) is MarkRecompute else [each])]

    more_bytes, same = step()
    assert more_bytes > saved_bytes
    assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))


def test_the_schedule_of_a_page_hides_messages() -> None:
    eager = first_block("docs/tasks/write_a_schedule.md").eager_1f1b
    work = Workload.uniform(4, message=0.5)
    assert [simulate_schedule(make(4, 8), work)[0].makespan for make in (eager, one_f_one_b)] == [36, 41]
    assert "36 units of time where 1F1B takes 41" in " ".join(read("docs/tasks/write_a_schedule.md").split())


# versions and workflows


def test_pages_name_formats_and_versions_as_the_code_has_them() -> None:
    profile = f"pipec profile {PROFILE}"
    assert f"{ARTIFACT}, {CHECKPOINT}, {profile}, {TOPOLOGY}.".replace("pipec ", "") in read("CHANGELOG.md")
    assert re.findall(r"^## (\S+) \(", read("CHANGELOG.md"), re.MULTILINE)[0] == pipec.__version__
    assert yaml.safe_load(read("CITATION.cff"))["version"] == pipec.__version__
    assert CliRunner().invoke(app, ["--version"]).output == f"pipec {pipec.__version__}\n"
    shown = re.findall(r"`(pipec \w+)`[^|]*\| (\d+) \|", read("docs/reference/formats.md"))
    assert {" ".join(each) for each in shown} >= {ARTIFACT, CHECKPOINT, profile}
    (torch_range,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    others = sorted(re.split(r"[<>=]", each)[0] for each in PROJECT["dependencies"] if each != torch_range)
    for each in (TOPOLOGY, torch_range, ENTRY_POINTS, f"pip install {' '.join(others)}"):
        assert each in read("docs/stability.md")
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == set(EXTRAS) - {"all", "dev", "docs", "examples"}


def test_the_package_asks_for_the_tested_versions_of_torch_of_any_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 says once that another one was not tested."""
    last, next_minor = NEWEST[0], NEWEST[1] + 1
    (torch_range,) = (x.specifier for x in map(Requirement, PROJECT["dependencies"]) if x.name == "torch")
    assert str(torch_range) == f"<{last}.{next_minor},>={'.'.join(map(str, OLDEST))}"
    for build in ("2.11.0", "2.12.1+cu130", "2.13.0+cpu", "2.13.0+rocm7", "2.15.0+cu132"):
        assert torch_range.contains(build)
        assert untested_version(build) is None
    for build in ("2.10.1", f"{last}.{next_minor}.0", "3.0", "2.16.0a0+git12"):
        assert not torch_range.contains(build, prereleases=True)
        assert f"torch {build} is {'older' if build == '2.10.1' else 'newer'}" in str(untested_version(build))
    monkeypatch.setattr(torch, "__version__", "9.0.1+cpu")
    for rank in "001":
        monkeypatch.setenv("RANK", rank)
        pipec.compile(torch.nn.Linear(2, 2), devices=1)
    assert [record.message.count("9.0.1+cpu is newer") for record in caplog.records] == [1]


def test_workflows_test_every_supported_version() -> None:
    job = yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]["test"]
    matrix, supported = job["strategy"]["matrix"], {*re.findall(r":: (3\.\d+)'", str(PROJECT["classifiers"]))}
    assert {*matrix["python"]} - {*re.findall(r"3\.\d+", job["continue-on-error"])} == supported
    builds = {*matrix["torch"], *(each["torch"] for each in matrix["include"])}
    assert {each.rpartition(".")[0] for each in builds} == {f"2.{k}" for k in range(OLDEST[1], NEWEST[1] + 1)}


# where the package is installed

USER_SCRIPT = """
import functools, pipec, torch
from torch import Tensor, nn

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
pipe = pipec.compile(nn.Linear(4, 1), devices=2, schedule="zb-h1", optimizer=adamw, memory_limit="16GiB")
x, y = torch.randn(8, 4), torch.randn(8, 1)
loss: Tensor = pipe.step(x, target=y)
both: tuple[Tensor, object] = pipe.step(x, target=y, outputs=True)
losses: list[float] = [each.item() for each in pipe.stream([(x, y)])]
prepared: pipec.Pipeline = pipe.prepare(x, target=y)
pipec.load("artifact").step(x, target=y)
reveal_type(pipe)
pipec.compile(nn.Linear(4, 1), device=2)  # wrong: no such option
pipec.compile(nn.Linear(4, 1), microbatches="four")  # wrong: of another type
loss = pipe.step(x, target=y, outputs=True)  # wrong: a tuple
"""


def run(*command: object, folder: Path, installed: Path) -> subprocess.CompletedProcess[str]:
    """As a user: nothing leads to the repository."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    given["PATH"] = f"{installed / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return subprocess.run([*map(str, command)], cwd=folder, env=given, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel of pipec, which sees the packages of this one, but not its pipec."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], capture_output=True, text=True
    )
    if built.returncode and "hatchling" in built.stderr and "satisf" in built.stderr:
        pytest.skip("pip cannot fetch hatchling, which builds the wheel")
    assert not built.returncode, built.stderr
    (wheel,) = folder.glob(f"pipec-{pipec.__version__}-py3-none-any.whl")
    home = folder / "env"
    venv.create(home, with_pip=False)
    into = [*pip, "--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(into, check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    Path(packages, "development.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    return home


@pytest.mark.slow
def test_the_wheel_runs_the_quickstart_in_another_folder(installed: Path, tmp_path: Path) -> None:
    quickstart = re.search(r"^```python\n(.*?)^```", read("README.md"), re.DOTALL | re.MULTILINE)
    assert quickstart
    where = "import pipec, sys; print(pipec.__file__, pipec.__version__, file=sys.stderr)\n"
    (tmp_path / "train.py").write_text(where + quickstart[1], encoding="utf-8")
    done = run(installed / "bin" / "python", "train.py", folder=tmp_path, installed=installed)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{re.escape(str(installed))}\S*pipec/__init__.py {pipec.__version__}\n", done.stderr)
    version = run(installed / "bin" / "pipec", "--version", folder=tmp_path, installed=installed)
    assert version.stdout == f"pipec {pipec.__version__}\n", version.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mypy_reads_a_user_script(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(USER_SCRIPT, encoding="utf-8")
    python = installed / "bin" / "python"
    options = ("--strict", "--python-executable", python, "--cache-dir", tmp_path / "cache")
    done = run(sys.executable, "-m", "mypy", *options, "script.py", folder=tmp_path, installed=installed)
    found = re.findall(r"^.*script\.py:(\d+)(?::\d+)?.*\berror\b", done.stdout, re.MULTILINE)
    wrong = [number for number, line in enumerate(USER_SCRIPT.splitlines(), 1) if "# wrong" in line]
    assert [*map(int, found)] == wrong, done.stdout + done.stderr
    assert 'Revealed type is "pipec.pipeline.pipeline.Pipeline"' in done.stdout
