"""Adapters on quantized weights (QLoRA, arXiv 2305.14314) train like in one process.

The weights are those of bitsandbytes and of torchao."""

import gc
import os
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lightning_ptdp.data_parallel.sharded_parameters import ShardedParameters
from lightning_ptdp.planner import find_device, search
from lightning_ptdp.planner.replica_cost import static_bytes
from lightning_ptdp.shims.quantization import parts_of
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.checks.model import check_model
from lightning_ptdp.strategy.planning import described_choice, described_job
from tests.huggingface.runs import LAYOUTS, LENGTH, SAMPLES, LitHuggingFace, Run, make_model
from tests.letters import M, P, V
from tests.optional import needs
from tests.parity import assert_near
from tests.pool import WorkerFailure

pytestmark = [pytest.mark.thorough, needs("peft", "bitsandbytes", "torchao")]


def quantized_model(folder, kind):
    import transformers

    config: Any
    if kind == "8 bits":
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    elif kind.startswith("torchao"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        float8 = kind == "torchao float8"
        config = transformers.TorchAoConfig(
            Float8WeightOnlyConfig() if float8 else Int8WeightOnlyConfig()
        )
    else:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )


class LitQuantized(LitHuggingFace):
    """A quantized base under adapters, as people write it: built whole in ``__init__``."""

    def __init__(self, run: Run) -> None:
        LitHuggingFace.__init__(self, replace(run, eager=False))
        import peft

        assert run.pretrained is not None
        torch.manual_seed(3)
        base = quantized_model(run.pretrained, dict(run.options)["kind"])
        self.model = peft.get_peft_model(
            base, peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"])
        ).train()  # layers with 8 bits that evaluate round their inputs to integers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("base") / "llama"
    make_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(path)
    return str(path)


def quantized(kind, folder):
    return Run(
        model="llama", module=LitQuantized, pretrained=folder, options=(("kind", kind),), eager=True
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("fp4", "d2 sharded"),
        *(("nf4", layout) for layout in ("p2v2", "full", "c2", "d2 sharded gradients")),
        *(("8 bits", layout) for layout in ("d2", "p2v2", "d2 sharded")),
        *((kind, "p2d2 sharded parameters") for kind in ("nf4", "8 bits", "torchao")),
        ("torchao float8", "d2 sharded parameters"),
        *(("torchao", layout) for layout in ("p2v2", "d2 sharded gradients", "d2 sharded")),
    ],
)
def test_adapters_on_quantized_weights_match_single_process(kind, layout, parity, folder):
    parity.check(quantized(kind, folder), LAYOUTS[layout])


@pytest.mark.parametrize(
    ("kind", "world_size", "more"),
    [
        ("nf4", 2, {"recompute": "full"}),
        ("nf4", 4, {"reshard_after": "block", P: 2, V: 2}),
        ("torchao", 2, {"recompute": "full"}),
    ],
)
def test_shared_quantized_weights_are_gathered_again(kind, world_size, more, parity, folder):
    parity.check(quantized(kind, folder), (world_size, {"shard": "parameters", M: 2, **more}))


def test_training_after_validation_is_the_same(parity, folder):
    run = replace(quantized("nf4", folder), validate_every=None)
    validated = parity.result(replace(run, validate_every=1))
    assert_near(validated["losses"], parity.result(run)["losses"], 0, "losses")


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("nf4", "p2v2", "d2 sharded parameters"),
        ("8 bits", "d2 sharded parameters", "p2v2"),
        ("8 bits", "p2v2", "d2 sharded gradients"),
        ("torchao", "d2 sharded parameters", "p2v2"),
        ("torchao", "d2", "one"),
    ],
)
def test_checkpoint_of_quantized_weights_resumes_in_other_layout(
    kind, before, after, parity, folder, tmp_path
):
    run = replace(quantized(kind, folder), global_batch=SAMPLES)
    saved = str(tmp_path / "saved")
    expected = parity.result(run)
    half = replace(run, steps=1, save=saved).on(LAYOUTS[before])
    assert_near(parity.ranks(half)[0]["losses"], expected["losses"][:1], 1e-5, "losses")
    rest = replace(run, resume=saved).on(LAYOUTS[after])
    assert_near(parity.ranks(rest)[0]["losses"], expected["losses"][1:], 1e-5, "losses")


class Held(L.Callback):
    """Bytes of packed elements between the steps, and most at the end of a forward.

    Attributes:
        held, most: The bytes.
    """

    held = most = 0

    def on_train_batch_start(self, trainer, *_):
        if self.held:
            return
        self.held = packed_bytes()
        need = ShardedParameters.need

        def watched(shards, unit):
            need(shards, unit)
            if unit.after is None:  # the last block: its forward, then the first of the backward
                self.most = max(self.most, packed_bytes())

        patch = mock.patch.object(ShardedParameters, "need", watched)
        patch.start()
        self.stop = patch.stop

    def on_train_end(self, *_):
        self.stop()


def packed_bytes():
    """Return the size of all storages that may hold packed elements."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.dtype in PACKED]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values() if storage.nbytes() >= 512)


PACKED = (torch.uint8, torch.int8)


@dataclass(frozen=True, kw_only=True)
class Measured(Run):
    """A training that measures the packed elements of a rank."""

    def make_callbacks(self):
        return [Held()]

    def results(self, trainer, module):
        (held,) = (one for one in trainer.callbacks if isinstance(one, Held))
        return {"held": held.held, "most": held.most}


@pytest.mark.parametrize(("kind", "width"), [("nf4", 0.5), ("8 bits", 1), ("torchao", 1)])
def test_replicas_share_elements_of_quantized_weights(kind, width, parity, folder):
    run = Measured(**vars(quantized(kind, folder)) | {"steps": 1, "validate_every": None})
    elements = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * width
    for found in parity.ranks(run.on((4, {"shard": "parameters"}))):
        assert found["held"] <= 1.1 * elements / 4, found
        # the running block, the next, and those of the graph: nothing
        assert found["most"] <= 1.2 * elements * (1 / 4 + 2 / 4), found


@pytest.mark.parametrize("degrees", [{"tensor_parallel_size": 2}, {"expert_parallel_size": 2}])
def test_cut_of_quantized_weight_is_refused_before_launch(degrees, folder):
    config = PTDPStrategy(**degrees).config
    with pytest.raises(ValueError, match=rf"is a Params4bit .*{next(iter(degrees))}=2 cannot cut"):
        check_model(LitQuantized(quantized("nf4", folder)), config, config.layout(2))


def test_sharing_of_weights_of_torchao_is_refused_before_launch(folder):
    config = PTDPStrategy(shard="parameters").config
    module = LitQuantized(quantized("torchao", folder))
    check_model(module, config, config.layout(2))
    weight = module.model.base_model.model.model.layers[0].mlp.up_proj.weight
    weight.qdata = weight.qdata.flatten()  # as formats with several elements in a byte
    with pytest.raises(
        ValueError, match=r"Int8Tensor of torchao.* in Linear, .* one byte per element"
    ):
        check_model(module, config, config.layout(2))


def test_training_of_quantized_weight_is_refused_before_launch(folder):
    module = LitQuantized(quantized("torchao", folder))
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    config = PTDPStrategy().config
    with pytest.raises(ValueError, match=r"would be trained, but it has no gradient"):
        check_model(module, config, config.layout(2))


def test_export_of_quantized_weights_is_refused_before_first_step(parity, folder, tmp_path):
    run = replace(quantized("nf4", folder), export=str(tmp_path / "export"))
    with pytest.raises(
        WorkerFailure, match=r"weight' is quantized, and exports have plain"
    ) as error:
        parity.ranks(run.on(LAYOUTS["p2"]))
    assert "on_fit_start" in str(error.value)


@pytest.mark.parametrize("kind", ["nf4", "8 bits", "torchao"])
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_planner_counts_quantized_weights_as_they_are(kind, shard, folder):
    module = LitQuantized(quantized(kind, folder))
    config = PTDPStrategy(shard=shard).config
    job = described_job(
        module, config, world_size=4, batch=8, device=find_device("a100-80gb"), length=LENGTH,
        precision="32-true",
    )  # fmt: skip
    choice = described_choice(config, config.layout(4), micro_batch_size=1, num_microbatches=1)
    weights, gradients, states = static_bytes(job, choice, job.shape.parameters)
    replicas = 4 if shard == "parameters" else 1
    nbytes = sum(part.nbytes for p in module.parameters() for part in parts_of(p))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert weights == pytest.approx(nbytes / replicas, rel=1e-3)
    assert (gradients, states) == pytest.approx((4 * trained / replicas, 8 * trained / replicas))
    layouts = [found.choice.layout for found in search(job).best]
    assert layouts
    assert all(layout.tensor_parallel_size == 1 for layout in layouts)


class LitDiffering(LitQuantized):
    """Ranks with equal elements of one quantized weight, but different scales."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        layer = self.model.base_model.model.model.layers[1]
        if int(os.environ["RANK"]):
            layer.mlp.up_proj.weight.quant_state.offset.mul_(2)


@pytest.mark.parametrize("layout", ["d2", "p2"])
def test_quantized_weights_that_differ_between_ranks_are_refused(layout, parity, folder):
    run = replace(quantized("nf4", folder), module=LitDiffering)
    with pytest.raises(
        WorkerFailure, match=r"layers.1.mlp.up_proj.weight' is quantized and differs"
    ):
        parity.ranks(run.on(LAYOUTS[layout]))


class LateQuantized(LitQuantized):
    """The same, built in ``configure_model``."""

    def __init__(self, run: Run) -> None:
        LitHuggingFace.__init__(self, run)

    def configure_model(self):
        if self.model is None:
            LitQuantized.__init__(self, self.run)


def test_quantized_model_of_configure_model_matches_single_process(parity, folder):
    run = replace(quantized("nf4", folder), module=LateQuantized, layout={"meta_init": False})
    parity.check(run, LAYOUTS["p2v2"])
