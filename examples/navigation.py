"""A recurrent policy learns to walk through a grid world by imitating shortest paths.

python examples/navigation.py                        # both stages in this process
torchrun --nproc-per-node 2 examples/navigation.py   # one stage per process: the same losses

The walker sees the five by five cells around it and the direction of its goal, so that it has to remember
where it came from. It learns from paths of any length, padded to the longest one; a label of -100 does not
count. Then it walks by itself in worlds that it has not seen.
"""

import argparse
from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec

SIZE, WALLS, LONGEST, SIGHT = 8, 14, 24, 2
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
Cell = tuple[int, int]


class World:
    """A grid with walls and a goal. ``distance`` has the number of moves from each cell that reaches it."""

    def __init__(self, generator: torch.Generator) -> None:
        cells = torch.randperm(SIZE * SIZE, generator=generator)
        self.walls = torch.ones(SIZE + 2 * SIGHT, SIZE + 2 * SIGHT)
        self.walls[SIGHT:-SIGHT, SIGHT:-SIGHT] = 0
        for cell in cells[:WALLS].tolist():
            self.walls[SIGHT + cell // SIZE, SIGHT + cell % SIZE] = 1
        self.goal = divmod(int(cells[WALLS]), SIZE)
        self.distance = {self.goal: 0}
        waiting = deque([self.goal])
        while waiting:
            cell = waiting.popleft()
            for each in map(self.moved, [cell] * 4, range(4)):
                if each not in self.distance:
                    self.distance[each] = self.distance[cell] + 1
                    waiting.append(each)
        reaching = sorted(self.distance)
        self.start = reaching[int(torch.randint(len(reaching), (1,), generator=generator))]

    def moved(self, cell: Cell, move: int) -> Cell:
        """The cell after a move; a wall stops it."""
        row, column = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
        return cell if self.walls[SIGHT + row, SIGHT + column] else (row, column)

    def seen(self, cell: Cell) -> Tensor:
        """The cells around, and the direction of the goal."""
        around = self.walls[cell[0] : cell[0] + 2 * SIGHT + 1, cell[1] : cell[1] + 2 * SIGHT + 1]
        direction = [(self.goal[axis] - cell[axis]) / SIZE for axis in range(2)]
        return torch.cat([around.flatten(), torch.tensor(direction)])

    def path(self) -> tuple[list[Tensor], list[int]]:
        """A shortest path: what the walker sees, and the moves that it makes."""
        cell, views, moves = self.start, [], []
        while cell != self.goal:
            best = min(range(4), key=lambda move: self.distance[self.moved(cell, move)])
            views.append(self.seen(cell))
            moves.append(best)
            cell = self.moved(cell, best)
        return views, moves


class Policy(nn.Module):
    """``f32[walkers, time, 27]`` views in, ``f32[walkers, time, 4]`` logits of moves out."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear((2 * SIGHT + 1) ** 2 + 2, width), nn.ReLU())
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, views: Tensor) -> Tensor:
        return self.head(self.memory(self.encoder(views))[0])


def imitation_loss(logits: Tensor, moves: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), moves.flatten())


def padded(worlds: list[World]) -> tuple[Tensor, Tensor]:
    """The paths of worlds as a batch of ``LONGEST`` moves; shorter ones end in moves that do not count."""
    views = torch.zeros(len(worlds), LONGEST, (2 * SIGHT + 1) ** 2 + 2)
    moves = torch.full((len(worlds), LONGEST), -100)
    for row, world in enumerate(worlds):
        seen, made = world.path()
        if seen:
            length = min(len(seen), LONGEST)
            views[row, :length] = torch.stack(seen[:length])
            moves[row, :length] = torch.tensor(made[:length])
    return views, moves


def arrived(policy: nn.Module, worlds: list[World]) -> float:
    """The fraction of walkers that reach their goal within ``LONGEST`` moves."""
    cells, views = [world.start for world in worlds], []
    for _ in range(LONGEST):
        views.append(torch.stack([world.seen(cell) for world, cell in zip(worlds, cells, strict=True)]))
        history = torch.zeros(len(worlds), LONGEST, views[0].shape[1])
        history[:, : len(views)] = torch.stack(views, dim=1)
        moves = policy(history)[:, len(views) - 1].argmax(dim=1).tolist()
        cells = [
            cell if cell == world.goal else world.moved(cell, move)
            for world, cell, move in zip(worlds, cells, moves, strict=True)
        ]
    return sum(cell == world.goal for world, cell in zip(worlds, cells, strict=True)) / len(worlds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=150)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    views, moves = padded([World(generator) for _ in range(1500)])
    unseen = [World(generator) for _ in range(200)]

    pipe = pipec.compile(Policy(), devices=2, loss_fn=imitation_loss, microbatches=4)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    before = arrived(pipe, unseen)
    for update in range(args.updates):
        batch = torch.randint(len(views), (64,), generator=generator)
        loss = pipe.step(views[batch], target=moves[batch])
        optimizer.step()
        optimizer.zero_grad()
        if update % 50 == 0 or update == args.updates - 1:
            pipec.log(f"update {update:3}  loss {loss:.6f}")
    pipec.log(f"walkers that arrive: {before:.1%} before training, {arrived(pipe, unseen):.1%} after")


if __name__ == "__main__":
    main()
