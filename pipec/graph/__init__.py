"""The training graph: one graph of forward, loss and backward that capture makes and passes annotate.

Read ``nodes``, the metadata of a node, and ``training_graph`` first. ``phase_functions`` then says what each
phase of a stage computes, saves and returns, and ``phase_segments`` how a phase is split. ``invariants``
holds the rules that every pass must keep. ``fingerprint`` and ``branch_checks`` tell whether a graph is
still valid for its model and for a call. ``size_text`` writes sizes as text.
"""

from pipec.graph.assignment import Assignment, permuted_ranks
from pipec.graph.branch_checks import CHECK_BRANCH, InputBranches, is_branch_check, is_check
from pipec.graph.findings import NO_FINDINGS, BatchFindings
from pipec.graph.fingerprint import (
    Fingerprint,
    ModelSnapshot,
    PlainValues,
    ReadValues,
    difference,
    same_objects,
    torch_values,
)
from pipec.graph.nodes import (
    ArgumentRole,
    BatchCount,
    BatchFraction,
    Buffer,
    Gradient,
    InputRole,
    LossGradient,
    ModelInput,
    Output,
    OutputGradient,
    Parameter,
    Precomputed,
    ResultRole,
    TailGradient,
    TailInput,
    UpdatedBuffer,
    depends_on_inputs_only,
    depends_on_strides,
    has_data_dependent_size,
    is_collective,
    is_constant,
    is_contiguous,
    is_data_dependent_number,
    is_forward,
    is_gradient_sum,
    is_random,
    is_row_sparse,
    is_tensor,
    is_view,
    leading_to,
    recv,
    reuses_memory,
    segment_of,
    send,
    size_expression,
    source_buffers,
    source_parameters,
    stage_of,
    storage_owner,
)
from pipec.graph.training_graph import LoweringLevel, Operator, TrainingGraph, copy_graph
