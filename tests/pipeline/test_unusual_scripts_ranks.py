"""Scripts with two models, hidden states, averages and scalers do on ranks what they do in one process."""

import textwrap
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import copy, torch, pipec
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

def compiled(model, **options):
    return pipec.compile(model, devices=2, microbatches=4, timeout=240.0, **options)

def trained(call, model, optimizer):
    loss = call()
    if loss.requires_grad:
        loss.backward()
    optimizer.step()
    model.zero_grad()
    return float(loss.detach())
"""

RECURRENT = """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(11, 8), nn.LSTM(8, 8, 2, batch_first=True)
        self.last = nn.Linear(8, 11)

    def init_hidden(self, rows):
        weight = next(self.parameters())
        return weight.new_zeros(2, rows, 8), torch.zeros(2, rows, 8).type_as(weight)

    def forward(self, x, hidden, cell):
        return self.last(self.layers(self.table(x), (hidden, cell))[0]).transpose(1, 2)

model, x = Recurrent(), torch.randint(11, (16, 7))
eager = copy.deepcopy(model)
pipe = compiled(model, loss_fn=F.cross_entropy, batched={"hidden": 1, "cell": 1})
optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, eager))
scaler = torch.amp.GradScaler("cpu", enabled=False)
average = []
for _ in range(3):
    loss = pipe.step(x, *model.init_hidden(16), target=x)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    average = average or [torch.zeros_like(p) for p in pipe.parameters()]
    for mean, parameter in zip(average, pipe.parameters()):
        mean.mul_(0.9).add_(parameter.detach(), alpha=0.1)
    expected = trained(lambda: F.cross_entropy(eager(x, *eager.init_hidden(16)), x), eager, plain)
    print(abs(float(loss) - expected) < 1e-12)
scaler.scale(pipe.as_module()(x, *model.init_hidden(16), target=x)).backward()
scaler.step(optimizer)
"""

ADVERSARIAL = """
generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
z, x = torch.randn(16, 6), torch.randn(16, 6)

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, z, x, which):
        made = self.generator(z)
        if which == "generator":
            return F.softplus(-self.critic(made)).mean()
        return (F.softplus(self.critic(made.detach())) + F.softplus(-self.critic(x))).mean()

class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.critic = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 6)), critic

    def forward(self, x):
        return self.critic(self.stem(x)).mean()
"""


def lines(tmp_path: Path, body: str) -> list[list[str]]:
    """What each of two ranks prints."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(body))
    printed = run_ranks(script, 2, tmp_path)
    return [[line for line in each.splitlines() if not line.startswith("pipec: ")] for each in printed]


def test_ranks_train_with_hidden_states_as_one_process(tmp_path: Path) -> None:
    assert lines(tmp_path, RECURRENT) == [["True"] * 3] * 2


def test_two_pipelines_share_modules_that_are_on_the_same_ranks(tmp_path: Path) -> None:
    body = """
    trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
    models = nn.ModuleList([
        nn.Sequential(trunk, nn.Linear(8, 5)),
        nn.Sequential(trunk, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
    ])
    eager, x = copy.deepcopy(models), torch.randn(16, 6)
    targets = torch.randint(5, (16,)), torch.randint(3, (16,))
    pipes = [compiled(model, loss_fn=F.cross_entropy) for model in models]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (models, eager)]
    for _ in range(3):
        losses = [pipe.step(x, target=target) for pipe, target in zip(pipes, targets)]
        expected = [F.cross_entropy(model(x), target) for model, target in zip(eager, targets)]
        sum(expected).backward()
        print(all(abs(float(a) - float(b.detach())) < 1e-12 for a, b in zip(losses, expected)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    """
    assert lines(tmp_path, body) == [["True"] * 3] * 2


def test_modules_of_another_pipeline_on_other_ranks_are_refused(tmp_path: Path) -> None:
    body = (
        ADVERSARIAL
        + """
behind = nn.Sequential(nn.Linear(1, 64), nn.Linear(64, 64), nn.Linear(64, 6))
first, second = compiled(nn.Sequential(critic, behind), loss_fn=F.mse_loss), compiled(Second())
first.step(x, target=x)
try:
    second.step(x)
except pipec.InputError as error:
    print(str(error).split(". ")[0])
"""
    )
    first, second = lines(tmp_path, body)
    assert first == second
    assert first[0].startswith(
        "critic.0.weight belongs to another pipeline, too, whose stages have it on rank 0"
    )


def test_the_remedy_is_one_pipeline_of_both_models(tmp_path: Path) -> None:
    body = (
        ADVERSARIAL
        + """
model = Both()
eager, pipe = copy.deepcopy(model), compiled(model)
for _ in range(2):
    for which in ("critic", "generator"):
        optimizers = [torch.optim.SGD(getattr(each, which).parameters(), lr=0.1) for each in (pipe, eager)]
        loss = trained(lambda: pipe.step(z, x, which), pipe, optimizers[0])
        expected = trained(lambda: eager(z, x, which), eager, optimizers[1])
        print(abs(loss - expected) < 1e-12)
"""
    )
    assert lines(tmp_path, body) == [["True"] * 4] * 2
