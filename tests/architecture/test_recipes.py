"""The recipes of CONTRIBUTING.md, each followed to the letter in a copy of the project.

A file that a step changes must be named in the recipe, and the tests that it sends to must pass.
"Add an extra" needs an installation of its own; `tests/unit/test_plugins.py` tries its doors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.errors import EXIT_GATE_FAILED

ROOT = Path(__file__).resolve().parents[2]
PAGES = "tests/unit/test_config_command.py"
FOLDERS = ("rlhf_core", "flows", "rlhf_extras", "tests", "docs", "profiles", "expectations")


class Copy:
    """A copy of the project in which one recipe is followed."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder = folder
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__", "generated")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        for pattern in ("*.md", "*.yaml", "*.yml", "*.toml", "*.cff", "Makefile"):
            for path in ROOT.glob(pattern):
                shutil.copy(path, folder)
        guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        (self.recipe,) = re.findall(rf"^## {recipe}\n(.*?)(?=^## |\Z)", guide, re.M | re.S)

    def change(self, file: str, old: str, new: str) -> None:
        """Replace a text that a file of the recipe has once."""
        assert file in self.recipe, f"the recipe does not name {file}"
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new), encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        """Write a new file of the recipe, in a folder that it names."""
        assert file in self.recipe or f"{Path(file).parent}/" in self.recipe, file
        (self.folder / file).write_text(textwrap.dedent(text), encoding="utf-8")

    def page(self, option: str, page: str) -> None:
        """Write a page that is made by `rlhf config`, as the recipe says."""
        assert f"`rlhf config {option} > {page}`" in " ".join(self.recipe.split())
        printed = self.rlhf("config", option)
        (self.folder / page).write_text(printed, encoding="utf-8")

    def test(self, *arguments: str) -> None:
        """Run tests of the copy."""
        self._python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)

    def rlhf(self, *arguments: str, exits: int = 0) -> str:
        """Run a command of the copy, with the copy as its workspace."""
        return self._python("-m", "rlhf_core", *arguments, exits=exits)

    def _python(self, *arguments: str, exits: int = 0) -> str:
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == exits, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
        return done.stdout


def add_a_reward_source(copy: Copy) -> None:
    file = "rlhf_core/config/reward_sources.py"
    source = '''
        class LengthSource(SourceConfig):
            """Takes off a point for each word that a reply has too many or too few.

            Attributes:
                words: How many it should have.
            """

            kind: Literal["length"] = "length"
            words: PositiveInt = 40


        '''
    union = "RewardSource = SerializeAsAny["
    copy.change(file, union, textwrap.dedent(source).lstrip() + union)
    copy.change(file, "FunctionSource)", "FunctionSource, LengthSource)")
    copy.write(
        "rlhf_core/ppo/reward_sources/length.py",
        '''
        """Rewards by the length of a reply."""

        from torch import Tensor

        from rlhf_core.ppo.reward_sources.source import Replies, checked_rewards


        class LengthRewards:
            """Takes off a point for each word that a reply has too many or too few."""

            def __init__(self, words: int) -> None:
                self.words = words
                self.metrics: dict[str, float] = {}

            def rewards(self, replies: Replies) -> Tensor:
                """One raw reward per reply (B,)."""
                off = [-abs(len(text.split()) - self.words) for text in replies.texts]
                return checked_rewards(off, replies, "length")
        ''',
    )
    file = "rlhf_core/ppo/reward_sources/build.py"
    copy.change(
        file,
        "    FunctionSource,\n    ModelSource,",
        "    FunctionSource,\n    LengthSource,\n    ModelSource,",
    )
    last = "    score = made_by_plugin("
    branch = (
        "    if isinstance(source, LengthSource):\n"
        "        from rlhf_core.ppo.reward_sources.length import LengthRewards\n\n"
        "        return RankShared(LengthRewards(source.words))\n"
    )
    copy.change(file, last, branch + last)
    (example,) = re.findall(r"^        (sources = .*?)\n\n", copy.recipe, re.M | re.S)
    body = textwrap.indent(textwrap.dedent(f"        {example}"), "    ")
    (copy.folder / "tests/unit/ppo/reward_sources/test_length.py").write_text(
        "from rlhf_core.config.reward_sources import LengthSource\n"
        "from rlhf_core.ppo.reward_sources.build import build_reward_fn\n\n\n"
        f"def test_length(place):\n{body}\n",
        encoding="utf-8",
    )
    copy.page("--markdown", "docs/parameters.md")
    copy.test("tests/unit/ppo/reward_sources/test_length.py", PAGES, "-k", "length or parameters")


def add_a_gate_condition(copy: Copy) -> None:
    (example,) = re.findall(r"```yaml\ngates:\n  policy:\n(.*?)```", copy.recipe, re.DOTALL)
    params = copy.folder / "params.yaml"
    text = params.read_text(encoding="utf-8")
    before, gates, after = re.split(r"(\ngates:.*\n)", text)
    assert "\n  policy:\n" in after
    after = after.replace("\n  policy:\n", "\n  policy:\n" + example, 1)
    params.write_text(before + gates + after, encoding="utf-8")
    (copy.folder / "metrics").mkdir()
    for name in ("ppo", "judge"):
        (copy.folder / f"metrics/{name}.json").write_text("{}")
    (copy.folder / "metrics/evaluation.json").write_text(
        json.dumps({"comparison": {"reward": {"win_rate_low95": 0.4}}})
    )
    copy.rlhf("stage", "gate-policy", exits=EXIT_GATE_FAILED)
    decided = json.loads((copy.folder / "gates/policy.json").read_text(encoding="utf-8"))
    metric = "comparison.reward.win_rate_low95"
    (condition,) = [row for row in decided["conditions"] if row["metric"] == metric]
    assert condition["value"] == 0.4 and not condition["passed"]
    assert condition["why"] == "the model that was optimised against must agree"


def add_a_stage(copy: Copy) -> None:
    copy.write(
        "rlhf_core/config/diversity.py",
        '''
        """How many distinct n-grams replies have."""

        from pydantic import PositiveInt

        from rlhf_core.config.model import StageConfig


        class DiversityConfig(StageConfig):
            """Distinct n-grams of the policy's replies.

            Attributes:
                n: Words of an n-gram.
            """

            n: PositiveInt = 2
        ''',
    )
    file = "rlhf_core/config/params.py"
    copy.change(
        file,
        "from rlhf_core.config.evaluation",
        "from rlhf_core.config.diversity import DiversityConfig\nfrom rlhf_core.config.evaluation",
    )
    field = "    compute: ComputeConfig = ComputeConfig()\n"
    copy.change(file, field, f"    diversity: DiversityConfig = DiversityConfig()\n{field}")
    meaning = "        compute: Processes, threads and number formats.\n"
    copy.change(file, meaning, f"        diversity: Distinct n-grams.\n{meaning}")
    copy.change("params.yaml", "\ntracking:\n", "\ndiversity:\n  n: 2\n\ntracking:\n")
    copy.write(
        "rlhf_core/stages/diversity.py",
        '''
        """Stage diversity: distinct n-grams of the policy's replies."""

        from rlhf_core.config.diversity import DiversityConfig
        from rlhf_core.data.schema import read_table
        from rlhf_core.data.text import distinct_n
        from rlhf_core.stages.runtime.contract import Paths, Stage
        from rlhf_core.storage.files import atomic_write_json
        from rlhf_core.training.run_context import RunContext


        def run(
            config: DiversityConfig, inputs: Paths, outputs: Paths, context: RunContext
        ) -> dict[str, float]:
            """Count the distinct n-grams, and write the metrics."""
            replies = read_table(inputs.comparisons, ["policy"]).column("policy").to_pylist()
            metrics = {"distinct": distinct_n(replies, config.n)}
            atomic_write_json(outputs.metrics, metrics)
            return metrics


        STAGE = Stage(
            name="diversity",
            config=DiversityConfig,
            run=run,
            inputs={"comparisons": "samples/comparisons.parquet"},
            outputs={"metrics": "metrics/diversity.json"},
        )
        ''',
    )
    file = "rlhf_core/stages/runtime/runner.py"
    copy.change(file, '"gate-policy", "report",', '"gate-policy", "diversity", "report",')
    stage = """
      diversity:
        cmd: rlhf stage diversity
        deps: [.fingerprints/diversity.txt, samples/comparisons.parquet]
        params: [seed, diversity]
        metrics: [metrics/diversity.json]
    """
    entry = textwrap.indent(textwrap.dedent(stage).strip(), "  ")
    copy.change("dvc.yaml", "\n  report:\n", f"\n{entry}\n\n  report:\n")
    copy.page("--markdown", "docs/parameters.md")
    copy.test(
        "tests/architecture/test_dvc_yaml.py", PAGES, "-k", "diversity or order or parameters"
    )


def add_a_data_reader(copy: Copy) -> None:
    shape = """
        Shape(
            "verdict-columns",
            '{"ask": …, "better": …, "worse": …}',
            prompt="ask",
            replies=("better", "worse"),
        ),
    """
    entry = textwrap.indent(textwrap.dedent(shape).strip(), "    ")
    copy.change("rlhf_core/config/formats.py", "SHAPES = (\n", f"SHAPES = (\n{entry}\n")
    line = '"verdict-columns": lambda q, a, b: {"ask": q, "better": a, "worse": b},'
    file = "tests/unit/data/reading.py"
    copy.change(file, '    "turn-list-pair": lambda', f'    {line}\n    "turn-list-pair": lambda')
    row = "| verdict-columns | | `better` |  |\n"
    file = "docs/data-formats.md"
    copy.change(file, "| nectar | Nectar |", f"{row}| nectar | Nectar |")
    tests = ("tests/unit/data/test_formats.py", "tests/architecture/test_docs_paths.py")
    copy.test(*tests, "-k", "verdict or data_formats")


def add_a_metric(copy: Copy) -> None:
    file = "rlhf_core/evaluation/replies.py"
    last = "    statistics = reply_statistics("
    copy.change(file, last, '    asked = [text.endswith("?") for text in texts]\n' + last)
    copy.change(
        file,
        '"special_tokens": mean(defects)',
        '"special_tokens": mean(defects), "questions": mean(asked)',
    )
    first = "    gold:\n      label: gold score\n"
    meaning = (
        "    questions: {label: questions, meaning: share of replies that end with a question}\n"
    )
    copy.change("rlhf_core/evaluation/report/metrics.yaml", first, meaning + first)
    copy.page("--metrics", "docs/metrics.md")
    copy.test(PAGES, "-k", "page_of_metrics")
    measured = (
        "from rlhf_core.evaluation.replies import Reply, measure_text\n\n\n"
        "def test_questions_by_hand():\n"
        "    replies = [Reply(text, True, (1,)) for text in ('Why?', 'No.')]\n"
        "    assert measure_text(replies)['questions'] == 0.5\n"
    )
    (copy.folder / "tests/unit/evaluation/test_questions.py").write_text(measured)
    copy.test("tests/unit/evaluation/test_questions.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "follow"),
    [
        ("Add a reward source", add_a_reward_source),
        ("Add a gate condition or a gate", add_a_gate_condition),
        ("Add a stage", add_a_stage),
        ("Add a data reader", add_a_data_reader),
        ("Add a metric", add_a_metric),
    ],
)
def test_a_recipe_works(recipe: str, follow: Callable[[Copy], None], tmp_path: Path) -> None:
    follow(Copy(tmp_path, recipe))
