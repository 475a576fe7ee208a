"""What the public functions refuse, each in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from unit.api.conftest import CRITIC_FREE, PPO, QUESTIONS, LanguageModel, by_length

import rlhf_core as rlhf
from rlhf_core.api.inputs import rows_of
from rlhf_core.data.schema import Demonstration, Message, Preference, PretrainText, Prompt
from rlhf_core.errors import ConfigError, DataError, ModelError

Call = Callable[[Any, Any, rlhf.TrainedCritic], Any]
PAIRS = [{"prompt": "a", "completion": "b"}] * 3
SOURCES = {"reward": {"sources": [{"kind": "function", "target": "a.module:function"}]}}
SHARED = {"policy_lora": rlhf.LoraConfig(rank=2), "share_base": True}


def sft(*rows: Any, **more: Any) -> Call:
    return lambda model, tokenizer, critic: rlhf.train_sft(model, tokenizer, [*rows], **more)


def pretraining(prompts: Any = QUESTIONS, score: Any = by_length, **settings: Any) -> Call:
    rollout = rlhf.PpoConfig(**PPO | settings).rollout
    return lambda model, tokenizer, critic: rlhf.train_critic(
        model, tokenizer, prompts, score, rollout=rollout
    )


def ppo(
    settings: dict[str, Any], reward: Any = by_length, critic: bool = True, **more: Any
) -> Call:
    config = rlhf.PpoConfig(**PPO | settings)
    return lambda model, tokenizer, trained: rlhf.train_ppo(
        model, tokenizer, QUESTIONS, reward, trained if critic else None, config=config, **more
    )


def refereed(referee: Any) -> Call:
    return ppo({}, referee=referee, validation_prompts=["a"])


REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    "no records": (sft(), DataError, "demonstrations is empty"),
    "one record": (sft(PAIRS[0]), DataError, "none can be held out"),
    "an unknown format": (sft(*[{"a": 1}] * 3), DataError, "no known format"),
    "a record that differs": (
        lambda model, tokenizer, critic: rlhf.train_reward_model(
            model,
            tokenizer,
            [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}],
        ),
        DataError,
        "preferences, record 2",
    ),
    "an empty reply": (
        sft(*[{"prompt": "a", "completion": ""}] * 3),
        DataError,
        "record 1: the reply is empty",
    ),
    "another stage's settings": (
        sft(*PAIRS, config=rlhf.PpoConfig(**PPO)),
        ConfigError,
        "config is a PpoConfig; a SftConfig is needed",
    ),
    **{
        f"a name as {name}": (
            call,
            ConfigError,
            f"{name.split()[0]} is a str; give a model, or its folder as a Path",
        )
        for name, call in {
            "model of sft": lambda model, tokenizer, critic: rlhf.train_sft(
                "org/model", tokenizer, PAIRS
            ),
            "model of the reward": lambda model, tokenizer, critic: rlhf.train_reward_model(
                "org/model", tokenizer, PAIRS
            ),
            "model of ppo": lambda model, tokenizer, critic: rlhf.train_ppo(
                "org/model", tokenizer, QUESTIONS, by_length
            ),
            "policy of the critic": lambda model, tokenizer, critic: rlhf.train_critic(
                "org/model", tokenizer, QUESTIONS
            ),
            "init of the critic": lambda model, tokenizer, critic: rlhf.train_critic(
                model, tokenizer, QUESTIONS, by_length, init="models/reward"
            ),
        }.items()
    },
    "a function as referee": (
        refereed(by_length),
        ConfigError,
        "referee is a function; give a reward model",
    ),
    "a name as referee": (
        refereed("models/referee"),
        ConfigError,
        "referee is a str; give a reward model",
    ),
    "settings of rollouts as a dictionary": (
        lambda model, tokenizer, critic: rlhf.train_critic(
            model, tokenizer, QUESTIONS, by_length, rollout={}
        ),
        ConfigError,
        "rollout is a dict; a RolloutConfig is needed",
    ),
    "one string": (pretraining("Name a colour"), DataError, "prompts is one str"),
    "a table of columns": (pretraining({"prompt": QUESTIONS}), DataError, "prompts is one dict"),
    "an empty prompt": (
        pretraining(["a", " "]),
        DataError,
        "prompts, record 2: the prompt is empty",
    ),
    "a prompt that ends with a reply": (
        pretraining([{"prompt": [{"role": "assistant", "content": "a"}]}]),
        DataError,
        "record 1: the prompt must end with a turn of the user",
    ),
    "no function": (pretraining(score=3), ConfigError, "reward is a int"),
    "a reward that is given twice": (pretraining(**SOURCES), ConfigError, "given twice"),
    "a critic to pre-train that nothing reads": (
        pretraining(**CRITIC_FREE),
        ConfigError,
        "call train_ppo without",
    ),
    "no critic": (ppo({}, critic=False), ConfigError, "advantage.estimator gae needs a critic"),
    "a critic that nothing reads": (
        ppo(CRITIC_FREE),
        ConfigError,
        "needs no critic, but there is one",
    ),
    "too few rewards": (ppo({}, lambda prompts, replies: [1.0]), DataError, "gave 1 scores for"),
    "other units than the critic's": (ppo({"temperature": 0.5}), ConfigError, "temperature"),
    "ptx without texts": (ppo({"ptx": rlhf.PtxConfig()}), ConfigError, "no demonstrations"),
    "texts that nothing reads": (
        ppo({"ptx": rlhf.PtxConfig()}, pretrain=["a text"]),
        ConfigError,
        "ptx.data is demonstrations",
    ),
    "a base that is not given": (ppo({"policy_init": "base"}), ConfigError, "there is no base"),
    "shared weights of models in memory": (
        ppo(SHARED),
        ConfigError,
        "give model and referee as folders",
    ),
    "prompts for no referee": (
        ppo({}, validation_prompts=QUESTIONS),
        ConfigError,
        "judged by a referee",
    ),
    "a referee without prompts": (
        lambda model, tokenizer, critic: ppo({}, referee=critic.model)(model, tokenizer, critic),
        DataError,
        "validation_prompts is empty",
    ),
}


def demonstration(reply: Any = "a", question: Any = "q", role: str = "user") -> Demonstration:
    return Demonstration("1", [Message(role, question)], reply, "general", "mine", "q")


def preference(chosen: Any) -> Preference:
    return Preference("1", [Message("user", "q")], chosen, "b", None, "general", "mine", "q")


UNUSABLE_ROWS: list[tuple[type[Any], Any, str]] = [
    (Demonstration, demonstration("a\ud83d"), "reply holds half of a surrogate pair"),
    (
        Demonstration,
        demonstration(question="\udc00"),
        "the user turn holds half of a surrogate pair",
    ),
    (Preference, preference("\ud83d"), "chosen holds half of a surrogate pair"),
    (
        PretrainText,
        PretrainText("1", "a\ud83d", "general", "mine", "a"),
        "text holds half of a surrogate pair",
    ),
    (Preference, preference(None), "chosen is missing"),
    (Demonstration, demonstration(5), "reply is not text but int"),
    (Demonstration, demonstration(" "), "the reply is empty"),
    (Demonstration, demonstration(role="human"), "no Message of the role system, user, assistant"),
    (Demonstration, demonstration(role="assistant"), "must end with a turn of the user"),
    (Prompt, Prompt("1", [], "general", "mine", ""), "must end with a turn of the user"),
]


@pytest.mark.parametrize(("kind", "row", "message"), UNUSABLE_ROWS)
def test_a_row_that_is_made_by_hand_is_checked_as_a_record_is(
    kind: type[Any], row: Any, message: str
) -> None:
    with pytest.raises(DataError, match=f"^rows, record 1: .*{message}"):
        rows_of(kind, [row], "rows")


@pytest.fixture(scope="module")
def critic(llama: LanguageModel) -> rlhf.TrainedCritic:
    rollout, none = rlhf.PpoConfig(**PPO).rollout, rlhf.CriticConfig(max_rollouts=0)
    return rlhf.train_critic(*llama, QUESTIONS, by_length, rollout=rollout, config=none)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(
    case: str, llama: LanguageModel, critic: rlhf.TrainedCritic
) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call(*llama, critic)


def test_a_tokenizer_without_an_end_marker_is_refused(llama: LanguageModel) -> None:
    tokenizer = copy.deepcopy(llama[1])
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        rlhf.train_sft(llama[0], tokenizer, PAIRS)
