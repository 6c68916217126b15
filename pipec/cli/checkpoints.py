"""``pipec checkpoint convert``, and what ``pipec check`` says of a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.output import show_json
from pipec.errors import ArtifactError, InputError
from pipec.ir.text_format import format_bytes

if TYPE_CHECKING:
    from pipec.checkpoint.metadata import CheckpointMetadata

commands = typer.Typer(help="Convert checkpoints.", no_args_is_help=True)


def check_checkpoint(directory: Path, as_json: bool) -> None:
    """Check every file of a checkpoint, and summarize its contents."""
    from pipec.checkpoint.convert import open_checkpoint
    from pipec.saved_folders import find_folder

    place = find_folder(directory)
    if place.is_dir() and not (place / "checkpoint.pt").exists():
        raise ArtifactError(
            f"{place} is no artifact and no checkpoint: it holds neither plan.json nor checkpoint.pt"
        )
    checkpoint = open_checkpoint(place)
    metadata = checkpoint.metadata
    summary = {
        "kind": "checkpoint",
        "num_steps": metadata.num_steps,
        "weights": _sizes(checkpoint.weights),
        "optimizer": _sizes(checkpoint.state),
        **_rest(metadata),
    }
    if as_json:
        show_json(summary)
        return
    typer.echo(f"{directory} is a valid checkpoint, after {metadata.num_steps} steps")
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
) -> None:
    """Convert a folder of torch.distributed.checkpoint to a checkpoint of pipec, or the other way round.

    Such a folder has weights under model and the optimizer under optim, as that library's get_state_dict
    returns them. No code in a folder is run: its metadata, a pickle, may only name classes of that library.
    """
    from pipec.checkpoint.convert import convert

    result = convert(source.resolve(), target.resolve(), optimizer, num_steps)
    typer.echo(f"{target} is {result.kind}: {result.num_tensors} tensors, {format_bytes(result.num_bytes)}")
    if result.skipped_entries:
        typer.echo(f"skipped: {', '.join(result.skipped_entries)}")


@commands.command(hidden=True)
def show(directory: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Former name of ``pipec check``."""
    raise InputError(f"there is no command checkpoint show any more; pipec check {directory} does the same")
