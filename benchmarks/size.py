"""How much there is to read: ``python -m benchmarks.size [--trace]``.

Prints of every room the nodes of its syntax tree and the tokens of a line of code, neither of which
line breaks change much, and the words of README and docs. With ``--trace`` a tiny model makes one
PPO iteration, and a preference pair goes from disk to the loss: printed are the files of
``rlhf_core`` that hold 95 % of the lines of the functions that ran, and the frames from ``update``
to the clipped surrogate.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import signal
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlhf_core", "flows", "rlhf_extras", "benchmarks", "tests")
WORDS = 30_000
GENERATED = "<!-- Written by"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SAID = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
MOST_OF_THE_LINES = 0.95


def print_sizes() -> None:
    """Nodes and tokens a line by room, and words of prose."""
    print(f"{'room':16}{'files':>6}{'nodes':>9}{'tokens a line':>15}")
    for package in PACKAGES:
        print_room(package, ROOT / package)
        if package in ("rlhf_core", "flows"):
            for folder in sorted((ROOT / package).iterdir()):
                if any(folder.glob("*.py")):
                    print_room(f"  {folder.name}", folder)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    words = sum(len(text.split()) for text in texts if not text.startswith(GENERATED))
    print(f"README and docs: {words} words, at most {WORDS} (pages that a command writes apart)")


def print_room(name: str, folder: Path) -> None:
    """Print the line of one room."""
    nodes = lines = tokens = 0
    files = sorted(folder.rglob("*.py"))
    for file in files:
        tree = ast.parse(file.read_bytes())
        left_out = docstrings_and_imports(tree)
        nodes += nodes_to_understand(tree)
        with tokenize.open(file) as text:
            found = [
                token for token in tokenize.generate_tokens(text.readline) if token.type in SAID
            ]
        rows = [token.start[0] for token in found if token.start[0] not in left_out]
        tokens += len(rows)
        lines += len(set(rows))
    print(f"{name:16}{len(files):6}{nodes:9,}{tokens / max(lines, 1):15.1f}")


def docstrings_and_imports(tree: ast.Module) -> set[int]:
    """The lines of docstrings and imports."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines |= lines_of(node.body[0])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            lines |= lines_of(node)
    return lines


def lines_of(node: ast.stmt) -> set[int]:
    """The numbers of the lines that a statement stands on."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def nodes_to_understand(node: ast.AST) -> int:
    """Count the nodes below and with this one, without docstrings, annotations and contexts."""
    count = 1
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "ctx"):
            continue
        children = value if isinstance(value, list) else [value]
        if (
            name == "body"
            and isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, False) is not None
        ):
            children = children[1:]
        count += sum(nodes_to_understand(child) for child in children if isinstance(child, ast.AST))
    return count


class Trace:
    """The functions of rlhf_core that ran, and the frames from one to another."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.frames: list[str] = []

    def files(self) -> list[str]:
        """The fewest files that hold 95 % of the lines of these functions, the largest first."""
        lines: dict[str, int] = {}
        for code in self.functions:
            own = {line for _, _, line in code.co_lines() if line is not None}
            lines[code.co_filename] = lines.get(code.co_filename, 0) + len(own)
        wanted, held, files = MOST_OF_THE_LINES * sum(lines.values()), 0, []
        for file in sorted(lines, key=lambda name: -lines[name]):
            if held >= wanted:
                break
            held += lines[file]
            files.append(file)
        return files


@contextmanager
def traced(formula: str = "", root: str = "") -> Iterator[Trace]:
    """Collect what runs in the block, and the frames from ``root`` to ``formula``.

    What a line of imports executes does not count.
    """
    core = str(ROOT / "rlhf_core")
    found = Trace()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or not code.co_filename.startswith(core):
            return
        found.functions.add(code)
        if code.co_name == formula and not found.frames:
            names, above = [code.co_name], frame.f_back
            while above is not None and names[-1] != root:
                names.append(above.f_code.co_name)
                above = above.f_back
            found.frames = names[::-1]

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def print_traces() -> None:
    """What one iteration, one surrogate and one pair run through."""
    import torch

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    from unit.ppo.tiny import make_config, make_tiny, make_trainer

    # Passes one after the other: a profile is of one thread.
    torch.set_num_threads(torch.get_num_threads() * 2)
    with tempfile.TemporaryDirectory() as work:
        config = make_config(checkpoint={"every": 1000}, selection={"every": 1000})
        trainer = make_trainer(make_tiny(), config, Path(work))
        with traced("clipped_surrogate", "update") as found:
            trainer.iterate()
    print(f"one PPO iteration: {len(found.files())} files hold 95 % of the lines")
    print(f"from update to the formula: {len(found.frames)} frames ({' → '.join(found.frames)})")
    with tempfile.TemporaryDirectory() as folder:
        pair = trace_of_a_pair(Path(folder))
    print(f"a pair from disk to the loss: {len(pair.files())} files hold 95 % of the lines")


def trace_of_a_pair(folder: Path) -> Trace:
    """What runs while pairs of a JSON-lines file are collected, validated and trained on."""
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
    found = Trace()
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
        found.functions |= here.functions
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
