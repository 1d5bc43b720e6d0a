"""One training run of somebody's LightningModule around a model of Hugging Face or torch,
comparable between layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ptdp.callbacks import ExportHuggingFace, InitFrom
from lightning_ptdp.strategy import PTDPStrategy
from tests.letters import SP, M, P, T, V
from tests.pool import Pool

VOCABULARY, LENGTH, SAMPLES = 61, 12, 24


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model in a layout. ``options`` are the model's."""

    model: str
    options: tuple[tuple[str, Any], ...] = ()
    layout: dict[str, Any] = field(default_factory=dict, hash=False)
    world_size: int = 1
    steps: int = 4
    global_batch: int = 4
    eager: bool = False
    precision: str = "32-true"
    clip: float | None = 0.5
    whole_output: bool = False
    save: str | None = None
    resume: str | None = None
    module: Callable[[Run], L.LightningModule] | None = None
    init_from: str | None = None
    pretrained: str | None = None
    export: str | None = None


def make_model(name: str, *, lora: Any = None, **options: Any) -> nn.Module:
    """A small model without dropout; with ``lora``, which are LoraConfig's arguments, what peft
    makes of it."""
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
                "num_layers": 3,
                "num_decoder_layers": 4,
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
                "encoder_layers": 3,
                "decoder_layers": 4,
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
    """A model as in tutorials: an embedding, ``nn.TransformerEncoder`` and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
        layer = nn.TransformerEncoderLayer(
            32, 4, 48, **{"dropout": 0.0, "batch_first": True} | options
        )
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(32))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Tensor
    ) -> Any:
        x = self.embedding(input_ids) + self.position(torch.arange(LENGTH, device=input_ids.device))
        first = self.encoder.layers[0].self_attn.batch_first
        x = x if first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        logits = self.head(x if first else x.transpose(0, 1))
        return SimpleNamespace(
            loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits
        )


class Transformer(nn.Module):
    """``nn.Transformer`` between two embeddings, both looked up before the encoder runs, and a
    head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 32), nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(
            32, 4, 3, 4, 48, **{"dropout": 0.0, "batch_first": True} | options
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
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
    """Token sequences with the labels that each kind of model wants; as many labels in every
    sample."""

    def __init__(self, model: str) -> None:
        generator = torch.Generator().manual_seed(7)
        self.model = model
        self.tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        half = LENGTH // 2  # no padding there: what stands at padded places is not defined
        self.masked = F.pad(
            torch.rand(SAMPLES, half, generator=generator).argsort(1) < 3, (0, LENGTH - half)
        )
        self.lengths = torch.randint(half, LENGTH, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
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

    def configure_model(self) -> None:
        if self.model is None and self.run.pretrained is not None:
            import transformers

            self.model = transformers.AutoModelForCausalLM.from_pretrained(self.run.pretrained)
        elif self.model is None:
            self.model = make_model(self.run.model, **dict(self.run.options))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.log("train_loss", output.loss)
        return output if self.run.whole_output else output.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=5e-3, eps=1e-3, weight_decay=0.01)


class Recorder(L.Callback):
    """Losses and norms of every batch, the weights at the start."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.initial: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.initial = trainer.strategy.gather_state_dict()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        count = float(outputs.get("num_tokens", 1))
        total = torch.tensor([float(outputs["loss"]) * count, count], dtype=torch.float64)
        group = trainer.strategy.mesh.group("replica_sum")
        if group.size > 1:
            torch.distributed.all_reduce(total, group=group.handle)
        self.losses.append(float(total[0] / total[1]))
        if trainer.strategy.gradient_norm is not None:
            self.norms.append(float(trainer.strategy.gradient_norm))


def fit(rank: int, run: Run) -> dict[str, Any]:
    """Train; returns losses, norms, initial and final weights of the whole model."""
    L.seed_everything(3, verbose=False)
    recorder, module = Recorder(), (run.module or LitHuggingFace)(run)
    strategy = PTDPStrategy(**run.layout)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=run.world_size,
        max_steps=run.steps,
        gradient_clip_val=run.clip,
        precision=run.precision,
        callbacks=[
            recorder,
            *([InitFrom(run.init_from)] if run.init_from else []),
            *([ExportHuggingFace(run.export, shard_bytes=20_000)] if run.export else []),
        ],
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        val_check_interval=run.steps,
        check_val_every_n_epoch=None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sampler = DistributedSampler(
        Samples(run.model), **strategy.distributed_sampler_kwargs, shuffle=False
    )
    loader = DataLoader(
        sampler.dataset, batch_size=run.global_batch // sampler.num_replicas, sampler=sampler
    )
    trainer.fit(module, loader, loader, ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    return {
        "validation": [float(trainer.callback_metrics["val_loss"])],
        "losses": recorder.losses,
        "norms": recorder.norms,
        "initial": recorder.initial,
        "final": strategy.gather_state_dict(),
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
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
    "d2 sharded": (2, {"shard_optimizer": True}),
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


def check(pool: Pool, reference: Any, run: Run, layout: str, *, tolerance: float = 1e-5) -> None:
    world_size, degrees = LAYOUTS[layout]
    expected = reference(run)
    found = pool.run(
        fit,
        world_size=world_size,
        args=(replace(run, layout=run.layout | degrees, world_size=world_size),),
    )
    assert found[0]["initial"].keys() == expected["initial"].keys()
    for name, value in expected["initial"].items():
        assert torch.equal(found[0]["initial"][name], value), f"{name} starts differently"
    assert len({tuple(rank["losses"]) for rank in found}) == 1, "ranks disagree about the loss"
    for key in ("losses", "norms", "validation"):
        torch.testing.assert_close(
            torch.tensor(found[0][key]),
            torch.tensor(expected[key]),
            rtol=tolerance,
            atol=0,
            msg=lambda m, k=key: f"{k}: {m}",
        )
    for name, value in expected["final"].items():
        difference = (found[0]["final"][name] - value).norm() / value.norm().clamp(min=1e-3)
        assert difference < tolerance, f"{name} ends {difference:.1e} away"
