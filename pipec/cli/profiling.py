"""``pipec profile``: measure a model on this machine, for later plans."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.flags import Target, compile_flags
from pipec.cli.target import load_example
from pipec.ir import Phase
from pipec.ir.text_format import format_seconds

if TYPE_CHECKING:
    from pipec.cost.profile import Profile


@compile_flags("precision")
def profile(
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")] = Path(
        "profile.json"
    ),
    microbatch_size: Annotated[
        int | None,
        typer.Option(
            "--microbatch-size", min=1, max=2**63 - 1, help="Rows to run; default: an eighth of the batch."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to run, such as cpu or cuda:0.")] = "cpu",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=10**6, help="Runs; the median counts.")
    ] = 10,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", min=1, max=1024, help="Copies to run at once: the ranks that will share a CPU."
        ),
    ] = 1,
    *,
    options: Mapping[str, Any],
) -> None:
    """Measure every operator of a training step, forward and backward, and write a profile."""
    from pipec import api

    result = api.profile(
        load_example(target),
        microbatch_size=microbatch_size,
        device=device,
        repeats=repeats,
        ranks=ranks,
        precision=options["precision"],
    )
    result.save(output)
    typer.echo(profile_table(result))
    typer.echo(f"wrote {output}")


def profile_table(profile: "Profile", max_rows: int = 12) -> str:
    """A table of the operators that take longest, below the totals."""
    from pipec.plan.plan_table import table_lines

    forward, backward = (sum(op.seconds(phase) for op in profile.operators) for phase in _FUSED)
    slowest = sorted(profile.operators, key=lambda op: sum(map(op.seconds, _FUSED)), reverse=True)
    rows = []
    for op in slowest[:max_rows]:
        seconds = [op.seconds(phase) for phase in _FUSED]
        share = sum(seconds) / (forward + backward)
        rows.append([op.name, op.module, *map(format_seconds, seconds), f"{share:.1%}"])
    headings = ["operator", "module", "forward", "backward", "share"]
    headline = (
        f"{len(profile.operators)} operators on {profile.device}, microbatches of {profile.microbatch_size}: "
        f"forward {format_seconds(forward)}, backward {format_seconds(backward)}"
    )
    return "\n".join([headline, "", *table_lines(headings, rows, left=["operator", "module"])])


_FUSED = (Phase.FORWARD, Phase.BACKWARD)
