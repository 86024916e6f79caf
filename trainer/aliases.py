"""What other trainers call our options: a known foreign spelling is answered with ours and the arithmetic between.

The table is for people who arrive with a command or YAML file of HF TrainingArguments / TRL, LLaMA-Factory, ms-swift
or Megatron-LM. It only answers, it never converts: where units differ (samples per device against samples per
step) a silent conversion would train something else than either program says.
"""

from dataclasses import dataclass

HF, LLAMA_FACTORY, SWIFT, MEGATRON = "HF Trainer", "LLaMA-Factory", "ms-swift", "Megatron-LM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A foreign option.

    Attributes:
        origin: programs that use the spelling.
        ours: our option as a field name, or None where we have none.
        answer: one line: what to write instead, with the arithmetic where units differ.
    """

    origin: str
    ours: str | None
    answer: str


def lookup(name: str) -> Alias | None:
    """The alias entry of a foreign option or YAML key, in any of the spellings `--a-b`, `--a_b`, `a_b`."""
    return _TABLE.get(name.lstrip("-").replace("-", "_").lower())


def _table(*rows: tuple[str, str, str | None, str]) -> dict[str, Alias]:
    entries: dict[str, Alias] = {}
    for names, origin, ours, answer in rows:
        for name in names.split():
            entries[name] = Alias(origin=origin, ours=ours, answer=answer)
    return entries


_ALL_HF = f"{HF}, {LLAMA_FACTORY}, {SWIFT}"
_PER_STEP = (
    "global_batch_size counts samples of one optimizer step over all ranks: per-device size x accumulation x replicas"
)
_CAPACITY = "capacity_tokens limits the LLM tokens of one micro-batch, which holds several samples"
_NO_ACCUMULATION = "micro-batches are decided by the plan; num_microbatches fixes their number per rank and step"
_ITERATIONS = "one iteration is one of our steps"
_ALWAYS_PACKED = "every micro-batch is packed without padding, and no token attends to another sample; leave it out"

_TABLE = _table(
    # --- batch size and accumulation
    ("per_device_train_batch_size train_batch_size batch_size", _ALL_HF, "global_batch_size", _PER_STEP),
    ("micro_batch_size", MEGATRON, "capacity_tokens", f"{_CAPACITY}: about micro_batch_size x mean tokens of a sample"),
    ("gradient_accumulation_steps grad_accum", _ALL_HF, "num_microbatches", _NO_ACCUMULATION),
    ("per_device_eval_batch_size eval_batch_size", _ALL_HF, None, "validation packs by capacity_tokens; leave it out"),
    ("rampup_batch_size", MEGATRON, None, "the batch size is constant; leave it out"),
    # --- lengths and packing
    (
        "cutoff_len max_length max_seq_length model_max_length seq_length seq_len max_position_embeddings max_seq_len",
        f"{_ALL_HF}, {MEGATRON}",
        "capacity_tokens",
        f"{_CAPACITY}; a sample longer than it is an error or dropped (oversize), never cut",
    ),
    ("packing packing_strategy sequence_packing padding_free", _ALL_HF, None, _ALWAYS_PACKED),
    (
        "neat_packing group_by_length length_column_name",
        _ALL_HF,
        "policy",
        "placement is a policy: policy=joint (default)",
    ),
    (
        "overwrite_cache",
        LLAMA_FACTORY,
        "cache_dir",
        "an outdated index is rebuilt by itself; cache_dir says where it lies",
    ),
    (
        "truncation_strategy truncation",
        SWIFT,
        "oversize",
        "truncate_text cuts behind the last medium",
    ),
    # --- duration
    ("num_train_epochs num_epochs train_epochs epoch", _ALL_HF, "epochs", "same meaning"),
    ("train_iters", MEGATRON, "max_steps", _ITERATIONS),
    ("train_samples", MEGATRON, "max_steps", "max_steps = train_samples / global_batch_size"),
    ("max_iters num_train_steps total_steps num_steps", f"{HF}, {MEGATRON}", "max_steps", _ITERATIONS),
    # --- learning rate and optimizer
    ("learning_rate", _ALL_HF, "lr", "same meaning"),
    (
        "lr_scheduler_type lr_scheduler",
        _ALL_HF,
        "lr_schedule",
        "cosine, linear, constant or wsd; warm-up is part of each",
    ),
    ("lr_decay_style", MEGATRON, "lr_schedule", "cosine, linear, constant, or wsd for WSD"),
    ("warmup_ratio", _ALL_HF, "warmup_steps", "warmup_steps = warmup_ratio x steps of the run (None: 5 %)"),
    ("lr_warmup_fraction", MEGATRON, "warmup_steps", "warmup_steps = lr_warmup_fraction x steps of the run"),
    ("lr_warmup_iters num_warmup_steps", f"{HF}, {MEGATRON}", "warmup_steps", _ITERATIONS),
    ("lr_warmup_samples", MEGATRON, "warmup_steps", "warmup_steps = lr_warmup_samples / global_batch_size"),
    ("min_lr", MEGATRON, "min_lr_ratio", "min_lr_ratio = min_lr / lr"),
    ("lr_decay_iters", MEGATRON, None, "the rate ends at its floor with the last step; leave it out"),
    ("lr_wsd_decay_iters", MEGATRON, "wsd_decay_share", "wsd_decay_share = lr_wsd_decay_iters / steps of the run"),
    ("adam_beta1 adam_beta2 beta1 beta2", f"{_ALL_HF}, {MEGATRON}", "betas", "both at once, e.g. --betas 0.9 0.95"),
    ("adam_epsilon adam_eps", f"{_ALL_HF}, {MEGATRON}", "eps", "same meaning"),
    ("max_grad_norm clip_grad gradient_clip_val", f"{_ALL_HF}, {MEGATRON}", "clip_norm", "same meaning"),
    ("optim optimizer", f"{_ALL_HF}, {MEGATRON}", None, "the optimizer is AdamW; leave it out"),
    # --- data and model
    ("model_name_or_path model_id model_path", _ALL_HF, "model", "a preset or a folder with our config.json"),
    (
        "dataset dataset_name dataset_dir train_file data_path",
        f"{_ALL_HF}, {MEGATRON}",
        "data",
        "tar shards, path or brace pattern",
    ),
    ("train_data_path train_data", MEGATRON, "data", "tar shards, path or brace pattern"),
    ("eval_dataset val_dataset valid_data_path validation_file", f"{_ALL_HF}, {MEGATRON}", "eval_data", "tar shards"),
    (
        "val_size split_dataset_ratio split",
        f"{LLAMA_FACTORY}, {SWIFT}, {MEGATRON}",
        "eval_share",
        "a share of the samples",
    ),
    (
        "train_on_prompt mask_history loss_scale",
        f"{LLAMA_FACTORY}, {SWIFT}",
        "train_on",
        "assistant, last (mask_history) or all",
    ),
    (
        "dataloader_num_workers preprocessing_num_workers dataset_num_proc",
        _ALL_HF,
        "num_workers",
        "decoding processes per rank",
    ),
    (
        "image_max_pixels max_pixels min_pixels video_max_pixels",
        f"{LLAMA_FACTORY}, {SWIFT}",
        "model",
        "pixel limits are in the model folder's processor config",
    ),
    ("data_seed", HF, "seed", "one seed fixes weights, split and order"),
    # --- output, logging, checkpoints
    ("output_dir save save_dir", f"{_ALL_HF}, {MEGATRON}", "output", "the run folder"),
    ("overwrite_output_dir", _ALL_HF, None, "a run folder is never overwritten; give another output or resume"),
    (
        "resume_from_checkpoint load",
        f"{_ALL_HF}, {MEGATRON}",
        "resume",
        "--resume RUN continues its newest complete checkpoint",
    ),
    ("save_steps save_interval", f"{_ALL_HF}, {MEGATRON}", "checkpoint_interval_steps", "same meaning"),
    ("save_total_limit", _ALL_HF, "keep_last", "same meaning"),
    ("eval_steps eval_interval", f"{_ALL_HF}, {MEGATRON}", "eval_interval_steps", "same meaning"),
    ("eval_iters", MEGATRON, None, "validation always sees all held-out samples; leave it out"),
    ("logging_steps", _ALL_HF, "log_interval", "same meaning"),
    ("report_to", _ALL_HF, None, "steps.jsonl in the run folder holds every step; nothing is sent anywhere"),
    # --- arithmetic and parallelism
    ("bf16 fp16", f"{_ALL_HF}, {MEGATRON}", "dtype", "dtype=bf16 (autocast on CUDA) or fp32; fp16 is not offered"),
    ("torch_dtype precision", _ALL_HF, "dtype", "dtype=bf16 (autocast on CUDA) or fp32"),
    ("pipeline_model_parallel_size", f"{SWIFT}, {MEGATRON}", "pp_size", "same meaning; the encoder is the first stage"),
    ("data_parallel_size", MEGATRON, None, "replicas = processes / pp_size; start more processes with torchrun"),
    ("tensor_model_parallel_size context_parallel_size", f"{SWIFT}, {MEGATRON}", None, "not available yet"),
    ("deepspeed fsdp ddp_backend", _ALL_HF, None, "not available; data and pipeline parallelism are (pp_size)"),
    (
        "flash_attn attn_impl use_flash_attn",
        f"{LLAMA_FACTORY}, {SWIFT}, {MEGATRON}",
        None,
        "packed attention is always on",
    ),
    ("config_file yaml", HF, "config", "--config FILE.yaml"),
)
