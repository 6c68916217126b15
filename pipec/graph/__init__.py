"""The training graph: one graph of forward, loss and backward that capture makes and passes annotate.

Read ``nodes``, the metadata of a node, and ``training_graph`` first. ``functions`` then says what each phase
of a stage computes, keeps and returns, and ``parts`` how a phase is divided. ``invariants`` holds what is
true after every pass; ``assumptions`` and ``branches`` tell whether a graph is still that of its model and of
a call; ``dimensions`` writes sizes as text.
"""

from pipec.graph.assumptions import Assumptions, ReadConstants
from pipec.graph.branches import ASSUME, Decided, is_assumption, is_check
from pipec.graph.findings import PROVED, Assumed, Findings
from pipec.graph.nodes import (
    IN_SUMS,
    Argument,
    Buffer,
    FirstRow,
    Gradient,
    LossGradient,
    ModelInput,
    OfBatch,
    Output,
    Parameter,
    Prepared,
    Result,
    Share,
    UpdatedBuffer,
    buffers_behind,
    formula,
    is_collective,
    is_constant,
    is_dense,
    is_forward,
    is_in_rows,
    is_in_sum,
    is_number,
    is_random,
    is_tensor,
    is_view,
    memory_of,
    needs_only_inputs,
    parameters_behind,
    part_of,
    reads_memory,
    recv,
    reuses_memory,
    send,
    stage_of,
    sums_gradients,
    varies,
)
from pipec.graph.training_graph import Form, Operator, TrainingGraph, copy_graph
