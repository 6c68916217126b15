"""Checkpoints of processes over gloo: into and out of any layout, and what fails on one rank fails on all."""

import json
import textwrap
from pathlib import Path

import pytest
import torch
from resumable_training import start
from transformers import AutoModelForCausalLM
from worker_processes import run_lines

import pipec

pytestmark = pytest.mark.slow

SAME = 1e-9

IMPORTS = """
import json, os, time
from pathlib import Path
import torch, pipec
from resumable_training import *
rank, here = int(os.environ["RANK"]), Path(__file__).parent
"""


def told(tmp_path: Path, body: str) -> list[list[str]]:
    """The lines of each of two ranks that run the script in a folder."""
    return run_lines(IMPORTS + textwrap.dedent(body), 2, tmp_path)


def test_processes_go_on_from_one_and_one_from_processes(tmp_path: Path) -> None:
    """Every layout loads what one process saved, and what every other one saved."""
    alone = start("2 stages")
    alone.train(0, 3)
    alone.save(tmp_path / "alone")
    expected = alone.train(3, 8)
    printed = told(
        tmp_path,
        """
        skipped = ("2 stages, zb-h1", "2 replicas")
        layouts = [layout for layout in LAYOUTS if LAYOUTS[layout]["devices"] == 2 and layout not in skipped]
        losses, runs = {}, {}
        for layout in layouts:
            run = runs[layout] = start(layout, seed=7 + rank, timeout=240.0)
            run.load(here / "alone")
            run.save(here / f"{layout}, before a step")
            losses[layout] = run.train(3, 6)
            run.save(here / layout, asynchronous=True)
            losses[layout] += run.train(6, 8)
            run.pipe.finish_saving()
        for layout, run in runs.items():
            for saved in layouts:
                run.load(here / saved)
                losses[f"{saved} -> {layout}"] = run.train(6, 8)
            run.load(here / f"{layouts[0]}, before a step")
            losses[f"before a step -> {layout}"] = run.train(3, 8)
        torch.manual_seed(50 + rank)
        run.save(here / "seeded")
        drawn = torch.rand(1)
        run.load(here / "seeded")
        assert torch.equal(torch.rand(1), drawn)
        print(json.dumps(losses))
        """,
    )
    first, second = (json.loads(lines[-1]) for lines in printed)
    assert first == second
    for name, losses in first.items():
        assert losses == pytest.approx(expected[-len(losses) :], rel=SAME), name
        there, _, here = name.partition(" -> ")
        assert there != here or losses == first[here][-2:]
    for layout in ("2 stages", "2 replicas, shard=parameters", "2 replicas, own optimizer"):
        alone.load(tmp_path / layout)
        assert alone.pipe.num_steps == 6
        assert alone.train(6, 8) == pytest.approx(expected[-2:], rel=SAME)
    alone.load(tmp_path / "seeded")
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(50)))


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    first, second = told(
        tmp_path,
        """
        from pipec.checkpoint import shards
        run = start("2 replicas, shard=parameters", timeout=240.0)
        run.train(0, 2)
        run.save(here / "saved", extra="before")
        run.train(2, 3)
        own = start("2 stages, own optimizer", timeout=240.0)

        def in_background():
            run.save(here / "saved", asynchronous=True)
            run.train(3, 4)
            run.save(here / "saved")

        def attempt(what, call):
            try:
                call()
                print(what, "went well")
            except pipec.PipecError as error:
                said = " ".join(str(error).split()).replace(str(here), "")
                print(what, type(error).__name__, said)

        write, asked = shards.write_file, []
        for at in (0, 1, 0):
            def fail(path, data):
                asked.append(1)
                if rank == 1 and len(asked) > at:
                    raise OSError(28, "No space left on device", "its file")
                return write(path, data)
            shards.write_file = fail
            attempt("full", in_background if at == 1 else lambda: run.save(here / "saved"))
            asked.clear()
        shards.write_file = write
        attempt("extra", lambda: run.save(here / "saved", extra=rank))
        attempt("folder", lambda: run.save(here / f"saved{rank}"))
        attempt("extra", lambda: run.save(here / "saved", extra=object() if rank else 1))
        given = {"optimizer": torch.optim.SGD(own.pipe.parameters(), lr=0.1)} if rank else {}
        attempt("how", lambda: run.save(here / "saved", asynchronous=rank == 1))
        attempt("optimizer", lambda: own.pipe.save_checkpoint(here / "saved", **given))
        print(sorted(path.name for path in here.glob("*saved*")))
        if rank == 1:
            (here / "saved" / "checkpoint.pt").write_text("{}")
        run.pipe.ranks.barrier()
        before = {name: x.clone() for name, x in run.pipe.local_state_dict().items()}
        attempt("damaged", lambda: run.load(here / "saved"))
        print(all(torch.equal(x, before[name]) for name, x in run.pipe.local_state_dict().items()))
        print(run.train(3, 4) is not None)
        """,
    )
    full = "full CheckpointError {}saving to /saved failed: its file: No space left on device"
    assert first[:3] == [full.format("rank 1: ")] * 3
    assert second[:3] == [full.format("")] * 3
    for mine in (first, second):
        assert mine[3].startswith("extra InputError extra of rank 1 differs from rank 0's; pass")
        assert mine[4].startswith("folder InputError the ranks do not make the same calls")
        assert "extra is <object object" in mine[5]
        assert mine[6].startswith("how InputError the ranks do not make the same calls")
        assert mine[7].startswith("optimizer InputError some ranks passed an optimizer")
        assert mine[8] == "['saved']"
        assert "/saved/checkpoint.pt is not what was saved" in mine[-3]
        assert mine[-2:] == ["True", "True"]


def test_what_many_ranks_wrote_is_a_folder_of_hugging_face(tmp_path: Path) -> None:
    """Each rank writes its part of parameters that none has as a whole."""
    told(
        tmp_path,
        """
        from huggingface_models import gpt2
        options = {"shard": "parameters", "microbatches": 2, "optimizer": torch.optim.AdamW}
        pipe = pipec.compile(gpt2()[0], 2, stages=1, **options)
        words = torch.arange(16).view(2, 8)
        pipe.step(input_ids=words, labels=words)
        pipe.save_checkpoint(here / "saved")
        logits = pipe.eval()(input_ids=words).logits
        torch.save(logits, here / f"logits{rank}")
        """,
    )
    assert len([*(tmp_path / "saved").glob("*.safetensors")]) == 4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    expected = torch.load(tmp_path / "logits0")
    torch.testing.assert_close(loaded(torch.arange(16).view(2, 8)).logits, expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_killed_while_it_writes(asynchronous: bool, tmp_path: Path) -> None:
    """The other learns of it, and the checkpoint before is there."""
    with pytest.raises(AssertionError, match="exit codes of the ranks"):
        told(
            tmp_path,
            """
            import signal
            from pipec import saved_folders
            run = start("2 stages", timeout=240.0)
            run.train(0, 1)
            run.save(here / "saved", extra="before")
            run.train(1, 2)
            if rank == 1:
                saved_folders.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            try:
                run.save(here / "saved", asynchronous=ASYNCHRONOUS)
                run.pipe.finish_saving()
            except pipec.TransportError as error:
                (here / "said").write_text(str(error))
            """.replace("ASYNCHRONOUS", str(asynchronous)),
        )
    said = (tmp_path / "said").read_text()
    assert "rank 1" in said
    assert sorted(path.name for path in tmp_path.glob("*saved*")) == ["saved"]
    assert start("1 stage").load(tmp_path / "saved") == "before"


def test_a_process_waits_for_its_checkpoint_and_ends_with_its_failure(tmp_path: Path) -> None:
    """Even if nobody asks, and although a step has failed meanwhile, by which no rank can make another."""
    script = """
        from pipec.checkpoint import shards
        run = start("2 stages", timeout=240.0)
        run.train(0, 1)
        write = shards.write_file
        def slow(path, data):
            time.sleep(0.5)
            if rank == 1 and FAILS:
                raise OSError(28, "No space left on device", "its file")
            return write(path, data)
        shards.write_file = slow
        run.save(here / "saved", extra="whole", asynchronous=True)
        if rank == 1:
            run.pipe.ranks.distributed.fail(RuntimeError("a step"))
        """
    told(tmp_path, script.replace("FAILS", "False"))
    assert start("1 stage").load(tmp_path / "saved") == "whole"
    with pytest.raises(AssertionError, match=r"exit codes of the ranks.*\[1, 1\]"):
        told(tmp_path, script.replace("FAILS", "True").replace('"saved"', '"other"'))
    assert not list(tmp_path.glob("*other*"))


def test_each_replica_goes_on_in_its_own_data(tmp_path: Path) -> None:
    """Which one process cannot, for it does not know which rows of the whole those were."""
    printed = told(
        tmp_path,
        """
        from torch.utils.data import DataLoader
        def loader():
            generator = torch.Generator().manual_seed(rank)
            own = torch.arange(24) % WORDS if rank else torch.arange(0, 48, 2) % WORDS
            return DataLoader(own, 4, shuffle=True, generator=generator)
        first, second = (start("2 replicas", seed=seed, batch="local", timeout=240.0) for seed in (0, 7))
        losses = []
        for loss in first.pipe.stream(loader()):
            first.scheduler.step()
            losses.append(float(loss))
            if len(losses) == 2:
                first.save(here / "saved", asynchronous=True)
        second.load(here / "saved")
        went_on = []
        for loss in second.pipe.stream(loader(), resume=True):
            second.scheduler.step()
            went_on.append(float(loss))
        print(json.dumps([losses[2:], went_on]))
        """,
    )
    for lines in printed:
        expected, found = json.loads(lines[-1])
        assert len(found) == 4
        assert found == expected
    alone = start("2 replicas", batch="local")
    alone.load(tmp_path / "saved")
    with pytest.raises(
        pipec.InputError, match=r"positions of 2 parts of the data, and pipe.num_replicas is 1"
    ):
        alone.pipe.stream([], resume=True)
