"""LitCausalLM and LitMaskedLM give the same results in every layout and without the strategy."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import LitCausalLM, LitMaskedLM, make_tiny
from lightning_ptdp.parameters.initializers import Initializers
from lightning_ptdp.parameters.materialize import Materializer, make_room
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.strategy.checks.model import open_initial_weights
from tests.huggingface.round_trip import OPTIMIZER, causal
from tests.huggingface.runs import LAYOUTS, Run, Samples, make_model
from tests.models.fits import quiet_trainer
from tests.parity import assert_weights_near

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a small Llama, a Llama with tied weights in several files and a BERT."""
    folder = tmp_path_factory.mktemp("folders")
    make_tiny(folder / "llama", vocabulary_size=300, hidden_size=32, intermediate_size=48)

    torch.manual_seed(5)
    make_model("llama", tie_word_embeddings=True).save_pretrained(
        folder / "tied", max_shard_size="20KB"
    )
    make_model("bert").save_pretrained(folder / "bert")
    return folder


def test_encoder_is_refused_as_causal_language_model(folders):
    module = LitCausalLM(str(folders / "bert"))
    for call in (module.configure_model, lambda: module.check_data(None)):
        with pytest.raises(
            ValueError, match=r"is a bert model with is_decoder=False, .* Use LitMaskedLM"
        ):
            call()
    LitCausalLM(
        config={"model_type": "bert", "is_decoder": True, "num_hidden_layers": 1}
    ).check_data(None)


def masked(run):
    assert run.pretrained is not None
    return LitMaskedLM(run.pretrained, optimizer=OPTIMIZER)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "t2"),
        ("tied", "p2v2"),
        ("tied", "t2p2sp"),
        ("llama", "d2"),
        ("llama", "c2"),
        ("bert", "t2"),
    ],
)
def test_pretrained_model_matches_single_process(name, layout, parity, folders):
    kind, data = (masked, "bert") if name == "bert" else (causal, "labelled")
    parity.check(Run(model=data, module=kind, pretrained=str(folders / name)), LAYOUTS[layout])


def test_weights_are_initialized_with_pretrained_false(parity, folders):
    run = Run(
        model="labelled",
        module=causal,
        pretrained=str(folders / "llama"),
        options=(("pretrained", False),),
    )
    parity.check(run, LAYOUTS["p2v2"])
    begun = parity.result(Run(model="labelled", module=causal, pretrained=str(folders / "llama")))[
        "initial"
    ]
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(parity.result(run)["initial"][name], begun[name])


def test_module_works_without_strategy(folders, tmp_path):
    """Fit, validate, test, predict and loading work, and the loss is the model's own."""
    lit, loader = (
        LitCausalLM(str(folders / "tied"), optimizer=OPTIMIZER),
        DataLoader(Samples("labelled"), batch_size=4),
    )
    trainer = quiet_trainer(tmp_path, max_steps=2, val_check_interval=2)
    trainer.fit(lit, loader, loader)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    loaded = LitCausalLM.load_from_checkpoint(tmp_path / "saved.ckpt")
    assert loaded.optimizer_config == OPTIMIZER
    before = trainer.validate(loaded, loader, verbose=False)
    assert before == trainer.validate(lit, loader, verbose=False)
    assert trainer.test(lit, loader, verbose=False)[0]["test_loss"] == pytest.approx(
        before[0]["val_loss"]
    )
    batch = next(iter(loader))
    found = trainer.predict(lit, loader)
    logits = lit.model(batch["input_ids"]).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, batch["labels"].flatten(), reduction="none").view_as(
        batch["labels"]
    )
    torch.testing.assert_close(found[0]["token_nll"], expected.detach())
    assert (
        lit.summarize_predictions(found[0])["token_count"].tolist()
        == found[0]["counted"].sum(1).tolist()
    )


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_router_balancing_loss_is_added_on_request(parity, tmp_path):
    from tests.huggingface.architectures import build

    asked = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5).float()
    asked.save_pretrained(tmp_path)
    run = Run(model="labelled", module=causal, pretrained=str(tmp_path))
    parity.check(run, LAYOUTS["p2m1"])
    lit = causal(run)
    lit.configure_model()
    batch = {key: value[None] for key, value in Samples("labelled")[3].items()}
    batch["labels"] = F.pad(batch["input_ids"][:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(
        lit.training_step(batch, 0)["loss"],
        asked(batch["input_ids"], labels=batch["input_ids"]).loss,
    )
    assert not torch.equal(
        lit.validation_step(batch, 0)["loss"], lit.training_step(batch, 0)["loss"]
    )


@pytest.mark.parametrize(
    ("model", "options", "layout"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0}, "t2"),
        ("granite", {"logits_scaling": 3.0}, "t2"),
    ],
)
def test_scaled_or_capped_logits_match_transformers(model, options, layout, parity, tmp_path):
    from tests.huggingface.architectures import build

    build(model, **options).float().save_pretrained(tmp_path)
    run = Run(model="labelled", module=causal, pretrained=str(tmp_path))
    parity.check(run, LAYOUTS[layout])
    lit = causal(run)
    lit.configure_model()
    batch = {key: value[None] for key, value in Samples("labelled")[3].items()}
    loss, given = lit.training_step(batch, 0)["loss"], lit.model
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    expected = F.cross_entropy(theirs(batch["input_ids"]).logits[0], batch["labels"][0])
    torch.testing.assert_close(loss, expected)
    assert given.config._attn_implementation == ("eager" if model == "gemma2" else "sdpa")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "set either path .* or config .*, but not both"),
        (
            {"path": "x", "config": {"model_type": "llama"}},
            "set either path .* or config .*, but not both",
        ),
        (
            {"config": {"model_type": "mixtrall"}},
            "config.model_type='mixtrall' is not a model of .*; did you mean 'mixtral'",
        ),
        ({"config": {"hidden_size": 8}}, "config.model_type='' is not a model of transformers"),
        (
            {"config": {"model_type": "mixtral", "num_hidden_layer": 8}},
            "config.num_hidden_layer is not a field of MixtralConfig; did you mean "
            "'num_hidden_layers'",
        ),
        (
            {"config": {"model_type": "mixtral", "hidden_size": "8"}},
            "config: MixtralConfig does not accept .*'hidden_size' expected int",
        ),
    ],
)
def test_invalid_model_config_is_refused(given, said):
    with pytest.raises(ValueError, match=said) as caught:
        LitCausalLM(**given)
    assert "\n" not in str(caught.value)


def refused(folder, **options):
    """Return the message of the error that is raised before launch."""
    with pytest.raises(ValueError) as caught:
        PTDPStrategy().check(LitCausalLM(str(folder), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mismatched_weights_are_refused_with_names_and_shapes(folders, tmp_path):
    shutil.copytree(folders / "llama", tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    sizes = {"num_hidden_layers": 3, "intermediate_size": 40, "attention_bias": True}
    (tmp_path / "m/config.json").write_text(json.dumps(config | sizes))
    said = refused(tmp_path / "m")
    assert re.search(
        r"path='.*/m': the weights do not fit this model: the folder has no "
        r"'model.model.layers.0.self_attn.q_proj.bias'.* and 4 more",
        said,
    )
    assert "the model has no 'model.model.layers.3." in said
    assert (
        "'model.model.layers.0.mlp.gate_proj.weight' has the shape (48, 32) in the folder, but (40, 32) in the model"
        in said
    )


def test_invalid_model_folder_is_refused_before_launch(folders, tmp_path):
    def changed(name, change, of="tied"):
        shutil.copytree(folders / of, tmp_path / name)
        change(tmp_path / name)
        return tmp_path / name

    def pickled(folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    def config(**values):
        return lambda folder: (folder / "config.json").write_text(json.dumps(values))

    def shortened(folder):
        weights = folder / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 100)

    def half(folder):
        for file in sorted(folder.glob("*.safetensors"))[::2]:
            file.unlink()

    small = json.loads((folders / "llama/config.json").read_text()) | {"vocab_size": 200}
    for said, words in (
        (
            refused(tmp_path / "nowhere" / "at" / "all"),
            "does not exist. Give a folder with config.json",
        ),
        (refused(folders / "llama" / "config.json"), "is a file. Give the folder"),
        (
            refused(changed("none", lambda f: (f / "model.safetensors").unlink(), "llama")),
            "Put the weights there, as save_pretrained",
        ),
        (
            refused(changed("bin", pickled, "llama")),
            r"pytorch_model\.bin is a pickle.*use_safetensors=False\)\.save_pretrained",
        ),
        (
            refused(changed("half", half)),
            r"of the 8 files in model\.safetensors\.index\.json, 4 are missing \(model-00001.* and 1 more\)\. Download",
        ),
        (refused(changed("bare", lambda f: (f / "config.json").unlink())), "has no config.json"),
        (
            refused(changed("what", config(model_type="nothing"))),
            "finds no model configuration in config.json",
        ),
        (
            refused(changed("vit", config(model_type="vit"))),
            "of type 'vit', which AutoModelForCausalLM does not support",
        ),
        (
            refused(changed("words", config(**small), "llama")),
            "ids up to 299, but the model's embedding has 200 rows",
        ),
        (
            refused(changed("torn", lambda f: (f / "tokenizer.json").write_text("{"), "llama")),
            r"path='.*/torn': tokenizer\.json cannot be read \(.*\)\. Copy it again",
        ),
    ):
        assert re.search(words, said), said
    with pytest.raises(ValueError, match=r"path='.*/short': the weights cannot be read \(.*\)"):
        LitCausalLM(str(changed("short", shortened, "llama"))).configure_model()
    lit = LitCausalLM(str(folders / "llama"))
    with pytest.raises(
        ValueError,
        match=r"data\.vocabulary_size=512 is more than the 300 embedding rows.*Set --data\.vocabulary_size "
        r"300",
    ):
        lit.check_data(SimpleNamespace(vocabulary_size=512))
    with pytest.raises(
        ValueError,
        match=r"data\.vocabulary_size=512 is more than the 300 embedding rows.*Use the tokenizer of",
    ):
        lit.check_data(SimpleNamespace(vocabulary_size=512, hparams={"tokenizer_dir": "there"}))


def test_hub_name_is_resolved_in_cache(folders, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = refused(Path("someone/model"))
    assert re.search(
        r"in the hub's cache .* is offline \(HF_HUB_OFFLINE\)\. Run hf download someone/model", said
    )
    stored = tmp_path / "models--someone--model"
    shutil.copytree(folders / "tied", stored / "snapshots" / "0123")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("0123")
    PTDPStrategy().check(LitCausalLM("someone/model"))
    next((stored / "snapshots").glob("*/*.safetensors")).unlink()
    assert "1 is missing" in refused(Path("someone/model"))


def test_pretrained_weights_are_read_without_init_or_mmap(folders, tmp_path, monkeypatch):
    shutil.copytree(folders / "tied", tmp_path / "own")
    lit = LitCausalLM(str(tmp_path / "own"))
    with torch.device("meta"):
        lit.configure_model()
    weights = open_initial_weights(lit)
    make = Materializer(lit, seed=0, device=torch.device("cpu"), left=weights.names)
    monkeypatch.setattr(
        Initializers, "__call__", lambda self, name, **_: pytest.fail(f"{name} is drawn")
    )
    for name, module in lit.named_modules():
        if module._parameters:
            make(module, name)
    make_room(lit, device=torch.device("cpu"), padded=set(lit.parameters()))
    assert lit.model.lm_head.weight is lit.model.model.embed_tokens.weight
    assert not any(parameter.is_meta or parameter.any() for parameter in lit.parameters())
    tensors = {
        f"model/{name}": (value.detach(), Placement.replicated(value.shape))
        for name, value in lit.named_parameters()
    }
    weights.fill(tensors)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    loaded = LitCausalLM(str(folders / "tied"))
    loaded.configure_model()
    for (name, value), (_, expected) in zip(
        lit.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(value, expected), name


def test_names_of_older_files_are_those_of_transformers(folders, tmp_path):
    """bert-base-uncased has such a file."""
    shutil.copytree(folders / "bert", tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    PTDPStrategy().check(LitMaskedLM(str(tmp_path / "old")))
    found = []
    for folder in (tmp_path / "old", folders / "bert"):
        lit = LitMaskedLM(str(folder))
        with torch.device("meta"):
            lit.configure_model()
        found.append(open_initial_weights(lit).tensors)
    assert found[0] == found[1]


def test_resume_from_checkpoint_matches_single_process(parity, folders, tmp_path):
    def resumed(name):
        begun = Run(model="labelled", module=causal, pretrained=str(folders / "tied"))
        run, saved = begun.on(LAYOUTS[name]), str(tmp_path / name)
        first = parity.ranks(replace(run, steps=1, save=saved))[0]
        second = parity.ranks(replace(run, resume=saved))[0]
        # the weights are those of the checkpoint, not those of the folder
        assert_weights_near(second["initial"], first["final"], tolerance=0)
        return second["losses"]

    alone = resumed("one")
    for layout in ("p2", "d2"):
        assert resumed(layout) == pytest.approx(alone, rel=1e-5)


def test_parent_gets_forked_weights_without_reading_folder(folders, tmp_path, monkeypatch):
    def trained(**options):
        lit = LitCausalLM(str(folders / "tied"), optimizer=OPTIMIZER)
        trainer = quiet_trainer(tmp_path, max_steps=2, limit_val_batches=0, **options)
        trainer.fit(lit, DataLoader(Samples("labelled"), batch_size=4))
        return lit

    alone = trained()
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "from_pretrained",
        lambda *_, **__: pytest.fail("the folder is read"),
    )
    lit = trained(
        strategy=PTDPStrategy(pipeline_parallel_size=2, num_microbatches=2, start_method="fork"),
        devices=2,
    )
    assert lit.model.lm_head.weight is lit.model.model.embed_tokens.weight
    for (name, value), (_, expected) in zip(
        lit.named_parameters(), alone.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            value, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(lit.eval()(ids), alone.eval()(ids), rtol=1e-5, atol=1e-6)
