"""The operators of a model, and the values between them, read off the generated code of its stages.

Generated code names the module, its class and the source line above the statements that come from it::

    # h.3.attn · Linear                                                    # gpt.py:9
    addmm_9 = torch.addmm(h_3_attn_bias, view_6, t_9)  # f32[32*b, 64]

So the outline is that of the code that runs, and an artifact that was loaded has it, too.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ORIGIN = re.compile(r"\s+# (?P<module>\S.*?)(?: · (?P<type>.*?))?(?:\s{2,}# (?P<source>\S+:\d+))?\s*")
_FORWARD = re.compile(r"forward(_\d+)?")


@dataclass(frozen=True)
class OutlinedOperator:
    """A statement of a stage's forward: where it is, what it calls, and the operators whose values it reads.

    ``line`` is the line in the code of its stage, from 1; ``source`` the line of the model, such as
    ``gpt.py:9``. ``result`` is the name of its first value, ``shape`` what it looks like, and ``weights`` are
    the FQNs of the parameters that it reads.
    """

    stage: int
    line: int
    module: str
    module_type: str
    source: str
    call: str
    result: str
    shape: str
    inputs: tuple[int, ...]
    weights: tuple[str, ...]


def outline(sources: Sequence[str], parameters: Sequence[Sequence[str]]) -> list[OutlinedOperator]:
    """The operators of all stages, in order; ``parameters[stage]`` are the FQNs of its weights."""
    found: list[OutlinedOperator] = []
    makers: dict[str, int] = {}
    for stage, (code, names) in enumerate(zip(sources, parameters, strict=True)):
        weights: dict[str, str] = {}
        for function in ast.parse(code).body:
            if isinstance(function, ast.FunctionDef) and _FORWARD.fullmatch(function.name):
                weights |= dict(zip(_unpacked(function), names, strict=False))
                for operator in _operators(stage, code.splitlines(), function, makers, weights):
                    makers |= dict.fromkeys(operator[1], len(found))
                    found.append(operator[0])
    return found


def _unpacked(function: ast.FunctionDef) -> list[str]:
    """The names to which a function unpacks its weights, ``frame["w"]``."""
    for statement in function.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "frame['w']":
            return _names(statement.targets[0], ast.Store)
    return []


def _operators(
    stage: int,
    lines: Sequence[str],
    function: ast.FunctionDef,
    makers: dict[str, int],
    weights: dict[str, str],
) -> Iterator[tuple[OutlinedOperator, list[str]]]:
    """Each statement that computes something, with the names that it assigns."""
    module = module_type = source = ""
    read = function.lineno
    for statement in function.body:
        for line in lines[read : statement.lineno - 1]:
            if match := _ORIGIN.fullmatch(line):
                module, module_type, source = (text or "" for text in match.groups())
        read = statement.end_lineno or statement.lineno
        if not isinstance(statement, ast.Assign) or "frame" in _names(statement.value, ast.Load):
            continue
        results, used = _names(statement.targets[0], ast.Store), _names(statement.value, ast.Load)
        operator = OutlinedOperator(
            stage,
            statement.lineno,
            module,
            module_type,
            source,
            _call(statement.value),
            results[0] if results else "",
            lines[read - 1].rpartition("  # ")[2] if "  # " in lines[read - 1] else "",
            tuple(dict.fromkeys(makers[name] for name in used if name in makers)),
            tuple(dict.fromkeys(weights[name] for name in used if name in weights)),
        )
        yield operator, results


def _call(value: ast.expr) -> str:
    """``addmm`` for ``torch.addmm(...)``; an operator such as ``*`` by its name."""
    if isinstance(value, ast.Call):
        called = value.func
        parts = ast.unparse(called).split(".") if not isinstance(called, ast.Attribute) else [called.attr]
        if parts[-1] in ("default", "out") and isinstance(called, ast.Attribute):
            return _call_name(called.value)
        return parts[-1]
    return type(value.op).__name__.lower() if isinstance(value, ast.BinOp) else "value"


def _call_name(value: ast.expr) -> str:
    return value.attr if isinstance(value, ast.Attribute) else ast.unparse(value)


def _names(tree: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    ]
