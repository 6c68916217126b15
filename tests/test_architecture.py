"""The import direction: what each part of pipec may import, read from the source with ``ast``."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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

OUTSIDE = ("examples", "tests", "benchmarks")


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything imported; ``package`` is where relative imports start."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def import_violations(module: str, package: str, source: str) -> list[str]:
    """One message a line of ``source`` that imports against the order."""
    position = {each.name: place for place, each in enumerate(ORDER)}
    _, *parts = module.split(".")
    own = ORDER[position[parts[0]]] if parts else None  # pipec/__init__.py imports lazily, from everywhere
    lines, found = source.splitlines(), []
    for line, name in imports(ast.parse(source), package):
        top, *rest = name.split(".")
        if top in OUTSIDE:
            reason = "pipec imports nothing from the folders around it"
        elif top != "pipec" or own is None or not rest or rest[0] not in position or rest[0] == own.name:
            continue
        elif own.only is not None and rest[0] not in own.only:
            reason = f"{own.name} may import {', '.join(sorted(own.only))} alone"
        elif position[rest[0]] > position[own.name]:
            reason = f"{rest[0]} comes after {own.name} in the order of packages"
        else:
            continue
        found.append(f"{module}:{line}: {lines[line - 1].strip()}\n    imports {name}, but {reason}")
    return found


def pipec_sources() -> Iterator[tuple[str, str, str]]:
    """(module, package, source) of every file of pipec."""
    for path in sorted((ROOT / "pipec").rglob("*.py")):
        yield module_name(path), module_name(path.parent), path.read_text(encoding="utf-8")


def test_imports_follow_the_order() -> None:
    found = [message for source in pipec_sources() for message in import_violations(*source)]
    assert not found, "\n".join(found)


def test_imports_within_the_runtime_follow_its_order() -> None:
    for module, package, source in pipec_sources():
        _, *parts = module.split(".")
        if parts[:1] == ["runtime"] and len(parts) > 1 and parts[1] in RUNTIME:
            allowed = tuple(f"pipec.runtime.{each}" for each in RUNTIME[: RUNTIME.index(parts[1]) + 1])
            for line, name in imports(ast.parse(source), package):
                follows = not within(name, ("pipec.runtime",)) or within(name, allowed)
                assert follows, f"{module}:{line}: {name}"


def test_the_order_names_every_package() -> None:
    there = {path.stem for path in (ROOT / "pipec").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {each.name for each in ORDER} == there - {"__init__", "__pycache__"}


def test_what_needs_no_torch_loads_none() -> None:
    """Not even through another module: a subprocess imports all of it, then looks for torch."""
    free = tuple(f"pipec.{each.name}" for each in ORDER if not each.torch)
    modules = [module for module, _, source in pipec_sources() if within(module, free)]
    modules = [module for module in modules if module not in NEED_TORCH]
    loaded = imported_by(*modules)
    assert "torch" not in loaded


NEED_TORCH = ("pipec.cli.artifact_inputs", "pipec.__main__")
"""A command imports the first when it runs; the second runs the command line when it is imported."""


def imported_by(*modules: str) -> set[str]:
    """The names of what is loaded in a new process that imports these modules."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


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


def test_the_runtime_loads_without_the_compiler() -> None:
    """The claim behind the order: a rank that runs a saved artifact never loads the compiler."""
    own = ("errors", "console", "torch_compat", "ir", "programs", "artifact", "runtime")
    others = tuple(f"pipec.{each.name}" for each in ORDER if each.name not in own)
    assert not [name for name in imported_by("pipec.runtime") if within(name, others)]


def test_a_saved_artifact_loads_without_the_compiler() -> None:
    """It trains, saves and resumes in a process that loads none of these."""
    compiler = "capture codegen compiler graph passes plan planner schedules timeline"
    others = tuple(f"pipec.{each}" for each in compiler.split())
    assert not [name for name in imported_by("pipec.pipeline.load") if within(name, others)]


def test_a_rank_that_captures_nothing_loads_no_dynamo() -> None:
    """Rank 0 alone compiles, and loads it then: it takes seconds, and tens of MB."""
    loaded = imported_by("pipec.api", "pipec.pipeline")
    assert not [name for name in loaded if within(name, ("torch._dynamo", "torch._functorch.aot_autograd"))]


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        ("pipec.ir.text_format", "from pipec import console", "pipec.console"),
        ("pipec.schedules.named", "x = 1\nimport pipec.plan.build_plan", "pipec.plan.build_plan"),
        ("pipec.planner.search", "def f():\n    from pipec.passes import Pass", "pipec.passes.Pass"),
        ("pipec.runtime.processes.launch", "from ...passes import pass_dump", "pipec.passes.pass_dump"),
        ("pipec.viz.svg", "import pipec.programs.lower", "pipec.programs.lower"),
        ("pipec.capture.model_call", "import tests.conftest", "tests.conftest"),
    ],
)
def test_an_import_in_the_wrong_direction_is_reported_with_its_line(
    module: str, source: str, offence: str
) -> None:
    found = import_violations(module, module.rpartition(".")[0], source)
    line = len(source.splitlines())
    assert any(f"{module}:{line}: " in message and f"imports {offence}, but " in message for message in found)


def test_every_public_name_can_be_imported() -> None:
    import pipec

    assert all(getattr(pipec, name) is not None for name in pipec.__all__)


def test_what_is_imported_late_leaves_pythons_generator_as_it_was() -> None:
    """A script seeds it and then calls pipec, which imports libraries that draw a number."""
    code = (
        "import random, pipec\n"
        "state = random.getstate()\n"
        "for name in pipec.__all__:\n    getattr(pipec, name)\n"
        "assert random.getstate() == state"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
