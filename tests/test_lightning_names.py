"""Everything private that we take from Lightning is still there, in both namespaces."""

from __future__ import annotations

import inspect

import pytest

from lightning_ptdp._lightning import NAMESPACES, lightning_names


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_names_exist_and_take_what_we_pass(namespace: str) -> None:
    names = lightning_names(namespace)
    assert "timeout" in str(inspect.signature(names.init_process_group)) or "kwargs" in str(
        inspect.signature(names.init_process_group)
    )
    assert list(inspect.signature(names.SubprocessLauncher.__init__).parameters)[1:] == [
        "cluster_environment",
        "num_processes",
        "num_nodes",
    ]
    assert "_collect_rank_zero_results" in vars(names.MultiProcessingLauncher)
    assert hasattr(names.ParallelStrategy, "block_backward_sync")
    assert "_layer_sync" in inspect.getsource(names.ParallelStrategy.__init__)


def test_the_namespaces_are_two_class_hierarchies() -> None:
    one, other = (lightning_names(namespace) for namespace in NAMESPACES)
    assert one.ParallelStrategy is not other.ParallelStrategy


def test_an_unknown_namespace_is_named() -> None:
    with pytest.raises(ValueError, match="pytorch_lightning"):
        lightning_names("lightning")
