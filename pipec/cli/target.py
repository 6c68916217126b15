"""Loads the factory that ``path/to/file.py:factory`` names, and compiles its example."""

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipec.cli.flags import parse_replicas
from pipec.errors import InputError, PipecError

if TYPE_CHECKING:
    from pipec.api_arguments import Example
    from pipec.pipeline import Pipeline
    from pipec.runtime.optimizers import Factory


def compile_target(
    target: str,
    devices: int,
    options: Mapping[str, Any],
    *,
    between_modules: bool = False,
) -> "Pipeline":
    """Compile a step with the example of ``target``, without running it.

    ``options`` are options of ``pipec.compile``, as ``compile_flags`` reads them. With ``between_modules``
    stages consist of whole modules.
    """
    replicas = parse_replicas(options["replicas"])
    from pipec.api import compile_with
    from pipec.hardware.calibration import calibrate
    from pipec.options import Options
    from pipec.runtime.processes.launch import resolve_devices, world

    device = next(iter(resolve_devices(devices, world()).values()))
    example = load_example(target)
    parsed = {
        "replicas": replicas,
        "optimizer": load_optimizer(options["optimizer"]),
        "costs": calibrate(device) if options["costs"] == "calibrate" else options["costs"],
        "loss_fn": example.loss_fn,
        "batched": example.batched,
    }
    given = Options.of({"devices": devices, **options, **parsed})
    pipe = compile_with(example.model, given, between_modules=between_modules)
    return pipe.prepare(*example.args, target=example.target, **example.kwargs)


def refuse_folder(name: str) -> None:
    """Raise InputError for a folder in place of a model or a schedule."""
    if os.path.isdir(name):
        raise InputError(
            f"{name} is a folder: pipec check {name} says what it holds, and pipec run {name} --trace -o "
            "page.html draws the steps of a saved artifact"
        )


def load_example(target: str) -> "Example":
    """The example that the factory named by ``target`` returns.

    Raises InputError if the file, module or factory does not exist or raises, or if the factory does not
    return an Example.
    """
    from pipec.api_arguments import Example

    factory = _load_function("target", target, "() -> pipec.Example")
    with _errors_of(target):
        example = factory()
    if not isinstance(example, Example):
        raise InputError(
            f"{target} returned {type(example).__name__}; expected "
            "pipec.Example(model, args, kwargs, target, loss_fn)"
        )
    return example


def load_optimizer(name: str | None) -> "Factory | None":
    """The class of ``torch.optim`` called ``name``, in any case, or the factory that ``name`` names.

    Raises InputError if neither exists.
    """
    if name is None:
        return None
    if ":" in name:
        return _load_function("optimizer", name, "(named_parameters) -> torch.optim.Optimizer")
    import torch

    kinds = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    classes = {key: kind for key, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer)}
    del classes["optimizer"]
    if name.lower() not in classes:
        names = ", ".join(each.__name__ for each in classes.values())
        raise InputError(
            f"optimizer is {name!r}; expected one of {names}, or path/to/file.py:factory or "
            "package.module:factory"
        )
    factory: Factory = classes[name.lower()]
    return factory


def _load_function(argument: str, name: str, signature: str) -> Callable[..., Any]:
    """The function that ``path/to/file.py:name`` or ``package.module:name`` names. Raises InputError."""
    where, _, attribute = name.rpartition(":")
    is_file = where.endswith(".py")
    if not attribute.isidentifier() or not (is_file or all(map(str.isidentifier, where.split(".")))):
        raise InputError(
            f"{argument} is {name!r}; expected path/to/file.py:factory or package.module:factory"
        )
    with _errors_of(where):
        module = _import_file(Path(where)) if is_file else _import_module(where)
        function: object = getattr(module, attribute, None)
    if not callable(function):
        problem = "is not callable" if function is not None else "does not exist"
        raise InputError(f"{attribute} {problem} in {where}; define `def {attribute}{signature}:` in it")
    return function


@contextlib.contextmanager
def _errors_of(target: str) -> Iterator[None]:
    """Turn errors of the user's own code into an InputError of one line, with their source line."""
    try:
        yield
    except PipecError:
        raise
    except (Exception, SystemExit) as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
        own = [each for each in frames if not each.filename.startswith("<frozen")]
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        message = " ".join(str(error).split())
        raise InputError(
            f"{target} raised {type(error).__name__}: {message}{where}; expected a factory without arguments "
            "that returns pipec.Example(model, args, kwargs, target, loss_fn)"
        ) from error


def _import_file(path: Path) -> ModuleType:
    """Import a file as ``python path`` would run it: modules beside it can be imported."""
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path}; expected path/to/file.py:factory")
    name = path.stem if path.stem not in sys.modules else f"pipec_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    """Import a module as ``python -m`` would: modules of the current folder can be imported."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InputError(
            f"there is no module {error.name}; expected package.module:factory, importable from here, or "
            "path/to/file.py:factory"
        ) from error
