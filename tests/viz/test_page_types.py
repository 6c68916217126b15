"""The scripts of the page under TypeScript's checker, which needs no build: their types are in comments."""

import json
import os
import shutil
import subprocess
from importlib import resources

import pytest
from chromium import PATH

from pipec.viz.html import SCRIPTS

PAGE = resources.files("pipec.viz").joinpath("page")
NPX = shutil.which("npx", path=PATH)
TSC = ("--yes", "--package", "typescript@5.9.3", "tsc")


def test_every_script_is_checked_in_the_order_in_which_it_runs() -> None:
    listed = json.loads(PAGE.joinpath("tsconfig.json").read_text())["files"]
    assert listed == ["data.d.ts", *(f"{name}.js" for name in SCRIPTS)]


@pytest.mark.slow
@pytest.mark.skipif(NPX is None, reason="no `npx`: install node to check types")
def test_types_of_the_scripts_fit() -> None:
    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        command, environment = [str(NPX), *TSC, *arguments], {**os.environ, "PATH": PATH}
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)

    if check("--version").returncode:
        pytest.skip("npx cannot fetch typescript")
    made = check("-p", str(PAGE))
    assert made.returncode == 0, made.stdout
