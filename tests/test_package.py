"""The package: one version, its metadata, and a wheel that works and has types where it is installed."""

import os
import re
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

import pipec
from pipec.cli import app
from pipec.torch_compat import versions
from pipec.torch_compat.versions import untested_version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]

USER_SCRIPT = """
import functools

import pipec
import torch
from torch import Tensor, nn

pipe = pipec.compile(
    nn.Linear(4, 1),
    devices=2,
    loss_fn=nn.functional.mse_loss,
    schedule="zb-h1",
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    memory_limit="16GiB",
)
x, y = torch.randn(8, 4), torch.randn(8, 1)
loss: Tensor = pipe.step(x, target=y)
both: tuple[Tensor, object] = pipe.step(x, target=y, outputs=True)
losses: list[float] = [each.item() for each in pipe.stream([(x, y)])]
metrics: pipec.Pipeline = pipe.prepare(x, target=y)
try:
    pipe.eval_step(x, target=y)
except pipec.NonFiniteError:
    raise
pipe.visualize("timeline.html")
pipec.load("artifact").step(x, target=y)
reveal_type(pipe)
pipec.compile(nn.Linear(4, 1), device=2)  # no such option
pipec.compile(nn.Linear(4, 1), microbatches="four")  # of another type
loss = pipe.step(x, target=y, outputs=True)  # a tuple
"""
MISTAKES = [
    number
    for number, line in enumerate(USER_SCRIPT.splitlines(), 1)
    if line.startswith(("pipec.c", "loss = "))
]


def test_the_version_is_that_of_the_package() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "pipec/__init__.py"
    assert CliRunner().invoke(app, ["--version"]).output == f"pipec {pipec.__version__}\n"


def test_the_package_asks_for_the_tested_versions_of_torch_of_any_build() -> None:
    (first, second), (last, next_minor) = versions.OLDEST, (versions.NEWEST[0], versions.NEWEST[1] + 1)
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    specifier = next(each.specifier for each in requirements if each.name == "torch")
    assert str(specifier) == f"<{last}.{next_minor},>={first}.{second}"
    for build in (f"{first}.{second}.0", "2.12.1+cu130", "2.13.0+cpu", "2.13.0+rocm7", "2.15.0+cu132"):
        assert specifier.contains(build)
        assert untested_version(build) is None
    for build in ("2.10.1", f"{last}.{next_minor}.0", "3.0", "2.16.0a0+git12"):
        assert not specifier.contains(build, prereleases=True)
        age = "older" if build == "2.10.1" else "newer"
        assert str(untested_version(build)).startswith(f"torch {build} is {age} than the versions")


def test_rank_zero_says_once_that_a_version_of_torch_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "9.0.1+cpu")
    for rank in "001":
        monkeypatch.setenv("RANK", rank)
        pipec.compile(torch.nn.Linear(2, 2), devices=1)
    (said,) = (record.message for record in caplog.records)
    assert "9.0.1+cpu is newer than the versions" in said


def test_every_extra_of_users_is_in_all() -> None:
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == set(EXTRAS) - {"all", "dev", "docs", "examples"}


def test_help_prints_an_option_a_line_with_readable_types() -> None:
    lines = str(pipec.compile.__signature__).splitlines()  # type: ignore[attr-defined]
    assert "    devices: int | Sequence[str | device] | None = None," in lines
    assert "    schedule: str | Path | Callable[[int, int], Schedule] = '1f1b'," in lines
    assert lines[-1] == ") -> Pipeline"


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
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quickstart = re.search(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
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
    assert [*map(int, found)] == MISTAKES, done.stdout + done.stderr
    assert len(MISTAKES) == 3
    assert 'Revealed type is "pipec.pipeline.pipeline.Pipeline"' in done.stdout
