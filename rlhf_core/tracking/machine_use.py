"""Use of the machine as metrics of a stage's run, under the names that MLflow's page "System metrics" shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import psutil

VARIABLE = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"  # MLflow's own, for runs that it samples itself
INTERVAL_VARIABLE = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
SECONDS = 10.0
MEGABYTE = 1e6


class MachineUse:
    """Samples processors, memory and GPUs beside a stage's own metrics, so that both have the same steps.

    Nothing is sampled unless :data:`VARIABLE` is ``true``. MLflow's own sampler needs the run's server, which a stage
    does not talk to while another process delivers its records.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.enabled = os.environ.get(VARIABLE, "").lower() in ("true", "1")
        self.interval = float(os.environ.get(INTERVAL_VARIABLE) or SECONDS)
        self._next = clock()
        if self.enabled:
            psutil.cpu_percent()  # the next call says how much since this one

    def sample(self) -> dict[str, float]:
        """The metrics, empty until the interval since the last sample is over."""
        if not self.enabled or self.clock() < self._next:
            return {}
        self._next = self.clock() + self.interval
        memory = psutil.virtual_memory()
        return {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system/system_memory_usage_percentage": memory.percent,
            **_gpu_use(),
        }


def _gpu_use() -> dict[str, float]:
    """Memory and load of the GPUs that this process may use; the load where ``nvidia-ml-py`` is installed."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    use: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        use[f"system/gpu_{number}_memory_usage_megabytes"] = (total - free) / MEGABYTE
        use[f"system/gpu_{number}_memory_usage_percentage"] = 100 * (total - free) / total
        try:
            use[f"system/gpu_{number}_utilization_percentage"] = float(torch.cuda.utilization(number))
        except (ImportError, RuntimeError):
            continue
    return use
