"""``pipec checkpoint show`` and ``pipec checkpoint convert``: what is in a checkpoint, and other formats."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.flags import Json
from pipec.cli.output import show_json, status
from pipec.ir.text_format import format_bytes

if TYPE_CHECKING:
    from pipec.checkpoint.metadata import CheckpointMetadata

commands = typer.Typer(help="Look into checkpoints, and convert them.", no_args_is_help=True)


@commands.command()
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What save_checkpoint wrote.")],
    as_json: Json = False,
) -> None:
    """Check every file of a checkpoint, and tell what is in it.

    JSON keys: num_steps, weights and optimizer (tensors and bytes of each), groups, schedulers, ranks,
    position (mini-batches of a stream, by part of the data), has_extra.
    """
    with status("loading torch"):
        from pipec.checkpoint.convert import open_checkpoint
        from pipec.checkpoint.staging_directory import find_checkpoint

    metadata, weights, state = open_checkpoint(find_checkpoint(directory))
    summary = {
        "num_steps": metadata.num_steps,
        "weights": _sizes(weights),
        "optimizer": _sizes(state),
        **_rest(metadata),
    }
    if as_json:
        show_json(summary)
        return
    typer.echo(f"{directory} is sound, after {metadata.num_steps} steps")
    for what in ("weights", "optimizer"):
        typer.echo(f"{what:10} {summary[what]['tensors']} tensors, {format_bytes(summary[what]['bytes'])}")
    for group in summary["groups"]:
        typer.echo(
            f"group      {group['optimizer']}, {group['parameters']} parameters, {group['hyperparameters']}"
        )
    for scheduler in summary["schedulers"]:
        typer.echo(f"scheduler  {scheduler}")
    for number in summary["position"]:
        typer.echo(f"stream     after {number} mini-batches")


def _sizes(files: Any) -> dict[str, int]:
    return {"tensors": len(files), "bytes": sum(kind.num_bytes for kind in files.specs.values())}


def _rest(metadata: "CheckpointMetadata") -> dict[str, Any]:
    groups = metadata.optimizer.groups if metadata.optimizer is not None else []
    return {
        "groups": [
            {
                "optimizer": group.optimizer,
                "parameters": len(group.names),
                "hyperparameters": ", ".join(
                    f"{key} {value}" for key, value in group.hyperparameters.items()
                ),
            }
            for group in groups
        ],
        "schedulers": [each.class_name for each in metadata.schedulers],
        "ranks": len(metadata.random.of_rank),
        "position": [each.num_batches for each in metadata.stream_positions()],
        "has_extra": metadata.extra is not None,
    }


@commands.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint of either kind.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", metavar="NAME", help="The class of the optimizer, such as AdamW."),
    ] = None,
    num_steps: Annotated[
        int | None, typer.Option("--num-steps", min=0, help="How many steps were made; default: 0.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a checkpoint of a folder of torch.distributed.checkpoint, or such a folder of a checkpoint.

    There, weights are under model, and the optimizer under optim, as its get_state_dict gives them. Nothing
    that a folder holds is run: its metadata, a pickle, may name the classes of that library alone.

    JSON keys: made, tensors, bytes, num_steps, skipped_entries.
    """
    with status("loading torch"):
        from pipec.checkpoint.convert import convert

    done = convert(source.resolve(), target.resolve(), optimizer, num_steps)
    if as_json:
        summary = {"made": done.kind, "tensors": done.num_tensors, "bytes": done.num_bytes}
        show_json({**summary, "num_steps": done.metadata.num_steps, "skipped_entries": done.skipped_entries})
        return
    typer.echo(f"{target} is {done.kind}: {done.num_tensors} tensors, {format_bytes(done.num_bytes)}")
    if done.skipped_entries:
        typer.echo(f"left out: {', '.join(done.skipped_entries)}")
