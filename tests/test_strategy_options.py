"""Strategy options, whose signature and documentation come from one dataclass."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import docstring_parser
import pytest
from lightning.pytorch.strategies import ParallelStrategy

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.ptdp import strategy_class


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_signature_combines_config_and_lightning_options(namespace):
    signature = inspect.signature(strategy_class(namespace)).parameters
    ours = {field.name: field.default for field in fields(PTDPConfig)}
    assert list(signature) == ["layout", *ours, *inspect.signature(ParallelStrategy).parameters]
    assert {name: signature[name].default for name in ours} == ours
    assert {name: signature[name].annotation for name in ours} == get_type_hints(PTDPConfig)
    assert signature["accelerator"].annotation.__args__[0].__module__.startswith(namespace)


def test_every_option_is_documented():
    told = {
        entry.arg_name: entry.description
        for entry in docstring_parser.parse(PTDPStrategy.__doc__ or "").params
    }
    assert list(told) == ["layout", *(field.name for field in fields(PTDPConfig))] and all(
        told.values()
    )


def test_unknown_option_is_refused_and_lightning_option_is_passed():
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        PTDPStrategy(tensor_paralel_size=2)
    with pytest.raises(TypeError, match=r"PTDPStrategy.__init__\(\) takes 1 positional argument"):
        PTDPStrategy(2)
    environment = object()
    strategy = PTDPStrategy(
        cluster_environment=environment, partition=[1, 2], pipeline_parallel_size=2
    )
    assert (strategy.cluster_environment, strategy.config.partition) == (environment, (1, 2))
