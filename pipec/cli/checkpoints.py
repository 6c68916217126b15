"""``pipec checkpoint show`` and ``pipec checkpoint convert``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.flags import Json
from pipec.cli.output import show_json
from pipec.console import status
from pipec.ir.text_format import format_bytes

if TYPE_CHECKING:
    from pipec.checkpoint.metadata import CheckpointMetadata

commands = typer.Typer(help="Inspect and convert checkpoints.", no_args_is_help=True)


@commands.command()
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that save_checkpoint wrote.")],
    as_json: Json = False,
) -> None:
    """Check every file of a checkpoint, and summarize its contents.

    JSON keys: num_steps, weights and optimizer (tensors and bytes of each), groups, schedulers, ranks,
    position (mini-batches of a stream, by part of the data), has_extra.
    """
    with status("loading torch"):
        from pipec.checkpoint.convert import open_checkpoint
        from pipec.saved_folders import find_folder

    checkpoint = open_checkpoint(find_folder(directory))
    metadata = checkpoint.metadata
    summary = {
        "num_steps": metadata.num_steps,
        "weights": _sizes(checkpoint.weights),
        "optimizer": _sizes(checkpoint.state),
        **_rest(metadata),
    }
    if as_json:
        show_json(summary)
        return
    typer.echo(f"{directory} is valid, after {metadata.num_steps} steps")
    for key in ("weights", "optimizer"):
        typer.echo(f"{key:10} {summary[key]['tensors']} tensors, {format_bytes(summary[key]['bytes'])}")
    for group in summary["groups"]:
        typer.echo(
            f"group      {group['optimizer']}, {group['parameters']} parameters, {group['hyperparameters']}"
        )
    for scheduler in summary["schedulers"]:
        typer.echo(f"scheduler  {scheduler}")
    for number in summary["position"]:
        typer.echo(f"stream     after {number} mini-batches")


def _sizes(tensors: Any) -> dict[str, int]:
    return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors.values())}


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
        "ranks": len(metadata.random),
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
        int | None, typer.Option("--num-steps", min=0, help="Number of steps so far; default: 0.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a folder of torch.distributed.checkpoint to a checkpoint of pipec, or the other way round.

    Such a folder has weights under model and the optimizer under optim, as that library's get_state_dict
    returns them. No code in a folder is run: its metadata, a pickle, may only name classes of that library.

    JSON keys: made, tensors, bytes, num_steps, skipped_entries.
    """
    with status("loading torch"):
        from pipec.checkpoint.convert import convert

    result = convert(source.resolve(), target.resolve(), optimizer, num_steps)
    skipped = result.skipped_entries
    if as_json:
        summary = {"made": result.kind, "tensors": result.num_tensors, "bytes": result.num_bytes}
        show_json({**summary, "num_steps": result.metadata.num_steps, "skipped_entries": skipped})
        return
    typer.echo(f"{target} is {result.kind}: {result.num_tensors} tensors, {format_bytes(result.num_bytes)}")
    if skipped:
        typer.echo(f"skipped: {', '.join(skipped)}")
