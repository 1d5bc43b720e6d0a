"""Small Hugging Face models of many architectures, without dropout, and their batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["ARCHITECTURES", "LENGTH", "VOCABULARY", "Architecture", "Samples", "build"]

VOCABULARY, LENGTH = 61, 16
_LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One class of models.

    Attributes:
        config: Class of the configuration.
        model: Class of the model.
        task: Training task, which determines the batch: "causal", "masked", "class", "token
            class", "question", "image", "audio", "ctc", "text to text" or "speech to text".
        options: Options of the configuration.
        layers: Option for the number of layers.
        experts: Whether the model has a mixture of experts.
        eager: Whether the model must be built in ``__init__``, because its parts with weight norm
            cannot be initialized one by one.
    """

    config: str
    model: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    layers: str = "num_hidden_layers"
    experts: bool = False
    eager: bool = False


_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
_LLAMA = {
    **_SMALL,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_SAME_HEADS = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_WIDE_HEADS = {**_LLAMA, "head_dim": 8}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {**_SAME_HEADS, **_NO_DROPOUT}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 32,
    "pad_token_id": 0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts": True}
_PATCHES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    **_NO_DROPOUT,
}
_SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 4),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "pad_token_id": 0,
}
_TWO_STACKS = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "encoder_layers": 4,
    "forced_eos_token_id": None,
}


def _causal(name: str, options: Mapping[str, Any], **more: Any) -> Architecture:
    layers, experts = more.pop("layers", "num_hidden_layers"), more.pop("experts", False)
    model = more.pop("model", f"{name}ForCausalLM")
    options = {**options, **more}
    return Architecture(
        config=f"{name}Config",
        model=model,
        task="causal",
        options=options,
        layers=layers,
        experts=experts,
    )


def _of(
    config: str,
    model: str,
    task: str,
    options: Mapping[str, Any],
    *,
    layers: str = "num_hidden_layers",
    **more: Any,
) -> Any:
    eager = more.pop("eager", False)
    return Architecture(
        config=f"{config}Config",
        model=model,
        task=task,
        options={**options, **more},
        layers=layers,
        eager=eager,
    )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        # Decoders that declare their own plan.
        "llama": _causal("Llama", _LLAMA),
        "mistral": _causal("Mistral", _WIDE_HEADS),
        "qwen2": _causal("Qwen2", _LLAMA),
        "qwen3": _causal("Qwen3", _WIDE_HEADS),
        "gemma": _causal("Gemma", _WIDE_HEADS),
        "gemma2": _causal("Gemma2", _WIDE_HEADS, attn_implementation="eager"),
        "gemma3": _causal("Gemma3Text", _WIDE_HEADS, model="Gemma3ForCausalLM"),
        "phi": _causal("Phi", _LLAMA, partial_rotary_factor=0.5, resid_pdrop=0.0),
        "phi3": _causal("Phi3", _LLAMA, resid_pdrop=0.0),
        "gpt_neox": _causal("GPTNeoX", _SAME_HEADS),
        "cohere": _causal("Cohere", _LLAMA, logit_scale=1.0),
        "olmo": _causal("Olmo", _LLAMA),
        "olmo2": _causal("Olmo2", _LLAMA),
        "olmo3": _causal("Olmo3", _LLAMA),
        "glm4": _causal("Glm4", _WIDE_HEADS),
        "granite": _causal("Granite", _LLAMA),
        "starcoder2": _causal("Starcoder2", _LLAMA, residual_dropout=0.0, embedding_dropout=0.0),
        "smollm3": _causal("SmolLM3", _LLAMA),
        "helium": _causal("Helium", _WIDE_HEADS),
        "nemotron": _causal("Nemotron", _WIDE_HEADS),
        "exaone4": _causal("Exaone4", _WIDE_HEADS),
        "mixtral": _causal("Mixtral", _LLAMA, num_local_experts=4, experts=True),
        "qwen3_moe": _causal(
            "Qwen3Moe",
            _WIDE_HEADS,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            experts=True,
        ),
        "qwen2_moe": _causal(
            "Qwen2Moe",
            _LLAMA,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            experts=True,
        ),
        "olmoe": _causal("Olmoe", _LLAMA, num_experts=4, num_experts_per_tok=2, experts=True),
        "deepseek_v3": _causal(
            "DeepseekV3",
            {**_LLAMA, **_LATENT, "num_key_value_heads": 4},
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            experts=True,
        ),
        "glm4_moe": _causal(
            "Glm4Moe",
            _WIDE_HEADS,
            n_routed_experts=4,
            **_CHOSEN,
            n_group=2,
            first_k_dense_replace=1,
        ),
        "ernie4_5_moe": _causal(
            "Ernie4_5_Moe",
            _LLAMA,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=16,
            experts=True,
        ),
        "granitemoe": _causal("GraniteMoe", _LLAMA, num_local_experts=4, experts=True),
        "minimax": _causal("MiniMax", _WIDE_HEADS, num_local_experts=4, block_size=8, experts=True),
        "minimax_m2": _causal(
            "MiniMaxM2", _WIDE_HEADS, num_local_experts=4, num_experts_per_tok=2, experts=True
        ),
        "qwen3_next": _causal(
            "Qwen3Next",
            _WIDE_HEADS,
            num_experts=4,
            **_CHOSEN,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "nemotron_h": _causal(
            "NemotronH",
            _WIDE_HEADS,
            n_routed_experts=4,
            **_CHOSEN,
            moe_shared_expert_intermediate_size=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=4,
            n_groups=2,
            chunk_size=4,
            layers_block_type=["mamba", "moe", "attention", "moe"],
        ),
        # Decoders without their own plan.
        "gpt2": _causal("GPT2", _GPT2, model="GPT2LMHeadModel", layers="n_layer"),
        "stablelm": _causal("StableLm", _LLAMA),
        "falcon": _causal(
            "Falcon",
            _SMALL,
            new_decoder_architecture=True,
            num_kv_heads=2,
            max_position_embeddings=32,
        ),
        "falcon 7b": _causal("Falcon", _SMALL, multi_query=True, max_position_embeddings=32),
        "falcon rw": _causal(
            "Falcon",
            _SMALL,
            alibi=True,
            multi_query=False,
            parallel_attn=False,
            bias=True,
            max_position_embeddings=32,
        ),
        "gptj": _causal("GPTJ", _GPT2, layers="n_layer", rotary_dim=4),
        "gpt_neo": _causal(
            "GPTNeo",
            {
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "num_heads": 4,
                "max_position_embeddings": 32,
            },
            layers="num_layers",
            attention_types=[[["global", "local"], 2]],
            window_size=8,
            attention_dropout=0.0,
            embed_dropout=0.0,
            resid_dropout=0.0,
            pad_token_id=0,
        ),
        "bloom": _causal(
            "Bloom",
            {"vocab_size": VOCABULARY, "hidden_size": 32, "n_head": 4, "pad_token_id": 0},
            layers="n_layer",
        ),
        "mpt": _causal(
            "Mpt",
            {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "max_seq_len": 32},
            layers="n_layers",
        ),
        "opt": _causal(
            "OPT",
            _SMALL,
            ffn_dim=48,
            dropout=0.0,
            word_embed_proj_dim=32,
            max_position_embeddings=32,
        ),
        "gpt_oss": _causal(
            "GptOss",
            _WIDE_HEADS,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            experts=True,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "gpt_bigcode": _causal("GPTBigCode", _GPT2, layers="n_layer"),
        "codegen": _causal("CodeGen", _GPT2, layers="n_layer", rotary_dim=4),
        "persimmon": _causal("Persimmon", _SAME_HEADS),
        "biogpt": _causal("BioGpt", _BERT, activation_dropout=0.0, layerdrop=0.0),
        "ctrl": _of(
            "CTRL",
            "CTRLLMHeadModel",
            "causal",
            {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "dff": 48, "n_positions": 32},
            layers="n_layer",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        ),
        "mamba": _causal(
            "Mamba",
            {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "pad_token_id": 0},
        ),
        "mamba2": _causal(
            "Mamba2",
            {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "pad_token_id": 0},
            num_heads=4,
            head_dim=16,
            n_groups=2,
            chunk_size=4,
        ),
        "jamba": _causal(
            "Jamba",
            _LLAMA,
            mamba_d_state=4,
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            experts=True,
        ),
        # Encoders.
        "bert": _of("Bert", "BertForMaskedLM", "masked", _BERT),
        "roberta": _of("Roberta", "RobertaForMaskedLM", "masked", _BERT),
        "electra": _of("Electra", "ElectraForMaskedLM", "masked", _BERT, embedding_size=16),
        "camembert": _of("Camembert", "CamembertForMaskedLM", "masked", _BERT),
        "distilbert": _of(
            "DistilBert",
            "DistilBertForMaskedLM",
            "masked",
            {"vocab_size": VOCABULARY, "dim": 32, "n_heads": 4, "hidden_dim": 48},
            layers="n_layers",
            dropout=0.0,
            attention_dropout=0.0,
            max_position_embeddings=32,
        ),
        "albert": _of("Albert", "AlbertForMaskedLM", "masked", _BERT, embedding_size=16),
        "deberta": _of(
            "DebertaV2",
            "DebertaV2ForMaskedLM",
            "masked",
            _BERT,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
        ),
        "modernbert": _of(
            "ModernBert",
            "ModernBertForMaskedLM",
            "masked",
            _SAME_HEADS,
            attention_dropout=0.0,
            mlp_dropout=0.0,
            embedding_dropout=0.0,
            local_attention=64,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        "xlm_roberta": _of("XLMRoberta", "XLMRobertaForMaskedLM", "masked", _BERT),
        "mpnet": _of("MPNet", "MPNetForMaskedLM", "masked", _BERT),
        "megatron_bert": _of("MegatronBert", "MegatronBertForMaskedLM", "masked", _BERT),
        "esm": _of(
            "Esm",
            "EsmForMaskedLM",
            "masked",
            _BERT,
            mask_token_id=3,
            position_embedding_type="rotary",
        ),
        "nomic_bert": _of("NomicBert", "NomicBertForMaskedLM", "masked", _BERT),
        # Heads of other tasks.
        "llama classes": _of(
            "Llama", "LlamaForSequenceClassification", "class", _LLAMA, num_labels=3
        ),
        "bert classes": _of("Bert", "BertForSequenceClassification", "class", _BERT, num_labels=3),
        "gpt2 classes": _of(
            "GPT2", "GPT2ForSequenceClassification", "class", _GPT2, layers="n_layer", num_labels=3
        ),
        "bert token classes": _of(
            "Bert", "BertForTokenClassification", "token class", _BERT, num_labels=5
        ),
        "roberta token classes": _of(
            "Roberta", "RobertaForTokenClassification", "token class", _BERT, num_labels=5
        ),
        "qwen2 token classes": _of(
            "Qwen2",
            "Qwen2ForTokenClassification",
            "token class",
            _LLAMA,
            num_labels=5,
            classifier_dropout=0.0,
        ),
        "bert question": _of("Bert", "BertForQuestionAnswering", "question", _BERT),
        "electra classes": _of(
            "Electra",
            "ElectraForSequenceClassification",
            "class",
            _BERT,
            embedding_size=32,
            num_labels=3,
        ),
        # Images and audio.
        "vit": _of("ViT", "ViTForImageClassification", "image", _PATCHES, num_labels=3),
        "deit": _of("DeiT", "DeiTForImageClassification", "image", _PATCHES, num_labels=3),
        "dinov2": _of(
            "Dinov2",
            "Dinov2ForImageClassification",
            "image",
            _PATCHES,
            num_labels=3,
            mlp_ratio=2,
            drop_path_rate=0.0,
        ),
        "beit": _of(
            "Beit",
            "BeitForImageClassification",
            "image",
            _PATCHES,
            num_labels=3,
            drop_path_rate=0.0,
        ),
        "wav2vec2": _of("Wav2Vec2", "Wav2Vec2ForCTC", "ctc", _SPEECH, eager=True),
        "wav2vec2 classes": _of(
            "Wav2Vec2",
            "Wav2Vec2ForSequenceClassification",
            "audio",
            _SPEECH,
            num_labels=3,
            eager=True,
        ),
        "hubert": _of("Hubert", "HubertForCTC", "ctc", _SPEECH, eager=True),
        "audio spectrogram": _of(
            "AST",
            "ASTForAudioClassification",
            "spectrogram",
            _PATCHES,
            num_labels=3,
            num_mel_bins=16,
            max_length=16,
            frequency_stride=4,
            time_stride=4,
        ),
        # Encoder-decoders.
        "t5": _of(
            "T5",
            "T5ForConditionalGeneration",
            "text to text",
            {
                "vocab_size": VOCABULARY,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_heads": 4,
                "dropout_rate": 0.0,
            },
            layers="num_layers",
            decoder_start_token_id=0,
        ),
        "bart": _of(
            "Bart",
            "BartForConditionalGeneration",
            "text to text",
            _TWO_STACKS,
            layers="decoder_layers",
        ),
        "whisper": _of(
            "Whisper",
            "WhisperForConditionalGeneration",
            "speech to text",
            _TWO_STACKS,
            layers="decoder_layers",
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=32,
            begin_suppress_tokens=None,
        ),
    }
)


def build(name: str, **options: Any) -> nn.Module:
    """Build a model in float64, so that rounding does not hide differences."""
    import transformers

    found = ARCHITECTURES[name]
    settings = {**found.options, found.layers: _LAYERS, "use_cache": False, **options}
    attention = settings.pop("attn_implementation", None)
    config = getattr(transformers, found.config)(**settings)
    if attention is not None:
        config._attn_implementation = attention
    if found.experts:
        config._experts_implementation = "eager"  # grouped products do not support float64
    return getattr(transformers, found.model)(config).double()


class Samples(Dataset):
    """Random samples for a task, all different.

    Args:
        task: Task of the architecture.
        count: Number of samples.
        padded: Whether the last labels of a sample are ignored. Their number varies between
            samples.
    """

    def __init__(self, task: str, count: int, *, padded: bool = False) -> None:
        self.task, self.count, self.padded = task, count, padded
        self.generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=self.generator)
        self.others = torch.randint(3, VOCABULARY, (count, LENGTH), generator=self.generator)
        # Mask four tokens per sample. Padding keeps at least the first.
        others = torch.rand(count, LENGTH - 1, generator=self.generator).argsort(1) < 3
        self.masked = torch.cat([torch.ones(count, 1, dtype=torch.bool), others], dim=1)
        self.lengths = torch.randint(3, LENGTH, (count,), generator=self.generator)
        self.classes = torch.randint(0, 3, (count,), generator=self.generator)
        shape = {
            "image": (3, 16, 16),
            "audio": (340,),
            "ctc": (660,),
            "spectrogram": (16, 16),
            "speech to text": (8, 16),
        }.get(task)
        self.values = (
            torch.randn(count, *shape, generator=self.generator, dtype=torch.float64)
            if shape is not None
            else None
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        tokens, value = self.tokens[index], None if self.values is None else self.values[index]
        match self.task:
            case "causal":
                return {"input_ids": tokens, "labels": self._cut(tokens, index)}
            case "masked":
                masked = self.masked[index]
                labels = self._cut(tokens.masked_fill(~masked, -100), index)
                return {
                    "input_ids": tokens.masked_fill(masked, 3),
                    "labels": labels,
                    "attention_mask": torch.ones_like(tokens),
                }
            case "class":
                return {
                    "input_ids": tokens,
                    "labels": self.classes[index],
                    "attention_mask": torch.ones_like(tokens),
                }
            case "token class":
                return {
                    "input_ids": tokens,
                    "labels": self._cut(tokens % 5, index),
                    "attention_mask": torch.ones_like(tokens),
                }
            case "question":
                return {
                    "input_ids": tokens,
                    "start_positions": tokens[0] % LENGTH,
                    "end_positions": tokens[1] % LENGTH,
                }
            case "image":
                return {"pixel_values": value, "labels": self.classes[index]}
            case "audio" | "spectrogram":
                return {"input_values": value, "labels": self.classes[index]}
            case "ctc":
                return {"input_values": value, "labels": tokens[:6]}
            case "text to text":
                return {"input_ids": self.others[index], "labels": self._cut(tokens, index)}
            case "speech to text":
                return {"input_features": value, "labels": self._cut(tokens, index)}
        raise AssertionError(self.task)

    def _cut(self, labels: Tensor, index: int) -> Tensor:
        if not self.padded:
            return labels
        return F.pad(
            labels[: self.lengths[index]], (0, LENGTH - int(self.lengths[index])), value=-100
        )
