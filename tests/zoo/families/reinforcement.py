"""What reinforcement learning trains: policies, values, and models of a world."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import model, perceptron
from zoo.model_case import Case, batch, integers, normal

STATE, ACTIONS, WIDTH = 8, 4, 32

network = functools.partial(perceptron, activation=nn.Tanh)


@model(
    body=lambda: network(STATE, WIDTH, WIDTH),
    actor=lambda: nn.Linear(WIDTH, ACTIONS),
    critic=lambda: nn.Linear(WIDTH, 1),
)
def proximal(self, state: Tensor, action: Tensor, before: Tensor, advantage: Tensor, gain: Tensor) -> Tensor:
    """Clipped ratios, values and entropy of an actor and critic (Schulman et al., PPO, 2017)."""
    hidden = self.body(state).tanh()
    policy = torch.distributions.Categorical(logits=self.actor(hidden))
    ratio = (policy.log_prob(action) - before).exp()
    gained = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    value = F.mse_loss(self.critic(hidden).squeeze(1), gain)
    return value / 2 - gained - 0.01 * policy.entropy().mean()


@model(
    body=lambda: network(STATE, WIDTH, WIDTH),
    value=lambda: nn.Linear(WIDTH, 1),
    gain=lambda: nn.Linear(WIDTH, ACTIONS),
)
def values(self, state: Tensor) -> Tensor:
    hidden = self.body(state).tanh()
    gain = self.gain(hidden)
    return self.value(hidden) + gain - gain.mean(1, keepdim=True)


@model(online=values, target=lambda: values().requires_grad_(False))
def dueling(self, state: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
    """Values and advantages apart, against a copy that is not trained (Wang et al., 2016)."""
    best = self.online(after).argmax(1, keepdim=True).detach()
    expected = reward + 0.9 * self.target(after).gather(1, best).squeeze(1)
    found = self.online(state).gather(1, action[:, None]).squeeze(1)
    return F.smooth_l1_loss(found, expected)


def critics() -> nn.Module:
    each = (network(STATE + ACTIONS, WIDTH, WIDTH, 1) for _ in range(2))
    return nn.ModuleList(each).requires_grad_(False)


@model(actor=lambda: network(STATE, WIDTH, WIDTH, 2 * ACTIONS), critics=critics)
def soft_actor(self, state: Tensor, noise: Tensor) -> Tensor:
    """A squashed Gaussian policy against the lesser of two critics (Haarnoja et al., SAC, 2018)."""
    mean, log_std = self.actor(state).chunk(2, 1)
    log_std = log_std.clamp(-5, 2)
    raw = mean + log_std.exp() * noise
    action = raw.tanh()
    likelihood = (-noise.square() / 2 - log_std - (1 - action.square() + 1e-6).log()).sum(1)
    first, second = (critic(torch.cat([state, action], 1)).squeeze(1) for critic in self.critics)
    return (0.2 * likelihood - torch.minimum(first, second)).mean()


def board_block() -> nn.Module:
    first, last = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
    return nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), last)


@model(
    first=lambda: nn.Conv2d(3, 16, 3, padding=1),
    blocks=lambda: nn.ModuleList(board_block() for _ in range(3)),
    moves=lambda: nn.Linear(16 * 25, 26),
    winner=lambda: nn.Linear(16 * 25, 1),
)
def board_game(self, board: Tensor, played: Tensor, won: Tensor) -> Tensor:
    """Residual convolutions with a head for moves and one for the winner (Silver et al., 2017)."""
    hidden = self.first(board).relu()
    for block in self.blocks:
        hidden = F.relu(hidden + block(hidden))
    flat = hidden.flatten(1)
    winner = self.winner(flat).squeeze(1).tanh()
    return F.cross_entropy(self.moves(flat), played) + F.mse_loss(winner, won)


@model(
    encoder=lambda: network(16, WIDTH, WIDTH),
    decoder=lambda: network(WIDTH, WIDTH, 16),
    cell=lambda: nn.GRUCell(WIDTH + ACTIONS, WIDTH),
    reward=lambda: nn.Linear(WIDTH, 1),
)
def world(self, seen: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """Images to states that follow each other, and back (Hafner et al., Dreamer, 2020, without its draws)."""
    state, loss = seen.new_zeros(seen.shape[0], WIDTH), seen.new_zeros(())
    for k in range(seen.shape[1]):
        state = self.cell(torch.cat([self.encoder(seen[:, k]), actions[:, k]], 1), state)
        loss = loss + F.mse_loss(self.decoder(state), seen[:, k])
        loss = loss + F.mse_loss(self.reward(state).squeeze(1), rewards[:, k])
    return loss


ACTION = integers(ACTIONS)
BEFORE = {"action": ACTION, "before": lambda rows: -torch.rand(rows)}
STEPS = batch(state=normal(STATE), **BEFORE, advantage=normal(), gain=normal())
MOVES = batch(state=normal(STATE), after=normal(STATE), action=ACTION, reward=normal())
BOARDS = batch(
    board=normal(3, 5, 5), played=integers(26), won=lambda rows: torch.randint(-1, 2, (rows,)).float()
)
EPISODES = batch(seen=normal(5, 16), actions=normal(5, ACTIONS), rewards=normal(5))

CASES = (
    Case("PPO", proximal, STEPS),
    Case("Dueling DQN", dueling, MOVES, batched={"state": 0}),
    Case("SAC", soft_actor, batch(state=normal(STATE), noise=normal(ACTIONS))),
    Case("AlphaZero", board_game, BOARDS),
    Case("World model", world, EPISODES),
)
