"""The only package that uses private parts of torch. ``tests/torch_compat`` pins each of them.

``versions`` has the versions of torch that were tested. ``front_ends`` and ``autograd_front_end`` trace a
module, ``dynamo_branches`` decides its branches on values, and ``guards`` check later whether the trace is
still valid. ``differentiation`` adds the backward. ``module_state`` restores a module after tracing,
``module_contents`` lists its tensors, children and hooks, ``operator_patches`` keeps some operators whole,
``size_arithmetic`` caches arithmetic on sizes, ``lazy_code`` generates no code that nobody calls, and
``settings`` reads torch's global settings.
"""

from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from pipec.torch_compat.autograd_front_end import CAUSE, capture_with_autograd
from pipec.torch_compat.differentiation import (
    ASSERTIONS,
    DataDependentSize,
    FakeTensorMode,
    JointGraph,
    argument_tensors,
    differentiate,
    has_gradient_hook,
    is_data_dependent,
    python_expression,
    replaced_graph,
    size_of_symbol,
    unbacked_symbols,
    without_symbols,
)
from pipec.torch_compat.dynamo_branches import (
    Decision,
    TorchDispatchMode,
    WriteProtection,
    decide_branches,
    evaluate_symbolic,
    has_values,
    placeholder_example,
    shape_symbols,
)
from pipec.torch_compat.front_ends import (
    LOST_HOOK,
    CapturedGraph,
    SymbolicDims,
    capture_with_dynamo,
    capture_with_export,
    draws_with_numpy,
    is_data_dependent_error,
    model_raised,
    reason_of,
    user_frames,
)
from pipec.torch_compat.guards import Guards, ValueGuard, ValuePath, constant_guard, fqn_of
from pipec.torch_compat.lazy_code import lazy_graph_module, lazy_graph_modules
from pipec.torch_compat.module_contents import (
    ModuleContents,
    TensorMetadata,
    module_contents,
    tensor_metadata,
)
from pipec.torch_compat.module_state import (
    DryRun,
    dry_run,
    global_hooks,
    has_partial_backward_hook,
    num_changes,
    quiet_logging,
    replace_with_fake_tensors,
    restore_module,
)
from pipec.torch_compat.operator_patches import (
    bound_ctc_loss_workspace,
    computes_with_cudnn,
    computes_with_onednn,
    decompositions,
    keep_interpolation_operators,
    keep_recurrent_operators,
    skip_distribution_validation,
)
from pipec.torch_compat.settings import SETTINGS, read_settings
from pipec.torch_compat.size_arithmetic import cached_size_arithmetic
from pipec.torch_compat.versions import untested_version

__all__ = [
    "ASSERTIONS",
    "CAUSE",
    "LOST_HOOK",
    "SETTINGS",
    "CapturedGraph",
    "DataDependentSize",
    "Decision",
    "DryRun",
    "Guards",
    "HigherOrderOperator",
    "JointGraph",
    "ModuleContents",
    "OpOverload",
    "SymbolicDims",
    "TensorMetadata",
    "TorchDispatchMode",
    "ValueGuard",
    "ValuePath",
    "WriteProtection",
    "argument_tensors",
    "bound_ctc_loss_workspace",
    "cached_size_arithmetic",
    "capture_with_autograd",
    "capture_with_dynamo",
    "capture_with_export",
    "computes_with_cudnn",
    "computes_with_onednn",
    "constant_guard",
    "decide_branches",
    "decompositions",
    "differentiate",
    "draws_with_numpy",
    "dry_run",
    "evaluate_symbolic",
    "fqn_of",
    "global_hooks",
    "has_gradient_hook",
    "has_partial_backward_hook",
    "has_values",
    "is_data_dependent",
    "is_data_dependent_error",
    "keep_interpolation_operators",
    "keep_recurrent_operators",
    "lazy_graph_module",
    "lazy_graph_modules",
    "model_raised",
    "module_contents",
    "num_changes",
    "placeholder_example",
    "python_expression",
    "pytree",
    "quiet_logging",
    "read_settings",
    "reason_of",
    "replace_with_fake_tensors",
    "replaced_graph",
    "restore_module",
    "shape_symbols",
    "size_of_symbol",
    "skip_distribution_validation",
    "tensor_metadata",
    "unbacked_symbols",
    "untested_version",
    "user_frames",
]
