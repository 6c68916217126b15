"""Checkpoints in one process: training goes on as if it had never stopped, and whatever is wrong is said."""

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
import torch
from huggingface_models import gpt2
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_saves import killed_in_call
from resumable_training import LAYOUTS, Net, Run, decayed, start
from torch import nn, optim
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM

import pipec
from pipec.checkpoint.plain_values import plain, read, written
from pipec.saved_folders import find_folder

STOP, END = 10, 20
SAME = 1e-9
"""Relative: other layouts sum in another order, in double precision."""

Stopped = Mapping[str, tuple[Run, Path, list[float]]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """By layout a run that has saved after 10 steps, where, and its next 10 losses."""
    found = {}
    for layout in LAYOUTS:
        run, path = start(layout), tmp_path_factory.mktemp("checkpoints") / "saved"
        run.train(0, STOP)
        run.save(path, extra={"layout": layout, "seen": (1, 2.0)})
        found[layout] = run, path, run.train(STOP, END)
    return found


@pytest.mark.parametrize("resumed", LAYOUTS)
def test_a_training_goes_on_in_any_layout(stopped: Stopped, resumed: str) -> None:
    run = stopped[resumed][0]
    for saved, (_, path, expected) in stopped.items():
        torch.manual_seed(99)
        run.pipe.step(torch.arange(8))  # the load drops its gradients
        assert run.load(path) == {"layout": saved, "seen": (1, 2.0)}
        assert run.pipe.num_steps == STOP
        last = END if saved == resumed else STOP + 2
        losses = run.train(STOP, last)
        if saved == resumed:
            assert losses == expected
        assert losses == pytest.approx(expected[: last - STOP], rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1 stage", "2 stages, own optimizer"])
def test_state_keeps_its_type(layout: str, tmp_path: Path) -> None:
    """torch would cast state to the type of its parameter: here NAdam's mu_product from 32 bits to 16."""
    run = start(layout, factory=Counting, dtype=torch.bfloat16)
    run.train(0, 2)
    run.save(tmp_path / "saved")
    before = everything(run)
    run.train(2, 6)
    run.load(tmp_path / "saved")
    assert everything(run) == before


class Counting(optim.NAdam):
    """Keeps a number and a None, too."""

    pipec_elementwise = True

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state |= {"n": state.get("n", 0) + 1, "none": None}


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


sgd = functools.partial(optim.SGD, lr=0.1, momentum=0.9)


class TestWhatDoesNotFit:
    """Each is refused before anything changes: the run then goes on as if nobody had tried."""

    REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
        "sizes": ({"model": lambda: Net(width=8)}, "words.weight is float64[11, 10] in the file"),
        "more": ({"model": lambda: nn.Sequential(Net()), "factory": sgd}, "it has no 0.words.weight"),
        "untied": ({"model": lambda: Net(tied=False)}, "head.weight is tied"),
        "optimizer": ({"factory": sgd}, "the optimizer to load it is SGD (8 parameters)"),
        "groups": (
            {"factory": functools.partial(decayed, chosen=lambda name, _: "weight" in name)},
            "body.4.weight is in group 0 of the optimizer",
        ),
        "meta": ({"model": on_meta}, "call to_empty(device=...)"),
    }

    @pytest.mark.parametrize("what", REFUSED)
    def test_is_refused(self, stopped: Stopped, what: str) -> None:
        options, said = self.REFUSED[what]
        run = start("1 stage", **options)
        before = everything(run)
        with pytest.raises(pipec.PipecError) as caught:
            run.load(stopped["1 stage"][1])
        assert said in str(caught.value)
        assert everything(run) == before

    def test_companions(self, stopped: Stopped, tmp_path: Path) -> None:
        run, path, _ = stopped["2 stages, own optimizer"]
        before = everything(run)
        foreign = optim.SGD([nn.Parameter(torch.ones(1))])
        for passed, said in (
            ({}, "has the state of AdamW; pass that as optimizer=..."),
            ({"optimizer": run.optimizer}, "has the state of OneCycleLR, and scheduler is None"),
            ({"scheduler": 3}, "scheduler is 3; expected an LR scheduler"),
            ({"optimizer": foreign, "scheduler": run.scheduler}, "that is not in the model"),
        ):
            with pytest.raises(pipec.InputError) as caught:
                run.pipe.load_checkpoint(path, **passed)
            assert said in str(caught.value)
        run.pipe.save_checkpoint(tmp_path / "alone")
        with pytest.raises(pipec.InputError, match="has no state of an optimizer"):
            run.pipe.load_checkpoint(tmp_path / "alone", optimizer=run.optimizer)
        with pytest.raises(pipec.InputError, match="leave out optimizer"):
            stopped["1 stage"][0].pipe.save_checkpoint(tmp_path / "x", optimizer=run.optimizer)
        assert everything(run) == before

    @pytest.mark.parametrize("extra", [torch.ones(2**20), {"a": [{1, 2}]}])
    def test_extra(self, stopped: Stopped, extra: Any, tmp_path: Path) -> None:
        with pytest.raises(pipec.InputError, match=r"extra.* a checkpoint stores None, numbers, text"):
            stopped["1 stage"][0].save(tmp_path / "new", extra=extra)
        assert not list(tmp_path.iterdir())

    def test_gradients_that_wait(self, stopped: Stopped, tmp_path: Path) -> None:
        run = stopped["2 replicas, shard=optimizer"][0]
        with run.pipe.accumulate():
            run.pipe.step(torch.arange(8))
        with pytest.raises(pipec.InputError, match="gradients have been accumulated"):
            run.save(tmp_path / "new")
        run.pipe.step(torch.arange(8))
        run.save(tmp_path / "new")


def everything(run: Run) -> str:
    """All that a checkpoint could change."""
    optimizer = run.optimizer or run.pipe.optimizer
    states = (run.pipe.state_dict(), optimizer.state_dict(), run.scheduler.state_dict())
    given = (*states, torch.get_rng_state().sum(), run.pipe.num_steps)
    return pformat(
        pytree.tree_map_only(torch.Tensor, lambda x: (x.dtype, x.shape if x.is_meta else x.tolist()), given)
    )


class TestHuggingFace:
    def test_a_process_killed_anywhere_leaves_a_folder_for_from_pretrained(self, tmp_path: Path) -> None:
        """Weights and configuration are of the same save, and all else that is in the folder stays."""
        model: Any = gpt2()[0]
        pipe, folder, number = pipec.compile(model, 2, microbatches=2), tmp_path / "saved", 1

        def save(filled: int) -> None:
            with torch.no_grad():
                model.transformer.ln_f.weight.fill_(filled)
            model.config.task_specific_params = {"filled": filled}
            pipe.save_pretrained(folder)

        save(0)
        (folder / "runs").mkdir()
        (folder / "runs" / "log").write_text("a line")
        (folder / "tokenizer.json").write_text("{}")
        while killed_in_call(functools.partial(save, number), number):
            found = find_folder(folder)
            loaded = AutoModelForCausalLM.from_pretrained(found)
            assert (loaded.transformer.ln_f.weight == loaded.config.task_specific_params["filled"]).all()
            assert (found / "runs" / "log").read_text() == "a line"
            assert (found / "tokenizer.json").exists()
            number += 1
        assert number > 10
        save(number)
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]

    @pytest.mark.slow
    def test_its_folder_has_weights_alone(self, tmp_path: Path) -> None:
        model: Any = gpt2()[0]
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        other = type(model)(model.config)
        pipe = pipec.compile(other, 2, microbatches=2)
        with pytest.raises(pipec.CheckpointError, match=r"has only weights.* pass model_only=True"):
            pipe.load_checkpoint(tmp_path)
        pipe.load_checkpoint(tmp_path, model_only=True)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        words = torch.arange(16).view(2, 8)
        loss = pipe.eval().step(input_ids=words, labels=words)
        torch.testing.assert_close(loss, model.eval()(input_ids=words, labels=words).loss.detach())
        with pytest.raises(pipec.CheckpointError, match=r"it has no words\.weight"):
            start("1 stage").pipe.load_checkpoint(tmp_path, model_only=True)


def test_a_state_that_is_no_tensor_is_told_of(tmp_path: Path, said: list[str]) -> None:
    class Counting(Net):
        def get_extra_state(self) -> int:
            return 3

    start("1 stage", model=lambda: nn.Sequential(Counting())).save(tmp_path / "saved")
    assert any("without the extra state (get_extra_state) of 0" in message for message in said)


def test_weights_alone_leave_the_rest(stopped: Stopped) -> None:
    run, other = stopped["2 stages"][0], start("1 stage", seed=7)
    other.pipe.load_checkpoint(stopped["2 stages"][1], model_only=True)
    run.load(stopped["2 stages"][1])
    assert repr(other.pipe.state_dict()) == repr(run.pipe.state_dict())
    assert other.pipe.num_steps == 0
    assert not other.pipe.optimizer.state_dict()["state"]
    with pytest.raises(pipec.InputError, match="takes neither"):
        other.pipe.load_checkpoint(stopped["2 stages"][1], model_only=True, scheduler=other.scheduler)


@settings(max_examples=25)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers() | st.tuples(st.booleans()), inner)
            | st.dictionaries(st.integers(), st.integers()).map(Counter)
            | st.binary()
            | st.lists(st.integers(-9, 9)).map(lambda given: torch.tensor(given, dtype=torch.int8))
        ),
    )
)
def test_values_come_back_as_they_were(value: Any) -> None:
    """A Counter is in the state of schedulers that have milestones."""
    found = read(written(plain(value, "it")))
    assert repr(found) == repr(value)
    assert type(found) is type(value)
