"""The import direction: what each part of pipec may import, read from the source with ``ast``."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ORDER = (
    *("errors", "console", "saved_folders", "torch_compat", "ops", "primitives", "ir", "hardware", "graph"),
    *("capture", "cost", "planner", "programs", "timeline", "schedules", "codegen", "passes", "plan"),
    *("artifact", "compiler", "runtime", "viz", "drawn_artifacts", "checkpoint", "profiler", "options"),
    *("pipeline", "api_arguments", "api", "integrations", "cli", "__main__"),
)
"""From the top of the data flow to its end: each may import those before it, all of them or these alone."""

ONLY = {
    "ir": {"errors"},
    "runtime": {"errors", "console", "torch_compat", "ir", "artifact"},
    "viz": {"errors", "ir", "timeline"},
}
WITHOUT_TORCH = ("errors", "console", "saved_folders", "ir", "planner", "programs", "timeline", "schedules")
WITHOUT_TORCH += ("viz", "options", "cli")

RUNTIME = (
    *("random_seeds", "random_operators", "branches", "sparse_gradients", "absent_tensors", "wrappers"),
    *("processes", "memory", "messages", "stages", "optimizers", "step", "stream"),
)
"""The same for the parts of the runtime. Its other files, which users meet, import them all."""


def imports() -> Iterator[tuple[list[str], int, list[str], bool]]:
    """The parts of the names of a module and of what it imports, the line, and whether that is late."""
    for path in sorted((ROOT / "pipec").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module, tree = [each for each in parts if each != "__init__"], ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                level = getattr(node, "level", 0)
                origin = [*parts[: len(parts) - level]] if level else []
                origin += (getattr(node, "module", None) or "").split(".")
                for alias in node.names:
                    name = [each for each in [*origin, *alias.name.split(".")] if each]
                    yield module, node.lineno, name, node not in tree.body


IMPORTS = [*imports()]


def test_imports_follow_the_order() -> None:
    found = list[str]()
    for (_, *module), line, (top, *name), _ in IMPORTS:
        own, allowed = module[:1], set[str]()
        if top == "pipec" and own and name and name[0] in ORDER:  # pipec/__init__.py may import all, late
            allowed = {own[0], *ONLY.get(own[0], ORDER[: ORDER.index(own[0])])}
            if name[0] not in allowed:
                found.append(f"pipec.{'.'.join(module)}:{line}: may not import {name[0]}")
        if top in ("examples", "tests", "benchmarks"):
            found.append(f"pipec.{'.'.join(module)}:{line}: {top} is outside of pipec")
        match module, name:
            case ["runtime", part, *_], ["runtime", other, *_] if part in RUNTIME:
                if other not in RUNTIME[: RUNTIME.index(part) + 1]:
                    found.append(f"pipec.{'.'.join(module)}:{line}: {other} comes later in the runtime")
    assert not found, "\n".join(found)


def test_the_order_names_every_package() -> None:
    there = {path.stem for path in (ROOT / "pipec").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {*ORDER} == there - {"__init__", "__pycache__"}


COMPILER = ("capture", "codegen", "compiler", "graph", "passes", "plan", "planner", "schedules", "timeline")
OF_THE_RUNTIME = ("errors", "console", "torch_compat", "ir", "programs", "artifact", "runtime")
NEED_TORCH = ("pipec.cli.artifact_inputs", "pipec.__main__")
"""A command imports the first when it runs; the second runs the command line when it is imported."""

LIBRARIES = ("accelerate", "datasets", "lightning", "peft", "transformers", "trl")

TORCHLESS = {".".join(m) for m, *_ in IMPORTS if m[1:] and m[1] in WITHOUT_TORCH} - {*NEED_TORCH}


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        (sorted(TORCHLESS), ["torch"]),
        (["pipec.runtime"], [f"pipec.{name}" for name in ORDER if name not in OF_THE_RUNTIME]),
        (["pipec.pipeline.load"], [f"pipec.{name}" for name in COMPILER]),
        (["pipec.api", "pipec.pipeline"], ["torch._dynamo", "torch._functorch.aot_autograd", *LIBRARIES]),
    ],
    ids=["without torch", "runtime", "a loaded artifact", "a rank that captures nothing"],
)
def test_a_process_loads_no_more_than_it_needs(imported: list[str], absent: list[str]) -> None:
    """Modules without torch load none, not even through others; a rank of an artifact loads no compiler."""
    code = f"import sys, {', '.join(imported)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [x for x in done.stdout.split() if any(f"{x}.".startswith(f"{each}.") for each in absent)] == []


def test_public_names_are_imported_late_and_leave_pythons_generator_as_it_was() -> None:
    """A script seeds it and then calls pipec, which imports libraries that draw a number."""
    code = "import random, pipec; state = random.getstate(); [getattr(pipec, name) for name in pipec.__all__]"
    subprocess.run([sys.executable, "-c", f"{code}; assert random.getstate() == state"], cwd=ROOT, check=True)


def test_every_package_that_is_imported_is_declared() -> None:
    """And no other is declared. Those of extras are imported late, but in ``integrations``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name, own in project["optional-dependencies"].items() if name != "dev" for each in own]
    declared, optional = (
        {re.split(r"[<>=\[]", x)[0] for x in own} for own in (project["dependencies"], extras)
    )
    found = set[str]()
    for module, _, (top, *_), is_late in IMPORTS:
        if not (top in optional and (is_late or "integrations" in module)):
            found.add(top)
    assert found - {"pipec", *sys.stdlib_module_names} == declared
