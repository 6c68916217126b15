"""The compiled artifacts of a call: one for each group of consecutive microbatches."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.graph import TrainingGraph
from pipec.graph.size_text import format_size
from pipec.ir import Sizes
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.text_format import names_in
from pipec.torch_compat import pytree


@dataclass(frozen=True, eq=False)
class CompiledArtifact:
    """An artifact, and the structure of the model's output.

    ``axes`` maps results whose rows were moved to the front to the dimension where the model has them.
    ``number`` identifies the artifact on every rank.
    """

    artifact: Artifact
    output_spec: pytree.TreeSpec | None
    axes: Mapping[str, BatchAxis]
    number: int = field(default_factory=itertools.count().__next__)


MicrobatchGroups = list[tuple[CompiledArtifact, list[int]]]
"""The artifact of each group of consecutive microbatches of a call, and the sizes of the microbatches."""


def check_outputs(graph: TrainingGraph) -> None:
    """Raise InputError if it is unknown how the results of microbatches are concatenated."""
    if all(axis is None or axis.is_leading for axis in graph.axes):
        return
    outputs = ((role, node.meta["val"]) for role, node in graph.returned)
    if any(role.axis is None and _may_have_rows_elsewhere(graph, value.shape) for role, value in outputs):
        raise InputError(
            "the model or loss_fn returns tensors, and nothing shows where their rows are: an argument has "
            "them elsewhere than in dimension 0, and the number of rows is a constant in what was captured; "
            "compile with dynamic=True, or pass the batch as dimension 0"
        )


def _may_have_rows_elsewhere(graph: TrainingGraph, shape: Sequence[Any]) -> bool:
    """Whether an unanalysed result may have its rows in any dimension, or merged with another one."""
    if graph.batch is None:
        return bool(shape)
    sizes = [format_size(size, graph.symbols) for size in shape]
    return any("b" in names_in(size) and size != "b" for size in sizes)


def check_batch_counts(groups: Sequence[tuple[CompiledArtifact, list[int]]]) -> None:
    """Raise InputError if several graphs need a count over the whole mini-batch, or all of its rows."""
    stages = groups[0][0].artifact.plan.stages if len(groups) > 1 else ()
    if any(stage.batch_counts or stage.tail for stage in stages):
        sizes = [size for _, group in groups for size in group]
        what = "all rows" if any(stage.tail for stage in stages) else "a count over the rows"
        raise InputError(
            f"the loss needs {what} of the mini-batch, but its {len(sizes)} microbatches of "
            f"{max(sizes)} and {min(sizes)} rows are compiled apart, because the model makes a constant of "
            f"the batch. Pass a batch that {len(sizes)} microbatches divide, as drop_last=True does"
        )


def require_one_graph(
    graphs: Sequence[TrainingGraph], sizes: Sequence[int], values: Sizes, dynamic: bool
) -> None:
    """Raise InputError unless the graph of the largest microbatches is valid for those of all sizes."""
    graph = next((each for each in graphs if each.is_valid_for(max(sizes), values)), graphs[0])
    if invalid := [size for size in sizes if not graph.is_valid_for(size, values)]:
        reason = "the model makes a constant of the batch" if dynamic else "dynamic is False"
        raise InputError(
            "replicas that pass their own parts of a batch run one graph, which cannot take microbatches "
            f"of {invalid[0]} and {max(sizes)} rows: {reason}. Pass as many rows on every replica, which "
            "its microbatches divide, as drop_last=True does"
        )
