"""Initial values of models with an initializer for several modules."""

import math

import pytest
import torch
from torch import nn

from lightning_ptdp.parameters.initializers import Initializers
from lightning_ptdp.parameters.materialize import Materializer
from tests.huggingface.runs import make_model


def built(kind, seed=5, **options):
    with torch.device("meta"):
        model = make_model(kind, **options)
    materialize = Materializer(model, seed=seed, device=torch.device("cpu"))
    for name, module in model.named_modules():
        materialize(module, name)
    return model


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "gemma3", "opt", "encoder"])
def test_initial_values_follow_model_initializer(kind):
    pytest.importorskip("transformers")
    ours, theirs = built(kind), make_model(kind)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.numel() < 256:  # norms and biases: constants, except biases drawn by torch
            if expected[name].std() < 1e-6:
                assert torch.equal(parameter, expected[name]), name
            continue
        assert math.isclose(parameter.std().item(), expected[name].std().item(), rel_tol=0.2), name
    for name, buffer in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name


def test_parent_initializer_applies_and_padding_is_zero():
    pytest.importorskip("transformers")
    model = built("gpt2", n_embd=64)
    assert math.isclose(
        model.transformer.h[0].attn.c_proj.weight.std().item(), 0.02 / math.sqrt(8), rel_tol=0.1
    )
    assert math.isclose(model.transformer.h[0].attn.c_attn.weight.std().item(), 0.02, rel_tol=0.1)
    bert = built("bert", pad_token_id=3)
    assert not bert.bert.embeddings.word_embeddings.weight[3].any()
    assert bert.cls.predictions.decoder.bias is bert.cls.predictions.bias
    assert bert.cls.predictions.decoder.weight is bert.bert.embeddings.word_embeddings.weight


def test_model_is_unchanged_and_uninitialized_tensor_is_named():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def reset_parameters(self):
            nn.init.ones_(self.scale)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.half = nn.Linear(3, 3), Half()

        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 7.0)

    model = Model()
    before = model.linear.weight.clone()
    initialize = Initializers(model)
    linear = initialize("linear")
    assert isinstance(linear, nn.Linear)
    assert (linear.weight == 7.0).all(), "the model's own initializer must run last"
    assert not linear.bias.isnan().any()
    assert torch.equal(model.linear.weight, before)
    with pytest.raises(ValueError, match=r"'half.shift' \(Half\).*reset_parameters.*_init_weights"):
        initialize("half")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_zeros_of_integers_are_values(dtype):
    class Mask(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.empty(3, dtype=dtype))

        def reset_parameters(self):
            self.mask.zero_()

    with torch.device("meta"):
        model = Mask()
    Materializer(model, seed=5, device=torch.device("cpu"))(model, "")
    assert not model.mask.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draw", [nn.init.normal_, nn.init.uniform_])
def test_half_precision_values_are_rounded_float32(dtype, draw):
    class Scale(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(40, dtype=dtype))
            self.register_buffer("offset", torch.empty(40, dtype=dtype))

        def reset_parameters(self):
            draw(self.weight)
            draw(self.offset)

    found = []
    for each in (torch.float32, dtype):
        with torch.device("meta"):
            model = Scale(each)
        Materializer(model, seed=5, device=torch.device("cpu"))(model, "")
        found.append(model)
    for exact, rounded in zip(
        found[0].state_dict().values(), found[1].state_dict().values(), strict=True
    ):
        assert rounded.dtype == dtype
        assert torch.equal(exact.to(dtype), rounded)
    assert isinstance(found[1].weight, nn.Parameter)
