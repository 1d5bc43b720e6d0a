"""Unmodified vision-language models equal one process, with any number of images per sample."""

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ptdp import ParallelLayout
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.engine.microbatches import split_batch
from lightning_ptdp.models import LitImageTextToText, LoraOptions
from lightning_ptdp.models.plans import find_plan
from lightning_ptdp.pipeline.containers import layer_ranges
from lightning_ptdp.pipeline.discover import KnownParts
from lightning_ptdp.planner import find_device
from lightning_ptdp.shims.transformers import image_parts
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.checks.model import check_model
from lightning_ptdp.strategy.checks.trials import check_first_batch
from lightning_ptdp.strategy.planning import described
from tests.huggingface.round_trip import OPTIMIZER
from tests.huggingface.runs import LAYOUTS
from tests.huggingface.vision import (
    FAMILIES,
    IMAGE,
    LENGTH,
    ImageSamples,
    LitVision,
    VisionRun,
    build_vision,
    collate,
)
from tests.parity import make_trainer

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("layout", ["d2", "t2", "p2", "t2p2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_like_single_process(family, layout, parity):
    """The first microbatch has no image, nor has one replica in the second step."""
    parity.check(VisionRun(model=family), LAYOUTS[layout])


def test_hidden_states_of_tower_are_whole_under_sequence_parallelism(parity):
    """LLaVA selects a hidden state of its tower, which is not divided."""
    parity.check(VisionRun(model="llava"), LAYOUTS["t2sp"])


def test_context_parallelism_is_refused_before_launch():
    config = PTDPConfig(context_parallel_size=2)
    module = LitVision(VisionRun(model="qwen2_5_vl"))
    with pytest.raises(ValueError, match=r"merges images into its sequence.*_parallel_size=1"):
        check_model(module, config, config.layout(2))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_partition_and_planner_count_tower_on_first_stage(family):
    """The tower has more multiply-adds than a layer, so the first stage has one layer of three."""
    module = LitVision(VisionRun(model=family))
    module.configure_model()
    layout = ParallelLayout(world_size=2, pipeline_parallel_size=2)
    known = KnownParts.of(module, find_plan(module))
    assert layer_ranges(module, parts=known.parts, layout=layout) == ((0, 1), (1, 3))
    shape = described(
        module,
        PTDPConfig(),
        length=LENGTH,
        precision="32-true",
        software="ours",
        device=find_device("h100"),
    )
    towers = [module.get_submodule(name.rstrip(".")) for name in image_parts(module)]
    elements = sum(p.numel() for tower in towers for p in tower.parameters() if p.dim() > 1)
    assert shape.input.flops >= 2 * LENGTH * elements > 0


def _batch(images, rows, **more):
    """Return a batch with two tokens per image."""
    tokens = torch.zeros(len(images), 6, dtype=torch.long)
    for row, count in zip(tokens, images, strict=True):
        row[: 2 * count] = IMAGE
    return {"input_ids": tokens, "pixel_values": torch.arange(rows)[:, None], **more}


def test_images_follow_their_samples_into_microbatches():
    """As many images as samples are not necessarily one per sample."""
    parts = split_batch(_batch([0, 2, 1, 1], 4), (2, 2), image_token=IMAGE)
    assert [part["pixel_values"].flatten().tolist() for part in parts] == [[0, 1], [2, 3]]
    first, second = split_batch(_batch([0, 0, 2, 0], 2), (2, 2), image_token=IMAGE)
    assert first["pixel_values"] is None
    assert second["pixel_values"].flatten().tolist() == [0, 1]


def test_patches_follow_their_images_into_microbatches():
    grid = torch.tensor([[1, 2, 2], [1, 4, 1], [1, 1, 4]])
    parts = split_batch(_batch([1, 2], 12, image_grid_thw=grid), (1, 1), image_token=IMAGE)
    assert [len(part["pixel_values"]) for part in parts] == [4, 8]
    assert torch.equal(parts[1]["image_grid_thw"], grid[1:])


def test_images_of_unknown_sample_are_refused():
    with pytest.raises(ValueError, match=r"3 rows for 8 image tokens.*Use num_microbatches=1"):
        split_batch(_batch([2, 2], 3), (1, 1), image_token=IMAGE)


@pytest.mark.parametrize("rows", [3, 4])
def test_batch_is_split_before_launch(rows, folders, monkeypatch):
    """The model is built only in the ranks, and its tensor-parallel plan is still found."""
    # The trial is not run beside other threads, such as those of pytest.
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    module = image_text(VisionRun(model="llava", pretrained=str(folders / "llava")))
    config = PTDPConfig(tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=2)
    layout = config.layout(4)
    expected = pytest.raises(ValueError, match=r"3 rows for 8 image tokens.*num_microbatches=1")
    with expected if rows == 3 else nullcontext():
        check_first_batch(
            make_trainer(PTDPStrategy()),
            module,
            DataLoader(_Batches([_batch([2, 2], rows)]), batch_size=None),
            config=config,
            layout=layout,
            known=check_model(module, config, layout),
        )
    assert module.model is None


class _Batches(list, Dataset):
    """Batches of a loader."""


TEXT_STEP = (1, 2, 0, 1, 0, 0, 0, 0, 1, 0, 0, 2)
"""Numbers of images of which the second global batch has none."""


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("llava", name) for name in ("d2", "t2p2")),
        *(("qwen2_5_vl", name) for name in ("d2", "d2 sharded", "d2 sharded parameters")),
        *(("qwen2_5_vl", name) for name in ("t2p2", "zb")),
    ],
)
def test_step_without_images_leaves_tower_unchanged(family, layout, parity):
    """A zero gradient would move the tower by its momentum."""
    run = VisionRun(model=family, images=TEXT_STEP)
    zero_bubble = (2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "zb_h1"})
    parity.check(run, {**LAYOUTS, "zb": zero_bubble}[layout])


@pytest.mark.parametrize("layout", ["d2", "t2", "p2", "t2p2"])
def test_frozen_tower_trains_language_model_alone(layout, parity):
    run = VisionRun(model="qwen2_5_vl", images=TEXT_STEP, frozen=("model.visual.",))
    parity.check(run, LAYOUTS[layout])


def image_text(run):
    assert run.pretrained is not None
    return LitImageTextToText(run.pretrained, optimizer=OPTIMIZER, **dict(run.options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a folder of each family."""
    folder = tmp_path_factory.mktemp("vision")
    torch.manual_seed(5)
    for family in FAMILIES:
        build_vision(family).save_pretrained(folder / family)
    return folder


def logits(folder, family):
    """Return the logits of a folder for two samples with three images."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    data = ImageSamples((1, 2))
    batch = collate(family, [data[0], data[1]])
    with torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_folder_reloads_with_equal_logits(family, folders, parity, tmp_path):
    run = VisionRun(
        model=family, module=image_text, pretrained=str(folders / family), precision="32-true"
    )
    exported = [tmp_path / layout for layout in ("one", "t2p2")]
    for target in exported:
        parity.ranks(replace(run, export=str(target)).on(LAYOUTS[target.name]))
    one, divided = (logits(target, family) for target in exported)
    torch.testing.assert_close(divided, one, rtol=1e-4, atol=1e-5)
    assert (one - logits(folders / family, family)).abs().max() > 1e-2


@pytest.mark.parametrize("layout", ["d2", "t2", "p2", "t2p2"])
def test_adapters_are_in_language_model_only(layout, folders, parity, tmp_path):
    run = VisionRun(
        model="qwen2_5_vl",
        images=TEXT_STEP,
        module=image_text,
        pretrained=str(folders / "qwen2_5_vl"),
        options=(("adapter", LoraOptions(r=3)),),
    )
    parity.check(run, LAYOUTS[layout])
    names = [name for name in parity.result(run)["final"] if ".lora_" in name]
    assert len(names) == 2 * 7 * 3  # A and B of seven products in three layers
    assert all(".language_model.layers." in name for name in names)
