"""Layout planning for any module: ``plan(module, …)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from lightning_ptdp.base.option_types import Size
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models.model_config import BertConfig, GPTConfig
from lightning_ptdp.planner import (
    Choice,
    Device,
    Job,
    ModelShape,
    Plan,
    Space,
    find_device,
    find_precision,
    find_software,
    gpt_sizes,
    search,
)
from lightning_ptdp.planner.model_trace import (
    Example,
    call_with,
    longest_sample,
    trace_shape,
    with_images,
)
from lightning_ptdp.schedule.generators import schedule_name
from lightning_ptdp.shims.quantization import planned_elements
from lightning_ptdp.strategy.checks.model import CUT_MARK, full_model, plan_of
from lightning_ptdp.world.layout import ParallelLayout


def plan(  # noqa: PLR0913
    module: nn.Module,
    *,
    world_size: Size,
    batch: Size,
    device: str | Device = "h100",
    sequence_length: Size | None = None,
    example: Example | None = None,
    precision: str = "bf16-true",
    software: str = "ours",
    config: PTDPConfig | None = None,
    space: Space | None = None,
    count: int = 10,
) -> Plan:
    """Return the fastest layouts of a module that fit in memory, as ``ptdp plan`` finds them.

    No step is computed, and no device is needed. The sizes of the module are found by tracing a
    forward on tensors without data.

    Args:
        module: A LightningModule or a plain module: on the meta device, with values, or built by
            its ``configure_model``.
        world_size: Number of processes, one per device.
        batch: Samples in an optimizer step, over all replicas.
        device: Name of a known device, or a ``Device``.
        sequence_length: s in tokens; None: the maximum of the module, or the length of its example.
        example: Input of the module's forward: a tensor, a tuple, or a mapping of names to tensors,
            whose first dimension is the batch; None: its ``example_input_array``, or token ids.
        precision: Lightning's name of the precision.
        software: "ours", or "ours-compiled" for ``compile="blocks"``.
        config: The strategy's options; its ``plan`` describes the modules.
        space: Layouts that may be tried.
        count: Number of the best layouts to return.

    Returns:
        The candidates, best first, with memory and time of each by part;
        ``plan.best[0].choice.options()`` are the strategy's arguments.

    Raises:
        ValueError: The module cannot be traced (the message says where tracing stopped), or a name
            is unknown.
    """
    target_device = find_device(device) if isinstance(device, str) else device
    length = longest_sample(nn.Module(), example)  # length of the example alone
    if None not in (length, sequence_length) and length != sequence_length:
        raise ValueError(
            f"sequence_length={sequence_length}, but the example has {length} tokens. Leave "
            "one of them out"
        )
    full_module = (
        full_model(cast(Any, module), config or PTDPConfig())
        if hasattr(module, "configure_model")
        else module
    )
    job = described_job(
        full_module,
        config or PTDPConfig(),
        world_size=world_size,
        batch=batch,
        device=target_device,
        length=sequence_length,
        precision=precision,
        software=software,
        example=example,
    )
    return search(job, space, count=count)


def described_job(  # noqa: PLR0913
    module: nn.Module,
    config: PTDPConfig,
    *,
    world_size: int,
    batch: int,
    device: Device,
    length: int | None,
    precision: str,
    software: str = "",
    example: Example | None = None,
) -> Job:
    """Return the planner's description of training a whole module.

    Args:
        module: The whole module.
        config: The strategy's options.
        world_size: Number of processes.
        batch: Samples in an optimizer step, over all replicas.
        device: Device of each process.
        length: Tokens of a sample; None: the maximum of the module.
        precision: Lightning's name of the precision.
        software: The planner's name of the software; "": that of the options.
        example: Input of the module's forward.

    Raises:
        ValueError: The module cannot be traced, and its sizes are unknown.
    """
    software = software or ("ours" if config.compiles == "none" else "ours-compiled")
    model = described(
        module,
        config,
        length=length,
        precision=precision,
        software=software,
        device=device,
        example=example,
    )
    bytes_of = find_precision(precision, states=type_of_states(module))
    return Job(
        model=model,
        world_size=world_size,
        global_batch_size=batch,
        device=device,
        precision=bytes_of,
        software=find_software(software),
        sequence_length=length or model.sequence_length,
        trained=trained_share(module, bytes_of.weight),
        offloads_optimizer=config.offload_optimizer,
    )


def described_choice(
    config: PTDPConfig, layout: ParallelLayout, *, micro_batch_size: int, num_microbatches: int
) -> Choice:
    """Return the planner's description of the strategy's options."""
    return Choice(
        layout=layout,
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        schedule=schedule_name(config.schedule, config.virtual_pipeline_size),
        context_parallel_attention=config.context_parallel_attention,
        recompute=config.recompute,
        distribute_saved_activations=config.distribute_saved_activations,
        shard=config.shard,
    )


def trained_share(module: nn.Module, width: int) -> float:
    """Return the share of a module's parameters, of ``width`` bytes, that are trained.

    Frozen parameters, such as those of the model that adapters extend, are not trained."""
    parameters = list(module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return trained / max(1, sum(planned_elements(p, width) for p in parameters))


def type_of_states(module: nn.Module) -> str:
    """Return the type of Adam's moments by the module's ``optimizer_config``."""
    return str(getattr(getattr(module, "optimizer_config", None), "states", "float32"))


def described(
    module: nn.Module,
    config: PTDPConfig,
    *,
    length: int | None,
    precision: str,
    software: str,
    device: Device,
    example: Example | None = None,
) -> GPTConfig | BertConfig | ModelShape:
    """Return the planner's description of a whole module.

    It is the shape found by a trace. If tracing fails, it has the sizes of a configuration inside
    the module, unless there are several models.

    Raises:
        ValueError: The module cannot be traced, and it has no such configuration.
    """
    configs = {
        f"{name}.": child.config
        for name, child in module.named_modules()
        if not isinstance(getattr(child, "config", None), Mapping | None)
    }
    # Names end with a dot, so that a model's name is a prefix of the names inside it.
    models = [
        name
        for name in configs
        if not any(name != other and name.startswith(other.lstrip(".")) for other in configs)
    ]
    tokens = length or longest_sample(module, example)
    try:
        if CUT_MARK in vars(module):
            raise ValueError("it was already cut for a layout, so its forward covers only a part")
        shape = trace_shape(
            module,
            plan_of(cast(Any, module), config),
            call_with(module, example, sequence_length=tokens),
            precision=find_precision(precision),
            software=find_software(software),
            on_cpu=device.kind == "cpu",
            sequence_length=tokens or 1,
        )
        return shape if example is not None else with_images(shape, module)
    except ValueError as error:
        for model_config in configs.values() if len(models) == 1 else ():
            try:
                return gpt_sizes(model_config)
            except (ValueError, TypeError):
                continue  # report the trace's reason, which is better
        raise ValueError(
            f"the sizes of {type(module).__name__} cannot be determined: {error}"
        ) from error
