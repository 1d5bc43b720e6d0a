"""Tests that models which cannot run on a slice of the sequence are refused before launch."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ptdp.attention import ContextParallelError
from lightning_ptdp.context_parallel import why_not
from lightning_ptdp.context_parallel.slice_functions import SliceFunctions

REFUSED = {
    "mamba": "backbone.layers.0.mixer.conv1d.*mixes tokens along the sequence",
    "jamba": "mixes tokens along the sequence",
    "bloom": "Bloom.* computes its attention without",
    "gemma2": "Gemma2.* computes its attention without",
    "falcon rw": "alibi=True",
    "llama classes": "LlamaForSequenceClassification selects the last token of each sample",
    "gpt2 classes": "GPT2ForSequenceClassification selects the last token of each sample",
    "bert question": "BertForQuestionAnswering compares all tokens",
    "minimax": "MiniMaxForCausalLM has layers of linear attention",
    "vit": "ViT.* creates its sequence from pixel_values",
    "t5": "T5.* cross-attention",
}
TAKEN = (
    "llama",
    "gpt2",
    "bert",
    "roberta",
    "bert classes",
    "falcon",
    "opt",
    "modernbert",
    "distilbert",
    "mixtral",
    "gpt_bigcode",
)


@pytest.mark.parametrize("name", [*REFUSED, *TAKEN])
def test_hugging_face_models_are_accepted_or_refused(name):
    pytest.importorskip("transformers")
    from tests.huggingface.architectures import build

    reason = why_not(nn.ModuleDict({"model": build(name)}))
    if name in TAKEN:
        assert reason is None
    else:
        assert re.search(REFUSED[name], reason), reason


@pytest.mark.parametrize("layer", [nn.LSTM(4, 4), nn.Conv1d(4, 4, 3)])
def test_layers_mixing_tokens_are_refused(layer):
    assert "'mixer'" in str(why_not(nn.ModuleDict({"mixer": layer})))
    assert why_not(nn.ModuleDict({"mixer": nn.Conv1d(4, 4, 1)})) is None


def test_token_selection_by_index_is_refused():
    group = SimpleNamespace(size=2, rank=0)
    functions = SliceFunctions(attention=None, group=group, length=16)
    hidden = torch.zeros(3, 8, 5)
    rows, last = torch.arange(3), torch.tensor([1, 7, 4])
    with pytest.raises(ContextParallelError, match="by its index"):
        functions.selects_token(hidden, (rows, last))
    assert not functions.selects_token(hidden, (slice(None), last))
    assert not functions.selects_token(hidden, hidden[..., 0] > 0)
