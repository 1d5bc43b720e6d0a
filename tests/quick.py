"""Which tests are quick: those that a developer runs after every change, in about two minutes on two cores."""

from __future__ import annotations

from typing import Final

__all__ = ["CHOSEN", "THOROUGH", "is_quick"]

THOROUGH: Final = frozenset(
    [
        "bench/test_gpu_benchmark",
        "callbacks/test_save_on_signal",
        "checkpoint/test_layout_pairs",
        "checkpoint/test_leftovers",
        "checkpoint/test_load_from_checkpoint",
        "checkpoint/test_round_trip",
        "cli/test_bench",
        "cli/test_elastic",
        "cli/test_entry",
        "cli/test_launcher",
        "cli/test_run",
        "cli/test_serving",
        "conformance/test_checkpoint_hooks",
        "conformance/test_closures",
        "conformance/test_converted",
        "conformance/test_endings",
        "conformance/test_exceptions",
        "conformance/test_launchers",
        "conformance/test_logging",
        "conformance/test_names",
        "conformance/test_optimization",
        "conformance/test_outputs",
        "conformance/test_resuming",
        "conformance/test_samplers",
        "conformance/test_step_hooks",
        "conformance/test_step_state",
        "conformance/test_stopping",
        "conformance/test_two_hosts",
        "context_parallel/test_attention",
        "context_parallel/test_gpt",
        "context_parallel/test_intercept",
        "context_parallel/test_training",
        "data/test_build",
        "data_parallel/test_against_ddp",
        "data_parallel/test_every_schedule",
        "docs/test_blocks",
        "docs/test_messages",
        "engine/test_logged_values",
        "exchange/test_streaming",
        "generation/test_layouts",
        "generation/test_on_gpus",
        "hostile/test_hostile",
        "huggingface/test_collected",
        "huggingface/test_encoder_decoder",
        "huggingface/test_exact",
        "huggingface/test_families",
        "huggingface/test_pretrained",
        "huggingface/test_training",
        "huggingface/test_two_stacks",
        "huggingface/test_uncalled",
        "keyed_dropout/test_layouts",
        "loggers/test_mlflow",
        "loggers/test_uploads",
        "models/test_bert_parity",
        "pipeline/test_guard",
        "pipeline/test_handshake",
        "pipeline/test_lost_peer",
        "pipeline/test_runtime",
        "pipeline/test_two_containers",
        "pipeline/test_watchdog",
        "recipes/test_recipes",
        "tensor_parallel/test_cross_entropy",
        "test_axes",
        "test_bad_input",
        "test_compile",
        "test_gradient_checks",
        "test_joining",
        "test_lost_while_joining",
        "test_precision",
        "test_resume",
        "test_sharded_parity",
    ]
)
"""Modules that took more than 6 s of a whole run."""

CHOSEN: Final = {
    "test_parity": (
        "clipping_ties_and_uneven_padding[d2]",
        "clipping_ties_and_uneven_padding[p2v2]",
        "clipping_ties_and_uneven_padding[t2sp]",
    ),
}
"""Of these modules only the tests whose names end so."""


def is_quick(module: str, test: str) -> bool:
    """Whether a test is quick, by its module (``engine/test_batch``) and its name."""
    return test.endswith(CHOSEN[module]) if module in CHOSEN else module not in THOROUGH
