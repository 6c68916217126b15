"""The tensors of a model under their original names, in a tree of modules without its code."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipec.errors import InputError
from pipec.ir import Plan
from pipec.runtime.absent_tensors import hold, is_absent, plain_tensors, release_unread
from pipec.runtime.messages.call_description import format_names
from pipec.torch_compat.run_time import register_buffer


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model by FQN. ``canonical`` maps each name of a tied tensor to its first name."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    persistent: frozenset[str]
    canonical: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelTensors":
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        canonical = {fqn: first.setdefault(id(t), fqn) for fqn, t in {**parameters, **buffers}.items()}
        persistent = frozenset(model.state_dict(keep_vars=True)) & buffers.keys()
        return cls(parameters, buffers, frozenset(persistent), canonical)

    def unique_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, under its first name."""
        return {fqn: x for fqn, x in self.parameters.items() if self.canonical[fqn] == fqn}

    def unique(self) -> dict[str, Tensor]:
        """Every tensor once, under its first name."""
        return {fqn: tensor for fqn, tensor in self.every().items() if self.canonical[fqn] == fqn}

    def every(self) -> dict[str, Tensor]:
        """Every tensor under each of its names."""
        return {**self.parameters, **self.buffers}

    def refuse_lazy(self) -> None:
        """Raise InputError if a tensor has no shape yet, such as those of ``nn.LazyLinear``."""
        for fqn, tensor in self.unique().items():
            if is_lazy(tensor):
                raise InputError(
                    f"{fqn} gets its shape from the first batch that the model sees; call the model "
                    "once before you compile it, as in model(x)"
                )

    def refuse_shared_memory(self) -> None:
        """Raise InputError if a trained parameter shares memory with another tensor.

        Eager torch finds in each what is written to the other. On two stages they would go separate ways.
        """
        end, end_of_trained, last = 0, 0, ""
        for start, stop, fqn, trained in sorted(_spans(self.unique())):
            if start < (end if trained else end_of_trained):
                raise InputError(
                    f"{last} and {fqn} share memory without being one parameter, and stages would train "
                    "them apart; make them one, as in model.b.weight = model.a.weight, or give one its own "
                    "memory, as in model.b.weight.data = model.b.weight.data.clone()"
                )
            last = fqn if stop > end else last
            end, end_of_trained = max(end, stop), max(end_of_trained, stop * trained)

    def names_differing(self, other: "ModelTensors") -> list[str]:
        """The names that refer to different objects in the two models."""
        mine, theirs = self.every(), other.every()
        return [fqn for fqn in {**mine, **theirs} if mine.get(fqn) is not theirs.get(fqn)]

    def frozen(self) -> list[str]:
        """The parameters that are not trained, under each of their names."""
        with plain_tensors():
            return [name for name, parameter in self.parameters.items() if not parameter.requires_grad]

    def unread(self, place: str) -> "ModelTensors":
        """The same with those on meta replaced by absent ones, whose values are ``place``."""
        made = dict[int, Tensor]()
        for fqn, tensor in self.unique().items():
            if tensor.is_meta:
                memory = torch.empty_like(tensor, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
                release_unread(fqn, made[id(tensor)], place)
        return self.with_replaced({fqn: made.get(id(x), x) for fqn, x in self.every().items()})

    def with_replaced(self, others: Mapping[str, Tensor]) -> "ModelTensors":
        """The same with other objects under some names."""
        parameters = {fqn: others.get(fqn, tensor) for fqn, tensor in self.parameters.items()}
        buffers = {fqn: others.get(fqn, tensor) for fqn, tensor in self.buffers.items()}
        return replace(self, parameters=parameters, buffers=buffers)  # type: ignore[arg-type]


def _spans(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, int, str, bool]]:
    """First and last address of each tensor's elements, its name, and whether it is trained."""
    for fqn, tensor in tensors.items():
        if not is_absent(tensor) and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            yield start, start + length * tensor.element_size(), fqn, tensor.requires_grad


def register_tensors(module: nn.Module, tensors: ModelTensors) -> None:
    """Register the very objects in ``module``. The names of a tied tensor share one."""
    for fqn, parameter in tensors.parameters.items():
        owner, leaf = _owner(module, fqn)
        owner._parameters[leaf] = parameter
    for fqn, buffer in tensors.buffers.items():
        owner, leaf = _owner(module, fqn)
        register_buffer(owner, leaf, buffer, fqn in tensors.persistent)


def restore_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set the tensors of these names in ``model`` to these objects."""
    for fqn, tensor in tensors.items():
        owner, leaf = _owner(model, fqn)
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = tensor
        else:
            owner._buffers[leaf] = tensor


@torch.no_grad()
def fill_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write values into the tensors of ``model``. Those that are absent get memory again.

    Raises:
        InputError: the model has no tensor of a name, or one of another shape, or on meta.
    """
    there = ModelTensors.of(model).every()
    for fqn, value in values.items():
        tensor = there.get(fqn)
        if tensor is not None and not tensor.is_meta and tensor.shape == value.shape:
            if is_absent(tensor):
                hold(tensor, value.to(tensor.device, copy=True))
            else:
                tensor.copy_(value)
        else:
            found = "no such tensor" if tensor is None else f"{list(tensor.shape)} on {tensor.device}"
            raise InputError(
                f"the model to gather into has {found} as {fqn}; expected {list(value.shape)} with memory: "
                "pass the model that was compiled or one made as it was, after to_empty(...) if it is on meta"
            )


@dataclass
class UninitializedTensors:
    """The tensors that ``to_empty`` gave memory, by FQN, with the version of each at that time.

    Writing in place raises the version. Writing through ``.data`` does not, but overwrites the mark: all bits
    of the first element are one.
    """

    marked: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    @torch.no_grad()
    def mark(self, tensors: Mapping[str, Tensor]) -> None:
        """Note that these have no values yet."""
        for fqn, tensor in tensors.items():
            if tensor.numel() and not tensor.is_meta:
                _first_bytes(tensor).fill_(_MARK)
                self.marked[fqn] = tensor, tensor._version

    def refuse(self, held: Mapping[str, Tensor], plan: Plan) -> None:
        """Raise InputError if a stage reads a tensor that still has no value."""
        self.marked = {
            fqn: (tensor, version)
            for fqn, (tensor, version) in self.marked.items()
            if held.get(fqn) is tensor and tensor._version == version and _is_marked(tensor)
        }
        if names := [value.name for value in (*plan.parameters, *plan.buffers) if value.name in self.marked]:
            raise InputError(
                f"nothing was written to {format_names(names)} since to_empty(...) made memory for it. Call "
                "load_state_dict(...) on the pipeline. A buffer with persistent=False is in no state dict: "
                "make the module that computes it outside of torch.device('meta') before you compile, and it "
                "keeps its values; or write into pipe.get_buffer(...)"
            )


_MARK = 255


def _first_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((1,), (1,)).view(torch.uint8)


def _is_marked(tensor: Tensor) -> bool:
    return bool(tensor.numel() and (_first_bytes(tensor) == _MARK).all())


def _owner(module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and the tensor's name there. Modules on its path are created.

    They are written into the registry and not set as attributes: a model may have a child called ``step`` or
    ``plan``, and the attributes of that name belong to the pipeline.
    """
    *path, leaf = fqn.split(".")
    for name in path:
        child = module._modules.get(name)
        if child is None:
            child = module._modules[name] = nn.Module()
        module = child
    return module, leaf
