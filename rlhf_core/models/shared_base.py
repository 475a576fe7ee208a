"""One copy of the base weights for all models trained as adapters on it.

These are policy, critic, reward model and referee.

Each model is a module tree of its own whose frozen parameters are the same tensors. A scalar model
trained with adapters saves them beside its merged weights, with the hash of the weights they belong
to.
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
from transformers import AutoConfig, PreTrainedModel

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.architecture import backbone_of, keep_lower_layers
from rlhf_core.models.classifiers import AutoScalarModel
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.io import empty_model, reading
from rlhf_core.storage.files import read_json, sha256_file

TENSORS, SETTINGS = "lora.safetensors", "lora.json"
LORA_A, LORA_B = "lora_A", "lora_B"


@dataclass(frozen=True)
class Adapters:
    """The trained part of a scalar model.

    Attributes:
        tensors: Adapters and head, by parameter name.
        lora: Settings of the adapters.
        base: Hash of the weights that the adapters belong to.
    """

    tensors: dict[str, Tensor]
    lora: LoraConfig
    base: str

    def settings(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON."""
        return {"base": self.base, "lora": self.lora.model_dump(mode="json")}


def base_hash(folder: Path) -> str:
    """Hash of the weights in a model folder."""
    names = sorted(folder.glob("model*.safetensors"))
    return hashlib.sha256("".join(sha256_file(name) for name in names).encode()).hexdigest()


def read_adapters(folder: Path) -> Adapters:
    """Read the adapters that a stage saved in ``folder``; ``ModelError`` when there are none."""
    if not (folder / SETTINGS).is_file():
        raise ModelError(
            f"{folder} has no adapters ({SETTINGS}), so it cannot share the policy's weights: train it with lora, or "
            "set ppo.share_base to false"
        )
    settings = read_json(folder / SETTINGS)
    return Adapters(
        load_file(folder / TENSORS), LoraConfig.model_validate(settings["lora"]), settings["base"]
    )


def stacked(first: Adapters, second: Adapters) -> Adapters:
    """Combine two sets of adapters into one that computes their sum.

    The head is that of ``second``.

    ``second`` was trained on weights into which ``first`` had been merged. ``B1 A1 x + B2 A2 x`` is
    one product of the stacked matrices; the scales alpha / rank go into B, so that the combined
    scale is 1.
    """
    names = sorted({name for name in (*first.tensors, *second.tensors) if LORA_A in name})
    tensors = {name: tensor for name, tensor in second.tensors.items() if "lora_" not in name}
    for name in names:
        other = name.replace(LORA_A, LORA_B)
        of = first if name in first.tensors else second
        # One in a linear layer; the rows of A are those of one expert after another, the columns of
        # B of one rank.
        experts = of.tensors[name].shape[0] // of.lora.rank
        inputs, outputs = of.tensors[name].shape[1], of.tensors[other].shape[0]
        parts = []
        for one in (first, second):
            a, b = (
                torch.zeros(one.lora.rank * experts, inputs),
                torch.zeros(outputs, one.lora.rank * experts),
            )
            if name in one.tensors:
                a, b = one.tensors[name], one.tensors[other] * (one.lora.alpha / one.lora.rank)
            parts.append((a.view(experts, -1, inputs), b))
        tensors[name] = torch.cat([a for a, _ in parts], dim=1).flatten(0, 1)
        tensors[other] = torch.cat([b for _, b in parts], dim=1)
    return Adapters(tensors, first.lora.stacked_with(second.lora), first.base)


def adapters_of(model: ScalarModel, lora: LoraConfig, base: Path) -> Adapters:
    """Copy the adapters and the head of a model, before merging.

    It was trained on the weights in folder ``base``.
    """
    trained = {
        name: p.detach().cpu().clone()
        for name, p in model.model.named_parameters()
        if p.requires_grad
    }
    return Adapters(trained, lora, base_hash(base))


class SharedBase:
    """The weights of the causal LM in ``folder``, held by ``model`` (in 4 bits if it was packed).

    It has to be created before ``model`` gets adapters of its own.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.backbone, self.folder = _twin(backbone_of(model)), folder
        self.hash = base_hash(folder)

    def scalar(self, folder: Path, through: Path | None = None) -> ScalarModel:
        """Build the scalar model of ``folder`` from its adapters on these weights.

        Adapters and head are trainable.

        Args:
            through: Folder of the scalar model that it was trained on, itself adapters on these
                weights.

        Raises:
            ModelError: The folder has no adapters, or they belong to other weights.
        """
        adapters = read_adapters(folder)
        if through is not None and adapters.base == base_hash(through):
            adapters = stacked(read_adapters(through), adapters)
        if adapters.base != self.hash:
            raise ModelError(
                f"the adapters of {folder} belong to other weights than those of {self.folder}: train it again on "
                "them (init: sft), or set ppo.share_base to false"
            )
        with reading(folder):
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            model = empty_model(AutoScalarModel, config)
        setattr(model, model.base_model_prefix, _twin(self.backbone))
        keep_lower_layers(model, config.num_hidden_layers)
        weights = next(self.backbone.parameters())
        width = model.score.in_features
        model.score = nn.Linear(width, 1, bias=False, device=weights.device, dtype=weights.dtype)
        scalar = ScalarModel(model)
        scalar.add_adapters(adapters.lora, seed=0)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if trained.keys() != adapters.tensors.keys():
            wrong = sorted(trained.keys() ^ adapters.tensors.keys())[0]
            raise ModelError(
                f"{folder / TENSORS} does not fit the model beside it ({wrong}); run its stage again"
            )
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(adapters.tensors[name])
        return scalar.eval()


def _twin(module: nn.Module) -> nn.Module:
    """Copy the module tree but share its parameters."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
