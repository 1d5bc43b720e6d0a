"""Model shapes traced from the forward, against configured sizes and torch's FLOP counter."""

from dataclasses import replace

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lightning_ptdp
from lightning_ptdp.models import GPT, GPTConfig, gpt_plan
from lightning_ptdp.models.plans import find_plan
from lightning_ptdp.models.size import flops_per_sample, num_parameters
from lightning_ptdp.planner import ModelShape, Space, find_precision, find_software, gpt_sizes
from lightning_ptdp.planner.model_trace import call_with, trace_shape
from lightning_ptdp.planner.parameters import job_stages
from lightning_ptdp.shims.torch import without_data
from lightning_ptdp.strategy.checks.model import CUT_MARK
from lightning_ptdp.tensor_parallel import ParallelPlan
from lightning_ptdp.world.layout import ParallelLayout
from tests.planner import jobs
from tests.planner.jobs import SIZES, small_job

pytestmark = pytest.mark.thorough

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def layer_matrices(config):
    """Return (outputs, inputs) of a layer's matrices: qkv, projection, up and down."""
    h, q, f = config.hidden_size, config.num_heads * config.head_dim, config.ffn_size
    keys_and_values = 2 * config.kv_heads * config.head_dim
    return [(q + keys_and_values, h), (h, q), (f if config.mlp == "gelu" else 2 * f, h), (h, f)]


@pytest.mark.parametrize(
    ("name", "precision", "device"),
    [
        ("gpt2", "32-true", "cpu"),
        ("llama", "bf16-mixed", "cpu"),
        ("llama", "bf16-true", "h100"),
        ("gpt2, dropout", "bf16-true", "h100"),
    ],
)
def test_traced_shape_matches_configuration(name, precision, device):
    """Check the shape of a configuration against the built model, and against its own sizes."""
    config = jobs.MODELS[name]
    with torch.device("meta"):
        model = GPT(config)
    job = small_job(config, precision=precision, device=device, world_size=4)
    traced = trace_shape(
        model,
        gpt_plan(config, prefix=""),
        call_with(model, None, sequence_length=48),
        precision=job.precision,
        software=job.software,
        on_cpu=device == "cpu",
        sequence_length=48,
    )
    assert [count for count, _ in traced.runs] == [count for count, _ in job.shape.runs] == [4]
    assert traced.layers[0] == job.shape.layers[0]
    assert (traced.input, traced.head) == (job.shape.input, job.shape.head)
    assert traced.parameters == num_parameters(config)
    assert traced.flops() == flops_per_sample(config)
    matrices = [(one.outputs, one.inputs) for one in traced.layers[0].products]
    assert matrices == layer_matrices(config)
    for t in (2, 4):
        layout = ParallelLayout(world_size=t, tensor_parallel_size=t)
        of_traced, of_config = (
            [(stage.parameters, stage.experts) for stage in job_stages(one, layout)]
            for one in (replace(job, model=traced), job)
        )
        assert of_traced == of_config


PASSES = (
    # elementwise, norm_reads, dropout, and bytes over s h in bf16: forward, backward
    ("eager", 2, 0.0, (24 + 16, 44 + 50)),
    ("eager", 1, 0.0, (20 + 16, 28 + 50)),
    ("fused", 1, 0.1, (22 + 16, 35 + 50)),
    ("compiled", 1, 0.0, (18 + 16, 20 + 50)),
)


@pytest.mark.parametrize(("elementwise", "norm_reads", "dropout", "expected"), PASSES)
def test_elementwise_bytes_between_products(elementwise, norm_reads, dropout, expected):
    """A norm reads r and writes w, a sum reads 2 r and writes r, GELU reads and writes 4 h. In the
    backward pass a norm reads 2 r and writes r, and each stream is summed. A fused pass reads its
    inputs once."""
    config = GPTConfig.gpt2(**SIZES | {"hidden_size": 512, "dropout": dropout})
    job = small_job(config)
    software = replace(job.software, elementwise=elementwise, norm_reads=norm_reads)
    layer = replace(job, software=software).shape.layers[0]
    found = tuple(
        sum(vars(amount).values()) / (48 * 512) for amount in (layer.forward, layer.backward)
    )
    assert found == pytest.approx(expected, rel=0.01)


EXAMPLE = torch.zeros(1, 24, dtype=torch.long)


class Own(nn.Module):
    """A user's encoder."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1), 3
        )
        self.head = nn.Linear(32, 96)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


def _of_hugging_face(kind, config, **sizes):
    def build(attention):
        import transformers

        return getattr(transformers, kind)._from_config(
            getattr(transformers, config)(**sizes), attn_implementation=attention
        )

    return build


MODELS = {
    "llama": _of_hugging_face("LlamaForCausalLM", "LlamaConfig", **SMALL, num_key_value_heads=2),
    "gpt2": _of_hugging_face(
        "GPT2LMHeadModel",
        "GPT2Config",
        n_embd=32,
        n_layer=3,
        n_head=4,
        vocab_size=96,
        n_positions=64,
    ),
    "bert": _of_hugging_face("BertForMaskedLM", "BertConfig", **SMALL),
    "t5": _of_hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=96,
    ),
    "vit": _of_hugging_face(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    ),
    "own": lambda attention: Own(),
}


@pytest.mark.parametrize("name", MODELS)
def test_traced_parameters_and_flops_match_model(name):
    with torch.device("meta"):
        model, plain = MODELS[name]("sdpa"), MODELS[name]("eager")
    run = call_with(model, None, sequence_length=48)
    before = {key: (p.shape, p.is_meta) for key, p in model.named_parameters()}
    shape = trace_shape(
        model,
        find_plan(model) or ParallelPlan(),
        run,
        precision=find_precision("bf16-true"),
        software=find_software("ours"),
        on_cpu=False,
        sequence_length=48,
    )
    assert {key: (p.shape, p.is_meta) for key, p in model.named_parameters()} == before
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    with without_data(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        run(plain.train(), 2)
    forward = (
        sum(count * layer.flops for count, layer in shape.runs)
        + shape.input.flops
        + shape.head.flops
    )
    assert 2 * forward == counter.get_total_flops()
    assert shape.num_layers == (4 if name == "t5" else 3)
    # encoder and decoder layers differ, and the first of each has a position table
    if name == "t5":
        assert [count for count, _ in shape.runs] == [1, 1, 1, 1]
    assert all(layer.products[-1].cut == "inputs" for layer in shape.layers)


def test_traced_mixture_matches_configuration():
    """Routing depends on values, so experts are not traced but read from the configuration."""
    build = _of_hugging_face(
        "MixtralForCausalLM", "MixtralConfig", **SMALL, num_key_value_heads=2, num_local_experts=8
    )
    with torch.device("meta"):
        model = build("sdpa")
    traced = lightning_ptdp.plan(model, world_size=4, batch=16, sequence_length=48).job.shape
    told = replace(small_job(gpt_sizes(model.config)), sequence_length=48).shape
    assert traced.parameters == told.parameters == sum(p.numel() for p in model.parameters())
    assert traced.active_parameters == told.active_parameters
    assert traced.layers[0].experts == told.layers[0].experts
    assert traced.flops() == told.flops()


class Stubborn(Own):
    """A model whose forward depends on values."""

    def forward(self, ids):
        return super().forward(ids if ids.sum().item() else ids + 1)


class Lit(L.LightningModule):
    """A user's module with an example input."""

    def __init__(self, *, frozen: bool = False):
        super().__init__()
        self.net, self.frozen = None, frozen
        self.example_input_array = EXAMPLE

    def configure_model(self):
        self.net = self.net or Own()
        self.net.layers.requires_grad_(not self.frozen)

    def forward(self, ids):
        return self.net(ids)


def test_plan_accepts_lightning_and_torch_modules():
    module = Lit()
    plan = lightning_ptdp.plan(module, world_size=4, batch=16, device="a100")
    assert module.net is None
    assert isinstance(plan.job.model, ModelShape)
    assert plan.best[0].choice.options()["num_microbatches"] >= 1
    assert {candidate.choice.layout.tensor_parallel_size for candidate in plan.best} > {1}
    given = lightning_ptdp.plan(
        Own(),
        world_size=4,
        batch=16,
        example=EXAMPLE,
        space=Space(pipeline_parallel_sizes=(2,)),
    )
    assert given.job.shape.runs[0][1].products == plan.job.shape.runs[0][1].products
    assert given.job.sequence_length == 24
    own = lightning_ptdp.plan(GPT(jobs.MODELS["gpt2"]), world_size=2, batch=4).job
    assert own.shape.parameters == num_parameters(jobs.MODELS["gpt2"])


def test_frozen_parameters_reduce_optimizer_memory_and_flops():
    module = Own()
    for parameter in module.layers.parameters():
        parameter.requires_grad_(False)
    whole, frozen = (
        lightning_ptdp.plan(one, world_size=1, batch=4, example=EXAMPLE) for one in (Own(), module)
    )
    share = frozen.job.trained
    assert share == sum(p.numel() for p in module.parameters() if p.requires_grad) / sum(
        p.numel() for p in module.parameters()
    )
    assert 0 < share < whole.job.trained == 1
    found = {plan.job.trained: plan.best[-1] for plan in (whole, frozen)}
    assert found[share].memory.optimizer == pytest.approx(share * found[1].memory.optimizer)
    assert found[share].time.model_flops < found[1].time.model_flops


def cut_already():
    module = Own()
    vars(module)[CUT_MARK] = "t2"
    return module


class Student(nn.Module):
    """Calls a frozen teacher beside the trained model."""

    def __init__(self, *, traced: bool = True):
        super().__init__()
        self.student, self.teacher = (
            GPT(jobs.MODELS["gpt2"]),
            GPT(jobs.MODELS["gpt2"]).requires_grad_(False),
        )
        self.traced = traced

    def forward(self, input_ids):
        both = self.student(input_ids) + self.teacher(input_ids)
        return both if self.traced else both.sum().item()


def test_frozen_teacher_counts():
    plan = lightning_ptdp.plan(Student(), world_size=2, batch=16, example=EXAMPLE)
    expected = sum(p.numel() for p in Student().parameters())
    assert plan.job.shape.parameters == expected


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (
            lambda: Student(traced=False),
            {"example": EXAMPLE},
            "the sizes of Student cannot be determined: the forward of Student",
        ),
        (
            Stubborn,
            {"sequence_length": 24},
            "forward of Stubborn cannot be traced without data: '' failed .*--layers 24",
        ),
        (Own, {}, "the sequence length of Own is unknown. Pass sequence_length="),
        (
            Own,
            {"example": EXAMPLE, "sequence_length": 48},
            "sequence_length=48, but the example has 24 tokens",
        ),
        (
            lambda: GPT(jobs.MODELS["gpt2"]),
            {"sequence_length": 4096},
            "sequence_length=4096 is longer than the model's",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            {},
            "the inputs of Sequential are unknown. Pass example=",
        ),
        (
            cut_already,
            {},
            "the sizes of Own cannot be determined: it was already cut for a layout",
        ),
    ],
    ids=["two models", "values", "length", "example", "longer", "inputs", "cut"],
)
def test_untraceable_model_is_refused(make, options, words):
    with pytest.raises(ValueError, match=words):
        lightning_ptdp.plan(make(), world_size=4, batch=16, **options)
