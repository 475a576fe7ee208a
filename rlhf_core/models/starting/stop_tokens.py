"""The tokens that end a reply, kept alike in the files of the tokenizer and in the model's generation config."""

from __future__ import annotations

import copy

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.chat_template import STOP_TOKENS
from rlhf_core.data.encoding import stop_token_ids


def generation_stop_ids(model: PreTrainedModel) -> list[int]:
    """The ids at which the model's own generation config ends a reply; none where it has no such file.

    A config that transformers derived from the architecture's defaults is left out: those ids belong to the tokenizer
    of some other model.
    """
    config = model.generation_config
    if config is None or config.eos_token_id is None or getattr(config, "_from_model_config", False):
        return []
    ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [index for index in ids if isinstance(index, int)]


def with_stop_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy whose files name the tokens that end a reply, where those are not ``eos_token`` alone.

    The first of them closes a turn. Added tokens at which the generation config of ``model`` ends a reply are among
    them; a word of the vocabulary is not.
    """
    added = [index for index in generation_stop_ids(model) if index in tokenizer.added_tokens_decoder]
    stop_ids = list(dict.fromkeys([*stop_token_ids(tokenizer), *added]))
    names = tokenizer.convert_ids_to_tokens(stop_ids)
    if names in ([tokenizer.eos_token], tokenizer.init_kwargs.get(STOP_TOKENS)):
        return tokenizer
    named = copy.deepcopy(tokenizer)
    named.init_kwargs[STOP_TOKENS] = names
    return named


def complete_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Name every token that ends a reply in the generation config, so that transformers and vLLM stop there too.

    Published models have sampling settings that transformers reads but refuses to save, such as a temperature beside
    ``do_sample: false``. They are left out: what samples here has settings of its own.
    """
    config = model.generation_config
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=generation_stop_ids(model), pad_token_id=config.pad_token_id
        )
        model.generation_config = config
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stop_ids = stop_token_ids(tokenizer)
    if not set(stop_ids) <= set(known):
        others = [i for i in generation_stop_ids(model) if i not in stop_ids]
        config.eos_token_id = [*stop_ids, *others] if others or len(stop_ids) > 1 else stop_ids[0]
        config._from_model_config = False  # otherwise transformers may take the model configuration's id instead
