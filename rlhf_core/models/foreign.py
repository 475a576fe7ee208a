"""Untrusted third-party models.

They are opened in a child process first, since one may never end, or fill the memory.

Its config, its tokenizer and its weights' headers tell whether one can be a starting model; no
weights are loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core import hub
from rlhf_core.data.chat_template import bos_expression, reply_format
from rlhf_core.data.text import excerpt
from rlhf_core.errors import DataError, ModelError, first_line
from rlhf_core.models.architecture import embedding_weight
from rlhf_core.models.causal_lm import load_tokenizer, require_decoder_only
from rlhf_core.models.folder_check import REPAIR, SHARD, require_own_files
from rlhf_core.models.io import empty_model, hub_files, is_local, reading, require_room_for
from rlhf_core.models.readers import is_model_file, model_reader
from rlhf_core.runtime.limited_call import CallLimits, limit_reached

LIMITS = CallLimits()
# Each character of ASCII, and some of other scripts: a rule that grows texts may be of one
# character alone. Patterns that try all ways to part a row of one character need a row, and
# something behind it.
SAMPLES = (
    "What is that? It is this.\n",
    *(chr(code) * 64 + "\x01!" for code in range(32, 127)),
    "äßéñ 你好 привет 😀 \u200b",
)
MOST_PER_BYTE = 16  # weights in a byte of a file; quantised to one bit there are eight


def require_openable(
    source: str | Path, revision: str | None = None, auto_class: Any = None
) -> None:
    """Try in a child process to open a model without its weights, under :data:`LIMITS`.

    A third-party folder, GGUF file or hub id may hold a tokenizer that never ends, and sizes that
    fill the memory. What is wrong otherwise is left to whoever loads the model; chat templates are
    always run under limits.

    Args:
        auto_class: Which class will load it; by default ``AutoModelForCausalLM``.

    Raises:
        ModelError: A limit was reached, or the files name what lies outside of the folder.
    """
    path = Path(os.path.expanduser(source))
    if not path.exists():
        if is_local(source) or is_model_file(path):
            return
        found = hub_files(str(source), revision)
        if found is None:
            return
        path = found
    if path.is_dir():
        require_own_files(path)
    parts: dict[str, Callable[[], None]] = {
        "its tokenizer": lambda: _encode_sample(path),
        "the model of its configuration": lambda: _build_modules(path, auto_class),
    }
    for what, part in parts.items():
        if reached := limit_reached(part, LIMITS):
            raise ModelError(
                f"{source}: opening {what} {reached}; it is damaged, or made to do harm: take another model"
            )


def _encode_sample(path: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if path.is_file():
        tokenizer = model_reader(path).read_tokenizer(path)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    for sample in SAMPLES:
        tokenizer.decode(tokenizer.encode(sample))


def _build_modules(path: Path, auto_class: Any) -> None:
    """Build the model on shapes alone.

    Raise ``MemoryError`` where loading would make weights that no file holds.
    """
    torch.set_num_threads(1)
    config = (
        model_reader(path).read_config(path)
        if path.is_file()
        else AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    )
    model = empty_model(auto_class or AutoModelForCausalLM, config)
    weights = [path] if path.is_file() else list(path.glob(f"*{SHARD}"))
    held = sum(file.stat().st_size for file in weights)
    claimed = sum(parameter.numel() for parameter in model.parameters())
    if weights and claimed > max(MOST_PER_BYTE * held, LIMITS.memory):
        raise MemoryError


FROM_CACHE = "set HF_HUB_OFFLINE=1 to use a copy in the cache, or name a folder"
TOO_MANY_REQUESTS, SERVER_ERRORS = 429, 500


def find_hub_model(source: str, revision: str | None = None) -> str:
    """Look a hub id up, and return where it is: nothing is downloaded.

    Raises:
        ModelError: It is neither in the cache nor on the hub, may not be read, or has no
            safetensors weights there.
    """
    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError as error:
        raise ModelError(
            f"{source} is neither a folder here nor a hub id such as owner/name; correct it"
        ) from error
    if isinstance(cached, str):
        return "in the cache"
    if is_offline_mode():
        raise ModelError(
            f"{source} is no folder here and not in the cache, and HF_HUB_OFFLINE=1 forbids asking the hub; unset it, "
            "or name a folder"
        )
    hub.require_hub(source, ModelError)
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        about = api.model_info(source, revision=revision, timeout=hub.TIMEOUT)
        if about.gated:  # everybody may read about such a model, but not its files
            api.auth_check(source)
    except Exception as error:  # of several libraries
        raise ModelError(_refusal(source, revision, error)) from error
    names = {file.rfilename for file in about.siblings or ()}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            f"{source} has no config.json or no .safetensors weights on the hub; give another model"
        )
    return "on the hub"


def _refusal(source: str, revision: str | None, error: Exception) -> str:
    """Why the hub does not give a model, and what to do."""
    if isinstance(error, GatedRepoError):
        return (
            f"{source} is gated: accept its terms on {constants.ENDPOINT}/{source}, and set HF_TOKEN to a token of "
            "the account that did"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{source} has no revision {revision!r} on the hub; correct base.revision"
    status = (
        error.response.status_code
        if isinstance(error, HfHubHTTPError) and error.response is not None
        else None
    )
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return (
            f"{source} is neither a folder here nor on the hub {constants.ENDPOINT}; is it spelt right? A private "
            "one needs a token in HF_TOKEN"
        )
    if status in (401, 403):
        return f"the hub {constants.ENDPOINT} refuses {source} ({status}); set HF_TOKEN to a token that may read it"
    if status is not None and (status == TOO_MANY_REQUESTS or status >= SERVER_ERRORS):
        return f"{source} cannot be loaded: the hub {constants.ENDPOINT} answers {status}; try later, or {FROM_CACHE}"
    return (
        f"{source} cannot be looked up: {constants.ENDPOINT} does not answer as a hub does "
        f"({type(error).__name__}: {first_line(error)}); check HF_ENDPOINT, or {FROM_CACHE}"
    )


# Shape and precision of stored weights, by name.
Tensors = dict[str, tuple[tuple[int, ...], str]]
# As safetensors names them.
PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# For loaded models without a chat template: plain role names, and end-of-sequence after each reply.
# The space before a reply belongs to the reply, since most tokenizers make one token of a space and
# the word after it.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class OpenedModel:
    """What was read of a starting model.

    Whether it has a chat template is not looked up for a hub id.
    """

    finding: str
    has_template: bool = True


def open_starting_model(workspace: Path, source: str, revision: str | None = None) -> OpenedModel:
    """Open what ``base.source`` names without loading or downloading weights.

    It is a folder, a GGUF file or a hub id.

    Raises:
        ModelError: It does not exist, or the base stage would refuse it.
    """
    path = workspace / Path(os.path.expanduser(source))
    if not path.exists() and not is_local(source):
        # Nothing is downloaded here; the base stage opens it under limits.
        return OpenedModel(f"a hub id, {find_hub_model(source, revision)}")
    if not path.exists():
        raise ModelError(
            f"base.source {source} does not exist; give a folder, a .gguf file, a hub id, or scratch"
        )
    require_openable(path)
    if is_model_file(path):
        reader = model_reader(path)
        reader.read_config(path)
        tokenizer = reader.read_tokenizer(path)
    else:
        tokenizer = open_model_folder(path)
    has_template = bool(tokenizer.chat_template)
    prepare_tokenizer(tokenizer, source)
    return OpenedModel(
        "config, tokenizer and the headers of the weights are readable", has_template
    )


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Add a plain chat template where a loaded tokenizer has none.

    Raises:
        ModelError: No token ends a reply, or the template of the tokenizer cannot write a question
            and its answer.
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
        ModelError: The base stage would refuse it, for what can be told without loading the
            weights.
    """
    stored = stored_tensors(folder)
    require_trainable(str(folder), stored=stored)
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
    # Names that the architecture does not know are renamed when they are loaded: what is missing
    # cannot be told then.
    tied: dict[str, str] = model.all_tied_weights_keys  # such as an unembedding and its embedding
    same = {name for name, other in tied.items() if other in stored}
    same |= {other for name, other in tied.items() if name in stored}
    missing = sorted(expected.keys() - stored.keys() - same)
    if missing and not stored.keys() - expected.keys():
        raise ModelError(
            f"{folder} lacks {len(missing)} of the weights of a {type(model).__name__}, such as {missing[0]}; {REPAIR}"
        )
    require_room_for(tokenizer, embedding_weight(model).shape[0], folder)
    return tokenizer


def stored_tensors(folder: Path) -> Tensors:
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
                raise ModelError(
                    f"{folder} has neither {WEIGHTS} nor {INDEX}, which names its shards; {REPAIR}"
                )
            shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            absent = sorted(shard for shard in shards if not (folder / shard).is_file())
            if absent:
                raise ModelError(
                    f"{folder} lacks {len(absent)} of {len(shards)} shards, such as {absent[0]}; {REPAIR}"
                )
    return tensors


def require_trainable(
    source: str, revision: str | None = None, stored: Tensors | None = None
) -> None:
    """Refuse a model that is no decoder-only language model, or has quantised weights.

    Only some devices compute with such weights, none trains them, and without their scales they are
    other numbers.

    Args:
        stored: What :func:`stored_tensors` says of it, where that is known.

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
        tensors = (stored_tensors(Path(source)) if stored is None else stored).values()
        kinds |= {dtype for shape, dtype in tensors if len(shape) > 1 and dtype not in PLAIN_DTYPES}
    if kinds:
        listed = excerpt(", ".join(sorted(kinds)))
        raise ModelError(
            f"{source} has quantised weights ({listed}), which cannot be trained: give the model in "
            "float32, bfloat16 or float16, or as a GGUF file, which is dequantised"
        )
