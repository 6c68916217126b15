"""Four sites train one model on data that they keep, and average their weights now and then.

python examples/collaborative.py                        # every pipeline in this process
torchrun --nproc-per-node 2 examples/collaborative.py   # each pipeline on two processes: the same losses
torchrun --nproc-per-node 4 examples/collaborative.py   # two pipelines at once, on two each: the same

Each site has a pipeline of its own, and images of some of the ten digits. It makes many steps alone; then an
outer optimizer takes the mean change of the weights for a gradient (Douillard et al. 2023, "DiLoCo:
Distributed Low-Communication Training of Language Models"). Weights travel once in a round, gradients never.
"""

import argparse
import functools
import os
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_images
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pipec

T = TypeVar("T")

SITES, STEPS, TRAIN, BATCH = 4, 8, 1440, 64
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def mesh_of_pipelines() -> DeviceMesh | None:
    """The processes as pipelines of two; without ``torchrun`` this one runs all ranks of all pipelines."""
    if "WORLD_SIZE" not in os.environ:
        return None
    shape = int(os.environ["WORLD_SIZE"]) // 2, 2
    return init_device_mesh("cpu", shape, mesh_dim_names=("pipelines", "pp"))


def own_part(count: int, mesh: DeviceMesh | None) -> range:
    """Which of so many numbered pipelines this process takes part in."""
    return range(count) if mesh is None else range(mesh.get_local_rank("pipelines"), count, mesh.size(0))


def gather(own: dict[int, T], mesh: DeviceMesh | None) -> list[T]:
    """What all pipelines have, by their numbers, of which ``own`` has those of this process."""
    parts = [own]
    if mesh is not None:
        parts = [own] * mesh.size(0)
        dist.all_gather_object(parts, own, group=mesh.get_group("pipelines"))
    every = {number: value for part in parts for number, value in part.items()}
    return [every[number] for number in sorted(every)]


def accuracy(pipe: pipec.Pipeline, images: Tensor, labels: Tensor) -> float:
    return float((pipe(images).argmax(dim=1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()

    images, labels = load_images()
    mesh = mesh_of_pipelines()
    own_sites = own_part(SITES, mesh)
    rows = {site: (labels[:TRAIN] % SITES != site).nonzero()[:, 0] for site in own_sites}
    draws = {site: torch.Generator().manual_seed(site) for site in own_sites}

    torch.manual_seed(0)
    shared = make_model()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    options = {"devices": 2, "loss_fn": F.cross_entropy, "microbatches": 4, "optimizer": ADAMW}
    group = None if mesh is None else mesh["pp"]
    pipes = {site: pipec.compile(make_model(), group=group, **options) for site in own_sites}

    for number in range(args.rounds):
        found = {}
        for site, pipe in pipes.items():
            pipe.load_state_dict(shared.state_dict())
            for _ in range(STEPS):
                batch = rows[site][torch.randint(len(rows[site]), (BATCH,), generator=draws[site])]
                loss = pipe.step(images[batch], target=labels[batch])
            found[site] = float(loss), pipe.full_state_dict(all_ranks=True)
        losses, changed = zip(*gather(found, mesh), strict=True)
        for name, parameter in shared.named_parameters():
            mean = torch.stack([state[name] for state in changed]).mean(dim=0)
            parameter.grad = parameter.detach() - mean
        outer.step()
        pipec.log(f"round {number}  losses of the sites {' '.join(f'{loss:.6f}' for loss in losses)}")

    first = pipes[own_sites[0]]
    alone = accuracy(first, images[TRAIN:], labels[TRAIN:])
    first.load_state_dict(shared.state_dict())
    together = accuracy(first, images[TRAIN:], labels[TRAIN:])
    pipec.log(f"test accuracy {together:.1%} of the shared model, {alone:.1%} of a site after its own steps")


if __name__ == "__main__":
    main()
