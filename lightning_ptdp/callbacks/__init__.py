"""Lightning callbacks that report on a run.

They work with any strategy, and report more with "ptdp"."""

from lightning_ptdp.callbacks.artifacts import SaveResolvedConfig
from lightning_ptdp.callbacks.expert_load import ExpertLoad
from lightning_ptdp.callbacks.export_huggingface import ExportHuggingFace
from lightning_ptdp.callbacks.pipeline_timeline import PipelineTimeline
from lightning_ptdp.callbacks.run_callbacks import (
    InitFrom,
    LayoutSummary,
    LogDatasets,
    RunRecord,
    RunReport,
    ValidateAtEnd,
)
from lightning_ptdp.callbacks.save_on_signal import SaveOnSignal
from lightning_ptdp.callbacks.step_metrics import (
    Goodput,
    GradientNorm,
    LearningRate,
    Throughput,
    TrainPerplexity,
)
from lightning_ptdp.callbacks.step_progress import StepProgress
from lightning_ptdp.callbacks.written_outputs import PredictionWriter, WriteSamples

__all__ = [
    "ExpertLoad",
    "ExportHuggingFace",
    "Goodput",
    "GradientNorm",
    "InitFrom",
    "LayoutSummary",
    "LearningRate",
    "LogDatasets",
    "PipelineTimeline",
    "PredictionWriter",
    "RunRecord",
    "RunReport",
    "SaveOnSignal",
    "SaveResolvedConfig",
    "StepProgress",
    "Throughput",
    "TrainPerplexity",
    "ValidateAtEnd",
    "WriteSamples",
]
