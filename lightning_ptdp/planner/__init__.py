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
estimate has its own file: links, products, attentions, experts, layers, state that is sharded over
replicas, memory and steps. All of them read the model from the record in ``shapes.py``.
"""

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
from lightning_ptdp.planner.layer_time import layer_time
from lightning_ptdp.planner.memory import RankMemory, fullest_rank
from lightning_ptdp.planner.search import Candidate, Plan, search
from lightning_ptdp.planner.search_space import Space, UnfitSize
from lightning_ptdp.planner.shapes import ModelShape
from lightning_ptdp.planner.software import (
    PRECISIONS,
    SOFTWARE,
    Precision,
    Software,
    find_precision,
    find_software,
)
from lightning_ptdp.planner.step_time import StepTime, simulated_step_time, step_time

__all__ = [
    "DEVICES",
    "MACHINE_FILE",
    "PRECISIONS",
    "RESERVE",
    "SOFTWARE",
    "Calibration",
    "Candidate",
    "Choice",
    "Cluster",
    "Device",
    "Job",
    "Link",
    "Measured",
    "ModelShape",
    "Plan",
    "Precision",
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
    "known_device",
    "known_peak_flops",
    "layer_time",
    "load_calibration",
    "save_calibration",
    "search",
    "simulated_step_time",
    "step_time",
    "figures_source",
]
