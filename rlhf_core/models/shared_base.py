"""One copy of the base weights for several models that were trained as adapters on it: policy, reward model, referee.

Each is a tree of modules of its own whose frozen parameters are the same tensors. A scalar model that was trained with
adapters keeps them beside its merged weights, with the hash of what they belong to.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.config.lora import LoraConfig
from rlhf_core.errors import ModelError
from rlhf_core.files import read_json, sha256_file
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import reading

TENSORS, SETTINGS = "lora.safetensors", "lora.json"


@dataclass(frozen=True)
class Adapters:
    """What was trained of a scalar model, adapters and head, by parameter name; ``base`` is the hash of the rest."""

    tensors: dict[str, Tensor]
    lora: LoraConfig
    base: str

    def settings(self) -> dict[str, Any]:
        """As JSON."""
        return {"base": self.base, "lora": self.lora.model_dump(mode="json")}


def base_hash(folder: Path) -> str:
    """A hash of a model folder's weights."""
    names = sorted(folder.glob("model*.safetensors"))
    return hashlib.sha256("".join(sha256_file(name) for name in names).encode()).hexdigest()


def adapters_of(model: ScalarModel, lora: LoraConfig, base: Path) -> Adapters:
    """The adapters and the head of a model trained on the weights in the folder ``base``, before they are merged."""
    trained = {name: p.detach().cpu().clone() for name, p in model.model.named_parameters() if p.requires_grad}
    return Adapters(trained, lora, base_hash(base))


class SharedBase:
    """The weights of the causal LM in ``folder``, as ``model`` holds them: in 4 bits if that has been packed.

    To be made before ``model`` gets adapters of its own.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.backbone, self.folder = _twin(model.base_model), folder
        self.hash = base_hash(folder)

    def scalar(self, folder: Path) -> ScalarModel:
        """The scalar model of ``folder``, its adapters on these weights.

        ``ModelError`` when it has none, or of other weights.
        """
        if not (folder / SETTINGS).is_file():
            raise ModelError(
                f"{folder} has no adapters ({SETTINGS}), so it cannot share the policy's weights: train it with lora, "
                "or set ppo.share_base to false"
            )
        settings = read_json(folder / SETTINGS)
        if settings["base"] != self.hash:
            raise ModelError(
                f"the adapters of {folder} belong to other weights than those of {self.folder}: train it again on "
                "them (init: sft), or set ppo.share_base to false"
            )
        with reading(folder):
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
        setattr(model, model.base_model_prefix, _twin(self.backbone))
        tensors = load_file(folder / TENSORS)
        weights = next(self.backbone.parameters())
        width = model.score.in_features
        model.score = nn.Linear(width, 1, bias=False, device=weights.device, dtype=weights.dtype)
        scalar = ScalarModel(model)
        scalar.add_adapters(LoraConfig.model_validate(settings["lora"]), seed=0)
        _fill(model, tensors, folder)
        return scalar.eval().requires_grad_(False)


def _twin(module: nn.Module) -> nn.Module:
    """The same modules once more, with the same parameters."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


@torch.no_grad()
def _fill(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if trained.keys() != tensors.keys():
        wrong = sorted(trained.keys() ^ tensors.keys())[0]
        raise ModelError(f"{folder / TENSORS} does not fit the model beside it ({wrong}); run its stage again")
    for name, parameter in trained.items():
        parameter.copy_(tensors[name])
