"""MLflow's own thread that logs system metrics of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_ptdp.loggers.connection import quiet

if TYPE_CHECKING:  # imported when used
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

__all__ = ["finish_monitor", "start_monitor"]

_MONITOR = "mlflow.system_metrics.system_metrics_monitor"


def start_monitor(run_id: str | None, tracking_uri: str) -> SystemMetricsMonitor:
    """Start the monitor; in a resumed run its sample numbers continue."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    with quiet(_MONITOR):
        monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=tracking_uri)
        monitor.start()
    return monitor


def finish_monitor(monitor: SystemMetricsMonitor) -> None:
    """End the monitor, without its messages."""
    with quiet(_MONITOR):
        monitor.finish()
