"""Options of the strategy, checked when they are given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch

from lightning_ptdp.attention import AttentionKind
from lightning_ptdp.base.option_types import Count, Size, check_types
from lightning_ptdp.blocks.fp8 import Float8Scaling
from lightning_ptdp.blocks.local_blocks import CompilePolicy
from lightning_ptdp.blocks.recompute import RecomputePolicy, check_recompute_options
from lightning_ptdp.checkpoint.latest import OnDamage
from lightning_ptdp.schedule import CustomSchedule, Schedule, build_schedule
from lightning_ptdp.schedule.generators import (
    check_schedule,
    may_split_backward,
    schedule_microbatches,
    schedule_placement,
)
from lightning_ptdp.tensor_parallel import ParallelPlan
from lightning_ptdp.tensor_parallel.parallel_product import Pieces
from lightning_ptdp.world.layout import Degrees, ParallelLayout, Sharding

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
GradientDtype = Literal["float32", "parameter"]
Resharding = Literal["block", "chunk", "step"]
Backend = Literal["nccl", "gloo"]
FiniteAction = Literal["raise", "skip"]
CheckpointFormat = Literal["auto", "file", "folder"]
ReduceDtype = Literal["float32", "bfloat16", "float16"]
Verification = Literal["first_step"]
_MOST = {"bucket_mb": 2.0**20, "timeout_s": 1e9, "channel_ctas": 32}
"""Largest values of options.

``bucket_mb`` is limited to one TiB, ``timeout_s`` to about thirty years, which clocks and sockets
still accept, and ``channel_ctas`` to the maximum that every NCCL version accepts.
"""


@dataclass(frozen=True, kw_only=True)
class PTDPConfig(Degrees):
    """Pipeline, tensor, sequence and data parallel training of an ordinary LightningModule.

    Args:
        layout: Option of the strategy alone: "auto" lets the planner choose the layout that it
            estimates to be the fastest of those that fit, and prints it. The sizes, the schedule,
            recomputation and sharding of the optimizer must then be left out.
        tensor_parallel_size: t, ranks that share one layer's matrices.
        pipeline_parallel_size: p, ranks that share the layers.
        virtual_pipeline_size: v, model chunks per pipeline rank (interleaving).
        context_parallel_size: c, ranks that share every sequence along time, through the whole
            network.
        expert_parallel_size: e, ranks of data and context parallelism that share the experts of a
            mixture: each holds 1/e of the experts, and tokens are sent to them.
        expert_tensor_parallel_size: 1 (every tensor rank computes its part of the tokens with whole
            experts), or t: each expert is split over the tensor ranks, for experts that are too
            wide or too few for e ranks.
        sequence_parallel: Split the activations between tensor-parallel regions along the sequence
            over the t ranks.
        context_parallel_attention: "ring" (keys and values are passed around the ranks; arXiv
            2310.01889) or "all_to_all" (ranks exchange slices of the sequence for heads; arXiv
            2309.14509).
        context_parallel_positions: Raise an error if the model does not accept the positions of its
            tokens in the full sequence. Use False for a model that needs no positions.
        sequence_dims: Under context parallelism, the time dimension of the batch's tensors with
            these keys (None: no time dimension), if it is not dimension 1.
        tensor_overlap: Under sequence parallelism, the number of pieces of the sequence in which
            linear layers gather their input, or sum their output, while they multiply the other
            pieces. 1: gather before, or sum after, a single product. "symmetric": use torch's
            symmetric memory, if a tensor group's GPUs are connected by NVLink.
        num_microbatches: m, microbatches in a step of one replica. Default: 4p with a pipeline,
            else 1.
        micro_batch_size: b, samples of a microbatch, instead of num_microbatches: m then follows
            from each batch, which may grow during training.
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", or "auto"
            (1F1B, interleaved if v > 1); the path of a CSV file; or a ``CustomSchedule``.
        microbatch_group_size: Microbatches that pass through a chunk before the next chunk runs, in
            interleaved schedules. Default: p.
        partition: Number of layers of each of the p*v stages, or the name of each stage's first
            block; default: balanced by cost.
        recompute: "none", "full" (every block's activations are computed again in the backward), or
            "selective" (only those of the modules that the plan lists as selective); "offload"
            recomputes nothing, but keeps every block's activations in host memory until the
            backward.
        recompute_layers: Number of blocks of a stage that are recomputed or offloaded, for all
            stages or one number per stage. Default: all.
        distribute_saved_activations: With recompute="full" and tensor parallelism, keep 1/t of a
            block's input on each tensor rank and gather it for the recomputation (under sequence
            parallelism it is split anyway).
        scatter_gather: With tensor parallelism but without sequence parallelism, send 1/t of a
            hidden state on each tensor rank and gather it after the boundary (arXiv 2104.04473,
            section 4.1).
        channel_ctas: Thread blocks of a GPU (1 to 32) that NCCL may use for a message between
            pipeline stages. A receive holds them from its early post until its message arrives.
            Default: 4, which leaves room for the collectives of a computation; NCCL decides if it
            accepts no number.
        fp8: Let the linear layers of the repeated blocks multiply in float8, by torchao, with a
            scale for each operand ("tensorwise") or for each of its rows ("rowwise": more exact).
        compile: Compile each repeated block with ``torch.compile`` after it is sharded: "blocks",
            "none", or "auto" (on CUDA, unless the schedule splits the backward).
        compile_options: Arguments of ``torch.compile``, such as {"mode":
            "max-autotune-no-cudagraphs"} or {"backend": "aot_eager"}.
        plan: Sharding of the submodules, and name of the repeated container. Default: the module's
            own ``configure_parallel()``, else found automatically (pipeline) or an error (tensor
            parallelism).
        meta_init: Run ``configure_model`` on the meta device, so that each rank only ever holds its
            own part.
        seed: Seed of dropout, and of initial weights built on the meta device; default: torch's
            seed (``seed_everything``) on rank 0.
        keyed_dropout: Drop the same elements in every layout, for comparing layouts; slower
            (``lightning_ptdp.keyed_dropout``).
        bucket_mb: Size of a gradient bucket in MiB. Default: 25, or with many replicas 4 for each
            of them.
        shard: State that is sharded over the replicas: "none", "optimizer" (each replica keeps the
            optimizer states of its part of the parameters, updates that part, and gathers
            the rest; ZeRO-1, arXiv 1910.02054), "gradients" (each also keeps only its part of the
            gradients, which are summed after every microbatch; ZeRO-2), or "parameters" (each also
            keeps only its part of the parameters; those of a block are gathered before its forward
            and before its backward; ZeRO-3). A parameter that the optimizer needs whole (Muon)
            belongs to one replica.
        reshard_after: With shard="parameters", what is gathered and freed together: a "block"
            (twice per microbatch), or a "chunk" when the schedule uses it (two at a time) or once a
            "step".
            Default: "block", or "chunk" under a pipeline.
        master_weights: Let the optimizer step on float32 copies of parameters in half precision
            ("bf16-true", "16-true").
        offload_optimizer: Keep the optimizer's states, and the copies of the parameters on which it
            then steps, in the memory of the host, and step on the CPU (ZeRO-Offload, arXiv
            2101.06840), during the next forward if nothing else reads parameters between the steps.
            On a GPU only weights, gradients and activations are left.
        gradient_dtype: Type in which the gradients of parameters in half precision are accumulated:
            "float32" or the "parameter" dtype.
        reduce_dtype: Type in which gradients are summed over the replicas: "float32", "bfloat16" or
            "float16". Default: as accumulated.
        data_parallel_replicas: Number of nodes (or other groups with fast links) over which the
            replicas are distributed, in order; gradients are then summed in two levels, and a
            sharded optimizer is sharded inside a node only.
        inter_node_reduce_dtype: Type in which gradients are sent between nodes. Default: as inside
            a node.
        broadcast_buffers: Give all replicas rank 0's buffers (BatchNorm's statistics, codebooks)
            before the first batch of each optimizer step and before validation, as DDP does. With
            False each replica keeps its own. Checkpoints hold rank 0's. A stage's buffers are
            broadcast among the ranks that hold the stage.
        overlap_parameter_gather: Gather the parameters of a sharded or offloaded optimizer during
            the next forward. Code that reads a parameter earlier waits for it.
        check_finite: Reaction to a step whose loss or gradient is NaN or infinite: "raise"
            NonFiniteError with the first parameter, rank and microbatch, "skip" the update with a
            warning that names the same, or None: no check. Under float16 the loss scale skips the
            step.
        timeout_s: Limit in seconds of every wait for another rank.
        start_method: How Lightning starts processes: "popen" (scripts), "fork", "spawn" or
            "forkserver".
        process_group_backend: "nccl" or "gloo"; default by device.
        on_damage: If the checkpoint to resume from is damaged: "previous" (resume from the newest
            complete one before it in its folder, with a warning) or "refuse".
        async_save: Let training wait only until a checkpoint's tensors are copied to host memory;
            they are written in the background.
        snapshot_every_n_steps: Save to the memory of every node (``/dev/shm``) after every so many
            optimizer steps, during the next step. ``newest_checkpoint(folder)`` and ``--resume
            auto`` find the snapshot. Training that ends normally removes it. Every node must hold
            the whole training state.
        checkpoint_format: "folder" (every rank writes its part), "file" (rank 0 writes Lightning's
            single file), or "auto": a file if every rank holds the whole model and optimizer, saves
            wait, no callback has ``needs_checkpoint_folders = True`` (ExportHuggingFace,
            SaveOnSignal), and ``ptdp`` does not run the training; else a folder.
        verify: "first_step": before training, compare the first step with one process, and end with
            the reason if they differ.

    The data-parallel size is the world size divided by the other sizes. Without sizes, the strategy
    is data parallel over all devices.

    Raises:
        ValueError: A size or name is impossible; the message says what would work.
    """

    context_parallel_attention: AttentionKind = "ring"
    context_parallel_positions: bool = True
    sequence_dims: Mapping[str, int | None] | None = None
    tensor_overlap: Pieces = 1
    num_microbatches: Size | None = None
    micro_batch_size: Size | None = None
    schedule: str | CustomSchedule = "auto"
    microbatch_group_size: Size | None = None
    partition: Sequence[int] | Sequence[str] | None = None
    recompute: RecomputePolicy = "none"
    recompute_layers: Count | Sequence[Count] | None = None
    distribute_saved_activations: bool = False
    scatter_gather: bool = True
    channel_ctas: Size | None = None
    fp8: Float8Scaling | None = None
    compile: CompilePolicy = "none"
    compile_options: Mapping[str, Any] | None = None
    plan: ParallelPlan | None = None
    meta_init: bool = True
    seed: int | None = None
    keyed_dropout: bool = False
    bucket_mb: float | None = None
    shard: Sharding = "none"
    reshard_after: Resharding | None = None
    master_weights: bool = True
    offload_optimizer: bool = False
    gradient_dtype: GradientDtype = "float32"
    reduce_dtype: ReduceDtype | None = None
    data_parallel_replicas: Size = 1
    inter_node_reduce_dtype: ReduceDtype | None = None
    broadcast_buffers: bool = True
    overlap_parameter_gather: bool = True
    check_finite: FiniteAction | None = None
    timeout_s: float = 1800.0
    start_method: StartMethod = "popen"
    process_group_backend: Backend | None = None
    on_damage: OnDamage = "previous"
    async_save: bool = False
    snapshot_every_n_steps: Size | None = None
    checkpoint_format: CheckpointFormat = "auto"
    verify: Verification | None = None

    def __post_init__(self) -> None:
        check_types(self)
        self.layout(self.smallest_world_size)  # all checks that do not need the world's size
        if self.num_microbatches is not None and self.micro_batch_size is not None:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} and "
                f"micro_batch_size={self.micro_batch_size} are both set. Set only one of them. "
                "The other follows from the batch size of a replica, micro_batch_size * "
                "num_microbatches"
            )
        for field, limit in _MOST.items():
            if (value := getattr(self, field)) is not None and not 0 < value <= limit:
                raise ValueError(f"{field}={value!r} must be greater than 0 and at most {limit:g}")
        if self.channel_ctas is not None and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"channel_ctas={self.channel_ctas} applies to messages between stages, but "
                "pipeline_parallel_size=1. Leave it out"
            )
        if self.inter_node_reduce_dtype is not None and self.data_parallel_replicas == 1:
            raise ValueError(
                f"inter_node_reduce_dtype={self.inter_node_reduce_dtype!r} applies to sums "
                "between nodes, but data_parallel_replicas=1. Set data_parallel_replicas to "
                "the number of nodes, or use reduce_dtype"
            )
        if self.partition is not None and len(self.partition) != self.num_stages:
            raise ValueError(
                f"partition={list(self.partition)} has {len(self.partition)} entries, but "
                f"pipeline_parallel_size * virtual_pipeline_size = {self.num_stages}. Give the "
                "number of layers of each stage"
            )
        self._check_overlap()
        self._check_distribution()
        if self.reshard_after is not None and self.shard != "parameters":
            raise ValueError(
                f"reshard_after={self.reshard_after!r} has no effect with shard={self.shard!r}. "
                "Use shard='parameters', or leave it out"
            )
        if self.shard == "parameters" and self.recompute == "offload":
            raise ValueError(
                "recompute='offload' keeps what a block has saved, its gathered parameters "
                "included, so it cannot be combined with shard='parameters'. Use recompute='full' "
                "or shard='gradients'"
            )
        self._check_compilation()
        check_recompute_options(self.recompute, self.recompute_layers, num_stages=self.num_stages)
        check_schedule(
            self.schedule,
            pipeline_parallel_size=self.pipeline_parallel_size,
            virtual_pipeline_size=self.virtual_pipeline_size,
            num_microbatches=self.num_microbatches,
            group_size=self.microbatch_group_size,
        )
        usual = self.usual_microbatches
        if isinstance(self.schedule, CustomSchedule) and usual is not None:
            self.build_schedule(usual)

    @property
    def num_stages(self) -> int:
        """Return p * v."""
        return self.pipeline_parallel_size * self.virtual_pipeline_size

    @property
    def shards_optimizer(self) -> bool:
        """Return True if each replica steps on a part of the parameters."""
        return self.shard != "none"

    @property
    def shards_gradients(self) -> bool:
        """Return True if each replica keeps a part of the gradients."""
        return self.shard in ("gradients", "parameters")

    def sharded_state(self, layout: ParallelLayout) -> Sharding:
        """Return what is sharded over the ranks that sum gradients; "none" for a single rank."""
        return self.shard if layout.size("replica_sum") > 1 else "none"

    def option_that_joins(self, layout: ParallelLayout, *, training: bool) -> str:
        """Return the option by which replicas communicate in every microbatch; "" if none does.

        They must then compute the same number of microbatches.
        """
        for axis in layout.blocked:
            return f"{axis.name}_parallel_size={layout.size(axis.name)}"
        shard = self.sharded_state(layout)
        joins = shard == "parameters" or (training and shard == "gradients")
        return f"shard={shard!r}" if joins else ""

    @property
    def reason_for_copies(self) -> str:
        """Return which option keeps copies of parameters for the optimizer, if one does."""
        option = "offload_optimizer" if self.offload_optimizer else "master_weights"
        return f"{option}=True keeps copies of the parameters"

    @property
    def timeout(self) -> timedelta:
        """Return the time limit of every wait for another rank."""
        return timedelta(seconds=self.timeout_s)

    def layout(self, world_size: int) -> ParallelLayout:
        """Return the layout on ``world_size`` processes.

        Raises:
            ValueError: The degrees do not fit the world size.
        """
        placement = schedule_placement(self.schedule) if self.pipeline_parallel_size > 1 else "loop"
        return replace(
            ParallelLayout.chosen(vars(self), world_size=world_size), placement=placement
        )

    def build_schedule(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """Return the proven schedule of a step of ``num_microbatches``.

        Raises:
            ValueError: The schedule does not accept these sizes.
        """
        return build_schedule(
            self.schedule,
            pipeline_parallel_size=self.pipeline_parallel_size,
            virtual_pipeline_size=self.virtual_pipeline_size,
            num_microbatches=num_microbatches,
            training=training,
            group_size=self.microbatch_group_size,
            max_gathered_chunks=self.max_gathered_chunks,
        )

    @property
    def max_gathered_chunks(self) -> int | None:
        """Return the number of gathered chunks that a rank holds at a time.

        The result is None if the schedule does not gather parameters.
        """
        if self.shard != "parameters" or self.reshards_after == "block":
            return None
        return self.virtual_pipeline_size if self.reshards_after == "step" else 2

    @property
    def adds_consecutive(self) -> bool:
        """Return True if a chunk stays gathered while consecutive microbatches run on it.

        Its parameters and gradients then stay unsharded, and its gradients are reduced once for
        these microbatches. With a single chunk per rank, this would last for the whole step.
        """
        return self.max_gathered_chunks is not None and self.virtual_pipeline_size > 1

    @property
    def reshards_after(self) -> Resharding:
        """Return ``reshard_after``, or its default for the layout."""
        return self.reshard_after or ("block" if self.pipeline_parallel_size == 1 else "chunk")

    @property
    def usual_microbatches(self) -> int | None:
        """Return m for a batch that is large enough.

        It is the given number, else the number of a schedule from a file, else 4p with a pipeline
        (bubble under a quarter) and 1 without. It is None if it follows from the batch
        (``micro_batch_size``).
        """
        if self.micro_batch_size is not None:
            return None
        default = 4 * self.pipeline_parallel_size if self.pipeline_parallel_size > 1 else 1
        return self.num_microbatches or schedule_microbatches(self.schedule) or default

    @property
    def has_microbatches(self) -> bool:
        """Return True if a batch can have more than one microbatch."""
        return self.usual_microbatches != 1

    @property
    def runs_backward(self) -> bool:
        """Return True if the schedule runs a batch's backward inside ``training_step``.

        It does so if there can be more than one microbatch, stage, or slice of time. Otherwise
        Lightning runs the backward.
        """
        return self.has_microbatches or self.cuts_forward

    @property
    def cuts_forward(self) -> bool:
        """Return True if one forward is split over stages or slices of time.

        The schedule then runs evaluation steps too.
        """
        return self.pipeline_parallel_size > 1 or self.context_parallel_size > 1

    def microbatches(self, samples: int) -> int:
        """Return m for a replica's batch of ``samples``.

        It follows from ``micro_batch_size``, or else is the usual number; it is never more than
        ``samples``.
        """
        usual = self.usual_microbatches
        if usual is None:
            assert self.micro_batch_size is not None
            return -(-samples // self.micro_batch_size)
        return min(samples, usual)

    @property
    def compiles(self) -> CompilePolicy:
        """Return ``compile``, where "auto" becomes "none" if another option conflicts with it."""
        return "none" if self.compile == "auto" and self._why_not_compiled else self.compile

    @property
    def _why_not_compiled(self) -> str:
        is_ours = isinstance(self.schedule, str) and schedule_microbatches(self.schedule) is None
        if is_ours and may_split_backward(self.schedule):
            return (
                f"schedule={self.schedule!r}, which defers weight gradients. Compiled blocks "
                "cannot defer them. Use schedule='1f1b' or 'interleaved_1f1b'"
            )
        if self.keyed_dropout:
            return "keyed_dropout=True, which intercepts single function calls. Use keyed_dropout=False"
        return ""

    def _check_compilation(self) -> None:
        if self.compile == "blocks" and self._why_not_compiled:
            raise ValueError(
                "compile='blocks' cannot be combined with "
                f"{self._why_not_compiled}, or compile='none'"
            )
        if self.compile_options is not None and self.compile == "none":
            raise ValueError(
                "compile_options is set, but compile='none'. Use compile='blocks', or leave "
                "compile_options out"
            )
        parameters = inspect.signature(torch.compile).parameters.keys() - {"model", "disable"}
        unknown = [name for name in self.compile_options or () if name not in parameters]
        if unknown:
            raise ValueError(
                f"compile_options has the unknown key {unknown[0]!r}. torch.compile accepts "
                f"{', '.join(sorted(parameters))}"
            )

    def _check_overlap(self) -> None:
        if self.tensor_overlap == 1:
            return
        if not self.sequence_parallel:
            raise ValueError(
                f"tensor_overlap={self.tensor_overlap!r} overlaps collectives along the "
                "sequence, but sequence_parallel=False. Use sequence_parallel=True with "
                "tensor_parallel_size > 1, or tensor_overlap=1"
            )
        if self.fp8 is not None:
            raise ValueError(
                f"tensor_overlap={self.tensor_overlap!r} multiplies the sequence in pieces, "
                f"but fp8={self.fp8!r} needs one scale for the full sequence. Use "
                "tensor_overlap=1 or fp8=None"
            )

    def _check_distribution(self) -> None:
        if not self.distribute_saved_activations:
            return
        needed = []
        if self.recompute != "full":
            needed.append(f"recompute='full' (it is {self.recompute!r})")
        if self.tensor_parallel_size == 1:
            needed.append("tensor_parallel_size > 1 (it is 1)")
        if self.sequence_parallel:
            needed.append(
                "sequence_parallel=False (sequence parallelism already splits these inputs, "
                "so the option can be left out)"
            )
        if needed:
            raise ValueError(
                "distribute_saved_activations=True splits the inputs of recomputed blocks "
                "over the tensor-parallel ranks. It needs " + " and ".join(needed)
            )
