"""Breaks pipec on purpose, in one place at a time, and says which faults the fast tests find.

``python tests/mutants.py --count 200`` draws places at random over all packages, the same ones for a seed,
and runs the fast tests on a copy of the repository with one of them broken: the tests of its own package
first, then all others. It prints a line for each, and the share that was found. ``--list`` prints the places
alone, ``--only N`` tries one of them.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]

TIME_LIMIT = 3600.0
"""Seconds after which a fault counts as found: it lets a test wait for ever."""

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}


@dataclass(frozen=True)
class Mutant:
    """A place in a file, as the text between two offsets, and what stands there instead."""

    path: str
    line: int
    start: int
    stop: int
    kind: str
    text: str

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def __str__(self) -> str:
        before = (ROOT / self.path).read_bytes()[self.start : self.stop].decode()
        return f"{self.path}:{self.line}: {self.kind}: {_brief(before)} -> {_brief(self.text)}"


def mutants_of(path: str) -> Iterator[Mutant]:
    """All places of a file that can be broken, in order."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _computing(ast.parse(source)):
        for kind, place, text in _changes(node):
            start = starts[place.lineno - 1] + place.col_offset
            stop = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            yield Mutant(path, place.lineno, start, stop, kind, text)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr, str]]:
    """What can be broken at a node: the kind of fault, the expression, and another one."""
    match node:
        case ast.Compare(ops=[op], left=left, comparators=[right]) if type(op) in _TURNED:
            turned = ast.Compare(left, [_TURNED[type(op)]()], [right])
            yield "comparison turned", node, f"({ast.unparse(turned)})"
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.BitOr(), left=left):
            if any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in (left, node.right)):
                return
            yield "term left out", node, f"({ast.unparse(left)})"
        case ast.BoolOp(values=[first, *_]):
            yield "condition left out", node, f"({ast.unparse(first)})"
        case ast.Subscript(slice=ast.Constant(value=int() as index) as place):
            yield "off by one", place, str(index + 1)
        case ast.Subscript(slice=ast.Slice(lower=ast.expr() as bound)):
            yield "off by one", bound, f"({ast.unparse(bound)}) + 1"
        case ast.Subscript(slice=ast.Slice(upper=ast.expr() as bound)):
            yield "off by one", bound, f"({ast.unparse(bound)}) - 1"
        case ast.Call(func=ast.Name("range"), args=[*_, last]) if not isinstance(last, ast.Starred):
            yield "off by one", last, f"({ast.unparse(last)}) - 1"
        case ast.If(test=test, body=[*_, ast.Raise() | ast.Return() | ast.Continue()], orelse=[]):
            yield "guard dropped", test, "False"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those in it that compute something: no texts, annotations, decorators or raised errors."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.JoinedStr | ast.Assert)
            is_alias = isinstance(child, ast.TypeAlias) if sys.version_info >= (3, 12) else False
            if isinstance(child, ast.AST) and not is_text and not is_alias:
                yield from _computing(child)


def drawn(count: int, seed: int) -> list[Mutant]:
    """Places all over ``pipec/``."""
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pipec").rglob("*.py"))
    every = [mutant for path in paths for mutant in mutants_of(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


class Copy:
    """A copy of the files in the repository, in which one place at a time is broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)

    def found_by(self, mutant: Mutant) -> str:
        """The test that finds a fault; empty if none does."""
        path = self._folder / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutant.applied_to(source))
        try:
            own = Path("tests", *Path(mutant.path).parts[1:-1][:1])
            near = [str(own)] if (self._folder / own).is_dir() and own != Path("tests") else []
            return self._failed_test(*near, "tests/test_smoke.py") or self._failed_test("tests")
        finally:
            path.write_bytes(source)

    def _failed_test(self, *paths: str) -> str:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        environment = {
            **os.environ,
            **{"PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        }
        run = subprocess.Popen(
            [*command, *paths],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = run.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return f"no end within {TIME_LIMIT:.0f} s"
        if run.returncode in (0, 5):  # 5: no tests in this folder
            return ""
        named = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return named[0].split(" - ")[0] if named else f"exit status {run.returncode}"


def _brief(text: str) -> str:
    return " ".join(text.split())[:60]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one place")
    parser.add_argument("--list", action="store_true", help="print the places alone")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    mutants = dict(enumerate(drawn(options.count, options.seed)))
    if options.only is not None:
        mutants = {options.only: mutants[options.only]}
    if options.list:
        print(*(f"{number} {mutant}" for number, mutant in mutants.items()), sep="\n")
        return
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.workers) as workers:
        copies = SimpleQueue[Copy]()
        for number in range(options.workers):
            copies.put(Copy(Path(scratch, str(number))))

        def tried(number: int) -> bool:
            copy = copies.get()
            try:
                found = copy.found_by(mutants[number])
            finally:
                copies.put(copy)
            print(f"{number} {mutants[number]}\n    {found or 'NOT FOUND'}", flush=True)
            return bool(found)

        results = [*workers.map(tried, mutants)]
    print(f"{sum(results)} of {len(results)} faults were found")


if __name__ == "__main__":
    main()
