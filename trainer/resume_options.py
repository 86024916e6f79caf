"""Which options a resume may change: those that move neither the samples of a step nor the meaning of a weight."""

import dataclasses

from trainer.config import FitConfig
from trainer.errors import ConfigError

# Any other change is refused, because a step number would then stand for other samples than before.
# A mixture is named anew to change its weights; that its data are the same is checked by the ledger.
CHANGEABLE_ON_RESUME = frozenset(
    [
        "mixture",
        "output",
        "resume",
        "cache_dir",
        "remote_cache",
        "remote_cache_gib",
        "threads",
        "num_workers",
        "keep_last",
        "checkpoint_interval_steps",
        "eval_interval_steps",
        "log_interval",
        "compare_steps",
        "pp_size",
        "policy",
        "schedule",
        "cost_model",
        "num_microbatches",
        "min_num_microbatches",
        "max_replaced",
        "max_replaced_consecutive",
        "max_skipped_consecutive",
        "sample_timeout_s",
        "video_decoder",
        "epochs",
        "max_steps",
        "lr",
        "min_lr_ratio",
        "lr_schedule",
        "warmup_steps",
        "wsd_decay_share",
        "weight_decay",
        "betas",
        "eps",
        "clip_norm",
        "dtype",
    ]
)


def refuse_changed_trajectory(before: FitConfig, now: FitConfig) -> None:
    """Raise ConfigError when a resume asks for other samples, another order or another model than the run had."""
    changed = [
        f"{field.name} was {getattr(before, field.name)!r} and is now {getattr(now, field.name)!r}"
        for field in dataclasses.fields(now)
        if field.name not in CHANGEABLE_ON_RESUME and getattr(before, field.name) != getattr(now, field.name)
    ]
    if changed:
        raise ConfigError(
            f"a resumed run keeps its samples and model, but {'; '.join(changed)}. Leave these options out, or start a "
            f"new run with another --output."
        )
