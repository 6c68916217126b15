"""What the code of a stage has to do with the rest of a step, read without running it.

It is part of the plan of a saved artifact: code may be edited, as long as its interface stays.
"""

import ast
from collections.abc import Mapping

from pipec.errors import DAMAGED_DATA_ERRORS, VerifyError

Interface = Mapping[str, str]
"""By name: the tensors of a table, and what a function takes out of its frame and returns."""


def interface_of(source: str, where: str) -> Interface:
    """The interface of a stage's code. ``where`` names it in errors.

    Raises:
        VerifyError: it does not compile.
    """
    try:
        body = ast.parse(source).body
        compile(source, where, "exec", dont_inherit=True)
        return dict(_describe(node) for node in body if isinstance(node, ast.FunctionDef | ast.Assign))
    except SyntaxError as error:
        raise VerifyError(f"{where} does not compile: line {error.lineno}: {error.msg}") from error
    except DAMAGED_DATA_ERRORS as error:
        raise VerifyError(f"{where} cannot be read: {type(error).__name__} {error}") from error


def require_interface(source: str, expected: Interface, where: str) -> None:
    """Raise VerifyError unless the code has all of ``expected``; it may have other functions besides."""
    found = interface_of(source, where)
    for name, words in expected.items():
        if name not in found:
            raise VerifyError(f"{where} has no {name}; expected {name} {words}")
        if found[name] != words:
            raise VerifyError(
                f"{where}: {name} {found[name]}; expected {words}. Its inside may change, but not what it "
                "exchanges with the rest of the step; restore that, or save the pipeline again"
            )


def _describe(node: ast.FunctionDef | ast.Assign) -> tuple[str, str]:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]), f"is {ast.unparse(node.value)}"
    taken = sorted({ast.unparse(name) for each in ast.walk(node) for name in _taken(each)})
    last = node.body[-1]
    returned = _form(last.value) if isinstance(last, ast.Return) else "nothing"
    takes = f"takes {', '.join(taken) or 'nothing'} and returns {returned}"
    return node.name, f"({ast.unparse(node.args)}) {takes}"


def _taken(node: ast.AST) -> list[ast.expr]:
    """The names of the values in ``frame["x"]`` and ``frame.pop("x")``."""
    match node:
        case ast.Subscript(value=ast.Name(id="frame"), slice=name):
            return [name]
        case ast.Call(func=ast.Attribute(value=ast.Name(id="frame"), attr="pop"), args=[name, *_]):
            return [name]
    return []


def _form(value: ast.expr | None) -> str:
    """The keys of dicts and the places of tuples, with None where a gradient is missing."""
    match value:
        case ast.Dict(keys=keys):
            return f"{{{', '.join(ast.unparse(key) for key in keys if key)}}}"
        case ast.Tuple(elts=elements):
            return f"({', '.join(map(_form, elements))})"
        case ast.Constant(value=None):
            return "None"
    return "…"
