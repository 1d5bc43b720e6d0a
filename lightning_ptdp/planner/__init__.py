"""A model of memory and time, and a search over all layouts that fit (``ptdp plan``).

Example::

    job = Job(
        model=GPTConfig.gpt2(),
        world_size=8,
        global_batch_size=64,
        device=find_device("h100"),
    )
    for candidate in search(job).best:
        print(candidate.choice.options(), candidate.memory.total, candidate.time.total)

The package consists of pure functions of sizes: nothing is run, and no device is needed. Each
estimate has its own file: activations, parameters, memory, layers, links, schedules and steps. All
of them read the model as the record in ``shapes.py``.
"""

from lightning_ptdp.planner.activations import LayerActivations, layer_activations, logits_bytes
from lightning_ptdp.planner.calibrated_device import (
    MACHINE_FILE,
    Calibration,
    device_here,
    figures_source,
    load_calibration,
    save_calibration,
)
from lightning_ptdp.planner.configured_shape import gpt_sizes
from lightning_ptdp.planner.device_presets import (
    DEVICES,
    find_device,
    known_device,
    known_peak_flops,
)
from lightning_ptdp.planner.devices import Cluster, Device, Link, Measured
from lightning_ptdp.planner.job import RESERVE, Choice, Job
from lightning_ptdp.planner.layer_time import head_time, input_time, layer_time
from lightning_ptdp.planner.memory import RankMemory, fullest_rank, static_bytes
from lightning_ptdp.planner.parameters import layers_by_stage, stage_parameters
from lightning_ptdp.planner.pass_time import PassTime
from lightning_ptdp.planner.precision_bytes import PRECISIONS, Precision, find_precision
from lightning_ptdp.planner.product_duration import product_time
from lightning_ptdp.planner.search import Candidate, Plan, search
from lightning_ptdp.planner.search_space import Space, UnfitSize
from lightning_ptdp.planner.shapes import (
    AttentionShape,
    Bytes,
    Divided,
    EndShape,
    LayerShape,
    ModelShape,
    Parameters,
    Product,
)
from lightning_ptdp.planner.software import SOFTWARE, Software, find_software
from lightning_ptdp.planner.step_time import StepTime, simulated_step_time, step_time

__all__ = [
    "DEVICES",
    "MACHINE_FILE",
    "PRECISIONS",
    "RESERVE",
    "SOFTWARE",
    "AttentionShape",
    "Bytes",
    "Calibration",
    "Candidate",
    "Choice",
    "Cluster",
    "Device",
    "Divided",
    "EndShape",
    "Job",
    "LayerActivations",
    "LayerShape",
    "Link",
    "Measured",
    "ModelShape",
    "Parameters",
    "PassTime",
    "Plan",
    "Precision",
    "Product",
    "RankMemory",
    "Software",
    "Space",
    "StepTime",
    "UnfitSize",
    "device_here",
    "find_device",
    "find_precision",
    "find_software",
    "fullest_rank",
    "gpt_sizes",
    "head_time",
    "input_time",
    "known_device",
    "known_peak_flops",
    "layer_activations",
    "layer_time",
    "layers_by_stage",
    "load_calibration",
    "logits_bytes",
    "product_time",
    "save_calibration",
    "search",
    "simulated_step_time",
    "stage_parameters",
    "static_bytes",
    "step_time",
    "figures_source",
]
