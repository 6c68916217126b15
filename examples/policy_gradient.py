"""Learn to balance a pole on a cart by proximal policy optimization, on two pipeline stages.

python examples/policy_gradient.py                        # both stages in this process
torchrun --nproc-per-node 2 examples/policy_gradient.py   # one stage per process: the same losses

The agent plays under ``torch.no_grad()``, which is forward alone. It learns from a loss that this script
computes of its outputs, as it would without pipec. Every rank plays the same games: it has the same random
generator, and gets the same bits from the agent.
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec

GAMES, LONGEST, DISCOUNT = 16, 200, 0.99
EPOCHS, MINIBATCH, CLIP = 4, 256, 0.2


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


class Agent(nn.Module):
    """The logits of both actions, and the expected return of each state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.body(states)
        return self.actor(seen), self.critic(seen)[:, 0]


@dataclass(frozen=True)
class Moves:
    """What was seen, done and thought at each move, and how well it went on: ``[moves, ...]`` each."""

    states: Tensor
    actions: Tensor
    log_chances: Tensor
    returns: Tensor
    advantages: Tensor


@torch.no_grad()
def play(agent: nn.Module, generator: torch.Generator) -> Moves:
    """Games of moves that the agent draws. Carts whose game is over are pushed on, which does not count."""
    carts = CartPole(GAMES, generator)
    standing = torch.ones(GAMES, dtype=torch.bool)
    states, actions, log_chances, values, played = [], [], [], [], []
    while standing.any() and len(played) < LONGEST:
        logits, value = agent(carts.states)
        chosen = torch.multinomial(logits.softmax(1), 1, generator=generator)
        states.append(carts.states)
        actions.append(chosen[:, 0])
        log_chances.append(logits.log_softmax(1).gather(1, chosen)[:, 0])
        values.append(value)
        played.append(standing)
        carts.push(chosen[:, 0])
        standing = standing & carts.standing
    returns, after = torch.zeros(len(played), GAMES), torch.zeros(GAMES)
    for move in reversed(range(len(returns))):
        after = returns[move] = played[move] * (1 + DISCOUNT * after)
    seen = torch.stack(played)
    advantages = (returns - torch.stack(values))[seen]
    advantages = (advantages - advantages.mean()) / advantages.std()
    of_moves = (torch.stack(each)[seen] for each in (states, actions, log_chances))
    return Moves(*of_moves, returns[seen], advantages)


def learn(agent: nn.Module, optimizer: torch.optim.Optimizer, moves: Moves, order: Tensor) -> float:
    """An epoch of PPO (Schulman et al., 2017) over moves in this order; returns the mean loss."""
    losses = []
    for some in order.split(MINIBATCH):
        logits, values = agent(moves.states[some])
        log_chances = logits.log_softmax(1)
        ratio = log_chances.gather(1, moves.actions[some, None])[:, 0] - moves.log_chances[some]
        gains = [
            each * moves.advantages[some] for each in (ratio.exp(), ratio.exp().clamp(1 - CLIP, 1 + CLIP))
        ]
        entropy = -(log_chances.exp() * log_chances).sum(1).mean()
        loss = -torch.minimum(*gains).mean() + 1e-3 * F.mse_loss(values, moves.returns[some]) - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=12)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)

    agent = pipec.compile(Agent(), devices=2, microbatches=4).as_module()
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3)

    for update in range(args.updates):
        moves = play(agent, generator)
        count = len(moves.states)
        losses = [
            learn(agent, optimizer, moves, torch.randperm(count, generator=generator)) for _ in range(EPOCHS)
        ]
        if update % 3 == 0 or update == args.updates - 1:
            pipec.log(
                f"update {update:3}  loss {losses[-1]:9.6f}  {count / GAMES:6.2f} moves until the pole falls"
            )


if __name__ == "__main__":
    main()
