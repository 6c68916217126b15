"""The names of a stage's tensors in its code.

A parameter is named by the shortest end of its FQN that is unique in the stage:
``transformer.h.3.attn.c_attn.weight`` is ``c_attn_weight`` if the stage has no other ``c_attn``, and
``h_3_attn_c_attn_weight`` if another block has one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from pipec.codegen.names import identifier, reserved_names, unique_name
from pipec.graph import TrainingGraph
from pipec.graph.phase_functions import StageFunctions
from pipec.ir.text_format import format_dtype

MAX_NAME_LENGTH = 50
"""Characters of the end of an FQN."""


def name_tensors(
    graph: TrainingGraph, stage: StageFunctions, names: Mapping[fx.Node, str]
) -> dict[fx.Node, str]:
    """Unused names for parameters, buffers, precomputed values and gradients."""
    taken = reserved_names(graph) | {*names.values()}
    held = [*stage.parameters, *stage.buffers]
    ends = shortest_suffixes([node.meta["role"].fqn for node in held])
    found = {node: unique_name(identifier(ends[node.meta["role"].fqn]), taken) for node in held}
    of = {node.meta["role"].fqn: found[node] for node in held}
    for node in stage.precomputed:
        made: tuple[fx.Node, ...] = graph.precomputed.output_node().args[0]  # type: ignore[union-attr, assignment]
        source, fqns = made[node.meta["role"].index], node.meta["role"].fqns
        if len(fqns) == 1 and not node.meta["role"].buffers:
            dtype = format_dtype(str(node.meta["val"].dtype).removeprefix("torch."))
            found[node] = found[source] = unique_name(f"{of[fqns[0]]}_{dtype}", taken)
        else:
            found[node] = names[source]
    roles = {node.meta["role"]: found[node] for node in held}
    for node in stage.tail.read_nodes if stage.tail else ():
        if node.op == "placeholder" and node.meta["role"] in roles:
            found[node] = roles[node.meta["role"]]
    for fqn, gradient in (pair for function in stage.all_functions for pair in function.gradients):
        if gradient not in found:
            found[gradient] = unique_name(f"grad_{of[fqn]}", taken)
    return found


def shortest_suffixes(fqns: Sequence[str]) -> dict[str, str]:
    """The shortest unique end of each FQN, of two or more words; the first is not a number."""
    counts = Counter(end for fqn in {*fqns} for end in _ends(fqn))
    return {
        fqn: next((end for end in _ends(fqn) if counts[end] == 1 and not end[0].isdigit()), fqn)[
            -MAX_NAME_LENGTH:
        ]
        for fqn in fqns
    }


def _ends(fqn: str) -> Iterator[str]:
    """``2.attn.bias`` ends in ``attn.bias``, then in ``2.attn.bias``."""
    words = fqn.split(".")
    for start in range(max(len(words) - 2, 0), -1, -1):
        yield ".".join(words[start:])
