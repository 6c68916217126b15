"""From ``path/to/file.py:factory`` to a compiled pipeline."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pipec.cli.output import status
from pipec.errors import InputError

if TYPE_CHECKING:
    from pipec.api import Example
    from pipec.pipeline import Pipeline


def prepare(
    target: str,
    devices: int,
    schedule: str,
    microbatches: int | None,
    recompute: str,
    memory_limit: str | None,
    profile: Path | None = None,
    topology: Path | None = None,
    *,
    calibrated: bool = False,
    dynamic: bool = True,
) -> "Pipeline":
    """Compile what ``step`` would run with the example of ``target``, and run nothing."""
    with status("loading torch") as spinner:
        from pipec.api import compile
        from pipec.hardware.calibration import calibrate
        from pipec.runtime.launch import resolve_devices, world

        on = next(iter(resolve_devices(devices, world()).values()))
        spinner.update(f"loading {target} ...")
        example = load_example(target)
        pipe = compile(
            example.model,
            devices,
            loss_fn=example.loss_fn,
            batched=example.batched,
            schedule=Path(schedule) if schedule.endswith(".txt") else schedule,
            microbatches=microbatches,
            recompute=recompute,
            memory_limit=memory_limit,
            profile=profile,
            topology=topology,
            device_model=calibrate(on) if calibrated else None,
            dynamic=dynamic,
        )
        spinner.update("capturing the model and compiling its stages ...")
        return pipe.prepare(*example.args, target=example.target, **example.kwargs)


def load_example(target: str) -> "Example":
    """What the factory that ``target`` names returns.

    Raises InputError when there is no such file, module or factory, or when the factory returns something
    else than an Example. Errors of the user's own code are not caught.
    """
    from pipec.api import Example

    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise InputError(f"target is {target!r}; expected path/to/file.py:factory or package.module:factory")
    factory = getattr(
        _import_file(Path(where)) if where.endswith(".py") else _import_module(where), name, None
    )
    if not callable(factory):
        found = "is not callable" if factory is not None else "is not there"
        raise InputError(f"{name} {found} in {where}; define `def {name}() -> pipec.Example:` in it")
    example = factory()
    if not isinstance(example, Example):
        raise InputError(
            f"{target} returned {type(example).__name__}; expected "
            "pipec.Example(model, args, kwargs, target, loss_fn)"
        )
    return example


def _import_file(path: Path) -> ModuleType:
    """Import a file as ``python path`` would run it: modules beside it can be imported."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; expected path/to/file.py:factory")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
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
