"""Parallel export to a Hugging Face folder, and failures of one rank."""

import os
import re
import resource
import shutil
import signal
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    LocalRectangle,
    rectangles_of,
)
from lightning_ptdp.checkpoint.local_rectangles import Held, choose_writers
from lightning_ptdp.exchange import (
    FolderExport,
    convert,
    described_by_state,
    export_writer,
    to_huggingface,
)
from lightning_ptdp.exchange.export_writer import FolderPlan
from lightning_ptdp.models import BertConfig, GPTConfig, LitBert, LitGPT
from tests.checkpoint.layouts import save, shard
from tests.folders import read_huggingface
from tests.models.configs import GPT2, LLAMA
from tests.pool import WorkerFailure

pytestmark = pytest.mark.thorough

BERT = BertConfig.original(
    vocabulary_size=60, sequence_length=16, num_layers=2, hidden_size=16, num_heads=2
)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT}


def _whole(config):
    """Return the weights of a full model, equal in every process."""
    torch.manual_seed(1)
    module = LitGPT(config) if isinstance(config, GPTConfig) else LitBert(config)
    module.configure_model()
    first = {}
    state = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if first.setdefault(id(value), name) == name
    }
    return {f"model/{name}": torch.randn(value.shape) for name, value in state.items()}


def _save(path, config):
    values = {name.removeprefix("model/"): value for name, value in _whole(config).items()}
    save(path, values, state={"hyper_parameters": {"config": asdict(config)}})


def _part(config, rank):
    """Return the rectangles that one of four ranks holds.

    The ranks form two replicas of two. A tensor is sharded by rows, columns or vocabulary, or
    replicated.
    """
    tensors = {}
    for number, (name, value) in enumerate(_whole(config).items()):
        kinds = [
            "replicated",
            "vocabulary",
            *["row"] * (value.dim() == 2 and value.shape[1] % 2 == 0),
        ]
        kinds += ["column"] * (value.shape[0] % 2 == 0)
        tensors[name] = shard(value, kinds[number % len(kinds)], size=2, rank=rank % 2)
    return rectangles_of(tensors)


def _export(target, config):
    described = described_by_state({"hyper_parameters": {"config": asdict(config)}})
    return FolderExport(target=target, described=described, dtype=torch.bfloat16, shard_bytes=9_000)


def _write(rank, folder):
    block, export_writer._BLOCK = export_writer._BLOCK, 100  # bytes
    for name, config in CONFIGS.items():
        export = _export(folder / name, config)
        export.check(_part(config, rank))
        export.write(_part(config, rank))
    export_writer._BLOCK = block


def test_parallel_export_equals_export_of_checkpoint(pool, tmp_path):
    pool.run(_write, world_size=4, args=(tmp_path / "all",))
    assert sorted(os.listdir(tmp_path / "all")) == sorted(CONFIGS)
    for name, config in CONFIGS.items():
        _save(tmp_path / "c", config)
        to_huggingface(tmp_path / "c", tmp_path / "one", dtype=torch.bfloat16, shard_bytes=9_000)
        one, together = (
            {path.name: path.read_bytes() for path in place.iterdir()}
            for place in (tmp_path / "one", tmp_path / "all" / name)
        )
        assert len(one) > 3
        assert one == together
        # the values are not zero in both
        assert (
            sum(value.float().norm() for value in read_huggingface(tmp_path / "one").values()) > 100
        )


def test_ranks_write_balanced_shares():
    ranks = [[Held.of(one) for one in _part(LLAMA, rank)] for rank in range(4)]
    shares = choose_writers(ranks)
    assert shares == choose_writers(ranks)
    written = Counter(what for share in shares for what in share)
    assert written.keys() == {(one.name, one.place) for rank in ranks for one in rank}
    assert set(written.values()) == {1}
    assert all(
        what in {(one.name, one.place) for one in rank}
        for rank, share in zip(ranks, shares, strict=True)
        for what in share
    )
    bytes_of = {(one.name, one.place): one.num_bytes for rank in ranks for one in rank}
    loads = [sum(bytes_of[what] for what in share) for share in shares]
    assert max(loads) < 1.2 * sum(loads) / 4


def test_pieces_are_limited_in_size():
    for one in _part(GPT2, 1):
        blocks = [*one.pieces(1_000)]
        row = one.values[:1].nbytes
        assert all(block.values.nbytes <= max(1_000, row) for block in blocks)
        assert len(blocks) <= 2 + 2 * one.values.nbytes // max(1_000, row)
        assert sum(block.values.numel() for block in blocks) == one.values.numel()


def _fail(rank, target, how):
    export = _export(target, LLAMA)
    export.write(_part(LLAMA, rank))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = FolderPlan.fill

    def killed(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    parts, wrong = _part(LLAMA, rank), rank == 1
    if how == "full disk" and wrong:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, before[1]))
    if how == "killed" and wrong:
        FolderPlan.fill = killed
    if how == "lacking":
        parts = [one for one in parts if "head" not in one.name]
    if how == "not shared" and wrong:
        shutil.copytree(target, target.parent / "elsewhere", dirs_exist_ok=True)
        FolderPlan.fill = lambda self, part, mine: fill(self, part / "elsewhere", mine)
    try:
        export.write(parts)
        return "written"
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        FolderPlan.fill = fill


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("full disk", r"exporting .*out failed: rank 1: OSError: .*File too large"),
        (
            "lacking",
            r"exporting .*out failed: rank 0: the module has no 'model.head.weight', which the model of "
            r"its hyperparameters has",
        ),
        (
            "not shared",
            r"rank 1: .*safetensors was written but is not visible to this rank. All ranks must write to one "
            r"shared file system",
        ),
    ],
)
def test_failing_rank_fails_all_ranks_and_keeps_folder(how, words, pool, tmp_path):
    messages = pool.run(_fail, world_size=2, args=(tmp_path / "new" / "out", how))
    assert messages[0] == messages[1]
    assert re.search(words, messages[0]), messages[0]
    assert [name for name in os.listdir(tmp_path / "new") if name != "elsewhere"] == ["out"]
    assert read_huggingface(tmp_path / "new" / "out")


def test_uncreatable_folder_is_refused_before_export(tmp_path):
    (tmp_path / "file").write_text("")
    whole = [LocalRectangle.full(name, value) for name, value in _whole(LLAMA).items()]
    with pytest.raises(CheckpointError, match=r"exporting .*file/out failed: .*Error"):
        _export(tmp_path / "file" / "out", LLAMA).check(whole)


def test_file_is_not_replaced_by_folder(tmp_path):
    _save(tmp_path / "c", LLAMA)
    (tmp_path / "thesis.tex").write_text("years of work")
    to_huggingface(tmp_path / "c", tmp_path / "out")
    for make, source in ((convert, "c"), (to_huggingface, "c"), (convert, "out")):
        with pytest.raises(CheckpointError, match=r"thesis.tex is a file, which would be replaced"):
            make(tmp_path / source, tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_target_may_be_given_as_file_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _save(tmp_path / "c", LLAMA)
    convert(f"file://{tmp_path}/c", f"file://{tmp_path}/out")
    assert sorted(os.listdir(tmp_path)) == ["c", "out"]
    with pytest.raises(CheckpointError, match="would change"):
        convert(f"file://{tmp_path}/c", f"file://{tmp_path}/c/inside")


def test_killed_writer_leaves_only_previous_folder(pool, tmp_path):
    with pytest.raises(WorkerFailure, match="the worker process died"):
        pool.run(_fail, world_size=2, args=(tmp_path / "out", "killed"))
    assert os.listdir(tmp_path) == ["out"]
    assert read_huggingface(tmp_path / "out")
