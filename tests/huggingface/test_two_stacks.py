"""Encoder-decoders in float64, stage by stage in one process, for several losses and cuts."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ptdp.models.plans import find_plan
from tests.huggingface.runs import Samples, make_model
from tests.pipeline.crossing_models import Emulated

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")

CUTS = ((2,), (1, 2, 4), (1, 3, 4))
"""Cuts between the two layers of the encoder and the three of the decoder."""


def of_the_loss(model, batch):
    return model(**batch).loss


def of_what_the_encoder_returned(model, batch):
    output = model(**batch)
    return output.loss + 0.1 * output.encoder_last_hidden_state.square().mean()


def of_all_hidden_states(model, batch):
    output = model(**batch, output_hidden_states=True)
    assert (len(output.encoder_hidden_states), len(output.decoder_hidden_states)) == (3, 4)
    return output.loss + sum(
        x.square().mean() for x in (*output.encoder_hidden_states, *output.decoder_hidden_states)
    )


class Step(nn.Module):
    """A model and the loss computed from its outputs."""

    def __init__(
        self, model: nn.Module, compute: Callable[[Any, dict[str, Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, batch):
        return self.compute(self.model, batch)


@pytest.mark.parametrize(
    ("built", "compute"),
    [
        ("", of_the_loss),
        ("", of_what_the_encoder_returned),
        ("", of_all_hidden_states),
        ("recomputes", of_the_loss),
        ("resized", of_all_hidden_states),
    ],
)
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_loss_and_gradients_match_whole_model(kind, built, compute):
    data = Samples(kind)
    batch = {key: torch.stack([data[i][key] for i in range(3)]) for key in data[0]}
    torch.manual_seed(0)
    model = make_model(kind).double()
    if built == "resized":  # one embedding under three names
        model.resize_token_embeddings(70)
    if built == "recomputes":
        model.gradient_checkpointing_enable()
    whole = Step(model, compute)
    plan = find_plan(whole)
    known = {
        "blocks": plan.blocks,
        "before": plan.before,
        "between": plan.between,
        "after": plan.after,
    }
    # also installs the capture of hidden states, so that splitting does not install it again
    expected = whole(batch)
    for cut in CUTS if not built else CUTS[1:2]:
        stages = Emulated(whole, tuple(pairwise((0, *cut, 5))), **known)
        found = stages.forward(batch, training=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        whole.zero_grad()
        whole(batch).backward()
        stages.backward(found)
        names = dict(whole.named_parameters(remove_duplicate=False))
        total = {id(parameter): torch.zeros_like(parameter) for parameter in whole.parameters()}
        for part in stages.parts:
            for name, parameter in part.named_parameters():
                if parameter.grad is not None:
                    total[id(names[name])] += parameter.grad
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(
                total[id(parameter)],
                parameter.grad,
                rtol=0,
                atol=1e-12,
                msg=lambda text, name=name, cut=cut: f"{cut} {name}: {text}",
            )
