"""A LightningModule around a Hugging Face model trains unmodified, with the same answer in every
layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface.runs import LAYOUTS, SAMPLES, Run, check, fit
from tests.pool import Pool

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")


@pytest.mark.parametrize("layout", ["t2", "p2", "p2v2", "t2p2v2", "t2p2v2sp"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert"])
def test_same_answer_as_one_process(model: str, layout: str, pool: Pool, reference: Any) -> None:
    check(pool, reference, Run(model=model, steps=10), layout)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_in_bfloat16(model: str, eager: bool, pool: Pool, reference: Any) -> None:
    check(
        pool, reference, Run(model=model, eager=eager, precision="bf16-true"), "p2", tolerance=5e-2
    )


@pytest.mark.parametrize(
    ("model", "options", "layout"),
    [
        ("llama", (), "t4sp"),
        ("llama", (("num_key_value_heads", 1), ("attention_bias", True)), "t4p2"),
        ("llama", (("tie_word_embeddings", True),), "d2t2p2"),
        ("qwen3", (), "t4"),
        ("gemma3", (), "t2p2v2"),
        ("phi3", (), "t2"),
        ("gpt_neox", (), "t2sp"),
        ("opt", (), "p2"),
    ],
)
def test_models_that_declare_their_plan(
    model: str, options: tuple, layout: str, pool: Pool, reference: Any
) -> None:
    check(pool, reference, Run(model=model, options=options), layout)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ((), "t2"),
        ((), "t2p2v2sp"),
        ((("norm_first", True), ("activation", "gelu"), ("batch_first", False)), "t2p2v2"),
    ],
)
def test_transformer_encoder_of_torch(
    options: tuple, layout: str, pool: Pool, reference: Any
) -> None:
    check(pool, reference, Run(model="encoder", options=options), layout)


def test_a_model_built_in_init_whose_whole_output_is_returned(pool: Pool, reference: Any) -> None:
    check(pool, reference, Run(model="gpt2", eager=True, whole_output=True), "t2p2v2")


def test_a_checkpoint_of_copied_heads_goes_on_in_another_layout(
    pool: Pool, reference: Any, tmp_path: Path
) -> None:
    # an epoch is a batch: Lightning does not go on within one of a plain loader
    whole = Run(model="llama", global_batch=SAMPLES)
    first = replace(whole, steps=2, save=str(tmp_path / "two epochs"))
    for source, target in (("t4", "t2p2v2"), ("p2", "t4")):
        for run, layout in ((first, source), (replace(whole, resume=first.save), target)):
            world_size, degrees = LAYOUTS[layout]
            found = pool.run(
                fit,
                world_size=world_size,
                args=(replace(run, layout=degrees, world_size=world_size),),
            )[0]
        expected = reference(whole)
        torch.testing.assert_close(
            torch.tensor(found["losses"]), torch.tensor(expected["losses"][2:]), rtol=1e-5, atol=0
        )
        for name, value in expected["final"].items():
            assert (found["final"][name] - value).norm() / value.norm() < 1e-5, name
