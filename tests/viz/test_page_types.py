"""The scripts of the page under TypeScript's checker, which needs no build: their types are in comments."""

import json
import shutil
import subprocess
from importlib import resources

import pytest

from pipec.viz.html import SCRIPTS

PAGE = resources.files("pipec.viz").joinpath("page")
TSC = ("npx", "--yes", "--package", "typescript@5.9.3", "tsc")


def test_every_script_is_checked_in_the_order_in_which_it_runs() -> None:
    listed = json.loads(PAGE.joinpath("tsconfig.json").read_text())["files"]
    assert listed == ["data.d.ts", *(f"{name}.js" for name in SCRIPTS)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npx") is None, reason="no `npx` on PATH: install node to check types")
def test_types_of_the_scripts_fit() -> None:
    if subprocess.run([*TSC, "--version"], capture_output=True, timeout=200).returncode:
        pytest.skip("npx cannot fetch typescript")
    made = subprocess.run([*TSC, "-p", str(PAGE)], capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stdout
