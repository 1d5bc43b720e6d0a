"""Hidden states, attention weights and router logits of all layers are complete under pipeline
parallelism."""

import pytest
import torch

from lightning_ptdp.shims.transformers import (
    captured_outputs,
    has_sdpa,
    ignored_names,
    install_capture,
    is_capture,
)
from tests.huggingface.runs import VOCABULARY, LitHuggingFace, Run, make_model
from tests.letters import M, P, T, V
from tests.pool import WorkerFailure

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers")


class HiddenStates(LitHuggingFace):
    """Uses every layer's hidden state in the loss, as in distillation."""

    def loss(self, batch):
        output = self.model(**batch, output_hidden_states=True)
        assert len(output.hidden_states) == 5
        return output.loss + sum(
            (k + 1) * h.square().mean() for k, h in enumerate(output.hidden_states)
        )

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Attentions(HiddenStates):
    def loss(self, batch):
        output = self.model(**batch, output_attentions=True)
        assert len(output.attentions) == 4
        return output.loss + sum(
            (k + 1) * a.square().mean() for k, a in enumerate(output.attentions)
        )


class Selected(HiddenStates):
    """Uses some hidden states, selected by index.

    transformers 5.23 counts from the first layer's input and takes negative indices. Older releases
    count from its output."""

    def loss(self, batch):
        states = self.model(**batch, output_hidden_states=[0, 2, -2]).hidden_states
        selected = [state for state in states if state is not None]
        assert 2 <= len(selected) < len(states)
        return self.model.lm_head(selected[0] + 2 * selected[1] - selected[-1] / 2).square().mean()


class Routers(HiddenStates):
    """Uses the auxiliary loss that the model adds itself."""

    def configure_model(self):
        if self.model is None:
            config = transformers.MixtralConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_hidden_layers=4,
                intermediate_size=32,
                num_local_experts=4,
                router_aux_loss_coef=1.0,
                output_router_logits=True,
            )
            self.model = transformers.AutoModelForCausalLM.from_config(config)

    def loss(self, batch):
        output = self.model(**batch)
        assert len(output.router_logits) == 4
        return output.loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)  # a single process validates without microbatches
        self.log("val_loss", output.loss - output.aux_loss, sync_dist=True)


@pytest.mark.parametrize(
    ("module", "options", "layout"),
    [
        (HiddenStates, (), {P: 2}),
        (HiddenStates, (), {P: 2, V: 2}),
        (HiddenStates, (), {P: 2, V: 2, "recompute": "full"}),
        (HiddenStates, (), {P: 4}),
        (Selected, (), {P: 4}),
        (Attentions, (("attn_implementation", "eager"),), {P: 2, V: 2}),
        (HiddenStates, (), {T: 2, P: 2, V: 2}),
        (Routers, (), {P: 2}),
        (Routers, (), {P: 2, V: 2, "recompute": "full"}),
    ],
)
def test_captured_outputs_match_single_process(module, options, layout, parity):
    """The single process has as many microbatches: a router's loss is not a mean over samples."""
    run = Run(model="llama", options=options, module=module, layout={M: 2})
    parity.check(run, (layout[P] * layout.get(T, 1), layout))


@pytest.mark.parametrize(
    ("module", "layout", "words"),
    [
        (
            Attentions,
            {T: 2},
            "output_attentions=True cannot be combined with tensor_parallel_size > 1",
        ),
        (
            HiddenStates,
            {T: 2, "sequence_parallel": True},
            "output_hidden_states=True cannot be combined with sequence_parallel=True",
        ),
    ],
)
def test_partial_captured_outputs_are_refused(module, layout, words, parity):
    run = Run(
        model="llama",
        options=(("attn_implementation", "eager"),),
        module=module,
        layout=layout,
        world_size=2,
    )
    with pytest.raises(WorkerFailure, match=words):
        parity.ranks(run)


def test_transformers_internals_work_as_assumed():
    import transformers

    model = make_model("llama")
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not hooks
    assert captured_outputs() == {}
    assert "attn.bias" in ignored_names(make_model("gpt2"))
    assert (has_sdpa(transformers.LlamaForCausalLM), has_sdpa(transformers.GptOssForCausalLM)) == (
        True,
        False,
    )
    install_capture(model)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert len(hooks) == 8, "expected hooks for a hidden state and an attention per layer"
    assert all(map(is_capture, hooks))
    lengths = []
    model.model.layers[2].register_forward_hook(
        lambda *_: lengths.append(len(captured_outputs()["hidden_states"]))
    )
    model(torch.zeros(1, 3, dtype=torch.int64), output_hidden_states=True)
    install_capture(model)
    assert lengths == [4]
    assert sum(len(module._forward_hooks) for module in model.modules()) == 9, (
        "a hook was installed twice"
    )
