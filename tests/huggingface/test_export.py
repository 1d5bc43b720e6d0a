"""Export of a trained model to a Hugging Face folder, bitwise equal to the checkpoint."""

import json
import os
import re
import shutil

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ptdp.callbacks import ExportHuggingFace
from lightning_ptdp.checkpoint import CheckpointError, LocalRectangle, read_full, read_metadata
from lightning_ptdp.exchange import (
    FolderExport,
    HuggingFaceWeights,
    described_by_module,
    export_writer,
    names_in,
    to_huggingface,
)
from lightning_ptdp.parameters.placement import Piece, Placement
from lightning_ptdp.parameters.rectangle import Rectangle
from lightning_ptdp.strategy import PTDPStrategy
from tests.folders import read_huggingface
from tests.huggingface.architectures import build
from tests.huggingface.runs import LitHuggingFace, Run, Samples, make_model
from tests.letters import C, M, P, T, V
from tests.optional import needs

pytestmark = [pytest.mark.thorough, needs("peft")]

transformers = pytest.importorskip("transformers")

TIED = (("tie_word_embeddings", True),)


@pytest.mark.parametrize(
    ("model", "options", "layout", "world_size", "precision"),
    [
        ("llama", TIED, {T: 2, P: 2, V: 2, M: 2}, 4, "32-true"),
        ("gpt2", (), {"shard": "optimizer"}, 2, "32-true"),
        ("llama", (), {C: 2}, 2, "bf16-true"),
    ],
)
def test_export_is_bitwise_equal_to_checkpoint(
    model, options, layout, world_size, precision, parity, tmp_path
):
    out, saved = tmp_path / "out", tmp_path / "saved" / "last.ckpt"
    run = Run(
        model=model,
        options=options,
        layout=layout,
        world_size=world_size,
        precision=precision,
        export=str(out),
        save=str(saved),
    )
    parity.ranks(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "saved"]
    whole, aliases = read_full(saved), read_metadata(saved).aliases
    written = {f"model.{name}": value for name, value in read_huggingface(out).items()}
    assert written.keys() == whole.keys() - aliases.keys()
    assert all(
        value.dtype == whole[name].dtype and torch.equal(value, whole[name])
        for name, value in written.items()
    )

    to_huggingface(saved, tmp_path / "converted", config=out, shard_bytes=20_000)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "converted").iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 1

    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", output_loading_info=True
    )
    assert not any(said.values()), said
    assert json.loads(files["config.json"])["architectures"] == [type(loaded).__name__]
    state = loaded.state_dict()
    assert state.keys() == {name.removeprefix("model.") for name in whole}
    assert all(
        torch.equal(state[name.removeprefix("model.")], value) for name, value in whole.items()
    )
    assert loaded.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)


class LitTwo(LitHuggingFace):
    """A student and its teacher."""

    def configure_model(self):
        if self.model is None:
            super().configure_model()
            self.teacher = make_model("gpt2").requires_grad_(False)


class LitAdapted(LitHuggingFace):
    """A frozen model with adapters."""

    def configure_model(self):
        if self.model is None:
            super().configure_model()
            import peft

            peft.inject_adapter_in_model(
                peft.LoraConfig(target_modules=["q_proj"], use_dora=True), self.model
            )


class LitFull(LitHuggingFace):
    """A module whose export finds a full disk."""

    def setup(self, stage):
        usage = shutil.disk_usage("/")
        shutil.disk_usage = lambda path: usage._replace(free=9_000)


def _fit(rank, kind, model, options, folder):
    """Train with an export and return the names in its parent folder.

    If ``fit`` refuses the export, the error message comes first.
    """
    L.seed_everything(3, verbose=False)
    usage, said = shutil.disk_usage, []
    trainer = L.Trainer(
        strategy=PTDPStrategy(),
        accelerator="cpu",
        devices=2,
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ExportHuggingFace(folder, **options),
            ModelCheckpoint(folder.parent / "saved", every_n_train_steps=2, save_top_k=-1),
        ],
        enable_model_summary=False,
    )
    try:
        trainer.fit(kind(Run(model=model)), DataLoader(Samples(model), batch_size=2))
    except CheckpointError as error:
        assert trainer.global_step == 0
        said = [str(error)]
    finally:
        shutil.disk_usage = usage
    return said + sorted(os.listdir(folder.parent))


@pytest.mark.parametrize(
    ("kind", "model", "words"),
    [
        (
            LitHuggingFace,
            "encoder",
            r"hyperparameters have no configuration of a model of this package",
        ),
        (
            LitTwo,
            "llama",
            r"LitTwo has several Hugging Face models \['model', 'teacher'\]. Name the one.*, such "
            r"as prefix='model\.'",
        ),
        (LitFull, "llama", r"needs 0\.\d+ MB, but its disk has only 0\.0 MB left"),
        (
            LitAdapted,
            "llama",
            r"adapter of 'model.model.layers.0.self_attn.q_proj' is not a simple product of two "
            r"matrices",
        ),
    ],
)
def test_unsupported_export_is_refused_before_first_step(kind, model, words, pool, tmp_path):
    for message, *left in pool.run(_fit, world_size=2, args=(kind, model, {}, tmp_path / "out")):
        assert re.search(words, message), message
        assert left == []


def test_model_is_exported_at_every_checkpoint_and_at_end(pool, tmp_path):
    options = {"when": "checkpoint", "prefix": "model.", "dtype": "bfloat16"}
    found = pool.run(_fit, world_size=2, args=(LitTwo, "llama", options, tmp_path / "out"))
    assert found == [["out", "saved"]] * 2
    assert sorted(os.listdir(tmp_path / "out")) == ["step-2", "step-3"]
    (checkpoint,) = (tmp_path / "saved").glob("*step=2*")
    whole, written = read_full(checkpoint), read_huggingface(tmp_path / "out" / "step-2")
    assert {f"model.{name}" for name in written} == {
        name for name in whole if not name.startswith("teacher.")
    }
    assert all(
        torch.equal(value, whole[f"model.{name}"].bfloat16()) for name, value in written.items()
    )
    later = read_huggingface(tmp_path / "out" / "step-3")
    assert not all(torch.equal(value, written[name]) for name, value in later.items())


@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [("llama", {T: 2, P: 2, M: 2}, 4), ("gpt2", {T: 2, "sequence_parallel": True}, 2)],
)
def test_adapters_are_merged_in_export(model, layout, world_size, parity, tmp_path):
    options = (
        {"modules_to_save": ["lm_head"]}
        if model == "llama"
        else {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    )
    run = Run(
        model=model,
        options=(("lora", tuple(options.items())),),
        layout=layout,
        world_size=world_size,
        export=str(tmp_path / "out"),
    )
    final = {
        name.removeprefix("model."): value for name, value in parity.ranks(run)[0]["final"].items()
    }
    trained = make_model(model, **dict(run.options))
    trained.load_state_dict(final)
    wanted = trained.merge_and_unload().state_dict()
    written = read_huggingface(tmp_path / "out")
    assert written.keys() <= wanted.keys()
    for name, value in written.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral", "xlm_roberta", "vit", "mamba2"])
def test_exported_tensors_match_save_pretrained(name, tmp_path, monkeypatch):
    monkeypatch.setattr(export_writer, "_BLOCK", 100)
    torch.manual_seed(0)
    model, first = build(name), {}
    state = {
        key: value
        for key, value in model.state_dict(keep_vars=True).items()
        if first.setdefault(id(value), key) == key
    }
    halves = [
        part for key, value in state.items() for part in _halves(f"model/net.{key}", value.detach())
    ]
    export = FolderExport(
        target=tmp_path / "out", described=described_by_module(model, {}), prefix="net."
    )
    export.check(halves)
    export.write(halves)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = read_huggingface(tmp_path / "out"), read_huggingface(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())

    module, known = (
        torch.nn.Module(),
        {f"net.{key}": value.detach() for key, value in state.items()},
    )
    module.net = model
    every = model.named_parameters(remove_duplicate=False)
    aliases = {
        f"net.{key}": f"net.{first[id(value)]}" for key, value in every if first[id(value)] != key
    }
    stored = HuggingFaceWeights.open(tmp_path / "theirs", names_in(module, aliases))
    assert stored.names >= known.keys() - {key for key in known if "inv_freq" in key}
    assert all(
        stored.tensors[f"model/{key}"].shape == known[key].shape
        for key in known.keys() & stored.names
    )
    for one in halves:  # as two ranks read the tensors
        if one.name in stored.tensors:
            read = torch.zeros_like(one.values)
            piece = Piece(local=(0,) * read.dim(), full=one.offset, size=tuple(read.shape))
            place = Placement(
                full_shape=one.full_shape, local_shape=tuple(read.shape), pieces=(piece,)
            )
            stored.fill({one.name: (read, place)})
            assert torch.equal(read, one.values), one.name


def _halves(name, value):
    """Yield the parts of a tensor whose last dimension is split over two ranks."""
    whole = LocalRectangle.full(name, value)
    middle = (*whole.place.end[:-1], value.shape[-1] // 2) if value.dim() else ()
    hole = Rectangle(whole.place.begin, middle)
    yield whole.within(hole)
    yield from (whole.within(rest) for rest in whole.place.around(hole) if value.dim())


def test_invalid_export_callback_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is a folder with other content"):
        ExportHuggingFace(tmp_path)
    with pytest.raises(CheckpointError, match=r"thesis.tex is a file, which would be replaced"):
        ExportHuggingFace(tmp_path / "thesis.tex")
    for options, words in (
        ({"when": "never"}, "when='never' must be one of"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            ExportHuggingFace(tmp_path / "out", **options)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[ExportHuggingFace(tmp_path / "out")],
        logger=False,
        barebones=True,
    )
    with pytest.raises(
        ValueError, match=r'needs Trainer\(strategy="ptdp"\), not SingleDeviceStrategy'
    ):
        trainer.fit(LitHuggingFace(Run(model="llama")), DataLoader(Samples("llama"), batch_size=2))
