"""Evaluation by lm-evaluation-harness of a model that the Trainer has set up in its layout.

The harness runs on rank 0, in a thread. It prepares all requests of a kind, and the ranks answer
them together::

    thread of rank 0     build requests, tokenize   ...........   compute metrics
                                              job  v           ^  answers
    all ranks            ...................... score or generate ..............
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.cli.serving import next_of_rank_zero
from lightning_ptdp.cli.serving_verbs import EvaluationOptions
from lightning_ptdp.generation import Sampling, generate
from lightning_ptdp.generation.scoring import score
from lightning_ptdp.generation.tokenizer_text import TextTokenizer

Job: TypeAlias = Callable[[LightningModule, TextTokenizer], Sequence[Any]]
"""Requests that all ranks answer together; can be pickled."""
Ask: TypeAlias = Callable[[Job], Sequence[Any]]


def scores(
    module: LightningModule, _: TextTokenizer, *, rows: Any, batch_size: int
) -> Sequence[tuple[float, bool]]:
    """Answer log-likelihood requests; see ``score``."""
    return score(module, rows, batch_size=batch_size)


def continuations(
    module: LightningModule,
    tokenizer: TextTokenizer,
    *,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    until: Sequence[str],
) -> list[list[int]]:
    """Return the tokens that follow each prompt, up to one of the texts ``until``."""

    def ends(new: Sequence[int]) -> bool:
        text = tokenizer.decode(new)
        return any(stop in text for stop in until)

    return generate(module, prompts, sampling, eos_ids=tokenizer.eos_ids, ends=ends)


@dataclass(eq=False, kw_only=True)
class Evaluation(Callback):
    """A callback that runs the harness on rank 0 and answers its requests on all ranks.

    Args:
        tasks: Loaded tasks, on rank 0.
        tokenizer: Tokenizer of the model.
        options: Options of the command line.
        checkpoint: The checkpoint, for the results.
    """

    tasks: Sequence[Any]
    tokenizer: TextTokenizer
    options: EvaluationOptions
    checkpoint: str

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate, and print and write the results on rank 0."""
        jobs: SimpleQueue[Job | None] = SimpleQueue()
        answers: SimpleQueue[Sequence[Any]] = SimpleQueue()

        def ask(job: Job) -> Sequence[Any]:
            jobs.put(job)
            return answers.get()

        def run() -> dict[str, Any]:
            layout = trainer.strategy.layout.describe()
            about = {"checkpoint": self.checkpoint, "layout": layout}
            try:
                from lightning_ptdp.cli.harness import evaluate

                return evaluate(ask, self.tokenizer, pl_module, self.tasks, self.options, about)
            finally:
                jobs.put(None)

        result = in_thread(run) if trainer.is_global_zero else None
        while (job := next_of_rank_zero(trainer, jobs)) is not None:
            answers.put(job(pl_module, self.tokenizer))
        if result is not None:
            from lightning_ptdp.cli.harness import report

            report(result.result(), self.options.output)
