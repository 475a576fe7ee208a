"""`rlhf config`: every setting is explained, the page of parameters is current, and what is asked
for is found.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architecture.glossary import documented
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.commands.config import Setting, settings, show
from rlhf_core.config import yaml_text
from rlhf_core.config.health import rules_for
from rlhf_core.config.loading import check_params
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import overridden
from rlhf_core.errors import ConfigError, RlhfError

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def known() -> dict[str, Setting]:
    return {setting.path: setting for setting in settings(Params)}


def test_the_page_of_parameters_is_what_the_command_prints() -> None:
    printed = show(None, None, markdown=True)
    assert (DOCS / "parameters.md").read_text(encoding="utf-8") == printed, (
        "rlhf config --markdown > docs/parameters.md"
    )


def test_the_page_of_metrics_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(app, ["config", "--metrics"]).output
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == printed, (
        "rlhf config --metrics > docs/metrics.md"
    )


def test_every_setting_says_what_it_does(known: dict[str, Setting]) -> None:
    assert [path for path, setting in known.items() if not setting.meaning] == []


def test_what_it_says_of_metrics_and_paths_exists(known: dict[str, Setting]) -> None:
    named = {name for setting in known.values() for name in setting.shows_in.split(", ") if name}
    assert named and named <= documented()
    paths = re.findall(
        r"`((?:ppo|critic)\.[\w.]+)`", (DOCS / "switches.md").read_text(encoding="utf-8")
    )
    assert paths and set(paths) <= known.keys()


def test_a_default_is_that_of_the_section_that_holds_it(known: dict[str, Setting]) -> None:
    assert known["ppo.critic_optimizer.schedule"].default == "constant"
    assert known["sft.optimizer.schedule"].default == "cosine"
    assert known["ppo.reward.sources"].default == "[{kind: model}]"
    assert known["evaluate.llm_judge.model"].default == "(a text)"
    whole = {setting.path: setting.default for setting in settings(Params, seen={})}
    assert whole["referee"] == whole["evaluate.sampling"] == "{}"


def test_the_default_of_a_section_may_be_written_into_params_yaml() -> None:
    named = [
        setting for setting in settings(Params, seen={}) if setting.default.startswith(("{", "[{"))
    ]
    whole = [
        setting for setting in named if setting.section and re.fullmatch(r"[a-z_.]+", setting.path)
    ]
    written = {setting.path: setting.default for setting in whole}
    assert {"judge", "evaluate.sampling", "gates.sft"} <= written.keys()
    for path, default in written.items():
        check_params(overridden({}, {path: yaml_text.parse_scalar(default)}), path)


def test_one_setting_is_printed_with_the_value_of_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("ppo:\n  kl: {coefficient: 0.1}\n  batch_size: 64\n")
    text = show("ppo.kl.coefficient", tmp_path, markdown=False)
    assert (
        text.startswith("ppo.kl.coefficient: 0.05   here: 0.1\n")
        and "Paper: " in text
        and "\nppo" not in text
    )
    assert "here" not in show("ppo.batch_size", tmp_path, markdown=False)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("ppo.clip", {"ppo.reward.clip", "ppo.advantage.clip", "ppo.surrogate.clip"}),
        ("gates.mode", {"gates.mode"}),
        ("ppo.sampler.kind", {"ppo.sampler[local].kind", "ppo.sampler[vllm].kind"}),
    ],
)
def test_a_path_may_leave_out_what_lies_between(asked: str, found: set[str]) -> None:
    lines = show(asked, None, markdown=False).splitlines()
    assert {line.partition(":")[0] for line in lines if not line.startswith(" ")} == found


def test_a_section_is_printed_whole_and_the_whole_without_repetition() -> None:
    assert "reward.optimizer.betas" in show("reward", None, markdown=False)
    whole = show(None, None, markdown=False)
    assert "base.pretraining.optimizer.betas" in whole and "reward.optimizer.betas" not in whole
    assert "those of `base.pretraining.optimizer`" in whole


def test_a_named_folder_without_parameters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLHF_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert show("ppo.epochs", None, markdown=False).startswith("ppo.epochs: 1\n")
    with pytest.raises(RlhfError, match="is no workspace"):
        show("ppo.epochs", tmp_path, markdown=False)


def test_an_unknown_setting_is_one_line_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"no setting 'ppo.kl.coeficient'; did you mean 'ppo.kl.coefficient'\?"
    ):
        show("ppo.kl.coeficient", None, markdown=False)


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(app, ["config", "ppo.value_clip"])
    assert result.exit_code == 0 and result.output.startswith("ppo.value_clip: 0.2")


def test_the_example_of_changed_health_rules_is_accepted() -> None:
    (example,) = re.findall(
        r"```yaml\n(ppo:\n  health:.*?)```", (DOCS / "metrics.md").read_text(), flags=re.DOTALL
    )
    ppo = check_params(yaml_text.parse(example, "the example")).ppo
    rules = {rule.name: rule for rule in rules_for(ppo.health, ppo.kl.coefficient)}
    assert rules["kl_runaway"].action == "rollback" and "one_opening" not in rules
