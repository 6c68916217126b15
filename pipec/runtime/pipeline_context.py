"""What all parts of a pipeline share: the ranks, the steps so far, and the check that all make one call."""

import functools
import os
from collections.abc import Callable, Sequence

from torch import Tensor

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.runtime.messages.agreement import CallRole, RankReply
from pipec.runtime.messages.call_description import CallDescription, describe_differences, format_ranks
from pipec.runtime.optimizers import PipelineOptimizer
from pipec.runtime.processes.stop_signals import STOP_SIGNALS, exit_all_ranks
from pipec.runtime.sharded_loaders import same_batch_advice
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.stream_results import BatchResult
from pipec.runtime.step_state import StepState
from pipec.runtime.stream.stream_session import StreamSession
from pipec.runtime.tensor_owners import TensorOwners


class PipelineContext:
    """The state of a pipeline between its calls.

    ``trained`` is the artifact that ``step`` runs, None until it is compiled. ``stream_session`` runs the
    mini-batches of an asynchronous stream; the results of those that it has completed, and whose losses the
    loop is still to be given, are ``undelivered``. ``logs`` has by name what the loss function of the last
    step returned besides the loss. ``batch_advice`` says to ranks that passed different batches what to do.
    """

    def __init__(
        self,
        ranks: Ranks,
        updates: OptimizerUpdates | None,
        trained: Artifact | None = None,
        batch_advice: Callable[[], str] = same_batch_advice,
    ) -> None:
        self.ranks, self.updates, self.trained = ranks, updates, trained
        self.is_distributed = ranks.world.is_distributed
        self.owners = TensorOwners(ranks.world)
        self.steps = StepState(updates)
        self.logs: dict[str, Tensor] = {}
        self.stream_session: StreamSession | None = None
        self.undelivered: Sequence[BatchResult] = ()
        self._batch_advice = batch_advice
        self._backward_factors: dict[int, Tensor] = {}
        self._num_loaded = 0
        self._before_stop: list[Callable[[], object]] = []
        self._process = os.getpid()

    @property
    def artifact(self) -> Artifact:
        """The artifact that ``step`` runs. Raises InputError if it is not compiled yet."""
        if self.trained is None:
            raise InputError(
                "the pipeline is not compiled yet: call step(...), or prepare(...) with the arguments of step"
            )
        return self.trained

    @property
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer whose updates the programs make. Raises InputError if they make none."""
        if self.updates is None:
            raise InputError(
                "the pipeline has no optimizer of its own; pass optimizer=... to pipec.compile, such as "
                "functools.partial(torch.optim.AdamW, lr=1e-3)"
            )
        return self.updates.optimizer

    def drain(self) -> None:
        """Complete the mini-batches that a stream has begun. All stages have made the same updates then."""
        session, self.stream_session = self.stream_session, None
        if session is not None:
            self.undelivered = session.drain(self.optimizer.hyperparameters())

    def deliver(self, result: BatchResult, found: NonFinite | None = None) -> Tensor:
        """The loss of a completed step, which is counted. Its logs are kept."""
        self.logs = dict(result.logs)
        self.steps.count(found, self.trained)
        return result.loss

    def require_same_call(
        self,
        kind: str,
        call_description: CallDescription,
        reply_values: Sequence[int] = (),
        call_role: CallRole = CallRole.REQUIRED,
    ) -> list[RankReply]:
        """Check that every rank makes this call, and with the same arguments. Returns the reply of each.

        Raises InputError if they do not, or if this process cannot reach the others.
        """
        self.refuse_fork()
        call = f"{kind}, after {self.steps.num_steps} steps"
        return self.ranks.agreement.require_same_call(
            f"calling {call}",
            {"call": call, **self._backward_since_last_call(), **self._loaded(), **call_description},
            functools.partial(_mismatch_message, advice=self._batch_advice),
            reply_values,
            call_role,
        )

    def report_backward(self, step: int, factor: Tensor) -> None:
        """Note that the gradients of a step were added to ``.grad``, times ``factor``."""
        if self.is_distributed:
            self._backward_factors[step] = factor

    def _backward_since_last_call(self) -> CallDescription:
        factors, self._backward_factors = sorted(self._backward_factors.items()), {}
        return {f"backward of step {step}": f"times {factor.item():.9g}" for step, factor in factors}

    def report_load(self) -> None:
        """Let the next call compare with the other ranks that this one has loaded a state."""
        if self.is_distributed:
            self._num_loaded += 1

    def _loaded(self) -> CallDescription:
        return {_LOADED: str(self._num_loaded)} if self._num_loaded else {}

    def describe_updates(self) -> CallDescription:
        """The settings of the optimizer that must be equal on all ranks."""
        if self.updates is None:
            return {}
        return {"accumulates": str(self.steps.accumulates), **self.updates.optimizer.call_description()}

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

    @property
    def pending_signal(self) -> int:
        """The signal that this process was sent, if it runs all ranks; 0 for none."""
        return 0 if self.is_distributed else STOP_SIGNALS.pending

    def exit_on_signal(self, replies: Sequence[RankReply] = ()) -> None:
        """End on all ranks if one of them was sent a signal. ``replies`` are those of ranks in processes."""
        if replies:
            STOP_SIGNALS.install()
        signals = [reply.stop for reply in replies] or [self.pending_signal]
        if any(signals):
            self.drain()
            exit_all_ranks(signals, self.steps.num_steps, self._before_stop)


_LOADED = "calls of load_state_dict"

_GATHERING = (
    ". state_dict() gathers the whole model's state: every rank takes it, before such an if, and rank 0 "
    "alone writes it"
)


def _mismatch_message(every: Sequence[CallDescription], advice: Callable[[], str]) -> str:
    """How the ranks' descriptions of a call differ. ``advice`` is for batches that differ."""
    kind = every[0]["call"].partition(",")[0]
    if len({description["call"] for description in every}) > 1:
        calls = [{"call": description["call"]} for description in every]
        gathers = any("state_dict(" in description["call"] for description in every)
        return (
            f"the ranks do not make the same calls:\n{describe_differences(calls)}\nEvery rank calls the "
            "methods of the pipeline in the same order; see that no `if rank == ...` or shorter loop keeps "
            "one away" + (_GATHERING if gathers else "")
        )
    if any("batches" in description for description in every):
        batches = [{"batches": description.get("batches", "another one")} for description in every]
        return (
            f"the ranks' streams do not have the same batches:\n{describe_differences(batches)}\nEvery rank "
            f"iterates over the same batches, and as many. {advice()}"
        )
    if failed := [rank for rank, description in enumerate(every) if "refused" in description]:
        return f"{kind} cannot use the arguments of {format_ranks(failed)}:\n{every[failed[0]]['refused']}"
    backwards = [
        {name: value for name, value in description.items() if name.startswith("backward of ")}
        for description in every
    ]
    if any(each != backwards[0] for each in backwards):
        return (
            "the ranks did not call backward alike on the losses of pipe.as_module():\n"
            f"{describe_differences(backwards)}\nEvery rank calls it on the loss of the same steps, times "
            "the same factor, since each adds the gradients of its own stages; see that no `if rank == ...` "
            "keeps one away, and that the factor does not depend on the rank"
        )
    loads = [{_LOADED: description.get(_LOADED, "0")} for description in every]
    if any(each != loads[0] for each in loads):
        return (
            f"the ranks did not all load a state:\n{describe_differences(loads)}\nEvery rank calls "
            "pipe.load_state_dict(...), since each takes the tensors of its own stages; see that no "
            "`if rank == ...` keeps one away, and that every rank finds the file"
        )
    settings = [
        {name: value for name, value in description.items() if _is_of_optimizer(name)}
        for description in every
    ]
    if any(each != settings[0] for each in settings):
        return (
            f"the ranks come to {kind} with optimizers that differ:\n{describe_differences(settings)}\nEvery "
            "rank makes the same changes to pipe.optimizer, and the same schedulers step on all of them; "
            "where ranks join, pipe.join(scheduler.step) does so"
        )
    return f"the ranks passed different batches to {kind}:\n{describe_differences(every)}\n{advice()}"


def _is_of_optimizer(name: str) -> bool:
    return name == "accumulates" or name.endswith(" of the optimizer")
