"""The only package that uses private parts of torch. ``tests/torch_compat`` pins each of them.

``versions`` has the versions of torch that were tested. ``dynamo_front_end`` traces a module and, where
Dynamo cannot, ``make_fx_front_end``; ``lost_effects`` refuses what a graph would lose. ``dynamo_branches``
decides branches on values, and ``guards`` check later whether the trace is still valid.
``differentiation`` adds the backward. ``module_state`` restores a module after tracing,
``operator_patches`` keeps some operators whole, and ``size_arithmetic`` caches arithmetic on sizes.
These load torch._dynamo, which takes seconds: only a process that captures loads them, all together
(``tracing``).

``values`` evaluates again what a trace read, ``module_contents`` reads modes, hooks and tensors of modules,
``foreign_classes`` tells what a script defines that changes operators, ``lazy_code`` generates no code that
nobody calls, ``settings`` reads torch's global settings, and ``symbolic_numbers`` has the formulas of sizes.
"""

import importlib
from typing import TYPE_CHECKING

from pipec.torch_compat.private_symbols import needs, require  # first: it names what is missing

# isort: split
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.torch_compat import pytree
from pipec.torch_compat.foreign_classes import (
    active_mode,
    attributes,
    changes_operators,
    is_plain_tensor,
    marked_dimensions,
)
from pipec.torch_compat.lazy_code import lazy_graph_module, lazy_graph_modules
from pipec.torch_compat.module_contents import (
    device_and_dtype,
    global_hooks,
    has_global_forward_hooks,
    has_gradient_hook,
    module_contents,
    tensor_contents,
)
from pipec.torch_compat.run_time import (
    ConvertedModule,
    inductor_code,
    persistent_buffers,
    register_buffer,
    replace_total_norm,
    schema,
    share_registries,
    storage_use_count,
)
from pipec.torch_compat.settings import SETTINGS, read_settings
from pipec.torch_compat.symbolic_numbers import formula
from pipec.torch_compat.unsupported import raise_if_unsupported
from pipec.torch_compat.values import ABSENT, ARRAYS, by_name, comparable, evaluate, fqn_of
from pipec.torch_compat.versions import untested_version

if TYPE_CHECKING:
    from pipec.torch_compat.tracing import *  # noqa: F403

__all__ = [
    "ABSENT",
    "ARRAYS",
    "SETTINGS",
    "ConvertedModule",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "active_mode",
    "attributes",
    "by_name",
    "changes_operators",
    "comparable",
    "device_and_dtype",
    "evaluate",
    "formula",
    "fqn_of",
    "global_hooks",
    "has_global_forward_hooks",
    "has_gradient_hook",
    "inductor_code",
    "is_plain_tensor",
    "lazy_graph_module",
    "lazy_graph_modules",
    "marked_dimensions",
    "module_contents",
    "needs",
    "persistent_buffers",
    "pytree",
    "raise_if_unsupported",
    "read_settings",
    "register_buffer",
    "replace_total_norm",
    "schema",
    "share_registries",
    "storage_use_count",
    "tensor_contents",
    "untested_version",
]


def __getattr__(name: str) -> object:
    """Import all names of ``tracing`` when the first of them is used."""
    if not name.startswith("__"):
        require("capture")
        tracing = importlib.import_module(f"{__name__}.tracing")
        globals().update({each: getattr(tracing, each) for each in tracing.__all__})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
