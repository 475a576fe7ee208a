"""Multiple choice by log-likelihood: the format, the sums by hand, the metrics by hand, and the evaluate stage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.config.evaluation import EvaluateConfig, MultipleChoiceConfig
from rlhf_core.data.encoding import encode_dialogue, pad_id
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError
from rlhf_core.evaluation.benchmarks.multiple_choice import (
    AnsweredQuestions,
    MultipleChoiceQuestion,
    MultipleChoiceSet,
    accuracy,
    answer_questions,
    read_questions,
)
from rlhf_core.evaluation.perplexity import reply_log_likelihoods
from rlhf_core.fingerprint.tracked_files import write_evaluation_inputs
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.training.examples import Example

HEADER = "id,question,A,B,C,D,answer,explanation"
ENGLISH = [
    "0,Which one is a colour?,red,seven,slowly,under,A,",
    '1,"How many legs has a dog, as a rule?",two,four,six,eight,B,"Dogs, cats and horses have four."',
]
CHINESE = ["0,中国的首都是____。,上海,广州,北京,深圳,C,首都是北京。"]


def written(folder: Path, name: str, *rows: str, header: str = HEADER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return folder / name


def load(folder: Path, **settings: Any) -> MultipleChoiceSet:
    return MultipleChoiceSet.load(MultipleChoiceConfig.model_validate({"files": ["*_val.csv"]} | settings), folder)


def test_questions_of_two_languages(tmp_path: Path) -> None:
    written(tmp_path, "things_val.csv", *ENGLISH)
    written(tmp_path, "城市_val.csv", *CHINESE)
    questions = load(tmp_path).questions
    assert questions[1] == MultipleChoiceQuestion(
        "1", "How many legs has a dog, as a rule?", ("two", "four", "six", "eight"), 1, "things"
    )
    assert questions[0].turn("letter") == (
        "This is a multiple-choice question. Answer with the letter of the right choice.\n\n"
        "Which one is a colour?\nA. red\nB. seven\nC. slowly\nD. under\nAnswer:"
    )
    assert questions[2].subject == "城市" and questions[2].turn("letter") == (
        "以下是单项选择题，请选出其中的正确答案。\n\n中国的首都是____。\nA. 上海\nB. 广州\nC. 北京\nD. 深圳\n答案："
    )
    assert questions[2].turn("text") == "中国的首都是____。" and questions[2].answers("text")[2] == "北京"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2,q,a,b,c,d,E,", r"line 3, column answer: 'E' is none of A, B, C, D"),
        ("2,q,a,b,c,d,,", r"line 3, column answer: is empty; files without answers"),
        ("2, ,a,b,c,d,A,", r"line 3, column question: it has no text"),
        ("2,q,a,b,,d,A,", r"line 3, column C: it has no text"),
        ("2,q,a,b,a,d,A,", r"line 3, column C: the choice is the same as an earlier one"),
        ("2,q,a,b,c,d", r"line 3: fewer fields than the header"),
        ('2,"q,a,b,c,d,A,', r"line 3: not readable CSV"),
    ],
)
def test_a_bad_row_is_named_by_path_line_and_column(tmp_path: Path, row: str, message: str) -> None:
    path = written(tmp_path, "x_val.csv", ENGLISH[0], row)
    with pytest.raises(DataError, match=message) as caught:
        read_questions(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_missing_column_or_file_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "x_val.csv", "q,a,b,c,A", header="question,A,B,C,answer")
    with pytest.raises(DataError, match=r"line 2: there is no column D; the columns are question, A, B, C, D, answer"):
        read_questions(path)
    with pytest.raises(DataError, match=r"no file matches 'gone/\*\.csv'.*correct evaluate\.multiple_choice"):
        load(tmp_path, files=["gone/*.csv"])


def test_settings_that_cannot_work_are_refused() -> None:
    for settings, message in (
        ({"files": []}, "at least 1"),
        ({"files": ["https://example.com/x.csv"]}, "is not on this machine"),
        ({"files": ["x.csv"], "few_shot": 2}, "few_shot 2 needs few_shot_files"),
    ):
        with pytest.raises(ValidationError, match=message):
            MultipleChoiceConfig.model_validate(settings)


def test_examples_of_the_same_subject_come_before(tmp_path: Path) -> None:
    written(tmp_path, "things_val.csv", ENGLISH[0])
    written(tmp_path / "dev", "things_dev.csv", ENGLISH[1])
    written(tmp_path / "dev", "other_dev.csv", *CHINESE)
    settings = {"few_shot": 1, "few_shot_files": ["dev/*.csv"]}
    (dialogue,) = load(tmp_path, **settings).dialogues()
    assert [message.role for message in dialogue] == ["user", "assistant", "user"]
    assert "dog" in dialogue[0].content and dialogue[1].content == "B" and "colour" in dialogue[2].content
    (dialogue,) = load(tmp_path, score="text", **settings).dialogues()
    assert dialogue[1].content == "four"
    with pytest.raises(DataError, match="the subject things has 1 examples in few_shot_files, but few_shot is 2"):
        load(tmp_path, **settings | {"few_shot": 2})


def by_hand(model: Any, prompt: list[int], reply: list[int]) -> float:
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([prompt + reply])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(reply))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_log_likelihoods_are_those_of_a_pass_for_each_reply(models: Path, batch_size: int) -> None:
    model, tokenizer = load_policy(models / "sft")
    examples = [
        Example(*encode_dialogue(tokenizer, [Message("user", "what is it? " * length)], reply))
        for length in (3, 1)
        for reply in ("A", "the boat is red.", "B", "北京")
    ]
    measured = reply_log_likelihoods(model, examples, pad_id(tokenizer), batch_size)
    assert measured == pytest.approx([by_hand(model, list(row.prompt), list(row.reply)) for row in examples], rel=1e-5)


def test_replies_that_differ_in_the_last_token_share_a_pass(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_policy(models / "sft")
    rows = []
    forward = type(model.base_model).forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model.base_model), "forward", counted)
    questions = MultipleChoiceSet([MultipleChoiceQuestion("1", "is it red?", ("a", "b", "c", "d"), 0, "s")] * 3)
    answer_questions(model, tokenizer, questions, 64)
    assert sum(rows) == 1, "the letters of a question are read from one pass, and the same question is asked once"


def test_the_likeliest_choice_is_the_answer(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    choices = ("the boat is red.", "no", "it is blue and green", "yes")
    prompt = [Message("user", "is it red?")]
    for score, texts, lengths in (("text", choices, [len(text) for text in choices]), ("letter", "ABCD", [1, 1, 1, 1])):
        asked = MultipleChoiceSet([MultipleChoiceQuestion("1", prompt[0].content, choices, 0, "s")], score=score)
        values = []
        for text, length in zip(texts, lengths, strict=True):
            ids, reply = encode_dialogue(tokenizer, asked.dialogues()[0], text)
            values.append(by_hand(model, ids, reply[:-1]) / length)  # without the end marker
        assert answer_questions(model, tokenizer, asked, 2) == [values.index(max(values))]


def test_a_question_that_is_too_long_is_counted_and_not_cut(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    short, long = (
        MultipleChoiceQuestion("1", text, ("a", "b", "c", "d"), 0, "s") for text in ("is it red?", "why? " * 300)
    )
    answers = answer_questions(model, tokenizer, MultipleChoiceSet([long, short, long]), 4)
    assert [answer is None for answer in answers] == [True, False, True]


def test_metrics_by_hand() -> None:
    questions = [
        MultipleChoiceQuestion(str(i), "q", ("a", "b", "c", "d"), i % 4, "odd" if i % 2 else "even") for i in range(5)
    ]
    metrics: dict[str, Any] = {"sft": {}, "policy": {}}
    # Right answers are 0 1 2 3 0; the last question does not count.
    answered = AnsweredQuestions(MultipleChoiceSet(questions), [0, 1, 0, 0, None], [0, 0, 2, 3, 0])
    answered.add_to(metrics)
    assert metrics["sft"]["multiple_choice"]["accuracy"] == 0.5
    policy = metrics["policy"]["multiple_choice"]
    assert policy["accuracy"] == 0.75 and policy["subject_mean"] == 0.75
    compared = metrics["multiple_choice"]
    assert {key: compared[key] for key in ("questions", "too_long", "policy_alone_right", "sft_alone_right")} == {
        "questions": 4,
        "too_long": 1,
        "policy_alone_right": 2,
        "sft_alone_right": 1,
    }
    assert compared["difference"] == 0.25
    assert compared["difference_low95"] < 0 < compared["difference_high95"]
    assert compared["subject"]["odd"] == {"questions": 2, "sft": 0.5, "policy": 0.5}
    assert answered.rows()[4] == {
        "subject": "even",
        "id": "4",
        "question": "q",
        "answer": "A",
        "sft": None,
        "policy": "A",
    }
    with pytest.raises(DataError, match="every multiple-choice question is longer"):
        AnsweredQuestions(MultipleChoiceSet(questions), [None] * 5, [0] * 5).add_to({})


def test_twelve_answers_that_agree_do_not_show_that_nothing_was_lost() -> None:
    questions = [MultipleChoiceQuestion(str(n), "q", ("a", "b", "c", "d"), 0, "s") for n in range(12)]
    metrics: dict[str, Any] = {"sft": {}, "policy": {}}
    AnsweredQuestions(MultipleChoiceSet(questions), [0] * 12, [0] * 12).add_to(metrics)
    compared = metrics["multiple_choice"]
    z = 1.959964  # Tango 1998: where no pair differs the bounds are ± z² / (n + z²)
    bound = pytest.approx(z * z / (12 + z * z), rel=1e-4)
    assert (-compared["difference_low95"], compared["difference_high95"]) == (bound, bound)


def test_the_interval_is_wilsons() -> None:
    values = accuracy(torch.tensor([1] * 8 + [0] * 2).bool().numpy(), torch.zeros(10).numpy())
    # Wilson 1927 with z = 1.96: (p + z²/2n ± z √(p (1 - p) / n + z²/4n²)) / (1 + z²/n)
    z, n, p = 1.959964, 10, 0.8
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert values["accuracy_low95"] == pytest.approx((centre - half) / (1 + z * z / n), rel=1e-5)
    assert values["accuracy_high95"] == pytest.approx((centre + half) / (1 + z * z / n), rel=1e-5)


def test_a_changed_or_new_file_is_seen(tmp_path: Path) -> None:
    written(tmp_path / "dev", "things_dev.csv", ENGLISH[1])
    config = MultipleChoiceConfig(files=("val/*.csv",), few_shot=1, few_shot_files=("dev/*.csv",))
    seen = tmp_path / ".fingerprints/verifiable.txt"
    texts = []
    for change in (
        lambda: written(tmp_path / "val", "things_val.csv", *ENGLISH),
        lambda: written(tmp_path / "val", "城市_val.csv", *CHINESE),
        lambda: written(tmp_path / "val", "things_val.csv", ENGLISH[0]),
        lambda: written(tmp_path / "dev", "things_dev.csv", *ENGLISH),
    ):
        change()
        write_evaluation_inputs(tmp_path, EvaluateConfig(multiple_choice=config))
        texts.append(seen.read_text())
    assert len(set(texts)) == 4 and "城市_val.csv" in texts[-1]
