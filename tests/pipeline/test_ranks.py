"""Ranks that are processes do what one process does, or refuse alike; each has its part of the model.

Every script begins with ``SCRIPT``. Most are rows of a table: the same lines alone and on ranks, or errors.
"""

import re
import textwrap
from pathlib import Path

import pytest
from worker_processes import run_lines

pytestmark = pytest.mark.slow

SCRIPT = """
import copy, functools, gc, logging, os, sys, time, weakref
from pathlib import Path
import torch, pipec
import torch.nn.functional as F
from torch import nn
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
x, y = torch.randn(8, 6), torch.randn(8, 3)

def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

def mse(output, target):
    return nn.functional.mse_loss(output, target)

def compiled(net, loss_fn=mse, **options):
    options = {"devices": 2, "microbatches": 2, "timeout": 240.0} | options
    return pipec.compile(net, loss_fn=loss_fn, **options)

def attempt(call):
    try:
        call()
    except pipec.PipecError as error:
        print(f"{type(error).__name__}: {error}")

def refused(call, word, kind=pipec.InputError):
    try:
        call()
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError(word)

waited, reports = Path(__file__).with_name("waited"), []

def note(record):
    reports.append(record.getMessage())
    if "waited 80 s" in reports[-1]:
        waited.touch()

handler = logging.Handler()
handler.emit = note
logging.getLogger("pipec").addHandler(handler)
"""


def told(tmp_path: Path, body: str, num_ranks: int = 2) -> list[list[str]]:
    """The lines of each rank that runs the script; with ``num_ranks`` 0, of one process for all."""
    return run_lines(SCRIPT + textwrap.dedent(body), num_ranks, tmp_path)


@pytest.mark.parametrize("outputs", [False, "differentiable"])
def test_torchs_clipping_takes_the_norm_of_all_stages_once(outputs: bool | str, tmp_path: Path) -> None:
    """Two replicas of two stages, behind two backwards of a module."""
    body = f"""
    pipe, plain = compiled(model(), devices=4, replicas=2), model()
    module = pipe.as_module({outputs!r})
    for _ in range(2):
        loss = mse(module(x), y) if {outputs!r} else module(x, target=y)
        for each in (loss, mse(plain(x), y)):
            (each / 2).backward()
    norms = (nn.utils.clip_grad_norm_(net.parameters(), 0.1) for net in (pipe, plain))
    torch.testing.assert_close(*norms)
    own = {{name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}}
    assert 0 < len(own) < 6
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
    print("right")
    """
    assert told(tmp_path, body, 4) == [["right"]] * 4


NET = """
class Net(nn.Sequential):
    scale = 1.0
    def forward(self, x):
        return super().forward(x) * self.scale

class Loss:
    weight = 1.0
    def __call__(self, output, target):
        return self.weight * (output - target).square().mean()

torch.manual_seed(1)
net = Net(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
loss_fn = Loss()
pipe = compiled(net, loss_fn)

def step(what):
    pipe.zero_grad()
    loss = pipe.step(x, target=y)
    print(what, float(loss).hex(), f"{float(pipe.clip_grad_norm_(1e9)):.6f}")
"""

LENGTHS = """
class Any(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.5)
        self.register_buffer("causal", torch.ones(32, 32).tril())

    def forward(self, x, temperature=1.0):
        length = x.shape[1]
        hidden = self.causal[:length, :length] @ self.drop(self.first(x)) / temperature
        return self.last(hidden + length % 2)

pipe = compiled(Any())

def batch(length, rows=6):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(rows, length, width, generator=generator) for width in (6, 3)]

def step(length, **kwargs):
    x, y = batch(length)
    pipe.zero_grad()
    loss, norm = pipe.step(x, target=y, **kwargs), pipe.clip_grad_norm_(1e9)
    print(length, kwargs, float(loss).hex(), f"{float(norm):.6f}", tuple(pipe.plan.planned_sizes.items()))
    print("output", length, pipe(x, **kwargs).shape, float(pipe.eval_step(x, target=y, **kwargs)).hex())
"""

ALIKE = {
    "weights and a batch of rank 0": """
        pipe = compiled(model(rank), batch="rank0")
        for step in range(2):
            loss = pipe.step(x + rank, target=y) if step == 0 or rank == 0 else pipe.step()
            print(float(loss).hex())
        print(float(pipe(x + rank).sum()).hex())
        print({name: p.sum().item() for name, p in sorted(pipe.full_state_dict(True).items())})
        differed = [line for line in reports if "tensors of rank 1 differed, and start with rank 0's" in line]
        assert len(differed) == (size > 1 and rank == 0), reports
        """,
    "changes between steps": NET
    + textwrap.dedent("""
        step("first")
        loss_fn.weight = 3.0
        step("loss")
        net.scale = 0.5
        step("attribute")
        with torch.autocast("cpu", torch.bfloat16):
            step("autocast")
        torch.manual_seed(5)
        step("seeded")
        state = torch.get_rng_state()
        step("next")
        torch.set_rng_state(state)
        step("next again")
        for module in pipe.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        step("dropout")
        average = copy.deepcopy(pipe)
        step("after the copy")
        torch.manual_seed(5)
        print("copy", float(average.eval_step(x, target=y)).hex())
        pipe.eval()
        step("eval")
        print({n: f"{float(value.sum()):.6f}" for n, value in sorted(pipe.full_state_dict(True).items())})
        """),
    "any length and number": LENGTHS
    + textwrap.dedent("""
        for length in (4, 6, 10, 5, 1):
            step(length)
        for length, temperature in ((4, 1.0), (6, 0.5), (8, 0.7)):
            step(length, temperature=temperature)
        """),
    "a buffer that several ranks read, and others in evaluation": """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.rand(8))
                self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

            def forward(self, x, goal):
                for number, layer in enumerate(self.layers):
                    x = layer(x).tanh()
                    if number == 3 or not self.training:
                        x = x * self.scale
                return mse(x, goal)

        torch.manual_seed(0)
        net, inputs = Scaled(), torch.randn(8, 8)
        pipe = compiled(net, None)
        losses = [pipe.step(inputs, goal=inputs)]
        losses.append(pipe.eval().eval_step(inputs, goal=inputs))
        everywhere = compiled(Scaled().eval(), None)
        losses.append(everywhere.step(inputs, goal=inputs))
        everywhere.load_state_dict({"scale": torch.ones(8)}, strict=False)
        losses.append(everywhere.step(inputs, goal=inputs))
        print(*losses, everywhere.full_state_dict(all_ranks=True)["scale"].tolist(), sep="\\n")
        """,
    "a model on meta that gets memory": """
        with torch.device("meta"):
            net = model()
        pipe = compiled(net).prepare(x, target=y)
        pipe.to_empty(device="cpu")
        pipe.load_state_dict(model().state_dict())
        assert [*map(id, pipe.parameters())] == [*map(id, net.parameters())]
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            print(float(pipe.step(x, target=y)).hex())
            optimizer.step()
            optimizer.zero_grad()
        """,
    "two pipelines that share modules on the same ranks": """
        trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        deep = (nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        models = nn.ModuleList([nn.Sequential(trunk, nn.Linear(8, 5)), nn.Sequential(trunk, *deep)]).double()
        eager, x = copy.deepcopy(models), torch.randn(16, 6).double()
        targets = torch.randint(5, (16,)), torch.randint(3, (16,))
        pipes = [compiled(each, F.cross_entropy, microbatches=4) for each in models]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (models, eager)]
        for _ in range(3):
            losses = [pipe.step(x, target=target) for pipe, target in zip(pipes, targets)]
            expected = [F.cross_entropy(each(x), target) for each, target in zip(eager, targets)]
            sum(expected).backward()
            print(all(abs(float(a) - float(b.detach())) < 1e-12 for a, b in zip(losses, expected)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        """,
    "clipping by norms of the whole model": """
        pipe, plain = compiled(model()), model()
        for norm_type in (2.0, 1.0, float("inf")):
            pipe.zero_grad()
            plain.zero_grad()
            pipe.step(x, target=y)
            for rows in (slice(0, 4), slice(4, 8)):
                (0.5 * mse(plain(x[rows]), y[rows])).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
            print(torch.equal(pipe.clip_grad_norm_(0.1, norm_type), expected))
            gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
            assert len(gradients) >= 2
            assert all(torch.equal(gradients[name], plain.get_parameter(name).grad) for name in gradients)
        """,
    "weights that a script swaps while replicas keep shares": """
        adamw, x, y = functools.partial(torch.optim.AdamW, lr=1e-2), x.double(), y.double()
        for shard in ("optimizer", "gradients"):
            own, plain = model().double(), model().double()
            pipe = compiled(own, stages=1, shard=shard, optimizer=adamw)
            optimizer = adamw(plain.parameters())

            def step():
                loss, expected = pipe.step(x, target=y), mse(plain(x), y)
                expected.backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)
                for mine, other in zip(own.parameters(), plain.parameters()):
                    assert mine.grad is None
                    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)

            step()
            held = [[each.data for each in net.parameters()] for net in (own, plain)]
            before = copy.deepcopy(held[0])
            for net in (own, plain):
                for each in net.parameters():
                    each.data = 2 * each.data
            pipe.eval_step(x, target=y)
            step()
            assert all(map(torch.equal, held[0], before))
            for net, tensors in zip((own, plain), held):
                for each, tensor in zip(net.parameters(), tensors):
                    each.data = tensor
            step()
            print(shard, "swapped")
            if size == 1:  # where replicas share parameters and gradients
                continue
            with pipe.accumulate():
                pipe.step(x, target=y)
            mse(plain(x), y).backward()
            shown = own[0].weight.grad
            assert shown.isnan().all() and shown.untyped_storage().nbytes() == shown.element_size()
            refused(lambda: nn.utils.clip_grad_norm_(own.parameters(), 1.0), "clone", RuntimeError)
            refused(lambda: pipe.save_checkpoint("nowhere"), "gradients have been accumulated")
            step()
            before = own[2].weight.data
            own[2].weight.data = before.t()
            refused(lambda: pipe.step(x, target=y), "2.weight has strides")
            own[2].weight.data = before
            step()
        print("to the end")
        """,
    "values that are read as they lie in memory": """
        from zoo.layers import Apply

        def rows(x):
            return x.t().tanh().as_strided((x.shape[0], 4), (4, 1)).tanh()

        def beyond(x):
            return x.tanh()[1:].as_strided((x.shape[0], 4), (4, 1), 0).tanh()

        def from_start(x):
            return x.as_strided((x.shape[0], 4), (4, 1), 0)

        for read, position in ((rows, 3), (beyond, 3), (from_start, 0)):
            torch.manual_seed(0)
            net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), torch.randn(8, 4)
            net.insert(position, Apply(read))
            whole = float(net(x).square().mean())
            squares = lambda output, target: output.square().mean()
            pipe = compiled(net, squares, devices=4, microbatches=1 + (position == 0))
            loss = float(pipe.step(x, target=x))
            assert abs(loss - whole) < 1e-7 * whole
            print(loss.hex(), float(pipe.clip_grad_norm_(1e9)))
        """,
}
"""By what is tried: a script."""


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_do_what_one_process_does(name: str, tmp_path: Path) -> None:
    body, num_ranks = ALIKE[name], 4 if "devices=4" in ALIKE[name] else 2
    (alone,) = told(tmp_path, body, 0)
    assert len(alone) >= 3
    assert "False" not in alone
    assert told(tmp_path, body, num_ranks) == [alone] * num_ranks


DIFFERENT = {
    "batches": (
        """
        net = model()
        pipe = compiled(net)
        pipe.step(x, target=y)
        pipe.zero_grad()
        before = {name: x.clone() for name, x in pipe.local_state_dict().items()}
        attempt(lambda: pipe.step(x + rank, target=y))
        attempt(lambda: pipe.step(x[: 8 - 4 * rank], target=y[: 8 - 4 * rank]))
        attempt(lambda: pipe.step(x.double() if rank else x, target=y))
        attempt(lambda: pipe.step(x, **({} if rank else {"target": y})))
        attempt(lambda: pipe.step(x, target=y) if rank else pipe.eval_step(x, target=y))
        assert all(p.grad is None for p in pipe.parameters())
        assert all(torch.equal(x, before[name]) for name, x in pipe.local_state_dict().items())
        print("loss", float(pipe.step(x, target=y)) > 0)
        attempt(lambda: pipe.clip_grad_norm_(0.1 + rank))
        """,
        r"the ranks passed different batches to step:.*args\[0\]: float32\[8, 6\], values .* on rank 0; float"
        r".*InputError: .*rows: 8 on rank 0; 4 on rank 1.*InputError.*float64\[8, 6\]"
        r".*InputError: step cannot use the arguments of rank 1:.*target is missing"
        r".*InputError: the ranks do not make the same calls:.*eval_step, after 1 steps on.*loss True"
        r".*call: clip_grad_norm_\(0.1, 2.0\), after \d steps on rank 0; clip_grad_norm_\(1.1, 2.0\)",
    ),
    "arguments": (
        """
        losses = [mse, lambda output, target: (output - target).abs().mean()]
        attempt(lambda: compiled(model(), microbatches=2 + rank, schedule=["1f1b", "gpipe"][rank]))
        attempt(lambda: compiled(model(), losses[rank]))
        attempt(lambda: compiled(model(), recompute=["full", "none"][rank], memory_limit=f"{rank + 1}GB"))
        attempt(lambda: compiled(nn.Linear(6, 3 + rank)))
        attempt(lambda: compiled(model(), optimizer=functools.partial(torch.optim.SGD, lr=1.0 + rank)))
        device = torch.device("cuda", rank)
        compiled(model(), lambda output, target: (output - target).to(device).square().mean())
        """,
        r"schedule: '1f1b' on rank 0; 'gpipe'.*microbatches: 2 on rank 0; 3 on rank 1"
        r".*loss_fn: <function mse> on rank 0; <function <lambda>> on rank 1.*recompute: 'full' on rank 0; "
        r"'none'.*memory_limit: '1GB' on rank 0; '2GB'.*weight: float32\[3, 6\], trained on rank 0; "
        r".*optimizer: [^\n]*1.0[^\n]* on rank 0; [^\n]*2.0",
    ),
    "values that a loss reads": (
        """
        pipe = compiled(model(), lambda output, target: (output - target).abs().pow(2 + rank).mean())
        assert abs(pipe.step(x, target=y) - (model()(x) - y).square().mean()).item() < 1e-6, "rank 0's"
        attempt(lambda: pipe.step(x, target=y))
        """,
        "changed values: none on rank 0; __main__.rank changed from 0 to 1 on rank 1",
    ),
    "changes": (
        NET
        + textwrap.dedent("""
        step("first")
        if rank == 1:
            loss_fn.weight = 3.0
        attempt(lambda: step("loss"))
        loss_fn.weight = 1.0
        if rank == 1:
            net[1].p = 0.25
        attempt(lambda: step("attribute"))
        net[1].p = 0.5
        if rank == 0:
            net[3].register_forward_hook(lambda module, inputs, output: 2 * output)
        attempt(lambda: step("hook"))
        net[3]._forward_hooks.clear()
        net[0].weight.requires_grad_(rank == 0)
        attempt(lambda: step("frozen"))
        net[0].weight.requires_grad_(True)
        with torch.autocast("cpu", enabled=rank == 1):
            attempt(lambda: step("autocast"))
        torch.use_deterministic_algorithms(rank == 1)
        attempt(lambda: step("deterministic"))
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("high" if rank == 1 else "highest")
        attempt(lambda: step("precision"))
        torch.set_float32_matmul_precision("highest")
        if rank == 1:
            net[4] = nn.Linear(8, 3)
        attempt(lambda: step("module"))
        """),
        r"loss_fn.weight changed from 1.0 to 3.0 on rank 1.*model.1.p changed from 0.5 to 0.25 on rank 1"
        r".*hooks of the model: .*frozen parameters: 'none' on rank 0; '0.weight'.*autocast: none on rank 0; "
        r".*deterministic algorithms: False on rank 0; True.*precision on CPUs: ieee on rank 0; tf32 on rank"
        r".*replaced: none on rank 0; 4.weight, 4.bias on rank 1",
    ),
    "what is compiled still": (
        LENGTHS
        + textwrap.dedent("""
        from pipec.compiler import compile_cache
        compile_cache.MAX_SIGNATURES, compile_cache.MAX_PROGRAMS = 1, 2
        alive = []
        for length, rows in ((4, 6), (6, 6), (6, 4), (8, 8), (6, 4), (6, 6)):
            x, y = batch(length, rows)
            loss = pipe.step(x, target=y)
            alive.append(weakref.ref(pipe._executions.execution(pipe._artifact)))
            gc.collect()
            left = len(pipe._executions._linked)
            print(float(loss).hex(), [execution() is not None for execution in alive], left)
        """),
        r"\[False, False, True, False, True, True\] 2$",
    ),
    "ranks of a module that two pipelines have": (
        """
        shared = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        large = [nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 6)) for _ in range(2)]
        first, second = (compiled(nn.Sequential(*each)) for each in ((shared, large[0]), (large[1], shared)))
        first.step(x, target=x)
        attempt(lambda: second.step(x, target=x))
        """,
        "InputError: 1.0.weight belongs to another pipeline, too, whose stages have it on rank 0",
    ),
    "backwards of a module": (
        """
        net = model()
        net.generate = lambda: None
        module = compiled(net).as_module()
        for factors in ((0.5, None), (1.0, 2.0)):
            loss = module(x, target=y)
            if factors[rank]:
                (factors[rank] * loss).backward()
            attempt(lambda: module(x, target=y))
        module(x, target=y).backward()
        print("norm", module.clip_grad_norm_(1e9) > 0)
        attempt(module.generate)
        """,
        r"backward of step 1: times 0.5 on rank 0; absent on rank 1.*no `if rank == ...` keeps one away"
        r".*backward of step 2: times 1 on rank 0; times 2 on rank 1.*norm tensor.True.*gather_into\(model\)",
    ),
    "losses of a script": (
        """
        module = compiled(model(), None).as_module()

        def skip():
            output = module(x)
            if rank == 0:
                output.sum().backward()
            module(x)

        one, two = module(x), module(2 * x)
        attempt(lambda: (one if rank else two).sum().backward())
        attempt(lambda: (module(x).sum() * (1 + rank)).backward())
        attempt(skip)
        module(x).sum().backward()
        print("trains on")
        """,
        "same calls.*other losses.*same calls.*trains on$",
    ),
    "lists of microbatches": (
        """
        from given_microbatches import Rows, rows
        torch.set_default_dtype(torch.float64)

        def pipeline(**options):
            torch.manual_seed(0)
            return compiled(Rows(), microbatches=None, **options)

        pipe = pipeline()
        one, two, three = (rows(number) for number in range(3))
        attempt(lambda: pipe.step(microbatches=[one, two, three][: 3 - rank]))
        attempt(lambda: pipe.step(microbatches=[one, two] if rank else [two, one]))
        attempt(lambda: pipe.step(microbatches=[one, two], weights=[1.0, 2.0 + rank]))
        attempt(lambda: pipe.step(microbatches=[one] if rank else []))
        loss = pipe.step(microbatches=[one, two, three], weights="sum").item()
        given = {"microbatches": [one, two, three], "weights": "sum"}
        print(loss == pipeline(batch="rank0").step(**({} if rank else given)).item())
        """,
        r"microbatches: 3 on rank 0; 2 on rank 1.*microbatches\[0\] args\[0\]: float64\["
        r".*weights: \(1.0, 2.0\) on rank 0; \(1.0, 3.0\) on rank 1.*InputError: .*True$",
    ),
}
"""By what differs between the ranks: a script, and what it prints on each."""


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_refused_alike(what: str, tmp_path: Path) -> None:
    """On every rank, before anything is sent or changed: where it goes on, all is well."""
    body, expected = DIFFERENT[what]
    first, second = told(tmp_path, body)
    assert first == second
    assert re.search(expected, "\n".join(first), re.DOTALL), "\n".join(first)


# a rank that comes late: it waits until the others have waited for longer than the timeout

LATE = """
def save():
    while not waited.exists():
        time.sleep(0.1)
"""

ON_TWO_HOSTS = """
import pipec.runtime.messages.shared_memory
pipec.runtime.messages.shared_memory._host = lambda: ""  # as on hosts, which share no memory
"""


def test_a_rank_that_saves_is_named_and_waited_for_beyond_the_timeout(tmp_path: Path) -> None:
    """Once between two steps; and once an exception has led it out of its loop, into the next call."""
    body = """
    pipe = compiled(model(), timeout=60.0)
    try:
        for number in range(3):
            pipe.step(x, target=y)
            if rank == 1 and number == 1:
                raise OSError("the disk is full")
    except OSError:
        save()
        pipe.step(x, target=y)
    print(pipe.num_steps)
    print(*reports, sep="\\n")
    """
    first, second = told(tmp_path, LATE + textwrap.dedent(body))
    assert first[0] == second[0] == "3"
    (late, *_) = [line for line in first if "has not arrived" in line]
    assert re.search(
        r"rank 1 has not arrived: it is alive and .* at script\.py:\d+ in save, and its last", late
    )


def test_a_rank_that_saves_between_losses_of_a_stream_is_waited_for(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 itself."""
    body = """
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    options = {"devices": 3, "microbatches": 4, "optimizer": sgd, "timeout": 60.0}
    pipe = compiled(model(), schedule="pipedream-2bw", **options)
    for number, loss in enumerate(pipe.stream(((x,), y) for _ in range(6))):
        if rank == 2 and number == 2:
            save()
    print(number, pipe.num_steps)
    """
    assert told(tmp_path, ON_TWO_HOSTS + LATE + textwrap.dedent(body), 3) == [["5 6"]] * 3


# what each rank has


def test_an_artifact_has_the_tensors_of_both_ranks(tmp_path: Path) -> None:
    """One process loads it, and has the loss that they have next."""
    body = """
    place = Path(__file__).with_name("artifact")
    pipe = compiled(model())
    pipe.step(x, target=y)
    torch.optim.SGD(pipe.parameters(), 0.1).step()
    pipe.save(place, tensors=True)
    print(float(pipe.step(x, target=y)).hex())
    """
    loaded = """
    pipe = pipec.load(Path(__file__).with_name("artifact"))
    print(float(pipe.step(x, target=y)).hex())
    """
    first, second = told(tmp_path, body)
    assert told(tmp_path, loaded, 0) == [first] == [second]


def test_rank_0_gets_the_state_of_the_whole_model_and_each_rank_has_its_part(tmp_path: Path) -> None:
    body = """
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(*model())
            self[1].register_buffer("passing", torch.ones(()), persistent=False)
            self[3].register_buffer("kept", torch.ones(()))
        def forward(self, x):
            return super().forward(x * self[1].passing) * self[3].kept

    pipe, plain = compiled(Net()), Net()
    pipe.step(x, target=y)
    whole, own, every = pipe.state_dict(), pipe.local_state_dict(), plain.state_dict()
    assert whole.keys() == (set() if rank else every.keys())
    assert all(torch.equal(value, every[name]) for name, value in (whole | own).items())
    print(*own)
    prefixed = {"other": 1}
    pipe.state_dict(destination=prefixed, prefix="pipe.")
    names = [f"pipe.{name}" for name in every]
    assert sorted(prefixed) == sorted(["other", *names])  # on rank 1 some are absent, which nobody can write
    pipe.load_state_dict({name: 2 * value for name, value in whole.items()})  # rank 0's, on every rank
    doubled = pipe.local_state_dict()
    assert all(torch.equal(value, 2 * every[name]) for name, value in doubled.items())
    short = {name: value.view(-1)[:1] for name, value in whole.items()}
    refused(lambda: pipe.load_state_dict(short), "0.weight is [1] in the state and [8, 6] in the model")
    strange = {"strange": torch.ones(()), **whole} if whole else whole
    refused(lambda: pipe.load_state_dict(strange), "Unexpected key(s) in state_dict", RuntimeError)
    pipe.load_state_dict(pipe.state_dict())
    assert all(torch.equal(value, doubled[name]) for name, value in pipe.local_state_dict().items())
    pipe.load_state_dict(every)
    pipe.load_state_dict(own)
    copy = Net()
    copy[0].weight.data.zero_()
    pipe.gather_into(copy, all_ranks=True)
    assert all(torch.equal(value, every[name]) for name, value in copy.state_dict().items())
    assert sorted(nn.ModuleDict({"pipe": pipe}).state_dict()) == sorted(names)
    """
    (first,), (second,) = told(tmp_path, body)
    names = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
    assert sorted(first.split() + second.split()) == sorted([*names, "3.kept"])


def test_where_every_rank_holds_the_model_none_waits_for_others(tmp_path: Path) -> None:
    """Replicas of one stage: what a script of data parallelism does on rank 0 alone is right."""
    body = """
    net, plain = model(), model()
    pipe = compiled(net, stages=1)
    pipe.step(x, target=y)
    mse(plain(x), y).backward()
    made, expected = torch.optim.Adam(net.parameters()), torch.optim.Adam(plain.parameters())
    if rank == 0:
        found = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        norm = torch.nn.utils.get_total_norm([each.grad for each in plain.parameters()])
        assert torch.allclose(found, norm)
    made.step()
    expected.step()
    if rank == 0:
        assert made.state_dict()["state"].keys() == expected.state_dict()["state"].keys()
        assert pipe.state_dict().keys() == plain.state_dict().keys()
    net(x)
    print("right", float(pipe.step(x, target=y)) > 0)
    """
    assert told(tmp_path, body) == [["right True"]] * 2


def test_nothing_travels_on_the_users_own_group_and_other_ranks_capture_nothing(tmp_path: Path) -> None:
    """A script may be in a collective there. What rank 0 sends loads nothing that captures, either."""
    body = """
    import torch.distributed as dist

    def refused(name, real, *args, group=None, **options):
        assert group is not None, name
        return real(*args, group=group, **options)

    dist.init_process_group("gloo")
    for name in ("broadcast", "all_reduce", "all_gather", "barrier", "send", "recv", "isend", "irecv"):
        setattr(dist, name, functools.partial(refused, name, getattr(dist, name)))
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    pipe = compiled(net)
    pipe.step(x, target=y)
    net[1].p = 0.2
    pipe.step(x, target=y)
    pipe.eval()(x)
    capturing = "pipec.torch_compat.dynamo_front_end", "pipec.compiler.compile"
    print([name for name in capturing if name in sys.modules])
    """
    first, second = told(tmp_path, body)
    assert first == ["['pipec.torch_compat.dynamo_front_end', 'pipec.compiler.compile']"]
    assert second == ["[]"]
