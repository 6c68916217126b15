"""A rank that is killed in an instruction, whichever op it has: all others end, and name it."""

import functools
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_params import slow_but
from torch import Tensor, nn
from whole_batch_losses import LOSSES, Towers
from worker_processes import new_store, start_ranks

import pipec
from pipec import ops
from pipec.errors import TransportError
from pipec.hardware.devices import DEVICES, HostCost
from pipec.ir import Instruction, Op
from pipec.runtime.step.linker import Linker

TIMEOUT = 240.0
SGD = functools.partial(torch.optim.SGD, lr=0.01)


@dataclass(frozen=True)
class Case:
    """A pipeline of two ranks, and a batch for it. ``ops`` are those in which a rank of it is killed."""

    ops: tuple[Op, ...]
    compiled: Callable[[], pipec.Pipeline]
    args: tuple[Tensor, ...]
    target: Tensor | None = None


def mlp(norm: type[nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    norms = [norm(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *norms, *(x for _ in "123" for x in (nn.Tanh(), nn.Linear(8, 8))))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 512), nn.GELU(), nn.Linear(512, 6)) for _ in "1234"))


def joined(x: Tensor, y: Tensor) -> Tensor:
    """A loss with a gathering, its gradient, and a sum over replicas."""
    logits = x @ ops.all_gather(x.tanh()).T
    return logits.logsumexp(1).mean() + (x.square().sum(1) * y).sum() / ops.all_reduce(y.sum())


def compiled(model: Callable[[], nn.Module] = mlp, loss_fn: Any = F.cross_entropy, **options: Any) -> Any:
    return functools.partial(_compiled, model, loss_fn, options)


def _compiled(model: Callable[[], nn.Module], loss_fn: Any, options: dict[str, Any]) -> pipec.Pipeline:
    return pipec.compile(model(), 2, loss_fn=loss_fn, timeout=TIMEOUT, **{"microbatches": 4} | options)


X, CLASSES = torch.ones(8, 6), torch.arange(8) % 3
PADDED = torch.tensor([0, -100, 1, 2])

CASES = {
    "1f1b": Case(
        (Op.RECV, Op.WAIT_RECV, Op.SEND, Op.FORWARD, Op.BACKWARD, Op.ACCUMULATE, Op.FREE),
        compiled(),
        (X,),
        CLASSES,
    ),
    "zb-v": Case((Op.MOVE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), compiled(schedule="zb-v"), (X,), CLASSES),
    "recompute": Case(
        (Op.RECOMPUTE, Op.PRECOMPUTE), compiled(recompute="full", precision="bf16-mixed"), (X,), CLASSES
    ),
    "offload": Case(
        (Op.OFFLOAD, Op.WAIT_OFFLOAD, Op.PREFETCH, Op.WAIT_PREFETCH),
        compiled(
            wide,
            F.mse_loss,
            schedule="gpipe",
            microbatches=8,
            recompute="none",
            offload="activations",
            memory_limit="480kB",
            costs=replace(DEVICES["cpu"], host=HostCost()),
        ),
        (torch.ones(64, 6),),
        torch.ones(64, 6),
    ),
    "sharded": Case(
        (
            *(Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD, Op.AVERAGE_BUFFERS, Op.WAIT_AVERAGE_BUFFERS),
            *(Op.UNSHARD, Op.WAIT_UNSHARD, Op.RESHARD, Op.GRAD_NORM, Op.CHECK, Op.UPDATE),
        ),
        compiled(
            functools.partial(mlp, nn.BatchNorm1d),
            stages=1,
            optimizer=SGD,
            shard="parameters",
            clip_grad_norm=1.0,
            on_nan="skip",
        ),
        (X,),
        CLASSES,
    ),
    "weights on the host": Case(
        (Op.LOAD, Op.WAIT_LOAD, Op.STORE, Op.WAIT_STORE, Op.HOST_UPDATE),
        compiled(optimizer=SGD, offload="weights"),
        (X,),
        CLASSES,
    ),
    "local batch": Case(
        (Op.SUM_COUNTS, Op.WAIT_SUM_COUNTS), compiled(stages=1, batch="local"), (X[:4],), PADDED
    ),
    "tail": Case(
        (Op.GATHER_ROWS, Op.WAIT_GATHER_ROWS, Op.TAIL),
        compiled(lambda: Towers(LOSSES["info_nce"]), None, stages=1, batched={"x": 0, "y": 0}),
        (torch.rand(12, 6), torch.rand(12, 6)),
    ),
    "model collectives": Case(
        (
            *(Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER),
            *(Op.WAIT_ALL_REDUCE, Op.WAIT_ALL_GATHER, Op.WAIT_REDUCE_SCATTER),
        ),
        compiled(functools.partial(mlp, nn.SyncBatchNorm), joined, stages=1, microbatches=2),
        (X,),
        torch.ones(8),
    ),
    "stream": Case(
        (Op.PAUSE, Op.STASH, Op.STAGE_NORM),
        compiled(schedule="pipedream", microbatches=None, optimizer=SGD, clip_grad_norm=1.0),
        (X,),
        CLASSES,
    ),
}
OPS = {op: name for name, case in CASES.items() for op in case.ops}


def test_every_op_has_its_case() -> None:
    assert OPS.keys() == {*Op}


@pytest.mark.parametrize("op", slow_but(Op, Op.FORWARD, Op.REDUCE_GRAD))
def test_a_rank_that_is_killed_in_an_instruction_is_named_by_the_other(op: Op, tmp_path: Path) -> None:
    store = new_store()
    ranks = start_ranks(live, [(op, tmp_path)] * 2, tmp_path, store.port)
    try:
        for process in ranks:
            process.join(200)
        codes = [process.exitcode for process in ranks]
        errors = [path.read_text() for path in tmp_path.glob("error_*")]
        assert sorted(codes, key=str) == [-signal.SIGKILL, 0], (codes, errors)
        victim = codes.index(-signal.SIGKILL)
        said = (tmp_path / f"said_{1 - victim}").read_text()
        assert re.search(rf"rank {victim}\b.*(died|ended)", said), said
    finally:
        for process in ranks:
            process.kill()


def live(op: Op, scratch: Path) -> None:
    """One rank, which steps until it is killed, or writes the error that it sees."""
    case, rank = CASES[OPS[op]], int(os.environ["RANK"])
    kwargs = {} if case.target is None else {"target": case.target}
    pipe, armed = case.compiled(), list[bool]()
    wrap_actions(op, armed, scratch)
    pipe.step(*case.args, **kwargs)
    programs = pipe.plan.programs
    victim = max(each.rank for each in programs if any(x.op is op for x in each.instructions))
    armed += [True] * (rank == victim)
    try:
        while True:
            pipe.step(*case.args, **kwargs)
    except TransportError as error:
        (scratch / f"said_{rank}").write_text(str(error))


def wrap_actions(op: Op, armed: list[bool], scratch: Path) -> None:
    """Let a rank that is armed be killed when it comes to an instruction with this op."""
    link = Linker.link

    def linking(self: Linker, instruction: Instruction) -> Callable[[], None]:
        action = link(self, instruction)

        def act() -> None:
            if armed:
                os.kill(os.getpid(), signal.SIGKILL)
            action()

        return act if instruction.op is op else action

    Linker.link = linking  # type: ignore[method-assign]
