"""The doors of evaluations and judges: what packages add to stage evaluate, where settings name it.

An entry point of ``rlhf.evaluations`` is a subclass of :class:`AddedEvaluation`, one of
``rlhf.judges`` makes a ``Judge`` or ``PairwiseJudge`` of its settings and the workspace. Opponents,
multiple choice and the judge ``llm`` come with the extras.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.comparisons.rivals import Rival
from rlhf_core.evaluation.judges.model import Judge, PairwiseJudge
from rlhf_core.evaluation.replies import Reply
from rlhf_core.plugins import EVALUATIONS, JUDGES, PluginError, lacks, load_plugin, made_by_plugin


class AddedEvaluation:
    """What a plugin subclasses; stage evaluate calls the methods in this order.

    Args:
        settings: Those of params.yaml. A mistake in them, or in a file that they name, is raised
            here, before hours of sampling.
        prompts: The prompts whose replies are judged.
        workspace: The folder that relative paths start at.
    """

    def __init__(self, settings: Any, prompts: Sequence[Prompt], workspace: Path) -> None:
        self.settings = settings
        self.prompts = prompts
        self.workspace = workspace

    def measure(
        self, side: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int
    ) -> None:
        """Measure a model while it is in memory: ``sft``, then ``policy``. All ranks call it.

        Args:
            side: Which of the two models this is.
            model: The model.
            tokenizer: Its tokenizer.
            size: ``evaluate.batch_size``.
        """

    def replies(self) -> Mapping[str, Sequence[Reply | None]]:
        """Return further replies by name: one to each prompt, or None.

        Every judge compares them with those of both models.
        """
        return {}

    def metrics(self, rivals: Mapping[str, Rival], groups: Sequence[str]) -> Mapping[str, Any]:
        """Return what is added to ``metrics/evaluation.json``.

        Args:
            rivals: What :meth:`replies` gave, by the same names, as the judges compared it.
            groups: The group of each prompt, such as ``helpful``; "" for none.
        """
        return {}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``.rlhf/NAME.jsonl``; no file is written where there are none."""
        return []


def added_evaluations(
    config: EvaluateConfig, prompts: Sequence[Prompt], workspace: Path
) -> dict[str, AddedEvaluation]:
    """Return the evaluations that the settings name, each with its files read."""
    evaluations = {}
    for name, settings in config.named_evaluations.items():
        plugin = load_plugin(EVALUATIONS, name)
        evaluations[name] = made_by_plugin(EVALUATIONS, name, plugin, settings, prompts, workspace)
    return evaluations


def plugged_judges(named: Mapping[str, Any], workspace: Path) -> list[Judge | PairwiseJudge]:
    """Return the judges of packages by the names and settings of ``named``.

    Raises:
        PluginError: One is not installed, cannot be made, lacks a part of a judge, or goes by
            another name.
    """
    judges = []
    for name, settings in named.items():
        plugin = load_plugin(JUDGES, name)
        judge: Judge | PairwiseJudge = made_by_plugin(JUDGES, name, plugin, settings, workspace)
        parts = ["name"]
        if not isinstance(judge, PairwiseJudge):
            parts += ["score", "absolute_tie"]
        for part in parts:
            if not hasattr(judge, part):
                raise lacks(JUDGES, name, part)
        if judge.name != name:
            raise PluginError(f"the judge {name} of {JUDGES} calls itself {judge.name!r}")
        judges.append(judge)
    return judges


def added_into(metrics: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add ``more`` to ``metrics``, at every depth of both.

    Raises:
        PluginError: A metric of this name is there: a number that gates read is never replaced.
    """
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(metrics.get(name, {}), dict):
            added_into(metrics.setdefault(name, {}), value)
        elif name in metrics:
            raise PluginError(
                f"an evaluation of {EVALUATIONS} gives {name}, which is a metric already"
            )
        else:
            metrics[name] = value
