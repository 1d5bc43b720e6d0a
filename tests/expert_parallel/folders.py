"""Training of a Hugging Face mixture from a folder, a checkpoint or a configuration."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

from lightning_ptdp.exchange import folder_weights
from lightning_ptdp.models import AdamWConfig, LitCausalLM
from tests.huggingface.runs import VOCABULARY, Samples
from tests.parity import Training, fit

SIZES = {
    "model_type": "mixtral",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_local_experts": 4,
}


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """Training run that starts with the weights in ``folder``, if given."""

    steps: int = 2
    global_batch: int = 4
    clip: float | None = 0.5
    folder: str | None = None
    export: str | None = None

    def make_module(self) -> LitCausalLM:
        given: dict[str, Any] = {"config": SIZES} if self.folder is None else {"path": self.folder}
        optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-3, weight_decay=0.01)
        return LitCausalLM(**given, optimizer=optimizer)

    def make_data(self) -> Samples:
        return Samples("labelled")

    def results(self, trainer: Any, module: Any) -> dict[str, Any]:
        if self.export is not None:
            trainer.strategy.export_huggingface(self.export)
        return {}


def fit_counted(rank: int, run: Run) -> dict[str, Any]:
    """Train, and count the bytes read of expert tensors and of other tensors."""
    read, fill = {"experts": 0, "others": 0}, folder_weights.read_stored

    def counted(wanted: Any) -> None:
        parts = list(wanted)
        for stored, one in parts:
            read["experts" if ".experts." in one.name else "others"] += (
                one.values.numel() * stored.entry.dtype.itemsize
            )
        fill(parts)

    with mock.patch.object(folder_weights, "read_stored", counted):
        return {**fit(rank, run), "read": read}
