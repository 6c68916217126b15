"""The import direction: what each part of pipec may import, read from the source with ``ast``."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = tuple(sys.stdlib_module_names)
TORCH_FREE = (
    "pipec.ir",
    "pipec.errors",
    "pipec.text",
    "pipec.columns",
    "pipec.schedules",
    "pipec.grid",
    "pipec.order_index",
    "pipec.lockstep",
    "pipec.slots",
    "pipec.lower",
    "pipec.rendezvous",
    "pipec.step_index",
    "pipec.verify",
    "pipec.readers",
    "pipec.timeline",
    "pipec.simulate",
    "pipec.trace",
    "pipec.attribution",
    "pipec.cost.devices",
    "pipec.planner",
    "pipec.viz",
)
OUTSIDE = ("examples", "tests", "benchmarks")
COMPILER = ("pipec.capture", "pipec.passes", "pipec.planner", "pipec.codegen", "pipec.torch_compat")

PRIVATE_TORCH_ALLOWED: dict[str, tuple[str, ...]] = {
    "pipec.torch_compat": ("torch",),
    "pipec.capture": ("torch._check",),  # documented, for all its underscore
    "pipec.runtime.gradients": ("torch._foreach_add_",),
    "pipec.runtime.distributed": ("torch.distributed.distributed_c10d._get_default_store",),
    "pipec.runtime.loaded": ("torch.utils._pytree",),
    "pipec.runtime.storage": ("torch._C._storage_Use_Count",),
}
"""Which private names of torch a module may use, by prefix. The one place to declare an exception."""


@dataclass(frozen=True)
class Rule:
    """What the modules under ``modules`` may import, or may not; ``name`` says it in words."""

    name: str
    modules: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def permits(self, imported: str) -> bool:
        return not within(imported, self.forbidden) and (not self.allowed or within(imported, self.allowed))


RULES = (
    Rule("ir and errors stand on the standard library alone", ("pipec.ir", "pipec.errors"), allowed=STDLIB),
    Rule(
        "schedules, programs and plans are pure Python: no torch, not even through another module",
        TORCH_FREE,
        allowed=(*TORCH_FREE, *STDLIB, "networkx", "numpy", "scipy", "sympy"),
    ),
    Rule(
        "the runtime imports the artifact, ir, text, errors and torch: a rank needs no compiler",
        ("pipec.runtime",),
        allowed=(
            "pipec.runtime",
            "pipec.artifact",
            "pipec.ir",
            "pipec.text",
            "pipec.errors",
            "torch",
            *STDLIB,
        ),
    ),
    Rule(
        "viz draws from ir, text, columns, timeline and attribution alone",
        ("pipec.viz",),
        allowed=(
            "pipec.viz",
            "pipec.attribution",
            "pipec.ir",
            "pipec.text",
            "pipec.columns",
            "pipec.timeline",
            "pipec.errors",
            *STDLIB,
        ),
    ),
    Rule("pipec imports nothing from the folders around it", ("pipec",), forbidden=OUTSIDE),
)


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


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute chain, such as ``torch._foreach_add_``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def is_private_torch(name: str) -> bool:
    """Operators such as ``torch.ops.aten._softmax`` are not: graphs are made of them, whatever the name."""
    first, *rest = name.split(".")
    if first != "torch" or rest[:1] == ["ops"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in rest)


def import_violations(rule: Rule, module: str, package: str, source: str) -> list[str]:
    """One message a line of ``source`` that breaks ``rule``."""
    if not within(module, rule.modules):
        return []
    lines = source.splitlines()
    return [
        f"{module}:{line}: {lines[line - 1].strip()}\n    imports {name}, but: {rule.name}"
        for line, name in imports(ast.parse(source), package)
        if not rule.permits(name)
    ]


def private_torch_violations(module: str, package: str, source: str) -> list[str]:
    """One message a use of a private name of torch that ``PRIVATE_TORCH_ALLOWED`` does not declare."""
    tree, lines = ast.parse(source), source.splitlines()
    used = sorted({*imports(tree, package), *attributes(tree)})
    private = {line: name for line, name in used if is_private_torch(name)}  # of a chain, the longest
    return [
        f"{module}:{line}: {lines[line - 1].strip()}\n"
        f"    uses {name}, but: private names of torch belong in torch_compat.py"
        for line, name in private.items()
        if not within(name, PRIVATE_TORCH_ALLOWED.get(module, ()))
    ]


def pipec_sources() -> Iterator[tuple[str, str, str]]:
    """(module, package, source) of every file of pipec."""
    for path in sorted((ROOT / "pipec").rglob("*.py")):
        yield module_name(path), module_name(path.parent), path.read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.split(":")[0])
def test_imports_follow_the_rule(rule: Rule) -> None:
    found = [message for source in pipec_sources() for message in import_violations(rule, *source)]
    assert not found, "\n".join(found)


def test_only_torch_compat_uses_private_names_of_torch() -> None:
    found = [message for source in pipec_sources() for message in private_torch_violations(*source)]
    assert not found, "\n".join(found)


def test_every_exception_is_still_needed() -> None:
    used = {
        module
        for module, package, source in pipec_sources()
        for _, name in [*imports(ast.parse(source), package), *attributes(ast.parse(source))]
        if is_private_torch(name)
    }
    assert set(PRIVATE_TORCH_ALLOWED) <= used


def test_the_runtime_loads_without_the_compiler() -> None:
    """The claim behind the rules: a rank that runs a saved artifact never loads the compiler."""
    code = "import sys, pipec.runtime; print(*(name for name in sys.modules if name.startswith('pipec.')))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    compiler = [name for name in loaded.stdout.split() if within(name, COMPILER)]
    assert not compiler, f"import pipec.runtime also loads {', '.join(compiler)}"


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        ("pipec.ir", "from pipec import text", "pipec.text"),
        ("pipec.schedules.gpipe", "x = 1\nimport torch", "torch"),
        ("pipec.planner.search", "def f():\n    from pipec.graph import stage_of", "pipec.graph.stage_of"),
        ("pipec.runtime.launch", "from ..passes import verify", "pipec.passes.verify"),
        ("pipec.viz.svg", "import pipec.lower", "pipec.lower"),
        ("pipec.capture", "import tests.conftest", "tests.conftest"),
    ],
)
def test_a_forbidden_import_is_reported_with_its_line(module: str, source: str, offence: str) -> None:
    package = module.rpartition(".")[0]
    found = [message for rule in RULES for message in import_violations(rule, module, package, source)]
    line = len(source.splitlines())
    assert any(
        f"{module}:{line}: " in message and f"imports {offence}, but: " in message for message in found
    )


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "from torch._guards import tracing",
        "import torch\ntorch._foreach_add_([], [])",
    ],
)
def test_a_private_name_of_torch_is_reported(source: str) -> None:
    (message,) = private_torch_violations("pipec.runtime.stage", "pipec.runtime", source)
    assert "private names of torch belong in torch_compat.py" in message
    assert not private_torch_violations("pipec.torch_compat", "pipec", source)


def test_public_names_of_torch_are_not_reported() -> None:
    assert not private_torch_violations(
        "pipec.capture", "pipec", "import torch\ntorch.__version__\ntorch.nn.Module"
    )
