"""The front door: compile a model, load a saved artifact, describe an example for the command line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipec.api_arguments import (
    COMPILE_ARGUMENTS,
    GRADIENT_DTYPES,
    PROFILE_ARGUMENTS,
    Example,
    parse_bytes,
    require_same_arguments,
    resolve_topology,
)
from pipec.capture.autocast import autocast, require_matching_autocast
from pipec.capture.batch_inputs import BatchedOption, positional_names, with_batch_axes
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import capture
from pipec.compiler.candidate import Candidate
from pipec.compiler.compile import CompileSettings
from pipec.compiler.compiler import Compiler
from pipec.compiler.option_conflicts import (
    check_asynchronous_options,
    check_fused_gradient_options,
    check_local_batch_options,
    check_offload_options,
)
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.schedule_policy import ScheduleSource, make_schedule_policy, resolve_num_microbatches
from pipec.cost.profile import Profile, load_profile
from pipec.errors import InputError
from pipec.hardware.calibration import default_device_model, resolve_device
from pipec.hardware.devices import DeviceModel
from pipec.hardware.topology import Topology
from pipec.ir import NO_SYNC, Mode, NonFiniteAction, Precision, ShardingLevel, SyncSpec
from pipec.ir.argument_checks import check_arguments
from pipec.pipeline import Pipeline
from pipec.plan.optimizer_cost import OptimizerProperties
from pipec.profiler import ProgressWrapper, profile_graph
from pipec.runtime.model_tensors import ModelTensors
from pipec.runtime.optimizers import Factory, state_bytes, update_scratch
from pipec.runtime.processes.launch import Devices, default_num_ranks, world
from pipec.runtime.stages.kernels import require_source
from pipec.runtime.step.execution import Ranks
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.step.microbatch_weight import MicrobatchWeight, weight_name
from pipec.runtime.step.optimizer_updates import OptimizerUpdates


def compile(
    model: nn.Module,
    devices: Devices | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    schedule: ScheduleSource = "1f1b",
    microbatches: int | None = None,
    stages: int | None = None,
    replicas: int | tuple[int, ...] | str = 1,
    asynchronous: bool = False,
    optimizer: Factory | None = None,
    clip_grad_norm: float | None = None,
    shard: str | None = None,
    gradient_dtype: str | None = None,
    on_nan: str = "ignore",
    batch: str = "same",
    batched: BatchedOption | None = None,
    microbatch_weight: MicrobatchWeight | None = None,
    precision: str | None = None,
    kernels: str = "source",
    fused_gradients: bool = False,
    recompute: str = "auto",
    memory_limit: int | str | None = None,
    offload: str | None = None,
    topology: Topology | str | Path | None = None,
    device_model: DeviceModel | None = None,
    profile: Profile | str | Path | None = None,
    dynamic: bool = True,
    timeout: float = 300.0,
) -> Pipeline:
    """Make a pipeline of ``model``; compilation itself happens at the first step, or in ``prepare``.

    Args:
        model: any module, on the CPU, on a GPU or on meta. Neither its code nor its structure is changed. Its
            own parameters are trained, on the devices of their stages. Under ``torchrun`` a process empties
            those of other processes' stages.
        devices: how many ranks, or the device of each. Under ``torchrun`` each process is one rank. None: as
            many ranks as there are processes; in one process alone, as many as it has GPUs, or one.
        loss_fn: ``loss_fn(output, target)``, one floating-point number; or ``(loss, logs)``, logs being
            tensors by name, per row or reduced, which ``step`` keeps in ``logs``. None: the model returns its
            loss, as a tensor, as ``.loss`` or under ``"loss"``.
        schedule: a name, such as ``1f1b`` or ``zb-h1``; ``"auto"`` for the fastest one found for the model's
            costs within the memory limit; a ``Path`` to a file of compute orders; or a function of the number
            of ranks and of microbatches that returns a ``Schedule``. See docs/schedules.md. ``pipedream`` and
            its kin have no flush: train with ``pipe.stream``, and see docs/streams.md.
        microbatches: how many a mini-batch is split into. None: as many as the simulated step is fastest
            with, within the memory limit.
        stages: how many each pipeline has. None: as many as the schedule has on all devices. With fewer there
            are several pipelines side by side: they take the microbatches in turn and sum their gradients.
            ``stages=1`` is data parallelism.
        replicas: how many ranks share each stage: 2 makes two pipelines of half as many stages. ``(3, 2, 1)``
            puts the first of three stages on three ranks and so on, under ``1f1b`` or
            ``pipedream``. ``"auto"``: as many as the simulated step is fastest with.
        asynchronous: lets ``schedule="auto"`` choose a schedule without a flush where that is faster. It is
            other mathematics: gradients are those of weights that lack some updates; see docs/streams.md. It
            needs ``optimizer``; train with ``pipe.stream``.
        optimizer: makes the optimizer of ``(name, parameter)`` pairs, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``; every step then ends with its update, and
            ``pipe.optimizer`` is there for LR schedulers and checkpoints. See docs/optimizers.md. None: you
            step an optimizer of your own, made of ``pipe.parameters()``.
        clip_grad_norm: with ``optimizer``, the most that the norm of the whole model's gradients may be; of
            each stage's, where there is no flush.
        shard: with ``optimizer``, what replicas divide among themselves: ``"optimizer"`` its state,
            ``"gradients"`` their sums, too, ``"parameters"`` everything (ZeRO 1, 2 and 3). ``"auto"``: what
            the simulated step is fastest with, within the memory limit.
        gradient_dtype: ``"bf16"`` or ``"fp16"`` lets gradients travel between replicas, and be summed there,
            with fewer bits. None: as they are.
        on_nan: what becomes of a step whose loss is NaN, or some gradient of which is not finite.
            ``"raise"``: all ranks raise NonFiniteError. ``"skip"``: nothing comes of the step, and
            ``pipe.num_skipped`` counts it. ``"ignore"``: nobody looks. See docs/optimizers.md.
        batch: what each rank passes to ``step`` under ``torchrun``. ``"same"``: the same whole mini-batch,
            which every step compares: shapes, types, values up to 64 kB, 4,096 values of a larger tensor.
            ``"rank0"``: anything or nothing, because every rank gets what rank 0 passes. ``"local"``: the
            part of the batch of its replica, ``pipe.replica`` of ``pipe.num_replicas``, with any number of
            rows; see docs/replicas.md.
        batched: how arguments of ``step`` are split, by name or position: the dimension that is the batch,
            or None for one that every microbatch needs whole, such as ``{"x": 1, "table": None}``; for an
            argument of several tensors a structure of these. A dimension in which the batch is merged with
            another one is written as in einops, with ``b`` for the batch: ``{"target": "(t b)"}``. The model
            gets its arguments as they are passed, of fewer rows. Arguments that are left out are split along
            dimension 0 if they have as many rows as the batch and the model computes with both; where it does
            not, an error asks.
        microbatch_weight: how much the loss of a microbatch counts, where the model does not show it: a
            function of what ``step`` takes, called with a microbatch's rows of it, that returns a number. The
            loss is then the mean with these weights. ``"rows"`` is the mean by rows, and ``"sum"`` adds
            losses up. None: read off the graph, and a warning says where that cannot be.
        precision: ``"bf16-mixed"`` or ``"fp16-mixed"`` lets operators compute in bfloat16 or float16 where
            ``torch.autocast`` does, with weights and gradients in float32. With ``"fp16-mixed"`` the loss is
            scaled, as by ``torch.amp.GradScaler``; it needs ``optimizer``. None: the model's own types. See
            docs/precision.md.
        kernels: how a rank runs its stages: ``"source"``, the generated Python; ``"inductor"``, compiled by
            ``torch.compile`` at the first step of each size, to sums in another order; ``"auto"``, whichever
            takes less time in the first calls of a function; ``"cudagraphs"``, CUDA graphs of the source,
            with its bits, recorded before the first step of each size, where no value tells what is computed.
            They hold more memory than ``memory()`` says; see docs/memory.md.
        fused_gradients: lets the gradients of weights that are a matrix product be added to their sum within
            it, which saves memory, and that of cross entropy be made of the probabilities, which saves time
            where there are thousands of classes. Both change the last bits of gradients. It is for the
            model's own types and ``kernels="source"``.
        recompute: ``"none"`` keeps every value the backward needs; ``"full"`` keeps only what a stage
            received and computes the rest again; ``"auto"`` computes again as little as lets every device
            stay within ``memory_limit``. See docs/recompute.md.
        memory_limit: bytes per device, or text such as ``"16GiB"``. The state of ``optimizer`` counts; that
            of an optimizer outside the programs does not.
        offload: ``"activations"`` lets values that wait for the backward do so in host memory, as few as let
            every device stay within ``memory_limit``, chosen together with ``recompute``. See
            docs/memory.md. ``"optimizer"`` keeps the state of ``optimizer`` there between updates. ``"all"``
            does both. None: all stays on its device.
        topology: how fast the devices are, how much they hold and how they are joined, or the file that says
            so; see docs/planner.md. Rank r is its device r. Without ``devices`` it may have more than there
            are, all of them alike. None: devices that are alike.
        device_model: what turns FLOPs and bytes into seconds, such as ``pipec.calibrate("cpu")`` measures.
            None: an entry of a table, by the kind of device; with ``schedule="auto"`` a CPU is measured, once
            on a machine. See docs/planner.md.
        profile: measured times, or the file that holds them, for the stages to be cut by; see ``profile``.
            None: the device model.
        dynamic: compile once for every size of microbatch, and from the second one on for every length of
            sequences and every number among the arguments. False: for each anew, which takes half the time
            where there is only one, as for a plan that is only looked at; ``microbatches=None`` then means
            up to four a rank. A ``profile`` is of dynamic graphs.
        timeout: seconds to wait for another process before giving it up.

    Raises:
        InputError: an argument does not fit, ``devices`` contradicts the number of processes started, or
            these passed different arguments. (``device_model`` and ``profile`` may differ; rank 0's count.)
    """
    check_arguments(COMPILE_ARGUMENTS, locals())
    ranks = Ranks(devices if devices is not None else default_num_ranks(world()), timeout, kernels)
    if ranks.world.is_distributed:
        require_same_arguments(
            ranks,
            model,
            devices=devices,
            loss_fn=loss_fn,
            schedule=schedule,
            microbatches=microbatches,
            stages=stages,
            replicas=replicas,
            asynchronous=asynchronous,
            optimizer=optimizer,
            clip_grad_norm=clip_grad_norm,
            shard=shard,
            gradient_dtype=gradient_dtype,
            on_nan=on_nan,
            batch=batch,
            batched=batched,
            microbatch_weight=microbatch_weight,
            precision=precision,
            kernels=kernels,
            fused_gradients=fused_gradients,
            recompute=recompute,
            memory_limit=memory_limit,
            offload=offload,
            topology=Path(topology) if isinstance(topology, str) else topology,
            dynamic=dynamic,
        )
    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    policy = make_schedule_policy(schedule, ranks.count, stages, replicas, asynchronous)
    computes_in = None if precision is None else Precision(precision)
    check_asynchronous_options(
        policy, replicas == "auto", optimizer is not None, shard, batch, on_nan, computes_in
    )
    if fused_gradients:
        check_fused_gradient_options(computes_in)
        require_source(kernels)
    microbatches = resolve_num_microbatches(policy, microbatches)
    if batch == "local":
        check_local_batch_options(policy, replicas, microbatches, microbatch_weight)
    tensors = ModelTensors.of(model)
    tensors.refuse_shared_memory()
    device = next(iter(ranks.devices.values()))
    require_matching_autocast(computes_in, device, "pipec.compile")
    measured = load_profile(profile) if isinstance(profile, str | Path) else profile
    modelled = device_model or default_device_model(device)
    joined = resolve_topology(topology, ranks.count, modelled.link, elastic=devices is None)
    if limit is not None:
        joined = joined.with_memory_limit(limit)
    limits = [each.memory_bytes for each in joined.devices]
    check_offload_options(offload, recompute, limits, not policy.may_be_asynchronous, optimizer is not None)
    updates, sync_spec = _updates(optimizer, clip_grad_norm, shard, computes_in, tensors)
    if gradient_dtype is not None:
        sync_spec = replace(sync_spec, gradient_dtype=GRADIENT_DTYPES[gradient_dtype])
    if on_nan != "ignore":
        sync_spec = replace(sync_spec, on_nan=NonFiniteAction(on_nan))
    if offload in ("optimizer", "all"):
        sync_spec = replace(sync_spec, state_on_host=True)
    facts = _optimizer_facts(updates, optimizer, tensors, device)
    offloads = offload in ("activations", "all")
    anywhere = ranks.world.is_distributed or len({*ranks.devices.values()}) == 1
    options = CompilerOptions(
        modelled, joined, recompute, offloads, measured, sync_spec, facts, anywhere, fused_gradients
    )
    asked = Candidate(
        policy,
        options,
        microbatches,
        tunes_replicas=replicas == "auto",
        tunes_shard=shard == "auto",
        may_rearrange=batch != "local",
        dynamic=dynamic,
    )
    told = device_model is not None or measured is not None
    measures = policy.source == "auto" and not told and device.type == "cpu"
    settings = CompileSettings(loss_fn, device, computes_in, weight_name(microbatch_weight), measures)
    compiler = Compiler(model, tensors.canonical, settings, asked)
    return Pipeline(compiler, tensors, ranks, batch, updates, batched, microbatch_weight)


def _updates(
    factory: Factory | None,
    max_norm: float | None,
    shard: str | None,
    precision: Precision | None,
    tensors: ModelTensors,
) -> tuple[OptimizerUpdates | None, SyncSpec]:
    """The optimizer of the programs, and what they are to do at the end of a step."""
    if factory is None:
        for name, value in (("clip_grad_norm", max_norm), ("shard", shard)):
            if value is not None:
                raise InputError(
                    f"{name}={value!r} concerns the updates that a program makes; pass optimizer=..., such "
                    "as functools.partial(torch.optim.AdamW, lr=1e-3), or leave it out"
                )
        if precision is Precision.FP16:
            raise InputError(
                "precision='fp16-mixed' leaves an update out on all ranks where a gradient overflows, and an "
                "optimizer of your own would make it; pass optimizer=..., such as "
                "functools.partial(torch.optim.AdamW, lr=1e-3), or take precision='bf16-mixed'"
            )
        return None, NO_SYNC
    kind = None if shard in (None, "auto") else ShardingLevel(shard)
    loss_scale = LossScale() if precision is Precision.FP16 else None
    scales = loss_scale is not None
    sync_spec = SyncSpec(updates=True, clips=max_norm is not None, shard=kind, has_loss_scale=scales)
    return OptimizerUpdates(factory, max_norm, tensors.unique_parameters(), loss_scale), sync_spec


def _optimizer_facts(
    updates: OptimizerUpdates | None, factory: Factory | None, tensors: ModelTensors, device: torch.device
) -> OptimizerProperties | None:
    """What plans know of the optimizer."""
    if updates is None or factory is None:
        return None
    parameters, elementwise = tensors.unique_parameters(), updates.optimizer.elementwise
    scratch = update_scratch(factory, parameters, device.type == "cuda")
    return OptimizerProperties(state_bytes(factory, parameters), elementwise, *scratch)


def profile(
    example: Example,
    *,
    microbatch_size: int | None = None,
    device: torch.device | str = "cpu",
    repeats: int = 10,
    ranks: int = 1,
    precision: str | None = None,
    progress: ProgressWrapper = iter,
) -> Profile:
    """Measure every operator of a training step of ``example``, forward and backward, on one device.

    Args:
        example: the model, its arguments and its loss. Its tensors are not changed.
        microbatch_size: how many rows to run at once, best those of a microbatch of the training to come.
            None: an eighth of the example's rows.
        device: where to run. A model on meta is given random values there.
        repeats: how often each operator is timed; the median counts.
        ranks: how many ranks will share the device, or its memory bus and caches if it is a CPU. The whole
            model then runs in as many copies at a time, and is as slow as they make each other. Under
            ``torchrun`` each process profiles by itself: call it in all of them at a time, with one.
        precision: that which ``compile`` will be given.
        progress: wraps the iteration over the runs, for a progress bar.

    Raises:
        CaptureError: the model cannot be captured.
        InputError: ``microbatch_size`` or ``repeats`` does not fit, or the device is meta.
    """
    check_arguments(PROFILE_ARGUMENTS, locals())
    given = ModelCall(example.args, dict(example.kwargs), example.target)
    call = with_batch_axes(given, example.batched, positional_names(example.model))
    size = max(1, call.batch_size // 8) if microbatch_size is None else microbatch_size
    if not 1 <= size <= call.batch_size:
        raise InputError(
            f"microbatch_size is {size}; expected 1 to the {call.batch_size} rows of the example"
        )
    where = resolve_device(device)
    model, rows = example.model, call.rows(0, size)
    canonical = ModelTensors.of(model).canonical
    with autocast(None if precision is None else Precision(precision), where):
        graph = capture(model, example.loss_fn, Mode.TRAIN, rows, canonical, where)
    return profile_graph(graph, model, rows, where, repeats, ranks, progress)
