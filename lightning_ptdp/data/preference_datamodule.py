"""Data module for pairs of a chosen and a rejected answer, prepared once."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_ptdp.data.chat_build import ChatConfig
from lightning_ptdp.data.chat_datamodule import ChatDataModule
from lightning_ptdp.data.chat_stream import ChatStream
from lightning_ptdp.data.loader import EvaluationLoader
from lightning_ptdp.data.preference_pairs import PreferenceConfig, PreferenceStream
from lightning_ptdp.data.stream_datamodule import replica_of

__all__ = ["PreferenceDataModule"]


class PreferenceDataModule(ChatDataModule):
    """Pairs of answers as batches for ``LitDPO``.

    A batch is ``{"chosen_ids", "chosen_labels", "rejected_ids", "rejected_labels", "pair"}``, int64
    of shape (batch, s), and ``pair`` of shape (batch). s is the longest sequence of the batch,
    rounded up to 64, and at most ``sequence_length``. Labels are shifted by one, and -100 outside
    of the two answers. The two sequences of a pair are always in the same microbatch.

    Args:
        path: Data as for ``ChatDataModule``, with columns ``chosen`` and ``rejected``. Both hold a
            whole conversation as a list of messages, or they hold only the answer (a text, or a
            list of messages) and a column ``prompt`` holds the question. The conversations differ
            in their last answer. Default: questions about the functions of the standard library.
            The docstring is chosen, and its words in reverse order are rejected.
        columns: Mapping from content to column name, with the keys ``prompt``, ``chosen``,
            ``rejected`` and ``system``. Default: columns with these names.
        kwargs: Further arguments of ``ChatDataModule``.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    config_class: ClassVar[type[ChatConfig]] = PreferenceConfig
    stream_class: ClassVar[type[ChatStream]] = PreferenceStream

    def __init__(
        self,
        *,
        path: str | list[str] | None = None,
        columns: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path=path, columns=columns, learn="last_answer", packing=False, **kwargs)

    def numbered_pairs(self) -> dict[str, EvaluationLoader]:
        """Return loaders of both splits that read every pair once, over all replicas.

        ``pair`` of a batch is a number in the split, and -1 for a row that fills up the batch.
        """
        sizes = self.batch_options.plan(replica_of(self.trainer)[0])
        train = self._loader(
            EvaluationLoader, self._stream("train"), micro_batch_size=sizes.micro_batch_size
        )
        return {"train": train, "validation": self.val_dataloader()}
