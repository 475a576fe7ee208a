"""``rlhf export``: a registered policy as a Hugging Face folder with its model card, on disk or on
a hub.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.registry.client import CHAMPION, connect, get_version
from flows.registry.policies import active_policies
from flows.registry.promote import promotion_obstacle
from flows.registry.stored_models import describe_stopped_policy, policy_with_alias, verified_folder
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import GateFailed, RlhfError, first_line, named_line
from rlhf_core.models.adapters import ADAPTER_FOLDER
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.models.folder_check import ADAPTER_CONFIG
from rlhf_core.storage.files import atomic_dir, clear_unfinished, filled_dir
from rlhf_extras.release.model_card import (
    DATA_CARD_FILE,
    ReleaseEvidence,
    card_data,
    card_text,
    release_evidence,
)
from rlhf_extras.release.ollama import MODELFILE, modelfile

TOKEN_VARIABLE = "HF_TOKEN"


def check_repository(repository: str) -> None:
    """Check the name of the repository and that there is a token, before any work is done.

    Raises:
        RlhfError: The name is no ``owner/name``, or the environment has no token.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise RlhfError(f"--push {repository}: {first_line(error)}") from error
    if repository.count("/") != 1:
        raise RlhfError(f"--push {repository}: write it as owner/name")
    if get_token() is None:
        raise RlhfError(
            f"--push needs a token that may write to {repository}: set {TOKEN_VARIABLE}"
        )


def upload(folder: Path, repository: str, public: bool, message: str) -> str:
    """Upload ``folder`` in one commit; the repository is created if it does not exist.

    Args:
        repository: ``owner/name``.
        public: Counts where the repository has to be made.

    Returns:
        The address of the repository.

    Raises:
        RlhfError: The hub refuses or does not answer; the folder stays, so that it can be pushed
            again.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as error:  # the client's own errors and those of its HTTP library, which depends on its version
        raise RlhfError(
            f"{folder} is written, but could not be pushed to {repository} ({named_line(error)})"
        ) from error
    return str(address)


TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
# What architectures call the base and the rotated share in transformers 4, where not rope_theta and
# partial_rotary_factor.
EARLIER_NAMES = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
}
GLOBAL, LOCAL = "full_attention", "sliding_attention"


def write_earlier_names(folder: Path) -> bool:
    """Add them to ``config.json`` and ``tokenizer_config.json``; False where transformers 4 has no
    name for a setting.

    Those are architectures whose layers have several rotary embeddings, other than a global and a
    local one.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    earlier = earlier_rope(str(text.get("model_type")), text.get("rope_parameters") or {})
    if earlier:
        text.update({name: value for name, value in earlier.items() if name not in text})
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_earlier_tokenizer(folder)
    return earlier is not None


def write_earlier_tokenizer(folder: Path) -> None:
    """Name the tokenizer's class, special tokens and outputs in ``tokenizer_config.json`` as
    transformers 4 does.
    """
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file():
        settings = json.loads(tokenizer.read_text(encoding="utf-8"))
        name = settings.get("tokenizer_class")
        extra = settings.pop("extra_special_tokens", None)
        if isinstance(
            extra, list
        ):  # a mapping in version 4, whose name for a list both versions read
            settings["additional_special_tokens"] = extra
        elif extra is not None:
            settings["extra_special_tokens"] = extra
        settings["tokenizer_class"] = TOKENIZER_CLASSES.get(name, name)
        # Version 4 would add token_type_ids, which the generation of most models refuses.
        settings.setdefault("model_input_names", ["input_ids", "attention_mask"])
        tokenizer.write_text(
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def earlier_rope(model_type: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rotary parameters under the names of transformers 4, None where it has none."""
    if not any(isinstance(value, Mapping) for value in parameters.values()):
        return _one_rope(model_type, parameters)
    if not set(parameters) <= {GLOBAL, LOCAL} or GLOBAL not in parameters:
        return None
    earlier = _one_rope(model_type, parameters[GLOBAL])
    local = parameters.get(LOCAL) or {}
    if local.get("rope_type", "default") != "default":
        return None
    return earlier | (
        {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
    )


def _one_rope(model_type: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    names = EARLIER_NAMES.get(model_type, {})
    rest = dict(parameters)
    earlier = {
        names.get(name, name): rest.pop(name)
        for name in ("rope_theta", "partial_rotary_factor")
        if name in rest
    }
    scaled = rest.get("rope_type", "default") != "default"
    return earlier | ({"rope_scaling": rest} if scaled else {})


GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MODEL_FILES = ("config.json", GENERATION, "model.safetensors.index.json")


@dataclass(frozen=True)
class Export:
    """The folder that was written, of which version, and the address on the hub if it was pushed.

    ``note`` says that a newer policy was stopped by a gate; empty if none was.
    """

    folder: Path
    name: str
    address: str | None
    adapter: bool = False
    note: str = ""

    def describe(self) -> str:
        """Say where the model is and how to talk to it."""
        model = shlex.quote(str(self.folder))
        head = f"{self.name} is in {self.folder}" + (
            f" and at {self.address}" if self.address else ""
        )
        head += f"\nnot the newest policy: {self.note}" if self.note else ""
        if self.adapter:
            loading = f"peft.PeftModel.from_pretrained(SFT_MODEL, {str(self.folder)!r})"
            return f"{head}, as an adapter\nnext: in Python: {loading}"
        return "\n".join(
            [
                head,
                f"next: rlhf chat {model}",
                f"      vllm serve {model}",
                f'      in Python: transformers.pipeline("text-generation", model={str(self.folder)!r})',
            ]
        )


def export(
    workspace: Path,
    target: Path,
    *,
    version: str | None = None,
    push: str | None = None,
    public: bool = False,
    license_id: str | None = None,
    force_reason: str | None = None,
    adapter: bool = False,
) -> Export:
    """Write the model to ``target``: safetensors, tokenizer, chat template, the sampling it was
    judged with, Ollama's Modelfile, a card.

    Where the environment names a signing key, the whole folder is signed, in ``model.sig``.

    Args:
        version: Version of the registered policy; None is the champion.
        push: ``owner/name`` of the hub repository that receives the folder too; None for none.
        public: Whether a repository that is made is public.
        license_id: The license on the card, as hubs spell it (``apache-2.0``).
        force_reason: Release whatever gates say; the reason is written on the card.
        adapter: Only what was trained, for PEFT, of a policy that was trained as adapters.

    Raises:
        RlhfError: ``target`` is not empty, there is no such version, or the hub refuses; nothing is
            left half-written.
        GateFailed: The version's gates did not all pass, it was rolled back, or its registration
            was interrupted.
        ModelError: Its files are not the registered ones.
    """
    from huggingface_hub import ModelCard, ModelCardData

    workspace = workspace.resolve()
    if target.is_dir():
        clear_unfinished(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RlhfError(f"{target} is not an empty folder; name a new one")
    if files := [each for each in target.parents if each.is_file()]:
        raise RlhfError(
            f"{files[0]} is a file, so nothing can be written below it; name another folder"
        )
    if push is not None:
        check_repository(push)
    config = load_section(workspace, "registry", RegistryConfig)
    policies = active_policies(config)
    if version is None:
        released = policy_with_alias(workspace, CHAMPION)
    else:
        released = get_version(connect(workspace), config.policy, version)
    obstacle = promotion_obstacle(released)
    if obstacle and force_reason is None:
        raise GateFailed(
            f"{obstacle}; to release it all the same, add --force --reason TEXT, which the card will show"
        )
    source = verified_folder(workspace, released)
    evidence = release_evidence(workspace, released, source, obstacle)
    title = (push or target.resolve().name).rpartition("/")[2]
    if adapter and not (source / ADAPTER_FOLDER).is_dir():
        raise RlhfError(
            f"{evidence.name} has no adapter: it was not trained as one (ppo.policy_lora), or PEFT cannot read it; leave "
            "--adapter out"
        )
    with filled_dir(target) if target.is_dir() else atomic_dir(target) as folder:
        if adapter:
            copy_adapter(source, folder, evidence)
            reads_in_4 = True
        else:
            shutil.copytree(
                source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(ADAPTER_FOLDER)
            )
            file = folder / GENERATION
            settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            tokens = {name: settings[name] for name in TOKENS if name in settings}
            # Where no top_k is named, transformers samples from the 50 likeliest tokens.
            sampled = {**tokens, "do_sample": True, "top_k": 0, **evidence.sampling}
            file.write_text(json.dumps(sampled, indent=2) + "\n", encoding="utf-8")
            reads_in_4 = write_earlier_names(folder)
            text = modelfile(load_tokenizer(source), evidence.sampling)
            (folder / MODELFILE).write_text(text, encoding="utf-8")
        data = card_data(evidence, license_id) | ({"library_name": "peft"} if adapter else {})
        card = card_text(evidence, title, force_reason if obstacle else None, reads_in_4, adapter)
        ModelCard(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n{card}").save(
            folder / "README.md"
        )
        if evidence.data_card:
            (folder / DATA_CARD_FILE).write_text(evidence.data_card, encoding="utf-8")
        for policy in policies:
            policy.export_folder(folder)
    address = None if push is None else upload(target, push, public, evidence.name)
    note = describe_stopped_policy(workspace) if version is None else ""
    return Export(target, evidence.name, address, adapter, note)


def copy_adapter(source: Path, folder: Path, evidence: ReleaseEvidence) -> None:
    """Copy the adapter of the model in ``source``, its tokenizer and its chat template.

    Its base is named where that is a model of a hub, unless SFT has trained it: PEFT would look
    there for any other name too.
    """
    shutil.copytree(source / ADAPTER_FOLDER, folder, dirs_exist_ok=True)
    if evidence.source is not None and evidence.source.hub_id and not evidence.fine_tuned:
        config = folder / ADAPTER_CONFIG
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = evidence.source.hub_id
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in MODEL_FILES:
            shutil.copy(file, folder)
    write_earlier_tokenizer(folder)
