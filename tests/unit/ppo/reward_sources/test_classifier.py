"""Classifiers from elsewhere: scores equal a direct call with their own tokenizer, whatever shares
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from rlhf_core.config.reward_sources import ClassifierSource
from rlhf_core.data.schema import Message
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.ppo.reward_sources import classifier
from rlhf_core.ppo.reward_sources.build import build_source
from rlhf_core.ppo.reward_sources.classifier import Classifier
from rlhf_core.ppo.reward_sources.source import RankShared

from .conftest import Place

TEXTS = ["red", "the sky is very blue and near", "", "unheard of words", "a {prompt} tree"]
TURNS = "{% for m in messages %}{{ m['role'] + ' says ' + m['content'] + ' ' }}{% endfor %}"
STRICT = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + TURNS


def save_bert(folder: Path, labels: int = 1, template: str | None = TURNS, **config: Any) -> None:
    """A random BERT that knows whole words, with [CLS] and [SEP] around each text."""
    words = "[PAD] [UNK] [CLS] [SEP] red blue green the sky a tree very is big small near and says user assistant ? !"
    vocabulary = {word: number for number, word in enumerate(words.split())}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=24,
    )  # fmt: skip
    tokenizer.chat_template = template
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        shape = transformers.BertConfig(
            vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=32, num_labels=labels, initializer_range=0.5, **config,
        )  # fmt: skip
        transformers.BertForSequenceClassification(shape).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module", autouse=True)
def each_folder_is_tried_once() -> Iterator[None]:
    """Trying whether a folder opens within limits takes a process of its own."""
    with mock.patch.object(classifier, "require_openable", cache(classifier.require_openable)):
        yield


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save_bert(folder)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    save_bert(
        folder,
        labels=3,
        id2label={0: "bad", 1: "fair", 2: "good"},
        label2id={"bad": 0, "fair": 1, "good": 2},
    )
    return folder


def build(place: Place, folder: Path | str, **changes: Any) -> Classifier:
    config = ClassifierSource.model_validate({"kind": "classifier", "model": str(folder)} | changes)
    shared = build_source(config, "classifier", place.context)
    assert isinstance(shared, RankShared) and isinstance(shared.source, Classifier)
    return shared.source


def direct(folder: Path, *texts: str, **options: Any) -> list[float]:
    """Logits of one text (or pair) by the library alone."""
    model, tokenizer = loaded(folder)
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt", **options)).logits[0].tolist()


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def chat(place: Place, row: int, reply: str) -> str:
    turns = [(m.role, m.content) for m in place.rows[row].prompt]
    return "".join(f"{role} says {content} " for role, content in [*turns, ("assistant", reply)])


def plain(place: Place, row: int) -> str:
    turns = place.rows[row].prompt
    return (
        turns[0].content
        if len(turns) == 1
        else "\n\n".join(f"{m.role}: {m.content}" for m in turns)
    )


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("template", ["chat", "pair", "reply", "{prompt} ! {reply} ?"])
def test_scores_are_those_of_a_direct_call(
    place: Place, bert: Path, template: str, batch_size: int
) -> None:
    scores = build(place, bert, template=template, batch_size=batch_size).rewards(
        place.replies(TEXTS)
    )
    for row, text in enumerate(TEXTS):
        texts = {
            "chat": (chat(place, row, text),),
            "pair": (plain(place, row), text),
            "reply": (text,),
        }
        whole = texts.get(template, (f"{plain(place, row)} ! {text} ?",))
        expected = direct(bert, *whole, add_special_tokens=template != "chat")
        assert float(scores[row]) == pytest.approx(expected[0], abs=1e-5)


def test_a_decoder_with_another_tokenizer_scores_as_a_direct_call(place: Place) -> None:
    """The reward model of another pipeline: its template writes the end marker, at which it is
    read.
    """
    folder = place.root / "extra/foreign"
    scores = build(place, "extra/foreign", batch_size=2).rewards(place.replies(TEXTS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row, text in enumerate(TEXTS):
        turns = [{"role": m.role, "content": m.content} for m in place.rows[row].prompt]
        whole = tokenizer.apply_chat_template(
            [*turns, {"role": "assistant", "content": text}], tokenize=False
        )
        expected = direct(folder, whole, add_special_tokens=False, return_token_type_ids=False)
        assert float(scores[row]) == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize("label", [1, "fair"])
def test_one_label_of_several_as_logit_or_probability(
    place: Place, three: Path, label: int | str
) -> None:
    replies = place.replies(TEXTS)
    logits = torch.tensor([direct(three, text) for text in TEXTS])
    for output, expected in (("logit", logits[:, 1]), ("probability", logits.softmax(dim=1)[:, 1])):
        scores = build(place, three, template="reply", label=label, output=output).rewards(replies)
        assert scores.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_probability_of_a_lone_or_independent_label_is_a_sigmoid(
    place: Place, tmp_path: Path, bert: Path
) -> None:
    save_bert(tmp_path, labels=2, problem_type="multi_label_classification")
    for folder, label in ((bert, None), (tmp_path, 1)):
        logits = torch.tensor([direct(folder, text)[label or 0] for text in TEXTS])
        scores = build(place, folder, template="reply", label=label, output="probability").rewards(
            place.replies(TEXTS)
        )
        assert scores.tolist() == pytest.approx(logits.sigmoid().tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("template", "separators"),
    [
        ("chat", 0),
        ("reply", 1),
        ("pair", 2),
        ("{prompt} {reply}", 1),
        ("{prompt} [SEP] {reply}", 3),
    ],
)
def test_a_reply_cannot_write_control_tokens(
    place: Place, bert: Path, template: str, separators: int
) -> None:
    """A text that names special tokens itself means them; then a reply's are not told apart."""
    encoded, _ = build(place, bert, template=template).encode(
        [Message("user", "the sky")], "red [SEP] blue [CLS]"
    )
    assert encoded["input_ids"].count(3) == separators
    assert encoded["attention_mask"] == [1] * len(encoded["input_ids"])


def test_a_long_text_loses_its_beginning_and_is_counted(place: Place, bert: Path) -> None:
    """24 tokens fit, two of them special: the last 22 words stay."""
    long = " ".join(["red"] * 30 + ["blue"] * 20 + ["near"])
    whole = build(place, bert, template="reply")
    scores = whole.rewards(place.replies([long, "red"]))
    assert whole.metrics == {"truncated": 0.5}
    kept = " ".join(["red"] + ["blue"] * 20 + ["near"])
    assert scores.tolist() == pytest.approx(
        [direct(bert, kept)[0], direct(bert, "red")[0]], abs=1e-5
    )
    short = build(place, bert, template="reply", max_tokens=4).rewards(place.replies([long]))
    assert float(short[0]) == pytest.approx(direct(bert, "blue near")[0], abs=1e-5)
    chat = build(place, bert, max_tokens=2).rewards(place.replies([long]))
    assert float(chat[0]) == pytest.approx(
        direct(bert, "blue near", add_special_tokens=False)[0], abs=1e-5
    )


def test_without_a_pad_token_texts_are_read_one_by_one(place: Place, tmp_path: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        place.root / "extra/foreign"
    )
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(place.root / "extra/foreign").save_pretrained(
        tmp_path
    )
    scores = build(place, tmp_path, template="reply", batch_size=4).rewards(
        place.replies(TEXTS[:2])
    )
    expected = [direct(tmp_path, text, return_token_type_ids=False)[0] for text in TEXTS[:2]]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, r"3 labels, 0 \(bad\), 1 \(fair\), 2 \(good\); set label"),
        ({"label": 3}, "it has no label 3"),
        ({"label": "great"}, "it has no label 'great'"),
    ],
)
def test_the_label_must_be_one_of_its_own(
    place: Place, three: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        build(place, three, **changes)


def test_what_is_no_classifier_is_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library reads its environment variable when it is imported, which may be before the test
    # session sets it.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match=r"lacks \d+ of the weights of a LlamaForSequenceClassification"
    ):
        build(place, "extra/foreign_lm")
    with pytest.raises(ModelError, match="no model folder"):
        build(place, tmp_path / "nowhere")
    with pytest.raises(ModelError, match="cannot load the model hub id"):
        build(place, "nobody/nothing")


def test_a_chat_template_is_needed_for_chat_and_may_refuse(place: Place, tmp_path: Path) -> None:
    save_bert(tmp_path / "without", template=None)
    with pytest.raises(ConfigError, match="no chat template; set template to pair, reply"):
        build(place, tmp_path / "without")
    save_bert(tmp_path / "strict", template=STRICT)
    with pytest.raises(
        DataError,
        match=r"refuses a dialogue of the turns .*: one turn only; .*set another template of this source",
    ):
        build(place, tmp_path / "strict").rewards(place.replies(TEXTS[:4]))


def test_pickled_weights_are_never_read(place: Place, bert: Path, tmp_path: Path) -> None:
    for file in bert.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="pickled weights are never read"):
        build(place, tmp_path)


def test_a_score_that_is_not_finite_is_refused(place: Place, bert: Path, tmp_path: Path) -> None:
    transformers.AutoModelForSequenceClassification.from_pretrained(bert).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    source = build(place, tmp_path)
    with torch.no_grad():
        source.model.classifier.bias.fill_(float("nan"))
    with pytest.raises(DataError, match="reward source 'classifier': score 0 is nan"):
        source.rewards(place.replies(["red"]))
