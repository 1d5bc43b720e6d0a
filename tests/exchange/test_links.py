"""Symbolic links in model folders, within the Hub cache and to the outside."""

from pathlib import Path

import pytest
import torch

from lightning_ptdp.checkpoint import CheckpointError, TensorEntry
from lightning_ptdp.exchange import write_safetensors
from lightning_ptdp.exchange.model_folder import list_huggingface
from tests.folders import read_huggingface


def test_hub_cache_links_are_read_and_others_refused(tmp_path):
    snapshot, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "0123",
        tmp_path / "models--a--b" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    value = torch.arange(4.0)
    write_safetensors(
        blobs / "4567", {"w": TensorEntry(shape=(4,), dtype=torch.float32)}, lambda name: value
    )
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/4567"))
    assert list_huggingface(snapshot)["w"].entry.shape == (4,)
    assert torch.equal(read_huggingface(snapshot)["w"], value)
    (blobs / "4567").rename(tmp_path / "4567")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "4567")
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors cannot be read: it is a link to .*/4567, which is outside its folder",
    ):
        list_huggingface(snapshot)
