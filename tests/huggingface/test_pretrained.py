"""Pretrained Hugging Face models under the strategy: each rank reads its part of the folder, or
all of it on request."""

import lightning.pytorch as L
import pytest
import torch

from lightning_ptdp.strategy import PTDPStrategy
from tests.huggingface.runs import LitHuggingFace, Run, make_model
from tests.letters import M, P, T, V
from tests.pool import WorkerFailure

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")

TIED = (("tie_word_embeddings", True),)


def pretrained(folder, model, options, *, base=False, shard="20KB"):
    """Save a model in several files, with ``base`` without its head, and return its state."""
    torch.manual_seed(11)
    made = make_model(model, **dict(options))
    (made.base_model if base else made).save_pretrained(folder, max_shard_size=shard)
    return made.state_dict()


def check_start(parity, run, expected, *, but="-"):
    initial = parity.ranks(run)[0]["initial"]
    assert {name.removeprefix("model.") for name in initial} >= expected.keys()
    for name, value in expected.items():
        assert torch.equal(initial[f"model.{name}"], value) == (name != but), name


@pytest.mark.parametrize(
    ("model", "options", "layout", "world_size"),
    [
        ("llama", (), {T: 2}, 2),
        ("llama", TIED, {P: 2, V: 2, M: 2}, 2),
        ("gpt2", (), {T: 2, P: 2, M: 2}, 4),
        ("llama", TIED, {}, 2),
    ],
)
def test_weights_are_initialized_from_folder(model, options, layout, world_size, parity, tmp_path):
    expected = pretrained(tmp_path, model, options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    run = Run(
        model=model,
        options=options,
        layout=layout,
        world_size=world_size,
        steps=1,
        init_from=str(tmp_path),
    )
    check_start(parity, run, expected)


def test_weights_are_initialized_from_folder_without_head(parity, tmp_path):
    expected = pretrained(tmp_path, "llama", TIED, base=True)
    run = Run(
        model="llama",
        options=TIED,
        layout={P: 2, M: 2},
        world_size=2,
        steps=1,
        init_from=str(tmp_path),
    )
    check_start(parity, run, expected)


def test_folder_with_more_layers_is_refused(parity, tmp_path):
    pretrained(tmp_path, "llama", (("num_hidden_layers", 6),))
    run = Run(model="llama", layout={P: 2, M: 2}, world_size=2, steps=1, init_from=str(tmp_path))
    with pytest.raises(
        WorkerFailure, match=r"model.model.layers.4.* in the checkpoint but not in the model"
    ):
        parity.ranks(run)


def test_from_pretrained_works_without_meta_device(parity, tmp_path):
    expected = pretrained(tmp_path, "llama", ())
    layout = {P: 2, M: 2, "meta_init": False}
    check_start(
        parity,
        Run(model="llama", layout=layout, world_size=2, steps=1, pretrained=str(tmp_path)),
        expected,
    )


@pytest.mark.parametrize("layout", [{P: 2}, {}])
def test_from_pretrained_on_meta_device_is_refused(layout, tmp_path):
    pretrained(tmp_path, "llama", ())
    trainer = L.Trainer(
        strategy=PTDPStrategy(**layout, start_method="fork"),
        accelerator="cpu",
        devices=layout.get(P, 1),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.raises(
        ValueError, match=r"calls from_pretrained.*from_config.*InitFrom\(path\).*meta_init=False"
    ):
        trainer.fit(LitHuggingFace(Run(model="llama", pretrained=str(tmp_path))), [])
