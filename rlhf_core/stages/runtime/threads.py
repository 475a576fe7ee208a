"""How many CPU threads a process of a workspace has, and what they do between two products: sleep, or spin a moment."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import ComputeConfig
from rlhf_core.runtime.cores import available_cores

logger = logging.getLogger(__name__)

# Rounds of libgomp's waiting loop, about a tenth of a millisecond: as long as a model's small operations take between
# the products of a decoding step.
SPIN_ROUNDS = 5000


def limit_threads(compute: ComputeConfig, parallel: int) -> None:
    """Tell OpenMP and the tokenizers before they are loaded. An explicit setting of the environment wins.

    Args:
        compute: Has the number of threads, and whether they spin.
        parallel: Stages that may run at once. Threads that spin while another stage needs their core make both several
            times slower, so they sleep where all stages together may have more threads than there are cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if compute.threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(compute.threads))
        os.environ.setdefault("RAYON_NUM_THREADS", str(compute.threads))
    if compute.spin and "GOMP_SPINCOUNT" not in os.environ:
        cores = available_cores()
        threads = parallel * (compute.threads or cores)
        if threads > cores:
            logger.warning(
                "compute.spin is left out: %d stages at once have %d threads for %d cores; set flow.parallel: 1, or "
                "fewer compute.threads",
                parallel, threads, cores,
            )  # fmt: skip
        else:
            os.environ["GOMP_SPINCOUNT"] = str(SPIN_ROUNDS)


def limit_threads_of(workspace: Path) -> None:
    """:func:`limit_threads` by the parameters of ``workspace``, for a process that is no stage and runs beside none.

    Without it a small model samples with all cores, which wait for each other most of the time.

    Raises:
        ConfigError: The parameters are wrong.
    """
    limit_threads(load_section(workspace, "compute", ComputeConfig), parallel=1)
