"""Whether a starting model can be opened: by its config, its tokenizer and its weights' headers, no weights loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_core import hub
from rlhf_core.errors import ModelError
from rlhf_core.models.base import load_tokenizer, require_room_for
from rlhf_core.models.forward import embedding_weight
from rlhf_core.models.gguf import check_gguf, is_gguf
from rlhf_core.models.io import REPAIR, is_local, reading

# As safetensors names them.
PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class OpenedModel:
    """What was read of a starting model, and whether it has a chat template (of a hub id this is not looked up)."""

    finding: str
    has_template: bool = True


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, by the file's header."""

    shape: tuple[int, ...]
    dtype: str


def open_starting_model(workspace: Path, source: str, revision: str | None = None) -> OpenedModel:
    """Open what ``base.source`` names, a folder, a GGUF file or a hub id, without loading or downloading weights.

    Raises:
        ModelError: It does not exist, or the base stage would refuse it.
    """
    path = workspace / Path(source).expanduser()
    if not path.exists() and not is_local(source):
        return OpenedModel(f"a hub id, {find_hub_model(source, revision)}")
    if not path.exists():
        raise ModelError(f"base.source {source} does not exist; give a folder, a .gguf file, a hub id, or scratch")
    has_template = check_gguf(path) if is_gguf(path) else check_model_folder(path)
    return OpenedModel("config, tokenizer and the headers of the weights are readable", has_template)


def check_model_folder(folder: Path) -> bool:
    """Open a Hugging Face folder without its weights.

    Returns:
        Whether its tokenizer has a chat template.

    Raises:
        ModelError: The base stage would refuse it, for what can be told without loading the weights.
    """
    stored = stored_tensors(folder)
    require_plain_weights(str(folder))
    tokenizer = load_tokenizer(folder)
    with reading(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() & stored.keys()):
        if stored[name].shape != expected[name]:
            raise ModelError(
                f"{folder}: the weight {name} has the shape {list(stored[name].shape)}, but config.json asks for "
                f"{list(expected[name])}; {REPAIR}"
            )
    # Names that the architecture does not know are renamed when they are loaded: what is missing cannot be told then.
    missing = sorted(expected.keys() - stored.keys() - set(model.all_tied_weights_keys))
    if missing and not stored.keys() - expected.keys():
        raise ModelError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}; {REPAIR}")
    require_room_for(tokenizer, embedding_weight(model).shape[0], folder)
    return bool(tokenizer.chat_template)


def find_hub_model(source: str, revision: str | None = None) -> str:
    """Look a hub id up, and return where it is: nothing is downloaded.

    Raises:
        ModelError: It is neither in the cache nor on the hub, or has no safetensors weights there.
    """
    if isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str):
        return "in the cache"
    if is_offline_mode():
        raise ModelError(f"{source} is not in the cache, and HF_HUB_OFFLINE=1 forbids asking the hub; unset it")
    hub.require_hub(source, ModelError)
    try:
        about = HfApi(endpoint=constants.ENDPOINT).model_info(source, revision=revision, timeout=hub.TIMEOUT)
    except Exception as error:  # of several libraries
        first_line = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise ModelError(f"{source} cannot be looked up on the hub: {first_line}; is it spelt right?") from error
    names = {file.rfilename for file in about.siblings or ()}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{source} has no config.json or no .safetensors weights on the hub; give another model")
    return "on the hub"


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a folder's safetensors files hold, by name.

    Raises:
        ModelError: Something is missing from the folder, a shard that its index names, too.
    """
    tensors: dict[str, StoredTensor] = {}
    with reading(folder):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - no mapping
                    tensor = weights.get_slice(name)
                    tensors[name] = StoredTensor(tuple(tensor.get_shape()), tensor.get_dtype())
        if (folder / INDEX).is_file() and not (folder / "model.safetensors").is_file():
            shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            absent = sorted(shard for shard in shards if not (folder / shard).is_file())
            if absent:
                raise ModelError(f"{folder} lacks {len(absent)} of {len(shards)} shards, such as {absent[0]}; {REPAIR}")
    return tensors


def require_plain_weights(source: str, revision: str | None = None) -> None:
    """Refuse a model whose weights are quantised for inference.

    Only some devices compute with them, none trains them, and without their scales they are other numbers.

    Raises:
        ModelError: config.json says so, or a file of a folder has matrices of eight-bit numbers.
    """
    kinds = set()
    with reading(source):
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        kinds.add(str(quantization.get("quant_method", "of an unknown kind")))
    if Path(source).is_dir():
        matrices = (tensor for tensor in stored_tensors(Path(source)).values() if len(tensor.shape) > 1)
        kinds |= {tensor.dtype for tensor in matrices if tensor.dtype not in PLAIN_DTYPES}
    if kinds:
        raise ModelError(
            f"{source} has quantised weights ({', '.join(sorted(kinds))}), which cannot be trained: give the model in "
            "float32, bfloat16 or float16, or as a GGUF file, which is dequantised"
        )
