"""Makes each call of a pipeline one of all ranks: rank 0 decides what they do, or all raise one error."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from pipec.errors import InputError
from pipec.runtime.messages.call_description import (
    CallDescription,
    describe_differences,
    describe_leaf,
    values_digest,
)
from pipec.runtime.messages.exchange import Answer, CallRole, Decide, RankNote, no_decision
from pipec.runtime.processes.judge import format_ranks
from pipec.runtime.processes.stop_signals import STOP_SIGNALS, exit_all_ranks
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step_state import StepState


class CallAgreement:
    """Compares what the ranks were called with, and what they did since the last call."""

    def __init__(self, ranks: Ranks, steps: StepState) -> None:
        self.ranks, self.is_distributed, self._steps = ranks, ranks.world.is_distributed, steps
        self._backward_factors: dict[int, Tensor] = {}
        self._before_stop: list[Callable[[], object]] = []
        self._process = os.getpid()

    def require_same_call(
        self,
        kind: str,
        call_description: CallDescription,
        decide: Decide = no_decision,
        numbers: Sequence[float] = (),
        call_role: CallRole = CallRole.REQUIRED,
    ) -> Answer:
        """What rank 0 decides, once it has found that every rank makes this call with the same arguments.

        Raises InputError if they do not, or if this process cannot reach the others.
        """
        self.refuse_fork()
        call = f"{kind}, after {self._steps.num_steps} steps"
        factors, self._backward_factors = sorted(self._backward_factors.items()), {}
        backwards = {f"backward of step {step}": f"times {factor.item():.9g}" for step, factor in factors}
        return self.ranks.exchange.require_same_call(
            f"calling {call}",
            {"call": call, **backwards, **call_description},
            mismatch_message,
            decide,
            numbers,
            call_role,
        )

    def require_same_backward(
        self,
        number: int,
        gradients: Mapping[str, Tensor | None],
        obstacle: str,
        readers: Sequence[int],
        loss: Tensor | None,
    ) -> Answer:
        """As ``require_same_call``, of the backward of a forward whose outputs these ``readers`` have.

        The gradients of outputs have values on them alone, and must be equal there. The answer's value is
        that of the ``loss``, if ``backward`` was called on one. ``obstacle`` says why no backward can run.
        """
        have_all, is_reader = len(readers) == self.ranks.count, self.ranks.world.rank in readers
        given = {f"the gradient {name}": describe_leaf(x, values=have_all) for name, x in gradients.items()}
        given |= {"refused": obstacle} if obstacle else {}
        given |= {} if loss is None else {"the gradient of the loss": "as backward() of one value makes it"}
        compared = [*gradients.values()] if is_reader and len(readers) > 1 and not have_all else []
        digests = [int(values_digest(x), 16) for x in compared if x is not None]
        return self.require_same_call(
            f"the backward of forward {number}",
            given,
            functools.partial(_value_of_readers, readers),
            [0.0 if loss is None or not is_reader else loss.item(), *digests],
        )

    def report_backward(self, step: int, factor: Tensor) -> None:
        """Let the next call compare that a step's gradients were added to ``.grad``, times ``factor``."""
        if self.is_distributed:
            self._backward_factors[step] = factor

    def describe_updates(self) -> CallDescription:
        """The settings of the optimizer that must be equal on all ranks."""
        if self._steps.updates is None:
            return {}
        settings = self._steps.updates.optimizer.call_description()
        return {"accumulates": str(self._steps.accumulates), **settings}

    def refuse_fork(self) -> None:
        """Raise InputError in a forked process, which has no threads and connections of the ranks."""
        if os.getpid() != self._process:
            raise InputError(
                "this process is a fork of the one that made the pipeline, and has none of its threads and "
                "connections; call pipec.compile in the process that trains"
            )

    def before_stop(self, call: Callable[[], object]) -> None:
        """Let ``call`` be called on every rank before a signal ends them."""
        self._before_stop.append(call)
        if not self.is_distributed:
            STOP_SIGNALS.install()

    def begin(self, drain: Callable[[], None]) -> None:
        """Begin a call. If this process runs all ranks, and was sent a signal, it ends.

        Raises as ``refuse_fork``.
        """
        self.refuse_fork()
        if not self.is_distributed and STOP_SIGNALS.pending:
            self.exit_on_signal(drain, [STOP_SIGNALS.pending])

    def exit_on_signal(self, drain: Callable[[], None], stops: Sequence[int]) -> None:
        """End on all ranks if one of them was sent a signal; ``stops`` has that of each, if any has one."""
        if self.is_distributed:
            STOP_SIGNALS.install()
        if any(stops):
            drain()
            exit_all_ranks(stops, self._steps.num_steps, self._before_stop)


def _value_of_readers(readers: Sequence[int], notes: Sequence[RankNote]) -> float:
    """The first number of these ranks, a loss.

    Raises InputError if the others, digests of gradients, differ.
    """
    first, *others = (notes[rank].numbers for rank in readers)
    if any(each[1:] != first[1:] for each in others):
        raise InputError(f"{format_ranks(readers)} computed other losses of the same outputs\n{_LOSS_ADVICE}")
    return first[0]


def mismatch_message(every: Sequence[CallDescription]) -> str:
    """How the ranks' descriptions of a call differ, by the first kind of entries that do."""
    call = every[0]["call"]
    method, failed = call.partition(",")[0], [rank for rank, each in enumerate(every) if "refused" in each]
    if failed and all(each["call"] == call and "batches" not in each for each in every):
        why = every[failed[0]]["refused"]
        return f"{method} cannot use the arguments of {format_ranks(failed)}:\n{why}"
    if any("batches" in each for each in every):
        every = [{"batches": "another one", **each} for each in every]
    for is_meant, what, advice in _MISMATCHES:
        own = [{name: value for name, value in each.items() if is_meant(name)} for each in every]
        if (found := describe_differences(own)) or (what, advice) == _MISMATCHES[-1][1:]:
            return f"{what.format(method)}:\n{found}\n{advice}"
    raise AssertionError("the last kind is of all entries")


_BATCH_ADVICE = (
    'With batch="same", the default, every rank passes the same whole mini-batch, which pipec splits '
    "into microbatches: shuffle and draw with the same seed on every rank, and leave out what gives each "
    "rank a part of the data, as a DistributedSampler, Accelerator.prepare(loader) and a Trainer do. For "
    "replicas with parts of their own, make a "
    'DistributedSampler(num_replicas=pipe.num_replicas, rank=pipe.replica), and pass batch="local" and '
    "replicas=... to pipec.compile; the parts then have the same structure, types and sizes but for their "
    "rows, and what is not split is the same; say what is split with batched=... if the sizes do not tell it "
    'apart. batch="rank0" uses what rank 0 passes and drops the rest: it is right only if all ranks have the '
    "same data, in whatever order. If the batches should be the same, one rank made a call that others did "
    "not"
)

_LOSS_ADVICE = (
    "Every rank computes the same loss, of the same data: pass the same batches on all ranks, draw with the "
    "same seed, and see that nothing depends on the rank. Operators of GPUs whose results differ from run to "
    "run, as sums with atomics, need torch.use_deterministic_algorithms(True)"
)

_MISMATCHES: Sequence[tuple[Callable[[str], bool], str, str]] = (
    (
        lambda name: name == "call",
        "the ranks do not make the same calls",
        "Every rank calls the methods of the pipeline in the same order; see that no `if rank == ...` or "
        "shorter loop keeps one away. state_dict() gathers the whole model's state: every rank takes it, "
        "before such an if, and rank 0 alone writes it",
    ),
    (
        lambda name: name == "batches",
        "the ranks' streams do not have the same batches",
        f"Every rank iterates over the same batches, and as many. {_BATCH_ADVICE}",
    ),
    (
        lambda name: name.startswith("backward of "),
        "the ranks did not call backward alike on the losses of pipe.as_module()",
        "Every rank calls it on the loss of the same steps, times the same factor, since each adds the "
        "gradients of its own stages; see that no `if rank == ...` keeps one away, and that the factor does "
        "not depend on the rank",
    ),
    (
        lambda name: name.startswith("the gradient "),
        "the ranks computed other losses of the same outputs, with which they came to {}",
        _LOSS_ADVICE,
    ),
    (
        lambda name: name == "accumulates" or name.endswith(" of the optimizer"),
        "the ranks come to {} with optimizers that differ",
        "Every rank makes the same changes to pipe.optimizer, and the same schedulers step on all of them; "
        "where ranks join, pipe.join(scheduler.step) does so",
    ),
    (
        lambda name: name == "frozen parameters",
        "the ranks do not freeze the same parameters",
        "Every rank sets requires_grad alike; see that no `if rank == ...` keeps a rank from it",
    ),
    (lambda name: True, "the ranks passed different batches to {}", _BATCH_ADVICE),
)
"""The kinds of entries of a description: which they are, what it means if they differ, and what to do."""
