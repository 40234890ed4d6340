"""What other frameworks call the settings of this package: TRL, verl and OpenRLHF.

`config.py` names the right key when a configuration has one of theirs, the command line does so for an option, and
`trl_args.py` converts TRL's `GRPOConfig` by the same table. `table` generates the one of docs/guides/from_trl.md.

Guarantees: every name belongs to one row, and every key on the left side of the table exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(slots=True, kw_only=True, frozen=True)
class Neighbour:
    """One setting under its names. verl's names are whole paths; OpenRLHF's are options, without the dashes."""

    ours: tuple[str, ...]
    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    openrlhf: tuple[str, ...] = ()
    note: str = ""  # where the same number would mean something else


def _row(ours: str, trl: str = "", verl: str = "", openrlhf: str = "", note: str = "") -> Neighbour:
    """A row of the table, from names that are separated by spaces. `A.` in verl's names is `actor_rollout_ref.`."""
    paths = tuple(f"actor_rollout_ref.{name[2:]}" if name.startswith("A.") else name for name in verl.split())
    return Neighbour(
        ours=tuple(ours.split()), trl=tuple(trl.split()), verl=paths, openrlhf=tuple(openrlhf.split()), note=note
    )


_IN_SAMPLES = "counted in samples"
_IN_UPDATES = "counted in updates"
_TIMES_K = "in samples, not prompts: times learner.group_size"

NEIGHBOURS: tuple[Neighbour, ...] = (
    # ---- the run
    _row(
        "run.dir run.name",
        "output_dir",
        "trainer.default_local_dir trainer.experiment_name",
        "save_path ckpt_path ckpt.output_dir ckpt.path wandb_run_name logger.wandb.run_name",
        "the run directory is DIR/NAME",
    ),
    _row("run.seed", "seed", "data.seed", "train.seed"),
    _row(
        "run.samples",
        "max_steps num_train_epochs",
        "trainer.total_epochs trainer.total_training_steps A.actor.optim.total_training_steps",
        "num_episodes max_samples train.num_episodes data.max_samples",
        "samples in all: updates x schedule.update_batch, or epochs x rows x learner.group_size",
    ),
    # ---- data and model
    _row("task.path", "dataset_name", "data.train_files", "prompt_data data.prompt_dataset"),
    _row("task.split", "dataset_train_split", "", "prompt_split data.prompt_split"),
    _row("task.eval_path", "", "data.val_files", "eval_dataset eval.dataset"),
    _row("task.eval_split", "dataset_test_split", "", "eval.split"),
    _row(
        "task.columns",
        "",
        "data.prompt_key data.reward_fn_key",
        "input_key label_key data.input_key data.label_key",
        'by our names, such as { prompt = "question" }',
    ),
    _row(
        "task.reward",
        "reward_funcs",
        "custom_reward_function.path custom_reward_function.name",
        "remote_rm_url reward.remote_url",
        "module:function",
    ),
    _row("task.template", "", "", "input_template data.input_template", "with {prompt} in it"),
    _row("task.chat", "", "", "apply_chat_template data.apply_chat_template"),
    _row(
        "task.max_prompt_tokens",
        "max_prompt_length",
        "data.max_prompt_length A.rollout.prompt_length",
        "prompt_max_len",
        "longer prompts are refused, not cut",
    ),
    _row("model.path", "model_name_or_path", "A.model.path", "pretrain actor.model_name_or_path"),
    _row("lora.rank", "lora_r", "A.model.lora_rank", "lora_rank ds.lora.rank"),
    _row("lora.alpha", "lora_alpha", "A.model.lora_alpha", "ds.lora.alpha"),
    _row(
        "lora.target_modules", "lora_target_modules", "A.model.target_modules", "target_modules ds.lora.target_modules"
    ),
    # ---- batches
    _row(
        "schedule.update_batch",
        "per_device_train_batch_size gradient_accumulation_steps generation_batch_size",
        "",
        "train_batch_size train.batch_size",
        "samples in one update, over all devices and accumulation steps",
    ),
    _row("schedule.update_batch", "", "A.actor.ppo_mini_batch_size", "", _TIMES_K),
    _row(
        "schedule.cohort_batches",
        "",
        "data.train_batch_size data.gen_batch_size",
        "rollout_batch_size rollout.batch_size",
        "how many update batches are loaded together",
    ),
    _row("schedule.strategy", "", "", "async_train train.async_enable", "async, async-on-policy, or a sorted strategy"),
    _row("learner.inner_steps", "steps_per_generation", "", "", "optimizer steps per update batch"),
    _row("learner.inner_epochs", "num_iterations", "A.actor.ppo_epochs", "max_epochs train.max_epochs"),
    _row(
        "learner.micro_tokens",
        "",
        "A.actor.ppo_micro_batch_size_per_gpu A.actor.ppo_micro_batch_size A.actor.ppo_max_token_len_per_gpu "
        "A.actor.use_dynamic_bsz",
        "micro_train_batch_size train.micro_batch_size train_max_tokens_per_gpu train.max_tokens_per_gpu "
        "use_dynamic_batch train.dynamic_batch_enable",
        "counted in tokens",
    ),
    # ---- rollout
    _row("engine.kind", "use_vllm", "A.rollout.name", "", "local or vllm"),
    _row("engine.slots", "", "A.rollout.max_num_seqs", "", "sequences that one engine runs at once"),
    _row("engine.replicas", "", "", "vllm_num_engines vllm.num_engines"),
    _row(
        "engine.max_new_tokens",
        "max_completion_length",
        "data.max_response_length A.rollout.response_length",
        "generate_max_len rollout.max_new_tokens",
    ),
    _row("engine.temperature", "temperature", "A.rollout.temperature", "rollout.temperature"),
    _row("engine.top_p", "top_p", "A.rollout.top_p", "rollout.top_p"),
    _row("engine.top_k", "top_k", "A.rollout.top_k", "", "0 is off, not -1"),
    _row("engine.min_p", "min_p"),
    _row(
        "engine.kv_gb",
        "",
        "A.rollout.gpu_memory_utilization",
        "vllm_gpu_memory_utilization vllm.gpu_memory_utilization",
        "in GiB; unset takes what all slots need",
    ),
    # ---- the objective
    _row("learner.group_size", "num_generations", "A.rollout.n", "n_samples_per_prompt rollout.n_samples_per_prompt"),
    _row(
        "learner.algorithm",
        "scale_rewards",
        "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo",
        "advantage_estimator algo.advantage.estimator no_advantage_std_norm algo.advantage.no_std_norm",
        "dr_grpo is without division by the standard deviation",
    ),
    _row(
        "learner.loss_mean", "loss_type", "A.actor.loss_agg_mode", "", "dapo: token, grpo: sequence, dr_grpo: constant"
    ),
    _row(
        "learner.ratio",
        "importance_sampling_level",
        "A.actor.policy_loss.loss_mode",
        "policy_loss_type actor.policy_loss_type",
    ),
    _row("learner.clip_low", "epsilon", "A.actor.clip_ratio_low"),
    _row("learner.clip_high", "epsilon_high", "A.actor.clip_ratio_high"),
    _row(
        "learner.clip_low learner.clip_high",
        "",
        "A.actor.clip_ratio",
        "eps_clip eps_clip_low_high actor.eps_clip actor.eps_clip_low_high",
    ),
    _row("learner.kl_coef", "beta", "A.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef", "init_kl_coef algo.kl.init_coef"),
    _row(
        "learner.kl_in",
        "",
        "A.actor.use_kl_loss algorithm.use_kl_in_reward",
        "use_kl_loss algo.kl.use_loss",
        "loss or reward",
    ),
    _row("learner.kl_estimator", "", "A.actor.kl_loss_type algorithm.kl_penalty", "kl_estimator algo.kl.estimator"),
    _row("learner.kl_weighted", "use_bias_correction_kl"),
    _row("learner.entropy_coef", "entropy_coef", "A.actor.entropy_coeff", "entropy_loss_coef actor.entropy_coef"),
    _row("learner.overlong", "mask_truncated_completions", "", "", "mask"),
    _row(
        "learner.overlong_buffer",
        "",
        "",
        "overlong_buffer_len reward.overlong_buffer_len",
        "a share of engine.max_new_tokens",
    ),
    _row(
        "learner.flat_groups",
        "",
        "algorithm.filter_groups.enable",
        "dynamic_filtering algo.dynamic_filtering_enable",
        "replace",
    ),
    _row(
        "learner.importance",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode",
        "algorithm.rollout_correction.rollout_is",
        "enable_vllm_is_correction algo.advantage.is_correction_enable",
        "none, token or sequence",
    ),
    _row(
        "learner.importance_cap",
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        "algorithm.rollout_correction.rollout_is_threshold",
        "vllm_is_truncated_threshold algo.advantage.is_correction_threshold",
    ),
    _row(
        "learner.importance_mask",
        "",
        "algorithm.rollout_correction.rollout_rs",
        "",
        "none, token, sequence or geometric",
    ),
    _row(
        "learner.importance_low",
        "vllm_importance_sampling_clip_min",
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
    ),
    _row("learner.importance_high", "", "algorithm.rollout_correction.rollout_rs_threshold"),
    _row("learner.gamma", "", "algorithm.gamma", "gamma algo.advantage.gamma"),
    _row("learner.gae_lambda", "", "algorithm.lam", "lambd algo.advantage.lambd"),
    _row("learner.value_clip", "", "critic.cliprange_value", "value_clip critic.value_clip"),
    _row("reward.weights", "reward_weights"),
    # ---- the optimizer
    _row("learner.lr", "learning_rate", "A.actor.optim.lr", "actor_learning_rate actor.adam.lr"),
    _row("learner.critic_lr", "", "critic.optim.lr", "critic_learning_rate critic.adam.lr"),
    _row(
        "learner.lr_final",
        "lr_scheduler_type",
        "A.actor.optim.lr_scheduler_type A.actor.optim.warmup_style A.actor.optim.min_lr_ratio",
        "lr_scheduler actor.lr_scheduler actor.min_lr_ratio",
        "linear: 0, constant: 1",
    ),
    _row(
        "learner.warmup_samples",
        "warmup_steps warmup_ratio",
        "A.actor.optim.lr_warmup_steps A.actor.optim.lr_warmup_steps_ratio",
        "lr_warmup_ratio actor.lr_warmup_ratio",
        _IN_SAMPLES,
    ),
    _row("learner.weight_decay", "weight_decay", "A.actor.optim.weight_decay", "l2 actor.adam.weight_decay"),
    _row("learner.betas", "adam_beta1 adam_beta2", "A.actor.optim.betas", "adam_betas actor.adam.betas"),
    _row("learner.grad_clip", "max_grad_norm", "A.actor.grad_clip A.actor.optim.clip_grad", "max_norm actor.max_norm"),
    _row("learner.dtype", "bf16", "A.actor.fsdp_config.dtype", "param_dtype"),
    _row(
        "learner.recompute",
        "gradient_checkpointing",
        "A.model.enable_gradient_checkpointing",
        "actor.gradient_checkpointing_enable",
    ),
    _row("learner.offload_activations", "", "A.model.enable_activation_offload"),
    _row("learner.context_parallel", "", "A.actor.ulysses_sequence_parallel_size", "ring_attn_size"),
    _row("learner.ranks", "", "trainer.n_gpus_per_node", "actor_num_gpus_per_node actor.num_gpus_per_node"),
    # ---- evaluation, checkpoints, trackers
    _row("eval.every_samples", "eval_strategy eval_steps", "trainer.test_freq", "eval.steps", _IN_SAMPLES),
    _row(
        "eval.samples",
        "num_generations_eval",
        "A.rollout.val_kwargs.n",
        "eval_n_samples_per_prompt eval.n_samples_per_prompt",
    ),
    _row("checkpoint.every_updates", "save_strategy save_steps", "trainer.save_freq", "ckpt.save_steps", _IN_UPDATES),
    _row(
        "checkpoint.keep",
        "save_total_limit",
        "trainer.max_actor_ckpt_to_keep",
        "max_ckpt_num ckpt.max_num",
    ),
    _row(
        "track.to",
        "report_to",
        "trainer.logger",
        "use_wandb use_tensorboard logger.tensorboard_dir",
        "wandb, tensorboard",
    ),
    _row("track.project", "project", "trainer.project_name", "wandb_project logger.wandb.project"),
)

# Fields of TRL's GRPOConfig that change nothing here, by the reason.
_IGNORED_BECAUSE: Mapping[str, str] = MappingProxyType(
    {
        "Memory and speed have settings of their own.": """
            use_cache torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
            torch_empty_cache_steps auto_find_batch_size gradient_checkpointing_kwargs pad_to_multiple_of
            cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config
            use_transformers_paged vllm_enable_sleep_mode vllm_model_impl vllm_gpu_memory_utilization
            vllm_max_model_length vllm_server_timeout vllm_group_port ds3_gather_for_generation skip_memory_metrics""",
        "Data loaders and devices of transformers are not used.": """
            average_tokens_across_devices dataloader_drop_last dataloader_num_workers dataloader_pin_memory
            dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
            dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
            accelerator_config ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
            ddp_static_graph ddp_timeout local_rank""",
        "Every update is logged, and the ledger has every answer.": """
            logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
            log_level_replica include_num_input_tokens_seen disable_tqdm log_completions log_multimodal
            log_unique_prompts num_completions_to_print debug""",
        "The engine evaluates, before and after training too.": """
            per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
            eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval
            fp16_full_eval do_train do_eval do_predict""",
        "A resumed run is exact. Dropout and label smoothing are not used.": """
            save_on_each_node enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint
            full_determinism disable_dropout label_smoothing_factor""",
        "They act only together with a field that has no equivalent, and that one is named.": """
            hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision metric_for_best_model
            greater_is_better ref_model_mixup_alpha ref_model_sync_steps entropy_coef_min entropy_coef_max
            entropy_coef_delta entropy_target sapo_temperature_neg sapo_temperature_pos vespo_k_pos
            vespo_lambda_pos vespo_k_neg vespo_lambda_neg vllm_server_base_url vllm_server_host vllm_server_port
            trackio_space_id trackio_bucket_id trackio_static_space_id optim_args""",
    }
)
IGNORED = frozenset(name for names in _IGNORED_BECAUSE.values() for name in names.split())

# Fields of TRL's GRPOConfig that this package cannot carry out, and what to do instead where there is something.
NO_EQUIVALENT: Mapping[str, str] = MappingProxyType(
    {
        "optim": "AdamW is used",
        "optim_target_modules": "",
        "adam_epsilon": "1e-8 is used",
        "lr_scheduler_kwargs": "",
        "fp16": "learner.dtype takes float32 or bfloat16",
        "tf32": "",
        "neftune_noise_alpha": "",
        "run_name": "trackers show the name of the run directory",
        "eval_delay": "",
        "save_only_model": "checkpoints have the optimizer too",
        "push_to_hub": "",
        "load_best_model_at_end": "checkpoint.keep keeps the newest",
        "data_seed": "run.seed orders the data too",
        "use_cpu": "CUDA_VISIBLE_DEVICES= hides the GPUs",
        "parallelism_config": "learner.ranks and engine.replicas spread a run",
        "fsdp": "learner.ranks shards the learner",
        "fsdp_config": "learner.ranks shards the learner",
        "deepspeed": "learner.ranks shards the learner",
        "resume_from_checkpoint": "call train(resume=True)",
        "model_init_kwargs": "weights are loaded in float32",
        "trust_remote_code": "code of a model is never run",
        "router_aux_loss_coef": "",
        "cast_lm_head_to_fp32": "",
        "shuffle_dataset": "rows are shuffled in every epoch",
        "generation_kwargs": "engine has temperature, top_k, top_p, min_p, stop and stop_tokens",
        "chat_template_kwargs": "",
        "repetition_penalty": "",
        "vllm_mode": "vLLM runs in this process, or as a server of engine.port or engine.address",
        "vllm_structured_outputs_regex": "",
        "vllm_tensor_parallel_size": "engine.tensor_parallel splits an engine over GPUs",
        "delta": "",
        "multi_objective_aggregation": "rewards are summed with reward.weights",
        "sync_ref_model": "",
        "top_entropy_quantile": "",
        "use_adaptive_entropy": "",
        "max_tool_calling_iterations": "",
        "off_policy_mask_threshold": "",
        "log_completions_hub_repo": "",
    }
)

_MAX_PARTS = 6  # of a name; a user's key may have any number
_FRAMEWORKS = {"TRL": "trl", "verl": "verl", "OpenRLHF": "openrlhf"}
_INDEX: Mapping[str, Mapping[str, Neighbour]] = MappingProxyType(
    {
        framework: {name: row for row in NEIGHBOURS for name in getattr(row, column)}
        for framework, column in _FRAMEWORKS.items()
    }
)


def foreign_hint(name: str) -> str | None:
    """What to set instead of a name that another framework uses: `num_generations is TRL's name: set ...`.

    None if the name is no framework's. Dashes of an option and a section in front of the name do not matter.
    """
    asked = name.strip().lstrip("-+~").replace("-", "_")
    parts = asked.split(".")
    if len(parts) > _MAX_PARTS:
        return None
    for end in (".".join(parts[start:]) for start in range(len(parts))):
        if owners := _owners(end):
            row = next(iter(owners.values()))
            if "." not in end and any(key.endswith(f".{end}") for key in row.ours):
                return None  # the same name as ours, in another section
            whose = " and ".join(f"{framework}'s" for framework in owners)
            return f"{end} is {whose} name: set {' and '.join(row.ours)}{f' ({row.note})' if row.note else ''}"
    last = parts[-1]
    if last in NO_EQUIVALENT or last in IGNORED:
        instead = NO_EQUIVALENT.get(last)
        return f"{last} is TRL's name and has no equivalent here: remove it{f' ({instead})' if instead else ''}"
    return None


def foreign_hints(tree: Any, where: str) -> Iterator[str]:
    """The hints for all keys of an unknown section `where`, or for one unknown key."""
    if isinstance(tree, Mapping) and tree and where.count(".") < _MAX_PARTS:
        for key, value in tree.items():
            yield from foreign_hints(value, f"{where}.{key}")
    elif (hint := foreign_hint(where)) is not None:
        yield hint


def table() -> str:
    """All names by our keys, as Markdown: the table of docs/guides/from_trl.md."""
    lines = ["| here | TRL | verl | OpenRLHF | note |", "| --- | --- | --- | --- | --- |"]
    for row in NEIGHBOURS:
        names = (row.ours, row.trl, row.verl, tuple(f"--{name}" for name in row.openrlhf))
        cells = [", ".join(f"`{name}`" for name in column) for column in names]
        lines.append(f"| {' | '.join([*cells, row.note])} |")
    return "\n".join(lines) + "\n"


def _owners(name: str) -> dict[str, Neighbour]:
    """The frameworks that have a setting of this name, or one whose path ends with it, as in `rollout.n`.

    A single word that only ends a path does not count: `n` and `path` could be anything.
    """
    exact = {framework: rows[name] for framework, rows in _INDEX.items() if name in rows}
    if exact or not ("." in name or "_" in name):
        return exact
    for framework, rows in _INDEX.items():
        for path, row in rows.items():
            if path.endswith(f".{name}"):
                return {framework: row}
    return {}
