"""``pipe.as_module()`` over two processes: each commits its own stages' gradients, and all do it alike."""

import textwrap
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import copy, os
import torch, pipec
from torch import nn
from torch.nn.functional import mse_loss
rank = int(os.environ["RANK"])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
plain = copy.deepcopy(net)
net.generate = lambda: None
pipe = pipec.compile(net, devices=2, loss_fn=mse_loss, microbatches=2, timeout=240.0)
module = pipe.as_module()
x, y = torch.randn(8, 4).double(), torch.randn(8, 1).double()

def attempt(call):
    try:
        call()
    except pipec.InputError as error:
        print(error)
"""


def told(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(body))
    return run_ranks(script, 2, tmp_path)


def test_a_loop_trains_as_the_model(tmp_path: Path) -> None:
    body = """
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, plain)]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for k in range(2):
                (module(x + k, target=y) / 2).backward()
                (mse_loss(plain(x + k), y) / 2).backward()
            expected = dict(plain.named_parameters())
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    torch.testing.assert_close(parameter.grad, expected[name].grad)
            norms = module.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            torch.testing.assert_close(*norms)
            for optimizer in optimizers:
                optimizer.step()
        print(sum(each.grad is not None for each in module.parameters()))
        attempt(module.generate)
    """
    for printed in told(tmp_path, body):
        num_parameters, refusal = [line for line in printed.splitlines() if not line.startswith("pipec: ")]
        assert int(num_parameters) == 2
        assert "pipe.gather_into(model)" in refusal


def test_ranks_that_differ_are_refused_at_the_next_call(tmp_path: Path) -> None:
    body = """
        for factors in ((0.5, None), (1.0, 2.0)):
            loss = module(x, target=y)
            if factors[rank]:
                (factors[rank] * loss).backward()
            attempt(lambda: module(x, target=y))
        module(x, target=y).backward()
        module(x, target=y).backward()
    """
    for printed in told(tmp_path, body):
        assert "backward of step 1: times 0.5 on rank 0; absent on rank 1" in printed
        assert "backward of step 2: times 1 on rank 0; times 2 on rank 1" in printed
        assert "no `if rank == ...` keeps one away" in printed


def test_the_pipelines_own_optimizer_updates_its_shards(tmp_path: Path) -> None:
    body = """
        import functools
        factory = functools.partial(torch.optim.AdamW, lr=0.1)
        for shard in ("gradients", "parameters"):
            model, other = copy.deepcopy(plain), copy.deepcopy(plain)
            pipe = pipec.compile(
                model, devices=2, stages=1, replicas=2, loss_fn=mse_loss, microbatches=4, shard=shard,
                optimizer=factory, clip_grad_norm=0.1, timeout=240.0,
            )
            module, optimizer = pipe.as_module(), factory(other.parameters())
            for _ in range(3):
                for k in range(2):
                    (module(x + k, target=y) / 2).backward()
                    (mse_loss(other(x + k), y) / 2).backward()
                nn.utils.clip_grad_norm_(other.parameters(), 0.1)
                pipe.optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
            attempt(pipe.optimizer.step)
            attempt(pipe.optimizer.step if rank else lambda: module(x, target=y))
            for name, value in pipe.state_dict().items():
                torch.testing.assert_close(value, other.state_dict()[name])
    """
    for printed in told(tmp_path, body):
        assert printed.count("there are no gradients") == 2
        assert printed.count("the ranks do not make the same calls") == 2
