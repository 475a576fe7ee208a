"""Whether a starting model can be opened: by its config, its tokenizer and its weights' headers, no weights loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.chat_template import bos_expression, reply_format
from rlhf_core.errors import DataError, ModelError
from rlhf_core.models.foreign import find_hub_model, require_openable
from rlhf_core.models.forward import embedding_weight
from rlhf_core.models.io import REPAIR, empty_model, is_local, reading, require_room_for
from rlhf_core.models.starting.base import load_tokenizer, require_decoder_only
from rlhf_core.models.starting.gguf import gguf_config, is_gguf, load_gguf_tokenizer

# As safetensors names them.
PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# For loaded models without a chat template: plain role names, and end-of-sequence after each reply. The space before a
# reply belongs to the reply, since most tokenizers make one token of a space and the word after it.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class OpenedModel:
    """What was read of a starting model, and whether it has a chat template (of a hub id this is not looked up)."""

    finding: str
    has_template: bool = True


def open_starting_model(workspace: Path, source: str, revision: str | None = None) -> OpenedModel:
    """Open what ``base.source`` names, a folder, a GGUF file or a hub id, without loading or downloading weights.

    Raises:
        ModelError: It does not exist, or the base stage would refuse it.
    """
    path = workspace / Path(source).expanduser()
    if not path.exists() and not is_local(source):
        # Nothing is downloaded here; the base stage opens it under limits.
        return OpenedModel(f"a hub id, {find_hub_model(source, revision)}")
    if not path.exists():
        raise ModelError(f"base.source {source} does not exist; give a folder, a .gguf file, a hub id, or scratch")
    require_openable(path)
    if is_gguf(path):
        gguf_config(path)
        tokenizer = load_gguf_tokenizer(path)
    else:
        tokenizer = open_model_folder(path)
    has_template = bool(tokenizer.chat_template)
    prepare_tokenizer(tokenizer, source)
    return OpenedModel("config, tokenizer and the headers of the weights are readable", has_template)


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Add a plain chat template where a loaded tokenizer has none.

    Raises:
        ModelError: No token ends a reply, or the template of the tokenizer cannot write a question and its answer.
    """
    if not tokenizer.chat_template and tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {source} has no end-of-sequence token, so that a reply could never end; name one as "
            "eos_token in its tokenizer_config.json"
        )
    if not tokenizer.chat_template:
        tokenizer.chat_template = bos_expression(tokenizer) + PLAIN_TEMPLATE
    try:
        reply_format(tokenizer)
    except (DataError, ModelError) as error:
        raise ModelError(f"{source}: {error}") from error


def open_model_folder(folder: Path) -> PreTrainedTokenizerBase:
    """Open a Hugging Face folder without its weights, and return its tokenizer.

    Raises:
        ModelError: The base stage would refuse it, for what can be told without loading the weights.
    """
    stored = stored_tensors(folder)
    require_trainable(str(folder))
    tokenizer = load_tokenizer(folder)
    with reading(folder):
        model: PreTrainedModel = empty_model(
            AutoModelForCausalLM, AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        )
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() & stored.keys()):
        if stored[name][0] != expected[name]:
            raise ModelError(
                f"{folder}: the weight {name} has the shape {list(stored[name][0])}, but config.json asks for "
                f"{list(expected[name])}; {REPAIR}"
            )
    # Names that the architecture does not know are renamed when they are loaded: what is missing cannot be told then.
    tied: dict[str, str] = model.all_tied_weights_keys  # such as an unembedding and its embedding
    same = {one for pair in tied.items() for one, other in (pair, pair[::-1]) if other in stored}
    missing = sorted(expected.keys() - stored.keys() - same)
    if missing and not stored.keys() - expected.keys():
        raise ModelError(
            f"{folder} lacks {len(missing)} of the weights of a {type(model).__name__}, such as {missing[0]}; {REPAIR}"
        )
    require_room_for(tokenizer, embedding_weight(model).shape[0], folder)
    return tokenizer


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and precision of the tensors that a folder's safetensors files hold, by name.

    Raises:
        ModelError: Something is missing from the folder, a shard that its index names, too.
    """
    tensors = {}
    with reading(folder):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - no mapping
                    tensor = weights.get_slice(name)
                    tensors[name] = tuple(tensor.get_shape()), str(tensor.get_dtype())
        if not (folder / WEIGHTS).is_file():
            if not (folder / INDEX).is_file():
                raise ModelError(f"{folder} has neither {WEIGHTS} nor {INDEX}, which names its shards; {REPAIR}")
            shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            absent = sorted(shard for shard in shards if not (folder / shard).is_file())
            if absent:
                raise ModelError(f"{folder} lacks {len(absent)} of {len(shards)} shards, such as {absent[0]}; {REPAIR}")
    return tensors


def require_trainable(source: str, revision: str | None = None) -> None:
    """Refuse a model of another kind than a decoder-only language model, or whose weights are quantised for inference.

    Only some devices compute with such weights, none trains them, and without their scales they are other numbers.

    Raises:
        ModelError: config.json says so, or a file of a folder has matrices of eight-bit numbers.
    """
    kinds = set()
    with reading(source):
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    require_decoder_only(config, source)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        kinds.add(str(quantization.get("quant_method", "of an unknown kind")))
    if Path(source).is_dir():
        stored = stored_tensors(Path(source)).values()
        kinds |= {dtype for shape, dtype in stored if len(shape) > 1 and dtype not in PLAIN_DTYPES}
    if kinds:
        raise ModelError(
            f"{source} has quantised weights ({', '.join(sorted(kinds))}), which cannot be trained: give the model in "
            "float32, bfloat16 or float16, or as a GGUF file, which is dequantised"
        )
