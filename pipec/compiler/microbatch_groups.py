"""What runs the microbatches of a call: one compiled artifact, or several for groups of them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.graph import Output, TrainingGraph
from pipec.graph.size_text import format_size
from pipec.ir import Sizes
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.text_format import names_in
from pipec.torch_compat import pytree


@dataclass(frozen=True, eq=False)
class CompiledArtifact:
    """An artifact and the shape of what the model returns, to put its results back into.

    ``axes`` names the results that have the batch's rows in front, and says where the model has them.
    ``number`` tells it apart from what else was compiled, on every rank.
    """

    artifact: Artifact
    output_spec: pytree.TreeSpec | None
    axes: Mapping[str, BatchAxis]
    number: int = field(default_factory=itertools.count().__next__)


MicrobatchGroups = list[tuple[CompiledArtifact, list[int]]]
"""What runs each group of consecutive microbatches of a call, and their sizes."""


def check_outputs(graph: TrainingGraph) -> None:
    """Refuse results of which nothing shows how those of microbatches are joined."""
    if all(axis is None or axis.is_leading for axis in graph.axes):
        return
    outputs = ((role, node.meta["val"]) for role, node in graph.outputs if isinstance(role, Output))
    if any(role.axis is None and _may_have_rows_elsewhere(graph, value.shape) for role, value in outputs):
        raise InputError(
            "the model or loss_fn returns tensors, and nothing shows where their rows are: an argument has "
            "them elsewhere than in dimension 0, and the number of rows is a constant in what was captured; "
            "compile with dynamic=True, or pass the batch as dimension 0"
        )


def _may_have_rows_elsewhere(graph: TrainingGraph, shape: Sequence[Any]) -> bool:
    """Whether the rows of a result that was not analysed may be in any dimension, or merged with others."""
    if graph.batch is None:
        return bool(shape)
    sizes = [format_size(size, graph.symbols) for size in shape]
    return any("b" in names_in(size) and size != "b" for size in sizes)


def check_batch_counts(groups: Sequence[tuple[CompiledArtifact, list[int]]]) -> None:
    """Refuse values of the whole mini-batch where no code can take all of it."""
    if len(groups) > 1 and any(stage.batch_counts for stage in groups[0][0].artifact.plan.stages):
        sizes = [size for _, group in groups for size in group]
        raise InputError(
            f"the loss needs a count over the whole mini-batch, but its {len(sizes)} microbatches of "
            f"{max(sizes)} and {min(sizes)} rows are compiled apart, because the model makes a constant of "
            f"the batch. Pass a batch that {len(sizes)} microbatches divide, as drop_last=True does"
        )


def require_one_graph(
    graphs: Sequence[TrainingGraph], sizes: Sequence[int], values: Sizes, dynamic: bool
) -> None:
    """Refuse microbatches of several sizes that the graph of the largest ones is not right for."""
    graph = next((each for each in graphs if each.is_valid_for(max(sizes), values)), graphs[0])
    if strange := [size for size in sizes if not graph.is_valid_for(size, values)]:
        reason = "the model makes a constant of the batch" if dynamic else "dynamic is False"
        raise InputError(
            "replicas that pass their own parts of a batch run one graph, which cannot take microbatches "
            f"of {strange[0]} and {max(sizes)} rows: {reason}. Pass as many rows on every replica, which "
            "its microbatches divide, as drop_last=True does"
        )
