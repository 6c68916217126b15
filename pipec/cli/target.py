"""From ``path/to/file.py:factory`` to a compiled pipeline."""

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
from pipec.cli.output import status
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
    calibrated: bool = False,
    dynamic: bool = True,
) -> "Pipeline":
    """Compile what ``step`` would run with the example of ``target``, and run nothing.

    ``options`` are those of ``pipec.compile``, as ``compile_flags`` reads them.
    """
    schedule, replicas = options["schedule"], parse_replicas(options["replicas"])
    with status("loading torch") as spinner:
        from pipec.api import compile
        from pipec.hardware.calibration import calibrate
        from pipec.runtime.processes.launch import resolve_devices, world

        on = next(iter(resolve_devices(devices, world()).values()))
        spinner.update(f"loading {target} ...")
        example = load_example(target)
        read = {
            "schedule": Path(schedule) if schedule.endswith(".txt") else schedule,
            "replicas": replicas,
            "optimizer": load_optimizer(options["optimizer"]),
        }
        pipe = compile(
            example.model,
            devices,
            loss_fn=example.loss_fn,
            batched=example.batched,
            device_model=calibrate(on) if calibrated else None,
            dynamic=dynamic,
            **{**options, **read},
        )
        spinner.update("capturing the model and compiling its stages ...")
        return pipe.prepare(*example.args, target=example.target, **example.kwargs)


def load_example(target: str) -> "Example":
    """What the factory that ``target`` names returns.

    Raises InputError when there is no such file, module or factory, when they raise, or when the factory
    returns something else than an Example.
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
    """The class of ``torch.optim`` with that name, in whatever case, or the factory that ``name`` names.

    Raises InputError when there is none.
    """
    if name is None:
        return None
    if ":" in name:
        return _load_function("optimizer", name, "(named_parameters) -> torch.optim.Optimizer")
    import torch

    classes = {key.lower(): found for key, found in vars(torch.optim).items() if _is_optimizer(found)}
    if name.lower() not in classes:
        known = ", ".join(each.__name__ for each in classes.values())
        raise InputError(
            f"optimizer is {name!r}; expected one of {known}, or path/to/file.py:factory or "
            "package.module:factory"
        )
    found: Factory = classes[name.lower()]
    return found


def _is_optimizer(found: object) -> bool:
    from torch.optim import Optimizer

    return isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer


def _load_function(what: str, name: str, signature: str) -> Callable[..., Any]:
    """The function that ``path/to/file.py:name`` or ``package.module:name`` names. Raises InputError."""
    where, _, function = name.rpartition(":")
    is_file = where.endswith(".py")
    if not function.isidentifier() or not (is_file or all(map(str.isidentifier, where.split(".")))):
        raise InputError(f"{what} is {name!r}; expected path/to/file.py:factory or package.module:factory")
    with _errors_of(where):
        module = _import_file(Path(where)) if is_file else _import_module(where)
        found: object = getattr(module, function, None)
    if not callable(found):
        problem = "is not callable" if found is not None else "is not there"
        raise InputError(f"{function} {problem} in {where}; define `def {function}{signature}:` in it")
    return found


@contextlib.contextmanager
def _errors_of(target: str) -> Iterator[None]:
    """Tell what the user's own code raises, and where, in one line."""
    try:
        yield
    except PipecError:
        raise
    except (Exception, SystemExit) as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
        own = [each for each in frames if not each.filename.startswith("<frozen")]
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        what = " ".join(str(error).split())
        raise InputError(
            f"{target} raised {type(error).__name__}: {what}{where}; expected a factory without arguments "
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
