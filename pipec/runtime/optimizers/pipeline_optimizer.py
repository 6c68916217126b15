"""``pipe.optimizer``: the optimizer of the whole model, whose groups the optimizers of all stages use."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from pipec.errors import InputError
from pipec.ir import ParameterShard
from pipec.runtime.messages.call_description import CallDescription
from pipec.runtime.optimizers.factory import (
    Factory,
    call_factory,
    dummy_parameter,
    group_names,
    hyperparameters,
    is_elementwise,
)
from pipec.runtime.optimizers.stage_optimizer import StageOptimizer
from pipec.runtime.optimizers.state_shards import ParameterState, StateShard, concatenated_state_dict, merge

GatherStates = Callable[[list[StateShard]], Sequence[list[StateShard]]]
"""Gathers the state shards of all processes: takes those of this one. Every process calls it."""


class PipelineOptimizer(Optimizer):
    """The parameter groups and the state of the whole model's optimizer.

    ``param_groups`` are the groups that ``factory`` makes of the whole model. Changes to them, by an LR
    scheduler or by hand, take effect with the next update. ``state_dict`` is interchangeable with that of the
    unsplit model's optimizer. ``elementwise`` names the parameters that may be divided, ``kinds``
    the class of each group's optimizer; ``dummies`` have the shape and type of each parameter, on meta.
    ``parameters`` are those of the whole model, in order; parameters without memory on this rank may be on
    meta. ``before_state_access`` is called before the state is read or replaced, and ``make_update`` updates
    on all ranks.

    Raises:
        InputError: the factory does not make an optimizer of these parameters.
    """

    def __init__(self, factory: Factory, parameters: Mapping[str, Tensor]) -> None:
        self.factory = factory
        self.dummies = {name: dummy_parameter(parameter) for name, parameter in parameters.items()}
        made = call_factory(factory, self.dummies)
        self.kinds = [type(each).__name__ for each in made for _ in each.param_groups]
        self.elementwise = self.dummies.keys() - {
            name
            for each in made
            if not is_elementwise(each)
            for names in group_names(each, self.dummies)
            for name in names
        }
        self._stages: list[StageOptimizer] = []
        self._gather: GatherStates | None = None
        self._loaded: dict[str, ParameterState] = {}
        self.before_state_access: Callable[[], None] = _nothing
        self.make_update: Callable[[], None] = refuse_update
        self._open = True
        super().__init__(_whole_groups(made, self.dummies, parameters), _shared_defaults(made))
        self._open = False

    def for_stage(self, owned: Mapping[ParameterShard, Tensor], *options: Any) -> StageOptimizer:
        """The optimizer of the pieces of a stage that this rank updates; see ``StageOptimizer``."""
        return StageOptimizer(self, self.factory, self.dummies, owned, *options)

    def attach(
        self, stages: Sequence[StageOptimizer], parameters: Mapping[str, nn.Parameter], gather: GatherStates
    ) -> None:
        """Move the state, that of the previous stages or the loaded one, to these stages of this process.

        Every process calls it. The stages of all processes together have all parameters, so that parameters
        without updates keep their state. The groups then refer to this process's ``parameters`` of the model.
        """
        states = self._states()
        self._stages, self._gather, self._loaded = list(stages), gather, {}
        for group in self.param_groups:
            named = zip(group["param_names"], group["params"], strict=True)
            group["params"] = [parameters.get(name, parameter) for name, parameter in named]
        for stage in stages if states else ():
            stage.load(states)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """A copy of each group's hyperparameters, for an update that runs later."""
        return [
            {key: x.clone() if isinstance(x, Tensor) else x for key, x in hyperparameters(group).items()}
            for group in self.param_groups
        ]

    def count_step(self) -> None:
        """Count a step whose updates the program has run: LR schedulers and step hooks expect the call."""
        self._open = True
        try:
            self.step()  # with the wrappers of schedulers and hooks
        finally:
            self._open = False

    def step(self, closure: Any = None) -> Any:
        """Update with the gradients of steps that were made inside of ``accumulate``. Every rank calls it.

        Raises:
            InputError: there are none, since ``pipe.step`` updates by itself elsewhere.
            NonFiniteError, ExecutionError, TransportError: as ``pipe.step``.
        """
        if closure is not None:
            raise InputError(
                "optimizer.step(closure) would evaluate the model inside of the update; make the step first, "
                "inside of `with pipe.accumulate():`, and then call optimizer.step()"
            )
        if not self._open:
            self.make_update()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the factory makes the groups."""
        if not self._open:
            raise InputError(
                "parameter groups cannot be added to the pipeline's optimizer; make all groups in the "
                "factory, with a learning rate of 0 for those that are not trained yet"
            )
        super().add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        """Refuses: updates run on several ranks, at several times of a step."""
        raise InputError(
            "each stage updates as soon as it has its gradients, so that no hook can run before all updates; "
            "to clip, pass clip_grad_norm=... to pipec.compile. Hooks after the step do run"
        )

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Refuses: the state is split by name before torch loads it."""
        raise InputError("change the state dict before you pass it to load_state_dict(...)")

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model's optimizer, in torch's own format. Every rank calls it."""
        states = self._states()
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if name in states:
                    self.state[parameter] = states[name]
        try:
            return super().state_dict()
        finally:
            self.state = defaultdict(dict)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load a state dict of this optimizer, or of the same optimizer of the unsplit model.

        It may have names in place of numbers, as torch's ``get_optimizer_state_dict`` returns it.
        If the factory returns several optimizers, a list with the state dict of each is accepted too.

        Raises:
            InputError: groups, names or shapes differ from this optimizer's.
        """
        self.before_state_access()
        if not isinstance(state_dict, Mapping):
            state_dict = concatenated_state_dict(state_dict)
        saved = [dict(group) for group in state_dict["param_groups"]]
        names = self._names_of_saved(saved)
        if unknown := [key for key in state_dict["state"] if key not in names]:
            raise InputError(
                f"the state dict has state for parameter {unknown[0]!r}, which is in none of its groups; "
                "load a complete state dict of torch's format"
            )
        states = {names[number]: entries for number, entries in state_dict["state"].items()}
        for name in self.elementwise & states.keys():
            self._require_shapes(name, states[name])
        groups = [
            {**hyperparameters(own), **hyperparameters(new), "params": new["params"]}
            for own, new in zip(self.param_groups, saved, strict=True)
        ]
        if self._gather is None:
            self._loaded = states
        for stage in self._stages:
            stage.load(states)
        super().load_state_dict({"state": {}, "param_groups": groups})

    def call_description(self) -> CallDescription:
        """The groups and hyperparameters as text, which must be equal on all ranks."""
        return {
            f"group {index} of the optimizer": f"{kind}, {len(group['params'])} parameters, "
            + ", ".join(f"{key}={value}" for key, value in sorted(hyperparameters(group).items()))
            for index, (kind, group) in enumerate(zip(self.kinds, self.param_groups, strict=True))
        }

    def parts(self) -> list[StateShard]:
        """This process's shards of the state; all of the loaded state until stages are attached."""
        if self._gather is not None:
            return [part for stage in self._stages for part in stage.parts()]
        whole = {name: ParameterShard(name, 0, each.numel()) for name, each in self.dummies.items()}
        return [StateShard(whole[name], entries) for name, entries in self._loaded.items()]

    def _states(self) -> dict[str, ParameterState]:
        self.before_state_access()
        if self._gather is None:
            return self._loaded
        return merge(self._gather(self.parts()), {name: each.shape for name, each in self.dummies.items()})

    def _names_of_saved(self, saved: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """The name of each parameter of a state dict: its own, or that of the same position here.

        Groups have numbers of parameters, as ``state_dict`` writes them, or their names.
        """
        sizes, expected = (
            [len(group["params"]) for group in groups] for groups in (saved, self.param_groups)
        )
        if sizes != expected:
            raise InputError(
                f"the state dict has groups of {sizes} parameters, and the optimizer has groups of "
                f"{expected}; load what the same factory saved for the same model"
            )
        found: dict[int, str] = {}
        for index, (group, own) in enumerate(zip(saved, self.param_groups, strict=True)):
            is_named = bool(group["params"]) and isinstance(group["params"][0], str)
            names = group.get("param_names", group["params"] if is_named else own["param_names"])
            if unmatched := sorted(set(names) ^ set(own["param_names"])):
                raise InputError(
                    f"{unmatched[0]} and {len(unmatched) - 1} other names of group {index} are in the state "
                    "dict or in the optimizer alone; load the state of the same model, or delete param_names "
                    "from the groups of the state dict to go by the order of the parameters"
                )
            found.update(zip(group["params"], names, strict=True))
        return found

    def _require_shapes(self, name: str, entries: ParameterState) -> None:
        shape = self.dummies[name].shape
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != shape:
                raise InputError(
                    f"{key} of {name} has shape {list(value.shape)} in the state dict, and the parameter has "
                    f"{list(shape)}; load the state of the same model"
                )


def _nothing() -> None:
    """The default of ``before_state_access``: do nothing."""


def refuse_update() -> NoReturn:
    """Refuse an update without gradients."""
    raise InputError(
        "there are no gradients: pipe.step(...) has already updated the parameters, because the pipeline was "
        "compiled with optimizer=...; leave out optimizer.step(). To call it yourself, make the steps before "
        "it inside of `with pipe.accumulate():`"
    )


def _whole_groups(
    made: Sequence[Optimizer], dummies: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """The groups of all optimizers, with the names and tensors of the model's parameters."""
    return [
        {**hyperparameters(group), "params": [(name, parameters[name]) for name in names]}
        for each in made
        for group, names in zip(each.param_groups, group_names(each, dummies), strict=True)
    ]


def _shared_defaults(made: Sequence[Optimizer]) -> dict[str, Any]:
    """The defaults that all optimizers share: LR schedulers look there for what they may change."""
    first, *others = (each.defaults for each in made)
    return {key: value for key, value in first.items() if all(key in other for other in others)}
