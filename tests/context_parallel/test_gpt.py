"""Our GPT on slices of the sequence against a single process: logits, loss, gradients."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_ptdp.context_parallel import ContextParallel
from lightning_ptdp.models import GPT, LitGPT, gpt_plan
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests.context_parallel.toy import assert_close, context_group, own, sliced, weighted
from tests.models.configs import GPT2, LLAMA
from tests.tensor_parallel.sharded import apply_plan
from tests.tensor_parallel.toy import assert_gradients

pytestmark = pytest.mark.thorough

CONFIGS = {"gpt2": GPT2, "llama": LLAMA}
LENGTH = 24


def make_batch(config):
    """Return a batch with most of the ignored labels at the end of the sequence."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocabulary_size, (2, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 5:] = labels[1, -3:] = -100
    return {"input_ids": ids[:, :-1].clone(), "labels": labels}


def summed_loss(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def _train_step(rank, config, kind, dtype):
    group = context_group(rank)
    torch.manual_seed(0)
    model, reference = GPT(config).to(dtype), GPT(config).to(dtype)
    reference.load_state_dict(model.state_dict())
    batch = make_batch(config)
    expected = reference(batch["input_ids"])
    expected_loss = summed_loss(expected, batch["labels"]) / (batch["labels"] != -100).sum()
    expected_loss.backward()

    with sliced(ContextParallel(group=group, attention=kind), model, batch) as running:
        logits = model(running.batch["input_ids"])
    tokens = running.num_targets
    dist.all_reduce(tokens, group=group.handle)
    loss = summed_loss(logits, running.batch["labels"]) / tokens
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group.handle)

    assert_close(logits.detach(), own(expected.detach(), 1, group))
    assert_close(total, expected_loss.detach())
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(parameter.grad, group=group.handle)
        assert_close(parameter.grad, whole.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_gradients_match_single_process(pool, name, kind, size, dtype):
    pool.run(_train_step, world_size=size, args=(CONFIGS[name], kind, dtype))


def _mean_loss(rank):
    """Check a step that returns only its mean loss, with one rank without labels."""
    group = context_group(rank)
    torch.manual_seed(0)
    model, batch = GPT(LLAMA).double(), make_batch(LLAMA)
    batch["labels"][:, 4:] = -100
    whole = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    expected = torch.autograd.grad(whole, list(model.parameters()))
    with sliced(ContextParallel(group=group), model, batch) as running:
        loss = F.cross_entropy(
            model(running.batch["input_ids"]).flatten(0, 1), running.batch["labels"].flatten()
        )
    assert loss.isnan() == (rank > 0)
    loss = weighted(running, loss) / group.size
    found = torch.autograd.grad(loss, list(model.parameters()))
    dist.all_reduce(loss := loss.detach(), group=group.handle)
    assert_close(loss, whole.detach())
    for mine, grad in zip(found, expected, strict=True):
        dist.all_reduce(mine, group=group.handle)
        assert_close(mine, grad)


def test_mean_loss_is_weighted_by_label_counts(pool):
    pool.run(_mean_loss, world_size=2)


def _with_tensor_parallel(rank, config, sequence_parallel):
    layout = ParallelLayout(
        world_size=4,
        context_parallel_size=2,
        tensor_parallel_size=2,
        sequence_parallel=sequence_parallel,
    )
    mesh = ProcessMesh.create(layout=layout, rank=rank)
    context, tensor = mesh.group("context"), mesh.group("tensor")
    torch.manual_seed(0)
    reference = GPT(config).double()
    model, batch = deepcopy(reference), make_batch(config)
    shardings = apply_plan(
        model, gpt_plan(config, prefix=""), group=tensor, sequence_parallel=sequence_parallel
    )
    expected = summed_loss(reference(batch["input_ids"]), batch["labels"])
    expected.backward()
    parallel = ContextParallel(group=context, sequence_parallel_size=2 if sequence_parallel else 1)
    with sliced(parallel, model, batch) as running:
        loss = summed_loss(model(running.batch["input_ids"]), running.batch["labels"])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=context.handle)
    assert_close(total, expected.detach())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=context.handle)
    assert_gradients(model, shardings, reference, tensor)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_context_and_tensor_parallelism_match_single_process(pool, name, sequence_parallel):
    pool.run(_with_tensor_parallel, world_size=4, args=(CONFIGS[name], sequence_parallel))


def _too_long(rank):
    model = GPT(replace(LLAMA, sequence_length=16))
    with (
        pytest.raises(ValueError, match="24 tokens is longer than sequence_length=16"),
        sliced(ContextParallel(group=context_group(rank)), model, make_batch(LLAMA)) as running,
    ):
        model(running.batch["input_ids"])


def test_length_limit_applies_to_whole_sequence(pool):
    pool.run(_too_long, world_size=2)


def _lightning_module(rank):
    torch.manual_seed(0)
    module = LitGPT(LLAMA)
    module.configure_model()
    module.log = lambda *args, **kwargs: None
    with sliced(ContextParallel(group=context_group(rank)), module, make_batch(LLAMA)) as running:
        output = module.training_step(running.batch, 0)
    return output["loss"].item() * output["num_tokens"].item(), output["num_tokens"].item()


def test_unmodified_lightning_module_matches_single_process(pool):
    results = pool.run(_lightning_module, world_size=2)
    torch.manual_seed(0)
    module = LitGPT(LLAMA)
    module.configure_model()
    module.log = lambda *args, **kwargs: None
    expected = module.training_step(make_batch(LLAMA), 0)
    losses, tokens = zip(*results, strict=True)
    assert tokens[0] != tokens[1]
    assert sum(losses) / sum(tokens) == pytest.approx(expected["loss"].item(), rel=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_position_ids_are_broadcast_over_samples(name):
    torch.manual_seed(0)
    model, ids = GPT(CONFIGS[name]), make_batch(CONFIGS[name])["input_ids"]
    expected = model(ids)
    places = torch.arange(LENGTH)
    for position_ids in (places, places[None], places.expand(2, -1)):
        assert torch.equal(model(ids, position_ids), expected)
    assert not torch.equal(model(ids, places.flip(0)), expected)
