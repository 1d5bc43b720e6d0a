"""Conversations with images give the same results in every layout, up to the exported folder."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image

from lightning_ptdp.callbacks import ExportHuggingFace
from lightning_ptdp.data import ImageChatDataModule
from lightning_ptdp.exchange import convert
from lightning_ptdp.models import AdamWConfig, LitImageTextToText, LoraOptions
from lightning_ptdp.models.tiny import make_tiny_vision
from tests.data.folders import write_rows
from tests.huggingface.chat_training import ChatTraining
from tests.huggingface.runs import LAYOUTS
from tests.parity import assert_near

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers")

LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model, its processor and prepared conversations."""
    root = tmp_path_factory.mktemp("image_chat")
    make_tiny_vision(root / "model")
    rows = []
    for number in range(40):
        content = [{"type": "text", "text": f"How many, {number}?"}]
        for index in range((0, 0, 2, 1, 0)[number % 5]):
            Image.new("RGB", (20, 10), (6 * number, 90 * index, 40)).save(
                root / f"{number}-{index}.png"
            )
            content.insert(0, {"type": "image", "path": f"{number}-{index}.png"})
        rows.append([("user", content), ("assistant", f"There are {len(content) - 1}.")])
    write_rows(
        root / "chat.jsonl",
        ({"messages": [{"role": role, "content": said} for role, said in row]} for row in rows),
    )
    data(root).prepare_data()
    return root


def data(root, **options):
    return ImageChatDataModule(
        data_dir=str(root / "store"),
        tokenizer_dir=str(root / "model"),
        path=str(root / "chat.jsonl"),
        sequence_length=LENGTH,
        validation_fraction=0.2,
        num_microbatches=2,
        global_batch_size=8,
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class ImageChats(ChatTraining):
    adapter: LoraOptions | None = None
    export: str | None = None

    def make_module(self):
        optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-3)
        return LitImageTextToText(
            str(self.root / "model"), optimizer=optimizer, adapter=self.adapter
        )

    def make_loaders(self, trainer):
        return [data(self.root)]

    def make_callbacks(self):
        exports = [] if self.export is None else [ExportHuggingFace(self.export)]
        return [*super().make_callbacks(), *exports]


@pytest.mark.parametrize("layout", ["d2", "t2", "p2", "t2p2"])
def test_image_chats_match_single_process(layout, parity, folder):
    parity.check(ImageChats(root=folder), LAYOUTS[layout])


def test_adapters_resume_merge_and_export(parity, folder, tmp_path):
    """A run resumed within an epoch on fewer replicas ends with the same merged folder."""
    run = ImageChats(root=folder, adapter=LoraOptions(r=3))
    first = replace(run, saved_in=str(tmp_path), export=str(tmp_path / "whole"))
    parity.ranks(first.on(LAYOUTS["t2p2"]))
    resumed = parity.result(replace(run, resume=str(tmp_path / "step=1.ckpt")))
    assert_near(resumed["losses"], parity.result(run)["losses"][1:], 1e-5, "losses")
    convert(tmp_path / "step=3.ckpt", tmp_path / "merged", merge=True)
    convert(tmp_path / "step=3.ckpt", tmp_path / "adapter")
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert len(adapter["target_modules"]) == 7 * 4
    assert all(".language_model." in name for name in adapter["target_modules"])
    whole, merged = (logits(tmp_path / name, folder) for name in ("whole", "merged"))
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5)
    assert (whole - logits(folder / "model", folder)).abs().max() > 1e-3


def logits(folder, root):
    """Return the logits of an exported folder with its own processor."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    inputs = processor(
        text=["<image><image>How many?"],
        images=[[Image.open(root / f"2-{index}.png") for index in (0, 1)]],
        return_tensors="pt",
    )
    with torch.no_grad():
        return model(**inputs).logits
