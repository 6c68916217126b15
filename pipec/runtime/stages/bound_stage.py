"""One stage on its rank: its code, its tensors, and one frame of named values per microbatch."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipec.ir import Sizes, Stage, SyncSpec
from pipec.runtime.messages.cuda import on_device
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.stages.gradients import GradientAccumulator
from pipec.runtime.stages.host_copies import HostCopies

Frame = dict[str, Any]
"""The values of one microbatch in a stage, by name."""

VERSION, BATCH = "weight version", "mini-batch"
"""Where the frame of a stream's microbatch has the version that it reads, and its mini-batch."""


class StageCode(Protocol):
    """A generated stage module. Each function takes the frame of a microbatch, and from it by name:

    =============== ===================================================================================
    ``w``           list of parameters, in the order of ``PARAMETERS``
    ``precomputed`` list of what ``precompute`` returns for these parameters
    ``buffers``     list of buffers at the microbatch's forward, in the order of ``BUFFERS``
    ``constants``   tuple returned by ``constants``
    ``b``           number of samples in the microbatch
    ``t``, ...      size of each variable of the plan, under its name
    ``rng``         function from an operator's id to the ``torch.Generator`` it draws from
    ``saved``       list returned by the phase before
    ``grad_loss``   0-dim tensor: the microbatch's weight, from which the backward starts,
                    times the loss scale
    ``device``      the stage's ``torch.device``
    ``batch_fraction`` 0-dim tensor: the rows of the microbatch as a fraction of the batch's
    other names     a received value, or one of ``INPUTS``: what functions read of the mini-batch
    =============== ===================================================================================

    A function pops what it reads last, which frees the values as soon as it deletes them.

    A phase is one function, or several segments such as ``backward_0`` and ``backward_1``. Each segment but
    the last also returns ``saved``, before its gradients, for the next one. A forward segment returns None
    among its ``updates`` for those of another segment.

    ``sent`` is a dict of values by name. Optional functions: ``recompute(frame) -> saved``,
    ``backward(frame) -> (sent, gradients)``, ``backward_input(frame) -> (sent, saved, gradients)``,
    ``backward_weight(frame) -> gradients``, with gradients aligned with ``PARAMETERS`` and None for no
    gradient. ``tail(frame)`` takes the inputs of the stage's tail with all rows of the batch; ``b`` is their
    number, and ``batch_fraction`` is 1.

    Three others take values by name: ``constants(...) -> tuple`` of values that depend on sizes and
    ``device`` alone, ``precompute(...) -> tuple`` of values that depend on ``w``, constant ``buffers`` and
    ``device`` alone, and ``batch_counts(...) -> tuple`` of counts over the whole batch, in the order of the
    stage's plan.
    """

    PARAMETERS: tuple[str, ...]
    BUFFERS: tuple[str, ...]
    UPDATED_BUFFERS: tuple[str, ...]
    INPUTS: tuple[str, ...]
    tail: Callable[[Frame], tuple[dict[str, Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]]
    """``tail(frame) -> (sent, updates, gradients)``, aligned as those of phases."""
    batch_counts: Callable[..., tuple[Tensor, ...]]
    """``batch_counts(...) -> tuple``, in the order of the stage's plan."""
    forward: Callable[[Frame], tuple[dict[str, Tensor], list[Any], tuple[Tensor, ...]]]
    """``forward(frame) -> (sent, saved, updates)``, the updates aligned with ``UPDATED_BUFFERS``."""


class BoundStage:
    """The state of a stage while its rank executes a program.

    Replicas in one process share the tensors of the model; the one with ``owns_tensors`` writes to them.
    Those that are ``loaded`` are ``on_host``, by index, and among the weights while the rank uses them. In a
    stream, the ``versions_behind`` the last one of the weights may still be read; a step has one version.
    """

    def __init__(
        self,
        stage: Stage,
        code: StageCode,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        device: torch.device,
        num_frames: int,
        sync_spec: SyncSpec,
        owns_tensors: bool,
        versions_behind: int | None,
        loaded: Collection[str] = (),
    ) -> None:
        self.index = stage.index
        self.code = code
        self.device = device
        self._parameters = [
            _NOT_RECEIVED if fqn in stage.borrowed_parameters else parameters[fqn] for fqn in code.PARAMETERS
        ]
        self.on_host = {k: self._parameters[k] for k, fqn in enumerate(code.PARAMETERS) if fqn in loaded}
        self._parameters = [_NOT_RECEIVED if k in self.on_host else x for k, x in enumerate(self._parameters)]
        self.weights = [*self._parameters]
        self._borrowed_indices = [code.PARAMETERS.index(fqn) for fqn in stage.borrowed_parameters]
        summed = {*stage.borrowed_parameters, *sync_spec.reduced_parameters(stage.index)}
        separate = [code.PARAMETERS.index(fqn) for fqn in summed]
        self.gradients = GradientAccumulator(self.weights, separate, sync_spec.defers_gradients, self.on_host)
        self.owns_tensors = owns_tensors
        self.inputs = frozenset(code.INPUTS)
        self._count_names = stage.batch_counts
        self.count_inputs = _names_read(code, "batch_counts")
        self.frames: list[Frame] = [{} for _ in range(num_frames)]
        self._registered = [buffers[fqn] for fqn in code.BUFFERS]
        self.updated_indices = [code.BUFFERS.index(fqn) for fqn in code.UPDATED_BUFFERS]
        self.step_indices = frozenset(code.BUFFERS.index(fqn) for fqn in stage.step_buffers)
        self.buffers = self.buffers_before = self._registered
        self._buffers_after: dict[int, Tensor] = {}
        self.versions = WeightVersions(self.weights, versions_behind or 0)
        self.is_versioned = versions_behind is not None
        self._precomputed: dict[tuple[Any, ...], list[Tensor]] = {}
        self._buffers_found: dict[int, list[Tensor]] = {}
        self._memory: set[int] = set()
        self._precompute: Callable[..., tuple[Tensor, ...]] = getattr(code, "precompute", tuple)
        self._precompute_arguments = _names_read(code, "precompute")
        self._constants_arguments = tuple(x for x in _names_read(code, "constants") if x != "device")
        self.copies = HostCopies(device, stage.offloaded)
        self._offloads = bool(stage.offloaded)
        self._constants = functools.lru_cache(maxsize=8)(self._evaluate_constants)

    def begin_step(self, loss_scale: float = 1.0) -> None:
        """Use the present tensors; a stage that does not own them copies those that may change.

        The gradients that its functions return are multiplied by ``loss_scale``.
        """
        if not self.owns_tensors:
            self.weights[:] = [weight.to(self.device) for weight in self._parameters]
            changing = frozenset(self.updated_indices)
            self.buffers = self.buffers_before = [
                buffer.to(self.device, copy=index in changing)
                for index, buffer in enumerate(self._registered)
            ]
        self._precomputed.clear()
        if self.is_versioned:
            self._memory = {weight.untyped_storage().data_ptr() for weight in self.weights if weight.numel()}
        self.gradients.begin_step(1 / loss_scale)

    def fill_frame(self, microbatch: int, key: tuple[int, int], sizes: Sizes) -> Frame:
        """Fill the frame with the values of every stage. ``sizes`` holds the rows, ``b``, and the variables.

        ``key`` seeds random operators: the step's seed, and the microbatch's number in the batch.
        """
        frame = self.frames[microbatch]
        frame.update(w=self.weights, buffers=self.buffers, device=self.device, **sizes)
        frame["rng"] = OperatorGenerators(self.device, key)
        read = [sizes[name] for name in self._constants_arguments]
        frame["constants"] = self._constants(_signs(read), *read)
        if self._precompute_arguments and not self.is_versioned:
            frame["precomputed"] = self._precomputed_of(frame)
        return frame

    def suspend(self, results: Collection[str]) -> "SuspendedStage":
        """What the backwards of a step need that a script interrupts behind its forwards: no ``results``.

        Buffers that forwards have changed are about to get their new values: backwards get copies of the old.
        """
        dropped = {*results} - self.inputs
        frames = [{name: x for name, x in frame.items() if name not in dropped} for frame in self.frames]
        registered = [self._registered[index] for index in self.updated_indices]
        copies = {id(buffer): buffer.clone() for buffer in registered}
        for frame in (each for each in frames if copies and "buffers" in each):
            frame["buffers"] = [copies.get(id(each), each) for each in frame["buffers"]]
        borrowed = {index: self.weights[index] for index in self._borrowed_indices}
        return SuspendedStage(frames, {**self._precomputed}, borrowed)

    def resume(self, suspended: "SuspendedStage") -> None:
        """Go on with a step that was interrupted. What was saved is then in the frames alone."""
        for frame, values in zip(self.frames, suspended.frames, strict=True):
            frame.update(values)
            values.clear()
        self._precomputed.update(suspended.precomputed)
        for index, weight in suspended.borrowed.items():
            self.weights[index] = weight

    @torch.no_grad()
    def batch_counts(self, inputs: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        """What the stage counts in these inputs of the model; names in shapes have these ``sizes``."""
        known: dict[str, Any] = {**sizes, "device": self.device, "buffers": self._registered}
        known |= {name: on_device(inputs[name], self.device) for name in self.count_inputs if name in inputs}
        made = self.code.batch_counts(**{name: known[name] for name in self.count_inputs})
        return dict(zip(self._count_names, made, strict=True))

    def parameter(self, index: int) -> Tensor:
        """The parameter of the model, which is on the host if it is loaded for use."""
        return self.on_host.get(index, self.weights[index])

    @property
    def keeps_gradients(self) -> bool:
        """Whether sums over replicas are added to ``.grad``, which an update reads."""
        return self.owns_tensors or self.is_versioned

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set these parameters for the phase functions."""
        for fqn, weight in weights.items():
            self.weights[self.code.PARAMETERS.index(fqn)] = weight

    def clear_weights(self, fqns: Iterable[str]) -> None:
        """Drop parameters that ``set_weights`` set, and what was computed of them."""
        for values in self._precomputed.values():
            values.clear()
        dropped = set(fqns)
        for index, fqn in enumerate(self.code.PARAMETERS):
            if fqn in dropped:
                self.weights[index] = _NOT_RECEIVED

    def precompute(self, microbatch: int) -> None:
        """Compute what is computed once of the weights; in a stream, of the version of a microbatch."""
        frames = [self.frames[microbatch]] if self.is_versioned else self.frames
        for frame in frames:
            if "constants" in frame and not self._precomputed_of(frame):
                weights = self.versions.of(frame[VERSION]) if self.is_versioned else self.weights
                arguments = {**frame, "w": weights, "buffers": self.buffers}
                values = self._precompute(*(arguments[name] for name in self._precompute_arguments))
                self._precomputed_of(frame).extend(values)

    def _precomputed_of(self, frame: Frame) -> list[Tensor]:
        """What is computed of the version of the weights with the sizes that ``precompute`` takes."""
        names = (name for name in self._precompute_arguments if name not in ("w", "buffers", "device"))
        sizes = [frame[name] for name in names]
        return self._precomputed.setdefault((frame.get(VERSION, -1), _signs(sizes), *sizes), [])

    def function(self, name: str) -> Callable[..., Any]:
        """A function of the code.

        In a stream, returned values that share memory with weights are copied: updates change the weights
        while sent and saved values are still used, such as a view of a parameter that another stage reads.
        """
        function: Callable[..., Any] = getattr(self.code, name)
        if not self.is_versioned:
            return function

        def without_weights(*arguments: Any) -> Any:
            returned = function(*arguments)
            if isinstance(returned, list):
                return self._without_weights(returned)
            return tuple(map(self._without_weights, returned))

        return without_weights

    def _without_weights(self, returned: Any) -> Any:
        """Sent or saved values, with copies in place of weights."""
        if isinstance(returned, dict):
            return dict(zip(returned, map(self._copied, returned.values()), strict=True))
        return [*map(self._copied, returned)] if isinstance(returned, list) else returned

    def _copied(self, value: Any) -> Any:
        is_dense = isinstance(value, Tensor) and not value.is_sparse
        return value.clone() if is_dense and value.untyped_storage().data_ptr() in self._memory else value

    def select_version(self, microbatch: int) -> None:
        """Put the version of the weights that a microbatch reads into its frame, and what is made of it.

        Batches of a stream that read one version of the weights may differ in length: what the program's
        instruction did not compute for this one is computed here.
        """
        frame = self.frames[microbatch]
        frame["w"] = self.versions.of(frame[VERSION])
        if self._precompute_arguments:
            self.precompute(microbatch)
            frame["precomputed"] = self._precomputed_of(frame)

    def advance(self, keeps_buffers: bool = False) -> None:
        """Switch to the next version of the weights after an update of a stream.

        A stream that skips updates ends with the buffers before the first of them, and so ``keeps_buffers``.
        """
        self.versions.advance()
        for key in [each for each in self._precomputed if each[0] < self.versions.oldest]:
            del self._precomputed[key]
        for number in [x for x in self._buffers_found if x < self.versions.oldest - 1 and not keeps_buffers]:
            del self._buffers_found[number]

    def restore(self, number: int) -> None:
        """Restore weights and buffers to those after ``number`` updates of a stream, if still held."""
        if number in self.versions.held:
            self.versions.restore(number)
        self.restore_buffers(number)
        self.end_step()

    def select_buffers(self, microbatch: int) -> None:
        """Put the present buffers into a microbatch's frame, for its forward and its backward."""
        if self.is_versioned and (batch := self.frames[microbatch][BATCH]) not in self._buffers_found:
            self._change_step_buffers()
            self._buffers_found[batch] = self.buffers
        self.frames[microbatch]["buffers"] = self.buffers

    def restore_buffers(self, number: float) -> None:
        """Restore the buffers before mini-batch ``number`` of a stream, if it reached this stage."""
        if number in self._buffers_found:
            self.buffers = self._buffers_found[number]  # type: ignore[index]
            self._buffers_after.clear()

    def update_buffers(self, updates: Sequence[Tensor | None]) -> None:
        """Replace buffers for later forwards. Frames that hold the old ones keep them.

        What every microbatch of a step changes in the same way is replaced for the next step.
        """
        self.buffers = list(self.buffers)
        for index, update in zip(self.updated_indices, updates, strict=True):
            if update is not None:
                changed = self._buffers_after if index in self.step_indices else self.buffers
                changed[index] = update

    @property
    def buffers_after(self) -> list[Tensor]:
        """The buffers as the step leaves them, if no other forward follows."""
        return [self._buffers_after.get(k, buffer) for k, buffer in enumerate(self.buffers)]

    def _change_step_buffers(self) -> None:
        self.buffers = self.buffers_after
        self._buffers_after.clear()

    def end_step(self) -> None:
        """Copy the updated buffers into the model's."""
        self._change_step_buffers()
        for index in self.updated_indices if self.owns_tensors else ():
            self._registered[index].copy_(self.buffers[index])

    def forget_step(self) -> None:
        """Free every value of the step."""
        if self._offloads:
            self.copies.finish()
        for frame in self.frames:
            frame.clear()
        for index in self._borrowed_indices:
            self.weights[index] = _NOT_RECEIVED
        self.buffers = self.buffers_before = self._registered
        self._precomputed.clear()
        self._buffers_found.clear()
        self._buffers_after.clear()
        self.gradients.forget_step()

    def _evaluate_constants(self, signs: str, *sizes: float) -> tuple[Any, ...]:
        constants = getattr(self.code, "constants", None)
        arguments = dict(zip(self._constants_arguments, sizes, strict=True))
        return tuple(constants(**arguments, device=self.device)) if constants else ()


@dataclass(frozen=True)
class SuspendedStage:
    """The frames of a stage, what it has computed of its weights, and those that it borrows, by index."""

    frames: list[Frame]
    precomputed: dict[tuple[Any, ...], list[Tensor]]
    borrowed: dict[int, Tensor]


class WeightVersions:
    """The latest version, which is the model's parameters, and copies of earlier ones.

    ``latest`` is the list object of the stage. Updates change parameters in place. After an update, the
    ``behind`` versions before the new one may still be read. Weights that an update does not change are
    shared by all versions.

    One more is held until the stage reads a version again. If a stage has nothing in flight, the first stage
    may be so many updates behind it, and after a failure all stages need a version that each of them holds.
    The microbatch that the stage reads a version for next has passed the first stage, which has updated.
    """

    def __init__(self, latest: Sequence[Tensor], behind: int) -> None:
        self._latest = latest
        self._behind = behind
        self.begin()

    @property
    def oldest(self) -> int:
        """The first version that may still be read."""
        return self.number - self._behind

    def begin(self) -> None:
        """Make the current parameters version 0."""
        self.number = 0
        self._stashed: dict[int, list[Tensor]] = {}
        self._is_changing = False

    def of(self, number: int) -> Sequence[Tensor]:
        """The weights of a version, which is read."""
        self._free(self.oldest)
        return self._latest if number == self.number else self._stashed[number]

    def stash(self, changing: Collection[int]) -> None:
        """Keep the current version: copy the weights at these indices, before an update changes them."""
        self._stashed[self.number] = list(self._latest)
        copies = {index: self._latest[index].detach().clone() for index in changing}
        for weights in self._stashed.values():
            for index, copy in copies.items():
                if weights[index] is self._latest[index]:
                    weights[index] = copy

    def begin_update(self) -> None:
        """Note that the current weights change, and are no version until ``advance``."""
        self._is_changing = True

    def advance(self) -> None:
        """Make the current parameters the next version."""
        self.number += 1
        self._is_changing = False
        self._free(self.oldest - 1)

    def _free(self, oldest: int) -> None:
        for number in [each for each in self._stashed if each < oldest]:
            del self._stashed[number]

    @property
    def held(self) -> set[int]:
        """The versions in memory. While an update runs, the parameters themselves are no version."""
        return {*self._stashed} if self._is_changing else {*self._stashed, self.number}

    def restore(self, number: int) -> None:
        """Copy a held version into the parameters; versions count on from its number."""
        for latest, weight in zip(self._latest, self._stashed.get(number, ()), strict=False):
            if latest is not weight:
                latest.detach().copy_(weight)
        self.number, self._is_changing = number, False
        self._stashed.clear()


_NOT_RECEIVED = torch.empty(0)
"""Placeholder of a borrowed parameter until the stage that owns it sends it."""


def _signs(numbers: Iterable[float]) -> str:
    """The zeros among numbers, for a key: 0.0 equals -0.0."""
    return " ".join([str(each) for each in numbers if not each])


def _names_read(code: StageCode, function: str) -> tuple[str, ...]:
    """The names of the values that a function of a stage's code takes, in order; none if there is none."""
    return tuple(inspect.signature(getattr(code, function)).parameters) if hasattr(code, function) else ()
