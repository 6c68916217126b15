"""Pipelines on the ranks of process groups and meshes: several in one job, as if each were alone."""

import os
import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from worker_processes import free_port, printing, run_lines, run_main, start_ranks

from tests.pipeline.test_ranks import SCRIPT

pytestmark = pytest.mark.slow

OWN = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if "RANK" in os.environ:
    dist.init_process_group("gloo")
FOLDER, ADAMW = Path(__file__).parent, functools.partial(torch.optim.AdamW, lr=1e-2)

def wide():
    layers = (nn.Linear(6, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3))
    return nn.Sequential(*layers)

def deep():
    return nn.Sequential(nn.Linear(6, 6), *[each for _ in range(3) for each in (nn.GELU(), nn.Linear(6, 6))])

def compiled(make, seed=0, **options):
    torch.manual_seed(seed)
    options = {"microbatches": 4, "timeout": 240.0, "optimizer": ADAMW} | options
    return pipec.compile(make(), loss_fn=F.cross_entropy, **options)

def batch(step, rows=slice(None)):
    drawn = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=drawn), torch.randint(3, (8,), generator=drawn)
    return x[rows], y[rows]

def train(pipe, steps, rows=slice(None)):
    for step in steps:
        x, y = batch(step, rows)
        torch.manual_seed(step)  # of dropout
        print("loss", float(pipe.step(x, target=y)).hex(), flush=True)

def evaluate(pipe):
    pipe.eval()
    print("mean", float(pipe(batch(7)[0]).mean()).hex())
    assert bool(pipe.state_dict()) == (not dist.is_initialized() or pipe.ranks.world.rank == 0)
    print("state", sum(float(x.sum()) for x in pipe.full_state_dict(all_ranks=True).values()).hex())
"""


Told = Callable[[int], Callable[[str], list[list[str]]]]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """``told(4)(body)`` gives the lines of each of four ranks, ``told(0)(body)`` of one process for all."""
    return lambda num_ranks: lambda body: run_lines(SCRIPT + OWN + textwrap.dedent(body), num_ranks, tmp_path)


def test_pipelines_on_equal_ranks_take_turns(told: Told) -> None:
    """One of all ranks and of a group of all, one of a part, and one of each rank alone."""
    ranks = told(3)("""
        part, every = dist.new_group([2, 1]), dist.new_group([0, 1, 2])
        policy, reward = compiled(wide), compiled(wide, 1, group=every)
        small = compiled(deep, 2, group=part) if rank else None
        own = [dist.new_group([rank]) for rank in range(3)][rank]
        single = compiled(deep, 3 + rank, group=own)
        for step in range(3):
            for pipe in filter(None, (policy, single, small, reward)):
                train(pipe, [step])
        if rank:
            small.save_checkpoint(FOLDER / "small")
            train(small, [3])
            small.load_checkpoint(FOLDER / "small")
            train(small, [3])
        policy.save_checkpoint(FOLDER / "policy")
        small = pipe = None  # frees its connections
        train(policy, [3])
        train(reward, [3])
        """)
    (alone,) = told(0)("""
        singles = ((deep, 3 + rank, 1) for rank in range(3))
        for make, seed, devices in ((wide, 0, 3), (wide, 1, 3), (deep, 2, 2), *singles):
            train(compiled(make, seed, devices=devices), range(4))
        for make, name in ((wide, "policy"), (deep, "small")):
            pipe = compiled(make, 9, devices=2)
            pipe.load_checkpoint(FOLDER / name)
            train(pipe, [3])
        """)
    policy, reward, small, *single = (alone[first : first + 4] for first in range(0, 24, 4))
    assert alone[24:] == [policy[3], small[3]], "what was saved"
    for rank, lines in enumerate(ranks):
        pipes = [policy, single[rank], *[small] * (rank > 0), reward]
        again = [small[3]] * 2 * (rank > 0)
        assert lines == [each[step] for step in range(3) for each in pipes] + [*again, policy[3], reward[3]]


def test_a_pipeline_that_is_freed_leaves_no_connection_behind(told: Told) -> None:
    """Whoever updates: gradients that are left to a script belong to parameters, which lead back to them."""
    ranks = told(2)("""
        import gc
        import weakref
        dist.barrier()
        before, freed = len(os.listdir("/proc/self/fd")), []
        for options in ({}, {"optimizer": None}):
            pipe = compiled(wide, group=dist.group.WORLD, replicas=2, **options)
            train(pipe, range(2))
            assert len(os.listdir("/proc/self/fd")) > before
            freed += [weakref.ref(pipe), weakref.ref(pipe.ranks.distributed)]
            del pipe
        gc.collect()
        print([each() for each in freed])
        deadline = time.monotonic() + 120
        while len(os.listdir("/proc/self/fd")) > before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        """)
    assert [lines[-1] for lines in ranks] == ["[None, None, None, None]"] * 2


@pytest.mark.parametrize("names", [("dp", "pp"), ("pp", "dp")])
def test_a_mesh_says_which_ranks_are_replicas(names: tuple[str, str], told: Told) -> None:
    ranks = told(4)(f"""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names={names})
        train(compiled(wide, group=mesh), range(3))
        pipe = compiled(wide, group=mesh, batch="local", microbatches=4)
        assert (pipe.num_replicas, pipe.replica) == (2, mesh.get_local_rank("dp"))
        train(pipe, range(3), slice(pipe.replica, None, 2))
        names = {{*pipe.local_state_dict()}}
        every = [None] * 4
        dist.all_gather_object(every, (mesh.get_local_rank("pp"), names))
        assert all((stage == mesh.get_local_rank("pp")) == (own == names) for stage, own in every)
        pipe, losses = compiled(wide, group=mesh, optimizer=None), []
        optimizer = ADAMW(pipe.parameters())
        for step in (0, 1, 2, 1, 2):
            if step == 1:
                meet = pipe.load_checkpoint if len(losses) > 1 else pipe.save_checkpoint
                meet(FOLDER / "own", optimizer=optimizer)
            x, y = batch(step)
            torch.manual_seed(step)
            losses.append(float(pipe.step(x, target=y)))
            optimizer.step()
            optimizer.zero_grad()
        assert losses[1:3] == losses[3:]
        """)
    alone = told(4)("""
        train(compiled(wide, replicas=2), range(3))
        pipe = compiled(wide, replicas=2, batch="local", microbatches=4)
        train(pipe, range(3), slice(pipe.replica, None, 2))
        """)
    assert ranks == alone


def test_an_artifact_runs_on_any_group(told: Told) -> None:
    (alone,) = told(0)("""
        pipe = compiled(wide, devices=2)
        pipe.prepare(batch(0)[0], target=batch(0)[1])
        pipe.eval()(batch(0)[0])
        pipe.train().save(FOLDER / "artifact", tensors=True)
        train(pipe, range(3))
        evaluate(pipe)
        """)
    ranks = told(4)("""
        groups = [dist.new_group(members) for members in ([1, 3], [0, 2])]
        pipe = pipec.load(FOLDER / "artifact", optimizer=ADAMW, timeout=240.0, group=groups[rank % 2 == 0])
        train(pipe, range(3))
        evaluate(pipe)
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        attempt(lambda: pipec.load(FOLDER / "artifact", optimizer=ADAMW, group=mesh["pp", "dp"]))
        """)
    for lines in ranks:
        assert lines[:-1] == alone
        assert lines[-1].startswith("InputError: the mesh has 2 replicas, but the artifact")


def test_what_is_no_group_of_this_process_is_refused_before_anything_is_sent(told: Told) -> None:
    ranks = told(4)("""
        group, mesh = dist.new_group([0, 1]), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        nameless, few = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2,))
        if rank > 1:
            attempt(lambda: compiled(wide, group=group))
            attempt(lambda: compiled(wide, group=few))
        attempt(lambda: compiled(wide, group=nameless))
        attempt(lambda: compiled(wide, group=mesh, stages=4))
        attempt(lambda: compiled(wide, group=mesh, replicas="auto"))
        attempt(lambda: compiled(wide, group=mesh["pp"], devices=4))
        attempt(lambda: compiled(wide, group="pp"))
        """)
    expected = [
        r"InputError: group is a mesh with the axes \(2, 2\); expected .* is named \"pp\"",
        r"InputError: the mesh has 2 replicas of 2 ranks, but stages is 4",
        r"InputError: the mesh has 2 replicas of 2 ranks, .* replicas is 'auto'",
        r"InputError: devices asks for 4 ranks, but 2 processes are in the group",
        r"InputError: group is 'pp'; expected a process group",
    ]
    outside = [r"InputError: this process, rank [23] of the job, is no member of the group"] * 2
    for rank, lines in enumerate(ranks):
        patterns = [*(outside if rank > 1 else []), *expected]
        assert len(lines) == len(patterns)
        assert all(re.match(pattern, line) for pattern, line in zip(patterns, lines, strict=True)), lines


def test_a_rank_in_a_call_of_another_pipeline_is_waited_for(told: Told) -> None:
    """As long as it takes: the timeout is for a rank that does not come back from a call of its own."""
    ranks = told(3)("""
        left, right = dist.new_group([0, 1]), dist.new_group([0, 2])
        short = compiled(wide, group=left, timeout=60.0) if rank < 2 else None
        long = compiled(deep, 1, group=right) if rank != 1 else None
        for pipe in filter(None, (short, long)):
            train(pipe, [0])
        if rank == 2:
            while not waited.exists():
                time.sleep(0.1)
        if long:
            train(long, [1])
        if short:
            train(short, [1])
        """)
    losses = [[line for line in lines if line.startswith("loss")] for lines in ranks]
    (first, second, third, fourth), left, right = losses
    assert (left, right) == ([first, fourth], [second, third])


FAILING = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("run", "pp"))
has_failed, pipe = FOLDER / "has failed", compiled(deep, 1, group=mesh["pp"])
train(pipe, range(2))
if rank == VICTIM:
    FAIL
if rank // 2 == VICTIM // 2:
    try:
        train(pipe, range(2, 4))
    except pipec.PipecError as error:
        print(type(error).__name__, " ".join(str(error).split()))
    has_failed.touch()
else:
    while not has_failed.exists():
        time.sleep(0.01)
    train(pipe, range(2, 5))
    evaluate(pipe)
    pipe.save_checkpoint(FOLDER / "other")
"""


@pytest.mark.parametrize(
    ("fail", "error"),
    [("sys.exit()", "its script ended"), ("os.kill(os.getpid(), 9)", "its process died")],
)
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_ends_is_an_error_of_its_own_pipeline_alone(
    fail: str, error: str, victim: int, told: Told, tmp_path: Path
) -> None:
    """Also if the process that has torch's store is killed."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + OWN + FAILING.replace("VICTIM", str(victim)).replace("FAIL", fail))
    printed = [tmp_path / f"printed_{rank}" for rank in range(4)]
    processes = start_ranks(printing, [(path, _live, script) for path in printed], tmp_path, free_port())
    try:
        for process in processes:
            process.join(200)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [
        [line for line in path.read_text().splitlines() if not line.startswith("pipec: ")] for path in printed
    ]
    assert codes == [-signal.SIGKILL if rank == victim and "kill" in fail else 0 for rank in range(4)], lines
    neighbour, others = victim ^ 1, [rank for rank in range(4) if rank // 2 != victim // 2]
    first = 2 * (victim // 2)
    named = rf"TransportError another rank failed.* rank {victim - first}: {error}.*"
    if first:
        named += rf"\(rank k is the k-th of the processes \({first}, {first + 1}\)\)"
    assert re.fullmatch(named, lines[neighbour][-1]), lines[neighbour]
    (alone,) = told(0)("""
        pipe = compiled(deep, 1, devices=2)
        train(pipe, range(5))
        evaluate(pipe)
        """)
    assert [lines[rank] for rank in others] == [alone, alone]


def _live(script: Path) -> None:
    """A rank without ``torchrun``, so that rank 0 has the store."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    run_main(script, [])
