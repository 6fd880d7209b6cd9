"""Our names for options of transformers' Trainer, its example scripts and similar tools.

Used when someone types such a name, and for the page of the guides that lists them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ours:
    """Our counterpart of another tool's option."""

    flags: tuple[str, ...] = ()
    """Our names, as different stages have them; none if there is no such option."""
    note: str = ""
    """How it differs, or why there is none."""


def _ours(*flags: str, note: str = "") -> Ours:
    return Ours(flags, note)


def _none(note: str) -> Ours:
    return Ours(note=note)


_BATCH = ("batch_size", "global_batch_size")
_PRECISION = ("precision", "loop.precision")
_ALWAYS = _none("is always so")
_BY_ITSELF = _none("is done without an option")
_NO_HUB = _none("there is none: `raybert publish --hub owner/name` uploads a bundle")
_NO_DDP = _none("there is none: Ray Train connects the workers")
_NO_LOADER = _none("there is none: workers read their rows ahead by themselves")
_STAGES = _none("there is none: `raybert finetune` trains, `evaluate` measures, `predict` answers")
_MLFLOW = _none("there is none: runs go to MLflow, as --tracking_uri says")
_NO_LABELS = _none("there is none: a row's fields are those of its task, see `raybert list tasks`")
_TO_RESUME = _none("there is none: the same command resumes, with the same rows, by itself")

TRAINER = {
    "output_dir": _ours("output"),
    "per_device_train_batch_size": _ours(*_BATCH, note="over all workers"),
    "num_train_epochs": _ours("epochs", "loop.max_steps"),
    "max_steps": _ours("loop.max_steps", "epochs"),
    "learning_rate": _ours("lr", "optimizer.lr"),
    "lr_scheduler_type": _ours("schedule.decay", note="fine-tuning always uses linear"),
    "lr_scheduler_kwargs": _ours("schedule.decay_share", note="fine-tuning has none"),
    "warmup_steps": _ours("schedule.warmup_steps", "warmup_share"),
    "optim": _ours("optimizer.name", note="fine-tuning always uses adamw"),
    "optim_args": _ours("optimizer.beta1", note="each has a name of its own; fine-tuning has none"),
    "weight_decay": _ours("weight_decay", "optimizer.weight_decay"),
    "adam_beta1": _ours("optimizer.beta1", note="0.9 in fine-tuning"),
    "adam_beta2": _ours("optimizer.beta2", note="0.999 in fine-tuning"),
    "adam_epsilon": _ours("optimizer.eps", note="1e-6 in fine-tuning"),
    "optim_target_modules": _ours("freeze", "freeze_layers", note="what is not trained"),
    "gradient_accumulation_steps": _ours(
        "micro_batch_tokens", note="tokens computed at a time; the rows of a step stay the same"
    ),
    "average_tokens_across_devices": _ALWAYS,
    "max_grad_norm": _ours("optimizer.max_grad_norm", note="1 in fine-tuning"),
    "label_smoothing_factor": _ours("classes.label_smoothing"),
    "bf16": _ours(*_PRECISION, note="bf16 or fp32"),
    "fp16": _ours(*_PRECISION, note="bf16 or fp32; there is no fp16"),
    "bf16_full_eval": _none("there is none: rows are measured in fp32"),
    "fp16_full_eval": _none("there is none: rows are measured in fp32"),
    "tf32": _none("there is none: --precision bf16 or fp32"),
    "activation_checkpointing": _ours(
        "loop.activation_checkpointing", note="in fine-tuning, lower micro_batch_tokens instead"
    ),
    "activation_checkpointing_kwargs": _none("there is none"),
    "gradient_checkpointing": _ours(
        "loop.activation_checkpointing", note="in fine-tuning, lower micro_batch_tokens instead"
    ),
    "gradient_checkpointing_kwargs": _none("there is none"),
    "torch_compile": _ours("loop.compile", note="pretraining alone has it"),
    "torch_compile_backend": _none("there is none"),
    "torch_compile_mode": _none("there is none"),
    "use_liger_kernel": _none("there is none"),
    "liger_kernel_config": _none("there is none"),
    "use_cache": _none("there is none: encoders have no cache"),
    "neftune_noise_alpha": _none("there is none"),
    "torch_empty_cache_steps": _ours("micro_batch_tokens", note="lower it to need less memory"),
    "auto_find_batch_size": _ours("micro_batch_tokens", note="lower it to need less memory"),
    "logging_strategy": _ours("log_every_steps"),
    "logging_steps": _ours("log_every_steps"),
    "logging_first_step": _none("there is none: log_every_steps 1 has every step"),
    "log_on_each_node": _none("there is none: rank 0 records, with the readings of all"),
    "logging_nan_inf_filter": _none("there is none: training stops at NaN"),
    "include_num_input_tokens_seen": _ALWAYS,
    "log_level": _none("there is none"),
    "log_level_replica": _none("there is none"),
    "disable_tqdm": _none("there is none: without a terminal there are lines"),
    "report_to": _ours("tracking_uri", note="MLflow"),
    "run_name": _ours("output", note="a run is named after its stage and its output"),
    "project": _ours("experiment"),
    "trackio_space_id": _MLFLOW,
    "trackio_bucket_id": _MLFLOW,
    "trackio_static_space_id": _MLFLOW,
    "eval_strategy": _ours("selection.every_epochs", "evaluate_every_steps"),
    "eval_steps": _ours("selection.every_epochs", "evaluate_every_steps"),
    "eval_delay": _none("there is none"),
    "per_device_eval_batch_size": _ours("micro_batch_tokens"),
    "prediction_loss_only": _none("there is none"),
    "eval_on_start": _none("there is none: pretraining always does, fine-tuning never"),
    "eval_do_concat_batches": _BY_ITSELF,
    "eval_use_gather_object": _BY_ITSELF,
    "eval_accumulation_steps": _BY_ITSELF,
    "include_for_metrics": _BY_ITSELF,
    "batch_eval_metrics": _BY_ITSELF,
    "save_only_model": _none("there is none: a checkpoint is enough to resume bit for bit"),
    "save_strategy": _ours("checkpoint_every_steps"),
    "save_steps": _ours("checkpoint_every_steps"),
    "save_on_each_node": _none("there is none: all nodes share the output"),
    "save_total_limit": _ours("keep_checkpoints"),
    "enable_jit_checkpoint": _none("is always so: SIGTERM and preemption write a checkpoint"),
    "push_to_hub": _NO_HUB,
    "hub_token": _NO_HUB,
    "hub_private_repo": _NO_HUB,
    "hub_model_id": _NO_HUB,
    "hub_strategy": _NO_HUB,
    "hub_always_push": _NO_HUB,
    "hub_revision": _NO_HUB,
    "load_best_model_at_end": _ours("selection.share", note="with selection rows it is always so"),
    "metric_for_best_model": _ours("selection.metric"),
    "greater_is_better": _none("there is none: every metric knows"),
    "ignore_data_skip": _TO_RESUME,
    "restore_callback_states_from_checkpoint": _TO_RESUME,
    "full_determinism": _none("is always so on CPUs"),
    "seed": _ours("seeds", "loop.seed"),
    "data_seed": _ours("seeds", "loop.seed", note="the same for weights and rows"),
    "use_cpu": _none("there is none: GPUs are used where there are some"),
    "accelerator_config": _none("there is none"),
    "parallelism_config": _none("there is none"),
    "dataloader_drop_last": _ALWAYS,
    "dataloader_num_workers": _NO_LOADER,
    "dataloader_pin_memory": _NO_LOADER,
    "dataloader_persistent_workers": _NO_LOADER,
    "dataloader_prefetch_factor": _NO_LOADER,
    "dataloader_multiprocessing_context": _NO_LOADER,
    "dataloader_in_order": _NO_LOADER,
    "remove_unused_columns": _ALWAYS,
    "label_names": _NO_LABELS,
    "train_sampling_strategy": _none("there is none: rows of like length share a pass"),
    "length_column_name": _none("there is none: rows of like length share a pass"),
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "ddp_backend": _NO_DDP,
    "ddp_timeout": _NO_DDP,
    "fsdp": _ours("fsdp", note="true or false"),
    "fsdp_config": _ours("fsdp", note="true or false"),
    "deepspeed": _ours("fsdp", note="there is no DeepSpeed"),
    "debug": _none("there is none: --num_workers 0 runs in this process, for a debugger"),
    "skip_memory_metrics": _none("there is none: memory is always recorded"),
    "do_train": _STAGES,
    "do_eval": _STAGES,
    "do_predict": _STAGES,
    "resume_from_checkpoint": _TO_RESUME,
    "local_rank": _ours("num_workers", note="the number of training processes"),
}
"""Every field of `transformers.TrainingArguments`."""

_FILE = _ours("held_out.source", note="selection.share takes rows to choose by from train")
PEERS = {
    "warmup_ratio": _ours("warmup_share", "schedule.warmup_steps"),
    "evaluation_strategy": _ours("selection.every_epochs", "evaluate_every_steps"),
    "early_stopping_patience": _ours("selection.patience"),
    "early_stopping": _ours("selection.patience"),
    "patience": _ours("selection.patience"),
    "group_by_length": _none("is always so: rows of like length share a pass"),
    "model_name_or_path": _ours("model"),
    "pretrained_model_name_or_path": _ours("model"),
    "train_file": _ours("train.source", "shards"),
    "dataset_name": _ours("train.source", "shards"),
    "validation_file": _FILE,
    "test_file": _FILE,
    "text_column_name": _ours("train.columns", "held_out.columns", "columns"),
    "label_column_name": _ours("train.columns", "held_out.columns", "columns"),
    "max_seq_length": _ours("max_length"),
    "dropout": _ours("hidden_dropout_prob"),
    "batch_size": _ours(*_BATCH),
    "epochs": _ours("epochs", "loop.max_steps"),
    "lr": _ours("lr", "optimizer.lr"),
    "precision": _ours(*_PRECISION),
    "class_weights": _ours("classes.weights", "classes.weighting"),
    "class_weight": _ours("classes.weighting", note="balanced, as in scikit-learn"),
    "pos_weight": _ours("classes.weights", note="with several labels per row"),
    "focal_loss": _ours("classes.focal_gamma", note="2 is usual"),
    "label_smoothing": _ours("classes.label_smoothing"),
    "weighted_sampling": _ours("classes.sampling_power", note="0 draws all labels equally often"),
    "freeze_encoder": _ours("freeze", note="encoder, to train the head alone"),
    "freeze_embeddings": _ours("freeze", note="embeddings"),
    "num_frozen_layers": _ours("freeze_layers"),
    "lora": _ours("adapter.rank", note="8 is usual"),
    "peft": _ours("adapter.rank", note="8 is usual"),
    "lora_r": _ours("adapter.rank"),
    "lora_rank": _ours("adapter.rank"),
    "lora_alpha": _ours("adapter.alpha"),
    "lora_dropout": _ours("adapter.dropout"),
    "target_modules": _ours("adapter.targets"),
    "lora_target_modules": _ours("adapter.targets"),
    "use_rslora": _ours("adapter.rank_stabilized"),
    "nproc_per_node": _ours("num_workers"),
    "gpus": _ours("num_workers", note="with require_gpus, each has one"),
    "device": _none("there is none: GPUs are used where there are some"),
}
"""Options of transformers' example scripts, of older versions, and of peers."""

ELSEWHERE = TRAINER | PEERS
