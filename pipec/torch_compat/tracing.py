"""The names of ``pipec.torch_compat`` that capture and differentiate a model, and need torch._dynamo."""

from pipec.torch_compat.captured_graph import CapturedGraph, SymbolicDims
from pipec.torch_compat.differentiation import (
    ASSERTIONS,
    DataDependentSize,
    JointGraph,
    argument_tensors,
    differentiate,
    is_data_dependent,
    python_expression,
    replaced_graph,
    result_tree,
    returns_loss_first,
    size_of_symbol,
    unbacked_symbols,
)
from pipec.torch_compat.dynamo_branches import (
    Decision,
    WriteProtection,
    decide_branches,
    evaluate_symbolic,
    has_values,
    placeholder_example,
    shape_symbols,
)
from pipec.torch_compat.dynamo_front_end import (
    capture_with_dynamo,
    draws_with_numpy,
    ignored_cudnn_flags,
    is_data_dependent_error,
    model_raised,
    reason_of,
    user_frames,
)
from pipec.torch_compat.guards import Guards
from pipec.torch_compat.make_fx_front_end import CAUSE, capture_with_make_fx
from pipec.torch_compat.module_state import (
    DryRun,
    dry_run,
    has_partial_backward_hook,
    quiet_logging,
    replace_with_fake_tensors,
    restore_module,
)
from pipec.torch_compat.operator_patches import (
    bound_ctc_loss_workspace,
    decompositions,
    skip_distribution_validation,
    trace_recurrent_networks,
)
from pipec.torch_compat.size_arithmetic import cached_size_arithmetic

__all__ = [
    "ASSERTIONS",
    "CAUSE",
    "CapturedGraph",
    "DataDependentSize",
    "Decision",
    "DryRun",
    "Guards",
    "JointGraph",
    "SymbolicDims",
    "WriteProtection",
    "argument_tensors",
    "bound_ctc_loss_workspace",
    "cached_size_arithmetic",
    "capture_with_dynamo",
    "capture_with_make_fx",
    "decide_branches",
    "decompositions",
    "differentiate",
    "draws_with_numpy",
    "dry_run",
    "evaluate_symbolic",
    "has_partial_backward_hook",
    "has_values",
    "ignored_cudnn_flags",
    "is_data_dependent",
    "is_data_dependent_error",
    "model_raised",
    "placeholder_example",
    "python_expression",
    "quiet_logging",
    "reason_of",
    "replace_with_fake_tensors",
    "replaced_graph",
    "restore_module",
    "result_tree",
    "returns_loss_first",
    "shape_symbols",
    "size_of_symbol",
    "skip_distribution_validation",
    "trace_recurrent_networks",
    "unbacked_symbols",
    "user_frames",
]
