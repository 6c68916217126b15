"""Learn to balance a pole on a cart by policy gradients, on two pipeline stages.

python examples/policy_gradient.py                        # both stages in this process
torchrun --nproc-per-node 2 examples/policy_gradient.py   # one stage per process: the same losses

The policy plays with ``pipe(states)``, which is forward alone, and learns with ``pipe.step`` from all moves,
of which there are more every time. Every rank plays the same games: it has the same random generator, and
gets the same bits from the policy.
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec

GAMES, LONGEST, DISCOUNT = 16, 200, 0.99


class CartPole:
    """``num`` carts on a track, each pushed to the left or to the right (Barto, Sutton and Anderson, 1983).

    A state is the cart's position and speed, and the pole's angle and speed. A game is over if the cart is
    2.4 m from where it began or the pole leans by more than 12 degrees.
    """

    def __init__(self, num: int, generator: torch.Generator) -> None:
        self.states = torch.rand(num, 4, generator=generator) * 0.1 - 0.05

    def push(self, actions: Tensor) -> None:
        """Push for 0.02 seconds with 10 N, to the right where an action is 1 and else to the left."""
        _, speed, angle, turning = self.states.unbind(dim=1)
        sine, cosine = angle.sin(), angle.cos()
        push = (20.0 * actions - 10.0 + 0.05 * turning.square() * sine) / 1.1
        turning_faster = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        speeding_up = push - 0.05 * turning_faster * cosine / 1.1
        rates = torch.stack([speed, speeding_up, turning, turning_faster], dim=1)
        self.states = self.states + 0.02 * rates

    @property
    def standing(self) -> Tensor:
        return (self.states[:, 0].abs() < 2.4) & (self.states[:, 2].abs() < math.radians(12))


@dataclass(frozen=True)
class Games:
    """What was seen and done, and whether the game still went on: ``[moves, games, ...]`` each."""

    states: Tensor
    actions: Tensor
    played: Tensor

    @property
    def advantages(self) -> Tensor:
        """How much better it went after each move than after the average move, in standard deviations.

        It went as well as the pole stood long; moves count the less, the later they are.
        """
        returns, after = torch.zeros(self.played.shape), torch.zeros(GAMES)
        for move in reversed(range(len(returns))):
            after = returns[move] = self.played[move] * (1 + DISCOUNT * after)
        of_moves = returns[self.played]
        return (returns - of_moves.mean()) / of_moves.std()


def play(policy: nn.Module, generator: torch.Generator) -> Games:
    """Games of moves that the policy draws. Carts whose game is over are pushed on, which does not count."""
    carts = CartPole(GAMES, generator)
    standing = torch.ones(GAMES, dtype=torch.bool)
    seen, done, played = [], [], []
    while standing.any() and len(played) < LONGEST:
        chances = F.softmax(policy(carts.states), dim=1)
        actions = torch.multinomial(chances, 1, generator=generator)[:, 0]
        seen.append(carts.states)
        done.append(actions)
        played.append(standing)
        carts.push(actions)
        standing = standing & carts.standing
    return Games(torch.stack(seen), torch.stack(done), torch.stack(played))


def policy_loss(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """REINFORCE (Williams, 1992): what went well becomes more likely."""
    actions, advantages = target
    return (F.cross_entropy(logits, actions, reduction="none") * advantages).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=25)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)

    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    pipe = pipec.compile(policy, devices=2, loss_fn=policy_loss, microbatches=4)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)

    for update in range(args.updates):
        games = play(pipe, generator)
        played = games.played
        target = (games.actions[played], games.advantages[played])
        loss = pipe.step(games.states[played], target=target)
        optimizer.step()
        optimizer.zero_grad()
        length = played.sum() / GAMES
        if update % 5 == 0 or update == args.updates - 1:
            pipec.log(f"update {update:3}  loss {loss:9.6f}  {length:6.2f} moves until the pole falls")


if __name__ == "__main__":
    main()
