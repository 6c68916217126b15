"""Kinds of models that eager torch can train, and what each needs of capture."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward_modules import WIDTH, Between, batch
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import Inputs, StepResult, assert_equal, unsplit_step

import pipec
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import CaptureError, InputError, PlanError
from pipec.ir import Mode
from pipec.passes.assignments.follow_placement import FollowPlacement
from pipec.pipeline import Pipeline

mse = nn.functional.mse_loss


def trained(
    model: nn.Module, inputs: Inputs, microbatches: int, devices: int = 2, **fixed: Any
) -> tuple[StepResult, StepResult, Pipeline]:
    """What a step of the pipeline and of the unsplit model leave; ``fixed`` arguments are not split."""
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=devices, loss_fn=mse, microbatches=microbatches)
    found = pipe.step(inputs["x"], target=inputs["target"], **fixed)
    sizes = [len(rows) for rows in inputs["x"].tensor_split(microbatches)]
    loss = unsplit_step(lambda x, target: mse(unsplit(x, **fixed), target), inputs, sizes)
    return StepResult.of(found, model), StepResult.of(loss, unsplit), pipe


# which arguments are split


class Edges(nn.Module):
    """A graph network: ``edges`` are pairs of nodes, the same in every row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes = self.first(x)
        source, target = edges
        return self.last(nodes[:, source] * nodes[:, target])


@pytest.mark.parametrize("rows", [2, 1])
def test_an_argument_with_as_many_rows_as_a_microbatch_is_not_split(rows: int) -> None:
    """An edge list has two rows. So may a microbatch have, or its sample of one row traced as two."""
    edges = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
    x, target = torch.randn(3 * rows, 3, WIDTH), torch.randn(3 * rows, 4, WIDTH)
    found, expected, _ = trained(Edges(), {"x": x, "target": target}, 3, edges=edges)
    assert_equal(found, expected)


# random numbers


def test_a_generator_of_the_models_own_is_refused() -> None:
    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, generator=self.source)

    with pytest.raises(CaptureError, match=r"generator=self\.source\)(.|\n)*Leave the generator out"):
        trained(Between(Seeded), batch(), 2)


# gradients that are sparse


class Words(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, sparse=True)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.words(x)))


def words() -> Inputs:
    return {"x": torch.randint(20, (4, 3)), "target": torch.randn(4, 3, 20)}


def test_a_sparse_gradient_stays_sparse() -> None:
    model, inputs = Words(), words()
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=2, loss_fn=mse, microbatches=2)
    for _ in range(2):
        pipe.step(inputs["x"], target=inputs["target"])
        unsplit_step(lambda x, target: mse(unsplit(x), target), inputs, (2, 2))
    found, expected = model.words.weight.grad, unsplit.words.weight.grad
    assert found.is_sparse
    assert torch.equal(found._indices(), expected._indices())
    assert torch.equal(found._values(), expected._values())
    torch.optim.SparseAdam([model.words.weight]).step()


def test_a_sparse_gradient_and_a_dense_one_of_a_tied_weight_are_added() -> None:
    found, expected, _ = trained(Words(tied=True), words(), 1, devices=1)
    assert_equal(found, expected)


def test_a_sparse_gradient_of_two_stages_is_refused() -> None:
    with pytest.raises(PlanError, match=r"stages 0, 1 all use words\.weight, whose .*sparse=False"):
        trained(Words(tied=True), words(), 2)


# buffers that change


class Siamese(nn.Module):
    """Two towers share a BatchNorm. What comes before it is used twice as well."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.tower = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        return self.head(self.tower(hidden) - self.tower(hidden + 1))


class Late(nn.Module):
    """Reads a buffer in front of the layer after which it changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x - self.mean)
        self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)))
        return hidden.tanh()


@pytest.mark.parametrize("make", [slow(Siamese), lambda: Between(Late)], ids=["Siamese", "Late"])
@pytest.mark.parametrize("devices", [slow(2), 3])
def test_readers_and_writers_of_a_buffer_stay_together(make: Callable[[], nn.Module], devices: int) -> None:
    torch.manual_seed(0)
    model = make()
    found, expected, pipe = trained(model, batch(), 2, devices)
    counters = {name for name in expected.buffers if name.endswith("num_batches_tracked")}
    assert all(0 < found.buffers[name] <= expected.buffers[name] for name in counters)  # those of a step
    expected.buffers.update({name: found.buffers[name] for name in counters})
    assert_equal(found, expected)
    unsplit = copy.deepcopy(model)  # that calls in other modes follow the stages of the first
    for training in (True, False):
        pipe.train(training)
        unsplit.train(training)
        with torch.no_grad():
            wanted = torch.cat([unsplit(x) for x in batch()["x"].tensor_split(2)])
        assert torch.equal(pipe(batch()["x"]), wanted)
        for name, buffer in unsplit.named_buffers():
            assert name in counters or torch.equal(model.get_buffer(name), buffer)


class Throughout(nn.Module):
    """Its first operator and its last change the same buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(3), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.last(self.first(self.norm(x))))


def test_stages_that_were_cut_without_a_change_of_buffers_refuse_one() -> None:
    x, target = batch().values()
    graph = capture(CaptureRequest(Throughout(), mse, Mode.TRAIN, ModelCall((x,), {}, target)))
    with pytest.raises(PlanError, match=r"uses last\.weight of stage 1, .*changes buffer .*prepare\(\) it"):
        FollowPlacement(2, {"first.weight": (0,), "last.weight": (1,)})(graph)


def test_a_buffer_that_leaves_too_few_parts_is_named() -> None:
    with pytest.raises(PlanError, match=r"into 2 stages at most, .*changes buffer norm\..*Use fewer devices"):
        trained(Throughout(), batch(), 2, devices=3)


# operators that call graphs


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def test_an_operator_that_calls_a_graph_is_refused_with_a_remedy() -> None:
    with pytest.raises(CaptureError, match=r"'cond', which no stage can run\n  at test_.*\n.*torch\.where"):
        trained(Between(Conditional), batch(), 2)


# what torch.library does on the way


@torch.library.custom_op("pipec_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return 3 * x


@thrice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


thrice.register_autograd(lambda ctx, gradient: 5 * gradient)  # so that a lost backward shows


class Locked(nn.Module):
    """Dynamo cannot trace it, and export can."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = [threading.Lock()]

    def __deepcopy__(self, memo: object) -> "Locked":
        return Locked()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock[0]:
            return thrice(x).tanh()


def test_an_operator_of_torch_library_keeps_its_backward_in_an_export() -> None:
    found, expected, _ = trained(Between(Locked), batch(), 1)
    assert_equal(found, expected)


# kernels that stay whole


class Enlarged(nn.Module):
    """Rows of ``x`` as images of so many dimensions, made larger by a factor or to a size, and summed."""

    def __init__(self, mode: str, dimensions: int, by_size: bool) -> None:
        super().__init__()
        self.mode, self.shape = mode, (1, *[1] * (dimensions - 1), WIDTH)
        self.sizes = {"size": (*[2] * (dimensions - 1), 7)} if by_size else {"scale_factor": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, *self.shape)
        larger = nn.functional.interpolate(images, mode=self.mode, align_corners=False, **self.sizes)
        return larger.square().flatten(1)[:, :WIDTH].view(x.shape)


@pytest.mark.parametrize("by_size", [True, False], ids=["size", "factor"])
@pytest.mark.parametrize(
    ("mode", "dimensions"), [("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)]
)
def test_an_interpolation_is_one_operator_for_any_batch(mode: str, dimensions: int, by_size: bool) -> None:
    torch.manual_seed(0)
    found, expected, pipe = trained(Between(lambda: Enlarged(mode, dimensions, by_size)), batch(), 2)
    assert_equal(found, expected)
    assert pipe.plan.dynamic_batch
    source = pipe.source(0) + pipe.source(1)
    assert source.count("primitives.INTERPOLATE(") == source.count("primitives.INTERPOLATE_BACKWARD(") == 1


def ctc(output: Tensor, target: Tensor) -> Tensor:
    """Targets end with zeros, so that their lengths are known from values alone, and none is the longest."""
    scores = output.log_softmax(-1).transpose(0, 1)
    lengths = (target != 0).sum(1)
    return nn.functional.ctc_loss(scores, target, torch.full_like(lengths, output.shape[1]), lengths)


def test_the_loss_of_connectionist_temporal_classification() -> None:
    model, x, target = Between(nn.Tanh), torch.randn(4, 6, WIDTH), torch.tensor([[1, 2, 0]] * 3 + [[3, 0, 0]])
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, 2, loss_fn=ctc, microbatches=2)
    found = pipe.step(x, target=target)
    inputs = {"x": x, "target": target}
    loss = unsplit_step(lambda x, target: ctc(unsplit(x), target), inputs, (2, 2))
    assert_equal(StepResult.of(found, model), StepResult.of(loss, unsplit))
    assert pipe.plan.dynamic_batch


class Checkpointed(nn.Module):
    """Asks for a gradient that nobody reads, as Wav2Vec2 does for the sake of reentrant checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach()[:, None]
        x.requires_grad = True
        return x.squeeze(1)


def ctc_of_words(output: Tensor, target: Tensor) -> Tensor:
    """As transformers computes it: the targets stand one after the other, and the losses are summed."""
    scores, mask = output.log_softmax(-1).transpose(0, 1), target != 0
    frames = torch.full_like(target[:, 0], output.shape[1])
    with torch.backends.cudnn.flags(enabled=False):
        return nn.functional.ctc_loss(
            scores, target.masked_select(mask), frames, mask.sum(1), reduction="sum"
        )


def test_targets_that_stand_one_after_the_other() -> None:
    model = nn.Sequential(Checkpointed(), Between(nn.Tanh))
    x, target = torch.randn(4, 6, WIDTH), torch.tensor([[1, 2, 0]] * 3 + [[3, 0, 0]])
    unsplit = copy.deepcopy(model)
    expected = ctc_of_words(unsplit(x), target)
    expected.backward()
    found = pipec.compile(model, 2, loss_fn=ctc_of_words, microbatches=2).step(x, target=target)
    torch.testing.assert_close(found, expected.detach())
    for fqn, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, unsplit.get_parameter(fqn).grad, msg=fqn)


# what only the first call does

INSTALLING = threading.Lock()


class Recording(nn.Module):
    """Installs a hook at its first call, under a lock, as transformers does to collect outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def install(self) -> None:
        with INSTALLING:
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
            self.installed = True

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "installed"):
            self.install()
        self.seen.append(x)
        return self.layer(x)


def test_what_the_first_call_sets_up_is_captured_and_undone() -> None:
    model = Between(Recording)
    pipe = pipec.compile(model, 2, loss_fn=mse, microbatches=1)
    unsplit, inputs = copy.deepcopy(model), batch()
    loss = pipe.step(inputs["x"], target=inputs["target"])
    assert not model.awkward.layer._forward_hooks
    assert not model.awkward.seen
    assert not hasattr(model.awkward, "installed")
    expected = unsplit_step(lambda x, target: mse(unsplit(x), target), inputs, [len(inputs["x"])])
    assert_equal(StepResult.of(loss, model), StepResult.of(expected, unsplit))


class FailsTraced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ValueError("no mask")
        return x


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no mask")


def test_a_model_that_only_fails_while_it_is_traced_is_differentiated_directly() -> None:
    found, expected, _ = trained(Between(FailsTraced), batch(), 2)
    assert_equal(found, expected)


def test_a_model_that_fails_on_its_arguments_is_told_so() -> None:
    message = r"fails on these arguments\n  at test_.*\n  ValueError: no mask\nSizes are"
    with pytest.raises(InputError, match=message):
        trained(Between(Fails), batch(), 2)


# buffers that a forward changes


class Counting(nn.Module):
    """Counts forwards, averages activations, and iterates towards the norm of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.linear(self.norm(x)) - self.mean


@pytest.mark.slow
def test_buffers_that_do_not_depend_on_rows_change_once_a_step(said: list[str]) -> None:
    pipe = pipec.compile(Counting(), devices=1, loss_fn=mse, microbatches=3)
    for _ in range(2):
        pipe.step(torch.randn(6, WIDTH), target=torch.randn(6, WIDTH))
    assert pipe.get_buffer("num_calls") == 2
    assert not [message for message in said if "forward() changes" in message]


# dimensions of one element


class Squeezed(nn.Module):
    """Scores of rows, squeezed in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh().squeeze(0).squeeze((0, 1))
        gates = hidden.mean(-1, keepdim=True)[:, None].squeeze()
        scores = self.last(hidden * gates[:, None])
        return (scores.squeeze().sin() + scores.clone().squeeze_()) * scores.squeeze((0, 1)).cos()


def test_a_microbatch_of_one_row_is_squeezed_as_the_batch_is() -> None:
    model = Squeezed()
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=2, loss_fn=mse, microbatches=2)
    x, target = torch.randn(3, WIDTH), torch.randn(3)
    loss = mse(unsplit(x), target)
    loss.backward()
    torch.testing.assert_close(pipe.step(x, target=target), loss.detach())
    for fqn, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, unsplit.get_parameter(fqn).grad, msg=fqn)
    torch.testing.assert_close(pipe(x), unsplit(x))


def test_a_batch_of_one_row_keeps_it_and_says_so(said: list[str]) -> None:
    pipe = pipec.compile(Squeezed(), devices=1, loss_fn=mse, microbatches=1)
    x = torch.randn(2, WIDTH)
    whole = pipe(x)
    assert not said
    torch.testing.assert_close(pipe(x[:1]), whole[:1])
    (warning,) = said
    assert "the batch has one row: eager torch would squeeze this dimension" in warning
    assert "hidden = self.first(x).tanh().squeeze(0)" in warning
