"""How big the house is: ``python -m benchmarks.size [--trace]``.

Prints lines and files of every room beside its budget, and the words of README and docs. With
``--trace`` a tiny model makes one PPO iteration and one reward-model step: printed are the files of
``rlhf_core`` whose functions ran, the frames from ``update`` to the clipped surrogate, and the
files that a preference pair passes from disk to the loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REST = (
    "serving",
    "chat",
    "fingerprint",
    "tracking",
    "storage",
    "runtime",
    "world",
    "commands",
    "api",
)
# Room: folders and files that belong to it, most lines, most files; None where there is no budget.
ROOMS: dict[str, tuple[tuple[str, ...], int, int | None]] = {
    "rlhf_core": (("rlhf_core",), 36_000, 210),
    "  config": (("rlhf_core/config",), 3_000, 14),
    "  stages": (("rlhf_core/stages",), 2_300, 20),
    "  data": (("rlhf_core/data",), 6_800, 45),
    "  models": (("rlhf_core/models",), 2_200, 14),
    "  sampling": (("rlhf_core/sampling",), 1_800, 10),
    "  training": (("rlhf_core/training",), 3_800, 25),
    "  ppo": (("rlhf_core/ppo",), 3_600, 20),
    "  evaluation": (("rlhf_core/evaluation",), 5_800, 35),
    "  all else": ((*(f"rlhf_core/{name}" for name in REST), "rlhf_core/*.py"), 7_000, 40),
    "flows": (("flows",), 10_500, 80),
    "rlhf_extras": (("rlhf_extras",), 7_000, 40),
    "benchmarks": (("benchmarks",), 3_500, 30),
    "tests": (("tests",), 38_000, None),
}
WORDS = 30_000
GENERATED = "<!-- Written by"


def files_of(places: tuple[str, ...]) -> list[Path]:
    """The Python files of a room."""
    found = [ROOT.glob(place) if "*" in place else (ROOT / place).rglob("*.py") for place in places]
    return sorted({file for files in found for file in files})


def print_sizes() -> None:
    """Lines and files by room, and words of prose."""
    print(f"{'room':14}{'lines':>8}{'at most':>9}{'files':>7}{'at most':>9}")
    for room, (places, most_lines, most_files) in ROOMS.items():
        files = files_of(places)
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{room:14}{lines:8}{most_lines:9}{len(files):7}{most_files or '':>9}")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    words = sum(len(text.split()) for text in texts if not text.startswith(GENERATED))
    print(f"README and docs: {words} words, at most {WORDS} (pages that a command writes apart)")


@contextmanager
def traced(formula: str = "", root: str = "") -> Iterator[dict[str, Any]]:
    """Collect the files of rlhf_core whose functions run in the block, and the frames from ``root``
    to ``formula``.

    What a line of imports executes does not count.
    """
    core = str(ROOT / "rlhf_core")
    found: dict[str, Any] = {"files": set(), "frames": []}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or not code.co_filename.startswith(core):
            return
        found["files"].add(code.co_filename)
        if code.co_name == formula and not found["frames"]:
            names, above = [code.co_name], frame.f_back
            while above is not None and names[-1] != root:
                names.append(above.f_code.co_name)
                above = above.f_back
            found["frames"] = names[::-1]

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def print_traces() -> None:
    """What one iteration, one surrogate and one pair touch."""
    import torch

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    from unit.ppo.tiny import make_config, make_tiny, make_trainer

    torch.set_num_threads(
        torch.get_num_threads() * 2
    )  # passes one after the other: a profile is of one thread
    with tempfile.TemporaryDirectory() as work:
        config = make_config(checkpoint={"every": 1000}, selection={"every": 1000})
        trainer = make_trainer(make_tiny(), config, Path(work))
        with traced("clipped_surrogate", "update") as found:
            trainer.iterate()
    print(f"one PPO iteration: {len(found['files'])} files, at most 25")
    print(
        f"from update to the formula: {len(found['frames'])} frames, at most 5 ({' → '.join(found['frames'])})"
    )
    with tempfile.TemporaryDirectory() as folder:
        print(f"a pair from disk to the loss: {len(pair_files(Path(folder)))} files, at most 45")


def pair_files(folder: Path) -> set[str]:
    """The files that ran while pairs of a JSON-lines file were collected, validated and trained
    on.
    """
    from unit.training.tiny import make_workspace, preferences

    from rlhf_core.config.data import CollectConfig, ValidateConfig
    from rlhf_core.config.reward import RewardConfig
    from rlhf_core.stages import collect, reward, validate
    from rlhf_core.stages.runtime.contract import Paths
    from rlhf_core.training.run_context import RunContext

    make_workspace(folder)
    shutil.copytree(ROOT / "expectations", folder / "expectations")
    with (folder / "pairs.jsonl").open("w") as lines:
        for row in preferences(300):
            record = {
                "prompt": f"{row.prompt[0].content} {row.id}?",
                "chosen": row.chosen,
                "rejected": row.rejected,
            }
            lines.write(json.dumps(record) + "\n")
    given = {"source": "files", "files": {"preferences": [{"path": "pairs.jsonl"}]}}
    configs = (
        CollectConfig.model_validate(given),
        ValidateConfig(),
        RewardConfig(init="base", steps=1),
    )
    found: set[str] = set()
    for module, config in zip((collect, validate, reward), configs, strict=True):
        stage: Any = module.STAGE
        inputs, outputs = (
            Paths({k: folder / path for k, path in of.items()})
            for of in (stage.inputs, stage.outputs)
        )
        for path in outputs.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        with traced() as here:
            # Without the other kinds the data gate fails, after the clean pairs are written.
            more = {"kinds": ("preferences",)} if stage.name == "validate" else {}
            stage.run(config, inputs, outputs, RunContext(folder / "work" / stage.name), **more)
        found |= here["files"]
    return found


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", action="store_true", help="also run a tiny model and print what it touches"
    )
    asked = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `… | head`
    print_sizes()
    if asked.trace:
        print_traces()
    return 0


if __name__ == "__main__":
    sys.exit(main())
