"""How long each stage takes on this machine: a few passes of the starting model's shape are tried,
for seconds, and multiplied by what the settings ask for.

It is a line of the door of forecasts, and part of ``rlhf plan``.
Weights are random, lengths those of a sample of the data. What is not passes of a model counts as a
few seconds a stage. On a CPU, passes are measured in time of the processor, so that the forecast is
that of a quiet machine; what other processes take is said beside it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rlhf_core.config.base import BaseConfig
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.params import Params
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.batches import TokenisedPair
from rlhf_core.data.schema import Preference, Prompt
from rlhf_core.forecast import Forecast, seed_of
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import scratch_config
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.precision import use_float32_unembedding, weights_precision
from rlhf_core.models.readers import is_model_file, model_reader
from rlhf_core.runtime import distributed
from rlhf_core.runtime.machine import available_memory
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, sample_replies
from rlhf_core.stages.pair_supply import DataSupply
from rlhf_core.stages.run_forecasts import ForecastLine
from rlhf_core.training.engine.factory import build_engine
from rlhf_core.training.examples import Example
from rlhf_core.training.losses import StepTotals
from rlhf_core.training.reward.trainer import pair_loss, score_pairs
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import example_batch, mean_reply_loss, reply_loss
from rlhf_core.world import corpus
from rlhf_extras.memory.workload import (
    PAIRED,
    DataShape,
    Work,
    pairs_of_step,
    work_of_stage,
    working_stages,
)

# Of the processor time that is asked for; with less there is no telling.
LEAST_SHARE = 0.01
QUIET = 0.25  # cores that other processes of a quiet machine take at most
SWITCH = "RLHF_PROBE"  # 0: nothing is tried
SAMPLE_ROWS = 200
# Of English text in a byte-pair vocabulary; in UTF-8 a Chinese character counts as three bytes.
BYTES_PER_TOKEN = 4
# A model of more parameters is not built to be tried.
MOST_PARAMETERS = 500_000_000
# Floating-point operations of one tried pass, about: a second on two cores.
PASS_FLOPS = 2e11
LONGER = 1.25  # of a mean row, every other one that is tried
BYTES_PER_PARAMETER = 24  # two models, gradients, optimiser's state
LEAST_SECONDS = 0.3  # of one measurement, warmed up by one pass
STAGE_SECONDS = 10.0  # start of a stage's process, loading and saving
RUN_SECONDS = 60.0  # Prefect and MLflow, data, gates and report
# Replies of a batch end one after another, the last one after so many times their mean length.
LONGEST_REPLY = 2.5
PAD, FIRST_ID = 0, 4
SHORT, LONG = 2, 10  # tokens of the replies that are sampled to measure a token
PROBED_PROMPT = 16
Clock = Callable[[], float]


@dataclass(frozen=True)
class MachineLoad:
    """What a machine did while passes were tried on it.

    Attributes:
        cores: Its cores.
        others: How many of them other processes kept busy.
        share: The share of the processor time that the passes asked for and got.
    """

    cores: int
    others: float = 0.0
    share: float = 1.0

    @property
    def is_busy(self) -> bool:
        """Whether the load of other processes is more than that of a quiet machine."""
        return self.others > QUIET


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds so far by the clock, of all processors and of this process."""

    clock: float
    all_processes: float
    this_process: float

    @classmethod
    def now(cls) -> ProcessorTimes:
        """Return the seconds that have passed until now."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Time of guests is in that of users already.
        counted = (
            sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        )
        return cls(time.perf_counter(), counted, time.process_time())

    def load_since(self, started: ProcessorTimes, threads: int) -> MachineLoad:
        """Return the load since then, during which this process ran on ``threads`` threads."""
        cores, seconds = os.cpu_count() or 1, max(self.clock - started.clock, 1e-9)
        own = self.this_process - started.this_process
        others = max(self.all_processes - started.all_processes - own, 0.0) / seconds
        return MachineLoad(cores, min(others, cores), min(own / (seconds * threads), 1.0))


@dataclass(frozen=True)
class TimeForecast:
    """Seconds of each stage alone on this machine, and quiet.

    Attributes:
        seconds: By stage, in their order.
        total: Of a whole run, its services, data and gates included, with stages side by side where
            settings ask for that.
        tried: Seconds that trying took.
        load: What else the machine did meanwhile.
    """

    seconds: Mapping[str, float]
    total: float
    tried: float
    load: MachineLoad

    @property
    def conclusion(self) -> str:
        """All of it in one line."""
        stages = ", ".join(f"{name} {duration(taken)}" for name, taken in self.seconds.items())
        text = f"about {duration(self.total)} on this machine: {stages}"
        if self.load.is_busy:
            slower = duration(self.total / max(self.load.share, LEAST_SHARE))
            text += (
                f"; it is busy: other processes take {self.load.others:.1f} of its {self.load.cores} "
                f"cores, and while they do, it may be {slower}"
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self) | {"seconds": dict(self.seconds)}


def seconds_side_by_side(
    alone: Mapping[str, float], slots: int, at_full_speed: float = 1.0
) -> float:
    """Seconds until all stages have run, of which the first ``slots`` that could start do run.

    Args:
        alone: Seconds of each stage by itself, in their order. The judge is needed by ``evaluate``
            alone, any other stage by the next, but for reward model and referee.
        slots: How many run at a time.
        at_full_speed: How many are as fast as alone; more than those share their speed.
    """
    left, total = dict(alone), 0.0
    while left:
        ready = [stage for stage in left if not _waits(stage, left)][:slots]
        speed = min(1.0, at_full_speed / len(ready))
        least = min(left[stage] for stage in ready)
        total += least / speed
        for stage in ready:
            left[stage] -= least
        left = {stage: seconds for stage, seconds in left.items() if seconds > 0}
    return total


def _waits(stage: str, left: Mapping[str, float]) -> bool:
    """Whether one of the stages that are left must end before ``stage`` starts."""
    for other in left:
        if other == stage:
            return False
        both_read_pairs = stage in PAIRED and other in PAIRED
        if not both_read_pairs and (other != "judge" or stage == "evaluate"):
            return True
    return False


def duration(seconds: float) -> str:
    """Return seconds in the unit that is easiest to read."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def hours_of_run(folder: Path, params: Params, supply: DataSupply) -> ForecastLine | None:
    """Say how long a run takes on this machine; None where that cannot be tried in seconds.

    Args:
        folder: Where a relative path of the starting model starts.
        params: The settings.
        supply: What is known of the data.
    """
    found = forecast_time(folder, params, supply)
    if found is None:
        return None
    how = f" (passes of this model's shape, tried for {found.tried:.0f} s)"
    return ForecastLine(found.conclusion + how, details=found.as_dict())


def forecast_time(
    folder: Path, params: Params, supply: DataSupply, clock: Clock | None = None
) -> TimeForecast | None:
    """Say how long each stage takes here.

    Args:
        clock: Returns seconds; by default those of this thread on the processor, or where a GPU
            computes, those of the wall clock.

    Returns:
        None where it cannot be tried in seconds: the environment variable ``RLHF_PROBE`` is 0, the
        model or the data are not here, or the model is too large.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    with suppress(Exception):  # no forecast is worth a command that ends
        config = _model_config(params.base, folder)
        data = data_shape(params, supply)
        if config is None or data is None:
            return None
        threads = torch.get_num_threads()
        used = params.compute.threads or threads
        # A pass runs in this thread, which helpers join, so that it is busy as long as the pass
        # takes on a quiet machine.
        on_gpu = distributed.device().type == "cuda"
        clock = clock or (time.perf_counter if on_gpu else time.thread_time)
        started = ProcessorTimes.now()
        try:
            torch.set_num_threads(used)
            machine = Machine.tried(config, params, data, clock)
        finally:
            torch.set_num_threads(threads)
        ended = ProcessorTimes.now()
        load = ended.load_since(started, used)
        return None if machine is None else machine.forecast(ended.clock - started.clock, load)
    return None


def data_shape(params: Params, supply: DataSupply) -> DataShape | None:
    """Return the mean lengths of the rows; None where they are not known before a run."""
    if params.collect.source == "world":
        return _shape_of_world(params)
    if supply.lengths is None:
        return None
    of_kind = supply.lengths.by_kind
    reply: float = params.ppo.max_new_tokens / 2
    prompt = 0.0
    rows = of_kind.get(Preference.KIND)
    if rows is not None and len(rows):
        reply = float(rows[:, 1].mean())
        prompt = float(rows[:, 0].mean()) - reply
    prompts = of_kind.get(Prompt.KIND)
    if prompts is not None and len(prompts):
        prompt = float(prompts[:, 0].mean())
    pairs = supply.pairs
    count = 1000 if pairs is None else pairs.pairs
    training_rows = {} if pairs is None else _training_rows(params, pairs)
    return _shape(params, prompt, reply, prompt + reply, count, training_rows)


def _shape_of_world(params: Params) -> DataShape:
    """The lengths of some rows of the synthetic world, by their bytes."""
    prompts, replies = [], []
    for row in corpus.preferences(seed_of(params), SAMPLE_ROWS):
        text = " ".join(str(message["content"]) for message in row["prompt"])
        prompts.append(_tokens(text))
        replies += [_tokens(str(row["chosen"])), _tokens(str(row["rejected"]))]
    texts = [_tokens(str(row["text"])) for row in corpus.pretrain(params.seed, SAMPLE_ROWS)]
    prompt, reply, plain = map(fmean, (prompts, replies, texts))
    return _shape(params, prompt, reply, plain, params.collect.world.preferences, {})


def _shape(
    params: Params,
    prompt: float,
    reply: float,
    text: float,
    count: int,
    training_rows: Mapping[str, int],
) -> DataShape:
    split = params.validate_.split
    return DataShape(
        prompt,
        min(reply, params.ppo.max_new_tokens),
        text,
        demonstrations=max(round(count * split.validation), 1),
        test_pairs=max(round(count * split.test), 1),
        prompts=count,
        training_rows=training_rows,
    )


def _training_rows(params: Params, pairs: Forecast) -> dict[str, int]:
    """By stage the rows that it trains on: pairs, after lengths are balanced, and for SFT all chosen
    replies where no demonstrations are named.
    """
    found = {}
    all_pairs = 0
    for reader, splits in pairs.counts.items():
        train = splits["train"]
        all_pairs += train.pairs
        balances = getattr(params, reader).length_balance == "sampling"
        found[reader] = train.balanced + train.equal if balances else train.pairs
    if not params.collect.files.demonstrations:
        found["sft"] = all_pairs
    return found


def _tokens(text: str) -> float:
    """About how many tokens a text has, with those around a turn."""
    return len(text.encode()) / BYTES_PER_TOKEN + 2


def _model_config(base: BaseConfig, root: Path) -> PretrainedConfig | None:
    """The starting model's configuration, if it is here; nothing is fetched."""
    folder = root / Path(os.path.expanduser(base.source))
    if base.source == "scratch":
        return scratch_config(base, base.vocab_size, PAD, FIRST_ID - 1)
    if is_model_file(folder):
        return model_reader(folder).read_config(folder)
    source = str(folder) if folder.is_dir() else base.source
    with suppress(OSError, ValueError):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, revision=base.revision, local_files_only=True, trust_remote_code=False
        )
        return config
    return None


@dataclass
class Machine:
    """What this machine does with models of one shape, as it was tried.

    Attributes:
        read: Seconds to read a token, by whether the model is a scalar one and its layers.
        train: Seconds to train on a token, likewise.
        step: Seconds of an optimiser step, likewise.
        token: Seconds to sample one token of each row, as a part that every step takes, and one for
            each row.
    """

    params: Params
    data: DataShape
    read: dict[tuple[bool, int | None], float] = field(default_factory=dict)
    train: dict[tuple[bool, int | None], float] = field(default_factory=dict)
    step: dict[tuple[bool, int | None], float] = field(default_factory=dict)
    token: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def tried(
        cls, config: PretrainedConfig, params: Params, data: DataShape, clock: Clock
    ) -> Machine | None:
        """Try all kinds of passes that the settings ask for.

        None where one takes more than seconds, or more memory than is free, or where the model
        cannot read such rows.
        """
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(
                config, trust_remote_code=False
            ).num_parameters()
        slow = 6 * parameters * data.row > 3 * PASS_FLOPS
        large = BYTES_PER_PARAMETER * parameters > available_memory()
        longer = LONGER * data.row > (positions_of(config) or math.inf)
        if parameters > MOST_PARAMETERS or slow or large or longer:
            return None
        machine = cls(params, data)
        with torch.random.fork_rng(devices=[]):
            policy = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, weights_precision(params.base.dtype)),
                attn_implementation="sdpa", trust_remote_code=False,
            )  # fmt: skip
            use_float32_unembedding(policy)
            policy.to(distributed.device())
            most = max(int(PASS_FLOPS / (6 * parameters * data.row)), 1)
            machine._try_language_model(policy, most, clock)
            kinds = {
                one.layers
                for stage in working_stages(params)
                for one in work_of_stage(params, stage, data)
                if one.scalar
            }
            for layers in sorted(kinds, key=str):
                machine._try_scalar_model(policy, layers, most, clock)
            machine._try_sampling(policy, parameters, clock)
        return machine

    def forecast(self, tried: float, load: MachineLoad) -> TimeForecast:
        """Multiply what was tried by the passes of each stage."""
        found = {}
        for stage in working_stages(self.params):
            work = work_of_stage(self.params, stage, self.data)
            found[stage] = STAGE_SECONDS + sum(self.seconds(one) for one in work)
        threads = self.params.compute.threads or os.cpu_count() or 1
        at_full_speed = max((os.cpu_count() or 1) / threads, 1.0)
        worked = seconds_side_by_side(found, self.params.flow.parallel, at_full_speed)
        return TimeForecast(found, RUN_SECONDS + worked, tried, load)

    def seconds(self, work: Work) -> float:
        """Return the seconds of some passes."""
        kind = work.scalar, work.layers
        if work.kind == "read":
            return work.tokens * self.read[kind]
        if work.kind == "train":
            passes = work.tokens * self.train[kind]
            return passes * 2 / 3 if work.adapters else passes + work.times * self.step[kind]
        batches = math.ceil(work.rows / (work.at_once or work.rows))
        every_step, each_row = self.token
        longest = min(self.params.ppo.max_new_tokens, LONGEST_REPLY * work.reply)
        prompts = work.rows * work.prompt * self.read[False, None]
        return work.times * (
            prompts + batches * longest * every_step + work.rows * work.reply * each_row
        )

    def _try_language_model(self, policy: PreTrainedModel, most: int, clock: Clock) -> None:
        sft = self.params.sft
        rows = self._examples(min(sft.micro_batch_size or sft.batch_size, most), policy)
        total = sum(len(row.reply) for row in rows)
        tokens = sum(row.length for row in rows)

        def loss() -> torch.Tensor:
            return reply_loss(policy, example_batch(rows, PAD, policy.device), total)

        key = False, None
        self._try_training(policy, key, tokens, loss, clock)
        policy.eval()
        self.read[key] = (
            _taken(lambda: mean_reply_loss(policy, rows, PAD, len(rows)), clock) / tokens
        )

    def _try_scalar_model(
        self, policy: PreTrainedModel, layers: int | None, most: int, clock: Clock
    ) -> None:
        config: RewardConfig = self.params.reward
        model = ScalarModel.from_causal_lm(policy, 0, layers, config.pooling)
        count = max(min(pairs_of_step(config, self.data.row), most // 2), 1)
        rows = self._examples(count, policy)
        pairs = [
            TokenisedPair(number, row.prompt, row.reply, row.reply[::-1])
            for number, row in enumerate(rows)
        ]
        totals = StepTotals(len(pairs), sum(len(pair.chosen) for pair in pairs))
        tokens = 2 * sum(row.length for row in rows)
        if layers is not None:
            config = config.model_copy(update={"imitation": 0.0})

        def loss() -> torch.Tensor:
            return pair_loss(model, pairs, None, config, PAD, totals)[0]

        key = True, layers
        self._try_training(model, key, tokens, loss, clock)
        self.read[key] = _taken(lambda: score_pairs(model, pairs, PAD), clock) / tokens

    def _try_training(
        self,
        model: Any,
        key: tuple[bool, int | None],
        tokens: int,
        loss: Callable[[], torch.Tensor],
        clock: Clock,
    ) -> None:
        """Measure gradients per token, and an optimiser step."""
        optimizer = OptimizerConfig(lr=1e-5)  # the rate takes no time
        engine = build_engine(model, optimizer, 1000, "probe", RunContext(Path()))
        model.train()

        def gradients() -> None:
            engine.backward(engine.forward(loss))

        self.train[key] = _taken(gradients, clock) / tokens

        def both() -> None:
            gradients()
            engine.step()

        self.step[key] = max(_taken(both, clock) - self.train[key] * tokens, 0.0)
        for parameter in model.parameters():
            parameter.grad = None

    def _try_sampling(self, policy: PreTrainedModel, parameters: int, clock: Clock) -> None:
        """Measure a step of the decoder with many rows and with few."""
        ppo = self.params.ppo
        width = min(PROBED_PROMPT, round(self.data.prompt) + 1)
        most = int(PASS_FLOPS / (2 * parameters * width))
        many = max(min(ppo.sampling_batch_size or ppo.batch_size, ppo.batch_size, most), 2)
        sampler = LocalSampler.of(policy)

        def sampled(rows: int, tokens: int) -> float:
            ids = [[FIRST_ID + number % 7] * width for number in range(rows)]
            batch = PromptBatch(ids, list(range(rows)), 0)
            sampling = Sampling(FIRST_ID - 1, PAD, tokens, min_new_tokens=tokens)
            return _taken(lambda: sample_replies(sampler, 0, batch, sampling), clock)

        few = max(many // 4, 1)
        of_many, of_few = (
            max(sampled(rows, LONG) - sampled(rows, SHORT), 0.0) / (LONG - SHORT)
            for rows in (many, few)
        )
        each_row = max(of_many - of_few, 0.0) / (many - few)
        self.token = max(of_many - each_row * many, 0.0), each_row

    def _examples(self, count: int, policy: PreTrainedModel) -> list[Example]:
        """Rows of the data's mean lengths, one in two a quarter longer and the other shorter."""
        vocabulary = policy.config.vocab_size - FIRST_ID
        rows = []
        for number in range(max(count, 1)):
            factor = 1.0 if count < 2 else LONGER if number % 2 else 2 - LONGER
            prompt, reply = (
                max(round(factor * length), 2) for length in (self.data.prompt, self.data.reply)
            )
            ids = [
                FIRST_ID + (7 * number + 3 * place) % vocabulary for place in range(prompt + reply)
            ]
            rows.append(Example(ids[:prompt], ids[prompt:]))
        return rows


def _taken(work: Callable[[], object], clock: Clock) -> float:
    """The mean seconds of ``work`` after one run to warm up, over enough runs to be measured."""
    work()
    _wait()
    started, runs = clock(), 0
    enough = time.perf_counter() + LEAST_SECONDS  # a busy machine is not tried for longer
    while not runs or time.perf_counter() < enough:
        work()
        _wait()
        runs += 1
    return (clock() - started) / runs


def _wait() -> None:
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()
