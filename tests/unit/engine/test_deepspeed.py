"""ZeRO 0 to 3 on one and two ranks compute what plain torch does on one, and hand over to one
another.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_calls import counted_reads, counted_reductions
from ranks import run_ranks
from saved_states import restore, saved, whole_state
from torch import Tensor, nn
from unit.engine import cases
from unit.models.adapted import IDS, LORA, NF4
from unit.ppo.tiny import make_tiny

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import ConfigError
from rlhf_core.models.adapters import WithoutAdapters, add_adapters, merge_adapters
from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.checkpoint import SavedTensors
from rlhf_core.training.engine.base import Engine, LocalEngine, OptimizerBuilder, build_adamw
from rlhf_core.training.engine.factory import recomputing
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.engine.zero_config import zero_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install 'rlhf-pipeline[gpu]')",
)
STAGES = (0, 1, 2, 3)
KINDS = ("0", "1", "2", "3", "1-offload", "2-offload", "3-offload")
# `make test` has ZeRO 2 on two ranks, `make test-all` the others.
USUAL, OTHERS = ("2",), tuple(kind for kind in KINDS if kind != "2")
RANKS = [pytest.param(1, marks=pytest.mark.slow), 2]
ROOT = Path(__file__).resolve().parents[3]
EXTENSIONS = "extensions"
ADAM = OptimizerConfig(
    lr=1e-2, schedule="constant", warmup=0.0, weight_decay=0.1, max_grad_norm=0.05
)


ADAPTERS = {"whole": LORA, "nf4": NF4}


def left_to_test_all(kinds: Iterable[Any]) -> list[Any]:
    """``kinds`` as parameters of tests, those that are not usual marked as slow."""
    return [
        kind if str(kind) in USUAL else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds
    ]


def combinations(kind: str) -> list[tuple[str, bool]]:
    """Precision, and whether layers recompute their activations; ZeRO 0 keeps no master weights for
    bfloat16.
    """
    return [
        (dtype, again)
        for dtype in ("float32", *["bfloat16"] * (kind != "0"))
        for again in (False, True)
    ]


CROSS = [(kind, *both) for kind in KINDS for both in combinations(kind)]


def kinds_of(size: int) -> dict[str, tuple[float, int]]:
    """Learning rate and steps of what is compared; one rank makes several steps in
    :func:`with_adam` alone.
    """
    return {kind: cases.KINDS[kind] for kind in ("gradient", *["updates"] * (size > 1))}


def of_kinds(folder: Path, stored: Path, kinds: tuple[str, ...]) -> None:
    """What one group of ranks is asked of ``kinds``."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(stored.parent / EXTENSIONS)
    for stage in (stage for stage in STAGES if str(stage) in kinds):
        make = deepspeed_maker(str(stage), stored.parent, cases.sgd)
        for case in cases.CASES:
            before = cases.start(case)
            for kind, (lr, steps) in kinds_of(distributed.world_size()).items():
                engines, figures = cases.train(case, make, lr, steps, stored)
                cases.write_result(
                    folder, f"{case}-{kind}-{stage}", cases.changes(engines, before), figures
                )
        with_adapters(folder, str(stage), make)
        if stage < 3:
            with_counted_reductions(folder, stage, make)
    for kind in kinds:
        with_adam(folder, kind, deepspeed_maker(kind, stored.parent, build_adamw), stored.parent)
        with_going_back(deepspeed_maker(kind, stored.parent, build_adamw))
        with_release(deepspeed_maker(kind, stored.parent, build_adamw))
        for dtype, recompute in combinations(kind):
            with_resume(
                folder,
                f"{kind}-{dtype}-{recompute}",
                deepspeed_maker(kind, stored.parent, build_adamw),
            )
    if "3" not in kinds:
        return
    with_checkpointing(folder, deepspeed_maker("3", stored.parent, cases.sgd))
    with_frozen(folder)


def with_adapters(folder: Path, key: str, make: cases.MakeEngine) -> None:
    """A few steps on rows shared by the ranks; logits of policy and reference, and of the model
    that is released.
    """
    for kind, lora in ADAPTERS.items():
        model = make_tiny().policy
        add_adapters(model, lora, seed=5)
        before = logits(model)
        engine = make(model, cases.optimizer(0.1), "policy")
        rows = IDS[distributed.rank() :: distributed.world_size()]
        for _ in range(3):
            loss = engine.forward(
                lambda e=engine, rows=rows: e.model(input_ids=rows).logits.square().sum()
            )
            engine.backward(loss / 100)
            engine.step()
        with engine.gathered_parameters():
            reference, inside = logits(WithoutAdapters(model)), logits(model)
        released = engine.release()
        if distributed.is_rank_zero():
            merge_adapters(released)
            names = {
                f"weight.{name}": weight.detach() for name, weight in released.named_parameters()
            }
            found = {
                "before": before,
                "reference": reference,
                "inside": inside,
                "released": logits(released),
            }
            cases.write_result(folder, f"adapters-{kind}-{key}", found | names, {})


def with_counted_reductions(folder: Path, stage: int, make: cases.MakeEngine) -> None:
    """Steps of one and of three passes: how often passes and step reduce all gradients, and what
    passes wait for.
    """
    model = make_tiny().policy
    trained = sum(parameter.numel() for parameter in model.parameters())
    engine = make(model, cases.optimizer(0.1), "policy")
    figures: dict[str, float] = {}
    for passes in (1, 3):
        with counted_reductions() as reduced, counted_reads() as read:
            for index in range(passes):
                batch = torch.tensor(cases.tokens(index, 12)).view(2, 6)
                loss = engine.forward(
                    lambda batch=batch: engine.model(input_ids=batch).logits.square().mean()
                )
                engine.backward(loss)
        figures |= {
            f"backward{passes}": sum(reduced.sizes) / trained,
            f"reads{passes}": len(read.names),
        }
        with counted_reductions() as reduced:
            engine.step()
        # Its norm and its check for overflow are numbers of their own.
        figures[f"step{passes}"] = sum(size for size in reduced.sizes if size > 1) / trained
    cases.write_result(folder, f"reductions-{stage}", {}, figures)


def with_checkpointing(folder: Path, make: cases.MakeEngine) -> None:
    """Two steps of a model whose layers recompute their activations."""
    model = make_tiny().policy
    engine = make(model, cases.optimizer(0.1), "policy")
    engine.forward_context = recomputing(model)
    steps(engine, range(2))
    cases.write_result(folder, "checkpointing", engine.trained_weights(), {})


def with_resume(folder: Path, key: str, make: cases.MakeEngine) -> None:
    """A run that goes on from its own state in a fresh engine, beside one that was not interrupted.

    Steps of 1e-5 are smaller than bfloat16's digits; they add up in float32 master weights.
    """
    _, dtype, recompute = key.rsplit("-", 2)

    def start() -> Engine:
        model = make_tiny().policy.to(getattr(torch, dtype))
        engine = make(model, ADAM.model_copy(update={"lr": 1e-5}), "policy")
        if recompute == "True":
            engine.forward_context = recomputing(model)
        return engine

    first, second = start(), start()
    before = whole_state(first)
    steps(first, range(2))
    restore(second, saved(first))
    for engine in (first, second):
        steps(engine, range(3, 5))
    whole, resumed = whole_state(first), whole_state(second)
    moved = whole["weights.lm_head.weight"] - before["weights.lm_head.weight"]
    released = second.release()
    if distributed.is_rank_zero():
        assert whole["weights.lm_head.weight"].dtype == torch.float32
        assert {weight.dtype for weight in released.parameters()} == {getattr(torch, dtype)}
        figures = {"moved": float(moved.abs().max())}
        both = (("whole", whole), ("resumed", resumed))
        states = {f"{name}-{tensor}": state[tensor] for name, state in both for tensor in state}
        cases.write_result(folder, f"resume-{key}", states, figures)


def with_frozen(folder: Path) -> None:
    """Frozen models sharded over the ranks."""
    tiny, frozen = make_tiny(), FrozenModels(LaunchConfig(engine="deepspeed", frozen="sharded"))
    tiny.reward, tiny.reference = frozen.place(tiny.reward), frozen.place(tiny.reference)
    with frozen.on_device():
        experience = cases.rollout(tiny)
    cases.write_result(
        folder, "frozen", {"rewards": experience.rewards, "reference": experience.ref_logprobs}, {}
    )
    before, borrowed = live_bytes(), make_tiny().policy
    with frozen.borrowed(borrowed) as placed:
        assert torch.isfinite(logits(placed)).all()
    assert live_bytes() - before < 1024, "nothing is left of what was borrowed but buffers"


def deepspeed_maker(kind: str, folder: Path, build: OptimizerBuilder) -> cases.MakeEngine:
    from rlhf_core.training.engine.deepspeed import DeepSpeedEngine

    launch = LaunchConfig(engine="deepspeed", deepspeed=f"zero{kind}.json")
    return lambda model, config, name: DeepSpeedEngine(
        model, config, 9, name, None, launch, folder, build
    )


def with_adam(folder: Path, key: str, make: cases.MakeEngine, root: Path) -> None:
    """Steps with Adam, a bad one among them; the state; a fresh engine that goes on from the local
    engine's state; and what is released in the end."""
    engine = make(make_tiny().policy, ADAM, "policy")
    norms = steps(engine, range(4))
    _, meta = engine.state()
    cases.write_result(folder, f"state-{key}", whole_state(engine), meta | norms)
    handed = root / "1" / "state-local.safetensors"
    tensors = SavedTensors([handed]) if handed.exists() else saved(engine).tensors
    second = make(cases.another_policy(), ADAM, "policy")
    second.load_state(tensors, meta)
    steps(second, range(4, 6))
    with second.gathered_parameters():
        inside = logits(second.model)
    released = second.release()
    if distributed.is_rank_zero():
        weights = {name: p.detach() for name, p in released.named_parameters()}
        cases.write_result(
            folder, f"end-{key}", weights | {"inside": inside, "released": logits(released)}, {}
        )


def with_going_back(make: cases.MakeEngine) -> None:
    """A state from before the first step, and one from after it, restored amid a step: nothing of
    later is left.
    """
    engine = make(make_tiny().policy, ADAM, "policy")
    states = [saved(engine)]
    steps(engine, range(1))
    states.append(saved(engine))
    for state in states:
        restore(engine, state)
        ends = []
        for restored in range(2):
            steps(engine, range(3, 5))
            ends.append(engine.trained_weights())
            # Gradients of a step that will never be made.
            loss = engine.forward(lambda: engine.model(input_ids=IDS).logits.square().mean())
            engine.backward(loss * (math.nan if restored else 100.0))
            restore(engine, state)
            assert engine.steps == state.meta["steps"]
        again = whole_state(engine)
        assert again.keys() == state.tensors.names
        assert all(torch.allclose(again[name], state.tensors.whole(name)) for name in again)
        assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-6) for name in ends[0])


def steps(engine: Engine, numbers: range) -> dict[str, float]:
    """Optimiser steps of two passes; in step 2 one loss of the last rank is not finite."""
    norms = {}
    for step in numbers:
        for index in range(2):
            rows = cases.tokens(2 * step + index, 12)
            batch = torch.tensor(rows).view(2, 6)
            loss = engine.forward(
                lambda batch=batch: engine.model(input_ids=batch).logits.square().mean()
            )
            bad = step == 2 and index == 0 and distributed.rank() == distributed.world_size() - 1
            engine.backward(loss * (math.nan if bad else 0.5 / distributed.world_size()))
        result = engine.step()
        assert result.skipped == (step == 2)
        norms[f"norm{step}"] = result.grad_norm
    return norms


def with_release(make: cases.MakeEngine) -> None:
    """Nothing is left of an engine but the model that it returns, although others hold engine and
    model.
    """
    before = live_bytes()
    model = make_tiny().policy
    weights = sum(parameter.nbytes for parameter in model.parameters())
    engine = make(model, ADAM, "policy")
    steps(engine, range(2))
    assert live_bytes() - before > 2 * weights
    released = engine.release()
    kept = weights if distributed.is_rank_zero() else 0
    assert kept <= live_bytes() - before < kept + 1024, "buffers of the model have some bytes, too"
    assert engine.model is released and engine.skipped_steps == 0


def live_bytes() -> int:
    """Bytes of all tensors of the process that Python can reach."""
    gc.collect()
    sizes = {}
    for tensor in gc.get_objects():
        if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits.clone()  # type: ignore[no-any-return]


def zero_section(kind: str) -> dict[str, Any]:
    """Nothing is too small to be sharded, unlike by default."""
    zero: dict[str, Any] = {"stage": int(kind[0])}
    if kind[0] == "3":
        zero["stage3_param_persistence_threshold"] = 0
    if "offload" in kind:
        zero |= {"offload_optimizer": {"device": "cpu"}}
    if kind == "3-offload":
        zero |= {"offload_param": {"device": "cpu"}}
    return zero


class Results:
    """What groups of ranks found, each group made when it is first asked for; ``plain`` is plain
    torch's.
    """

    def __init__(self, root: Path, stored: Path) -> None:
        self.root, self.stored, self.plain = root, stored, root / "1"
        self._made: set[tuple[int, tuple[str, ...]]] = set()

    def __call__(self, size: int, kind: object) -> Path:
        """The folder of ``size`` ranks, once it has what ``kind`` of ZeRO found."""
        group = size, USUAL if str(kind) in USUAL else OTHERS
        folder = self.root / str(size)
        if group not in self._made:
            run_ranks(of_kinds, size, folder, self.stored, group[1])
            self._made.add(group)
        return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results by number of ranks and kind of ZeRO."""
    root = tmp_path_factory.mktemp("deepspeed")
    for kind in KINDS:
        (root / f"zero{kind}.json").write_text(
            json.dumps({"zero_optimization": zero_section(kind)})
        )
    stored = root / "experience.safetensors"
    cases.save_experience(stored, cases.rollout(make_tiny()))
    (root / "1").mkdir()
    for case in cases.CASES:
        before = cases.start(case)
        for kind, (lr, count) in cases.KINDS.items():
            engines, figures = cases.train(case, cases.local, lr, count, stored)
            cases.write_result(
                root / "1", f"{case}-{kind}", cases.changes(engines, before), figures
            )
    with_adam(
        root / "1", "local", lambda model, config, name: LocalEngine(model, config, 9, name), root
    )
    plain = make_tiny().policy
    engine = LocalEngine(plain, cases.optimizer(0.1), 9, build=cases.sgd)
    steps(engine, range(2))
    cases.write_result(root / "1", "plain", engine.trained_weights(), {})
    with_adapters(root / "1", "local", cases.local)
    return Results(root, stored)


def assert_close(
    plain: dict[str, Tensor], sharded: dict[str, Tensor], rtol: float, atol: float
) -> None:
    assert plain.keys() <= sharded.keys()
    for name, tensor in plain.items():
        assert torch.allclose(tensor, sharded[name], rtol=rtol, atol=atol), name


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("stage", left_to_test_all(STAGES))
@pytest.mark.parametrize("case", cases.CASES)
def test_zero_agrees_with_plain_torch(case: str, stage: int, size: int, found: Results) -> None:
    for kind in kinds_of(size):
        plain, figures = cases.read_result(found.plain, f"{case}-{kind}")
        sharded, others = cases.read_result(found(size, stage), f"{case}-{kind}-{stage}")
        assert cases.distance(plain, sharded) < 1e-5, kind
        compared = {
            name: value for name, value in figures.items() if kind == "updates" or name == "loss"
        }
        assert {name: others[name] for name in compared} == pytest.approx(
            compared, rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize("stage", left_to_test_all(STAGES[:3]))
def test_gradients_are_reduced_once_a_step_below_zero_2(stage: int, found: Results) -> None:
    _, figures = cases.read_result(found(2, stage), f"reductions-{stage}")
    assert figures["reads1"] == figures["reads3"] == 0  # no pass waits for the device
    if stage < 2:
        assert (figures["backward1"], figures["backward3"]) == (0, 0)
        assert figures["step1"] == figures["step3"] == pytest.approx(1, rel=0.01)
    else:
        assert figures["backward3"] == 3 * figures["backward1"] == pytest.approx(3, rel=0.01)
        assert (figures["step1"], figures["step3"]) == (0, 0)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("kind", left_to_test_all(KINDS))
def test_states_are_the_same_whatever_wrote_them(kind: str, size: int, found: Results) -> None:
    plain, meta = cases.read_result(found.plain, "state-local")
    sharded, others = cases.read_result(found(size, kind), f"state-{kind}")
    assert meta["skipped_steps"] == 1 and math.isnan(meta["norm2"])
    assert others == pytest.approx(meta, rel=1e-4, nan_ok=True)
    assert_close(plain, sharded, 1e-3, 1e-6)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("kind", left_to_test_all(KINDS))
def test_a_run_goes_on_from_a_local_state_and_releases_a_plain_model(
    kind: str, size: int, found: Results
) -> None:
    plain, _ = cases.read_result(found.plain, "end-local")
    sharded, _ = cases.read_result(found(size, kind), f"end-{kind}")
    assert torch.equal(sharded["inside"], sharded["released"])
    assert_close(plain, sharded, 1e-3, 1e-5)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize(
    ("kind", "dtype", "recompute"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in USUAL)) for case in CROSS],
)
def test_every_combination_goes_on_from_its_own_state(
    kind: str, dtype: str, recompute: bool, size: int, found: Results
) -> None:
    states, figures = cases.read_result(found(size, kind), f"resume-{kind}-{dtype}-{recompute}")
    assert 1e-6 < figures["moved"] < 8e-5
    for name in (name.removeprefix("whole-") for name in states if name.startswith("whole-")):
        assert torch.equal(states[f"whole-{name}"], states[f"resumed-{name}"]), name


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_recomputed_activations_give_the_same_weights(size: int, found: Results) -> None:
    plain, _ = cases.read_result(found.plain, "plain")
    recomputed, _ = cases.read_result(found(size, 3), "checkpointing")
    assert_close(plain, recomputed, 1e-4, 1e-6)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("stage", left_to_test_all(STAGES))
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_trained_switched_off_and_merged_alike(
    kind: str, stage: int, size: int, found: Results
) -> None:
    plain, _ = cases.read_result(found.plain, f"adapters-{kind}-local")
    sharded, _ = cases.read_result(found(size, stage), f"adapters-{kind}-{stage}")
    assert torch.allclose(plain["reference"], plain["before"]) and not torch.allclose(
        plain["inside"], plain["before"]
    )
    assert_close(plain, sharded, 1e-4, 1e-5)
    assert torch.allclose(sharded["released"], sharded["inside"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_sharded_frozen_models_score_alike(size: int, found: Results) -> None:
    plain = cases.load_experience(found.plain.parent / "experience.safetensors")
    sharded, _ = cases.read_result(found(size, 3), "frozen")
    assert torch.allclose(plain.rewards, sharded["rewards"], atol=1e-5)
    assert torch.allclose(plain.ref_logprobs, sharded["reference"], atol=1e-5)


def test_nothing_is_compiled_for_a_cpu(found: Results) -> None:
    assert not (found(2, 2).parent / EXTENSIONS).exists()


@pytest.mark.parametrize("name", ["zero2", "zero2-offload", "zero3", "zero3-offload"])
def test_the_files_in_infra_hold_the_defaults_and_nothing_of_the_engine_s_own(name: str) -> None:
    launch = LaunchConfig(engine="deepspeed", deepspeed=f"infra/deepspeed/{name}.json")
    config = zero_config(launch, torch.bfloat16, 1.0, ROOT)
    defaults = zero_config(
        LaunchConfig(engine="deepspeed", zero=int(name[4])), torch.bfloat16, 1.0, ROOT
    )
    assert defaults["zero_optimization"].items() <= config["zero_optimization"].items()
    assert config["zero_optimization"]["overlap_comm"]
    assert config["zero_optimization"]["stage"] == int(name[4])
    assert config["gradient_clipping"] == 1.0 and config["bf16"]["enabled"]
    assert ("offload_optimizer" in config["zero_optimization"]) == name.endswith("offload")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            {"train_batch_size": 8, "fp16": {"enabled": True}},
            r"train_batch_size, fp16.*leave them out",
        ),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": True}},
            r"mine.json sets overlap_comm with ZeRO stage 1",
        ),
        ({"zero_optimization": {"stage": 0}}, "no float32 master weights"),
    ],
)
def test_a_file_that_the_engine_cannot_keep_to_is_refused(
    content: Any, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=reason):
        zero_config(
            LaunchConfig(engine="deepspeed", deepspeed="mine.json"), torch.bfloat16, None, tmp_path
        )
