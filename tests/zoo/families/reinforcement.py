"""What reinforcement learning trains: policies, values, and models of a world."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import perceptron
from zoo.model_case import Case, Inputs

STATE, ACTIONS, WIDTH = 8, 4, 32

network = functools.partial(perceptron, activation=nn.Tanh)


class Proximal(nn.Module):
    """Clipped ratios, values and entropy of an actor and critic (Schulman et al., PPO, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(STATE, WIDTH, WIDTH)
        self.actor, self.critic = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(
        self, state: Tensor, action: Tensor, before: Tensor, advantage: Tensor, gain: Tensor
    ) -> Tensor:
        hidden = self.body(state).tanh()
        policy = torch.distributions.Categorical(logits=self.actor(hidden))
        ratio = (policy.log_prob(action) - before).exp()
        gained = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value = F.mse_loss(self.critic(hidden).squeeze(1), gain)
        return value / 2 - gained - 0.01 * policy.entropy().mean()


class Dueling(nn.Module):
    """Values and advantages apart, against a copy that is not trained (Wang et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            nn.ModuleDict(
                {
                    "body": network(STATE, WIDTH, WIDTH),
                    "value": nn.Linear(WIDTH, 1),
                    "gain": nn.Linear(WIDTH, ACTIONS),
                }
            )
            for _ in range(2)
        )
        self.target.requires_grad_(False)

    @staticmethod
    def values(parts: nn.ModuleDict, state: Tensor) -> Tensor:
        hidden = parts["body"](state).tanh()
        gain = parts["gain"](hidden)
        return parts["value"](hidden) + gain - gain.mean(1, keepdim=True)

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        best = self.values(self.online, after).argmax(1, keepdim=True).detach()
        expected = reward + 0.9 * self.values(self.target, after).gather(1, best).squeeze(1)
        found = self.values(self.online, state).gather(1, action[:, None]).squeeze(1)
        return F.smooth_l1_loss(found, expected)


class SoftActor(nn.Module):
    """A squashed Gaussian policy against the lesser of two critics (Haarnoja et al., SAC, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = network(STATE, WIDTH, WIDTH, 2 * ACTIONS)
        self.critics = nn.ModuleList(network(STATE + ACTIONS, WIDTH, WIDTH, 1) for _ in range(2))
        self.critics.requires_grad_(False)

    def forward(self, state: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self.actor(state).chunk(2, 1)
        log_std = log_std.clamp(-5, 2)
        raw = mean + log_std.exp() * noise
        action = raw.tanh()
        likelihood = (-noise.square() / 2 - log_std - (1 - action.square() + 1e-6).log()).sum(1)
        first, second = (critic(torch.cat([state, action], 1)).squeeze(1) for critic in self.critics)
        return (0.2 * likelihood - torch.minimum(first, second)).mean()


class Board(nn.Module):
    """Residual convolutions with a head for moves and one for the winner (Silver et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1),
            )
            for _ in range(3)
        )
        self.moves, self.winner = nn.Linear(16 * 25, 26), nn.Linear(16 * 25, 1)

    def forward(self, board: Tensor, played: Tensor, won: Tensor) -> Tensor:
        hidden = self.first(board).relu()
        for block in self.blocks:
            hidden = F.relu(hidden + block(hidden))
        flat = hidden.flatten(1)
        return F.cross_entropy(self.moves(flat), played) + F.mse_loss(
            self.winner(flat).squeeze(1).tanh(), won
        )


class World(nn.Module):
    """Images to states that follow each other, and back (Hafner et al., Dreamer, 2020, without its draws)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(16, WIDTH, WIDTH), network(WIDTH, WIDTH, 16)
        self.cell = nn.GRUCell(WIDTH + ACTIONS, WIDTH)
        self.reward = nn.Linear(WIDTH, 1)

    def forward(self, seen: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        state, loss = seen.new_zeros(seen.shape[0], WIDTH), seen.new_zeros(())
        for k in range(seen.shape[1]):
            state = self.cell(torch.cat([self.encoder(seen[:, k]), actions[:, k]], 1), state)
            loss = loss + F.mse_loss(self.decoder(state), seen[:, k])
            loss = loss + F.mse_loss(self.reward(state).squeeze(1), rewards[:, k])
        return loss


def steps(rows: int) -> Inputs:
    return {
        "state": torch.randn(rows, STATE),
        "action": torch.randint(ACTIONS, (rows,)),
        "before": -torch.rand(rows),
        "advantage": torch.randn(rows),
        "gain": torch.randn(rows),
    }


def moves(rows: int) -> Inputs:
    state, after = torch.randn(2, rows, STATE)
    return {
        "state": state,
        "action": torch.randint(ACTIONS, (rows,)),
        "reward": torch.randn(rows),
        "after": after,
    }


def boards(rows: int) -> Inputs:
    return {
        "board": torch.randn(rows, 3, 5, 5),
        "played": torch.randint(26, (rows,)),
        "won": torch.randint(-1, 2, (rows,)).float(),
    }


def episodes(rows: int) -> Inputs:
    return {
        "seen": torch.randn(rows, 5, 16),
        "actions": torch.randn(rows, 5, ACTIONS),
        "rewards": torch.randn(rows, 5),
    }


CASES = (
    Case("PPO", Proximal, steps),
    Case("Dueling DQN", Dueling, moves, batched={"state": 0}),
    Case(
        "SAC",
        SoftActor,
        lambda rows: {"state": torch.randn(rows, STATE), "noise": torch.randn(rows, ACTIONS)},
    ),
    Case("AlphaZero", Board, boards),
    Case("World model", World, episodes),
)
