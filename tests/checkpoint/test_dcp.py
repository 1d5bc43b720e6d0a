"""The names of torch's Distributed Checkpoint that are private and that this project reads."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from lightning_ptdp.checkpoint import save_checkpoint
from tests.checkpoint.layouts import Layout, full_model, held


def test_private_names_are_what_the_shim_expects() -> None:
    assert {"relative_path", "offset", "length"} <= {
        field.name for field in fields(filesystem._StorageInfo)
    }


def test_the_default_planners_still_call_what_we_override() -> None:
    for base, method in (
        (dcp.DefaultSavePlanner, "lookup_object"),
        (dcp.DefaultSavePlanner, "create_global_plan"),
        (dcp.FileSystemWriter, "finish"),
    ):
        assert callable(getattr(base, method))


def test_plain_torch_reads_the_same_folder(tmp_path: Path) -> None:
    tensors = held(Layout(1), 0)
    save_checkpoint(tmp_path / "c", tensors=tensors, state={}, metadata={})
    found = {
        name: torch.zeros(sharding.full_shape, dtype=tensor.dtype)
        for name, (tensor, sharding) in tensors.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "c")
    for name, (tensor, _) in full_model().items():
        assert torch.equal(found[name], tensor), name
