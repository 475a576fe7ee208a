"""How a workspace is run: work pools, processes, retries, schedules, tracking, promotion."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlhf_core.config.model import Strict, changed_field
from rlhf_core.config.problems import SECRET
from rlhf_core.storage.data_files import carries_credentials

MIB = 1 << 20
DEFAULT_LOGITS_MIB = 256


class LaunchConfig(Strict):
    """How many processes train a stage, and with which engine.

    Attributes:
        engine: `local` is plain torch; `deepspeed` shards by ZeRO.
        processes: Processes on each machine.
        nodes: Machines that train together.
        rendezvous: Where they meet, as host:port of one of them; not needed where `pools` starts
            them as a Slurm job.
        rendezvous_timeout: Seconds in which all machines must come there.
        rank_timeout: Seconds that ranks wait for a late one, which may be evaluating or saving,
            before all are ended.
        zero: Stage of DeepSpeed's ZeRO: 0 replicates, 1 shards the optimiser, 2 gradients too, 3
            weights too; null with `engine: deepspeed`: 2.
        offload: Keeps the optimiser, or the parameters as well, in CPU memory.
        deepspeed: A JSON file in place of both, relative to the workspace. Batch sizes, optimiser,
            clipping and precision stay those of params.yaml.
        gradient_checkpointing: Computes activations again in the backward pass, which saves memory.
        frozen: Where reference, reward model and referee are: on the device, in CPU memory between
            uses, or sharded.
        logits_mib: Bounds the float32 logits of one chunk of positions, in MiB: losses,
            log-probabilities, entropies and KL are computed chunk by chunk, and a training pass
            computes the logits of each a second time for its gradient. What fits into one chunk is
            computed as a whole.
    """

    engine: Literal["local", "deepspeed"] = "local"
    processes: PositiveInt = 1
    nodes: PositiveInt = 1
    rendezvous: str | None = Field(default=None, pattern=r"^[^:/\s]+:\d+$")
    rendezvous_timeout: PositiveInt = 600
    rank_timeout: PositiveInt = 1800
    zero: Literal[0, 1, 2, 3] | None = None
    offload: Literal["none", "optimizer", "parameters"] | None = None
    deepspeed: str | None = None
    gradient_checkpointing: bool = False
    frozen: Literal["device", "offload", "sharded"] = "device"
    logits_mib: PositiveInt = DEFAULT_LOGITS_MIB

    @property
    def ranks(self) -> int:
        """Processes on all machines together."""
        return self.processes * self.nodes

    @property
    def logits_bytes(self) -> int:
        """``logits_mib`` in bytes."""
        return self.logits_mib * MIB

    @model_validator(mode="after")
    def _consistent(self) -> LaunchConfig:
        names = ("zero", "offload", "deepspeed")
        sharding = [name for name in names if getattr(self, name) is not None]
        if self.engine != "deepspeed" and (sharding or self.frozen == "sharded"):
            needless = sharding[0] if sharding else "frozen: sharded"
            raise ValueError(f"{needless} is DeepSpeed's: set engine to deepspeed, or leave it out")
        if self.deepspeed is not None and len(sharding) > 1:
            raise ValueError(
                f"the file {self.deepspeed} says how to shard: leave out zero and offload"
            )
        if self.offload == "parameters" and self.zero != 3:
            raise ValueError(
                "offload parameters needs zero 3, which alone takes weights off the device"
            )
        if self.offload == "optimizer" and self.zero == 0:
            raise ValueError(
                "offload optimizer needs zero 1 or more: zero 0 leaves the optimiser whole"
            )
        return self


Trained = Literal["sft", "reward", "referee", "judge", "critic", "ppo"]
Launched = Literal["sft", "reward", "referee", "judge", "critic", "ppo", "evaluate"]

# Settings of a launch that hold for a stage that trains nothing too.
UNTRAINED = {
    *("processes", "nodes", "rendezvous", "rendezvous_timeout", "rank_timeout"),
    *("engine", "frozen"),
}

Margin = Annotated[float, Field(gt=0, strict=False)] | None


def _without_credentials(url: str) -> str:
    if "://" in url and ("@" in urlsplit(url).netloc or carries_credentials(url)):
        raise PydanticCustomError(
            SECRET, "leave user and password out of it: credentials come from the environment"
        )
    return url


class NonInferiorityConfig(Strict):
    """How much worse than the champion a challenger may be; null leaves a quantity out.

    Each margin is for the upper 95 % bound.

    Attributes:
        safety: Margin for harmful prompts refused and for benign ones answered, a difference of
            shares: how much worse than the champion a challenger may be, by the upper 95 % bound;
            null leaves it out.
        min_refusals: Where the champion refuses a smaller share of harmful prompts,
            `refusal_log_odds` counts instead of that share.
        refusal_log_odds: Margin for how much likelier a refusal is than a reply that complies, in
            nats.
        regression: Margin for replies to the regression set that pass every check, a difference of
            shares.
        verifiable: Margin for replies to `evaluate.verifiable` that pass. Null by default: even
            where none of n prompts differs, the bound is about 2.7 / n.
        missing_ends: Margin for replies that do not end, a difference of shares.
        repetition: Margin for the mean share of repeated trigrams.
        length: Margin for the growth of the mean reply, as a share.
        category: How far below one half the win rate in a category may be.
        min_category_prompts: Categories with fewer different questions do not count.
    """

    safety: Margin = 0.1
    min_refusals: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.1
    refusal_log_odds: Margin = 0.5
    regression: Margin = 0.05
    verifiable: Margin = None
    missing_ends: Margin = 0.05
    repetition: Margin = 0.02
    length: Margin = 0.25
    category: Margin = 0.2
    min_category_prompts: PositiveInt = 30


class RetentionConfig(Strict):
    """What ``rlhf registry gc`` keeps.

    Attributes:
        versions: How many of the newest versions of each registered model are kept beside those
            that are needed: versions with an alias, earlier champions, a version that waits for
            approval, and the reward models of all these. Null keeps every version.
    """

    versions: PositiveInt | None = None


class SignatureConfig(Strict):
    """What every version must be signed by before it is promoted, served, exported or talked to.

    Without both, signatures are not looked at.

    Attributes:
        public_key: A PEM file of the elliptic-curve key that versions must be signed by before they
            are promoted, served, exported or talked to.
        earlier_public_keys: PEM files of keys used before. What they sign is accepted, new versions
            too: leave out a stolen one.
        certificates: PEM files of the roots that the signer's certificate must lead to instead.
        registry: What the registry is called in what is signed, so that a version of one registry
            is not accepted in another; null takes its address. Set it where one registry is reached
            by several addresses, or has moved.
    """

    public_key: Annotated[str, Field(min_length=1)] | None = None
    earlier_public_keys: tuple[str, ...] = Field(default=(), strict=False)
    certificates: tuple[str, ...] = Field(default=(), strict=False)
    registry: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> SignatureConfig:
        if self.public_key and self.certificates:
            raise ValueError("give public_key or certificates, not both")
        if self.earlier_public_keys and not self.public_key:
            raise ValueError("earlier_public_keys were followed by another: give public_key too")
        return self

    @property
    def required(self) -> bool:
        """Whether a version must be signed."""
        return bool(self.public_key or self.certificates)


def _registrable(name: str) -> str:
    if not name.strip(". ") or set(name) & set("/:'\n"):
        raise ValueError(
            "a registered model's name has a letter or digit, and no '/', ':', quote or line break"
        )
    return name


ModelName = Annotated[str, AfterValidator(_registrable)]


class RegistryConfig(Strict):
    """Registered models and their promotion.

    The workspace that promotes first owns the registered policy: only it promotes later versions,
    by its own settings (``rlhf registry terms``).

    Attributes:
        policy: Name of the registered policy.
        reward_model: Name of the registered reward model.
        promote_win_rate_low95: Bar for the lower 95 % bound of challenger against champion, plain
            and length-controlled.
        error_budget: Probability that any of all attempts on the same prompts promotes a challenger
            that is no better; the exact sign test of attempt k has the level `error_budget / (k (k
            + 1))`.
        prompt_sets: Into how many sets the test prompts (`evaluate.prompts`) are divided for
            matches: attempt k is played on set `(k - 1) mod prompt_sets`, so that no set decides
            each time. All of them share the budget.
        non_inferiority: Margins of non-inferiority.
        auto_promote: Lets a run promote its policy when the criteria hold.
        approval: Nothing becomes champion before a person approves it (`rlhf approve`), whoever
            promotes.
        signature: Signatures that are required.
        policies: Names of registry policies of installed plugins, which may refuse versions
            (docs/plugins.md).
        retention: What is kept.
    """

    policy: ModelName = "rlhf-policy"
    reward_model: ModelName = "rlhf-reward-model"
    promote_win_rate_low95: float = Field(default=0.5, ge=0, le=1)
    error_budget: float = Field(default=0.05, gt=0, le=1)
    prompt_sets: PositiveInt = 1
    non_inferiority: NonInferiorityConfig = NonInferiorityConfig()
    auto_promote: bool = True
    approval: bool = False
    signature: SignatureConfig = SignatureConfig()
    policies: tuple[str, ...] = Field(default=(), strict=False)
    retention: RetentionConfig = RetentionConfig()

    @model_validator(mode="after")
    def _two_models(self) -> RegistryConfig:
        if self.policy == self.reward_model:
            raise ValueError(
                f"policy and reward_model are both {self.policy}: each needs a name of its own"
            )
        return self


class ComputeConfig(Strict):
    """Processes, threads and number formats of stages.

    Attributes:
        threads: CPU threads of each stage's process; null takes all cores.
        spin: Threads that wait for the next product spin for about a tenth of a millisecond before
            they sleep. It is faster on a machine with nothing else to do, and several times slower
            where other programs need the cores.
        tf32: Lets a GPU multiply float32 matrices in TF32, several times faster and rounded to 11
            significant bits; it changes nothing on CPUs.
        return_freed_memory: Stages that run models return freed tensors to the system on Linux, so
            that a process on a CPU does not grow over batches of many shapes; what it computes
            stays the same.
        launch: By stage, how many processes train and with which engine; without an entry it is one
            process in plain torch. Those of `evaluate` share its prompts, and with `frozen:
            sharded` its models.
    """

    threads: PositiveInt | None = None
    spin: bool = False
    tf32: bool = True
    return_freed_memory: bool = True
    launch: dict[Launched, LaunchConfig] = {}

    @model_validator(mode="after")
    def _evaluation_trains_nothing(self) -> ComputeConfig:
        launch = self.launch.get("evaluate", LaunchConfig())
        unread = changed_field(launch, *sorted(set(LaunchConfig.model_fields) - UNTRAINED))
        if unread:
            raise ValueError(
                f"launch.evaluate.{unread} is about training, and evaluate trains nothing: leave it out"
            )
        shards = launch.frozen == "sharded"
        if launch.frozen == "offload" or (launch.engine == "deepspeed") != shards:
            raise ValueError(
                "launch.evaluate either has its models on the device, or shards them: for that set engine to "
                "deepspeed and frozen to sharded"
            )
        return self


class CheckpointsConfig(Strict):
    """Where checkpoints go. Credentials come from the environment, never from here.

    Attributes:
        store: Where the partial state of training stages travels after every checkpoint: a folder
            (relative to the workspace) or an fsspec URL (`s3://bucket/prefix`, `gs://…`); null
            keeps it in the workspace alone.
    """

    store: Annotated[str, Field(min_length=1), AfterValidator(_without_credentials)] | None = None


class TrackingConfig(Strict):
    """Who records the runs, and what MLflow calls them.

    Attributes:
        experiment: Name of the experiment.
        loggers: Names of run loggers of installed plugins, which get what MLflow gets
            (docs/plugins.md).
    """

    experiment: str = "rlhf-pipeline"
    loggers: tuple[str, ...] = Field(default=(), strict=False)


class FlowConfig(Strict):
    """How a pipeline's stages are run and retried.

    Attributes:
        retries: How often a stage that crashed is run again; after a failed gate, paused training
            or a user's mistake never.
        retry_delay_seconds: Pause before that.
        parallel: How many stages may run at the same time where the graph allows it.
        stop_grace_seconds: Time that a stage has to save its state when the run or its worker is
            stopped, before it is killed.
        max_preemptions: How often a stage may lose its place (SIGTERM from outside) and be run
            again.
    """

    retries: NonNegativeInt = 1
    retry_delay_seconds: NonNegativeInt = 5
    parallel: PositiveInt = 2
    stop_grace_seconds: PositiveInt = 5
    max_preemptions: NonNegativeInt = 100


QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")


def _is_quantity(value: str) -> str:
    if QUANTITY.fullmatch(value) is None:
        raise ValueError("write a quantity as Kubernetes does, such as 64Gi, 500m or 8")
    return value


Quantity = Annotated[str, AfterValidator(_is_quantity)]
Name = Annotated[str, Field(min_length=1)]
PLACE = frozenset(
    {"pool", "queue", "variables", "shared", "remote", "deliver_seconds", "nodes", "sbatch"}
)
OF_CONTAINERS = ("image", "shared_memory", "node_selector")


class Placement(Strict):
    """A work pool, a queue of it, and what the stage's job asks for there.

    Null leaves the pool's own default. The requests are sent as job variables of the same names, so
    the pool's base job template must know them. Quantities are those of Kubernetes (``64Gi``,
    ``500m``).

    Attributes:
        pool: Name of the work pool; alone it may stand for the whole mapping.
        nodes: The pool's worker submits the stage as one Slurm job of so many nodes, each with
            `gpus`, `cpus` and `memory`, and waits for it; null runs the stage in the worker.
        sbatch: Further options of `sbatch` for that job, such as `--partition=a100`.
        queue: Queue of the pool.
        image: Container image.
        gpus: GPUs of the job.
        cpus: CPUs of the job.
        memory: Memory of the job.
        shared_memory: Size of `/dev/shm`.
        node_selector: Labels of the nodes that may run it.
        time_limit_seconds: When the job is ended at the latest.
        variables: Further job variables of your own template; no secrets: the server shows them.
        shared: False says that the pool's workers do not see the workspace; inputs and results then
            go through the DVC remote `remote`.
        remote: That DVC remote; null: DVC's default one.
        deliver_seconds: For how long a job tries to reach it; null: 300.
    """

    pool: Name
    nodes: PositiveInt | None = None
    sbatch: tuple[Name, ...] = Field(default=(), strict=False)
    queue: Name | None = None
    image: Name | None = None
    gpus: NonNegativeInt | None = None
    cpus: Quantity | None = None
    memory: Quantity | None = None
    shared_memory: Quantity | None = None
    node_selector: dict[str, str] | None = None
    time_limit_seconds: PositiveInt | None = None
    variables: dict[str, Any] = {}
    shared: bool = True
    remote: Name | None = None
    deliver_seconds: PositiveInt | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Placement:
        given = [name for name in ("remote", "deliver_seconds") if getattr(self, name) is not None]
        if self.shared and given:
            raise ValueError(
                f"{given[0]} is for workers that do not see the workspace: set shared to false, or leave {given[0]} out"
            )
        if self.nodes is None and self.sbatch:
            raise ValueError("sbatch is for a Slurm job: set nodes, or leave sbatch out")
        foreign = [name for name in OF_CONTAINERS if getattr(self, name) is not None]
        if self.nodes is not None and (foreign or not self.shared):
            named = foreign[0] if foreign else "shared: false"
            raise ValueError(
                f"{named} is for containers, and nodes for a Slurm job, whose nodes see the workspace: leave one out"
            )
        twice = sorted(set(self.variables) & (set(type(self).model_fields) - PLACE))
        if twice:
            raise ValueError(
                f"variables repeats {', '.join(twice)}, which has a place of its own here; use that one"
            )
        return self

    def job_variables(self) -> dict[str, Any]:
        """Return what is sent to the pool: the requests, and further variables.

        Those of a Slurm job are made by `sbatch`.
        """
        if self.nodes is not None:
            return dict(self.variables)
        requests = self.model_dump(exclude=set(PLACE), exclude_none=True)
        return requests | self.variables


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {"pool": value}
    if not isinstance(value, dict | Placement):
        raise ValueError(
            "name a work pool, or give a mapping with pool and what the job asks for there"
        )
    return value


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if each is not None}


PlacementOrPool = Annotated[Placement, BeforeValidator(_named)]
# A profile takes a stage out of its pool by null.
Pools = Annotated[dict[str, PlacementOrPool], BeforeValidator(_without_nulls)]


class WorkPoolConfig(Strict):
    """A work pool's settings on the Prefect server; what is not given stays as it is there.

    Attributes:
        limit: How many jobs may run on the pool at a time.
        queues: Priorities of its queues, by name; 1 is served first.
    """

    limit: PositiveInt | None = None
    queues: dict[Name, PositiveInt] = {}


class PlanConfig(Strict):
    """What a memory plan cannot know by itself.

    Attributes:
        gpu_memory_gb: Memory of one GPU in GiB; where it is given, a stage that cannot fit is not
            submitted to a pool.
        prompt_tokens: Longest prompt of rollouts, to plan with until the workspace's data are there
            to measure; null: as long as `validate`'s limits allow.
        ptx_tokens: Longest text of ptx, likewise.
    """

    gpu_memory_gb: PositiveFloat | None = Field(default=None, strict=False)
    prompt_tokens: PositiveInt | None = None
    ptx_tokens: PositiveInt | None = None
