"""Private names of Lightning that the package uses, in both namespaces."""

import importlib
import inspect
import pkgutil

import pytest
import torch

from lightning_ptdp.shims.lightning import (
    CLIS,
    LOADERS,
    NAMESPACES,
    REPLACED,
    SCANNERS,
    TRAINERS,
    UPLOADERS,
    fits,
    is_compiled,
    lightning_names,
    load_only_named_checkpoints,
    requeue_handler,
    set_restored_path,
)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_private_names_exist_with_expected_signatures(namespace):
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


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_advance_of_training_loop_broadcasts_sigterm(namespace):
    loop = importlib.import_module(f"{namespace}.loops.training_epoch_loop")._TrainingEpochLoop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(loop.advance)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_timed_validation_reads_expected_attributes(namespace):
    loop = importlib.import_module(f"{namespace}.loops.training_epoch_loop")
    text = inspect.getsource(loop._TrainingEpochLoop._should_check_val_fx)
    assert "interval = self.trainer._val_check_time_interval" in text
    assert "now - self.trainer._last_val_time >= interval" in text


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_throughput_monitor_uses_expected_attributes(namespace):
    monitor = lightning_names(namespace).ThroughputMonitor(batch_size_fn=len)
    assert monitor._throughputs == {} and monitor.available_flops is None
    assert "self._throughputs[stage] = throughput" in inspect.getsource(monitor.setup)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_slurm_requeue_handler_and_checkpoint_selection_exist(namespace):
    trainer = importlib.import_module(namespace).Trainer(logger=False)
    assert callable(requeue_handler(trainer))
    load_only_named_checkpoints(trainer)
    set_restored_path(trainer, "last.ckpt")
    assert trainer.ckpt_path == "last.ckpt"
    text = inspect.getsource(type(trainer._checkpoint_connector)._select_ckpt_path)
    assert "if self._user_managed:" in text


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_fit_is_distinguished_from_other_functions(namespace):
    trainer, kinds = (
        importlib.import_module(namespace).Trainer(logger=False),
        importlib.import_module(f"{namespace}.trainer.states"),
    )
    assert not fits(trainer)
    for function in kinds.TrainerFn:
        trainer.state.fn = function
        assert fits(trainer) == (function is kinds.TrainerFn.FITTING)


def test_namespaces_have_separate_class_hierarchies():
    one, other = (lightning_names(namespace) for namespace in NAMESPACES)
    assert one.ParallelStrategy is not other.ParallelStrategy


def test_unknown_namespace_is_refused():
    with pytest.raises(ValueError, match="pytorch_lightning"):
        lightning_names("lightning")


@pytest.mark.parametrize("module", LOADERS)
def test_checkpoint_loaders_are_replaced(module):
    load = getattr(importlib.import_module(module), LOADERS[module])
    assert list(inspect.signature(load).parameters) == [
        "path_or_url",
        "map_location",
        "weights_only",
    ]
    assert hasattr(load, REPLACED), "the function was not replaced at import"


@pytest.mark.parametrize("module", SCANNERS)
def test_checkpoint_scan_of_uploading_loggers_is_replaced(module):
    scan = pkgutil.resolve_name(f"{module}:{SCANNERS[module]}")
    assert hasattr(scan, REPLACED)
    assert list(inspect.signature(scan).parameters) == ["checkpoint_callback", "logged_model_time"]


@pytest.mark.parametrize("module", UPLOADERS)
def test_upload_of_loggers_is_replaced(module):
    upload = pkgutil.resolve_name(f"{module}:{UPLOADERS[module]}")
    assert hasattr(upload, REPLACED)
    assert list(inspect.signature(upload).parameters) == ["self", "checkpoint_callback"]


@pytest.mark.parametrize("module", CLIS)
def test_checkpoint_path_parser_of_cli_is_replaced(module):
    parse = pkgutil.resolve_name(f"{module}:{CLIS[module]}")
    assert hasattr(parse, REPLACED)
    assert list(inspect.signature(parse).parameters) == ["self"]


@pytest.mark.parametrize("module", TRAINERS)
def test_compiled_module_check_of_trainers_is_replaced(module):
    verify = getattr(importlib.import_module(module), TRAINERS[module])
    assert hasattr(verify, REPLACED)
    assert list(inspect.signature(verify).parameters) == ["model", "strategy"]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_compiled_module_is_recognized(namespace):
    lightning = importlib.import_module(namespace)
    compile_utilities = importlib.import_module(f"{namespace}.utilities.compile")
    module = lightning.LightningModule()
    assert not is_compiled(module)
    assert is_compiled(compile_utilities.from_compiled(torch.compile(module, backend="eager")))


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_model_summary_calls_expected_method(namespace):
    summary = importlib.import_module(f"{namespace}.callbacks.model_summary").ModelSummary
    assert "self._summary(trainer, pl_module)" in inspect.getsource(summary.on_fit_start)
    assert summary(max_depth=2)._max_depth == 2
