"""Trainers of transformers and TRL train a pipeline as they train its model on one device.

Losses, norms of gradients, rates, metrics, weights and the state of the optimizer are compared. What trainers
refuse has one error that says what to do.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_models
import pytest
import safetensors.torch
import torch
import transformers
import worker_processes
from accelerate import ParallelismConfig
from torch import Tensor, nn
from worker_processes import run_script

from pipec.errors import InputError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "helpers" / "transformers_script.py"
LAYOUTS = {"alone": (0, 1), "2 ranks": (2, 1), "4 ranks": (4, 1), "2x2 replicas": (4, 2)}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "TIMEOUT", 600.0)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a case prints without pipec, and the folder that it writes."""

    @functools.cache
    def run(case: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(case)
        printed = run_script(SCRIPT, [case, str(folder), "plain"], 0, folder)
        return json.loads(printed.splitlines()[-1]), folder

    return run


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, layout) for case in ("llama", "bert") for layout in LAYOUTS),
        *(("sft", layout) for layout in LAYOUTS),
        *(
            (case, layout)
            for case in ("packed", "padding_free", "experts")
            for layout in ("alone", "2x2 replicas")
        ),
        ("adapters", "4 ranks"),
        *((case, "2 pipelines") for case in ("bert", "grpo")),
        *((case, layout) for case in ("distilled", "dpo", "grpo") for layout in LAYOUTS),
    ],
)
def test_a_trainer_is_the_same_with_a_pipeline(case: str, layout: str, plain: Any, tmp_path: Path) -> None:
    expected, folder = plain(case)
    num_ranks, how = (LAYOUTS | {"2 pipelines": (4, "groups")})[layout]
    printed = run_script(SCRIPT, [case, str(tmp_path), str(how)], num_ranks, tmp_path)
    in_float32 = case in ("dpo", "grpo", "packed", "padding_free", "experts")  # as logs of TRL are
    rounding = 1e-6 if in_float32 else 1e-9
    torch.testing.assert_close(json.loads(printed.splitlines()[-1]), expected, rtol=1e-6, atol=rounding)
    require_same_files(tmp_path, folder, rounding)


def require_same_files(found: Path, expected: Path, rounding: float) -> None:
    """The same files of checkpoints and models, with the same tensors."""
    names = {
        path.relative_to(expected)
        for pattern in ("*/*.safetensors", "*/optimizer.pt", "*/*.json", "*/*.pth")
        for path in expected.glob(pattern)
    }
    assert names
    for name in names:
        assert (found / name).exists(), name
        if name.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(found / name)
            torch.testing.assert_close(
                tensors, safetensors.torch.load_file(expected / name), rtol=1e-6, atol=10 * rounding
            )
        if name.suffix == ".pt":
            states = [torch.load(folder / name)["state"] for folder in (found, expected)]
            torch.testing.assert_close(*states, rtol=1e-6, atol=1e-8)


# what trainers refuse, and options of the libraries that they take over

ROWS = [{"input_ids": torch.arange(6) + row, "labels": torch.arange(6) + row} for row in range(4)]


def arguments(folder: Path, **options: Any) -> Any:
    from pipec.integrations.transformers import PipecArguments

    given = {"devices": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 1, **options}
    return PipecArguments(str(folder), **given)


def trainer(folder: Path, kind: Any = None, model: Any = None, **given: Any) -> Any:
    from pipec.integrations.transformers import PipecTrainer

    options = given.pop("options", {})
    model = model or huggingface_models.llama()[0]
    return (kind or PipecTrainer)(model=model, args=arguments(folder, **options), train_dataset=ROWS, **given)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fsdp": "full_shard"}, "fsdp is set, which a pipeline does otherwise; leave it out: stages"),
        ({"neftune_noise_alpha": 5.0}, "by a forward hook of its embedding"),
        ({"torch_compile_backend": "eager"}, "torch_compile=True"),
        ({"replicas": "auto"}, "so that their number must be known"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "has tp_size=2, but stages divide the model"),
    ],
)
def test_arguments(options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=expected):
        arguments(tmp_path, **options)


def test_arguments_become_options(tmp_path: Path) -> None:
    """Arguments of the library, and of a command line."""
    made = arguments(tmp_path, bf16=True, activation_checkpointing=True, devices=4, replicas=2)
    options = made.options()
    assert [options[name] for name in ("precision", "recompute")] == ["bf16-mixed", "full"]
    assert (made.mixed_precision, made.activation_checkpointing) == ("no", False)
    assert (made.train_batch_size, made.eval_batch_size, made.world_size) == (16, 16, 1)
    words = f"--output_dir {tmp_path} --use_cpu --devices 4 --replicas 2 --memory_limit 1GiB"
    (made,) = transformers.HfArgumentParser(type(made)).parse_args_into_dataclasses(words.split())
    assert (made.devices, made.num_replicas, made.options()["memory_limit"]) == (4, 2, "1GiB")


def test_replicas_by_the_name_of_accelerate(tmp_path: Path) -> None:
    from pipec.integrations.accelerate import PipecAccelerator

    config = ParallelismConfig(dp_replicate_size=2)
    assert arguments(tmp_path, devices=4, parallelism_config=config).num_replicas == 2
    accelerator = PipecAccelerator(cpu=True, devices=4, parallelism_config=config)
    module = accelerator.prepare(huggingface_models.llama()[0].train())
    module(input_ids=torch.arange(24).view(4, 6), labels=torch.arange(24).view(4, 6))
    assert [len(ranks) for ranks in module._pipe.plan.placement] == [2, 2]
    with pytest.raises(InputError, match="has dp_shard_size=2, but stages divide the model"):
        PipecAccelerator(cpu=True, devices=4, parallelism_config=ParallelismConfig(dp_shard_size=2))


def test_models_and_arguments_that_are_no_fit(tmp_path: Path) -> None:
    from pipec.integrations.transformers import PipecSFTConfig, PipecTrainer

    model = huggingface_models.llama()[0]
    given = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(InputError, match="args is a TrainingArguments; pass PipecArguments"):
        PipecTrainer(model, given)
    with pytest.raises(InputError, match="activation_offloading is set"):
        PipecSFTConfig(str(tmp_path), use_cpu=True, activation_offloading=True)
    with pytest.raises(InputError, match="the model is a pipeline already; pass the model itself"):
        trainer(tmp_path, model=trainer(tmp_path, model=model).model)
    model.hf_quantizer = SimpleNamespace(is_trainable=True)
    with pytest.raises(InputError, match=r"the model is quantized: .* Load it without quantization_config"):
        trainer(tmp_path, model=model)


def test_optimizers_that_cannot_update_stage_by_stage(tmp_path: Path) -> None:
    model = huggingface_models.llama()[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InputError, match="pass optimizer_cls_and_kwargs"):
        trainer(tmp_path, model=model, optimizers=(optimizer, None), options={"shard": "optimizer"})
    with pytest.raises(InputError, match="which updates each parameter during the backward"):
        trainer(tmp_path, options={"optim": "lomo"})


def test_packing_is_refused_where_documents_see_each_other() -> None:
    from pipec.integrations.transformers.sft import _require_separate_documents

    model = huggingface_models.llama()[0]
    _require_separate_documents(model)
    forward = model.forward
    model.forward = lambda position_ids, **given: forward(**given)
    with pytest.raises(InputError, match="documents of a row see each other in LlamaForCausalLM"):
        _require_separate_documents(model)


def test_losses_of_documents_that_would_not_add_up() -> None:
    from pipec.integrations.transformers.sft import _require_division

    def mean(output: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        return nn.functional.cross_entropy(output.logits[0], labels[0])

    def divided(output: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits[0], labels[0], reduction="sum") / num_items_in_batch

    _require_division(divided, 16)
    with pytest.raises(InputError, match="compute_loss_func does not divide by num_items_in_batch"):
        _require_division(mean, 16)


def test_a_row_is_split_before_documents() -> None:
    from pipec.integrations.transformers.sft import split_documents

    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0]])
    tokens = torch.arange(11)[None]
    row = {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}

    def parts(count: int) -> list[list[int]]:
        return [part["input_ids"][0].tolist() for part in split_documents(row, count)]

    assert parts(1) == [[*range(11)]]
    assert parts(2) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    assert parts(3) == [[0, 1, 2], [3, 4, 5, 6, 7, 8]], "the last documents have no labels"
    assert parts(11) == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
