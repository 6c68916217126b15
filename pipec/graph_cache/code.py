"""The code that was traced, found again among the modules of this process or of another one."""

import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping

from pipec.graph_cache.files import imported, is_pinned
from pipec.graph_cache.marks import UnfaithfulError, code_mark, codes_of


def traced_code(codes: Iterable[types.CodeType]) -> dict[str, list[str]]:
    """The marks of traced code by the module that it was found in, without what versions stand for.

    Code that has no file, such as that of a dataclass, is looked for in every module.

    Raises:
        UnfaithfulError: no module has some code, such as what a notebook defines.
    """
    files = {getattr(sys.modules[name], "__file__", None): name for name in reversed(list(sys.modules))}
    own = [code for code in codes if not _is_pinned(code, files)]
    wanted, paths = {code_mark(code): code for code in own}, {code.co_filename for code in own}
    homes = imported() if paths - files.keys() else {files[path] for path in paths}
    found = {name: sorted({*_marks_in(sys.modules[name], paths, files)} & wanted.keys()) for name in homes}
    if missing := wanted.keys() - {mark for marks in found.values() for mark in marks}:
        code = wanted[min(missing)]
        raise UnfaithfulError(f"{code.co_qualname}, which no module has: {code.co_filename}")
    return {name: found[name] for name in sorted(found) if found[name]}


def _marks_in(
    module: types.ModuleType, paths: Collection[str], files: Mapping[str | None, str]
) -> Iterator[str]:
    """The marks of code that a module's file has, or that has no file."""
    for code in codes_in(module):
        path = code.co_filename
        if path in paths and (path == module.__file__ or path not in files):
            yield code_mark(code)


def _is_pinned(code: types.CodeType, files: Mapping[str | None, str]) -> bool:
    return code.co_filename.startswith("<frozen ") or is_pinned(files.get(code.co_filename))


def require_code(expected: Mapping[str, Iterable[str]]) -> None:
    """Raise UnfaithfulError unless the modules of this process have the code that was traced."""
    for name, marks in expected.items():
        if name not in sys.modules or not {*marks} <= set(map(code_mark, codes_in(sys.modules[name]))):
            raise UnfaithfulError(f"the code of {name} is another one")


def codes_in(module: types.ModuleType) -> Iterator[types.CodeType]:
    """The code of all functions of a module and of its classes, and of what is defined within them."""
    for code in _codes(vars(module), module.__name__, set()):
        yield from _within(code)


def _codes(members: Mapping[str, object], module: str, seen: set[int]) -> Iterator[types.CodeType]:
    for member in list(members.values()):
        yield from codes_of(member)
        if issubclass(type(member), type) and member.__module__ == module and id(member) not in seen:
            seen.add(id(member))
            yield from _codes(vars(member), module, seen)


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _within(constant)
