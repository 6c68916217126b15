"""Breaks pipec on purpose, in one place at a time, and says which faults the fast tests find.

``python tests/mutants.py --count 200`` draws places at random over all packages, the same ones for a seed.
On a copy of the repository with one of them broken it runs the tests that enter the broken lines, and prints
a line for each fault, and the share that was found. A test that may have failed by chance, as under load,
finds nothing: it has to fail once more, and to pass on the sound code. The first run finds out which test
enters which line: it runs all fast tests with ``pytest-cov`` and keeps the answer in ``--map``. ``--list``
prints the places alone, ``--only N`` tries one of them.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import coverage
import pytest

ROOT = Path(__file__).parents[1]

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow")

TIME_LIMIT = 3600.0
"""Seconds after which tests count as failed: a fault lets one of them wait for ever."""

FIRST = 25
"""Tests that are tried before all others of a fault: those that enter the fewest lines of its file."""

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}


@dataclass(frozen=True)
class Mutant:
    """A place in a file, as the text between two offsets, and what stands there instead."""

    path: str
    lines: range
    start: int
    stop: int
    kind: str
    text: str

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def __str__(self) -> str:
        before = (ROOT / self.path).read_bytes()[self.start : self.stop].decode()
        return f"{self.path}:{self.lines.start}: {self.kind}: {_brief(before)} -> {_brief(self.text)}"


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
            lines = range(place.lineno, (place.end_lineno or place.lineno) + 1)
            yield Mutant(path, lines, start, stop, kind, text)


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


class TestMap:
    """Which fast tests enter which lines, in their own process or in those that they start.

    A test that takes over what an earlier one of its file has captured enters no line of capture, so that a
    fault that it alone would find counts as not found.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            _find_lines_of_tests(path)
        self._data = coverage.CoverageData(str(path))
        self._data.read()

    def tests_of(self, mutant: Mutant) -> list[list[str]]:
        """The tests to try: first a few that enter little else, then all others."""
        by_line = self._data.contexts_by_lineno(str(ROOT / mutant.path))
        sizes = Counter(test for tests in by_line.values() for test in {*map(_test_id, tests)})
        entering = {_test_id(context) for line in mutant.lines for context in by_line.get(line, ())}
        ordered = sorted(entering - {""}, key=lambda test: (sizes[test], test))
        if "" in entering:  # the line runs when its module is imported
            ordered += ["tests/test_smoke.py", *_folder_of(mutant)]
        return [tests for tests in (ordered[:FIRST], ordered[FIRST:]) if tests]


def _test_id(context: str) -> str:
    """``tests/test_smoke.py::test_a_step|run``, or with `` (call)`` of a process, without the phase."""
    return re.sub(r"\|\w+$| \(\w+\)$", "", context)


def _folder_of(mutant: Mutant) -> list[str]:
    """The folder of tests with the name of a package."""
    folder = Path("tests", *Path(mutant.path).parts[1:-1][:1])
    return [str(folder)] if (ROOT / folder).is_dir() and folder != Path("tests") else []


def _find_lines_of_tests(path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch, "coveragerc")
        settings.write_text(_SETTINGS.format(file=path.resolve()))
        options = ["--cov=pipec", "--cov-context=test", f"--cov-config={settings}", "--cov-report="]
        parallel = ["--numprocesses=2", "--dist=loadfile"]
        environment = _environment(ROOT) | {"COVERAGE_PROCESS_START": str(settings)}
        subprocess.run([*PYTEST, *parallel, *options, "tests"], cwd=ROOT, env=environment, check=True)


_SETTINGS = """[run]
source = pipec
data_file = {file}
context = ${{PYTEST_CURRENT_TEST-}}
parallel = true
patch = _exit
"""
"""A process is measured as part of the test that has started it."""


class Copy:
    """A copy of the files in the repository, in which one place at a time is broken."""

    def __init__(self, folder: Path, test_map: TestMap) -> None:
        self._folder, self._test_map = folder, test_map
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)

    def found_by(self, mutant: Mutant) -> str:
        """The test that fails with a fault; empty if there is none.

        Those of its file fail again with the fault, and pass without it: others fail by chance.
        """
        for tests in self._test_map.tests_of(mutant):
            by_chance = list[str]()
            while failed := self._failed_with(mutant, [*tests, *by_chance]):
                of_file = [each for each in tests if each.partition("::")[0] == failed.partition("::")[0]]
                again = [*(of_file or tests), *by_chance]
                if self._failed_with(mutant, again) and not self._failed(again):
                    return failed
                if f"--deselect={failed}" in by_chance:
                    break
                by_chance.append(f"--deselect={failed}")
        return ""

    def _failed_with(self, mutant: Mutant, tests: Sequence[str]) -> str:
        path = self._folder / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutant.applied_to(source))
        try:
            return self._failed(tests)
        finally:
            path.write_bytes(source)

    def _failed(self, tests: Sequence[str]) -> str:
        """The first of the tests that fails, or how the process ended; empty if all pass."""
        run = subprocess.Popen(
            [*PYTEST, "-x", *tests],
            cwd=self._folder,
            env=_environment(self._folder),
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
        if run.returncode in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            return re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", output, re.MULTILINE)[0]
        if missing := re.search(r"^ERROR: not found: .*", output, re.MULTILINE):
            raise ValueError(f"the map is of other tests, remove it: {missing[0]}")
        if run.returncode == pytest.ExitCode.USAGE_ERROR:
            return "no test begins"  # not even ``conftest.py`` can be imported
        is_ended = run.returncode < 0 or run.returncode == pytest.ExitCode.INTERNAL_ERROR
        return f"exit status {run.returncode}" if is_ended else ""


def _environment(folder: Path) -> dict[str, str]:
    own = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    return {**os.environ, **own}


def _brief(text: str) -> str:
    return " ".join(text.split())[:60]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one place")
    parser.add_argument("--list", action="store_true", help="print the places alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--map", type=Path, default=ROOT / "build/tests_by_line.coverage")
    options = parser.parse_args()
    mutants = dict(enumerate(drawn(options.count, options.seed)))
    if options.only is not None:
        mutants = {options.only: mutants[options.only]}
    if options.list:
        print(*(f"{number} {mutant}" for number, mutant in mutants.items()), sep="\n")
        return
    test_map = TestMap(options.map)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.workers) as workers:
        copies = SimpleQueue[Copy]()
        for number in range(options.workers):
            copies.put(Copy(Path(scratch, str(number)), test_map))

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
