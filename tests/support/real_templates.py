"""Chat templates of public models, as their tokenizer_config.json has them, with small tokenizers
of the same make.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "What is the colour of the sky? The sky is blue, because of the light. Why is that so?",
    "Hello! Please help me: it is 12 o'clock, isn't it?\n\nYes, it is.\nLet me think about the answer.",
    "天空是什么颜色？天空是蓝色的。为什么？因为光。你好，请帮助我。我不知道答案。",
    "The light is blue.",
    "one\n\ntwo\n\nthree\n\nfour",
] * 8

# meta-llama/Meta-Llama-3-8B-Instruct
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Qwen/Qwen2.5-7B-Instruct, without its branches for tools
QWEN_2_5 = """
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".strip()

# google/gemma-2-2b-it
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

# mistralai/Mistral-7B-Instruct-v0.2
MISTRAL_0_2 = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

# mistralai/Mistral-7B-Instruct-v0.3, without its branches for tools
MISTRAL_0_3 = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial system") }}
    {%- endif %}
{%- endfor %}
""".strip()

# HuggingFaceTB/SmolLM2-135M-Instruct
SMOLLM_2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# 01-ai/Yi-34B-Chat: the last turn is closed only where a generation prompt follows.
YI = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']}}"
    "{% if (loop.last and add_generation_prompt) or not loop.last %}{{ '<|im_end|>' + '\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# meta-llama/Llama-2-7b-chat-hf, without its system turn
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class RealTemplate:
    """A template, and what is known of its model: special tokens, roles, and how its tokenizer is
    made.

    Attributes:
        eos: The model's ``eos_token``.
        closing: The token that closes a turn.
        bos: The token with which the tokenizer begins every text; None for a model without one.
        after: What the template writes after the closing token of the last turn.
        make: ``bytes`` for byte-level BPE, ``metaspace`` for BPE over words with ``▁``, and
            ``legacy`` for the latter with a ``▁`` before every piece of text, as Llama 2's.
        system: Whether the template takes a system turn.
    """

    name: str
    template: str
    special: tuple[str, ...]
    eos: str
    closing: str
    bos: str | None = None
    after: str = ""
    make: str = "bytes"
    system: bool = True

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return small_tokenizer(self)


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
REAL_TEMPLATES = [
    RealTemplate("llama-3", LLAMA_3, LLAMA_3_SPECIAL, "<|end_of_text|>", "<|eot_id|>", bos="<|begin_of_text|>"),
    RealTemplate("qwen-2.5-base", QWEN_2_5, CHATML, "<|endoftext|>", "<|im_end|>", after="\n"),
    RealTemplate("qwen-2.5-instruct", QWEN_2_5, CHATML, "<|im_end|>", "<|im_end|>", after="\n"),
    RealTemplate(
        "gemma-2", GEMMA_2, ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"), "<eos>",
        "<end_of_turn>", bos="<bos>", after="\n", make="metaspace", system=False,
    ),
    RealTemplate("mistral-0.2", MISTRAL_0_2, ("<unk>", "<s>", "</s>"), "</s>", "</s>", bos="<s>", make="legacy",
                 system=False),
    RealTemplate("mistral-0.3", MISTRAL_0_3, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", bos="<s>",
                 make="metaspace"),
    RealTemplate("smollm-2", SMOLLM_2, CHATML, "<|im_end|>", "<|im_end|>", after="\n"),
]  # fmt: skip


@cache
def small_tokenizer(
    real: RealTemplate, texts: Sequence[str] = tuple(TEXTS)
) -> PreTrainedTokenizerFast:
    """BPE of a few hundred entries, with the model's special tokens, pre-tokenisation and
    beginning-of-text token.
    """
    special = list(real.special)
    if real.make == "bytes":
        bpe = Tokenizer(models.BPE())
        words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
        bpe.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = [*sorted(set("".join(texts)) - {" "}), "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
        limit_alphabet=2000,
    )
    bpe.train_from_iterator(texts, trainer)
    if real.make != "bytes":
        bpe = _without_word_borders(bpe, real)
    if real.bos is not None:
        pair = (real.bos, bpe.token_to_id(real.bos))
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{real.bos} $A", special_tokens=[pair]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=real.eos,
        bos_token=real.bos,
        unk_token="<unk>" if "<unk>" in real.special else None,
        extra_special_tokens=[
            token for token in real.special if token not in (real.eos, real.bos, "<unk>")
        ],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = real.template
    return tokenizer


def _without_word_borders(trained: Tokenizer, real: RealTemplate) -> Tokenizer:
    """The trained merges as SentencePiece applies them: to a whole text, and bytes for characters
    it lacks.

    The bytes are entries of the vocabulary, not special tokens.
    """
    document = json.loads(trained.to_str())
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["content"] in real.special
    ]
    document["pre_tokenizer"] = None
    bpe = Tokenizer.from_str(json.dumps(document))
    spaces = normalizers.Replace(" ", "▁")
    if real.make == "legacy":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        bpe.normalizer = spaces
    return bpe
