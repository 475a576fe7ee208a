"""A registered policy as a Hugging Face folder: loads in plain transformers, and says how it was
judged.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from commands import run
from huggingface_hub import ModelCard
from integration.registry.conftest import commit, write_gate
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.registry.promote import promote
from flows.registry.register import register
from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import EXIT_USER_ERROR, GateFailed, ModelError, RlhfError
from rlhf_core.models.adapters import add_adapters, merge_adapters, peft_adapter
from rlhf_core.models.causal_lm import load_policy, save_policy
from rlhf_core.storage.files import sha256_file
from rlhf_extras.release.export import export

JUDGED = {
    "win_rate": 0.67,
    "win_rate_low95": 0.63,
    "win_rate_high95": 0.71,
    "prompts": 8,
    "clusters": 8,
}
BACKENDS = ["sqlite", pytest.param("server", marks=pytest.mark.slow)]
pytestmark = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
CLOSED_PORT = "http://127.0.0.1:9"


@pytest.fixture
def released(workspace: Path) -> Path:
    """A workspace whose champion was judged by a judge."""
    evaluation = {"kl": 1.0, "comparison": {"judge": JUDGED}, "nested": {"win_rate": 0.7}}
    (workspace / "metrics" / "evaluation.json").write_text(json.dumps(evaluation))
    write_gate(workspace, "policy", ["metrics/evaluation.json", "metrics/ppo.json"])
    (workspace / "data/card").mkdir(parents=True)
    (workspace / "data/card/release.md").write_text("# Data card\n")
    (workspace / "data/card/card.md").write_text("# Data card with texts of the data\n")
    commit(workspace)
    register(workspace)
    assert promote(workspace).promoted
    return workspace


def test_the_champion_loads_in_plain_transformers_with_its_card(
    released: Path, tmp_path: Path
) -> None:
    done = export(released, tmp_path / "my-model", license_id="apache-2.0")
    assert (
        done.folder == tmp_path / "my-model"
        and done.name.endswith("version 1")
        and done.address is None
    )
    where, *next_steps = done.describe().splitlines()
    assert (
        where.endswith(f"version 1 is in {done.folder}")
        and next_steps[0] == f"next: rlhf chat {done.folder}"
    )
    assert (
        f"vllm serve {done.folder}" in next_steps[1] and "transformers.pipeline(" in next_steps[2]
    )
    weights = "model.safetensors"
    assert sha256_file(done.folder / weights) == sha256_file(
        released / "models" / "policy" / weights
    )
    model = AutoModelForCausalLM.from_pretrained(done.folder)
    settings = model.generation_config
    assert (settings.do_sample, settings.temperature, settings.repetition_penalty) == (
        True,
        0.8,
        1.1,
    )
    assert settings.max_new_tokens == 8 and settings.eos_token_id == model.config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(done.folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what colour is the sky?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    torch.manual_seed(1)
    assert asked.shape[1] < model.generate(asked).shape[1] <= asked.shape[1] + 8
    written = (done.folder / "Modelfile").read_text()
    assert 'TEMPLATE """' in written and "PARAMETER temperature 0.8" in written
    card = ModelCard.load(done.folder / "README.md")
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert "| judge | 67.0 % | 63.0 % to 71.0 % |  | 8 |" in card.text
    assert (
        done.folder / "DATA_CARD.md"
    ).read_text() == "# Data card\n" and "(DATA_CARD.md)" in card.text
    assert [
        f"**{gate}** passed" in card.text for gate in ("data", "sft", "reward", "policy")
    ] == 4 * [True]


@pytest.mark.slow
def test_nothing_narrows_the_sampling_that_it_was_judged_with(
    workspace: Path, tmp_path: Path
) -> None:
    """Neither settings of the model that training began with, nor the 50 likeliest tokens of
    transformers' default.
    """
    folder = workspace / "models" / "policy"
    model, tokenizer = load_policy(folder)
    assert model.generation_config is not None
    model.generation_config.update(do_sample=True, top_k=3, min_p=0.5, no_repeat_ngram_size=2)
    save_policy(folder, model, tokenizer)
    commit(workspace)
    register(workspace)
    exported = AutoModelForCausalLM.from_pretrained(
        export(workspace, tmp_path / "out", version="1").folder
    )
    settings = exported.generation_config
    assert (settings.top_k, settings.min_p, settings.no_repeat_ngram_size) == (0, None, None)
    assert (
        settings.eos_token_id == model.generation_config.eos_token_id
        and settings.temperature == 0.8
    )


@pytest.mark.slow
def test_an_adapter_is_exported_where_one_was_trained(workspace: Path, tmp_path: Path) -> None:
    """Base and adapter of PEFT compute what the registered policy does, whose own export is a plain
    model.
    """
    from peft import PeftModel

    with pytest.raises(RlhfError, match="it was not trained as one"):
        register(workspace)
        export(workspace, tmp_path / "none", version="1", adapter=True)
    assert not (tmp_path / "none").exists()
    policy, tokenizer = load_policy(workspace / "models" / "policy")
    policy.save_pretrained(tmp_path / "sft")
    add_adapters(policy, LoraConfig(rank=2, alpha=4, upper_layers=1), seed=1)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    adapter = peft_adapter(policy)
    merge_adapters(policy)
    save_policy(workspace / "models" / "policy", policy, tokenizer, adapter=adapter)
    commit(workspace)
    register(workspace)
    done = export(workspace, tmp_path / "adapter", version="2", adapter=True)
    assert "PeftModel.from_pretrained" in done.describe()
    card = ModelCard.load(done.folder / "README.md")
    assert card.data.library_name == "peft" and "PeftModel.from_pretrained" in card.text
    assert not (done.folder / "model.safetensors").exists()
    plain = export(workspace, tmp_path / "plain", version="2").folder
    assert not (plain / "adapter").exists()
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "sft"), str(done.folder)
    )
    ids = torch.arange(1, 60)[None]
    with torch.inference_mode():
        merged = AutoModelForCausalLM.from_pretrained(plain)(ids).logits
        assert torch.allclose(adapted(ids).logits, merged, atol=1e-5)
        assert not torch.allclose(
            AutoModelForCausalLM.from_pretrained(tmp_path / "sft")(ids).logits, merged, atol=1e-2
        )
    assert AutoTokenizer.from_pretrained(done.folder).chat_template == tokenizer.chat_template


@pytest.mark.slow
def test_a_folder_in_use_and_changed_files_are_refused(released: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note.txt").write_text("mine")
    with pytest.raises(RlhfError, match="not an empty folder"):
        export(released, tmp_path / "used")
    with pytest.raises(RlhfError, match="has no version 9"):
        export(released, tmp_path / "new", version="9")
    if not os.environ.get("MLFLOW_TRACKING_URI"):  # files on the server cannot be reached from here
        (stored,) = (released / "mlartifacts").rglob("artifacts/policy/config.json")
        stored.write_text(stored.read_text() + "\n")
        with pytest.raises(ModelError, match="not the ones that were registered"):
            export(released, tmp_path / "new")
    assert not (tmp_path / "new").exists() and os.listdir(tmp_path / "used") == ["note.txt"]


@pytest.mark.slow
def test_an_ungated_version_is_released_by_force_alone(workspace: Path, tmp_path: Path) -> None:
    write_gate(
        workspace,
        "policy",
        ["metrics/evaluation.json", "metrics/ppo.json"],
        passed=False,
        mode="report",
    )
    commit(workspace)
    register(workspace)
    with pytest.raises(GateFailed, match="version 1 is ungated"):
        export(workspace, tmp_path / "out", version="1")
    assert not (tmp_path / "out").exists()
    export(workspace, tmp_path / "out", version="1", force_reason="for a study")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "Released by force" in card
        and "for a study" in card
        and "**policy** failed, mode report" in card
    )


@pytest.mark.slow
def test_a_push_that_cannot_work_is_one_line(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for repository, token, reason in (
        ("no-owner", "hf_secret", "write it as owner/name"),
        ("owner/name", "", "set HF_TOKEN"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(RlhfError, match=reason) as refusal:
            export(released, target, push=repository)
        assert refusal.value.exit_code == EXIT_USER_ERROR and not target.exists()

    environment = {
        "HF_TOKEN": "hf_secret",
        "HF_ENDPOINT": CLOSED_PORT,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    command = ("rlhf", "export", target, "--push", "owner/name", "--workspace", released)
    done = run(*command, cwd=tmp_path, **environment)
    assert done.returncode == EXIT_USER_ERROR and done.stderr.count("\n") == 1
    assert (
        f"{target} is written, but could not be pushed to owner/name" in done.stderr
        and target.is_dir()
    )
    assert "hf_secret" not in done.stdout + done.stderr


@pytest.mark.slow
def test_an_empty_folder_is_filled_and_not_replaced(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a mount point, the end of a link, or the current folder of a shell."""
    folder, link = tmp_path / "disk", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    known = folder.stat().st_ino
    monkeypatch.chdir(folder)
    written = export(released, Path())
    assert (folder / "model.safetensors").is_file() and folder.stat().st_ino == known
    assert "# disk" in (folder / "README.md").read_text() and written.describe()
    for file in folder.iterdir():
        file.unlink()
    export(released, link)
    assert (
        link.is_symlink()
        and (folder / "model.safetensors").is_file()
        and folder.stat().st_ino == known
    )
    assert not [file for file in folder.iterdir() if file.is_dir()]
