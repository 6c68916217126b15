"""The training of restartable_digits.py under Ray Train: each worker is a rank.

pip install "ray[train]"
python examples/cluster/ray_train.py --workers 4 --directory /shared/run
python examples/cluster/ray_train.py --workers 16 --gpus --directory /shared/run

Ray starts the workers, on this machine or on the cluster that ``RAY_ADDRESS`` names, and joins them in a
process group, in which pipec finds its rank. When a worker fails, Ray starts all of them again, and the run
goes on from the last checkpoint in a folder that all hosts see. Ray's own checkpoints are not needed.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

EXAMPLES = Path(__file__).resolve().parents[1]


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    sys.path.insert(0, str(EXAMPLES))
    from restartable_digits import train

    train(Path(config["directory"]), config["steps"], config["every"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="give each worker a GPU")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--every", type=int, default=12, help="steps between two checkpoints")
    parser.add_argument("--directory", default="build/restartable")
    args = parser.parse_args()
    config = {"directory": os.path.abspath(args.directory), "steps": args.steps, "every": args.every}
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    ).fit()


if __name__ == "__main__":
    main()
