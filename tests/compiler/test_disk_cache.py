"""What an earlier process compiled is used if nothing has changed, and never otherwise."""

import contextlib
import functools
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import typing_extensions
from cache_mutations import CHANGES, PAIRS, SOURCE, Outcome, Setting, run, scope_of, steps
from slow_params import slow, slow_but
from torch import Tensor, nn
from torch._jit_internal import boolean_dispatch

import pipec
from pipec.capture.trace_text import UnknownValueError
from pipec.compiler import compile_cache, disk_cache, stored_call
from pipec.compiler.disk_cache import COMPILE_CACHE, DiskCache
from pipec.errors import PipecError
from pipec.schedules import (
    ASYNCHRONOUS_SCHEDULES,
    LOOPED_SCHEDULES,
    SCHEDULES,
    SEARCHED_SCHEDULES,
    foreign_schedule,
)
from pipec.torch_compat import is_own, replaced_code

Around = Callable[[], contextlib.AbstractContextManager[Any]]

SCRIPT = Path(__file__).parents[1] / "helpers" / "compile_cache_script.py"


def outcome(setting: Setting, folder: Path | None, caplog: pytest.LogCaptureFixture) -> Outcome | str:
    """What a run computes, or why it is refused."""
    try:
        return run(setting, folder, caplog)
    except PipecError as error:
        return str(error)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all tests of changes: each finds what the others have kept."""
    return tmp_path_factory.mktemp("kept")


def test_what_was_compiled_is_read_by_the_next_pipeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, plain = (run(Setting(), folder, caplog) for folder in (tmp_path, tmp_path, None))
    assert (first.num_read, second.num_read, plain.num_read) == (0, 2, 0)
    assert first.same_as(plain)
    assert second.same_as(plain)


def test_a_graph_from_before_the_folder_was_named_is_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(12, 4)
    pipe = pipec.compile(net, devices=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    monkeypatch.delenv(COMPILE_CACHE, raising=False)
    pipe.step(x[:8], target=x[:8])
    monkeypatch.setenv(COMPILE_CACHE, str(tmp_path))
    pipe.step(x, target=x)
    pipe.eval_step(x, target=x)
    assert not [*tmp_path.iterdir()]


def test_nothing_is_written_unless_a_folder_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(Setting(), None, caplog)
    assert not [*tmp_path.iterdir()]


QUICK = (
    "a constant in the code",
    "the bytes of a global tensor",
    "tied weights",
    "a function of torch that the user wrote",
)


@pytest.mark.parametrize("name", slow_but(CHANGES, *QUICK))
def test_a_change_between_processes_is_noticed_or_makes_no_difference(
    name: str, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome(Setting(), kept, caplog)
    expected, first, second = (outcome(CHANGES[name], folder, caplog) for folder in (None, kept, kept))
    for found in (first, second):
        require_same(found, expected)


def require_same(found: Outcome | str, expected: Outcome | str) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        assert found.same_as(expected)


@pytest.mark.parametrize(
    "name",
    slow_but(PAIRS, "the memory of two buffers", "the last digit of a number in a condition on sizes"),
)
def test_a_change_that_the_traced_graph_does_not_show_is_noticed(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = PAIRS[name]
    outcome(before, tmp_path, caplog)
    found, expected = (outcome(after, folder, caplog) for folder in (tmp_path, None))
    require_same(found, expected)


@pytest.mark.slow
def test_what_a_batch_norm_has_counted_makes_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = SOURCE.replace("x = x + math", "self.seen = 3; x = self.norm(x)\n        x = x + math")

    def setting(count: int, *rows: int) -> Setting:
        def prepare(net: Any, _: Any) -> None:
            net.norm = nn.BatchNorm1d(8)
            net.norm.num_batches_tracked.fill_(count)

        return Setting(source, prepare=prepare, rows=16, calls=steps(*rows))

    run(setting(0, 8), tmp_path, caplog)
    second, plain = (run(setting(7, 8, 16), folder, caplog) for folder in (tmp_path, None))
    assert second.num_read == 1
    assert second.same_as(plain)


@pytest.mark.slow
def test_calls_of_other_rows_and_modes_are_read_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def calls(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
        found = [pipe.step(batch, target=batch) for batch in (x, x[:4], torch.cat([x, x]), x)]
        pipe.eval()
        return [*found, pipe.eval_step(x, target=x), pipe(x)["gate"], net.head.weight.grad.clone()]

    setting = Setting(calls=calls)
    first, second, plain = (run(setting, folder, caplog) for folder in (tmp_path, tmp_path, None))
    assert (first.num_read, second.num_read) == (0, 5)
    assert first.same_as(plain)
    assert second.same_as(plain)


@pytest.mark.parametrize("missing", slow_but(["evaluation", "rows"], "rows"))
def test_what_is_not_there_is_compiled_on_what_was_read(
    missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph of the step is captured again for it, and cut as before."""

    def step(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
        return [pipe.step(x, target=x)]

    def calls(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
        loss = pipe.step(x, target=x)
        other = pipe.eval_step(x, target=x) if missing == "evaluation" else pipe.step(x[:4], target=x[:4])
        return [loss, other, net.head.weight.grad.clone()]

    source = CHANGES["Python's state"].source  # its capture warns
    run(Setting(source, calls=step), tmp_path, caplog)
    second, plain = (run(Setting(source, calls=calls), folder, caplog) for folder in (tmp_path, None))
    assert second.num_read == 1
    assert second.said
    assert second.same_as(plain)


def test_what_changes_after_it_was_read_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The guards are those of this process."""

    def calls(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
        first = pipe.step(x, target=x)
        net.blocks[0].scale = 3.0
        return [first, pipe.step(x, target=x)]

    run(Setting(calls=lambda pipe, net, x: [pipe.step(x, target=x)]), tmp_path, caplog)
    second, plain = (run(Setting(calls=calls), folder, caplog) for folder in (tmp_path, None))
    assert second.num_read == 1
    assert second.same_as(plain)


@pytest.mark.parametrize("change", slow_but(["a global", "an attribute"], "a global"))
def test_tensors_of_the_program_are_read_where_they_are(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No guard notices what is written through ``.data``, and a step without the folder reads it."""

    def calls(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
        table = net.kept if change == "an attribute" else sys.modules["kept_model"].TABLE
        found = [pipe.step(x, target=x)]
        table.data.add_(1)
        found.append(pipe.step(x, target=x))
        table.data.add_(1)
        return [*found, pipe.eval_step(x, target=x), pipe.step(x[:4], target=x[:4])]

    first, second, plain = (
        run(Setting(calls=calls), folder, caplog) for folder in (tmp_path, tmp_path, None)
    )
    assert (first.num_read, second.num_read) == (0, 3)
    assert first.same_as(plain)
    assert second.same_as(plain)


def deaf() -> contextlib.AbstractContextManager[Any]:
    return replaced(logging.getLogger("pipec"), "filters", [lambda record: False])


def at_level(level: int) -> contextlib.AbstractContextManager[Any]:
    return replaced(logging.getLogger("pipec"), "level", level)


@pytest.mark.parametrize(
    ("before", "now"),
    [(deaf, contextlib.nullcontext), (lambda: at_level(logging.ERROR), lambda: at_level(logging.WARNING))],
    ids=["a filter", "a level"],
)
def test_a_process_hears_what_an_earlier_one_did_not(
    before: Around, now: Around, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = CHANGES["Python's state"]
    run(replace(setting, around=before), tmp_path, caplog)
    second, plain = (run(replace(setting, around=now), folder, caplog) for folder in (tmp_path, None))
    assert "sets attributes of the module" in "".join(plain.said)
    assert second.same_as(plain)


def step_and_evaluation(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
    return [*steps(8)(pipe, net, x), pipe.eval_step(x[:8], target=x[:8])]


@pytest.mark.parametrize("process", slow_but(["first", "second"], "first"))
def test_records_without_threads_are_said_again_once(
    process: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first process has to note them, and the second not to repeat them when it captures again."""
    setting = CHANGES["Python's state"]
    without_threads = replace(setting, around=lambda: replaced(logging, "logThreads", False))
    first, second = (without_threads, setting) if process == "first" else (setting, without_threads)
    run(replace(first, calls=steps(8)), tmp_path, caplog)
    second = replace(second, calls=steps(8) if process == "first" else step_and_evaluation)
    found, plain = (run(second, folder, caplog) for folder in (tmp_path, None))
    assert found.num_read == 1
    assert "sets attributes of the module" in "".join(plain.said)
    assert found.same_as(plain)


def step_and_step_on_half(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
    return [pipe.step(x, target=x), pipe.step(x[:4], target=x[:4])]


def test_a_graph_from_another_state_of_torch_is_another_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only the state in which a call is compiled on a graph counts, but that in which it was captured."""

    def around() -> contextlib.AbstractContextManager[Any]:
        patched: contextlib.AbstractContextManager[Any] = torch._functorch.config.patch(
            view_replay_for_aliased_outputs=not torch._functorch.config.view_replay_for_aliased_outputs
        )
        return patched

    def changing(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
        first = pipe.step(x, target=x)
        with around():
            return [first, pipe.step(x[:4], target=x[:4])]

    run(Setting(calls=changing), tmp_path, caplog)
    assert run(Setting(calls=step_and_step_on_half, around=around), tmp_path, caplog).num_read == 0
    assert run(Setting(calls=changing), tmp_path, caplog).num_read == 2


def test_a_graph_that_is_cut_anew_is_another_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile decides the first cut, and its times are not those of a graph that follows the cut."""
    monkeypatch.setattr(compile_cache, "MAX_SIGNATURES", 1)
    source = SOURCE.replace(" + TABLE", "").replace(" * self.kept", "")
    scope = scope_of(source)
    x = torch.randn(8, 8)
    example = pipec.Example(scope["Net"](), (x,), target=x, loss_fn=scope["loss_fn"])
    pipec.profile(example, microbatch_size=2, repeats=1).save(tmp_path / "profile.json")
    options, kept = {"devices": 2, "profile": tmp_path / "profile.json"}, tmp_path / "kept"

    def forgetting(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
        found = [pipe.step(x, target=x)]
        for scale, batch in ((3.0, x), (1.5, x[:4])):
            net.blocks[0].scale = scale
            found.append(pipe.step(batch, target=batch))
        return found

    run(Setting(source, options, calls=step_and_step_on_half), kept, caplog)
    setting = Setting(source, options, calls=forgetting)
    second, plain = (run(setting, folder, caplog) for folder in (kept, None))
    assert second.num_read == 1
    assert second.same_as(plain)


# damage


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Edits an entry, and makes its digest right again."""

    def damage(path: Path) -> None:
        document = json.loads(path.read_bytes().partition(b"\n")[2])
        change(document)
        data = json.dumps(document).encode()
        path.write_bytes(b"\n".join([disk_cache._digest(data), data]))

    return damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def nest(path: Path) -> None:
    data = b"[" * 100_000
    path.write_bytes(b"\n".join([disk_cache._digest(data), data]))


def without_programs(document: dict[str, Any]) -> None:
    document["programs"] = document["programs"][:1]


def with_a_missing_send(document: dict[str, Any]) -> None:
    lines = document["programs"][0].splitlines(keepends=True)
    document["programs"][0] = "".join(line for line in lines if " send " not in line)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "a flipped bit": flip,
    "empty": lambda path: path.write_bytes(b""),
    "a link": link,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "nested too deeply": nest,
    "no text": edited(lambda document: document.update(sources=[1, 2])),
    "another format": edited(lambda document: document.update(format="pipec compiled call 0")),
    "another key": edited(lambda document: document.update(key=document["key"] + " ")),
    "a field less": edited(lambda document: document.pop("decisions")),
    "a field more": edited(lambda document: document.update(more=1)),
    "a program less": edited(without_programs),
    "a program that would wait for ever": edited(with_a_missing_send),
    "code that does not compile": edited(lambda document: document.update(sources=["def"] * 2)),
    "constants that are none": edited(lambda document: document.update(constants="!!")),
    "a file that others may write": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", slow_but(DAMAGES, "truncated", "a program that would wait for ever"))
def test_a_damaged_entry_is_compiled_anew_and_replaced(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = Setting(calls=lambda pipe, net, x: [pipe.step(x, target=x)])
    run(step, tmp_path, caplog)
    (entry,) = tmp_path.glob("*.pipec")
    DAMAGES[damage](entry)
    second, third, plain = (run(step, folder, caplog) for folder in (tmp_path, tmp_path, None))
    assert second.num_read == 0
    assert second.same_as(plain)
    assert third.same_as(plain)
    if damage != "a folder":
        assert third.num_read == 1


# the folder


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    disk_cache._warn_once.cache_clear()
    return DiskCache(tmp_path / "kept")


def test_a_folder_keeps_what_was_written(cache: DiskCache) -> None:
    assert cache.read("key") is None
    cache.write("key", b"first\nlines")
    cache.write("key", b"second\nlines")
    assert cache.read("key") == b"second\nlines"
    assert cache.read("other") is None
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_is_not_used(cache: DiskCache, said: list[str]) -> None:
    cache.write("key", b"data")
    cache.folder.chmod(0o777)
    assert cache.read("key") is None
    cache.write("other", b"data")
    (message,) = said
    assert message == (
        f"{cache.folder} is not used as compilation cache: others may write to {cache.folder}, and its files "
        f"are code. Call `chmod go-w {cache.folder}`"
    )
    cache.folder.chmod(0o700)
    assert (cache.read("key"), cache.read("other")) == (b"data", None)


def test_a_folder_of_another_user_is_not_used(
    cache: DiskCache, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("key", b"data")
    monkeypatch.setattr(os, "geteuid", lambda: cache.folder.stat().st_uid + 1)
    assert cache.read("key") is None
    assert "belongs to user" in said[0]


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "kept")
    cache.write("key", b"data")
    cache.write("key", b"data")
    assert cache.read("key") is None
    (message,) = said
    assert "is not used as compilation cache" in message


def test_a_folder_in_a_home_that_is_not_known_is_told(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_cache._warn_once.cache_clear()
    monkeypatch.setenv(COMPILE_CACHE, "~nobody.is.called.so/kept")
    assert disk_cache.disk_cache() is None
    (message,) = said
    assert message.startswith("~nobody.is.called.so/kept is not used as compilation cache: ")


def test_what_was_used_longest_ago_is_evicted(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_BYTES", 350)
    for place, key in enumerate(("first", "second", "third")):
        cache.write(key, bytes(40))
        os.utime(cache.folder / disk_cache._name(key), (place, place))
    assert cache.read("first")
    foreign = cache.folder / "notes.txt"
    foreign.write_bytes(bytes(1000))
    cache.write("fourth", bytes(40))
    found = {key: cache.read(key) is not None for key in ("first", "second", "third", "fourth")}
    assert found == {"first": True, "second": False, "third": True, "fourth": True}
    cache.write("huge", bytes(400))
    assert cache.read("huge") is None
    assert foreign.exists()


def test_two_may_write_at_once(cache: DiskCache) -> None:
    values = [bytes([each]) * 100_000 for each in range(8)]

    def write(value: bytes) -> None:
        for _ in range(10):
            cache.write("key", value)
            assert cache.read("key") in values

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.read("key") in values
    assert len([*cache.folder.iterdir()]) == 1


# what is torch's own


@torch.library.custom_op("pipec::looks_own", mutates_args=())
def looks_own(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


class Twice:
    def get_enum(self, reduction: str) -> int:
        return 2


@torch.no_grad()
def without_gradients(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (torch.sin, True),
        (torch.nn.functional.layer_norm, True),
        (torch.ops.aten.sin.default, True),
        (torch.ops.pipec.check_branch.default, True),
        ("mean", True),
        (torch.ops.mine.twice.default, False),
        (torch.ops.pipec.looks_own.default, False),
        (lambda x: x, False),
        (Tensor.sin, True),
        ("no_such_method", False),
        (torch.autograd.Function, False),
        (torch.jit.script, False),
        (without_gradients, False),
        (torch.ops.higher_order.cond, False),
    ],
)
def test_functions_of_torch_and_of_pipec_are_told_from_others(target: Any, expected: bool) -> None:
    if target is torch.jit.script:
        target = torch.jit.script(lambda_free)
    assert is_own(target) is expected


def lambda_free(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.device("cpu"),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        lambda: replaced(Tensor, "mean", lambda x: x),
        lambda: replaced(torch, "relu", torch.no_grad()(lambda x: x)),
        lambda: replaced(torch, "relu", nn.ReLU()),
        lambda: replaced(torch, "sin", lambda x: x),
        lambda: replaced(torch.nn._reduction, "get_enum", lambda reduction: 2),
        lambda: replaced(torch.nn._reduction, "get_enum", functools.partial(lambda reduction: 2)),
        lambda: replaced(torch.nn._reduction, "get_enum", functools.cache(lambda reduction: 2)),
        lambda: replaced(torch.nn._reduction, "get_enum", Twice().get_enum),
        lambda: mock.patch("torch.nn._reduction.get_enum", return_value=2),
        lambda: replaced(torch, "relu", typing_extensions.deprecated("")(lambda x: x)),
        lambda: replaced(torch, "relu", boolean_dispatch("", 0, False, lambda x: x, lambda x: x, "", "")),
    ],
)
def test_what_replaces_torch_is_found(around: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    assert replaced_code() == ""
    with around():
        assert replaced_code()
    with replaced(torch, "compile", lambda model: model):  # as Lightning does
        assert replaced_code() == ""


def test_what_torch_imports_of_other_libraries_replaces_nothing() -> None:
    module = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    assert module.url_to_fs.__module__ == "fsspec.core"
    assert replaced_code() == ""
    for name in ("url_to_fs", "fsync"):  # imported, and not imported
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, fsspec.core.split_protocol, raising=False)
            assert f"{name} was replaced by a function in {fsspec.core.__file__}" in replaced_code()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("none"),
        lambda: torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        ),
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C.DisableTorchFunctionSubclass,
    ],
)
def test_what_a_thread_asks_of_torch_is_part_of_the_key(around: Around) -> None:
    before = stored_call.process_text(gpu=False)
    with around():
        assert stored_call.process_text(gpu=False) != before
    with torch.inference_mode():  # which captures leave, and calls have in their keys
        assert stored_call.process_text(gpu=False) == before


@pytest.mark.parametrize(
    "registry", [SCHEDULES, LOOPED_SCHEDULES, SEARCHED_SCHEDULES, ASYNCHRONOUS_SCHEDULES]
)
def test_a_program_that_changes_the_schedules_is_told(registry: Any) -> None:
    assert not foreign_schedule("auto")
    held = dict(registry)
    first, *_ = held
    try:
        del registry[first]
        assert foreign_schedule("auto") == first
        registry.update({first: held[first], "mine": held[first]})
        assert foreign_schedule("mine") == "mine"
    finally:
        registry.clear()
        registry.update(held)  # in their order, which messages have


def test_another_code_of_a_function_of_torch_is_another_key() -> None:
    before = stored_call.process_text(gpu=False)
    code = nn.functional.softsign.__code__
    other = code.replace(co_consts=tuple(2 if each == 1 else each for each in code.co_consts))
    with replaced(nn.functional.softsign, "__code__", other):
        assert replaced_code() == ""
        assert stored_call.process_text(gpu=False) != before
    assert stored_call.process_text(gpu=False) == before


def test_another_source_of_pipec_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = stored_call.process_text(gpu=False)
    monkeypatch.setattr(stored_call, "_source_digest", lambda: "another")
    assert stored_call.process_text(gpu=False) != before
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert stored_call.process_text(gpu=False) != before


def test_source_that_changed_after_it_was_imported_is_not_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(pipec, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(pipec, "_IMPORTED", time.time() + 10)
    assert stored_call._source_digest()
    os.utime(tmp_path / "__init__.py", (0, 0))  # as of a file that was copied with its times
    monkeypatch.setattr(pipec, "_IMPORTED", time.time() - 10)
    with pytest.raises(UnknownValueError, match="changed after it was imported"):
        stored_call._source_digest()


def test_source_counts_as_imported_before_the_first_call_is_compiled() -> None:
    code = "import sys, time, pipec.api; print(pipec._IMPORTED < time.time(), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    is_noted, *modules = done.stdout.split()
    assert is_noted == "True"
    assert "pipec.schedules" in modules
    assert "pipec.compiler.stored_call" not in modules


# processes


def printed(words: tuple[str, ...], folder: Path | None, working: Path, num_ranks: int = 0) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(torchrun if num_ranks else ()), str(SCRIPT), *words]
    environment = {
        **os.environ,
        "PIPEC_COMPILE_CACHE": str(folder or ""),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(pipec.__file__).parents[1]),
    }
    done = subprocess.run(command, env=environment, cwd=working, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("words", "num_ranks"),
    [
        slow(("gpt2",), 0),
        slow(("bert",), 0),
        slow(("resnet",), 0),
        slow(("counting",), 0),
        slow(("gpt2", "train"), 0),
        slow(("counting", "train", "stream"), 0),
        slow(("gpt2", "train", "ranks"), 2),
    ],
)
def test_a_second_process_computes_the_same_bits(
    words: tuple[str, ...], num_ranks: int, tmp_path: Path
) -> None:
    (working := tmp_path / "elsewhere").mkdir()
    runs = (tmp_path, tmp_path), (tmp_path, working), (None, tmp_path)
    cold, warm, plain = (printed(words, *folders, num_ranks) for folders in runs)
    assert cold["num_read"] == plain["num_read"] == 0
    assert warm["num_read"] == warm["num_compiled"]
    for found in (cold, warm):
        assert found["found"] == plain["found"]
        assert found["said"] == plain["said"]
