"""What a user may ask of the strategy: its arguments, their meaning, and the checked configuration that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ptdp._lightning import StrategyBase
from lightning_ptdp.checkpoint import OnDamage
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.pipeline import CustomSchedule
from lightning_ptdp.tensor_parallel import ParallelPlan

__all__ = ["StrategyOptions"]


class StrategyOptions(StrategyBase):
    """Pipeline, tensor, sequence and data parallel training of an ordinary LightningModule.

    Args:
        tensor_parallel_size: t, ranks that share one layer's matrices.
        pipeline_parallel_size: p, ranks that share the layers.
        virtual_pipeline_size: v, model chunks a pipeline rank holds (interleaving).
        context_parallel_size: c, ranks that share every sequence along time, through the whole network.
        context_parallel_attention: "ring" (keys and values go round; arXiv 2310.01889) or "all_to_all" (heads are traded for the
            sequence; arXiv 2309.14509).
        context_parallel_positions: Refuse a model that cannot be handed its tokens' places in the whole sequence; False for one that
            needs none.
        sequence_dims: Under context parallelism, the dimension along time of tensors in the batch under these keys (None: none),
            where it is not dimension 1.
        sequence_parallel: Split the activations between tensor-parallel regions along the sequence over the t ranks.
        num_microbatches: m, microbatches in a step of one replica. Default: 4p with a pipeline, else 1.
        micro_batch_size: b, samples of a microbatch, instead: m follows from each batch, which may grow during training.
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", or "auto" (1F1B, interleaved if v > 1); the
            path of a CSV file; or a ``CustomSchedule``.
        microbatch_group_size: Microbatches that visit a chunk before the next chunk's turn, in interleaved schedules. Default: p.
        partition: Number of layers of each of the p*v stages, or the name of each stage's first block; default: balanced by cost.
        recompute: "none", "full" (every block's activations are computed again in the backward), or "selective" (only those of the
            modules that the plan calls selective).
        recompute_layers: How many blocks of a stage are recomputed, for all stages or one number a stage. Default: all.
        distribute_saved_activations: With recompute="full" and tensor parallelism, keep 1/t of a block's input on each tensor rank
            and gather it for the recomputation (under sequence parallelism it is split anyway).
        scatter_gather: With tensor parallelism but without sequence parallelism, send 1/t of a hidden state on each tensor rank and
            gather it behind the boundary (arXiv 2104.04473, section 4.1).
        plan: Which submodules are sharded how, and where the repeated container is. Default: the module's own
            ``configure_parallel()``, else found automatically (pipeline) or an error (tensor parallelism).
        meta_init: Build what ``configure_model`` builds on the meta device, so that each rank only ever holds its own part.
        seed: Decides initial weights of such modules and dropout; default: torch's seed (``seed_everything``) on rank 0.
        keyed_dropout: Drop the same elements in every layout, for comparing layouts; slower (``lightning_ptdp.keyed_dropout``).
        bucket_mb: Size of a gradient bucket in MiB.
        shard_optimizer: Each replica keeps the optimizer states of its part of the parameters only, updates that part, and gathers
            the rest (ZeRO-1, arXiv 1910.02054). The optimizer must work element by element.
        master_weights: Let the optimizer step on float32 copies of parameters in half precision ("bf16-true", "16-true").
        gradient_dtype: In what the gradients of such parameters are accumulated: "float32" or the "parameter" dtype.
        reduce_dtype: In what gradients are summed over the replicas: "float32", "bfloat16" or "float16". Default: as accumulated.
        data_parallel_replicas: Number of nodes (or other islands of fast links) that the replicas stand in, in order; gradients are
            then summed in two levels, and a sharded optimizer is sharded inside a node only.
        inter_node_reduce_dtype: In what gradients cross between nodes. Default: as inside them.
        overlap_parameter_gather: Let parameters arrive while the next step's forward runs. Default: if nobody but Lightning reads
            them between the steps.
        check_finite: What to do with a step whose loss or gradient is NaN or infinite: "raise" NonFiniteError with the first parameter,
            rank and microbatch, "skip" the update with a warning that says the same, or nothing. Under float16 the loss scale skips.
        timeout_s: Limit in seconds of every wait for another rank.
        start_method: How Lightning starts processes: "popen" (scripts), "fork", "spawn" or "forkserver".
        process_group_backend: "nccl" or "gloo"; default by device.
        on_damage: When the checkpoint to continue from is damaged: "previous" (the newest whole one before it in its folder, with a
            warning) or "refuse".
        async_save: Training waits only until a checkpoint's tensors are copied to host memory; they are written in the background.

    The data-parallel size is what remains of the world. Without sizes, the strategy is data parallel over all devices.

    Raises:
        ValueError: A size or name is impossible; says what would work.
    """

    config: PTDPConfig

    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        virtual_pipeline_size: int = 1,
        context_parallel_size: int = 1,
        context_parallel_attention: str = "ring",
        context_parallel_positions: bool = True,
        sequence_dims: Mapping[str, int | None] | None = None,
        sequence_parallel: bool = False,
        num_microbatches: int | None = None,
        micro_batch_size: int | None = None,
        schedule: str | CustomSchedule = "auto",
        microbatch_group_size: int | None = None,
        partition: Sequence[int] | Sequence[str] | None = None,
        recompute: str = "none",
        recompute_layers: int | Sequence[int] | None = None,
        distribute_saved_activations: bool = False,
        scatter_gather: bool = True,
        plan: ParallelPlan | None = None,
        meta_init: bool = True,
        seed: int | None = None,
        keyed_dropout: bool = False,
        bucket_mb: float = 25.0,
        shard_optimizer: bool = False,
        master_weights: bool = True,
        gradient_dtype: str = "float32",
        reduce_dtype: str | None = None,
        data_parallel_replicas: int = 1,
        inter_node_reduce_dtype: str | None = None,
        overlap_parameter_gather: bool | None = None,
        check_finite: str | None = None,
        timeout_s: float = 1800.0,
        start_method: str = "popen",
        process_group_backend: str | None = None,
        on_damage: OnDamage = "previous",
        async_save: bool = False,
        **lightning: Any,
    ) -> None:
        self.config = PTDPConfig(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            virtual_pipeline_size=virtual_pipeline_size,
            context_parallel_size=context_parallel_size,
            context_parallel_attention=context_parallel_attention,  # type: ignore[arg-type]
            context_parallel_positions=context_parallel_positions,
            sequence_dims=sequence_dims,
            sequence_parallel=sequence_parallel,
            num_microbatches=num_microbatches,
            micro_batch_size=micro_batch_size,
            schedule=schedule,
            microbatch_group_size=microbatch_group_size,
            partition=partition,  # type: ignore[arg-type]
            recompute=recompute,  # type: ignore[arg-type]
            recompute_layers=recompute_layers,  # type: ignore[arg-type]
            distribute_saved_activations=distribute_saved_activations,
            scatter_gather=scatter_gather,
            plan=plan,
            meta_init=meta_init,
            seed=seed,
            keyed_dropout=keyed_dropout,
            bucket_mb=bucket_mb,
            shard_optimizer=shard_optimizer,
            master_weights=master_weights,
            gradient_dtype=gradient_dtype,  # type: ignore[arg-type]
            reduce_dtype=reduce_dtype,  # type: ignore[arg-type]
            data_parallel_replicas=data_parallel_replicas,
            inter_node_reduce_dtype=inter_node_reduce_dtype,  # type: ignore[arg-type]
            overlap_parameter_gather=overlap_parameter_gather,
            check_finite=check_finite,  # type: ignore[arg-type]
            timeout_s=timeout_s,
            start_method=start_method,  # type: ignore[arg-type]
            process_group_backend=process_group_backend,
            on_damage=on_damage,
            async_save=async_save,
        )
        self._begin_empty()
        super().__init__(**lightning)

    def _begin_empty(self) -> None:
        """Set what a run will fill, before Lightning's own constructor looks at it."""
