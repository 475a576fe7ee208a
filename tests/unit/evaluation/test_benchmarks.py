"""Benchmarks: best of four by subset, a task of one's own for lm-eval, and multiple choice by
log-likelihood; formats, the sums and the metrics by hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from rlhf_core.config.evaluation import MultipleChoiceConfig
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import encode_dialogue, pad_id
from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.perplexity import reply_log_likelihoods
from rlhf_core.evaluation.replies import Reply
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.training.examples import Example
from rlhf_extras.benchmarks.command import harness, reward_benchmark
from rlhf_extras.benchmarks.lm_evaluation_harness import as_text as table_of
from rlhf_extras.benchmarks.lm_evaluation_harness import run_tasks, task_metrics
from rlhf_extras.benchmarks.reward_benchmark import (
    as_text,
    read_benchmark,
    row_accuracy,
    run_benchmark,
)
from rlhf_extras.evaluations.multiple_choice import (
    MultipleChoiceQuestion,
    MultipleChoiceSet,
    accuracy,
    answer_questions,
    answer_rows,
    multiple_choice_metrics,
    read_questions,
)

from .conftest import LengthJudge


def row(chosen: Any, rejected: Any, subset: str = "Math", **more: Any) -> dict[str, Any]:
    return {
        "id": "1",
        "prompt": "what is it?",
        "chosen": chosen,
        "rejected": rejected,
        "subset": subset,
    } | more


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in rows))
    return path


@pytest.mark.parametrize(
    ("chosen", "rejected", "accuracy"),
    [
        ([3.0], [2.0, 1.0, 0.0], 1.0),
        ([1.0], [2.0, 1.0, 0.0], 0.0),
        ([2.0], [2.0, 1.0, 2.0], 1 / 3),
        ([2.0], [2.0, 2.0, 2.0], 0.25),
        ([3.0, 2.0], [1.0], 1.0),
        ([3.0, 1.0], [1.0], 0.0),
    ],
)
def test_a_row_by_hand(chosen: list[float], rejected: list[float], accuracy: float) -> None:
    assert row_accuracy(chosen, rejected) == pytest.approx(accuracy)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 1, 3])
def test_scores_that_are_not_finite_are_neither_right_nor_wrong(
    tmp_path: Path, bad: float, position: int
) -> None:
    class Broken(LengthJudge):
        def score(self, *given: Any) -> list[float]:
            scores = super().score(*given)
            return [*scores[:position], bad, *scores[position + 1 :]]

    rows = read_benchmark(jsonl(tmp_path / "rows.jsonl", row("long reply", ["a", "b", "c"])))
    with pytest.raises(DataError, match="a score that is not finite"):
        run_benchmark(Broken(), rows)


def test_accuracy_is_by_subset_and_the_mean_over_subsets(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "bench.jsonl",
        row(["longest"], ["a", "ab", "abc"]),
        row(["a"], ["ab", "abc", "abcd"]),
        row("abc", ["ab", "a", "abcd"]),
        row(
            ["abc", "abcd"],
            ["a", "ab"],
            "Ties",
            prompt=[{"role": "user", "content": "name a letter"}],
        ),
    )
    result = run_benchmark(LengthJudge(), read_benchmark(file))
    math, ties = result["subsets"]["Math"], result["subsets"]["Ties"]
    assert (math["rows"], math["clusters"]) == (3, 1), "rows that ask the same are one prompt"
    assert (math["accuracy"], math["chance"]) == (pytest.approx(1 / 3), 0.25)
    assert (round(ties["accuracy_low95"], 3), ties["accuracy_high95"]) == (0.207, 1.0), (
        "one right answer is no proof"
    )
    assert 0 <= math["accuracy_low95"] <= math["accuracy"] <= math["accuracy_high95"] <= 1
    assert (ties["rows"], ties["accuracy"], ties["chance"]) == (1, 1.0, pytest.approx(1 / 6))
    assert result["mean"] == pytest.approx((1 / 3 + 1) / 2)
    assert as_text(result).splitlines()[-1] == "mean over subsets: 0.667"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (row([], ["a"]), "line 2: chosen is no list of texts"),
        (row(["a"], [1]), "line 2: rejected is no list of texts"),
        (row(["a"], ["b"], prompt=None), "line 2: prompt is neither"),
        (row(["a"], ["b"], prompt=[{"role": "bot", "content": "x"}]), "line 2: prompt is neither"),
        (row(["a"], ["b", "\ud800"]), "line 2: rejected holds half of a surrogate pair"),
        (row(["a"], ["b"], prompt="\ud800"), "line 2: prompt holds half of a surrogate pair"),
        (
            row(["a"], ["b"], prompt=[{"role": "assistant", "content": "x"}]),
            "line 2: prompt does not end with a user",
        ),
        ([1], "line 2: no object"),
    ],
)
def test_a_row_of_another_format_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_benchmark(jsonl(tmp_path / "bench.jsonl", row(["a"], ["b"]), value))


def test_the_command_scores_with_a_model_folder(tmp_path: Path, models: Path) -> None:
    rows = row(["is it red?"], ["no", "yes", "blue"]), row(["a"], ["b", "c", "d"], "Focus")
    file = jsonl(tmp_path / "bench.jsonl", *rows)
    done = CliRunner().invoke(
        reward_benchmark, [str(file), "--model", str(models / "reward"), "--json"]
    )
    assert done.exit_code == 0, done.output
    printed = json.loads(done.output)
    assert set(printed["subsets"]) == {"Math", "Focus"} and 0 <= printed["mean"] <= 1


def test_a_reply_beyond_the_models_positions_is_not_scored(models: Path) -> None:
    judge = ModelJudge.load(models / "reward", "reward")
    assert judge.positions is not None
    with pytest.raises(
        DataError,
        match=rf"more than the {judge.positions} positions of the model 'reward'; leave out",
    ):
        judge.score([[Message("user", "?")]], [Reply("yes " * judge.positions, True)])


needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-eval (the extra lm-eval) is not installed",
)
ROWS = [("Is the boat red?", 0), ("Is the frog blue?", 1), ("Is it Monday?", 1)]
RESULTS = {
    "results": {
        "exam": {
            "alias": "exam",
            "sample_len": 3,
            "acc,none": 0.5,
            "acc_stderr,none": 0.25,
            "f1,strict": 0.125,
        },
        "other": {"alias": "other", "acc,none": 1.0, "acc_stderr,none": "N/A"},
    }
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [
        json.dumps({"question": text, "choices": ["yes", "no"], "answer": answer})
        for text, answer in ROWS
    ]
    (folder / "exam.jsonl").write_text("\n".join(lines) + "\n")
    text = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
    for name, file in (("exam", "exam.jsonl"), ("lost", "gone.jsonl")):
        (folder / f"{name}.yaml").write_text(text.format(name=name, file=folder / file))
    return folder


@pytest.mark.slow
@needs_lm_eval
def test_a_local_task_measures_both(
    tasks: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    output = tmp_path / "results.json"
    arguments = [
        "--task",
        "exam",
        "--include-path",
        str(tasks),
        "--output",
        str(output),
        "--batch-size",
        "2",
    ]
    result = CliRunner().invoke(harness, [str(models / "sft"), str(models / "policy"), *arguments])
    assert result.exit_code == 0, result.output
    stored = json.loads(output.read_text())
    assert set(stored) == {"sft", "policy"} and "pretty_env_info" not in stored["sft"]
    for name in stored:
        accuracy, stderr = task_metrics(stored[name])["exam", "acc"]
        assert 3 * accuracy == pytest.approx(round(3 * accuracy))
        # lm-eval's standard error of a mean of n zeros and ones: √(p (1 - p) / (n - 1)).
        assert stderr == pytest.approx((accuracy * (1 - accuracy) / 2) ** 0.5)
        assert f"{accuracy:.4g}"[:5] in result.output
    assert stored["sft"]["n-samples"]["exam"] == {"original": 3, "effective": 3}
    with pytest.raises(DataError, match=r"lm-eval cannot run lost: ") as caught:
        run_tasks({"sft": models / "sft"}, ["lost"], [tasks])
    assert "\n" not in str(caught.value)


def test_a_missing_folder_or_package_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        with pytest.raises(ConfigError, match=r"--include-path .*gone is no folder"):
            run_tasks({}, ["exam"], [tmp_path / "gone"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(RlhfError, match=r"pip install 'rlhf-pipeline\[lm-eval\]'"):
        run_tasks({}, ["exam"])
    with pytest.raises(ConfigError, match="name at least one task"):
        CliRunner().invoke(harness, [str(tmp_path)], catch_exceptions=False)


def test_the_table_has_every_metric_of_both_models_with_its_error() -> None:
    better = {"results": {"exam": {"acc,none": 0.75, "acc_stderr,none": 0.2}}}
    lines = [line.split() for line in table_of({"sft": RESULTS, "policy": better}).splitlines()]
    assert lines[0] == ["task", "metric", "sft", "policy", "change"]
    assert lines[1] == ["exam", "acc", "0.5000", "±", "0.2500", "0.7500", "±", "0.2000", "+0.2500"]
    assert lines[2] == ["exam", "f1", "(strict)", "0.1250"]
    assert lines[3] == ["other", "acc", "1.0000"]


HEADER = "id,question,A,B,C,D,answer,explanation"
ENGLISH = [
    "0,Which one is a colour?,red,seven,slowly,under,A,",
    '1,"How many legs has a dog, as a rule?",two,four,six,eight,B,"Dogs, cats and horses have four."',
]
CHOICES = ("a", "b", "c", "d")
CHINESE = ["0,中国的首都是____。,上海,广州,北京,深圳,C,首都是北京。"]


def written(folder: Path, name: str, *rows: str, header: str = HEADER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return folder / name


def load(folder: Path, **settings: Any) -> MultipleChoiceSet:
    return MultipleChoiceSet.load(
        MultipleChoiceConfig.model_validate({"files": ["*_val.csv"]} | settings), folder
    )


def test_questions_of_two_languages(tmp_path: Path) -> None:
    written(tmp_path, "things_val.csv", *ENGLISH)
    written(tmp_path, "城市_val.csv", *CHINESE)
    questions = load(tmp_path).questions
    legs = ("two", "four", "six", "eight")
    assert questions[1] == MultipleChoiceQuestion(
        "1", "How many legs has a dog, as a rule?", legs, 1, "things"
    )
    assert questions[0].turn("letter") == (
        "This is a multiple-choice question. Answer with the letter of the right choice.\n\n"
        "Which one is a colour?\nA. red\nB. seven\nC. slowly\nD. under\nAnswer:"
    )
    assert questions[2].subject == "城市" and questions[2].turn("letter") == (
        "以下是单项选择题，请选出其中的正确答案。\n\n中国的首都是____。\nA. 上海\nB. 广州\nC. 北京\nD. 深圳\n答案："
    )
    assert (
        questions[2].turn("text") == "中国的首都是____。"
        and questions[2].answers("text")[2] == "北京"
    )


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
    with pytest.raises(
        DataError,
        match=r"line 2: there is no column D; the columns are question, A, B, C, D, answer",
    ):
        read_questions(path)
    with pytest.raises(
        DataError, match=r"no file matches 'gone/\*\.csv'.*correct evaluate\.multiple_choice"
    ):
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
    assert (
        "dog" in dialogue[0].content
        and dialogue[1].content == "B"
        and "colour" in dialogue[2].content
    )
    (dialogue,) = load(tmp_path, score="text", **settings).dialogues()
    assert dialogue[1].content == "four"
    with pytest.raises(
        DataError, match="the subject things has 1 examples in few_shot_files, but few_shot is 2"
    ):
        load(tmp_path, **settings | {"few_shot": 2})


def by_hand(model: Any, prompt: list[int], reply: list[int]) -> float:
    with torch.no_grad():
        logprobs = (
            model(input_ids=torch.tensor([prompt + reply])).logits[0].double().log_softmax(-1)
        )
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
    assert measured == pytest.approx(
        [by_hand(model, list(row.prompt), list(row.reply)) for row in examples], rel=1e-5
    )


def test_replies_that_differ_in_the_last_token_share_a_pass(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_policy(models / "sft")
    rows = []
    forward = type(model.base_model).forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model.base_model), "forward", counted)
    questions = MultipleChoiceSet([MultipleChoiceQuestion("1", "is it red?", CHOICES, 0, "s")] * 3)
    answer_questions(model, tokenizer, questions, 64)
    assert sum(rows) == 1, (
        "the letters of a question are read from one pass, and the same question is asked once"
    )


def test_the_likeliest_choice_is_the_answer(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    choices = ("the boat is red.", "no", "it is blue and green", "yes")
    prompt = [Message("user", "is it red?")]
    for score, texts, lengths in (
        ("text", choices, [len(text) for text in choices]),
        ("letter", "ABCD", [1, 1, 1, 1]),
    ):
        asked = MultipleChoiceSet(
            [MultipleChoiceQuestion("1", prompt[0].content, choices, 0, "s")], score=score
        )
        values = []
        for text, length in zip(texts, lengths, strict=True):
            ids, reply = encode_dialogue(tokenizer, asked.dialogues()[0], text)
            values.append(by_hand(model, ids, reply[:-1]) / length)  # without the end marker
        assert answer_questions(model, tokenizer, asked, 2) == [values.index(max(values))]


def test_a_question_that_is_too_long_is_counted_and_not_cut(models: Path) -> None:
    model, tokenizer = load_policy(models / "sft")
    short, long = (
        MultipleChoiceQuestion("1", text, CHOICES, 0, "s") for text in ("is it red?", "why? " * 300)
    )
    answers = answer_questions(model, tokenizer, MultipleChoiceSet([long, short, long]), 4)
    assert [answer is None for answer in answers] == [True, False, True]
    with pytest.raises(
        DataError, match="every multiple-choice question is longer"
    ):  # before anything is judged
        answer_questions(model, tokenizer, MultipleChoiceSet([long, long]), 4)


def test_metrics_by_hand() -> None:
    questions = [
        MultipleChoiceQuestion(str(i), "q", CHOICES, i % 4, "odd" if i % 2 else "even")
        for i in range(5)
    ]
    # Right answers are 0 1 2 3 0; the last question does not count.
    asked, sft, by_policy = MultipleChoiceSet(questions), [0, 1, 0, 0, None], [0, 0, 2, 3, 0]
    metrics = multiple_choice_metrics(asked, sft, by_policy)
    assert metrics["sft"]["multiple_choice"]["accuracy"] == 0.5
    policy = metrics["policy"]["multiple_choice"]
    assert policy["accuracy"] == 0.75 and policy["subject_mean"] == 0.75
    compared = metrics["multiple_choice"]
    assert [
        compared[key] for key in ("questions", "too_long", "policy_alone_right", "sft_alone_right")
    ] == [4, 1, 2, 1]
    assert compared["difference"] == 0.25
    assert compared["difference_low95"] < 0 < compared["difference_high95"]
    assert compared["subject"]["odd"] == {"questions": 2, "sft": 0.5, "policy": 0.5}
    about = {"subject": "even", "id": "4", "question": "q", "answer": "A"}
    assert answer_rows(asked, sft, by_policy)[4] == about | {"sft": None, "policy": "A"}


def test_twelve_answers_that_agree_do_not_show_that_nothing_was_lost() -> None:
    questions = [MultipleChoiceQuestion(str(n), "q", CHOICES, 0, "s") for n in range(12)]
    asked = MultipleChoiceSet(questions)
    compared = multiple_choice_metrics(asked, [0] * 12, [0] * 12)["multiple_choice"]
    z = 1.959964  # Tango 1998: where no pair differs the bounds are ± z² / (n + z²)
    bound = pytest.approx(z * z / (12 + z * z), rel=1e-4)
    assert (-compared["difference_low95"], compared["difference_high95"]) == (bound, bound)


def test_the_interval_is_wilsons() -> None:
    values = accuracy(np.array([True] * 8 + [False] * 2), np.zeros(10))
    # Wilson 1927 with z = 1.959964: (p + z²/2n ± z √(p (1 - p) / n + z²/4n²)) / (1 + z²/n)
    assert (values["accuracy_low95"], values["accuracy_high95"]) == pytest.approx(
        (0.490162, 0.943318), abs=1e-5
    )
