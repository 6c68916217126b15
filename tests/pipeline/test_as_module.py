"""``pipe.as_module()``: a loop that calls ``backward`` trains as with the model itself."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipec
from pipec.pipeline.pipeline_module import PipelineModule


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class OwnLoss(nn.Module):
    """Returns a dict with its loss and more, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.config = {"hidden_size": 8}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits} | ({} if labels is None else {"loss": mse_loss(logits, labels)})


def compiled(model: nn.Module, **options: object) -> pipec.Pipeline:
    loss_fn = None if isinstance(model, OwnLoss) else mse_loss
    return pipec.compile(model, **{"devices": 2, "microbatches": 2, "loss_fn": loss_fn, **options})


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)


def assert_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    pairs = list(zip(found.parameters(), expected.parameters(), strict=True))
    assert pairs
    for own, other in pairs:
        torch.testing.assert_close(own.grad, other.grad)


@pytest.fixture
def trained(compiled_module: PipelineModule) -> PipelineModule:
    """A module that is compiled, and has no gradients. Its warnings have not been given."""
    compiled_module.zero_grad()
    return compiled_module._pipe.as_module()


@pytest.fixture(scope="module")
def compiled_module() -> PipelineModule:
    """A module that is compiled."""
    module = compiled(net()).as_module()
    x, y = batch()
    module(x, target=y).backward()
    return module


@pytest.mark.parametrize("options", [{"replicas": 2}, {"on_nan": "skip"}])
def test_losses_of_several_models_and_a_weight_have_one_backward(options: dict[str, object]) -> None:
    models, plain = [compiled(net(), **options).as_module() for _ in range(2)], [net(), net()]
    weights = [nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2)]
    x, y = batch()
    for _ in range(2):
        losses = [module(k * x, target=y) for k, module in enumerate([models[0], *models])]
        others = [mse_loss(module(k * x), y) for k, module in enumerate([plain[0], *plain])]
        for weight, found in zip(weights, (losses, others), strict=True):
            (found[0] * weight + 3 * found[1] + found[2].square()).backward()
    for module, model in zip(models, plain, strict=True):
        assert_same_gradients(module, model)
    torch.testing.assert_close(weights[0].grad, weights[1].grad)


def test_the_loss_is_where_a_loop_looks_for_it() -> None:
    module = compiled(OwnLoss()).as_module()
    x, y = batch()
    out = module(x, labels=y)
    assert out.loss is out["loss"] is out[0] is out
    plain = OwnLoss()
    assert f"{out:.6f}" == f"{plain(x, labels=y)['loss'].item():.6f}"
    assert repr(out.detach()) == repr(plain(x, labels=y)["loss"].detach())
    for read in (lambda: out.logits, lambda: out["logits"]):
        with pytest.raises((AttributeError, KeyError), match=r"as_module\(outputs=True\)"):
            read()


def test_outputs_come_with_a_backward_that_explains_itself() -> None:
    module, plain = compiled(OwnLoss()).as_module(outputs=True), OwnLoss()
    x, y = batch()
    out = module(x, labels=y)
    torch.testing.assert_close(out["logits"].detach(), plain(x)["logits"].detach())
    with pytest.raises(pipec.InputError, match=r"outside of the pipeline.*differentiable"):
        (out["loss"] + out["logits"].square().mean()).backward()
    module.zero_grad()
    module(x, labels=y)["loss"].backward()
    plain(x, labels=y)["loss"].backward()
    assert_same_gradients(module, plain)


def test_evaluation_is_the_forward_with_loss_and_outputs() -> None:
    module, plain = compiled(OwnLoss()).as_module(), OwnLoss()
    x, y = batch()
    with torch.no_grad():
        found, expected = module(x, labels=y), plain(x, labels=y)
    for name in ("loss", "logits"):
        assert not found[name].requires_grad
        torch.testing.assert_close(found[name], expected[name])
    module.eval()
    assert not module.training
    assert not module.net.training
    with pytest.raises(pipec.InputError, match=r"evaluation mode.*module\.train\(\)"):
        module(x, labels=y)["loss"].backward()


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda loss: torch.amp.GradScaler("cpu").scale(loss / 2), 'precision="fp16-mixed"'),
        (lambda loss: (loss.backward(retain_graph=True), loss.backward()), "again on the loss of one step"),
        (lambda loss: loss.backward(create_graph=True), "create_graph=True"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_cannot_be_right_is_refused_by_name(
    trained: PipelineModule, attempt: Callable[[Tensor], object], message: str
) -> None:
    x, y = batch()
    loss = trained(x, target=y)
    with pytest.raises(pipec.InputError, match=message):
        attempt(loss)


def test_inputs_that_require_a_gradient_are_refused_once_compiled_too(trained: PipelineModule) -> None:
    x, y = batch()
    for call in (trained, trained._pipe.step):
        with pytest.raises(pipec.InputError, match=r"args\[0\] requires a gradient"):
            call(x.requires_grad_(), target=y)
    assert all(parameter.grad is None for parameter in trained.parameters())


def test_a_loop_finds_the_model_behind_it() -> None:
    model = OwnLoss()
    module = compiled(model).as_module()
    assert module.config is model.config
    assert list(inspect.signature(module.forward).parameters) == ["x", "labels"]
    assert dict(module.named_modules())["net.0"] is model.net[0]
    assert list(dict(module.named_parameters())) == list(dict(model.named_parameters()))
    assert all(one is other for one, other in zip(module.parameters(), model.parameters(), strict=True))
    state = module.state_dict()
    assert state.keys() == model.state_dict().keys()
    module.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert not any(parameter.any() for parameter in model.parameters())
    with pytest.raises(AttributeError, match="no_such"):
        _ = module.no_such


def test_a_module_around_it_lists_the_parameters_of_the_model_itself() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)
            self.register_buffer("shift", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * self.scale + self.shift).mean()

    model = Scaled()
    around = nn.Sequential(pipec.compile(model, 1).as_module())
    names = ["0.scale", "0.layer.weight", "0.layer.bias"]
    assert [name for name, _ in around.named_parameters()] == names
    assert [name for name, _ in around.named_buffers()] == ["0.shift"]
    assert {*around.state_dict()} == {*names}
    around[0](torch.ones(4, 3)).backward()
    assert next(iter(around.parameters())) is model.scale
    assert model.scale.grad is not None
    around.double()
    assert next(iter(around.parameters())) is model.scale
    assert model.scale.dtype == torch.float64
