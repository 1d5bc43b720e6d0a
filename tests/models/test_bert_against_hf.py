"""Hugging Face's BertForPreTraining with the same weights gives the same logits, loss and
gradients."""

import pytest
import torch
from torch import nn

from lightning_ptdp.models import Bert, BertConfig, LitBert

transformers = pytest.importorskip("transformers")

CONFIG = BertConfig.original(
    vocabulary_size=61, sequence_length=24, num_layers=3, hidden_size=32, num_heads=4, dropout=0.0
)


def hugging_face():
    config = transformers.BertConfig(
        vocab_size=61,
        max_position_embeddings=24,
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def converted(source):
    """Convert Hugging Face's names and separate projections to ours."""
    names = {
        "embeddings.token": "bert.embeddings.word_embeddings",
        "embeddings.position": "bert.embeddings.position_embeddings",
        "embeddings.segment": "bert.embeddings.token_type_embeddings",
        "embeddings.norm": "bert.embeddings.LayerNorm",
        "masked_head.dense": "cls.predictions.transform.dense",
        "masked_head.norm": "cls.predictions.transform.LayerNorm",
        "order_head.pooler": "bert.pooler.dense",
        "order_head.classifier": "cls.seq_relationship",
    }
    layer = {
        "attention.projection": "attention.output.dense",
        "norm_1": "attention.output.LayerNorm",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
        "norm_2": "output.LayerNorm",
    }
    state = {}
    for number in range(CONFIG.num_layers):
        theirs = f"bert.encoder.layer.{number}"
        names |= {f"blocks.{number}.{ours}": f"{theirs}.{name}" for ours, name in layer.items()}
        for kind in ("weight", "bias"):
            parts = [
                source[f"{theirs}.attention.self.{name}.{kind}"]
                for name in ("query", "key", "value")
            ]
            state[f"blocks.{number}.attention.qkv.{kind}"] = torch.cat(parts)
    for ours, theirs in names.items():
        state |= {
            f"{ours}.{kind}": source[f"{theirs}.{kind}"]
            for kind in ("weight", "bias")
            if f"{theirs}.{kind}" in source
        }
    state["masked_head.decoder.weight"] = state["embeddings.token.weight"]
    state["masked_head.decoder.bias"] = source["cls.predictions.bias"]
    return state


def test_logits_loss_and_gradients_equal_hugging_face():
    theirs, lit = hugging_face(), LitBert(CONFIG)
    lit.configure_model()
    assert isinstance(lit.model, Bert)
    lit.model.load_state_dict(converted(theirs.state_dict()))
    draw = torch.Generator().manual_seed(1)
    inputs = {
        # 0 is the padding of Hugging Face, whose embedding is not trained
        "input_ids": torch.randint(1, 61, (4, 24), generator=draw),
        "token_type_ids": torch.randint(2, (4, 24), generator=draw),
        "attention_mask": (torch.arange(24) < torch.tensor([[24], [9], [17], [24]])).long(),
    }
    labels = torch.full((4, 24), -100)
    positions = torch.tensor([[3, 7, 8], [1, 5, 2], [16, 4, 9], [23, 11, 1]])
    labels.scatter_(1, positions, torch.randint(61, (4, 3), generator=draw))
    batch = {**inputs, "labels": labels, "next_sentence_label": torch.tensor([0, 1, 1, 0])}
    expected = theirs(**batch)
    output = lit(inputs)
    torch.testing.assert_close(output.masked, expected.prediction_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.order, expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    # Every sample has the same number of predictions, so that our sentence losses have equal
    # weights, like those of Hugging Face.
    result = lit.training_step({**batch, "masked_positions": positions}, 0)
    torch.testing.assert_close(result["loss"], expected.loss, rtol=1e-5, atol=1e-5)
    result["loss"].backward()
    expected.loss.backward()
    gradients = converted({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in lit.model.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            gradients[name],
            rtol=1e-4,
            atol=1e-6,
            msg=lambda m, name=name: f"{name}: {m}",
        )
