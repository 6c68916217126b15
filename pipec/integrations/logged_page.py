"""The page of a pipeline, as an artifact of the runs that loggers have open."""

import sys
from pathlib import Path

from pipec.pipeline import Pipeline

PAGE = "pipec.html"


def write_page(pipe: Pipeline, folder: Path) -> None:
    """Write the page into a folder, and add it to the open runs of W&B and MLflow. Rank 0 does so.

    A loop that has compiled no step has no page.
    """
    if pipe.trained_artifact is None or pipe.ranks.world.rank > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PAGE
    pipe.visualize(path)
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    if wandb is not None and wandb.run is not None:
        wandb.run.log_artifact(str(path), name="pipec-page", type="timeline")
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_artifact(str(path))
