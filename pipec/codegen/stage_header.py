"""The header of a generated stage: its part of the model, and what it receives, sends and saves."""

import textwrap
from collections.abc import Iterable, Sequence

from pipec.codegen.names import safe_comment
from pipec.ir import Payload, Plan, Stage, Value
from pipec.ir.text_format import format_bytes, format_value


def stage_header(stage: Stage, plan: Plan) -> str:
    """::

    Stage 1 of 4, rank 1: transformer.h.3 to transformer.h.5 (operators 74 to 139).

    receives  hidden_3: f32[b, 128, 256] from stage 0
    sends     hidden_6: f32[b, 128, 256] to stage 2
    saves     11.8 MB a microbatch (b = 4)
    """
    ranks = " and ".join(map(str, plan.placement[stage.index]))
    head = f"Stage {stage.index} of {len(plan.stages)}, rank {ranks}: {_extent(stage)}."
    rows = [*textwrap.wrap(head, 96, break_long_words=False, break_on_hyphens=False), ""]
    links = [link for link in plan.links if link.payload is Payload.ACTIVATION]
    received = [(link.values, link.source) for link in links if link.target == stage.index]
    sent = [(link.values, link.target) for link in links if link.source == stage.index]
    arrived = {value for values, _ in received for value in values}
    rows += _messages("receives", "from stage", received)
    for verb, arrives in (("sends", False), ("hands on", True)):
        chosen = [([x for x in values if (x in arrived) is arrives], target) for values, target in sent]
        rows += _messages(verb, "to stage", chosen)
    if plan.num_microbatches:
        sizes = ", ".join(f"{name} = {size}" for name, size in plan.sizes.items())
        kept = f"{format_bytes(stage.cost.memory.saved)} a microbatch ({sizes})"
        rows.append(f"saves     {kept}{', computes the rest again' if stage.has_recompute else ''}")
    if stage.offloaded:
        away = f"{len(stage.offloaded)} of these values, {format_bytes(stage.cost.memory.offloaded)}"
        rows.append(f"offloads  {away}, to host memory until the backward")
    return "\n".join(rows)


def _extent(stage: Stage) -> str:
    if stage.last_operator < stage.first_operator:
        return "no operators"
    operators = f"operators {stage.first_operator} to {stage.last_operator}"
    if not stage.modules:
        return operators
    first, last = safe_comment(stage.modules[0]), safe_comment(stage.modules[-1])
    return f"{first} to {last} ({operators})" if first != last else f"{first} ({operators})"


def _messages(verb: str, preposition: str, messages: Iterable[tuple[Sequence[Value], int]]) -> list[str]:
    rows = []
    for values, peer in messages:
        if values:
            named = ", ".join(map(format_value, values))
            rows += textwrap.wrap(f"{verb:<9} {named} {preposition} {peer}", 96, subsequent_indent=" " * 10)
    return rows
