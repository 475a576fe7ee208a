"""How long each stage takes on this machine: passes of the real architecture, measured for seconds, times their number.

Weights are random, which takes as long as any. Of a model with many layers one and three are measured, since all layers
cost the same. What is counted is what the settings ask for: a stage that stops early, such as critic pre-training at
its explained variance, takes less. Lengths are the means of the data, and replies are as long as they may be where the
starting model is pretrained.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_core.config.base import is_pretrained
from rlhf_core.config.loading import Params
from rlhf_core.config.model import LoraConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.collection.sources import source_chunks, source_files
from rlhf_core.data.pair_counts import READERS
from rlhf_core.data.schema import PairUser, Preference
from rlhf_core.data.statistics import evenly_spread
from rlhf_core.data.token_folder import TOKENS
from rlhf_core.data.token_tables import read_tokens
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.runtime import distributed
from rlhf_core.runtime.machine import available_cores
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import generate
from rlhf_core.training.reward.trainer import SCORING_TOKENS
from rlhf_core.world import corpus
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.sharding import planned_precision
from rlhf_extras.memory.stages import planned_stages

MOST_LAYERS = 4  # of more, one and three are measured
MOST_TOKENS = 2048  # of a pass that is measured; longer ones take in proportion
MOST_ROWS = 32  # that are sampled together in the probe
SECONDS = 0.4  # of one measurement
CHARACTERS_PER_TOKEN = 4.0
TEMPLATE = 8  # tokens that a chat template adds to a prompt
LOOKED_AT = 500  # pairs whose lengths are read
# Adapters need no gradients of weights: two of a step's three products.
ADAPTERS = 2 / 3
# Stages beside those that run a model, each a process of its own.
OTHER_STAGES = ("collect", "validate", "base", "gates, report")
PROCESSES = {"collect": 1, "validate": 2, "base": 1, "gates, report": 4}


@dataclass(frozen=True)
class MeanLengths:
    """Mean tokens of prompts and of replies, and how many pairs each reader has for training and validation."""

    prompt: float
    reply: float
    train: int
    validation: int
    test: int


class Probe:
    """Measures passes of a starting model on this machine; each shape once.

    Args:
        architecture: The model.
        precision: Of its weights, ``float32`` or ``bfloat16``.
    """

    def __init__(self, architecture: Architecture, precision: str) -> None:
        self.layers = int(architecture.config().num_hidden_layers)
        built = [self.layers] if self.layers <= MOST_LAYERS else [1, 3]
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.models: dict[int, PreTrainedModel] = {}
        for layers in built:
            model = AutoModelForCausalLM.from_config(architecture.config(layers), dtype=dtype)
            self.models[layers] = model.to(distributed.device())
        self.vocabulary = int(architecture.config().vocab_size)
        self.known: dict[tuple[str, int, int, int], float] = {}

    def train(self, rows: int, width: int, scored: int) -> float:
        """Seconds of a forward and a backward pass over ``rows`` of ``width`` tokens, logits at ``scored`` of each."""
        return self._scaled("train", rows, width, scored)

    def score(self, rows: int, width: int, scored: int) -> float:
        """Seconds of a forward pass without gradients."""
        return self._scaled("score", rows, width, scored)

    def optimiser_step(self) -> float:
        """Seconds of a step of AdamW on all weights."""
        return self._whole("step", 1, 1, 0)

    def generate(self, rows: int, prompt: int, tokens: int) -> float:
        """Seconds that it takes to sample ``tokens`` each for ``rows`` prompts."""
        together = min(rows, MOST_ROWS)
        few, more = (self._whole("generate", together, prompt, steps) for steps in (2, 10))
        each = max(more - few, 0.0) / 8
        return (few + each * max(tokens - 2, 0)) * rows / together

    def _scaled(self, kind: str, rows: int, width: int, scored: int) -> float:
        measured = max(1, min(rows, MOST_TOKENS // max(width, 1)))
        return self._whole(kind, measured, width, min(scored, width)) * rows / measured

    def _whole(self, kind: str, rows: int, width: int, scored: int) -> float:
        key = (kind, rows, width, scored)
        if key not in self.known:
            times = {layers: self._measured(model, *key) for layers, model in self.models.items()}
            if len(times) == 1:
                self.known[key] = times[self.layers]
            else:
                each = max(times[3] - times[1], 0.0) / 2
                self.known[key] = times[1] + each * (self.layers - 1)
        return self.known[key]

    def _measured(self, model: PreTrainedModel, kind: str, rows: int, width: int, scored: int) -> float:
        device = distributed.device()
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.vocabulary, (rows, width), generator=generator).to(device)
        model.train(kind == "train")
        if kind == "train":

            def work() -> None:
                logits = model(ids, use_cache=False, logits_to_keep=max(scored, 1)).logits.float()
                torch.logsumexp(logits, dim=-1).sum().backward()
        elif kind == "score":

            def work() -> None:
                with torch.inference_mode():
                    logits = model(ids, use_cache=False, logits_to_keep=max(scored, 1)).logits.float()
                    torch.logsumexp(logits, dim=-1)
        elif kind == "generate":
            sampling = Sampling(-1, 0, scored)
            uniforms = torch.rand(rows, scored, dtype=torch.float64, generator=generator)

            def work() -> None:
                with torch.inference_mode():
                    generate(model, ids.tolist(), uniforms, sampling)
        else:
            optimiser = torch.optim.AdamW(model.parameters(), lr=0.0)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)

            def work() -> None:
                optimiser.step()

        seconds = _median_seconds(work)
        model.zero_grad(set_to_none=True)
        return seconds


def _median_seconds(work: Callable[[], None]) -> float:
    """Run ``work`` once to warm up, then for a fraction of a second; return the median of its times."""
    work()
    times: list[float] = []
    while sum(times) < SECONDS and len(times) < 5:
        started = time.perf_counter()
        work()
        if distributed.device().type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def seconds_of_start() -> float:
    """Measure how long a stage's process takes before it computes: Python and the libraries."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import rlhf_core.stages.ppo, rlhf_core.stages.evaluate"], check=True)
    return time.perf_counter() - started


def mean_lengths(root: Path, params: Params) -> MeanLengths:
    """Return mean lengths of the workspace's data: of its tokens, or before there are any of its texts' characters."""
    clean, base = root / "data" / "clean", root / "models" / "base"
    if clean.is_dir() and (base / "config.json").is_file():
        tokenizer = load_tokenizer(base)
        folders = {"train": PairUser.REWARD, "validation": PairUser.REWARD, "test": PairUser.REWARD}
        files = {split: clean / user / f"{split}.parquet" for split, user in folders.items()}
        tables = {split: read_tokens(root / TOKENS, file, Preference.KIND, tokenizer) for split, file in files.items()}
        of_train = tables["train"]
        return MeanLengths(
            prompt=float(of_train.column("prompt").lengths.mean()),
            reply=float(np.mean([of_train.column(name).lengths for name in ("chosen", "rejected")])),
            train=len(of_train),
            validation=len(tables["validation"]),
            test=len(tables["test"]),
        )
    if params.collect.source == "world":
        rows = corpus.preferences(params.seed, LOOKED_AT)
        total = params.collect.world.preferences
    else:
        rows = []
        for file in source_files(params.collect.files.preferences, root):
            for part in source_chunks(file, Preference.KIND, LOOKED_AT) if file.path is not None else ():
                rows += part.rows
        total = len(rows)
        rows = [rows[row] for row in evenly_spread(len(rows), LOOKED_AT)]
    if not rows:
        rows = corpus.preferences(params.seed, LOOKED_AT)
    prompts = [sum(len(turn["content"]) for turn in row["prompt"]) for row in rows]
    replies = [len(row[name]) for row in rows for name in ("chosen", "rejected")]
    split = params.validate_.split
    own = (1 - split.judge) * (1 - split.referee)
    train = total * own * (1 - split.test - split.validation)
    return MeanLengths(
        prompt=float(np.mean(prompts)) / CHARACTERS_PER_TOKEN + TEMPLATE,
        reply=float(np.mean(replies)) / CHARACTERS_PER_TOKEN,
        train=int(train),
        validation=int(total * own * split.validation),
        test=int(total * split.test),
    )


@dataclass(frozen=True)
class TimePlan:
    """Seconds of each stage, of the whole run, and of the probe that they come from."""

    stages: dict[str, float]
    total: float
    probed: float

    def as_text(self) -> str:
        """A line for each stage, and the total."""
        lines = [f"time on this machine, estimated by a probe of {self.probed:.0f} seconds"]
        lines += [f"  {name:<14}{duration(seconds):>10}" for name, seconds in self.stages.items()]
        return "\n".join([*lines, f"  {'in all':<14}{duration(self.total):>10}, as far as stages run side by side"])


def duration(seconds: float) -> str:
    """Write seconds as people say them: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plan_time(root: Path, params: Params, architecture: Architecture) -> TimePlan:
    """Estimate how long each stage of a workspace takes on this machine."""
    started = time.perf_counter()
    start = seconds_of_start()
    clock = _Clock(params, Probe(architecture, planned_precision(params)), mean_lengths(root, params))
    stages = {name: PROCESSES[name] * start for name in OTHER_STAGES[:-1]}
    stages |= {name: start + clock.stage(name) for name in planned_stages(params)}
    stages[OTHER_STAGES[-1]] = PROCESSES[OTHER_STAGES[-1]] * start
    threads = params.compute.threads or available_cores()
    slots = max(1, min(params.flow.parallel, available_cores() // threads))
    readers = sum(stages[name] for name in READERS)
    longest = max(stages[name] for name in READERS)
    total = sum(stages.values()) - readers + max(readers / slots, longest)
    return TimePlan(stages, total, time.perf_counter() - started)


class _Clock:
    """The seconds of each stage's computation, from those of its passes."""

    def __init__(self, params: Params, probe: Probe, lengths: MeanLengths) -> None:
        self.params, self.probe, self.lengths = params, probe, lengths
        most = params.ppo.max_new_tokens
        # A model made from nothing imitates the demonstrations; of a batch the longest reply decides.
        usual = most if is_pretrained(params.base.source) else min(most, math.ceil(2.5 * lengths.reply))
        self.reply = max(usual, 1)
        self.prompt = max(round(lengths.prompt), 1)

    def stage(self, name: str) -> float:
        """Seconds of one stage."""
        if name in READERS:
            return self._reader(getattr(self.params, name))
        if name == "ppo" and self.params.policy.method != "ppo":
            return self._other_method()
        seconds: float = getattr(self, f"_{name}")()
        return seconds

    def _texts(self, batch: int, micro: int | None, lora: LoraConfig | None = None) -> float:
        """A step on so many texts."""
        reply = max(round(self.lengths.reply), 1)
        rows = min(micro or batch, batch)
        pass_seconds = self.probe.train(rows, self.prompt + reply, reply)
        step = 0.0 if lora is not None else self.probe.optimiser_step()
        return pass_seconds * batch / rows * (ADAPTERS if lora is not None else 1.0) + step

    def _sft(self) -> float:
        config = self.params.sft
        evaluations = config.steps // config.eval_every + 2
        held_out = self._scored(min(self.lengths.validation * 2, 500), round(self.lengths.reply))
        return config.steps * self._texts(config.batch_size, config.micro_batch_size) + evaluations * held_out

    def _scored(self, rows: int, reply: int) -> float:
        """Seconds to read so many rows without gradients, with logits of the replies."""
        width = self.prompt + max(reply, 1)
        together = max(1, min(rows, SCORING_TOKENS // width))
        return self.probe.score(together, width, max(reply, 1)) * rows / together

    def _reader(self, config: RewardConfig) -> float:
        width = self.prompt + max(round(self.lengths.reply), 1)
        pairs = max(config.batch.min_pairs, min(config.batch.max_pairs, config.batch.token_budget // (2 * width)))
        pairs = min(pairs, max(self.lengths.train, 1))
        imitated = round(self.lengths.reply) // 2 if config.imitation > 0 else 1
        step = self.probe.train(2 * pairs, width, max(imitated, 1))
        step = step * ADAPTERS if config.lora is not None else step + self.probe.optimiser_step()
        read = self.lengths.validation * (config.steps // config.eval_every + 1) + self.lengths.test
        if config.linear_probe is not None:
            read += self.lengths.train
        share = (config.layers or self.probe.layers) / self.probe.layers
        return share * (config.steps * step + self._scored(2 * read, 1))

    def _rollout(self, batch: int, models: int) -> float:
        """Sampling of a batch, and so many models that read it."""
        together = min(self.params.ppo.sampling_batch_size or batch, batch)
        sampling = self.probe.generate(together, self.prompt, self.reply) * batch / together
        return sampling + models * self._scored(batch, self.reply)

    def _update(self, batch: int, steps: int, lora: LoraConfig | None) -> float:
        """One pass over the replies of a rollout in so many optimiser steps."""
        width = self.prompt + self.reply
        ppo = self.params.ppo
        rows = ppo.micro_batch_size or max(1, (ppo.micro_batch_tokens or MOST_TOKENS) // width)
        rows = min(rows, max(batch // steps, 1))
        passes = self.probe.train(rows, width, self.reply) * batch / rows
        return passes * ADAPTERS if lora is not None else passes + steps * self.probe.optimiser_step()

    def _critic(self) -> float:
        config = self.params.critic
        each = self._rollout(config.batch_size, 3)
        each += config.epochs * self._update(config.batch_size, config.minibatches, config.lora)
        return config.max_rollouts * each

    def _ppo(self) -> float:
        ppo = self.params.ppo
        has_critic = not ppo.advantage.critic_free
        each = self._rollout(ppo.batch_size, 4 if has_critic else 3)
        update = self._update(ppo.batch_size, ppo.minibatches, ppo.policy_lora)
        if has_critic:
            update += self._update(ppo.batch_size, ppo.minibatches, ppo.critic_lora or self.params.critic.lora)
        if ppo.ptx.weight > 0:
            micro = ppo.ptx.micro_batch_size or ppo.micro_batch_size
            update += ppo.minibatches * self._texts(ppo.ptx.batch_size, micro, ppo.policy_lora)
        selections = ppo.iterations // ppo.selection.every + 1
        return ppo.iterations * (each + ppo.epochs * update) + selections * self._rollout(ppo.selection.prompts, 3)

    def _other_method(self) -> float:
        """DPO: both replies of a pair in each step, read once before. Rejection sampling: PPO's sampling, then SFT."""
        policy, lora = self.params.policy, self.params.ppo.policy_lora
        if policy.method == "dpo":
            dpo = policy.dpo
            step = 2 * self._texts(dpo.batch_size, dpo.micro_batch_size, lora)
            return dpo.steps * step + self._scored(2 * self.lengths.train, round(self.lengths.reply))
        sampling = policy.rejection_sampling
        sampled = self._rollout((sampling.prompts or self.lengths.train) * sampling.replies_per_prompt, 1)
        return sampled + sampling.steps * self._texts(sampling.batch_size, sampling.micro_batch_size, lora)

    def _evaluate(self) -> float:
        config = self.params.evaluate
        prompts = min(config.prompts, max(self.lengths.test, 1)) * config.replies_per_prompt
        safety = config.safety.prompts * config.safety.replies_per_prompt
        if self.params.collect.source == "world":
            safety = 0
        sampled = prompts + config.kl_samples + safety
        each = self._rollout(min(sampled, config.batch_size), 0) * sampled / min(sampled, config.batch_size)
        each += self._scored(config.kl_samples * 2, self.reply) + self._scored(2 * config.perplexity.rows, self.reply)
        return 2 * each + 3 * 2 * self._scored(prompts, 1)
