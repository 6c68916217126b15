"""Checkpoints in one process: training goes on as if it had never stopped, and whatever is wrong is said."""

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_saves import killed_in_call
from resumable_training import LAYOUTS, Net, Run, decayed, start
from torch import nn, optim
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

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
        assert run.load(path) == {"layout": saved, "seen": (1, 2.0)}
        assert run.pipe.num_steps == STOP
        last = END if saved == resumed else STOP + 2
        losses = run.train(STOP, last)
        if saved == resumed:
            assert losses == expected
        assert losses == pytest.approx(expected[: last - STOP], rel=SAME)


def test_gradients_are_dropped_when_loading(stopped: Stopped) -> None:
    run, path, expected = stopped["2 stages, own optimizer"]
    run.load(path)
    run.pipe.step(torch.arange(8))
    run.load(path)
    assert run.train(STOP, END) == expected


def test_a_scheduler_with_milestones_goes_on(tmp_path: Path) -> None:
    """It keeps them in a Counter."""
    run, again = (start("2 stages, own optimizer", seed=seed) for seed in (0, 7))
    for each in (run, again):
        each.scheduler = optim.lr_scheduler.MultiStepLR(each.optimizer, [2, 4], 0.1)
    run.train(0, 1)
    run.save(tmp_path / "saved", extra=Counter({3: 2}))
    expected = run.train(1, 6)
    assert again.load(tmp_path / "saved") == Counter({3: 2})
    assert again.scheduler.milestones == run.scheduler.milestones
    assert again.train(1, 6) == expected


@pytest.mark.slow
def test_state_keeps_its_type(tmp_path: Path) -> None:
    """torch would cast state to the type of its parameter: here from 32 bits to 16."""
    for layout in ("1 stage", "2 stages, own optimizer"):
        run = start(layout, factory=Momentum, dtype=torch.bfloat16)
        run.train(0, 2)
        run.save(tmp_path / layout)
        before = everything(run)
        run.train(2, 6)
        run.load(tmp_path / layout)
        assert everything(run) == before


class Momentum(optim.Optimizer):
    """Keeps 32 bits for parameters of 16, and a number and a None beside them."""

    pipec_elementwise = True

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 0.1, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["betas"], tuple)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        zeros = torch.zeros_like(parameter, dtype=torch.float32)
                        state |= {"sum": zeros, "n": 0, "none": None}
                    state["n"] += 1
                    state["sum"].mul_(0.9).add_(parameter.grad.float() / 3)
                    parameter.sub_((group["lr"] * state["sum"]).to(parameter.dtype))


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
    @pytest.fixture
    def model(self) -> GPT2LMHeadModel:
        torch.manual_seed(0)
        sizes = {"vocab_size": 19, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def test_a_process_killed_anywhere_leaves_a_folder_for_from_pretrained(
        self, model: GPT2LMHeadModel, tmp_path: Path
    ) -> None:
        """Weights and configuration are of the same save, and all else that is in the folder stays."""
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
        others = folder.stat().st_ino
        while killed_in_call(functools.partial(save, number), number):
            found = find_folder(folder)
            loaded = AutoModelForCausalLM.from_pretrained(found)
            assert (loaded.transformer.ln_f.weight == loaded.config.task_specific_params["filled"]).all()
            assert (found / "runs" / "log").read_text() == "a line"
            assert (found / "tokenizer.json").exists()
            number += 1
        assert number > 10
        save(number)
        assert folder.stat().st_ino != others
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]

    @pytest.mark.slow
    def test_its_folder_has_weights_alone(self, model: GPT2LMHeadModel, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path, max_shard_size="2KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        other = GPT2LMHeadModel(model.config)
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
    found = read(written(plain(value, "it")))
    assert repr(found) == repr(value)
    assert type(found) is type(value)
