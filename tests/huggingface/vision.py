"""Small vision-language models of five families, their batches, and trainings with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.huggingface.runs import LitHuggingFace, Run

__all__ = ["FAMILIES", "VisionRun", "build_vision"]

VOCABULARY, IMAGE, LENGTH, SAMPLES = 61, 60, 16, 24
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 8,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
}
FAMILIES = ("llava", "qwen2_5_vl", "paligemma", "idefics3", "gemma3")


def build_vision(family: str, **options: Any) -> Any:
    """Build the small model of a family."""
    import transformers

    match family:
        case "llava":
            vision = {"model_type": "clip_vision_model", **_TOWER}
            more = {
                "text_config": {"model_type": "llama", **_TEXT},
                "vision_config": vision,
                "image_token_index": IMAGE,
            }
        case "qwen2_5_vl":
            rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
            more = {
                "text_config": {**_TEXT, "rope_parameters": rope},
                "vision_config": _QWEN_TOWER,
                "image_token_id": IMAGE,
            }
        case "paligemma":
            more = {
                "text_config": {"model_type": "gemma", **_TEXT, "head_dim": 8},
                "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
                "image_token_index": IMAGE,
                "projection_dim": 32,
                "hidden_size": 32,
            }
        case "idefics3":
            more = {
                "text_config": {"model_type": "llama", **_TEXT},
                "vision_config": _TOWER,
                "image_token_id": IMAGE,
                "scale_factor": 1,
                "pad_token_id": 0,
                "tie_word_embeddings": False,
            }
        case "gemma3":
            more = {
                "text_config": {**_TEXT, "head_dim": 8, "sliding_window": 8},
                "vision_config": _TOWER,
                "image_token_index": IMAGE,
                "mm_tokens_per_image": 4,
            }
    config = transformers.AutoConfig.for_model(family, **more | options)
    return transformers.AutoModelForImageTextToText.from_config(config)


class ImageSamples(Dataset):
    """Sequences with ``images`` images each in turn, of 4 tokens per image."""

    def __init__(self, images: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = images
        self.tokens = torch.randint(3, IMAGE, (SAMPLES, LENGTH), generator=generator)
        self.pixels = torch.rand(SAMPLES, 2, 3, 16, 16, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        count = self.images[index % len(self.images)]
        tokens = self.tokens[index].clone()
        for number in range(count):
            start = 1 + 6 * number
            tokens[start : start + 4] = IMAGE
        return tokens, self.pixels[index, :count]


def collate(family: str, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return a batch like that of the family's processor."""
    tokens = torch.stack([tokens for tokens, _ in samples])
    pixels = torch.cat([pixels for _, pixels in samples]).to(torch.get_default_dtype())
    is_image = tokens == IMAGE
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(is_image, -100),
    }
    if family == "qwen2_5_vl":
        batch["mm_token_type_ids"] = is_image.int()
    if family == "paligemma":
        batch["token_type_ids"] = (torch.arange(LENGTH) > 12).long().expand_as(tokens).clone()
    if family == "gemma3":
        batch["token_type_ids"] = is_image.long()
    if not len(pixels):
        return batch
    if family == "qwen2_5_vl":
        # As in the processor: two equal frames in patches of 4 x 4 pixels. The second image of a
        # sample is wide.
        patches, grid = [], []
        for _, images in samples:
            for number, pixels in enumerate(images):
                rows, columns = ((4, 4), (2, 8))[number]
                parts = pixels.reshape(3, rows, 4, columns, 4).permute(1, 3, 0, 2, 4)
                patches.append(parts.flatten(0, 1)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1))
                grid.append([1, rows, columns])
        return {
            **batch,
            "pixel_values": torch.cat(patches),
            "image_grid_thw": torch.tensor(grid),
        }
    pixels = pixels[..., :8, :8]
    if family == "idefics3":
        most = max(len(images) for _, images in samples)
        padded = torch.zeros(len(samples), most, 3, 8, 8)
        mask = torch.zeros(len(samples), most, 8, 8, dtype=torch.long)
        for index, (_, images) in enumerate(samples):
            padded[index, : len(images)], mask[index, : len(images)] = images[..., :8, :8], 1
        return {**batch, "pixel_values": padded, "pixel_attention_mask": mask}
    return {**batch, "pixel_values": pixels}


class LitVision(LitHuggingFace):
    """A typical user's module around a vision-language model."""

    def __init__(self, run: VisionRun) -> None:
        L.LightningModule.__init__(self)
        self.run, self.model = run, None

    def configure_model(self):
        if self.model is None:
            self.model = build_vision(self.run.model, **dict(self.run.options))
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(not name.startswith(self.run.frozen))

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        return {"loss": loss, "num_tokens": (batch["labels"][:, 1:] != -100).sum()}

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        # Parameters of a tower that no loss depends on have zero gradients in a layout.
        return torch.optim.AdamW(trained, lr=5e-3, eps=1e-3, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class VisionRun(Run):
    """A training of a family. ``images`` are the numbers of images of the samples, in turn."""

    images: tuple[int, ...] = (0, 0, 2, 1, 0)
    frozen: tuple[str, ...] = ()
    precision: Any = "64-true"
    validate_every: int | None = None
    module: Any = field(default=LitVision)

    def make_data(self) -> Dataset:
        return ImageSamples(self.images)

    def make_loaders(self, trainer: L.Trainer) -> list[DataLoader]:
        data = self.make_data()
        sampler = DistributedSampler(
            data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False
        )
        return [
            DataLoader(
                data,
                batch_size=self.global_batch // sampler.num_replicas,
                sampler=sampler,
                collate_fn=partial(collate, self.model),
            )
        ]
