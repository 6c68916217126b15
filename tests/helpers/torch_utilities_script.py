"""What utilities of torch and of libraries do with a pipeline, and with its model, over two processes.

``torch_utilities_script.py`` prints as JSON, for each utility, "right" if the result is the unsplit model's,
or what the error says. A rank that goes on without either prints "silent".
"""

import contextlib
import copy
import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_models
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.utils as utils
from accelerate import Accelerator
from torch import Tensor, nn, optim
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.optim import swa_utils

import pipec
from pipec.runtime.absent_tensors import is_absent

torch.manual_seed(0)
X, Y = torch.randn(8, 6), torch.randn(8, 3)
mse = nn.functional.mse_loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Trained:
    """A pipeline and the unsplit model, after a step of each, and a file that every rank may read."""

    def __init__(self, file: Path, steps: int = 1) -> None:
        self.net, self.plain, self.file = model(), model(), file
        self.pipe: Any = pipec.compile(self.net, devices=2, loss_fn=mse, microbatches=1, timeout=240.0)
        for _ in range(steps):
            self.pipe.step(X, target=Y)
            mse(self.plain(X), Y).backward()

    def same(self, pipe: Any = None, plain: nn.Module | None = None) -> bool:
        """Whether the whole state is the plain model's. Every rank calls this."""
        found = (pipe or self.pipe).full_state_dict(all_ranks=True)
        expected = (plain or self.plain).state_dict()
        return all(torch.allclose(found[name], value) for name, value in expected.items())

    def gradients(self) -> list[Tensor]:
        return [each.grad for each in self.net.parameters() if each.grad is not None]

    def absent(self) -> Tensor:
        return next(filter(is_absent, self.net.parameters()))


Case = Callable[[Trained], Any]


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected)


def clipped(t: Trained, of: str, clip: Callable[..., Any] = utils.clip_grad_norm_) -> bool:
    """Clips by the norm of the parameters, as the plain model does."""
    expected = utils.clip_grad_norm_(t.plain.parameters(), 0.1)
    found = clip(getattr(t, of).parameters(), 0.1)
    plain = dict(t.plain.named_parameters())
    own = [(p.grad, plain[name].grad) for name, p in t.net.named_parameters() if p.grad is not None]
    return close(found, expected) and all(close(*pair) for pair in own)


def layer_clipped(t: Trained) -> None:
    """Clips a layer whose gradients only rank 0 has."""
    utils.clip_grad_norm_(t.net[0].parameters(), 0.1)
    t.pipe.step(X, target=Y)


def averaged(t: Trained, **options: Any) -> bool:
    """Averages three updates, of the pipeline and of the plain model."""
    found, expected = (swa_utils.AveragedModel(each, **options) for each in (t.pipe, t.plain))
    for _ in range(3):
        for average, source, owner in ((found, t.pipe, t.net), (expected, t.plain, t.plain)):
            optim.SGD(owner.parameters(), 0.1).step()
            average.update_parameters(source)
    return t.same(found.module, expected.module)


def average_made_before(t: Trained, of: str) -> None:
    t = Trained(t.file, steps=0)
    average = swa_utils.AveragedModel(getattr(t, of))
    t.pipe.step(X, target=Y)
    average.update_parameters(getattr(t, of))


@torch.no_grad()
def changed(t: Trained, change: Callable[[nn.Module], object]) -> bool:
    """Changes both models by themselves."""
    change(t.net)
    change(t.plain)
    return t.same()


def value_clip(net: nn.Module) -> None:
    utils.clip_grad_value_(net.parameters(), 1e-3)
    optim.SGD(net.parameters(), 0.1).step()


def optimizer_state(t: Trained, prepare: Callable[[Any], Any] = lambda optimizer: optimizer) -> bool:
    own, plain = prepare(optim.Adam(t.pipe.parameters())), optim.Adam(t.plain.parameters())
    own.step()
    plain.step()
    found, expected = own.state_dict(), plain.state_dict()
    own.load_state_dict(found)
    assert len(own.state) < len(plain.state)
    pairs = [(found["state"][k], entries) for k, entries in expected["state"].items()]
    return found["param_groups"] == expected["param_groups"] and all(
        close(mine[key], theirs[key]) for mine, theirs in pairs for key in theirs
    )


def on_rank_0_alone(t: Trained, call: Callable[[Trained], object]) -> None:
    if dist.get_rank() == 0:
        call(t)
    t.pipe.step(X, target=Y)


def stepped(t: Trained) -> optim.Optimizer:
    optimizer = optim.Adam(t.pipe.parameters())
    optimizer.step()
    return optimizer


def copied(t: Trained, steps: int) -> bool:
    t = Trained(t.file, steps)
    other = copy.deepcopy(t.pipe)
    losses = [each.step(X, target=Y) for each in (t.pipe, other)]
    plain = model()
    plain.load_state_dict(t.pipe.full_state_dict(all_ranks=True))
    return torch.equal(*losses) and t.same(other, plain)


def saved_whole(t: Trained, save: Callable[[Any, Path], object], load: Callable[[Path], Any]) -> bool:
    state = t.pipe.state_dict()
    if dist.get_rank() == 0:
        save(state, t.file)
    dist.barrier()
    whole = load(t.file)
    t.pipe.load_state_dict({name: torch.zeros_like(value) for name, value in whole.items()})
    t.pipe.load_state_dict(whole)
    return t.same()


def saved_as_module(t: Trained) -> bool:
    file = t.file.with_suffix(f".{dist.get_rank()}")
    safetensors.torch.save_model(t.pipe.as_module(), str(file))
    return all(
        torch.equal(value, t.plain.state_dict()[name])
        for name, value in safetensors.torch.load_file(file).items()
    )


def hooked_state(t: Trained) -> bool:
    """A hook of the script sees the whole state, though it was registered first."""
    optimizers = [optim.Adam(each.parameters()) for each in (t.pipe, t.plain)]
    seen: list[Any] = []
    for each in optimizers:
        each.register_state_dict_post_hook(lambda optimizer, state: seen.append(sorted(state["state"])))
        each.step()
        each.state_dict()
    return bool(seen[0] == seen[1])


def move_average(net: nn.Module) -> None:
    """As libraries of moving averages do: clones, differences and copies."""
    shadows = [each.clone().detach() for each in net.parameters()]
    optim.SGD(net.parameters(), 0.1).step()
    for shadow, each in zip(shadows, net.parameters(), strict=True):
        shadow.sub_((shadow - each).mul_(0.5))
        each.data.copy_(shadow.data)


def dcp_saved(t: Trained) -> bool:
    dcp.save(t.pipe.state_dict(), checkpoint_id=t.file.with_suffix(".dcp"))
    whole = {name: torch.zeros_like(value) for name, value in t.plain.state_dict().items()}
    dcp.load(whole, checkpoint_id=t.file.with_suffix(".dcp"))
    t.pipe.load_state_dict(whole)
    return t.same()


def converted(t: Trained, of: str) -> bool:
    t.pipe.zero_grad()
    getattr(t, of).double()
    t.plain.double()
    loss = t.pipe.step(X.double(), target=Y.double())
    return close(loss, mse(t.plain(X.double()), Y.double())) and t.same()


def scaled_step(t: Trained) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optim.SGD(t.pipe.parameters(), 0.1))


def other_clipped(t: Trained) -> bool:
    """Clips a model beside the pipeline, which has gradients on rank 0 alone."""
    other = nn.Linear(2, 1, bias=False)
    if dist.get_rank() == 0:
        other.weight.grad = torch.full((1, 2), 3.0)
    norm = utils.clip_grad_norm_(other.parameters(), 1.0)
    return close(norm, torch.tensor(18.0).sqrt() if dist.get_rank() == 0 else torch.zeros(()))


def same_norm(t: Trained, norm: Callable[[list[Tensor]], Tensor]) -> bool:
    return close(norm(t.gradients()), norm([each.grad for each in t.plain.parameters()]))


def each_linear(t: Trained, change: Callable[..., object], *given: Any) -> None:
    """Changes a layer of each rank."""
    for k in (0, 4):
        change(t.net[k], *given)


def accelerator() -> Accelerator:
    """Those of a process share what they know."""
    return Accelerator(cpu=True)


def gathered(t: Trained) -> bool:
    """On rank 0 it is the unsplit model's state, on others nothing."""
    found = copy.deepcopy(accelerator().get_state_dict(t.pipe))
    expected = t.plain.state_dict() if dist.get_rank() == 0 else {}
    return found.keys() == expected.keys() and all(map(torch.allclose, found.values(), expected.values()))


def scheduled(t: Trained) -> None:
    optimizer = optim.Adam(t.net.parameters())
    prepared, _ = accelerator().prepare(optimizer, optim.lr_scheduler.StepLR(optimizer, 1))
    prepared.step()


def of_transformers(t: Trained, call: Callable[[Any, Path], object]) -> None:
    model, batch = huggingface_models.gpt2()
    pipec.compile(model, devices=2, microbatches=2, timeout=240.0).step(**batch)
    call(model, t.file)


CASES: dict[str, Case] = {
    "nn.utils.clip_grad_norm_(pipe.parameters())": partial(clipped, of="pipe"),
    "nn.utils.clip_grad_norm_(model.parameters())": partial(clipped, of="net"),
    "nn.utils.clip_grad_norm_ of one layer": layer_clipped,
    "nn.utils.get_total_norm": partial(same_norm, norm=lambda g: utils.get_total_norm(g, float("inf"))),
    "nn.utils.clip_grad_norm_ of another model": other_clipped,
    "nn.utils.clip_grad_value_": partial(changed, change=value_clip),
    "torch._foreach_norm, stacked": partial(
        same_norm, norm=lambda g: torch.stack(torch._foreach_norm(g)).norm()
    ),
    "nn.utils.parameters_to_vector": lambda t: utils.parameters_to_vector(t.pipe.parameters()),
    "nn.utils.parametrizations.weight_norm": lambda t: each_linear(t, parametrizations.weight_norm),
    "nn.utils.prune.l1_unstructured": lambda t: each_linear(t, prune.l1_unstructured, "weight", 0.5),
    "nn.init.normal_": lambda t: [nn.init.normal_(each) for each in t.net.parameters()],
    "in-place arithmetic with numbers": partial(
        changed, change=lambda net: [each.mul_(0.5).add_(0.1) for each in net.parameters()]
    ),
    "model.double()": partial(converted, of="net"),
    "pipe.double()": partial(converted, of="pipe"),
    "model.load_state_dict": lambda t: t.net.load_state_dict(t.plain.state_dict()),
    "model(x)": lambda t: t.net(X),
    "AveragedModel(pipe)": averaged,
    "AveragedModel(pipe), exponential, with buffers": partial(
        averaged, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
    "AveragedModel(pipe) made before the first step": partial(average_made_before, of="pipe"),
    "clones of parameters, averaged": partial(changed, change=move_average),
    "AveragedModel(model)": lambda t: swa_utils.AveragedModel(t.net),
    "AveragedModel(model) made before the first step": partial(average_made_before, of="net"),
    "swa_utils.update_bn(loader, pipe)": lambda t: swa_utils.update_bn([X], t.pipe),
    "optimizer.state_dict()": optimizer_state,
    "optimizer.state_dict() with a hook": hooked_state,
    "optimizer.state_dict() on rank 0 alone": partial(
        on_rank_0_alone, call=lambda t: stepped(t).state_dict()
    ),
    "optim.LBFGS": lambda t: optim.LBFGS(t.pipe.parameters()).step(lambda: t.pipe.step(X, target=Y)),
    "amp.GradScaler.step": scaled_step,
    "func.functional_call(pipe, ...)": lambda t: torch.func.functional_call(
        t.pipe, dict(t.plain.named_parameters()), (X,)
    ),
    "copy.deepcopy(pipe)": partial(copied, steps=1),
    "copy.deepcopy(pipe) before the first step": partial(copied, steps=0),
    "copy.copy(pipe)": lambda t: copy.copy(t.pipe),
    "pickle.dumps(pipe)": lambda t: pickle.dumps(t.pipe),
    "pickle.dumps(model)": lambda t: pickle.dumps(t.net),
    "torch.save(pipe.state_dict())": partial(saved_whole, save=torch.save, load=torch.load),
    "torch.save(pipe.state_dict()) on rank 0 alone": partial(
        on_rank_0_alone, call=lambda t: t.pipe.state_dict()
    ),
    "pipe.load_state_dict(...) on rank 0 alone": partial(
        on_rank_0_alone, call=lambda t: t.pipe.load_state_dict(t.plain.state_dict())
    ),
    "pipe.state_dict(keep_vars=True)": lambda t: t.pipe.state_dict(keep_vars=True),
    "safetensors.torch.save_file(pipe.state_dict())": partial(
        saved_whole, save=safetensors.torch.save_file, load=safetensors.torch.load_file
    ),
    "safetensors.torch.save_model(pipe.as_module())": saved_as_module,
    "safetensors.torch.save_model(model)": lambda t: safetensors.torch.save_model(t.net, str(t.file)),
    "torch.from_dlpack": lambda t: torch.from_dlpack(t.absent().detach()),
    "nn.parallel.DistributedDataParallel(pipe)": lambda t: DistributedDataParallel(t.pipe),
    "nn.parallel.DistributedDataParallel(model)": lambda t: DistributedDataParallel(t.net),
    "nn.DataParallel(pipe), on a CPU": lambda t: close(DataParallel(t.pipe)(X), t.plain(X)),
    "distributed.fsdp.FullyShardedDataParallel(pipe)": lambda t: FullyShardedDataParallel(t.pipe),
    "distributed.fsdp.FullyShardedDataParallel(model)": lambda t: FullyShardedDataParallel(t.net),
    "distributed.fsdp.fully_shard(pipe)": lambda t: fully_shard(t.pipe),
    "distributed.fsdp.fully_shard(model)": lambda t: fully_shard(t.net),
    "distributed._composable.replicate(pipe)": lambda t: replicate(t.pipe)(X),
    "distributed.optim.ZeroRedundancyOptimizer": lambda t: ZeroRedundancyOptimizer(
        t.pipe.parameters(), optim.SGD, lr=0.1
    ).step(),
    "distributed.checkpoint.save(pipe.state_dict())": dcp_saved,
    "distributed.checkpoint.save(model.state_dict())": lambda t: dcp.save(
        t.net.state_dict(), checkpoint_id=t.file.with_suffix(".refused")
    ),
    "distributed.checkpoint.state_dict.get_model_state_dict(pipe)": lambda t: get_model_state_dict(t.pipe),
    "distributed.checkpoint.state_dict.get_state_dict(pipe)": lambda t: get_state_dict(t.pipe, stepped(t)),
    "distributed.broadcast(parameter)": lambda t: dist.broadcast(t.absent().data, 0),
    "distributed.all_reduce(parameter)": lambda t: dist.all_reduce(t.absent().data),
    "distributed.all_reduce(gradient)": lambda t: [dist.all_reduce(each) for each in t.gradients()],
    "torch.compile(pipe)": lambda t: torch.compile(t.pipe, backend="eager"),
    "pipe.compile()": lambda t: t.pipe.compile(),
    "torch.compile(model)": lambda t: torch.compile(t.net, backend="eager")(X),
    "torch.export.export(model)": lambda t: torch.export.export(t.net, (X,)),
    "torch.jit.trace(model)": lambda t: torch.jit.trace(t.net, X),
    "pipec.compile(model) once more": lambda t: pipec.compile(t.net, devices=2, loss_fn=mse, timeout=240.0),
    "accelerator.prepare(pipe)": lambda t: accelerator().prepare(t.pipe),
    "accelerator.prepare(model)": lambda t: accelerator().prepare(t.net),
    "accelerator.prepare(pipe.as_module())": lambda t: accelerator().prepare(t.pipe.as_module()),
    "accelerator.prepare(scheduler)": scheduled,
    "accelerator.prepare(optimizer).state_dict()": lambda t: optimizer_state(t, accelerator().prepare),
    "accelerator.clip_grad_norm_": lambda t: clipped(t, "net", accelerator().clip_grad_norm_),
    "accelerator.get_state_dict(pipe)": gathered,
    "accelerator.save_model(model)": lambda t: accelerator().save_model(t.net, t.file),
    "PreTrainedModel.save_pretrained": partial(of_transformers, call=lambda m, file: m.save_pretrained(file)),
    "PreTrainedModel.generate": partial(
        of_transformers, call=lambda m, _: m.generate(torch.ones(1, 2, dtype=torch.long), pad_token_id=0)
    ),
}
"""By the utility as the table names it: what is done. True: the result is the unsplit model's."""


def outcome(case: Case, trained: Trained) -> str:
    try:
        return "right" if case(trained) is True else "silent"
    except pipec.InputError as error:
        return " ".join(str(error).split())
    except BaseException as error:  # torch wraps an error in one of its own, some of which are no Exception
        said = " ".join(str(error).split())
        return said if "this process has none of its values" in said else f"{type(error).__name__}: {said}"


def outcomes(names: list[str]) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            shared: list[Any] = [folder]
            dist.broadcast_object_list(shared)
            file = Path(shared[0]) / f"case {number}"
            yield name, outcome(CASES[name], Trained(file))
            dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with contextlib.redirect_stdout(sys.stderr):
        found = dict(outcomes(sys.argv[1:] or list(CASES)))
    print(json.dumps(found))
