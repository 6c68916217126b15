"""Writes ``messages.md``: every error, warning and log line of pipec, read from its source with ``ast``.

    python docs/reference/messages.py           # writes the page
    python docs/reference/messages.py --check   # fails if the page is stale

A message is found where its error is constructed, or where it is passed to ``warn`` or a logger. Its text is
followed through constants, local names, conditions, the functions that return it, and those that it is passed
to. Values that are only known when it is raised are placeholders in braces.
"""

import ast
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_suffix(".md")

GROUPS = (
    ("Compile", ("pipec", "api", "api_arguments", "options", "option_conflicts", "ops", "compiler")),
    ("Capture", ("capture", "torch_compat", "graph", "primitives", "codegen")),
    ("Plan", ("planner", "plan", "cost", "profiler", "passes", "hardware")),
    ("Schedules and programs", ("schedules", "programs", "timeline")),
    ("Step", ("pipeline", "runtime", "ir.argument_checks")),
    ("Ranks", ("runtime.processes", "runtime.messages", "runtime.call_agreement")),
    ("Checkpoints and weights", ("checkpoint", "pipeline.checkpointing", "pipeline.checkpoint_manager")),
    ("Artifacts and other files", ("artifact", "ir", "runtime.given_executions", "pipeline.load")),
    ("Pages and pictures", ("viz", "drawn_artifacts")),
    ("Command line", ("cli",)),
    ("Trainer, Accelerate, Lightning", ("integrations",)),
)
"""What the user is doing, and the modules of pipec that speak then; the longest name decides."""

MOST_ALTERNATIVES, MOST_DEPTH = 8, 7
"""Texts of one message, and functions on the way to it. Beyond these, a part is a placeholder."""

LEAST_WORDS = 4
"""What callers pass or functions return is written out if it has as many words; names stay placeholders."""

SHOW_VALUES = ("short_repr",)
"""Functions whose text is a value, and no words of pipec."""

IMPERATIVES = frozenset(
    """
    add ask assign build call change check choose clip compile compute convert count create declare
    define did do draw drop end enter every exclude expected find fix follow free freeze give go
    import index install keep known leave let list load lower make mend move name omit open order
    pass pick place put raise read rebuild reduce register remedies remove rename repeat replace
    request rerun restart restore return run save say see seed set shorten shuffle start stop store
    switch take to train try turn unset update use wait wrap write yield
    """.split()  # noqa: SIM905 (a list of a hundred strings is harder to read)
)
"""A clause that begins with one of these says what to do."""

MEANINGS = (
    (
        "`InputError`, `TypeError`, `ValueError`",
        "something that you passed does not fit; nothing was changed",
        "pass what the message expects",
    ),
    (
        "`CaptureError`",
        "the model cannot be captured as one graph",
        "change the line of the model that it shows",
    ),
    (
        "`PlanError`, `InfeasibleError`",
        "no plan can be made, or none fits into memory",
        "ask for less, or give more devices or memory",
    ),
    (
        "`TransportError`",
        "another rank failed, hung or holds another plan",
        "read the output of the rank that it names",
    ),
    (
        "`ExecutionError`",
        "an instruction failed while a step ran",
        "see the original error, its `__cause__`",
    ),
    (
        "`NonFiniteError`",
        'a loss or a gradient is not finite, and `on_nan="raise"`',
        "see [optimizers](../optimizers.md)",
    ),
    (
        "`CheckpointError`",
        "files of a checkpoint are damaged, missing or of another model",
        "load an older checkpoint",
    ),
    (
        "`ArtifactError`",
        "files of an artifact are damaged, edited or of another version",
        "save the pipeline again",
    ),
    (
        "`UnsupportedTorchError`",
        "the installed torch lacks a part that pipec needs",
        "install a version that the message names",
    ),
    (
        "`VerifyError`",
        "a graph, schedule or program breaks a rule",
        "unless you wrote or edited it, report a bug",
    ),
    (
        "`PipecWarning`",
        "results may differ from what a script expects",
        "see the message; `-W error` stops there",
    ),
)
"""What is raised, what it means, and what to do where the message does not say it."""

PREFACE = """\
# Messages

Every error, warning and log line of pipec, by what you are doing when it appears. A value that is only known
then is in braces, such as `{name}`. Search this page for the words of a message around its names and numbers.
This page is written by `docs/reference/messages.py` from the source.

| raised | means | where the message does not say what to do |
|---|---|---|
"""

PYTHON_ERRORS = (
    "AttributeError",
    "KeyError",
    "NotImplementedError",
    "RuntimeError",
    "TypeError",
    "ValueError",
)
RULES = {"artifact": "ArtifactError", "programs": "VerifyError", "graph": "VerifyError"}
"""Packages whose generators of text are rules, and the error that contains what they yield."""

PASSED_ON = frozenset(
    {
        "pipec.artifact.plan_rules._variables",
        "pipec.checkpoint.async_save._before_exit",
        "pipec.compiler.compiler.warn",
        "pipec.integrations.transformers.__getattr__",
        "pipec.pipeline.pipeline_module.__getattr__",
        "pipec.pipeline.pipeline_module.backward",
        "pipec.planner.partition._infeasible",
        "pipec.primitives.require.require",
        "pipec.programs.rules.field_rules.fits_plan",
        "pipec.programs.verify.verify",
        "pipec.runtime.loss_tensors.backward",
        "pipec.runtime.messages.distributed_transport.transport_error",
        "pipec.runtime.processes.rendezvous.connect",
        "pipec.runtime.processes.star._error",
        "pipec.runtime.step.error_report._explained",
        "pipec.torch_compat.values.__missing__",
    }
)
"""Functions that raise a message which is made, and found, elsewhere; or the name of a missing attribute."""

LOGGERS = ("log", "logger")
LOGGED = {"warning": "logged warning", "error": "logged error", "info": "log line", "notice": "log line"}


@dataclass(eq=False)
class Module:
    """A file of the source, and what is found in it by name."""

    name: str
    tree: ast.Module
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> Mapping[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def functions_around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The functions that contain a node, the innermost first."""
        while node := self.parents.get(node):  # type: ignore[assignment]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


@dataclass(frozen=True)
class Message:
    kind: str
    text: str
    module: str


@dataclass(frozen=True)
class Part:
    """Some text of a message, and whether any of it is literal."""

    text: str
    is_literal: bool = True


def read_source(folder: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = Module(name, ast.parse(path.read_text(encoding="utf-8")))
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pipec"):
                for alias in node.names:
                    module.imports[alias.asname or alias.name] = (node.module, alias.name)
    return modules


class Texts:
    """Follows expressions to the texts that they may have."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules
        self._known: dict[tuple[ast.AST, int], list[Part]] = {}
        self.calls: dict[str, list[tuple[Module, ast.Call]]] = defaultdict(list)
        self.definitions: dict[str, list[tuple[Module, ast.FunctionDef]]] = defaultdict(list)
        for module in modules.values():
            for node in module.nodes:
                if isinstance(node, ast.Call) and (name := last_name(node.func)):
                    self.calls[name].append((module, node))
                elif isinstance(node, ast.FunctionDef):
                    self.definitions[node.name].append((module, node))

    def of(self, module: Module, node: ast.AST, depth: int = 0) -> list[Part]:
        """The alternatives of an expression, at least one."""
        if (node, depth) not in self._known:
            found = self._alternatives(module, node, depth) if depth <= MOST_DEPTH else []
            unknown = Part(placeholder(node), False)
            unique = [*dict.fromkeys(each if each.is_literal else unknown for each in found)]
            if not any(each.is_literal for each in unique) or len(unique) > MOST_ALTERNATIVES:
                unique = [unknown]
            self._known[node, depth] = unique
        return self._known[node, depth]

    def _alternatives(self, module: Module, node: ast.AST, depth: int) -> list[Part]:
        match node:
            case ast.Constant(value=str(text)):
                return [Part(text)]
            case ast.JoinedStr(values=values):
                return self._joined(module, values, depth)
            case ast.FormattedValue(value=value):
                return self.of(module, value, depth)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self._joined(module, [left, right], depth)
            case ast.BinOp(op=ast.Mult() | ast.Mod(), left=left):
                return self.of(module, left, depth)
            case ast.IfExp(body=body, orelse=orelse):
                return [*self.of(module, body, depth), *self.of(module, orelse, depth)]
            case ast.BoolOp(values=values):
                return [part for each in values for part in self.of(module, each, depth)]
            case ast.NamedExpr(value=value) | ast.Starred(value=value):
                return self.of(module, value, depth)
            case ast.Subscript(value=ast.Name() as value) | ast.Subscript(value=ast.Dict() as value):
                return self._of_table(module, value, depth)
            case ast.Name(id=name):
                return self._of_name(module, node, name, depth)
            case ast.Attribute(attr=name):
                return self._of_constant(module, name, depth) if name.isupper() else []
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str(separator)), attr="join"), args=[items]
            ):
                if isinstance(items, ast.List | ast.Tuple):
                    between = [[each, ast.Constant(separator)] for each in items.elts]
                    return self._joined(module, [*itertools.chain(*between)][:-1], depth)
                return []
            case ast.Call(
                func=ast.Attribute(
                    value=value, attr="format" | "replace" | "strip" | "rstrip" | "removesuffix"
                )
            ):
                return self.of(module, value, depth)
            case ast.Call(func=function):
                return self._of_call(module, node, function, depth)
        return []

    def _joined(self, module: Module, nodes: Sequence[ast.AST], depth: int) -> list[Part]:
        choices = [self.of(module, each, depth) for each in nodes]
        num = 1
        for position, each in enumerate(choices):
            if num * len(each) > MOST_ALTERNATIVES:  # the rest are placeholders
                choices[position] = [Part(placeholder(nodes[position]), False)]
            num *= len(choices[position])
        return [
            Part("".join(part.text for part in parts), any(part.is_literal for part in parts))
            for parts in itertools.product(*choices)
        ]

    def _of_yields(self, module: Module, node: ast.AST, depth: int) -> list[Part]:
        """What a function of pipec yields, or puts into the list that it returns."""
        name = last_name(node.func) if isinstance(node, ast.Call) else None
        found = [
            each
            for each in self.definitions.get(name or "", [])
            if module.name == each[0].name or name in module.imports
        ]
        return [
            part
            for home, definition in found[:1]
            for node in ast.walk(definition)
            for each in listed(node)
            for part in self.of(home, each, depth + 1)
        ]

    def _is_known(self, module: Module, name: str | None, home: Module) -> bool:
        return home is module or name in module.imports

    def _of_table(self, module: Module, node: ast.AST, depth: int) -> list[Part]:
        tables = [node] if isinstance(node, ast.Dict) else []
        if isinstance(node, ast.Name):
            tables = [each for _, each in self._assigned(module, node.id) if isinstance(each, ast.Dict)]
        return [
            part for table in tables for value in table.values for part in self.of(module, value, depth + 1)
        ]

    def _of_name(self, module: Module, node: ast.AST, name: str, depth: int) -> list[Part]:
        for function in module.functions_around(node):
            if local := assignments(function, name):
                parts = [part for each in local for part in self.of(module, each, depth + 1)]
                suffixes = assignments(function, f"{name} +")
                added = [part for each in suffixes for part in self.of(module, each, depth + 1)]
                return parts + [Part(one.text + two.text) for one in parts for two in added]
            if loops := assignments(function, f"{name} in"):
                return [part for each in loops for part in self._of_yields(module, each, depth)]
            if name in parameters(function):
                return self._of_parameter(module, function, name, depth)
        return self._of_constant(module, name, depth)

    def _of_constant(self, module: Module, name: str, depth: int) -> list[Part]:
        return [
            part for home, each in self._assigned(module, name) for part in self.of(home, each, depth + 1)
        ]

    def _assigned(self, module: Module, name: str) -> Iterator[tuple[Module, ast.expr]]:
        home, original = self._home(module, name)
        if home is not None:
            yield from ((home, each) for each in assignments(home.tree, original))

    def _home(self, module: Module, name: str) -> tuple[Module | None, str]:
        """The module that defines a name, through the packages that pass it on."""
        for _ in range(5):
            if name not in module.imports:
                return module, name
            home, name = module.imports[name]
            if home not in self.modules:
                return None, name
            module = self.modules[home]
        return module, name

    def _of_parameter(self, module: Module, function: ast.AST, name: str, depth: int) -> list[Part]:
        """The texts that callers pass for a parameter."""
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        found = [part for each in defaults(function, name) for part in self.of(module, each, depth + 1)]
        for caller, given in self._passed(module, function, name):
            found += self.of(caller, given, depth + 1)
        return found if any(len(each.text.split()) >= LEAST_WORDS for each in found) else []

    def _passed(self, module: Module, function: ast.AST, name: str) -> Iterator[tuple[Module, ast.expr]]:
        """What callers pass for a parameter of a function, in all of pipec."""
        names, called, owner = parameters(function), function.name, module.parents.get(function)  # type: ignore[attr-defined]
        is_method = isinstance(owner, ast.ClassDef) and names[:1] in (["self"], ["cls"])
        if called == "__init__" and isinstance(owner, ast.ClassDef):
            called = owner.name
        is_unique = len(self.definitions[called]) < 2
        for caller, call in self.calls[called]:
            if isinstance(call.func, ast.Name) and self._home(caller, called)[0] is not module:
                continue
            if isinstance(call.func, ast.Attribute) and caller is not module and not is_unique:
                continue
            place = names.index(name) - is_method
            given = next((each.value for each in call.keywords if each.arg == name), None)
            if given is None and 0 <= place < len(call.args):
                given = call.args[place]
            if given is not None:
                yield caller, given

    def _of_call(self, module: Module, node: ast.Call, function: ast.expr, depth: int) -> list[Part]:
        """What a function of pipec returns, if that is text; or a function that was passed."""
        for around in module.functions_around(node) if isinstance(function, ast.Name) else ():
            if function.id in parameters(around):
                return [
                    part
                    for caller, given in self._passed(module, around, function.id)
                    for part in self._of_callable(caller, given, depth + 1)
                ]
        name = last_name(function)
        if name in SHOW_VALUES:
            return []
        candidates = self.definitions.get(name or "", [])
        if isinstance(function, ast.Name):
            home, original = self._home(module, function.id)
            candidates = [each for each in self.definitions.get(original, []) if each[0] is home]
        elif len(candidates) > 1:
            candidates = [each for each in candidates if each[0] is module]
        if len(candidates) != 1:
            return []
        ((home, definition),) = candidates
        if definition.returns is None or ast.unparse(definition.returns) not in ("str", "str | None"):
            return []
        returned = [
            each.value for each in ast.walk(definition) if isinstance(each, ast.Return) and each.value
        ]
        found = [part for each in returned for part in self.of(home, each, depth + 1)]
        return found if any(len(each.text.split()) >= LEAST_WORDS for each in found) else []

    def _of_callable(self, module: Module, node: ast.expr, depth: int) -> list[Part]:
        """What a lambda, a named function or a ``functools.partial`` of one returns."""
        if isinstance(node, ast.Lambda):
            return self.of(module, node.body, depth)
        if isinstance(node, ast.Call) and last_name(node.func) == "partial":
            return self._of_callable(module, node.args[0], depth)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._of_call(module, ast.Call(node, [], []), node, depth)
        return []


def assignments(scope: ast.AST, name: str) -> list[ast.expr]:
    """The values that a name is given in a function, or at the top level of a module."""
    return _bound(scope)[name]


@cache
def _bound(scope: ast.AST) -> Mapping[str | None, list[ast.expr]]:
    """Values by name. A loop gives a name its iterator, and ``name +`` what is appended to it."""
    found: dict[str | None, list[ast.expr]] = defaultdict(list)
    for node in ast.iter_child_nodes(scope) if isinstance(scope, ast.Module) else ast.walk(scope):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=False):
                    found[last_name(target)].append(value)
            case ast.Assign(targets=[target], value=value):
                found[last_name(target)].append(value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                found[last_name(target)].append(value)
            case ast.NamedExpr(target=target, value=value):
                found[last_name(target)].append(value)
            case ast.AugAssign(target=target, value=value):
                found[f"{last_name(target)} +"].append(value)
            case ast.For(target=ast.Tuple(elts=targets), iter=ast.Tuple(elts=rows)):
                for row in rows:
                    for target, value in zip(targets, getattr(row, "elts", []), strict=False):
                        found[last_name(target)].append(value)
            case ast.For(target=target, iter=iterator):
                found[f"{last_name(target)} in"].append(iterator)
    return found


def listed(node: ast.AST) -> Iterator[ast.expr]:
    """What a node of a function puts among the things that the function yields or lists."""
    match node:
        case ast.Yield(value=ast.expr() as value) | ast.ListComp(elt=value):
            yield value
        case ast.Call(func=ast.Attribute(attr="append"), args=[value]):
            yield value


def parameters(function: ast.AST) -> list[str]:
    given = function.args  # type: ignore[attr-defined]
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def defaults(function: ast.AST, name: str) -> list[ast.expr]:
    given = function.args  # type: ignore[attr-defined]
    positional = [*given.posonlyargs, *given.args]
    with_default = [*zip(positional[::-1], given.defaults[::-1], strict=False)]
    with_default += [*zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [value for each, value in with_default if each.arg == name and value is not None]


def last_name(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def placeholder(node: ast.AST) -> str:
    """A value that is known at run time, in braces."""
    return "{" + _value_name(node).strip("_").replace("_", " ") + "}"


def _value_name(node: ast.AST) -> str:
    match node:
        case ast.FormattedValue(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
            return _value_name(value)
        case ast.Name(id="self"):
            return "it"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.UnaryOp(operand=value) | ast.BinOp(left=value):
            return _value_name(value)
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            return f"number of {_value_name(value)}"
        case ast.Call(func=ast.Name(id="type")):
            return "type"
        case ast.Call(func=ast.Attribute(attr="join"), args=[value]):
            return _value_name(value)
        case ast.Call(args=[value, *_]) if not isinstance(value, ast.Constant):
            return _value_name(value)
        case ast.Call(func=function):
            return _value_name(function)
        case ast.GeneratorExp(elt=value) | ast.ListComp(elt=value) | ast.SetComp(elt=value):
            return _value_name(value)
        case ast.IfExp(body=value) | ast.BoolOp(values=[value, *_]) | ast.JoinedStr(values=[*_, value]):
            return _value_name(value)
    return "value"


def error_classes(modules: Mapping[str, Module]) -> set[str]:
    """``PipecError`` and its subclasses, wherever they are defined."""
    classes = [node for each in modules.values() for node in each.nodes if isinstance(node, ast.ClassDef)]
    found = {"PipecError"}
    for _ in range(4):
        found |= {each.name for each in classes if found & {last_name(base) or "" for base in each.bases}}
    return found


def messages(modules: Mapping[str, Module]) -> list[Message]:
    """Every message, in the order of the source."""
    texts, errors = Texts(modules), error_classes(modules)
    found: dict[Message, None] = {}
    unread = []
    for module in modules.values():
        for node in module.nodes:
            for kind, expression in sources(module, node, errors):
                function = next(module.functions_around(node), None)
                where = f"{module.name}.{getattr(function, 'name', '')}"
                known = [part for part in texts.of(module, expression) if part.is_literal and part.text]
                if not known and where not in PASSED_ON:
                    unread.append(where)
                found |= {Message(kind, part.text, module.name): None for part in known}
    if unread:
        raise SystemExit(f"the messages of {', '.join(unread)} cannot be read: see PASSED_ON in {__file__}")
    return [*found]


def sources(module: Module, node: ast.AST, errors: set[str]) -> Iterator[tuple[str, ast.expr]]:
    """The kind and the text of the message that begins at a node, if one does."""
    if (
        isinstance(node, ast.Yield)
        and node.value
        and (kind := RULES.get(module.name.split(".")[1:2][0] if "." in module.name else ""))
    ):
        function = next(module.functions_around(node), None)
        if ast.unparse(getattr(function, "returns", None) or ast.Constant(None)) == "Iterator[str]":
            yield kind, node.value
    match node:  # a call of ``primitives.require`` in a graph
        case ast.Assign(
            targets=[ast.Attribute(attr="args")], value=ast.Tuple(elts=[_, ast.JoinedStr() as text])
        ):
            yield "InputError", text
    if not isinstance(node, ast.Call) or not node.args:
        return
    name, owner = last_name(node.func) or "", last_name(getattr(node.func, "value", node))
    if name in errors or (name in PYTHON_ERRORS and isinstance(module.parents[node], ast.Raise)):
        yield name, node.args[0]
    elif name == "_explaining":  # a tensor whose ``backward`` raises
        yield "InputError", node.args[1]
    elif name == "Violation":
        yield "VerifyError", node.args[1]
    elif name == "warn" and module.name != "pipec.console":
        yield "PipecWarning", node.args[0]
    elif module.name != "pipec.console" and (name == "notice" or (name in LOGGED and owner in LOGGERS)):
        text, *values = node.args
        if isinstance(text, ast.Constant) and text.value == "%s":
            (text,), values = values, []
        yield LOGGED[name], formatted(text, values)


def formatted(text: ast.expr, values: Sequence[ast.expr]) -> ast.expr:
    """An f-string for a constant text with ``%s`` for each of ``values``."""
    if not isinstance(text, ast.Constant) or not values:
        return text
    texts = [ast.Constant(part) for part in re.split(r"%\.?\d*[sdfg]", str(text.value))]
    return ast.JoinedStr([part for pair in itertools.zip_longest(texts, values) for part in pair if part])


def split_remedy(text: str) -> tuple[str, str]:
    """What is wrong, and what to do: all from the first clause on that asks for something."""
    for end in re.finditer(r"[;.:?,] +|\n *", text):
        first = re.match(r"[\w']*", text[end.end() :].lower())
        if first and first[0] in IMPERATIVES and (first[0] in ("expected", "pass") or end[0][0] != ","):
            return text[: end.start()].rstrip(), text[end.end() :]
    return text, ""


def group_of(module: str) -> str:
    """The heading for a module: that of the longest name in ``GROUPS`` that it is or is within."""
    path = module.removeprefix("pipec.")
    fitting = [
        (len(name), heading)
        for heading, names in GROUPS
        for name in names
        if path == name or path.startswith(f"{name}.")
    ]
    if not fitting:
        raise SystemExit(f"{module} has messages and is in no group: add it to GROUPS in {__file__}")
    return max(fitting)[1]


def page(found: Iterable[Message]) -> str:
    grouped: dict[str, dict[tuple[str, str], set[str]]] = {heading: {} for heading, _ in GROUPS}
    for each in found:
        grouped[group_of(each.module)].setdefault((each.kind, each.text), set()).add(each.module)
    lines = [PREFACE + "\n".join(f"| {' | '.join(row)} |" for row in MEANINGS), ""]
    for heading, entries in grouped.items():
        lines += [f"## {heading}", ""]
        for (kind, text), homes in sorted(entries.items()):
            cause, remedy = split_remedy(text)
            files = ", ".join(f"`{home}`" for home in sorted(homes))
            lines += [f"* **{kind}** in {files}", "", *quoted(cause)]
            if remedy:
                lines += ["", "  What to do:", "", *quoted(remedy)]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def quoted(text: str) -> list[str]:
    return ["  ```text", *(f"  {line}".rstrip() for line in text.splitlines() or [""]), "  ```"]


def main() -> None:
    text = page(messages(read_source(ROOT / "pipec")))
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{PAGE.name} is stale: run python docs/reference/messages.py")


if __name__ == "__main__":
    main()
