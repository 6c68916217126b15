"""The only package that names private parts of torch. ``tests/test_torch_compat.py`` pins each of them.

torch 2.11 to 2.13 are supported. ``front_ends`` and ``direct`` trace a module, ``branches`` lets them be told
values, and ``guards`` tell later whether that would find the same. ``modules`` keeps the module as it was
meanwhile, ``operators`` keeps some operators whole, ``arithmetic`` computes with sizes once, and
``differentiation`` adds the backward. ``settings`` are torch's own.
"""

from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from pipec.torch_compat.arithmetic import remembered_arithmetic
from pipec.torch_compat.branches import (
    Decision,
    MemoryKept,
    TorchDispatchMode,
    branches_decided,
    example_of,
    has_values,
    size_in,
    symbols_of,
)
from pipec.torch_compat.differentiation import (
    ASSERTIONS,
    JointGraph,
    ValueSize,
    depends_on_values,
    differentiate,
    has_gradient_hook,
    python_expression,
    size_of_symbol,
    value_symbols,
)
from pipec.torch_compat.direct import CAUSE, capture_directly
from pipec.torch_compat.front_ends import (
    LOST_HOOK,
    Captured,
    Symbolic,
    capture_with_dynamo,
    capture_with_export,
    draws_with_numpy,
    model_raised,
    needs_values,
    reason_of,
    user_frames,
)
from pipec.torch_compat.guards import Guards, Place, ValueGuard, constant_guard, fqn_of
from pipec.torch_compat.modules import (
    DryRun,
    dry_run,
    global_hooks,
    has_partial_backward_hook,
    num_changes,
    place_fakes,
    quiet,
    unchanged,
)
from pipec.torch_compat.operators import (
    bounded_ctc_losses,
    computes_with_onednn,
    decompositions,
    unvalidated_distributions,
    whole_interpolations,
    whole_recurrent_networks,
)
from pipec.torch_compat.parts import ModuleParts, TensorKinds, kinds_of, parts_of
from pipec.torch_compat.settings import SETTINGS, settings

__all__ = [
    "ASSERTIONS",
    "CAUSE",
    "LOST_HOOK",
    "SETTINGS",
    "Captured",
    "Decision",
    "DryRun",
    "Guards",
    "HigherOrderOperator",
    "JointGraph",
    "MemoryKept",
    "ModuleParts",
    "OpOverload",
    "Place",
    "Symbolic",
    "TensorKinds",
    "TorchDispatchMode",
    "ValueGuard",
    "ValueSize",
    "bounded_ctc_losses",
    "branches_decided",
    "capture_directly",
    "capture_with_dynamo",
    "capture_with_export",
    "computes_with_onednn",
    "constant_guard",
    "decompositions",
    "depends_on_values",
    "differentiate",
    "draws_with_numpy",
    "dry_run",
    "example_of",
    "fqn_of",
    "global_hooks",
    "has_gradient_hook",
    "has_partial_backward_hook",
    "has_values",
    "kinds_of",
    "model_raised",
    "needs_values",
    "num_changes",
    "parts_of",
    "place_fakes",
    "python_expression",
    "pytree",
    "quiet",
    "reason_of",
    "remembered_arithmetic",
    "settings",
    "size_in",
    "size_of_symbol",
    "symbols_of",
    "unchanged",
    "unvalidated_distributions",
    "user_frames",
    "value_symbols",
    "whole_interpolations",
    "whole_recurrent_networks",
]
