"""The verb ``ptdp evaluate``: tasks of lm-evaluation-harness with the model in any layout."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.base.option_types import Count, Size, check_types
from lightning_ptdp.cli.command_line import check_output, listed
from lightning_ptdp.cli.generate import parse_serving

_DESCRIPTION = """\
Evaluate a trained checkpoint or a Hugging Face model with tasks of lm-evaluation-harness, on one process or split over several (-t 2 -p 2).
The tokenizer and the requests are those of the harness with the exported folder, and so are the results.
Data are loaded before a process is started."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Tasks and their options.

    Args:
        tasks: Names of tasks or groups, separated by commas.
        include_path: Folder with the YAML files of further tasks.
        num_fewshot: Number of examples in each prompt; null: that of the task.
        limit: Number of samples of each task, or their share if it is below 1; null: all.
        batch_size: Number of sequences in a forward.
        apply_chat_template: Put each prompt into the tokenizer's chat template.
        log_samples: Also write the answer to each sample to the output.
        output: JSON file for the results, in the harness's format.
    """

    tasks: str
    include_path: str | None = None
    num_fewshot: Count | None = None
    limit: float | None = None
    batch_size: Size = 8
    apply_chat_template: bool = False
    log_samples: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.limit is not None and self.limit <= 0:
            raise ValueError(
                f"limit={self.limit:g} must be greater than 0. Use null for all samples"
            )


def run(verb: str, arguments: list[str]) -> int:
    """Parse the command line and evaluate."""
    serving, options = parse_serving(verb, _DESCRIPTION, arguments, EvaluationOptions)

    from lightning_ptdp.base.requirements import check_installed

    check_installed("lm-eval", "accelerate", "transformers")

    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from lightning_ptdp.cli.evaluation import Evaluation
    from lightning_ptdp.cli.serving import module_of, serve
    from lightning_ptdp.generation.tokenizer_text import find_tokenizer

    check_output(options.output)
    with tempfile.TemporaryDirectory() as scratch:
        state, module, ckpt_path = module_of(serving.checkpoint, Path(scratch))
        tokenizer = find_tokenizer(state, serving.tokenizer)
        tasks = []
        if rank_zero_only.rank == 0:  # the other ranks do not use the harness
            from lightning_ptdp.cli.harness import load_tasks

            tasks = load_tasks(listed(options.tasks), options.include_path)
        evaluation = Evaluation(
            tasks=tasks, tokenizer=tokenizer, options=options, checkpoint=serving.checkpoint
        )
        serve(module, evaluation, serving, ckpt_path=ckpt_path)
    return 0
