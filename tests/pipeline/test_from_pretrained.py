"""Models of transformers: ``pipec.from_pretrained`` of their folders."""

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pretrained_script
import pytest
import torch
import transformers
import worker_processes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from worker_processes import run_ranks

import pipec
from pipec.errors import CheckpointError, InputError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(pretrained_script.__file__)
RANKS = {4: ("gpt2", "mixtral", "headless"), 0: ("t5", "bert", "tied", "bfloat16", "sharded", "remote")}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process compiles six models one after the other, which takes minutes where others work, too."""
    monkeypatch.setattr(worker_processes, "TIMEOUT", 800.0)


def printed(folder: Path, kind: str, num_ranks: int, names: Sequence[str]) -> list[Any]:
    """What each rank prints of these models."""
    each_rank = run_ranks(SCRIPT, num_ranks, folder, [str(folder), kind, *names])
    return [json.loads(text.splitlines()[-1]) for text in each_rank]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_models_start_train_and_are_saved_as_by_transformers(num_ranks: int, tmp_path: Path) -> None:
    names = RANKS[num_ranks]
    for name in names:
        pretrained_script.write(tmp_path, name)
    (expected,) = printed(tmp_path, "plain", 0, names)
    for each in printed(tmp_path, "pipec", num_ranks, names):
        for name in names:
            own, reference = each[name], expected[name]
            assert own["differing"] == []
            assert own["dtypes"] == reference["dtypes"]
            assert own["drawn"] == reference["drawn"]
            assert own["logits"] == pytest.approx(reference["logits"], abs=1e-6), name
            rounded = name == "bfloat16"  # to 8 bits, so that the second loss differs more
            assert own["losses"] == pytest.approx(reference["losses"], abs=1e-4 if rounded else 2e-6), name
            assert own["state"] == pytest.approx(reference["state"], rel=1e-4 if rounded else 1e-7)


def test_no_rank_holds_more_than_its_stages(tmp_path: Path) -> None:
    pretrained_script.write(tmp_path, "large")
    found = [each["large"] for each in printed(tmp_path, "pipec", 4, ["large"])]
    assert sum(held for *_, held in found) > 1e9
    for of_headers, peak, held in found:
        assert of_headers < 40e6
        assert peak < held + 320e6  # the largest tensor, and what was imported and captured


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the folder of a model, with other weights."""
    copy = Path(shutil.copytree(folder, folder.with_name("changed"), dirs_exist_ok=True))
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_folders_that_do_not_fit_are_refused_or_completed_as_by_transformers(tmp_path: Path) -> None:
    pretrained_script.write(tmp_path, "llama")
    pretrained_script.write(tmp_path, "sharded")
    folder, name = tmp_path / "llama", "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match="ignore_mismatched_sizes"):
        pipec.from_pretrained(changed(folder, lambda weights: weights.update({name: torch.ones(3)})), 2)
    lacking = changed(folder, lambda weights: weights.pop(name))
    torch.manual_seed(1)
    expected = transformers.LlamaForCausalLM.from_pretrained(lacking).get_parameter(name)
    torch.manual_seed(1)
    assert torch.equal(pipec.from_pretrained(lacking, 2).get_parameter(name), expected)
    pipec.from_pretrained(changed(folder, lambda weights: weights.update(other=torch.ones(3))), 2)

    pretrained_script.write(tmp_path, "tied")
    table = "model.embed_tokens.weight"
    equal = changed(tmp_path / "tied", lambda w: w.update({"lm_head.weight": w[table].clone()}))
    tensors = dict(pipec.from_pretrained(equal, 2).named_parameters(remove_duplicate=False))
    assert tensors["lm_head.weight"] is tensors[table]
    other = changed(tmp_path / "tied", lambda w: w.update({"lm_head.weight": w[table] * 2}))
    tensors = dict(pipec.from_pretrained(other, 2).named_parameters(remove_duplicate=False))
    assert tensors["lm_head.weight"] is not tensors[table]

    changed(folder, lambda weights: None)
    file = tmp_path / "changed" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="not fully covered"):
        pipec.from_pretrained(tmp_path / "changed", 2)
    file.rename(file.with_name("pytorch_model.bin"))
    with pytest.raises(InputError, match="only safetensors can be read in parts"):
        pipec.from_pretrained(tmp_path / "changed", 2)
    next((tmp_path / "sharded").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="model-00002-of"):
        pipec.from_pretrained(tmp_path / "sharded", 2)
    with pytest.raises(InputError, match="pass devices="):
        pipec.from_pretrained(folder, 2, device_map="auto")

    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    peft.get_peft_model(model, peft.LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match="more than one set of weights"):
        pipec.from_pretrained(tmp_path / "adapter", 2, model_class=transformers.AutoModelForCausalLM)


def test_an_adapter_trains_on_a_model_that_no_rank_holds(tmp_path: Path) -> None:
    pretrained_script.write(tmp_path, "tied")
    (expected,) = printed(tmp_path, "plain", 0, ["adapter"])
    for found in printed(tmp_path, "pipec", 4, ["adapter"]):
        assert found["adapter"] == pytest.approx(expected["adapter"], rel=1e-6)
    folders = (tmp_path / f"adapter_{kind}" for kind in ("pipec", "plain"))
    adapters = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert any(key.endswith("lora_B.weight") and value.any() for key, value in adapters[1].items())
    torch.testing.assert_close(*adapters, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["lm_head"]}]
)
def test_adapters_that_begin_with_values_of_the_weights(options: dict[str, Any], tmp_path: Path) -> None:
    pretrained_script.write(tmp_path, "llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], **options)
    with pytest.raises(InputError, match=r"pass get_peft_model\(model, peft_config\) to pipec\.compile"):
        pipec.from_pretrained(tmp_path / "llama", 2, peft_config=config)


def test_values_are_refused_until_they_are_read(tmp_path: Path) -> None:
    pretrained_script.write(tmp_path, "llama")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(tmp_path / "llama"))
    pipe = pipec.compile(model, 2, microbatches=2, weights=tmp_path / "llama")
    batch = pretrained_script.MODELS["llama"]()[1]
    calls: list[Callable[[], object]] = [
        pipe.state_dict,
        pipe.local_state_dict,
        pipe.as_module().state_dict,
        lambda: pipe.save_checkpoint(tmp_path / "checkpoint"),
        lambda: pipe.load_checkpoint(tmp_path / "llama", model_only=True),
        lambda: pipe.save_pretrained(tmp_path / "saved"),
        lambda: pipe.gather_into(model),
        lambda: pipe.load_state_dict({"lm_head.weight": torch.ones(48, 32)}),
        lambda: model(**batch),
        lambda: torch.stack([*pipe.parameters()]),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"in .*llama still: .*pipe\.prepare"):
            call()
    other = copy.deepcopy(pipe).double()
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama").train()
    assert pipe.step(**batch).item() == pytest.approx(plain(**batch).loss.item(), abs=1e-6)
    assert other.step(**batch).item() == pytest.approx(plain.double()(**batch).loss.item(), abs=1e-6)
    assert other.get_parameter("lm_head.weight").dtype == torch.float64
    with pytest.raises(InputError, match="takes a model on meta"):
        pipec.compile(plain, 2, weights=tmp_path / "llama")
    with pytest.raises(InputError, match="takes a model of transformers"):
        pipec.compile(nn.Linear(2, 2, device="meta"), 2, weights=tmp_path / "llama")
