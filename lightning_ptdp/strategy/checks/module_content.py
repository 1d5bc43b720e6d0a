"""Checks of modules, parameters and hooks that a layout cannot honour."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_ptdp.base.data_record import records_of
from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.requirements import check_installed
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.checkpoint.save_agreement import (
    from_rank_zero,
    gather,
    is_rank_zero,
    same_outcome,
)
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models.pretrained_folder import fingerprint, local_folder
from lightning_ptdp.parameters.initializers import Initializers, why_without_values
from lightning_ptdp.shims.lightning import LightningModule, fits
from lightning_ptdp.shims.peft import adds_penalty
from lightning_ptdp.shims.quantization import is_packed, quantized_parameters
from lightning_ptdp.shims.torch import (
    forward_hooks,
    forward_pre_hooks,
    has_accumulation_hooks,
    has_backward_hooks,
    has_gradient_hooks,
)
from lightning_ptdp.shims.transformers import is_capture, is_gradient_request
from lightning_ptdp.tensor_parallel import Alias, Kind, ParallelPlan, Partial, Region, Whole
from lightning_ptdp.tensor_parallel.randomness import drops
from lightning_ptdp.world.layout import ParallelLayout

_DIGEST = 12  # characters shown
_OPTION = "option '"


def check_late(model: nn.Module, *, built: Collection[str]) -> None:
    """Check that tensors built on the meta device can be given values.

    These are all tensors whose names are not in ``built``."""
    initialize: Initializers | None = None
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if is_parametrized(module) and any(
            prefix + key not in built for key, _ in module.named_parameters()
        ):
            raise ValueError(
                f"'{name}' is parametrized (as by weight norm) and was built in "
                "configure_model on the meta device, where its parts have no initial values. "
                "Build the model in __init__, or use PTDPStrategy(meta_init=False)"
            )
        entries = (*module._parameters.items(), *module._buffers.items())
        if any(
            tensor is not None and tensor.is_meta and prefix + key not in built
            for key, tensor in entries
        ):
            initialize = initialize or Initializers(model)
            if not initialize.knows(name):
                raise ValueError(why_without_values(name, module))


def check_same_training(module: LightningModule) -> None:
    """Check that all ranks have the same model, options, initial weights and data; collective.

    Of a model, names, shapes and types are compared, and the plain values of its hyperparameters,
    which only warn: a module may store the time or its rank. Data are compared if the data module
    describes them (``DescribedData``).

    Raises:
        CheckpointError: A rank differs from rank 0. Raised on all ranks.
    """
    action = "comparing the model and the data of all ranks"
    with same_outcome(action):
        facts = _facts(module)
    if len({*gather(sha256(repr(facts).encode()))}) == 1:
        return
    expected = from_rank_zero(lambda: facts)
    with same_outcome(action):
        for name in {**expected, **facts}:
            there = expected.get(name, "missing")
            here = facts.get(name, "missing")
            if there == here:
                continue
            text = (
                f"{name} is {here} here, but {there} on rank 0. All ranks need the same code, "
                "options and files"
            )
            if not name.startswith(_OPTION):
                raise ValueError(f"{text}. Update those of this rank's node")
            warnings.warn(text, stacklevel=2)


def _facts(module: LightningModule) -> dict[str, str]:
    facts = {
        f"'{name}'": f"{parameter.dtype} {tuple(parameter.shape)}"
        for name, parameter in module.named_parameters()
        if not is_lazy(parameter)
    }
    facts |= {f"{_OPTION}{name}'": value for name, value in _plain(dict(module.hparams))}
    weights = getattr(module, "initial_weights", lambda: None)()
    if weights is not None:
        facts["the digest of the initial weights"] = fingerprint(local_folder(weights.path))[
            :_DIGEST
        ]
    if fits(module.trainer):
        facts |= {
            f"the digest of the {one.context} data": one.digest[:_DIGEST]
            for one in records_of(getattr(module.trainer, "datamodule", None))
        }
    return facts


def _plain(values: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield numbers and words in nested mappings and lists; paths and run names may differ."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _plain(value, f"{name}.{key}".lstrip("."))
    elif isinstance(values, list | tuple):
        yield from _plain(dict(enumerate(values)), name)
    elif isinstance(values, int | float) or (isinstance(values, str) and values.isidentifier()):
        yield name, repr(values)


def check_quantized(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Check that the ranks can use a library's quantized weights as they are.

    Raises:
        ValueError: A weight would have to be split by tensor or expert parallelism, sharded over
            replicas (torchao), or stepped on by the optimizer.
    """
    for name, parameter in quantized_parameters(model).items():
        kind = f"'{name}' is a {type(parameter).__name__} of {type(parameter).__module__}"
        layer = model.get_submodule(name.rpartition(".")[0])
        packed = is_packed(parameter) and isinstance(layer, nn.Linear)
        if config.shard == "parameters" and not packed:
            raise ValueError(
                f"{kind} in {type(layer).__name__}, which shard='parameters' cannot shard over "
                "replicas: it shards only weights of linear layers with one byte per element. Use "
                "shard='gradients', Int8WeightOnlyConfig, or transformers.BitsAndBytesConfig"
            )
        if parameter.requires_grad:
            raise ValueError(
                f"{kind} and would be trained, but it has no gradient. Freeze it "
                "(requires_grad_(False)) and train adapters, or load the weights in bfloat16"
            )
        for axis in ("tensor", "expert"):
            if (degree := layout.size(axis)) > 1:
                raise ValueError(
                    f"{kind}, which {axis}_parallel_size={degree} cannot cut: its scales belong to "
                    f"blocks of the whole matrix. Use {axis}_parallel_size=1 (pipeline, data and "
                    "context parallelism keep it whole), or load the weights in bfloat16"
                )


def check_libraries(model: nn.Module) -> None:
    """Check the versions of the libraries that define the modules in ``model``.

    Raises:
        RequirementError: A version is outside the declared range, where a split model may silently
            differ.
    """
    check_installed(*{type(module).__module__.partition(".")[0] for module in model.modules()})


def check_compiled(model: nn.Module, layout: ParallelLayout) -> None:
    for name, child in model.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and layout.divides_model:
            raise ValueError(
                f"{name} is a module of torch.jit, which {layout.describe()} cannot divide among "
                "ranks. Use the module that was scripted or traced, call it where the batch is "
                "prepared, or use only data parallelism"
            )
        if name.rpartition(".")[2] == "_orig_mod":
            raise ValueError(
                f"{name.removesuffix('._orig_mod')} is wrapped by torch.compile(), which "
                "renames all modules inside it and would compile across stages. Compile each "
                "block in place instead: PTDPStrategy(compile='blocks')"
            )


def check_skipped_layers(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    if layout.pipeline_parallel_size > 1:
        reason = "pipeline stages wait for each other's layers", "pipeline_parallel_size=1"
    elif config.sharded_state(layout) == "parameters" and config.reshards_after == "block":
        reason = "all replicas must gather the same layers", "reshard_after='step'"
    else:
        return
    for name, module in model.named_modules():
        for holder in (module, getattr(module, "config", None)):
            value = getattr(holder, "layerdrop", 0.0)
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"'{name or type(module).__name__}' skips layers at random "
                    f"(layerdrop={value}), but {reason[0]}. Build it with layerdrop=0.0 "
                    f"(encoder_layerdrop, decoder_layerdrop), or use {reason[1]}"
                )


def check_adapter_loss(model: nn.Module) -> None:
    if any(adds_penalty(module) for module in model.modules()):
        raise ValueError(
            "the adapters are ADALORA of peft, which adds a penalty on the adapters of all blocks "
            "to the loss, but a pipeline stage has only its own. Use plain LoRA, or "
            "pipeline_parallel_size=1"
        )


def check_gradient_hooks(hooked: Collection[str], kinds: Mapping[str, Kind]) -> None:
    for name, kind in kinds.items():
        parameter = next((path for path in hooked if path.startswith(f"{name}.")), None)
        if parameter is not None and not isinstance(kind, Alias | Partial | Region | Whole):
            raise ValueError(
                f"'{parameter}' has a hook on its gradient (register_hook), which would see "
                f"only a part of the gradient, because {kind.axis}_parallel_size splits it. "
                "Change gradients in on_before_optimizer_step, which sees those of all "
                f"parameters, or use {kind.axis}_parallel_size=1"
            )


def check_accumulation_hooks(hooked: Mapping[str, bool], config: PTDPConfig) -> None:
    """Check the names of parameters whose gradients have hooks; True: after accumulation."""
    name = next((name for name, accumulated in hooked.items() if accumulated), None)
    if config.has_microbatches and name is not None:
        raise ValueError(
            f"'{name}' has a hook on its accumulated gradient "
            "(register_post_accumulate_grad_hook), which would run once for each microbatch. "
            "Change gradients in on_before_optimizer_step, or use num_microbatches=1 without a "
            "pipeline"
        )


def check_max_norm(model: nn.Module, layout: ParallelLayout) -> None:
    for name, module in model.named_modules() if layout.size("replica_sum") > 1 else ():
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"'{name}' (max_norm={module.max_norm}) rescales its weight in each forward, from "
                f"the tokens of one of {layout.size('replica_sum')} replicas, which would then "
                "differ. Build it without max_norm, and rescale the weight in on_train_batch_start"
            )


def check_shared_values(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Check that parameters are not tied by their memory alone, where values are moved or cut."""
    moves = layout.divides_model or config.offload_optimizer
    if not moves and config.sharded_state(layout) == "none":
        return
    first_of: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            continue
        address = parameter.data_ptr()
        if not address:  # without memory, as on the meta device
            continue
        other_name, other = first_of.setdefault(address, (name, parameter))
        if other is not parameter and (parameter.requires_grad or other.requires_grad):
            raise ValueError(
                f"'{name}' and '{other_name}' are two parameters with the same memory (.data), which "
                "shard, offload_optimizer and layouts that divide the model would separate. Assign "
                "the parameter itself (head.weight = embedding.weight), or copy the values"
            )


def check_whole_dropout(model: nn.Module, plan: ParallelPlan, kinds: Mapping[str, Kind]) -> None:
    """Check that modules kept whole draw the same random numbers on all tensor ranks.

    If the sequence is split from the embedding to the head, each rank draws its own."""
    for name, kind in kinds.items() if plan.sequence == "ends" else ():
        if kind.keeps_sequence and any(map(drops, model.get_submodule(name).modules())):
            raise ValueError(
                f"'{name}' is {kind.name!r} and has dropout, but with sequence='ends' each tensor "
                "rank draws random numbers for its own slice of the sequence. Use "
                "ParallelPlan(sequence='blocks'), keyed_dropout=True, or no dropout in this module"
            )


def check_hooks(model: nn.Module, kinds: Mapping[str, Kind], layout: ParallelLayout) -> None:
    for name, kind in kinds.items():
        if isinstance(kind, Whole) and not layout.sequence_parallel:
            continue  # the module stays
        hook = _lost_hook(model.get_submodule(name))
        if hook is not None and not isinstance(kind, Alias | Partial | Region):
            raise ValueError(
                f"'{name}' has a {hook}, but tensor parallelism replaces this module "
                "with one that returns a part of the output. Put the hook on the parent "
                "module, or use tensor_parallel_size=1"
            )


def _lost_hook(module: nn.Module) -> str | None:
    """Return which hook of a module its replacement would not have; None: it has none."""
    after, _ = forward_hooks(module)
    if not all(is_capture(hook) or is_gradient_request(hook) for hook in after.values()):
        return "forward hook"
    before, _ = forward_pre_hooks(module)
    if before:
        return "forward pre-hook"
    return "backward hook" if has_backward_hooks(module) else None


def check_hooks_before_sums(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Check hooks that see gradients before they are summed over microbatches and replicas.

    Collective over the world. All ranks raise the same error; rank 0 warns."""
    has_replicas = layout.size("replica_sum") > 1
    divided = {"one microbatch": config.has_microbatches, "one replica": has_replicas}
    parts = [part for part, applies in divided.items() if applies]
    if not parts:
        return
    ranks = gather(hooks_by_name(model))
    hooked = {name: accumulated for names in ranks for name, accumulated in names.items()}
    check_accumulation_hooks(hooked, config)
    if hooked and is_rank_zero():
        warnings.warn(
            f"hooks on the gradients of {listed([*hooked], 3)} see those of {' on '.join(parts)}. "
            "Masks and factors have the result of one process, but clamps and norms do not. "
            "Change gradients in on_before_optimizer_step, which sees the sums",
            stacklevel=2,
        )


def hooks_by_name(model: nn.Module) -> dict[str, bool]:
    """Return names of parameters whose gradients have hooks; True: after accumulation."""
    return {
        name: has_accumulation_hooks(parameter)
        for name, parameter in model.named_parameters()
        if has_gradient_hooks(parameter)
    }


# ---- Warnings of modules whose result depends on how a batch is divided --------------------------


def warn_of_batch_norm(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Warn of modules whose result depends on the number of microbatches or replicas."""
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    kinds = (*batch_norms, nn.SyncBatchNorm) if config.has_microbatches else batch_norms
    averaging = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        or (isinstance(module, averaging) and module.track_running_stats)
    ]
    if config.has_microbatches:
        part = "one microbatch"
        remedy = "num_microbatches=1 without a pipeline"
    elif layout.size("replica_sum") > 1:
        part = "one replica's part"
        remedy = "Trainer(sync_batchnorm=True) on GPUs"
    else:
        return
    for name, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            warnings.warn(
                f"'{name}' (scale_grad_by_freq=True) divides gradients by how often a token is in "
                f"{part}, so the model differs slightly from the same model on one device",
                stacklevel=2,
            )
    if not names:
        return
    warnings.warn(
        f"{listed(names, 3)} average statistics over the batch, which here is {part}, so the "
        f"model differs slightly from the same model on one device. Use {remedy}, or a "
        "normalization that does not depend on other samples",
        stacklevel=2,
    )


def warn_of_balance_losses(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Warn if a Hugging Face mixture computes its load-balancing loss over fewer tokens.

    In one process that loss is computed over all tokens of the batch."""
    has_aux_loss = any(
        getattr(getattr(module, "config", None), "output_router_logits", False)
        for module in model.modules()
    )
    replicas = layout.data_parallel_size * layout.context_parallel_size
    if has_aux_loss and (config.has_microbatches or replicas > 1):
        warnings.warn(
            "output_router_logits=True computes the model's load-balancing loss from means "
            f"over the tokens of one forward, which here is a microbatch on one of {replicas} "
            "replicas. The mean of these losses is trained, as under DDP, and differs "
            "slightly from the loss of one process. Use num_microbatches=1 and one replica, "
            "or a GPTConfig with num_experts, whose loss is the same in every layout",
            stacklevel=2,
        )
