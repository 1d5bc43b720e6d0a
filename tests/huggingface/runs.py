"""Training runs of a user's LightningModule around a Hugging Face or torch model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from lightning_ptdp.callbacks import ExportHuggingFace, InitFrom
from tests.letters import SP, M, P, T, V
from tests.parity import Place, Training

VOCABULARY, LENGTH, SAMPLES = 61, 12, 12


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """A training run of a model. ``options`` configure the model."""

    model: str
    options: tuple[tuple[str, Any], ...] = ()
    steps: int = 2
    global_batch: int = 4
    clip: float | None = 0.5
    validate_every: int | None = 0
    eager: bool = False
    whole_output: bool = False
    module: Callable[[Run], L.LightningModule] | None = None
    init_from: str | None = None
    pretrained: str | None = None
    export: str | None = None

    smallest: ClassVar[float] = 1e-3
    synced: ClassVar[tuple[str, ...]] = ("val_loss",)
    always_clips: ClassVar[bool] = False

    def make_module(self) -> L.LightningModule:
        return (self.module or LitHuggingFace)(self)

    def make_data(self) -> Dataset:
        return Samples(self.model)

    def make_callbacks(self) -> list[L.Callback]:
        return [
            *([InitFrom(self.init_from)] if self.init_from else []),
            *([ExportHuggingFace(self.export, shard_bytes=20_000)] if self.export else []),
        ]


def make_model(name: str, *, lora: Any = None, **options: Any) -> nn.Module:
    """Build a small model without dropout. ``lora`` are the arguments of peft's LoraConfig."""
    import transformers

    if lora is not None:
        import peft

        defaults = {"r": 3, "target_modules": "all-linear", "fan_in_fan_out": name == "gpt2"}
        return peft.get_peft_model(
            make_model(name, **options), peft.LoraConfig(**defaults | dict(lora))
        )
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
    }
    llama = {
        **small,
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    bert = {
        **small,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "attention_probs_dropout_prob": 0.0,
    }
    gpt2 = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 32,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    match name:
        case "llama":
            config = transformers.LlamaConfig(**llama | options)
        case "qwen3":
            config = transformers.Qwen3Config(**llama | {"head_dim": 8} | options)
        case "gemma3":
            config = transformers.Gemma3TextConfig(**llama | {"head_dim": 8} | options)
        case "phi3":
            config = transformers.Phi3Config(**llama | {"pad_token_id": 0} | options)
        case "gpt_neox":
            config = transformers.GPTNeoXConfig(
                **{k: v for k, v in llama.items() if k != "num_key_value_heads"} | options
            )
        case "gpt2":
            config = transformers.GPT2Config(**gpt2 | options)
        case "opt":
            config = transformers.OPTConfig(
                **small | {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32} | options
            )
        case "bert":
            return transformers.BertForPreTraining(
                transformers.BertConfig(**bert | {"hidden_dropout_prob": 0.0} | options)
            )
        case "t5":
            sizes = {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_decoder_layers": 3,
                "num_heads": 4,
            }
            more = {
                "vocab_size": VOCABULARY,
                "dropout_rate": 0.0,
                "decoder_start_token_id": 0,
                **sizes,
                **options,
            }
            return transformers.T5ForConditionalGeneration(transformers.T5Config(**more))
        case "bart":
            sizes = {
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 3,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 40,
            }
            heads = {
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "max_position_embeddings": 32,
                "dropout": 0.0,
            }
            return transformers.BartForConditionalGeneration(
                transformers.BartConfig(vocab_size=VOCABULARY, **sizes | heads | options)
            )
        case "encoder":
            return Encoder(**options)
        case "transformer":
            return Transformer(**options)
        case _:
            raise AssertionError(name)
    return transformers.AutoModelForCausalLM.from_config(config)


class Encoder(nn.Module):
    """A model like in tutorials: an embedding, ``nn.TransformerEncoder`` and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
        layer = nn.TransformerEncoderLayer(
            32, 4, 48, **{"dropout": 0.0, "batch_first": True} | options
        )
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(32))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels, **_):
        x = self.embedding(input_ids) + self.position(torch.arange(LENGTH, device=input_ids.device))
        first = self.encoder.layers[0].self_attn.batch_first
        x = x if first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        logits = self.head(x if first else x.transpose(0, 1))
        return SimpleNamespace(
            loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits
        )


class Transformer(nn.Module):
    """``nn.Transformer`` with two embeddings, looked up before the encoder runs, and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 32), nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(
            32, 4, 2, 3, 48, **{"dropout": 0.0, "batch_first": True} | options
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels):
        targets = labels.clamp(min=0).roll(1, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(targets.shape[1])
        padding = torch.zeros(input_ids.shape).masked_fill(attention_mask == 0, -torch.inf)
        x, y = self.source(input_ids), self.target(targets)
        found = self.transformer(
            x, y, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        logits = self.head(found)
        return SimpleNamespace(
            loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits
        )


class Samples(Dataset):
    """Token sequences with labels for each kind of model, equally many in every sample."""

    def __init__(self, model: str) -> None:
        generator = torch.Generator().manual_seed(7)
        self.model = model
        self.tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        half = LENGTH // 2  # no padding there: values at padded positions are undefined
        self.masked = F.pad(
            torch.rand(SAMPLES, half, generator=generator).argsort(1) < 3, (0, LENGTH - half)
        )
        self.lengths = torch.randint(half, LENGTH, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        tokens = self.tokens[index]
        if self.model in ("t5", "bart", "transformer"):
            labels = tokens.flip(0)[: LENGTH - 3]
            return {
                "input_ids": tokens,
                "attention_mask": (torch.arange(LENGTH) <= self.lengths[index]).long(),
                "labels": labels.masked_fill(torch.arange(len(labels)) == index % 5, -100),
            }
        if self.model == "labelled":
            labels = tokens.roll(-1).masked_fill(
                torch.arange(LENGTH) >= LENGTH - 1 - index % 5, -100
            )
            return {"input_ids": tokens, "labels": labels}
        if self.model not in ("bert", "encoder"):
            return {"input_ids": tokens, "labels": tokens}
        masked = self.masked[index]
        return {
            "input_ids": tokens.masked_fill(masked, 3),
            "labels": tokens.masked_fill(~masked, -100),
            "next_sentence_label": tokens[0] % 2,
            "token_type_ids": (torch.arange(LENGTH) > 5).long(),
            "attention_mask": (torch.arange(LENGTH) <= self.lengths[index]).long(),
        }


class LitHuggingFace(L.LightningModule):
    """A typical user's module around a Hugging Face model."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.model = make_model(run.model, **dict(run.options)) if run.eager else None

    def configure_model(self):
        if self.model is None and self.run.pretrained is not None:
            import transformers

            self.model = transformers.AutoModelForCausalLM.from_pretrained(self.run.pretrained)
        elif self.model is None:
            self.model = make_model(self.run.model, **dict(self.run.options))

    def training_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("train_loss", output.loss)
        return output if self.run.whole_output else output.loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=5e-3, eps=1e-3, weight_decay=0.01)


LAYOUTS: dict[str, Place] = {
    "one": (1, {}),
    "t2": (2, {T: 2}),
    "t2sp": (2, {T: 2, SP: True}),
    "t4": (4, {T: 4}),
    "p2": (2, {P: 2, M: 2}),
    "p2m1": (2, {P: 2, M: 1}),
    "p2v2": (2, {P: 2, V: 2, M: 2}),
    "p4": (4, {P: 4, M: 4}),
    "full": (2, {P: 2, M: 2, "recompute": "full"}),
    "named": (2, {P: 2, M: 2, "partition": ["encoder.block.0", "decoder.block.0"]}),
    "d2 sharded": (2, {"shard": "optimizer"}),
    "d2 sharded gradients": (2, {"shard": "gradients", M: 2}),
    "d2 sharded parameters": (2, {"shard": "parameters", M: 2}),
    "p2d2 sharded parameters": (4, {"shard": "parameters", P: 2, M: 2}),
    "t2p2": (4, {T: 2, P: 2, M: 2}),
    "t2p2v2": (4, {T: 2, P: 2, V: 2, M: 2}),
    "t2p2v2sp": (4, {T: 2, P: 2, V: 2, M: 2, SP: True, "tensor_overlap": 4}),
    "t4sp": (4, {T: 4, SP: True}),
    "t4p2": (8, {T: 4, P: 2, M: 2}),
    "t2p2sp": (4, {T: 2, P: 2, M: 2, SP: True}),
    "d2": (2, {}),
    "c2": (2, {"context_parallel_size": 2}),
    "d2t2p2": (8, {T: 2, P: 2, M: 2}),
}
