"""Adapters on bitsandbytes' quantized weights (QLoRA, arXiv 2305.14314) train like in one process.

This covers every layout that keeps the weights whole."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.checks import check_model
from tests.huggingface.runs import LAYOUTS, SAMPLES, LitHuggingFace, Run, make_model
from tests.optional import needs
from tests.parity import Parity, assert_near
from tests.pool import WorkerFailure

pytestmark = [pytest.mark.thorough, needs("peft", "bitsandbytes")]


def quantized_model(folder: str, kind: str) -> Any:
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )


class LitQuantized(LitHuggingFace):
    """A quantized base under adapters, as people write it: built whole in ``__init__``."""

    def __init__(self, run: Run) -> None:
        LitHuggingFace.__init__(self, replace(run, eager=False))
        import peft

        assert run.pretrained is not None
        torch.manual_seed(3)
        base = quantized_model(run.pretrained, dict(run.options)["kind"])
        self.model = peft.get_peft_model(
            base, peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"])
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("base") / "llama"
    make_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(path)
    return str(path)


def quantized(kind: str, folder: str) -> Run:
    return Run(
        model="llama", module=LitQuantized, pretrained=folder, options=(("kind", kind),), eager=True
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("fp4", "d2 sharded"),
        *(("nf4", layout) for layout in ("p2v2", "full", "c2", "d2 sharded gradients")),
        ("nf4", "p2d2 sharded parameters"),
    ],
)
def test_adapters_on_quantized_weights_match_single_process(
    kind: str, layout: str, parity: Parity, folder: str
) -> None:
    parity.check(quantized(kind, folder), LAYOUTS[layout])


def test_checkpoint_of_quantized_weights_resumes_in_other_layout(
    parity: Parity, folder: str, tmp_path: Path
) -> None:
    run = replace(quantized("nf4", folder), global_batch=SAMPLES)
    saved = str(tmp_path / "saved")
    expected = parity.result(run)
    half = replace(run, steps=2, save=saved).on(LAYOUTS["p2v2"])
    assert_near(parity.ranks(half)[0]["losses"], expected["losses"][:2], 1e-5, "losses")
    rest = replace(run, resume=saved).on(LAYOUTS["d2 sharded parameters"])
    assert_near(parity.ranks(rest)[0]["losses"], expected["losses"][2:], 1e-5, "losses")


@pytest.mark.parametrize("degrees", [{"tensor_parallel_size": 2}, {"expert_parallel_size": 2}])
def test_cut_of_quantized_weight_is_refused_before_launch(
    degrees: dict[str, int], folder: str
) -> None:
    config = PTDPStrategy(**degrees).config
    with pytest.raises(ValueError, match=rf"is a Params4bit .*{next(iter(degrees))}=2 cannot cut"):
        check_model(LitQuantized(quantized("nf4", folder)), config, config.layout(2))


def test_export_of_quantized_weights_is_refused_before_first_step(
    parity: Parity, folder: str, tmp_path: Path
) -> None:
    run = replace(quantized("nf4", folder), export=str(tmp_path / "export"))
    with pytest.raises(
        WorkerFailure, match=r"weight' is quantized, and exports have plain"
    ) as error:
        parity.ranks(run.on(LAYOUTS["p2"]))
    assert "on_fit_start" in str(error.value)


class LitDiffering(LitQuantized):
    """Ranks with equal elements of one quantized weight, but different scales."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layer = self.model.base_model.model.model.layers[1]
        if int(os.environ["RANK"]):
            layer.mlp.up_proj.weight.quant_state.offset.mul_(2)


@pytest.mark.parametrize("layout", ["d2", "p2"])
def test_quantized_weights_that_differ_between_ranks_are_refused(
    layout: str, parity: Parity, folder: str
) -> None:
    run = replace(quantized("nf4", folder), module=LitDiffering)
    with pytest.raises(
        WorkerFailure, match=r"layers.1.mlp.up_proj.weight' is quantized and differs"
    ):
        parity.ranks(run.on(LAYOUTS[layout]))


class LateQuantized(LitQuantized):
    """The same, built in ``configure_model``."""

    def __init__(self, run: Run) -> None:
        LitHuggingFace.__init__(self, run)

    def configure_model(self) -> None:
        if self.model is None:
            LitQuantized.__init__(self, self.run)


def test_quantized_model_of_configure_model_matches_single_process(
    parity: Parity, folder: str
) -> None:
    run = replace(quantized("nf4", folder), module=LateQuantized, layout={"meta_init": False})
    parity.check(run, LAYOUTS["p2v2"])
