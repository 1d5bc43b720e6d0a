"""peft adapters in a user's LightningModule train in every layout like in a single process (see
test_exact for gradients in float64)."""

import math
import re
from dataclasses import replace

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ptdp.checkpoint import TensorReader, read_full
from lightning_ptdp.cli import main
from lightning_ptdp.exchange import convert
from lightning_ptdp.models import AdamWConfig, LitCausalLM, LoraOptions
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.checks.model import check_model
from lightning_ptdp.strategy.user_frames import is_allowed_loop
from tests.huggingface.runs import LAYOUTS, SAMPLES, LitHuggingFace, Run, Samples, make_model
from tests.models.fits import quiet_trainer
from tests.optional import needs
from tests.parity import assert_near, make_trainer
from tests.pool import WorkerFailure

pytestmark = [pytest.mark.thorough, needs("peft")]

OPTIMIZER = AdamWConfig(learning_rate=5e-3, eps=1e-3, weight_decay=0.01, decay_steps=4)


def adapted(model="llama", layout=None, **options):
    return Run(model=model, options=(("lora", tuple(options.items())),), layout=layout or {})


@pytest.mark.parametrize(
    "layout",
    [
        *("t2", "t2sp", "p2v2", "t2p2", "c2"),
        *("d2 sharded", "d2 sharded gradients", "d2 sharded parameters"),
    ],
)
def test_adapters_match_single_process(layout, parity):
    parity.check(adapted(target_modules=r".*(_proj|lm_head|embed_tokens)"), LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["t2", "t2sp"])
def test_adapter_dropout_matches_single_process(layout, parity):
    run = adapted("gpt2", {"keyed_dropout": True}, lora_dropout=0.1, init_lora_weights="gaussian")
    parity.check(run, LAYOUTS[layout])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("base") / "llama"
    make_model("llama").save_pretrained(path, max_shard_size="20KB")
    return path


def causal(run):
    assert run.pretrained is not None
    return LitCausalLM(
        run.pretrained,
        adapter=LoraOptions(**{"r": 3, "modules_to_save": ("norm",), **dict(run.options)}),
        optimizer=OPTIMIZER,
    )


@pytest.mark.parametrize("layout", ["t2", "p2v2"])
def test_trained_copy_of_tied_head_matches_single_process(layout, parity, tmp_path):
    """The folder has the embedding alone."""
    torch.manual_seed(5)
    tied = make_model("llama", tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    options = (("modules_to_save", ("lm_head",)),)
    run = Run(model="labelled", module=causal, pretrained=str(tmp_path), options=options)
    begun = parity.check(run, LAYOUTS[layout])[0]["initial"]
    copy = begun["model.lm_head.modules_to_save.default.weight"]
    assert torch.equal(copy, tied.lm_head.weight)


@pytest.mark.parametrize("options", [{"bias": "all"}, {"modules_to_save": ("norm", "lm_head")}])
def test_half_precision_base_computes_with_trained_parts(options):
    model = make_model("llama", attention_bias=True).bfloat16()
    LoraOptions(r=3, **options).inject(model)
    model(torch.arange(1, 5)[None]).logits.sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all((p.dtype == torch.float32) == (".lora_" in name) for name, p in trained.items())
    assert any(".lora_" not in name for name in trained)


def test_adapter_checkpoint_resumes_in_other_layout(parity, folder, tmp_path):
    run = Run(model="labelled", module=causal, pretrained=str(folder), global_batch=SAMPLES)
    expected = parity.result(run)
    saved = str(tmp_path / "saved")
    half = replace(run, steps=1, save=saved).on(LAYOUTS["t2"])
    assert_near(parity.ranks(half)[0]["losses"], expected["losses"][:1], 1e-5, "losses")
    weights = {name: value for name, value in read_full(saved).items() if name.startswith("model.")}
    trained = {
        name for name in expected["final"] if ".lora_" in name or ".modules_to_save." in name
    }
    assert weights.keys() == trained
    elements = [
        math.prod(entry.shape)
        for entry in TensorReader(saved).tensors.values()
        if math.prod(entry.shape) > 1
    ]
    # each weight has two states of Adam
    assert sum(elements) == 3 * sum(value.numel() for value in weights.values())
    # peft's own count on one process
    import peft

    lora = LoraOptions(r=3, modules_to_save=("norm",)).config()
    model = peft.get_peft_model(make_model("llama"), lora)
    assert (
        sum(value.numel() for value in weights.values()) == model.get_nb_trainable_parameters()[0]
    )
    rest = parity.ranks(replace(run, resume=saved).on(LAYOUTS["p2v2"]))[0]
    assert_near(rest["losses"], expected["losses"][1:], 1e-5, "losses")
    for name, value in expected["final"].items():
        torch.testing.assert_close(rest["final"][name], value, rtol=1e-5, atol=1e-6)
    with open(next(folder.glob("*.safetensors")), "r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"\1\2\3\4")
    with pytest.raises(
        WorkerFailure,
        match="does not have the weights with which the checkpoint's adapters were trained",
    ):
        parity.ranks(replace(run, resume=saved))


def test_adapter_and_merged_folder_have_equal_logits(parity, tmp_path, capsys):
    import peft
    import transformers

    saved, base = str(tmp_path / "saved"), str(tmp_path / "base")
    torch.manual_seed(6)
    make_model("llama").save_pretrained(base)
    more = (
        ("use_rslora", True),
        ("target_modules", ("q_proj", "down_proj", "lm_head", "embed_tokens")),
    )
    run = Run(
        model="labelled",
        module=causal,
        pretrained=base,
        save=saved,
        options=more,
        layout={"tensor_parallel_size": 2},
        world_size=2,
    )
    final = parity.ranks(run)[0]["final"]
    lit = causal(run)
    lit.configure_model()
    lit.load_state_dict({name: value for name, value in final.items() if name.startswith("model.")})
    tokens = torch.arange(1, 13)[None]
    expected = lit.model.eval()(input_ids=tokens).logits
    assert main(["convert", saved, str(tmp_path / "adapter"), "--verify"]) == 2
    assert re.search(
        r"--verify.* need a Hugging Face folder, .* would be of the kind .adapter",
        capsys.readouterr().err,
    )
    with pytest.raises(ValueError, match="merge creates a Hugging Face folder"):
        convert(saved, tmp_path / "adapter", to="adapter", merge=True)
    assert not (tmp_path / "adapter").exists()
    assert convert(saved, tmp_path / "adapter") == "adapter"
    assert convert(saved, tmp_path / "merged", merge=True) == "huggingface"
    untrained = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert (untrained(input_ids=tokens).logits - expected).abs().max() > 1e-3
    adapted = peft.PeftModel.from_pretrained(untrained, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(adapted(input_ids=tokens).logits, expected)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["p2", "d2", "d2 sharded parameters"])
def test_dora_magnitudes_are_initialized_as_weight_norms(layout, parity, tmp_path):
    torch.manual_seed(7)
    base = make_model("llama")
    base.save_pretrained(tmp_path)
    options = (("use_dora", True), ("target_modules", ("q_proj", "down_proj")))
    run = Run(model="labelled", module=causal, pretrained=str(tmp_path), options=options)
    parity.check(run, LAYOUTS[layout])
    begun = parity.result(run)["initial"]
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        found = begun[f"model.model.layers.1.{name}.lora_magnitude_vector.default.weight"]
        torch.testing.assert_close(
            found, base.get_submodule(f"model.layers.1.{name}").weight.norm(dim=1)
        )


class Tuned(LitHuggingFace):
    """A model with another tuner of peft."""

    def __init__(self, run=Run(model="llama"), tuner="IA3Config", **options):  # noqa: B008
        super().__init__(run)
        self.tuner, self.options = tuner, options

    def configure_model(self):
        import peft

        if self.model is None:
            config = getattr(peft, self.tuner)(task_type="CAUSAL_LM", **self.options)
            self.model = peft.get_peft_model(make_model("llama"), config)


class AgainstBase(LitHuggingFace):
    """Stays near the model without its adapters, as in DPO with peft's own switch."""

    def training_step(self, batch, batch_idx):
        inputs = {"input_ids": batch["input_ids"]}
        with torch.no_grad(), self.model.disable_adapter():
            base = self.model(**inputs).logits.log_softmax(-1)
        tuned = self.model(**inputs).logits.log_softmax(-1)
        return (tuned - base + 0.01).square().sum(-1).mean()


@pytest.mark.parametrize("layout", ["t2", "t2sp"])
def test_step_that_disables_adapters_matches_single_process(layout, parity):
    run = adapted(target_modules=r".*_proj", init_lora_weights="gaussian")
    parity.check(replace(run, module=AgainstBase), LAYOUTS[layout])


def test_penalty_on_adapters_of_other_stages_is_refused_before_launch():
    strategy = PTDPStrategy(pipeline_parallel_size=2)
    module = Tuned(tuner="AdaLoraConfig", total_step=9)
    with pytest.raises(ValueError, match=r"penalty on the adapters.*pipeline_parallel_size=1"):
        check_model(module, strategy.config, strategy.config.layout(2))


def test_loop_of_a_forward_of_peft_is_not_allowed():
    """AdaLoRA's forward adds a penalty over the parameters."""
    names = {"__name__": "peft.tuners.adapter"}
    exec("def forward(call): return call()\ndef switch(call): return call()", names)
    assert names["switch"](is_allowed_loop)
    assert not names["forward"](is_allowed_loop)
    assert not is_allowed_loop()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            lambda: LitHuggingFace(adapted(use_dora=True)),
            r"the adapter 'default' of 'model.base_model.model.*' is DoraLinear of peft",
        ),
        (
            Tuned,
            r"the adapter 'default' is IA3 of peft, which tensor_parallel_size > 1 cannot split",
        ),
        (
            lambda: Tuned(tuner="PromptTuningConfig", num_virtual_tokens=2),
            r"the adapter 'default' is PROMPT_TUNING of peft, which tensor_parallel_size > 1 cannot",
        ),
    ],
)
def test_unsplittable_adapter_is_refused_before_launch(module, said):
    strategy = PTDPStrategy(tensor_parallel_size=2)
    with pytest.raises(ValueError, match=said):
        check_model(module(), strategy.config, strategy.config.layout(2))


def test_ia3_tuner_trains_in_pipeline(parity):
    parity.check(Run(model="llama", module=Tuned, layout={"meta_init": False}), LAYOUTS["p2"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"target_modules": ("q_prj",)},
            r"adapter.target_modules: 'q_prj' is not a module of LlamaForCausalLM; nearest names: "
            r"q_proj",
        ),
        (
            {"modules_to_save": ("lm_haed",)},
            r"adapter.modules_to_save: 'lm_haed' .* nearest names: lm_head",
        ),
        ({"r": 0}, r"r=0 must be"),
        ({"dropout": 1.0}, r"dropout=1.0 must be at least 0 and less than 1"),
    ],
)
def test_invalid_adapter_options_are_refused(options, said, folder):
    with pytest.raises(ValueError, match=said):
        LitCausalLM(str(folder), adapter=LoraOptions(**options))


@pytest.mark.parametrize("change", [{"alpha": 32.0}, {"use_rslora": True}, {"r": 4}])
def test_checkpoint_with_other_adapter_options_is_refused(change, folder):
    checkpoint = {
        "hyper_parameters": dict(LitCausalLM(str(folder), adapter=LoraOptions(r=8)).hparams)
    }
    LitCausalLM(str(folder), adapter=LoraOptions(r=8, dropout=0.1)).on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=rf"the checkpoint has adapter.{next(iter(change))}="):
        LitCausalLM(str(folder), adapter=LoraOptions(**{"r": 8, **change})).on_load_checkpoint(
            checkpoint
        )


def test_checkpoint_is_refused_if_only_one_side_has_adapter(folder):
    plain, adapted = LitCausalLM(str(folder)), LitCausalLM(str(folder), adapter=LoraOptions())
    for lit, other, said in (
        (plain, adapted, "Set model.adapter as in that training"),
        (adapted, plain, "Convert it to a folder"),
    ):
        with pytest.raises(ValueError, match=said):
            lit.on_load_checkpoint({"hyper_parameters": dict(other.hparams)})
        lit.on_load_checkpoint({"hyper_parameters": dict(lit.hparams)})


def count(rank, folder):
    """Count the elements that training keeps for bfloat16 weights with float32 masters."""
    module = LitCausalLM(folder, adapter=LoraOptions(r=3), dtype="bfloat16", optimizer=OPTIMIZER)
    strategy = PTDPStrategy(master_weights=True)
    trainer = make_trainer(strategy, 2, max_steps=2, precision="bf16-true", limit_val_batches=0)
    found = {}

    class Look(L.Callback):
        def on_train_batch_end(self, *_):
            gradients = strategy.engine.gradients
            store = gradients._store
            found["buckets"] = sum(bucket.buffer.numel() for bucket in store.buckets())
            stepped = [one.stepped for one in store.parameters if one.stepped is not None]
            found["stepped"] = sum(tensor.numel() for tensor in stepped)
            states = [
                state for entry in trainer.optimizers[0].state.values() for state in entry.values()
            ]
            found["states"] = sum(state.numel() for state in states if state.dim())
            found["gradients"] = sum(p.numel() for p in module.parameters() if p.grad is not None)
            found["trained"] = sum(p.numel() for p in module.parameters() if p.requires_grad)

    trainer.callbacks.append(Look())
    trainer.fit(module, DataLoader(Samples("labelled"), batch_size=4))
    return found


def test_frozen_weights_need_no_training_memory(pool, tmp_path):
    import peft

    make_model("llama").save_pretrained(tmp_path)
    trained = peft.get_peft_model(
        make_model("llama"), LoraOptions(r=3).config()
    ).get_nb_trainable_parameters()[0]
    for found in pool.run(count, world_size=2, args=(str(tmp_path),)):
        assert found["trained"] == trained
        assert found["stepped"] == trained
        assert found["states"] == 2 * trained
        assert found["buckets"] <= 1.1 * trained + 64
        assert found["gradients"] <= trained


def whole_adapters(rank, model, layout):
    """Train adapters with dropout and return the adapter parameters that all ranks hold."""
    module = LitHuggingFace(adapted(model, lora_dropout=0.2, init_lora_weights=False))
    trainer = make_trainer(
        PTDPStrategy(tensor_parallel_size=2, **layout), 2, max_steps=2, limit_val_batches=0
    )
    trainer.fit(module, DataLoader(Samples(model), batch_size=4))
    parameters = trainer.strategy.parallel.parameters
    held = {
        managed.name: p.detach()
        for p, managed in parameters.items()
        if ".lora_" in managed.name and "tensor" not in managed.placement.sharded
    }
    assert held
    return held


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", [{}, {"sequence_parallel": True, "recompute": "full"}])
def test_replicated_adapter_weights_stay_equal_with_dropout(model, layout, pool):
    one, other = pool.run(whole_adapters, world_size=2, args=(model, layout))
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_sharing_of_quantized_weights_is_refused_before_training(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    refusal = r"q_proj.weight' is a Int8Tensor of torchao.quantization.* cannot shard over"

    def quantize(layers):
        quantization.quantize_(layers, quantization.Int8WeightOnlyConfig())
        weight = layers[0].self_attn.q_proj.weight
        weight.qdata = weight.qdata.flatten()  # as formats with several elements in a byte

    module = LitHuggingFace(Run(model="llama", eager=True))
    quantize(module.model.model.layers)
    strategy = PTDPStrategy(shard="parameters")
    with pytest.raises(ValueError, match=refusal):
        check_model(module, strategy.config, strategy.config.layout(2))

    class Late(LitHuggingFace):
        def configure_model(self):
            super().configure_model()
            quantize(self.model.model.layers)

    strategy = PTDPStrategy(pipeline_parallel_size=2, shard="parameters")
    with pytest.raises(ValueError, match=refusal):
        check_model(Late(Run(model="llama")), strategy.config, strategy.config.layout(4))
    trainer = quiet_trainer(tmp_path, strategy=PTDPStrategy(shard="parameters"), max_steps=1)
    with pytest.raises(ValueError, match=refusal):
        trainer.fit(Late(Run(model="llama")), DataLoader(Samples("llama"), batch_size=2))
