"""The front door: compile a model, and profile one."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipec.api_arguments import (
    MODEL,
    PROFILE_ARGUMENTS,
    Example,
    check_conflicts,
    parse_bytes,
    recorded_options,
    refuse_scripted,
    require_same_options,
    resolve_topology,
    with_replicas_of_mesh,
)
from pipec.capture.autocast import autocast, require_matching_autocast
from pipec.capture.batch_inputs import positional_names, with_batch_axes
from pipec.capture.model_call import ModelCall
from pipec.capture.model_loss import loss_path_of
from pipec.checkpoint import PretrainedWeights, read_pretrained, weights_for
from pipec.checkpoint.all_ranks import call_on_all_ranks, require_equal
from pipec.compiler.candidate import Candidate
from pipec.compiler.compiler import Compiler, CompileSettings
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.schedule_policy import make_schedule_policy, resolve_num_microbatches
from pipec.console import notice
from pipec.cost.profile import Profile, load_profile
from pipec.errors import InputError
from pipec.hardware.calibration import default_device_model, resolve_device
from pipec.hardware.devices import DeviceModel
from pipec.hardware.gpus import gpu_memory, with_gpu_memory
from pipec.hardware.topology import Topology
from pipec.ir import Mode, NonFiniteAction, Precision, ShardingLevel, SyncSpec
from pipec.ir.argument_checks import check_arguments
from pipec.ir.batch_split import repeated_tensors
from pipec.options import GRADIENT_DTYPES, OPTIONS, Options, takes_options
from pipec.pipeline import Pipeline
from pipec.pipeline.compiled_executions import CompiledExecutions
from pipec.plan.optimizer_cost import OptimizerProperties
from pipec.profiler import profile_graph
from pipec.runtime.absent_tensors import materialized
from pipec.runtime.model_tensors import ModelTensors, restore_tensors
from pipec.runtime.optimizers import state_bytes, update_scratch
from pipec.runtime.processes.launch import Devices, default_num_ranks, world
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.step.microbatch_weight import weight_name
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks
from pipec.torch_compat.private_symbols import require, untested_version


@takes_options(Options)
def compile(model: nn.Module, devices: Devices | None = None, **given: Any) -> Pipeline:
    """Make a pipeline of ``model``; compilation itself happens at the first step, or in ``prepare``.

    Args:
        model: any module, on the CPU, on a GPU or on meta. Neither its code nor its structure is changed. Its
            own parameters are trained, on the devices of their stages. Under ``torchrun`` a process empties
            the parameters of other processes' stages.
        {options}

    Raises:
        TypeError: there is no such option.
        InputError: an argument does not fit, ``devices`` contradicts the number of processes started, or
            these passed different arguments. (``costs`` may differ; rank 0's count.)
    """
    check_arguments({"model": MODEL}, {"model": model})
    return compile_with(model, Options.of({"devices": devices, **given}))


def compile_with(model: nn.Module, options: Options, *, between_modules: bool = False) -> Pipeline:
    """What ``compile`` does. With ``between_modules`` stages consist of whole modules, as those of torch."""
    options, ranks = _ranks(options)
    weights = None
    if options.weights is not None:
        folder = options.weights
        weights = _agreed_weights(ranks, folder, lambda: (model, weights_for(model, folder)))[1]
    return _pipeline(model, options, ranks, weights, between_modules)


def from_pretrained(
    name: str | Path,
    devices: Devices | None = None,
    *,
    model_class: Any = None,
    peft_config: Any = None,
    **given: Any,
) -> Pipeline:
    """A pipeline of a model of transformers. Each rank reads the weights of its own stages alone.

    The first call, or ``prepare``, cuts the stages and reads their weights. Before that, reading or copying a
    weight raises an error. The model is ``pipe.unsplit_model``. It is in evaluation mode, as transformers
    leaves it: call ``pipe.train()``.

    Args:
        name: a folder that ``save_pretrained`` wrote, or a name on the Hub.
        devices: as for ``compile``.
        model_class: which ``from_pretrained`` to call, such as ``AutoModelForSequenceClassification``. None:
            the class that was saved.
        peft_config: an adapter of PEFT, such as ``LoraConfig``. The pipeline then trains
            ``peft.get_peft_model(model, peft_config)``.
        given: the options of ``compile``, and the arguments of the model's ``from_pretrained``, such as
            ``dtype`` and ``num_labels``.

    Raises:
        CheckpointError: files are damaged, or do not fit the model, or differ from rank to rank.
        InputError: an argument does not fit, or the weights cannot be read in parts: they are quantized, an
            adapter, or not safetensors; or an adapter begins with values of the weights.
    """
    own = {option: given.pop(option) for option in [*given] if option in OPTIONS}
    options, ranks = _ranks(Options.of({"devices": devices, **own}))

    def read() -> tuple[nn.Module, PretrainedWeights]:
        model, weights = read_pretrained(name, model_class, given)
        return (model if peft_config is None else weights.with_adapter(model, peft_config)), weights

    model, weights = _agreed_weights(ranks, name, read)
    return _pipeline(model, options, ranks, weights)


def _ranks(options: Options) -> tuple[Options, Ranks]:
    """The options with the replicas of a mesh, and the ranks."""
    here = world(options.group)
    devices = default_num_ranks(here) if options.devices is None else options.devices
    return with_replicas_of_mesh(options, here), Ranks(devices, options.timeout, options.kernels, here)


def _agreed_weights(
    ranks: Ranks, name: str | Path, read: Callable[[], tuple[nn.Module, PretrainedWeights]]
) -> tuple[nn.Module, PretrainedWeights]:
    """A model and its weights, whose files are the same on every rank."""
    made = list[tuple[nn.Module, PretrainedWeights]]()

    def digest() -> str:
        made.append(read())
        return made[0][1].digest

    digests = call_on_all_ranks(ranks, f"reading the headers of {name}", digest)
    require_equal(digests, f"the weights of {name}", "let every rank see the same files")
    return made[0]


@functools.cache
def _note_version(version: str) -> None:
    """Say once if this version of torch was not tested."""
    if message := untested_version(version):
        notice(message)


def _pipeline(
    model: nn.Module,
    options: Options,
    ranks: Ranks,
    weights: PretrainedWeights | None,
    between_modules: bool = False,
) -> Pipeline:
    _note_version(torch.__version__)
    if ranks.world.is_distributed:
        require_same_options(ranks, model, options)
    device = next(iter(ranks.devices.values()))
    costs = load_profile(options.costs) if isinstance(options.costs, str | Path) else options.costs
    profile = costs if isinstance(costs, Profile) else None
    device_model = costs if isinstance(costs, DeviceModel) else default_device_model(device)
    topology = _topology(options, ranks, device_model)
    policy = make_schedule_policy(options.schedule, ranks.count, options.stages, options.replicas)
    microbatches = resolve_num_microbatches(policy, options.microbatches)
    check_conflicts(options, policy, microbatches, topology)
    precision = None if options.precision is None else Precision(options.precision)
    require_matching_autocast(precision, device, "pipec.compile")
    refuse_scripted(model)
    tensors = ModelTensors.of(model)
    if weights is not None:
        tensors = tensors.unread(f"in {weights.name} still")
        restore_tensors(model, {**tensors.parameters, **tensors.buffers})
    tensors.refuse_lazy()
    tensors.refuse_shared_memory()
    with materialized(tensors.unique().values()):
        updates = _optimizer_updates(options, tensors)
        optimizer = _optimizer_properties(options, updates, tensors, device)
    offloads = options.offload in ("activations", "all")
    compiler_options = CompilerOptions(
        device_model,
        topology,
        options.recompute,
        offloads,
        profile,
        _sync_spec(options, ranks),
        optimizer,
        between_modules=between_modules,
        buffers_on_any_stage=ranks.world.is_distributed or len({*ranks.devices.values()}) == 1,
        recorded=recorded_options(options),
    )
    candidate = Candidate(
        policy,
        compiler_options,
        microbatches,
        tunes_replicas=options.replicas == "auto",
        tunes_shard=options.shard == "auto",
        may_rearrange=options.batch != "local" and ranks.world.replicas is None,
    )
    settings = CompileSettings(
        options.loss_fn if callable(options.loss_fn) else None,
        device,
        precision,
        weight_name(options.microbatch_weight),
        checks=options.check != "off",
        check_every=options.check if isinstance(options.check, int) else int(options.check == "always"),
        loss_path=loss_path_of(options.loss_fn),
    )
    compiler = Compiler(model, tensors.canonical, settings, candidate)
    executions = functools.partial(
        CompiledExecutions,
        compiler=compiler,
        batch=options.batch,
        batched=options.batched,
        microbatch_weight=options.microbatch_weight,
    )
    read = None if weights is None else weights.fill
    return Pipeline(tensors, ranks, updates, executions, read)


def _topology(options: Options, ranks: Ranks, device_model: DeviceModel) -> Topology:
    """The devices, none of which holds more than the memory limit, or than plans may use of a GPU."""
    topology = resolve_topology(options.topology, ranks, device_model, elastic=options.devices is None)
    limit = options.memory_limit
    if isinstance(limit, str):
        limit = parse_bytes(limit)
    if memory := gpu_memory(ranks.devices.values()):
        topology = with_gpu_memory(topology, memory, limit)
    return topology if limit is None else topology.with_memory_limit(limit)


def _sync_spec(options: Options, ranks: Ranks) -> SyncSpec:
    """What programs are to do after the microbatches of a step."""
    return SyncSpec(
        updates=options.optimizer is not None,
        clips=options.clip_grad_norm is not None,
        shard=None if options.shard in (None, "auto") else ShardingLevel(options.shard),
        has_loss_scale=options.precision == Precision.FP16,
        gradient_dtype=GRADIENT_DTYPES[options.gradient_dtype] if options.gradient_dtype else "",
        on_nan=None if options.on_nan == "ignore" else NonFiniteAction(options.on_nan),
        state_on_host=options.offload == "optimizer",
        weights_on_host=options.offload in ("weights", "all"),
        replicas_pass_own_rows=options.batch == "local" and ranks.world.is_distributed,
    )


def _optimizer_updates(options: Options, tensors: ModelTensors) -> OptimizerUpdates | None:
    """The optimizer of the programs."""
    if options.optimizer is None:
        return None
    loss_scale = LossScale() if options.precision == Precision.FP16 else None
    return OptimizerUpdates(
        options.optimizer, options.clip_grad_norm, tensors.unique_parameters(), loss_scale
    )


def _optimizer_properties(
    options: Options, updates: OptimizerUpdates | None, tensors: ModelTensors, device: torch.device
) -> OptimizerProperties | None:
    """What plans know of the optimizer."""
    if options.optimizer is None or updates is None:
        return None
    parameters, elementwise = tensors.unique_parameters(), updates.optimizer.elementwise
    scratch = update_scratch(options.optimizer, parameters, device.type == "cuda")
    return OptimizerProperties(state_bytes(options.optimizer, parameters), elementwise, *scratch)


def profile(
    example: Example,
    *,
    microbatch_size: int | None = None,
    device: torch.device | str = "cpu",
    repeats: int = 10,
    ranks: int = 1,
    precision: str | None = None,
) -> Profile:
    """Measure every operator of a training step of ``example``, forward and backward, on one device.

    Args:
        example: the model, its arguments and its loss. Its tensors are not changed.
        microbatch_size: the number of rows to run at once, best the size of a microbatch in training. None:
            an eighth of the example's rows.
        device: where to run. A model on meta is given random values there.
        repeats: how often each operator is timed; the median counts.
        ranks: how many ranks will share the device, or its memory bus and caches if it is a CPU. The whole
            model then runs in as many copies at a time, and is as slow as they make each other. Under
            ``torchrun`` each process profiles by itself: call it in all of them at a time, with one.
        precision: the ``precision`` that ``compile`` will get.

    Raises:
        CaptureError: the model cannot be captured.
        InputError: ``microbatch_size`` or ``repeats`` does not fit, or the device is meta.
    """
    require("capture")
    from pipec.capture.tracer import (  # loads torch._dynamo, as no other function here does
        CaptureRequest,
        capture_with_variables,
    )
    from pipec.capture.variable_history import VariableHistory

    check_arguments(PROFILE_ARGUMENTS, locals())
    given = ModelCall(example.args, dict(example.kwargs), example.target)
    given = replace(given, repeated=repeated_tensors(given.leaves))
    call = with_batch_axes(given, example.batched, positional_names(example.model))
    size = max(1, call.batch_size // 8) if microbatch_size is None else microbatch_size
    if not 1 <= size <= call.batch_size:
        raise InputError(
            f"microbatch_size is {size}; expected 1 to the {call.batch_size} rows of the example"
        )
    where = resolve_device(device)
    refuse_scripted(example.model)
    model, rows = example.model, call.rows(0, size)
    canonical = ModelTensors.of(model).canonical
    with autocast(None if precision is None else Precision(precision), where):
        graph = capture_with_variables(
            CaptureRequest(
                model,
                example.loss_fn if callable(example.loss_fn) else None,
                Mode.TRAIN,
                rows,
                canonical,
                where,
                loss_path=loss_path_of(example.loss_fn),
            ),
            VariableHistory().of(rows, Mode.TRAIN),
        )
    return profile_graph(graph, model, rows, where, repeats, ranks)
