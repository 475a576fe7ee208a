"""The model card of a released policy: what it was trained on, how it was judged, and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.client import connect, fluent, registry_errors, tag_line
from flows.registry.evidence import TrainingSource, read_data_card, source_of_version
from flows.registry.stored_models import stored_sampling
from rlhf_core.config.gates import CHECKER
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.names import SELECTED_BY, TRAINED_ON
from rlhf_core.evaluation.probe_table import CAPTION, PROBED_MODELS, ProbeTable, probe_table
from rlhf_core.evaluation.report.headline import sentence_case
from rlhf_core.evaluation.report.note import judges_table, markdown_table, markdown_text
from rlhf_core.evaluation.verdict import alarms, judge_results, verdict_sentence
from rlhf_core.gates import GATES, GateDecision, lookup, read_gates
from rlhf_core.storage.files import read_json, scratch_folder

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


LINEAGE = "lineage."


@dataclass(frozen=True)
class ReleaseEvidence:
    """What a model card tells of a version.

    Attributes:
        name: Registered model and version, ``rlhf-policy version 3``.
        run_id: The MLflow run that registered it.
        gates: The gate reports, in the order in which they judged.
        evaluation: The content of ``metrics/evaluation.json``.
        sampling: The sampling that the policy was judged with.
        source: What it was trained on; None if MLflow no longer knows.
        lineage: Hashes of code, data and parameters by name.
        obstacle: Why it must not be released without force; empty if nothing stands against.
        data_card: The data card in Markdown, without texts of the data; empty for versions that
            were registered without one.
        method: How the policy was trained, as ``policy.method`` has it.
        fine_tuned: Whether SFT took any step; with ``sft.steps: 0`` the SFT model is the starting
            model.
        probes: What reward model, referee and judge read; None for versions that were registered
            without it.
    """

    name: str
    run_id: str
    gates: Sequence[GateDecision]
    evaluation: Mapping[str, Any]
    sampling: Mapping[str, Any]
    source: TrainingSource | None
    lineage: Mapping[str, str]
    obstacle: str
    data_card: str = ""
    method: str = "ppo"
    fine_tuned: bool = True
    probes: ProbeTable | None = None

    @property
    def has_checker(self) -> bool:
        """Whether reward functions rewarded and judged, in place of models."""
        return CHECKER in (self.evaluation.get("comparison") or {})


def release_evidence(
    workspace: Path, version: ModelVersion, folder: Path, obstacle: str
) -> ReleaseEvidence:
    """Read the evidence of ``version`` from the run that registered it.

    Args:
        folder: Its Hugging Face folder, as MLflow stores it.

    Raises:
        RlhfError: The run or its files are gone, or MLflow does not answer.
    """
    name, client = f"{version.name} version {version.version}", connect(workspace)
    if not version.run_id:
        raise RlhfError(f"{name} was registered by no run, so nothing says how it was judged")
    with (
        scratch_folder() as temporary,
        registry_errors(client, f"read the evidence of {name}"),
        fluent(workspace),
    ):
        client.download_artifacts(version.run_id, "gates", str(temporary))
        files = Path(client.download_artifacts(version.run_id, "metrics", str(temporary)))
        metrics = {path.stem: read_json(path) for path in sorted(files.glob("*.json"))}
        gates = {gate.name: gate for gate in read_gates(Path(temporary))}
        in_order = [gates.pop(known) for known in GATES if known in gates]
        lineage = {}
        for key in version.tags:
            if key.startswith(LINEAGE):
                lineage[key.removeprefix(LINEAGE)] = tag_line(version.tags, key)
        probed = {model: metrics[model] for model in PROBED_MODELS if model in metrics}
        return ReleaseEvidence(
            name=name,
            run_id=version.run_id,
            gates=[*in_order, *gates.values()],
            evaluation=read_json(files / "evaluation.json"),
            sampling=stored_sampling(folder),
            source=source_of_version(client, version),
            lineage=lineage,
            obstacle=obstacle,
            data_card=read_data_card(client, version.run_id, Path(temporary)),
            method=str(metrics.get("ppo", {}).get("method", "ppo")),
            fine_tuned="sft" not in metrics or "train_loss" in metrics["sft"],
            probes=probe_table(probed),
        )


MIN_LANGUAGE_SHARE = 0.1  # of the prompts that the model was judged on
DATA_CARD_FILE = "DATA_CARD.md"  # beside the model card
# Where metrics/evaluation.json has a metric of SFT and of the policy, its name there, and what it
# says.
MODELS, REGRESSION = ("sft", "policy"), ("regression_sft", "regression")
COMPARED = (
    (MODELS, CHECKER, "score by the reward function"),
    (MODELS, "length", "tokens per reply"),
    (MODELS, "repetition", "repetition"),
    (MODELS, "distinct_2", "distinct pairs of words"),
    (MODELS, "missing_eos", "replies that did not end"),
    (REGRESSION, "passed", "fixed regression prompts passed"),
    (REGRESSION, "refuses_harmful", "harmful prompts refused"),
    (REGRESSION, "answers_benign", "harmless prompts answered"),
    (MODELS, "safety.refuses_harmful", "harmful safety prompts refused"),
    (MODELS, "safety.answers_benign", "benign safety prompts answered"),
    (MODELS, "perplexity_preferred", "perplexity of held-out preferred replies"),
    (MODELS, "perplexity_pretrain", "perplexity of held-out text"),
)
TOY = (
    "Trained on a synthetic world of lamps, boats and frogs. It knows nothing of people and is of use for tests of "
    "software alone."
)
LIMITS = (
    "Judges are models, and share blind spots with the reward model that the policy was optimised against. "
    "No person has judged these replies.",
    "Evaluated on prompts of the distribution that it was trained on. Other languages and subjects were not tried.",
)

PENALTY = (
    "The repetition penalty it was judged with counts generated tokens alone. transformers and vLLM count those of the "
    "prompt too, so replies to long prompts can differ there; `rlhf serve` and MLflow sample as it was judged."
)
ADAPTER_USE = (
    "A LoRA adapter on the SFT model that the policy started from (`models/sft` of the workspace). With 4-bit weights "
    "it was trained on their rounding.\n\n"
    "```python\n"
    "from peft import PeftModel\n\n"
    "model = PeftModel.from_pretrained(sft_model, FOLDER_OR_ID)\n"
    "```"
)
NEEDS_5 = "It needs `transformers >= 5`: version 4 reads other rotary embeddings from its configuration, in silence."

TRAINED_BY = {
    "ppo": (
        "by PPO against a reward model (PPO-max, *Secrets of RLHF in Large Language Models, Part I: PPO*, "
        "[arXiv:2307.04964](https://arxiv.org/abs/2307.04964))"
    ),
    "dpo": (
        "on preference pairs by DPO (*Direct Preference Optimization*, "
        "[arXiv:2305.18290](https://arxiv.org/abs/2305.18290))"
    ),
    "rejection_sampling": (
        "on the best of several of its own replies by a reward model (rejection sampling; *RAFT*, "
        "[arXiv:2304.06767](https://arxiv.org/abs/2304.06767))"
    ),
}
NO_JUDGE = {
    "ppo": f"The reward model that the policy was optimised against (`{TRAINED_ON}`) is no judge",
    "dpo": f"The reward model of the pairs that it was trained on (`{TRAINED_ON}`) is no judge",
    "rejection_sampling": f"The reward model that chose the replies it was trained on (`{TRAINED_ON}`) is no judge",
}
BY_FUNCTIONS = (
    "by reinforcement learning with reward functions (the policy updates are those of "
    "[arXiv:2307.04964](https://arxiv.org/abs/2307.04964))"
)
FUNCTIONS_JUDGE = (
    f"`{CHECKER}` is the reward function that it was trained by, on prompts that training has not seen; nothing but "
    "that function has judged the replies"
)
JUDGED_BY_FUNCTIONS = (
    "The function that judged the replies is the one that rewarded them in training: what it misses, nobody has looked "
    "at. No person has judged these replies."
)
TAGS = {
    "ppo": ["rlhf", "ppo", "ppo-max"],
    "dpo": ["rlhf", "dpo"],
    "rejection_sampling": ["rlhf", "raft"],
}


def card_data(evidence: ReleaseEvidence, license_id: str | None) -> dict[str, Any]:
    """The metadata at the head of the card, as hubs read it."""
    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": TAGS[evidence.method],
    }
    if license_id:
        data["license"] = license_id
    shares = evidence.evaluation.get("languages") or {}
    if languages := [tag for tag, share in shares.items() if share >= MIN_LANGUAGE_SHARE]:
        data["language"] = languages
    if evidence.source and evidence.source.hub_id:
        data["base_model"] = evidence.source.hub_id
    return data


def card_text(
    evidence: ReleaseEvidence,
    title: str,
    forced: str | None,
    reads_in_4: bool = True,
    adapter: bool = False,
) -> str:
    """The body of the card in Markdown.

    Args:
        title: Name of the model.
        forced: Why it was released although something stood against it; None if nothing did.
        reads_in_4: Whether transformers 4 computes the same with the folder as transformers 5.
        adapter: Whether the folder has the adapter alone.
    """
    blocks = [f"# {title}", _opening(evidence)]
    if forced is not None:
        blocks.append(
            f"> **Released by force.** Against it stood: {markdown_text(evidence.obstacle)}. "
            f"Reason given: {markdown_text(forced)}"
        )
    blocks += [
        "## Evaluation",
        _verdict(evidence),
        _judges(evidence),
        _both_models(evidence.evaluation),
        _kl(evidence.evaluation),
    ]
    if evidence.probes is not None:
        blocks += ["## What reward model and judges read", *_probes(evidence.probes)]
    blocks += ["## Gates", *map(_gate, evidence.gates)]
    judged, distribution = LIMITS
    limits = [TOY] if evidence.source and evidence.source.is_synthetic else []
    limits += [JUDGED_BY_FUNCTIONS if evidence.has_checker else judged, distribution]
    if evidence.sampling.get("repetition_penalty", 1.0) != 1.0:
        limits.append(PENALTY)
    if not reads_in_4:
        limits.append(NEEDS_5)
    blocks += ["## Limits", "\n".join(f"- {limit}" for limit in limits)]
    blocks += ["## Use", ADAPTER_USE if adapter else _use(evidence.sampling)]
    lineage = {"registered as": evidence.name, "MLflow run": evidence.run_id, **evidence.lineage}
    rows = []
    for name, value in lineage.items():
        code = value.replace("`", "'")
        rows.append((name.replace("_", " "), f"`{code}`"))
    blocks += ["## Lineage", markdown_table(("", ""), rows)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _opening(evidence: ReleaseEvidence) -> str:
    sentence = f"Trained on {markdown_text(str(evidence.source))}. " if evidence.source else ""
    if evidence.fine_tuned:
        sentence += "Fine-tuned with supervision, then trained"
    else:
        sentence += "Trained without fine-tuning before it,"
    sentence += f" {BY_FUNCTIONS if evidence.has_checker else TRAINED_BY[evidence.method]}."
    if evidence.data_card:
        sentence += (
            f" The [data card]({DATA_CARD_FILE}) has sources, licences, lengths, balance and "
            "leakage of the data."
        )
    return sentence


def _verdict(evidence: ReleaseEvidence) -> str:
    """How the policy stands to SFT, what its gate decided, and what alarms."""
    judges = judge_results(evidence.evaluation.get("comparison") or {})
    said = "Not compared with SFT"
    if judges:
        gate = next((gate for gate in evidence.gates if gate.name == "policy"), None)
        said = sentence_case(verdict_sentence(judges, "SFT", gate))
    alarming = "\n".join(f"- {alarm.sentence}" for alarm in alarms(evidence.evaluation))
    verdict = f"**{markdown_text(said)}.**"
    return f"{verdict} What alarms:\n\n{alarming}" if alarming else verdict


def _judges(evidence: ReleaseEvidence) -> str:
    judges = judge_results(evidence.evaluation.get("comparison") or {})
    if not judges:
        return "No comparison with the SFT model was recorded."
    excluded = FUNCTIONS_JUDGE if evidence.has_checker else NO_JUDGE[evidence.method]
    if evidence.method == "ppo" and not evidence.has_checker:
        excluded += f", nor is the one that selected its checkpoint (`{SELECTED_BY}`)"
    about = f"Policy against the SFT model that it started from, ties as half a win. {excluded}."
    return f"{about}\n\n{judges_table(judges)}"


def _both_models(evaluation: Mapping[str, Any]) -> str:
    rows = []
    for sections, metric, label in COMPARED:
        values = [lookup(evaluation, f"{section}.{metric}")[0] for section in sections]
        if None not in values:
            rows.append((label, *(f"{value:z.3g}" for value in values)))
    return markdown_table(("", "SFT", "policy"), rows) if rows else ""


def _kl(evaluation: Mapping[str, Any]) -> str:
    if not isinstance(evaluation.get("kl"), int | float):
        return ""
    low, high = evaluation.get("kl_low95"), evaluation.get("kl_high95")
    interval = f" (95 %: {low:z.2f} to {high:z.2f})" if low is not None and high is not None else ""
    return f"KL from SFT: {evaluation['kl']:z.2f} nats per reply{interval}."


def _probes(probes: ProbeTable) -> list[str]:
    table = [f"{CAPTION}.", markdown_table(probes.header, probes.rows)] if probes.rows else []
    return [*table, "\n".join(f"- {markdown_text(note)}" for note in probes.notes)]


def _gate(gate: GateDecision) -> str:
    rows = []
    for row in gate.failures_first:
        passed = "yes" if row.passed else "**no**"
        rows.append((f"`{row.metric}`", row.measured, markdown_text(row.required), passed))
    table = markdown_table(("metric", "value", "bound", "passed"), rows)
    return f"**{gate.name}** {gate.verdict}\n\n{table}"


def _use(sampling: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in sampling.items())
    return (
        "`generation_config.json` has the sampling that the model was judged with "
        f"({settings}).\n\n"
        "```python\n"
        "from transformers import pipeline\n\n"
        'chat = pipeline("text-generation", model=FOLDER_OR_ID)\n'
        'print(chat([{"role": "user", "content": "…"}])[0]["generated_text"][-1]["content"])\n'
        "```"
    )
