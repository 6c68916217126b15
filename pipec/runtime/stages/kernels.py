"""Lets torch compile the functions of a rank's stages.

``torch.compile`` takes generated functions unchanged. Compiled random operators take their seed as a tensor
and draw the same numbers as the source. Other values may differ from the source's in their last bits, because
sums are computed in another order.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any

import torch

from pipec.console import delayed_status, warn
from pipec.errors import InputError
from pipec.ir import Plan
from pipec.runtime.random_operators import call_with_generator
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.stages.inductor import compile_graph

Function = Callable[..., Any]


def require_source(kernels: str, plan: Plan | None = None) -> None:
    """Raise InputError if functions that accumulate gradients in place would be compiled.

    Without a ``plan``, functions are assumed to accumulate.
    """
    adds = plan is None or any(stage.cost.memory.accumulated_in_place for stage in plan.stages)
    if adds and kernels != "source":
        raise InputError(
            "with fused_gradients, stage functions accumulate gradients in place, but "
            f"kernels={kernels!r} may run a function twice; pass kernels='source', or compile without "
            "fused_gradients"
        )


def compile_functions(code: types.ModuleType, functions: Iterable[str]) -> None:
    """Let torch compile these functions of a stage, where it has them."""
    for name in functions:
        if function := getattr(code, name, None):
            setattr(code, name, _compiled(function, f"{name} of {code.__name__}"))


def _compiled(function: Function, name: str) -> Function:
    torch.compiler.allow_in_graph(call_with_generator)  # it takes a lock, which Dynamo cannot trace
    compiled = torch.compile(function, fullgraph=True, backend=compile_graph)
    draws = [int(number) for number in re.findall(r"\brng\((\d+)\)", inspect.getsource(function))]
    failed = list[Exception]()

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if failed:
            return function(*args)
        passed = [
            functools.partial(getitem, x.seeds(draws)) if isinstance(x, OperatorGenerators) else x
            for x in args
        ]
        try:
            with delayed_status(f"compiling {name}"):
                return compiled(*passed)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch.compile raises many kinds
            failed.append(error)
            first, second, *_ = [line.strip() for line in str(error).strip().splitlines()] + ["", ""]
            warn(
                f"torch.compile cannot compile {name}, which runs as its source: "
                f"{type(error).__name__}: {first} {second}".rstrip()
            )
            return function(*args)

    return call
