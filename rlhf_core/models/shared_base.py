"""One copy of the base weights for all models that were trained as adapters on it, from the policy to the referee.

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
LORA_A, LORA_B = "lora_A", "lora_B"


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


def read_adapters(folder: Path) -> Adapters:
    """What :func:`adapters_of` found, from the folder it was saved in; ``ModelError`` when there is nothing of it."""
    if not (folder / SETTINGS).is_file():
        raise ModelError(
            f"{folder} has no adapters ({SETTINGS}), so it cannot share the policy's weights: train it with lora, or "
            "set ppo.share_base to false"
        )
    settings = read_json(folder / SETTINGS)
    return Adapters(load_file(folder / TENSORS), LoraConfig.model_validate(settings["lora"]), settings["base"])


def joined(first: Adapters, second: Adapters) -> Adapters:
    """Adapters that do what ``first`` does and, on weights into which that was merged, ``second``; its is the head.

    ``B1 A1 x + B2 A2 x`` is one product of the stacked matrices; scales go into B, so that what remains is 1.
    """
    names = sorted({name for name in (*first.tensors, *second.tensors) if LORA_A in name})
    rank = first.lora.rank + second.lora.rank
    layers = {name.partition(f".{LORA_A}")[0].rpartition(".")[2] for name in names}
    tensors = {name: tensor for name, tensor in second.tensors.items() if "lora_" not in name}
    for name in names:
        other = name.replace(LORA_A, LORA_B)
        parts = [_scaled(one, name, other) for one in (first, second)]
        shapes = next((a.shape, b.shape) for a, b in (part for part in parts if part is not None))
        filled = [
            part or (torch.zeros(one.lora.rank, shapes[0][1]), torch.zeros(shapes[1][0], one.lora.rank))
            for one, part in zip((first, second), parts, strict=True)
        ]
        tensors[name] = torch.cat([a for a, _ in filled], dim=0)
        tensors[other] = torch.cat([b for _, b in filled], dim=1)
    lora = LoraConfig(rank=rank, alpha=rank, targets=tuple(sorted(layers)), quantize=first.lora.quantize)
    return Adapters(tensors, lora, first.base)


def _scaled(adapters: Adapters, a: str, b: str) -> tuple[Tensor, Tensor] | None:
    if a not in adapters.tensors:
        return None
    return adapters.tensors[a], adapters.tensors[b] * (adapters.lora.alpha / adapters.lora.rank)


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

    def scalar(self, folder: Path, through: Path | None = None) -> ScalarModel:
        """The scalar model of ``folder``, its adapters on these weights; they and the head can be trained.

        Adapters on the model of the folder ``through``, itself adapters on these weights, come with that one's.
        ``ModelError`` when there are no adapters, or of other weights.
        """
        adapters = read_adapters(folder)
        if through is not None and adapters.base == base_hash(through):
            adapters = joined(read_adapters(through), adapters)
        if adapters.base != self.hash:
            raise ModelError(
                f"the adapters of {folder} belong to other weights than those of {self.folder}: train it again on "
                "them (init: sft), or set ppo.share_base to false"
            )
        with reading(folder):
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
        setattr(model, model.base_model_prefix, _twin(self.backbone))
        weights = next(self.backbone.parameters())
        width = model.score.in_features
        model.score = nn.Linear(width, 1, bias=False, device=weights.device, dtype=weights.dtype)
        scalar = ScalarModel(model)
        scalar.add_adapters(adapters.lora, seed=0)
        _fill(model, adapters.tensors, folder)
        return scalar.eval()


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
