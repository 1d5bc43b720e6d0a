"""Benchmark results and synthetic batches."""

import json

import pytest
import torch

from lightning_ptdp.bench import BenchResult, SyntheticData, ranked, render, table
from lightning_ptdp.data import BertDataModule, PreferenceDataModule, TextDataModule
from lightning_ptdp.models import make_tiny


def result(**changes):
    values = {
        "layout": "t2 p1 v1 d1",
        "device": "cpu",
        "precision": "32-true",
        "world_size": 2,
        "num_microbatches": 1,
        "samples": 4,
        "tokens": 400,
        "flops": 8e12,
        "seconds": (4.0, 1.0, 2.0),
        "peak_memory_bytes": (2**30, 2**31),
    }
    return BenchResult(**(values | changes))


def test_statistics_of_measured_steps():
    found = result(peak_flops=4e12)
    assert (
        found.median_s,
        found.percentile_s(0),
        found.percentile_s(75),
        found.percentile_s(100),
    ) == (2.0, 1.0, 3.0, 4.0)
    assert (found.tokens_per_s, found.flops_per_s, found.mfu) == (200.0, 2e12, 0.5)
    assert result().mfu is None
    assert result(seconds=(3.0,)).percentile_s(90) == 3.0


def test_result_survives_json_round_trip(tmp_path):
    found = result(bubble=0.25, ideal_bubble=0.2)
    found.write(tmp_path / "result.json")
    assert BenchResult.read(json.loads((tmp_path / "result.json").read_text())) == found
    assert BenchResult.read(json.loads(json.dumps(found.as_dict()))) == found


def test_layouts_are_ranked_next_to_planner_predictions():
    second = result(predicted_s=0.5, layout="t2 p1 d1")
    first = result(
        layout="p2 d1",
        samples=8,
        tokens=800,
        seconds=(3.0,),
        bubble=0.5,
        ideal_bubble=0.25,
        predicted_s=2.0,
    )
    unknown = result(seconds=(9.0,), layout="d2")
    assert ranked([second, unknown, first]) == [first, second, unknown]
    _, _, head, *lines = table([first, second, unknown]).splitlines()
    assert len(lines) == 3
    places = [line[head.index("rank") :].split()[0] for line in lines]
    assert places == ["2", "1", "-"]
    assert "33%" in lines[1] and "slower by" in head
    assert "of varying size" in table([first, second])
    alone = {line[:22].strip(): line[22:].split() for line in render(first).splitlines()}
    assert (alone["bubble, measured"], alone["bubble of the schedule"]) == (["50.0%"], ["25.0%"])
    assert "bubble" not in render(second)


def test_synthetic_batches_have_sizes_of_data_module(tmp_path):
    common = {
        "data_dir": str(tmp_path),
        "vocabulary_size": 320,
        "sequence_length": 32,
        "micro_batch_size": 2,
    }
    gpt = SyntheticData(TextDataModule(**common, num_microbatches=3))
    batch = next(iter(gpt.train_dataloader()))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (6, 32),
        "labels": (6, 32),
    }
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    (plan,) = gpt.batch_plans(num_replicas=2)
    assert (plan.replica_batch, plan.global_batch) == (6, 12)

    bert = next(iter(SyntheticData(BertDataModule(**common)).train_dataloader()))
    labelled = bert["labels"] != -100
    assert labelled.sum(1).tolist() == [bert["masked_positions"].size(1)] * 2
    assert torch.equal(bert["labels"][labelled], bert["input_ids"][labelled])
    assert bert["next_sentence_label"].shape == (2,)
    assert bert["token_type_ids"].unique().tolist() == [0, 1]


def test_synthetic_pairs_have_names_of_data_module(tmp_path):
    pytest.importorskip("transformers")
    make_tiny(tmp_path / "model", hidden_size=16, intermediate_size=16)
    pairs = PreferenceDataModule(
        tokenizer_dir=str(tmp_path / "model"), sequence_length=32, micro_batch_size=2
    )
    assert {
        name: tuple(value.shape)
        for name, value in next(iter(SyntheticData(pairs).train_dataloader())).items()
    } == {
        **dict.fromkeys(
            ("chosen_ids", "chosen_labels", "rejected_ids", "rejected_labels"), (2, 32)
        ),
        "pair": (2,),
    }
