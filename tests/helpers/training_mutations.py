"""Faults put into pipec on purpose, which the random training loops must find.

    python training_mutations.py            # all of them: how many cases and seconds each took to be found
    python training_mutations.py "clip factor above 1"

A fault is a context in which a part of pipec is replaced by one that is wrong.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from random_training_loops import (
    ONE_PROCESS_SEEDS,
    TWO_RANKS_SEEDS,
    Result,
    begin,
    draw,
    fails,
    run,
    run_on_two_ranks,
)

from pipec.ir import ParameterShard, Sharding
from pipec.pipeline.pipeline import Pipeline
from pipec.runtime import executions
from pipec.runtime.optimizers import PipelineOptimizer, StageOptimizer
from pipec.runtime.stages.flat_bucket import FlatBucket, ShardedBucket
from pipec.runtime.stages.gradients import GradientAccumulator
from pipec.runtime.step import optimizer_updates, overflow_check
from pipec.runtime.step.optimizer_updates import OptimizerUpdates, StageUpdate

Fault = Callable[[], contextlib.AbstractContextManager[Any]]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """``make`` is given what ``owner`` has under ``name``, and returns what it is to have instead."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def nothing(_: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def states_dropped(attach: Any) -> Any:
    def wrong(self: PipelineOptimizer, *args: Any) -> None:
        self._stages, self._loaded = [], {}
        attach(self, *args)

    return wrong


def none_for_zero(zero_grad: Any) -> Any:
    return lambda self, set_to_none=True: zero_grad(self)


def group_of_others(take: Any) -> Any:
    def wrong(self: StageOptimizer, *args: Any) -> None:
        take(self, *args)
        last = len(self._leader.param_groups) - 1
        self._optimizers = [(each, [last - number for number in own]) for each, own in self._optimizers]

    return wrong


def first_groups_kept(update: Any) -> Any:
    def wrong(self: StageOptimizer, gradients: Any, factor: Any = None, groups: Any = None) -> None:
        if not hasattr(self, "first"):
            self.first = self._leader.hyperparameters()  # type: ignore[attr-defined]
        update(self, gradients, factor, self.first)

    return wrong


def undecayed(update: Any) -> Any:
    def wrong(self: StageOptimizer, gradients: Any, factor: Any = None, groups: Any = None) -> None:
        groups = self._leader.hyperparameters()  # type: ignore[attr-defined]
        update(
            self, gradients, factor, [{**groups[0]}, *({**each, "weight_decay": 0.0} for each in groups[1:])]
        )

    return wrong


def zeros_for_none(update: Any) -> Any:
    def wrong(self: StageOptimizer, gradients: Any, *args: Any) -> None:
        zeros = {name: torch.zeros_like(each.detach()) for name, each in self._tensors.items()}
        update(self, {**zeros, **gradients}, *args)

    return wrong


def second_dropped(add: Any) -> Any:
    def wrong(self: GradientAccumulator, gradients: list[Any]) -> None:
        self.seen = getattr(self, "seen", 0) + 1  # type: ignore[attr-defined]
        if self.seen % 2:
            add(self, gradients)

    return wrong


def halved(begin_step: Any) -> Any:
    def wrong(self: GradientAccumulator, *args: Any) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and index not in self._separate:
                parameter.grad.mul_(0.5)
        begin_step(self, *args)

    return wrong


def averaged(add_reduced: Any) -> Any:
    return lambda self, index, total: add_reduced(self, index, total / 2 if index in self._homes else total)


def counted_twice(add_tied: Any) -> Any:
    return lambda self, index, gradient: add_tied(self, index, 2 * gradient)


def rolled(gradients: Any) -> Any:
    return lambda self: {name: each.roll(1) for name, each in gradients(self).items()}


def one_short(piece_of: Any) -> Any:
    def wrong(self: Sharding, index: int, replica: int) -> ParameterShard:
        piece: ParameterShard = piece_of(self, index, replica)
        return dataclasses.replace(piece, stop=piece.stop - (piece.stop < self.sizes[index]))

    return wrong


def left_in_evaluation(eval_step: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = eval_step(self, *args, **kwargs)
        self.eval()
        return loss

    return wrong


def own_groups_kept(load: Any) -> Any:
    def wrong(self: PipelineOptimizer, state: Any) -> None:
        before = self.hyperparameters()
        load(self, state)
        for group, numbers in zip(self.param_groups, before, strict=True):
            group.update(numbers)

    return wrong


def last_left_out(load: Any) -> Any:
    return lambda self, state, strict=True, assign=False: load(
        self, dict([*state.items()][:-1]), False, assign
    )


def alike(_: Any) -> Any:
    return lambda weight, leaves, unflatten_call, batched, sizes: [1 / len(sizes)] * len(sizes)


@contextlib.contextmanager
def always_updating(self: Any) -> Iterator[None]:
    yield


def of_large(gradient_norms: Any) -> Any:
    return lambda gradients, exactly=True: [
        each * (each > 0.02) for each in gradient_norms(gradients, exactly)
    ]


def of_all_replicas(counted: Any) -> Any:
    return property(lambda self: self._whole() | self._shared())


def own_norm(clip: Any) -> Any:
    return lambda self, max_norm, norm_type=2.0: clip(self, max_norm, 2.0)


FAULTS: Mapping[str, Fault] = {
    "a state is dropped where programs are bound": replaced(PipelineOptimizer, "attach", states_dropped),
    "pipe.zero_grad does nothing": replaced(Pipeline, "zero_grad", nothing),
    "pipe.zero_grad leaves no zeros": replaced(Pipeline, "zero_grad", none_for_zero),
    "pipe.optimizer.zero_grad does nothing": replaced(PipelineOptimizer, "zero_grad", nothing),
    "groups have the numbers of others": replaced(StageOptimizer, "_take", group_of_others),
    "schedulers are not seen": replaced(StageOptimizer, "update", first_groups_kept),
    "weight decay of later groups is dropped": replaced(StageOptimizer, "update", undecayed),
    "what has no gradient is updated": replaced(StageOptimizer, "update", zeros_for_none),
    "clip factor above 1": replaced(
        optimizer_updates, "clip_factor", lambda _: lambda squares, most: most / (squares.sqrt() + 1e-6)
    ),
    "the norm leaves out small gradients": replaced(overflow_check, "gradient_norms", of_large),
    "the norm is always the second": replaced(Pipeline, "clip_grad_norm_", own_norm),
    "a microbatch's gradient is lost": replaced(GradientAccumulator, "keep", second_dropped),
    "what was accumulated is halved": replaced(GradientAccumulator, "begin_step", halved),
    "accumulate() updates": replaced(Pipeline, "accumulate", lambda _: always_updating),
    "replicas average": replaced(GradientAccumulator, "add_reduced", averaged),
    "tied gradients count twice": replaced(GradientAccumulator, "add_tied", counted_twice),
    "gradients of a shard are off by one": replaced(ShardedBucket, "gradients", rolled),
    "the slice of a shard is one too short": replaced(Sharding, "_piece", one_short),
    "eval_step leaves the mode": replaced(Pipeline, "eval_step", left_in_evaluation),
    "a loaded state is ignored": replaced(StageOptimizer, "load", nothing),
    "loaded learning rates are ignored": replaced(PipelineOptimizer, "load_state_dict", own_groups_kept),
    "load_state_dict leaves one out": replaced(Pipeline, "load_state_dict", last_left_out),
    "what scripts do to shards is not seen": replaced(OptimizerUpdates, "follow_script", nothing),
    "microbatches count alike": replaced(executions, "loss_weights", alike),
}

OF_RANKS: Mapping[str, Fault] = {
    "replicas count twice in the norm": replaced(StageUpdate, "norm_gradients", of_all_replicas),
    "what was updated is not gathered": replaced(ShardedBucket, "start_gather", nothing),
    "replicas do not sum": replaced(FlatBucket, "finish_reduce", lambda _: lambda *_: {}),
    "shares are not taken over": replaced(ShardedBucket, "reshard", lambda _: ShardedBucket.drop),
}
"""What only processes that each have a replica can get wrong."""

AT_ONCE = 4
"""Cases of ranks that run in the same processes."""


def find(name: str) -> tuple[Result | None, int]:
    """The first case of the tests that is not equal with a fault, and the number of cases."""
    if name in OF_RANKS:
        return _find_on_ranks(name)
    with FAULTS[name]():
        for number, seed in enumerate(ONE_PROCESS_SEEDS):
            result = run(draw(seed, 1))
            if fails(result):
                return result, number + 1
    return None, len(ONE_PROCESS_SEEDS)


def _find_on_ranks(name: str) -> tuple[Result | None, int]:
    for first in range(0, len(TWO_RANKS_SEEDS), AT_ONCE):
        with tempfile.TemporaryDirectory() as scratch:
            seeds = TWO_RANKS_SEEDS[first : first + AT_ONCE]
            ranks = run_on_two_ranks(seeds, Path(scratch), ["--fault", name])
        for number, pair in enumerate(zip(*ranks, strict=True)):
            if found := next(filter(fails, pair), None):
                return found, first + number + 1
    return None, len(TWO_RANKS_SEEDS)


def main() -> None:
    begin()
    for name in sys.argv[1:] or [*FAULTS, *OF_RANKS]:
        start, busy = time.monotonic(), time.process_time()
        result, count = find(name)
        seconds = f"{time.monotonic() - start:.0f} s, {time.process_time() - busy:.1f} s of the processor"
        told = f"seed {result.seed}: {result.detail[:110]}" if result else "NOT FOUND"
        print(json.dumps([name, count, seconds, told]), flush=True)


if __name__ == "__main__":
    main()
