"""The trained model as a Hugging Face folder that all ranks write: what the checkpoint holds, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp.checkpoint import read_full, read_metadata
from lightning_ptdp.exchange import open_huggingface, to_huggingface
from tests.huggingface.runs import Run, fit
from tests.pool import Pool

transformers = pytest.importorskip("transformers")

T, P, V, C, M = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
    "context_parallel_size",
    "num_microbatches",
)
TIED = (("tie_word_embeddings", True),)


@pytest.mark.parametrize(
    ("model", "options", "layout", "world_size", "precision"),
    [
        ("llama", TIED, {T: 2, P: 2, V: 2, M: 2}, 4, "32-true"),
        ("gpt2", (), {"shard_optimizer": True}, 2, "32-true"),
        ("llama", (), {C: 2}, 2, "bf16-true"),
    ],
)
def test_an_export_is_the_checkpoint(
    model: str, options: Any, layout: dict[str, Any], world_size: int, precision: str, pool: Pool, tmp_path: Path
) -> None:
    out, saved = tmp_path / "out", tmp_path / "saved" / "last.ckpt"
    run = Run(
        model=model, options=options, layout=layout, world_size=world_size, precision=precision, steps=2, export=str(out), save=str(saved)
    )  # fmt: skip
    pool.run(fit, world_size=world_size, args=(run,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "saved"]
    whole, aliases = read_full(saved), read_metadata(saved).aliases
    written = {f"model.{name}": value for name, value in open_huggingface(out).items()}
    assert written.keys() == whole.keys() - aliases.keys()
    assert all(value.dtype == whole[name].dtype and torch.equal(value, whole[name]) for name, value in written.items())

    to_huggingface(saved, tmp_path / "converted", config=out, shard_bytes=20_000)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "converted").iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 1

    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(said.values()), said
    assert json.loads(files["config.json"])["architectures"] == [type(loaded).__name__]
    state = loaded.state_dict()
    assert state.keys() == {name.removeprefix("model.") for name in whole}
    assert all(torch.equal(state[name.removeprefix("model.")], value) for name, value in whole.items())
    assert loaded.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
