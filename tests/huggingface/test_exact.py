"""Logits, loss and gradients under a plan in float64, and the collectives of a layer."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from lightning_ptdp.models.plans import find_plan
from lightning_ptdp.parameters.placement import slice_full
from lightning_ptdp.tensor_parallel import gather_full
from tests.huggingface.runs import Samples, make_model
from tests.models.hf_models import randomized
from tests.tensor_parallel.sharded import apply_plan
from tests.tensor_parallel.toy import counted_collectives, tensor_group, whole_gradient

pytestmark = pytest.mark.thorough

ALL = r".*(_proj|lm_head|embed_tokens)"
SOME = {
    "target_modules": ["k_proj", "o_proj", "up_proj"],
    "modules_to_save": ["lm_head", "norm"],
    "bias": "all",
    "use_rslora": True,
}
MODELS = {
    "llama": ("llama", {}),
    "llama, multi-query, eager attention": (
        "llama",
        {"num_key_value_heads": 1, "attn_implementation": "eager"},
    ),
    "llama, tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, adapters everywhere": ("llama", {"lora": {"target_modules": ALL}}),
    "llama, multi-query, some adapters, a trained head": (
        "llama",
        {"num_key_value_heads": 1, "lora": SOME},
    ),
    "gpt2, adapters": ("gpt2", {"lora": {}}),
    "gpt2": ("gpt2", {}),
    "gpt2, eager attention": ("gpt2", {"attn_implementation": "eager"}),
    "bert": ("bert", {}),
    "encoder": ("encoder", {}),
    "t5": ("t5", {}),
    "t5, gated, a head of its own": (
        "t5",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": ("bart", {}),
}


def outputs(model, kind):
    """Return the full logits, a loss in their precision, and the model's own loss, which decoders
    compute in float32."""
    data = Samples(kind)
    batch = {key: torch.stack([data[i][key] for i in range(3)]) for key in data[0]}
    result = model(**batch)
    logits = result.prediction_logits if kind == "bert" else result.logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    if kind == "bert":
        loss = loss + result.seq_relationship_logits.square().mean()
    return gather_full(logits), loss, result.loss


def check_model(rank, name):
    group = tensor_group(rank)
    kind, options = MODELS[name]
    reference = randomized(
        make_model(
            kind,
            **{"num_hidden_layers": 2} if kind not in ("encoder", "t5", "bart") else {},
            **options,
        )
    )
    reference.double().train()
    expected_logits, expected_loss, expected_own = outputs(reference, kind)
    limit = 1e-7 if kind in ("llama", "t5") else 1e-10  # its norms compute in float32
    expected_loss.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for sequence_parallel in (False, True) if find_plan(reference).sequence else (False,):
        model = deepcopy(reference)
        model.zero_grad()
        plan = find_plan(model)
        assert plan is not None
        shardings = apply_plan(model, plan, group=group, sequence_parallel=sequence_parallel)
        assert any("tensor" in sharding.sharded for sharding in shardings.values())
        logits, loss, own = outputs(model, kind)
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-10)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(own, expected_own, rtol=1e-6, atol=0)
        loss.backward()
        for key, parameter in model.named_parameters():
            if gradients[key] is None:
                assert parameter.grad is None, key
                continue
            found = whole_gradient(parameter.grad, shardings[key], group)
            torch.testing.assert_close(
                found,
                slice_full(gradients[key], shardings[key]),
                rtol=0,
                atol=limit,
                msg=lambda text, key=key: f"{key}: {text}",
            )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_match_single_process(name, size, pool):
    pool.run(check_model, world_size=size, args=(name,))


def check_messages(rank):
    """Check the number of collectives of one layer, as the difference between two depths.

    Any model has two all-reduces forward and two backward (arXiv 1909.08053, section 3). Sequence
    parallelism has all-gathers and reduce-scatters instead."""
    group = tensor_group(rank)
    for kind, layers in (
        ("llama", "num_hidden_layers"),
        ("gpt2", "n_layer"),
        ("bert", "num_hidden_layers"),
    ):
        for sequence_parallel in (False, True):
            seen = []
            for depth in (1, 2):
                model = make_model(kind, **{layers: depth})
                apply_plan(
                    model, find_plan(model), group=group, sequence_parallel=sequence_parallel
                )
                with counted_collectives() as forward:
                    loss = outputs(model, kind)[1]
                with counted_collectives() as backward:
                    loss.backward()
                seen.append((forward, backward))
            forward, backward = (deeper - less for less, deeper in zip(*seen, strict=True))
            if sequence_parallel:
                assert forward == {"all_gather": 2, "reduce_scatter": 2}, (kind, forward)
                assert backward["reduce_scatter"] == 2, (kind, backward)
                # only column layers gather their input again
                assert backward.total() <= 6, (
                    kind,
                    backward,
                )
            else:
                assert (forward, backward) == ({"all_reduce": 2}, {"all_reduce": 2}), (
                    kind,
                    forward,
                    backward,
                )


def test_number_of_collectives_per_layer(pool):
    pool.run(check_messages, world_size=2)
