"""Invalid requests are refused before a process is started or a file is written.

The error names the field, its value and working alternatives.
"""

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ptdp.models import GPTConfig, LitGPT
from lightning_ptdp.schedule import Action, CustomSchedule
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.conformance.toys import LitNet, loader
from tests.errors import raises_with
from tests.letters import A, C, M, P, T, V
from tests.parity import make_trainer

pytestmark = pytest.mark.thorough


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """Fail if the test starts a process or writes a file."""

    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("torch.multiprocessing.start_processes", refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir()), "a file was written"


class LitManual(LitNet):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class LitBackward(LitNet):
    def backward(self, loss, *args, **kwargs):
        loss.backward()


class LitLate(LitNet):
    """Module whose layers are built in ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


class LitNoContainer(LitNet):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)


class LitScripted(LitNet):
    """Module with a traced layer."""

    def __init__(self):
        super().__init__()
        self.net[0] = torch.jit.trace(self.net[0], torch.zeros(1, self.net[0].in_features))


class LitWrapped(LitLate):
    """Module that is compiled as a whole."""

    def configure_model(self):
        if self.net is None:
            super().configure_model()
            self.net = torch.compile(self.net)


class LitWrongPlan(LitNet):
    def configure_parallel(self):
        return {"net.0": "column"}


def gpt(**sizes):
    return LitGPT(
        GPTConfig.gpt2(
            **(
                {"vocabulary_size": 32, "num_layers": 4, "hidden_size": 12, "sequence_length": 8}
                | sizes
            )
        )
    )


def stuck(p, v, m):
    """Return a schedule that starts with the backward of the first stage."""
    return [
        [Action.parse("B0.0"), Action.parse("F0.0")],
        [Action.parse("F1.0"), Action.parse("B1.0")],
    ]


def plan(**tensor):
    return ParallelPlan(tensor={name.replace("_", "."): kind for name, kind in tensor.items()})


class LitEager(LitNet):
    """Module with a Hugging Face model whose attention cannot be intercepted."""

    def __init__(self):
        super().__init__()
        import transformers

        sizes = {
            "vocab_size": 32,
            "n_embd": 8,
            "n_head": 2,
            "n_layer": 1,
            "attn_implementation": "eager",
        }
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


class LitHooked(LitNet):
    """Module with a forward hook on a layer that tensor parallelism replaces."""

    def __init__(self):
        super().__init__()
        self.net[0].register_forward_hook(lambda *_: None)


class LitPreHooked(LitNet):
    """Module with a hook before the forward of such a layer."""

    def __init__(self):
        super().__init__()
        self.net[0].register_forward_pre_hook(lambda _, args: (args[0] / 2,))


class LitBackwardHooked(LitNet):
    """Module with a hook on the backward of such a layer."""

    def __init__(self):
        super().__init__()
        self.net[0].register_full_backward_hook(lambda _, grads, __: (grads[0] / 2,))


class LitPatched(LitNet):
    """Module with another forward of such a layer, set on the object."""

    def __init__(self):
        super().__init__()
        layer = self.net[0]
        layer.forward = lambda x: nn.Linear.forward(layer, x) / 2


class LitAttentions(LitNet):
    """Module that requests the attention weights of all heads."""

    def __init__(self):
        super().__init__()
        import transformers

        sizes = {
            "vocab_size": 32,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        }
        config = transformers.LlamaConfig(
            **sizes, output_attentions=True, attn_implementation="eager"
        )
        self.model = transformers.LlamaForCausalLM(config)


class LitParametrized(LitNet):
    """Module with weight norm, built in ``configure_model``."""

    def __init__(self):
        super().__init__()
        del self.net

    def configure_model(self):
        self.net = nn.Sequential(
            *(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(4))
        )


CASES = {
    "world size": (3, {P: 2}, LitNet, 8, ["world_size=3", "tensor_parallel_size", "2 or 4"]),
    "nodes": (
        4,
        {"data_parallel_replicas": 3},
        LitNet,
        8,
        ["data_parallel_replicas=3", "data_parallel_size of 4", "[1, 2, 4]"],
    ),
    "layers": (8, {P: 4, V: 2}, LitNet, 8, ["7", "pipeline_parallel_size", "8"]),
    "layers built late": (4, {P: 4}, LitLate, 8, ["3", "pipeline_parallel_size"]),
    "partition": (2, {P: 2, "partition": [3, 3]}, LitNet, 8, ["[3, 3]", "num_layers=7", "Add 1"]),
    "partition by name": (
        2,
        {P: 2, "partition": ["net.0", "net.9"]},
        LitNet,
        8,
        ["net.9", "net.6"],
    ),
    "selective": (
        2,
        {P: 2, "recompute": "selective"},
        LitNet,
        8,
        ["recompute='selective'", "ParallelPlan(selective="],
    ),
    "recomputed layers": (
        2,
        {P: 2, "recompute": "full", "recompute_layers": 9},
        LitNet,
        8,
        ["recompute_layers=9", "at most 4"],
    ),
    "batch": (
        2,
        {P: 2, M: 4},
        LitNet,
        2,
        ["num_microbatches=4", "batch of 2", "num_microbatches=2"],
    ),
    "heads": (
        2,
        {T: 2},
        lambda: gpt(num_heads=3),
        8,
        ["num_heads=3", "tensor_parallel_size=2", "For this model"],
    ),
    "context heads": (
        2,
        {C: 2, A: "all_to_all"},
        lambda: gpt(num_heads=3),
        8,
        ["3 heads", "context_parallel_size=2", "'ring'"],
    ),
    "context eager": (
        2,
        {C: 2},
        LitEager,
        8,
        ["context_parallel_size=2", "attn_implementation='eager'", "'sdpa'"],
    ),
    "context world": (3, {C: 2}, LitNet, 8, ["world_size=3", "context_parallel_size", "2 or 4"]),
    "features": (
        2,
        {T: 2, "plan": plan(net_6="column")},
        LitNet,
        8,
        ["net.6", "out_features=1", "tensor_parallel_size"],
    ),
    "pattern": (
        2,
        {T: 2, "plan": plan(nut_0="column")},
        LitNet,
        8,
        ["nut.0", "matches no module", "net.0"],
    ),
    "kind": (2, {T: 2, "plan": plan(net_1="column")}, LitNet, 8, ["net.1", "ReLU", "nn.Linear"]),
    "blocks": (2, {P: 2, "plan": ParallelPlan(blocks="nets")}, LitNet, 8, ["blocks='nets'", "net"]),
    "no container": (2, {P: 2}, LitNoContainer, 8, ["LitNoContainer", "nn.Sequential", "blocks="]),
    "no plan": (
        2,
        {T: 2},
        LitNet,
        8,
        ["tensor_parallel_size=2", "plan=ParallelPlan", "configure_parallel"],
    ),
    "plan type": (2, {T: 2}, LitWrongPlan, 8, ["configure_parallel", "dict", "ParallelPlan"]),
    "manual optimization": (
        2,
        {P: 2},
        LitManual,
        8,
        ["automatic_optimization=False", "Use automatic optimization"],
    ),
    "parametrized": (
        2,
        {P: 2},
        LitParametrized,
        8,
        ["net.0' is parametrized", "configure_model", "meta_init=False"],
    ),
    "compiled": (
        2,
        {P: 2},
        LitWrapped,
        8,
        ["net is wrapped by torch.compile()", "compile='blocks'"],
    ),
    "scripted": (
        2,
        {P: 2},
        LitScripted,
        8,
        ["net.0 is a module of torch.jit", "t1 p2 d1", "was scripted or traced"],
    ),
    "hook": (
        2,
        {T: 2, "plan": plan(net_0="column")},
        LitHooked,
        8,
        ["'net.0' has a forward hook", "the parent module"],
    ),
    "hook before": (
        2,
        {T: 2, "plan": plan(net_0="column")},
        LitPreHooked,
        8,
        ["'net.0' has a forward pre-hook", "the parent module"],
    ),
    "hook of backward": (
        2,
        {T: 2, "plan": plan(net_0="column")},
        LitBackwardHooked,
        8,
        ["'net.0' has a backward hook", "the parent module"],
    ),
    "patched": (
        2,
        {T: 2, "plan": plan(net_0="column")},
        LitPatched,
        8,
        ["'net.0' is a Linear", "its forward is not that of nn.Linear"],
    ),
    "attentions": (
        2,
        {T: 2},
        LitAttentions,
        8,
        ["output_attentions=True cannot be combined with tensor_parallel_size"],
    ),
    "symmetric memory": (
        2,
        {T: 2, "sequence_parallel": True, "tensor_overlap": "symmetric"},
        gpt,
        8,
        ["tensor_overlap='symmetric'", "'cpu'", "tensor_overlap=4"],
    ),
    "own backward": (2, {P: 2}, LitBackward, 8, ["LightningModule.backward", "on_after_backward"]),
}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("start_method", ["popen", "fork"])
@pytest.mark.parametrize("name", CASES)
def test_invalid_fit_is_refused_before_launch(name, start_method):
    devices, layout, module, batch_size, words = CASES[name]
    with raises_with(words, (ValueError, MisconfigurationException)):
        strategy = PTDPStrategy(**layout, start_method=start_method)
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1)
        trainer.fit(module(), loader(batch_size=batch_size))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "1f1c"}, ["1f1c", "1f1b"]),
        ({"start_method": "popn"}, ["start_method='popn'", "'popen'"]),
        ({"num_microbatches": 0}, ["num_microbatches=0", "positive"]),
        ({"bucket_mb": 0}, ["bucket_mb=0", "greater than 0"]),
        ({"timeout_s": -1.0}, ["timeout_s=-1.0", "greater than 0"]),
        ({P: 0}, ["pipeline_parallel_size=0", "positive"]),
        ({V: 2}, ["virtual_pipeline_size=2", "pipeline_parallel_size"]),
        ({"sequence_parallel": True}, ["sequence_parallel", "tensor_parallel_size"]),
        ({P: 2, "partition": [1, 1, 1]}, ["partition=[1, 1, 1]", "3 entries", "= 2"]),
        ({P: 2, V: 2, "schedule": "1f1b"}, ["1f1b", "virtual_pipeline_size=2"]),
        ({P: 2, "schedule": "interleaved_1f1b"}, ["virtual_pipeline_size=1", "'1f1b'"]),
        (
            {P: 2, "schedule": "zb_v"},
            ["virtual_pipeline_size=1", "virtual_pipeline_size=2", "'zb_h1'"],
        ),
        (
            {P: 2, V: 3, "schedule": "dualpipe_v"},
            ["virtual_pipeline_size=3", "virtual_pipeline_size=2"],
        ),
        (
            {P: 2, V: 2, "microbatch_group_size": 1},
            ["microbatch_group_size=1", "pipeline_parallel_size=2"],
        ),
        ({P: 2, "microbatch_group_size": 2}, ["microbatch_group_size=2", "interleaved_1f1b"]),
        ({P: 2, "schedule": "none.csv"}, ["none.csv"]),
        ({P: 2, "schedule": CustomSchedule("mine", stuck)}, ["mine", "B0.0"]),
        ({C: 0}, ["context_parallel_size=0", "positive"]),
        ({A: "rings"}, ["context_parallel_attention='rings'", "'ring', 'all_to_all'"]),
        ({"data_parallel_replicas": 0}, ["data_parallel_replicas=0", "positive"]),
        ({"gradient_dtype": "bfloat16"}, ["gradient_dtype='bfloat16'", "'parameter'"]),
        ({"reduce_dtype": "bf16"}, ["reduce_dtype='bf16'", "'bfloat16'"]),
        (
            {"inter_node_reduce_dtype": "bfloat16"},
            ["inter_node_reduce_dtype", "data_parallel_replicas=1"],
        ),
        ({T: 2, "tensor_overlap": 4}, ["tensor_overlap=4", "sequence_parallel=True"]),
        (
            {T: 2, "sequence_parallel": True, "tensor_overlap": 4, "fp8": "rowwise"},
            ["tensor_overlap=4", "fp8='rowwise'"],
        ),
        ({"channel_ctas": 4}, ["channel_ctas=4", "pipeline_parallel_size=1"]),
        ({P: 2, "channel_ctas": 64}, ["channel_ctas=64", "at most 32"]),
        ({"check_finite": "warn"}, ["check_finite='warn'", "'skip'"]),
        ({"recompute": "ful"}, ["recompute='ful'", "'offload'; did you mean 'full'?"]),
        (
            {"recompute": "full", "recompute_layers": -1},
            ["recompute_layers=-1", "an integer of at least 0"],
        ),
        (
            {"recompute": "full", "recompute_layers": [1, "2"]},
            ["recompute_layers=(1, '2')", "an integer of at least 0"],
        ),
        ({"recompute_layers": 2}, ["recompute_layers=2", "recompute='none'"]),
        (
            {"distribute_saved_activations": True},
            ["distribute_saved_activations", "recompute='full' (it is 'none')", "size > 1"],
        ),
        (
            {
                "distribute_saved_activations": True,
                "recompute": "full",
                T: 2,
                "sequence_parallel": True,
            },
            ["needs sequence_parallel=False", "already splits"],
        ),
    ],
)
def test_invalid_strategy_options_are_refused(options, words):
    with raises_with(words):
        PTDPStrategy(**options)


def test_unknown_option_is_named():
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        PTDPStrategy(tensor_paralel_size=2)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["F0.0,B0.0", "F1.0"], ["B1.0"]),
        (["F0.0,B0.0,F0.1,B0.1", "F1.1,B1.1,F1.0,B1.0"], ["deadlocks", "F1.1 waits for F0.1"]),
        (["F0.0,G0.0", "F1.0,B1.0"], ["line 1", "G0.0"]),
        (["F0.0,B0.0", "F1.0,B1.0", "F2.0,B2.0"], ["pipeline_parallel_size=3", "not 2"]),
    ],
)
def test_invalid_schedule_file_is_refused(tmp_path, lines, words):
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines))
    with raises_with(["mine.csv", *words]):
        PTDPStrategy(pipeline_parallel_size=2, schedule=str(path))


class LitTwoOptimizers(LitNet):
    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.parameters(), lr=0.1),
            torch.optim.SGD(self.parameters(), lr=0.2),
        ]


class LitLBFGS(LitNet):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class LitSkips(LitNet):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


def error_of(rank, module, layout, options, data):
    """Return the type and message of the error that ``fit`` raises on this rank."""
    trainer = make_trainer(PTDPStrategy(**layout), 2, max_epochs=1, **options)
    try:
        trainer.fit(module(), data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Tokens(torch.utils.data.Dataset):
    """Sequences of 7 tokens."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"input_ids": torch.arange(7), "labels": torch.arange(7)}


def odd_tokens():
    return torch.utils.data.DataLoader(Tokens(), batch_size=4)


def small_gpt():
    return gpt(num_heads=4, hidden_size=16)


AT_START = {
    "two optimizers": (
        LitTwoOptimizers,
        {P: 2},
        {},
        loader,
        ["MisconfigurationException", "several optimizers", "parameter groups"],
    ),
    "an optimizer of all parameters": (
        LitLBFGS,
        {"shard": "parameters"},
        {},
        loader,
        [
            "MixingOptimizerError",
            "LBFGS does not work element by element",
            "shard='none'",
        ],
    ),
    "skipped step": (
        LitSkips,
        {P: 2, "timeout_s": 6},
        {},
        loader,
        ["ValueError", "NoneType", "'loss'"],
    ),
    "sequence length": (
        small_gpt,
        {T: 2, "sequence_parallel": True},
        {},
        odd_tokens,
        ["ValueError", "7", "tensor_parallel_size=2", "sequence_parallel"],
    ),
    "context length": (
        small_gpt,
        {C: 2},
        {},
        odd_tokens,
        ["ValueError", "7 tokens", "context_parallel_size=2", "multiple of 4"],
    ),
    "no attention": (
        LitNet,
        {C: 2},
        {},
        loader,
        ["ContextParallelError", "position_ids", "context_parallel_positions=False"],
    ),
}


@pytest.mark.parametrize("name", AT_START)
def test_invalid_module_is_refused_during_fit(name, pool):
    module, layout, options, data, words = AT_START[name]
    errors = pool.run(error_of, world_size=2, args=(module, layout, options, data))
    assert "nothing" not in errors
    assert any(all(word in error for word in words) for error in errors), errors


class LitWithoutValues(LitLate):
    """Module whose error is found after its layers were built on the meta device."""

    def configure_parallel(self):
        return plan(nut_0="column")


def test_setup_error_is_not_hidden_by_teardown(tmp_path):
    trainer = L.Trainer(
        strategy=PTDPStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=1,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match=r"'nut\.0' matches no module"):
        trainer.fit(LitWithoutValues(), loader(batch_size=8))
