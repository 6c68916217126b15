"""The import direction: what each part of pipec may import, read from the source with ``ast``."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Package:
    """A folder, or a file at the root. It may import those listed before it: all, or ``only`` these.

    ``torch``: whether importing it may load torch.
    """

    name: str
    torch: bool = True
    only: frozenset[str] | None = None


ORDER = (
    Package("errors", torch=False),
    Package("console", torch=False),
    Package("saved_folders", torch=False),
    Package("torch_compat"),
    Package("ops"),
    Package("primitives"),
    Package("ir", torch=False, only=frozenset({"errors"})),
    Package("hardware"),
    Package("graph"),
    Package("capture"),
    Package("cost"),
    Package("planner", torch=False),
    Package("programs", torch=False),
    Package("timeline", torch=False),
    Package("schedules", torch=False),
    Package("codegen"),
    Package("passes"),
    Package("plan"),
    Package("artifact"),
    Package("compiler"),
    Package("runtime", only=frozenset({"errors", "console", "torch_compat", "ir", "artifact"})),
    Package("viz", torch=False, only=frozenset({"errors", "ir", "timeline"})),
    Package("drawn_artifacts"),
    Package("checkpoint"),
    Package("profiler"),
    Package("options", torch=False),
    Package("pipeline"),
    Package("api_arguments"),
    Package("api"),
    Package("integrations"),
    Package("cli", torch=False),
    Package("__main__", torch=False),
)
"""From the top of the data flow to its end. This list is all there is to say about who imports whom."""

RUNTIME = (
    "random_seeds",
    "random_operators",
    "branches",
    "sparse_gradients",
    "absent_tensors",
    "wrappers",
    "processes",
    "memory",
    "messages",
    "stages",
    "optimizers",
    "step",
    "stream",
)
"""The same for the parts of the runtime. Its other files, which users meet, import them all."""


def within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def imports() -> Iterator[tuple[str, int, str]]:
    """(module, line, full dotted name) of everything that a file of pipec imports."""
    for path in sorted((ROOT / "pipec").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((module, node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = parts[: len(parts) - node.level] if node.level else ()
                origin = ".".join([*parents, *([node.module] if node.module else [])])
                yield from ((module, node.lineno, f"{origin}.{alias.name}") for alias in node.names)


IMPORTS = [*imports()]


def test_imports_follow_the_order() -> None:
    position, found = {each.name: place for place, each in enumerate(ORDER)}, list[str]()
    for module, line, name in IMPORTS:
        top, *rest = name.split(".")
        _, *parts = module.split(".")
        if top in ("examples", "tests", "benchmarks"):
            found.append(f"{module}:{line}: {name} is outside of pipec")
        elif (
            top == "pipec" and parts and rest and rest[0] in position
        ):  # pipec/__init__.py may import all, late
            own = ORDER[position[parts[0]]]
            allowed = {each.name for each in ORDER[: position[own.name] + 1]}
            if rest[0] not in (allowed if own.only is None else own.only | {own.name}):
                found.append(f"{module}:{line}: {own.name} may not import {name}")
        if parts[:1] == ["runtime"] and len(parts) > 1 and parts[1] in RUNTIME:
            before = [f"pipec.runtime.{each}" for each in RUNTIME[: RUNTIME.index(parts[1]) + 1]]
            if within(name, ["pipec.runtime"]) and not within(name, before):
                found.append(f"{module}:{line}: {name} comes after {parts[1]} in the order of the runtime")
    assert not found, "\n".join(found)


def test_the_order_names_every_package() -> None:
    there = {path.stem for path in (ROOT / "pipec").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {each.name for each in ORDER} == there - {"__init__", "__pycache__"}


COMPILER = ("capture", "codegen", "compiler", "graph", "passes", "plan", "planner", "schedules", "timeline")
OF_THE_RUNTIME = ("errors", "console", "torch_compat", "ir", "programs", "artifact", "runtime")


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ([f"pipec.{each.name}" for each in ORDER if not each.torch], ["torch"]),
        (["pipec.runtime"], [f"pipec.{each.name}" for each in ORDER if each.name not in OF_THE_RUNTIME]),
        (["pipec.pipeline.load"], [f"pipec.{name}" for name in COMPILER]),
        (["pipec.api", "pipec.pipeline"], ["torch._dynamo", "torch._functorch.aot_autograd"]),
    ],
    ids=["without torch", "runtime", "a loaded artifact", "a rank that captures nothing"],
)
def test_a_process_loads_no_more_than_it_needs(imported: list[str], absent: list[str]) -> None:
    """Modules without torch load none, not even through others; a rank of an artifact loads no compiler."""
    if absent == ["torch"]:
        imported = [name for name in {module for module, *_ in IMPORTS} if within(name, imported)]
        imported = [name for name in imported if name not in NEED_TORCH]
    code = f"import sys, {', '.join(imported)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if within(name, absent)] == []


NEED_TORCH = ("pipec.cli.artifact_inputs", "pipec.__main__")
"""A command imports the first when it runs; the second runs the command line when it is imported."""


def test_every_package_that_is_imported_is_declared() -> None:
    """And no other is declared: GPU machines have torch, and often no way to install more.

    Libraries for which there are extras are imported where they are used, but in ``integrations``.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    extras = project["optional-dependencies"]
    lists = [extras[name] for name in extras if name != "dev"]
    optional, found = {re.split(r"[<>=\[]", each)[0] for own in lists for each in own}, set[str]()
    for path in (ROOT / "pipec").rglob("*.py"):
        tree = ast.parse(path.read_text())
        early = {node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
        for node in ast.walk(tree):
            is_late = node not in early or "integrations" in path.parts
            match node:
                case ast.Import():
                    names = {each.name.partition(".")[0] for each in node.names}
                case ast.ImportFrom(module=str() as module, level=0):
                    names = {module.partition(".")[0]}
                case _:
                    continue
            found |= names - optional if is_late else names
    found -= {"pipec", *sys.stdlib_module_names}
    assert found == declared


def test_public_names_are_imported_late_and_leave_pythons_generator_as_it_was() -> None:
    """A script seeds it and then calls pipec, which imports libraries that draw a number."""
    code = (
        "import random, pipec\n"
        "state = random.getstate()\n"
        "for name in pipec.__all__:\n    getattr(pipec, name)\n"
        "assert random.getstate() == state"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
