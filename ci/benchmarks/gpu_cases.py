"""Cases of ``gpu.py``, the most telling first: models, sizes, engines, and the operations of a
step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_ptdp.models import BertConfig, GPTConfig
from lightning_ptdp.models.size import bert_flops_per_sample, flops_per_sample

__all__ = ["CASES", "PEERS", "Case", "Engine", "Job", "flops", "jobs", "toy"]

Engine = Literal["ptdp", "ptdp-hf", "lightning", "hf", "hf-compiled", "slice"]
Options = Mapping[str, Any]

PEERS: Mapping[Engine, str] = {
    "lightning": "plain Lightning, same module",
    "hf": "Hugging Face, plain loop",
    "hf-compiled": "Hugging Face, torch.compile",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a step of it.

    Attributes:
        name: Of the rows.
        config: The model, and s.
        samples: b, of a microbatch.
        microbatches: m, of a step.
        precision: Lightning's; the same for all engines.
        engines: In order.
        options: Of the strategy.
        variants: Further ones, each of which is measured too, if this version has it.
        lora: Train adapters of rank 16 on all projections only (peft).
        tensor: t; above 1 the model's blocks alone are trained, a rank's part of them.
        published: TFLOP/s of an A100 in a paper, for the same part.
        published_tokens: Tokens/s of one H100 with NeMo AutoModel, for the same model, s and b
            (docs.nvidia.com/nemo/automodel/latest/performance/performance-summary.md).
    """

    name: str
    config: GPTConfig | BertConfig
    samples: int
    microbatches: int = 1
    precision: str = "bf16-mixed"
    engines: tuple[Engine, ...] = ("ptdp", "hf", "hf-compiled", "lightning", "ptdp-hf")
    options: Options = field(default_factory=dict)
    variants: tuple[Options, ...] = ()
    lora: bool = False
    tensor: int = 1
    published: float | None = None
    published_tokens: float | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a step."""
        return self.microbatches * self.samples * self.config.sequence_length


@dataclass(frozen=True, kw_only=True)
class Job:
    """One engine on one case, in a process of its own.

    Attributes:
        case: What is trained.
        engine: By whom.
        options: Further options of the strategy, or none.
        limit_s: How long it may take, start and compilation included.
    """

    case: Case
    engine: Engine
    options: Options = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        return 100.0 if "compile" in self.engine or "compile" in self.options else 45.0

    def __str__(self) -> str:
        changes = "".join(f" {name}={value}" for name, value in self.options.items())
        return f"{self.case.name}, {self.engine}{changes}"


def _llama(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    length: int,
    *,
    tied: bool = True,
    kv_heads: int = 8,
    vocabulary: int = 128256,
) -> GPTConfig:
    return GPTConfig.llama(
        vocabulary_size=vocabulary,
        sequence_length=length,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        rope_base=5e5,
        tie_embeddings=tied,
    )


def _gpt(
    layers: int, hidden: int, heads: int, length: int, *, vocabulary: int = 50257
) -> GPTConfig:
    return GPTConfig.gpt2(
        vocabulary_size=vocabulary,
        sequence_length=length,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
    )


# arXiv 2104.04473, table 2, with the fewest GPUs; what a rank of it holds is l / p layers, and all
# that is recomputed counts.
_SLICE: dict[str, Any] = {
    "samples": 1,
    "microbatches": 8,
    "engines": ("slice",),
    "tensor": 8,
    "variants": ({"compile": "blocks"},),
}
_RECOMPUTED: Options = {"recompute": "full"}
_SELECTIVE: Options = {"recompute": "selective", "sequence_parallel": True}
_175B, _530B = (
    _gpt(8, 12288, 96, 2048, vocabulary=51200),
    _gpt(3, 20480, 128, 2048, vocabulary=51200),
)
_SPLIT: dict[str, Any] = {
    **_SLICE,
    "options": _SELECTIVE,
    "variants": (*_SLICE["variants"], {"tensor_overlap": 4}),
}
_LEAN: dict[str, Any] = {
    "precision": "bf16-true",
    "options": {"master_weights": False, "gradient_dtype": "parameter"},
}
_LORA: dict[str, Any] = {
    "engines": ("ptdp-hf", "hf"),
    "precision": "bf16-true",
    "lora": True,
}
_COMPILED: Options = {"compile": "blocks"}
_FASTER: tuple[Options, ...] = (
    _COMPILED,
    *({**_COMPILED, "fp8": scaling} for scaling in ("tensorwise", "rowwise")),
)
_SMALLER: tuple[Options, ...] = ({"recompute": "full"}, {"recompute": "offload"})

CASES = (
    Case(
        name="GPT-2 124M s=1024", config=_gpt(12, 768, 12, 1024), samples=16, variants=(_COMPILED,)
    ),
    Case(
        name="Llama 1B s=4096",
        config=_llama(16, 2048, 8192, 32, 4096),
        samples=2,
        variants=(*_FASTER, *_SMALLER),
    ),
    Case(
        name="175B, a rank of t8 p12", config=_175B, options=_RECOMPUTED, published=153.0, **_SLICE
    ),
    Case(
        name="530B, a rank of t8 p35", config=_530B, options=_RECOMPUTED, published=171.0, **_SLICE
    ),
    Case(name="175B, a rank of t8 p12, sp", config=_175B, **_SPLIT),
    Case(name="530B, a rank of t8 p35, sp", config=_530B, **_SPLIT),
    Case(name="GPT 1.3B s=2048", config=_gpt(24, 2048, 16, 2048), samples=4),
    Case(
        name="BERT-large s=512",
        config=BertConfig(num_layers=24, hidden_size=1024, num_heads=16, dropout=0.0),
        samples=32,
    ),
    Case(
        name="Llama 3B s=4096",
        config=_llama(28, 3072, 8192, 24, 4096),
        samples=1,
        engines=("ptdp", "hf", "ptdp-hf"),
        **_LEAN,
    ),
    Case(
        name="LoRA 8B s=2048",
        config=_llama(32, 4096, 14336, 32, 2048, tied=False),
        samples=1,
        **_LORA,
    ),
    Case(
        name="LoRA 8B s=4096",
        config=_llama(32, 4096, 14336, 32, 4096, tied=False),
        samples=2,
        published_tokens=12_473,
        **_LORA,
    ),
    Case(
        name="LoRA of Qwen2.5-7B's size s=4096",
        config=_llama(28, 3584, 18944, 28, 4096, tied=False, kv_heads=4, vocabulary=152064),
        samples=2,
        published_tokens=14_110,
        **_LORA,
    ),
    Case(name="GPT-2 355M s=1024", config=_gpt(24, 1024, 16, 1024), samples=8),
    Case(
        name="GPT-2 124M s=1024 m=4",
        config=_gpt(12, 768, 12, 1024),
        samples=16,
        microbatches=4,
        engines=("ptdp", "lightning", "hf"),
    ),
    Case(name="Llama 1B s=2048", config=_llama(16, 2048, 8192, 32, 2048), samples=4),
    Case(
        name="Llama 3B s=2048",
        config=_llama(28, 3072, 8192, 24, 2048),
        samples=2,
        engines=("ptdp", "hf"),
        **_LEAN,
    ),
)


def toy(case: Case) -> Case:
    """The same with sizes for a CPU: everything is run, nothing is measured."""
    heads = 8
    changes: dict[str, Any] = {
        "vocabulary_size": 128,
        "sequence_length": 16,
        "num_layers": 2,
        "hidden_size": 8 * heads,
        "num_heads": heads,
    }
    if isinstance(case.config, GPTConfig):
        changes["num_kv_heads"] = None if case.config.num_kv_heads is None else 2
    if case.config.ffn_hidden_size is not None:
        changes["ffn_hidden_size"] = 96
    return replace(
        case,
        config=replace(case.config, **changes),
        samples=2,
        microbatches=min(case.microbatches, 2),
    )


def jobs(cases: Iterable[Case], variants: Iterable[Options] = ()) -> Iterator[Job]:
    """All engines of all cases, in their order; directly behind ours, it with each of the case's
    and the other ``variants``."""
    for case in cases:
        for engine in case.engines:
            yield Job(case=case, engine=engine)
            if engine in ("ptdp", "slice"):
                yield from (
                    Job(case=case, engine=engine, options=options)
                    for options in (*case.variants, *variants)
                )


def flops(case: Case) -> tuple[float, float]:
    """Operations of a step: with half of the attention's square, which a causal kernel skips, and
    with all of it.

    Model operations, as MFU has them (arXiv 2204.02311, appendix B); for a part of a large model
    hardware operations, as
    arXiv 2104.04473 has them. Frozen matrices have no gradient: a third of their operations is not
    there."""
    config, count = case.config, case.microbatches * case.samples
    s, h = config.sequence_length, config.hidden_size
    if isinstance(config, BertConfig):
        full = count * bert_flops_per_sample(config, predictions=s)
        return full, full
    recomputed = case.options.get("recompute") == "full"
    full = flops_per_sample(config, recompute=recomputed)
    if case.tensor > 1:
        full -= 6 * s * h * config.vocabulary_size
    attention = (4 if recomputed else 3) * 4 * s * s * h * config.num_layers
    if case.lora:
        full = attention + (full - attention) * 2 // 3
    return count * (full - attention / 2) / case.tensor, count * full / case.tensor
