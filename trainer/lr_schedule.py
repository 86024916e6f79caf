r"""Learning rate of a step as a pure function of its number: linear warm-up, then cosine, linear, constant or WSD.

    lr |    /‾‾\                    cosine, linear: one decay from the peak to the floor
       |   /    ‾\_                 wsd: stays at the peak, then decays linearly over the last `wsd_decay_share`
       |  /        ‾‾·── floor      constant: stays at the peak, which is then its floor
       | /
       +--+---------+--> step       warm-up: step i of w has peak * (i + 1) / w, so step 0 already moves
          w         total - 1

The last step, total_steps - 1, has exactly the floor: a run trains at every rate it announces, and no step beyond
it exists. WSD (warm-up, stable, decay) follows Hu et al. 2024, arXiv:2404.06395, with a linear decay.
"""

import math

from trainer.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DEFAULT_WARMUP_SHARE = 0.05


def resolve_warmup(warmup_steps: int | None, total_steps: int) -> int:
    """Steps of warm-up: as given, or 5 % of the run rounded up; always fewer than `total_steps`.

    Raises:
        ConfigError: a given warm-up that leaves no step at the peak or after it.
    """
    if warmup_steps is None:
        return min(math.ceil(DEFAULT_WARMUP_SHARE * total_steps), total_steps - 1)
    if warmup_steps >= total_steps:
        raise ConfigError(
            f"warmup_steps={warmup_steps} does not fit into a run of {total_steps} steps. Give at most "
            f"{total_steps - 1}, or train longer."
        )
    return warmup_steps


def learning_rate(
    step: int,
    total_steps: int,
    *,
    peak: float,
    min_ratio: float = 0.1,
    schedule: str = "cosine",
    warmup_steps: int = 0,
    wsd_decay_share: float = 0.2,
) -> float:
    """Learning rate of `step` (0-based) in a run of `total_steps`.

    Args:
        peak: largest rate.
        min_ratio: floor / peak.
        schedule: "cosine", "linear", "constant" or "wsd".
        warmup_steps: steps of warm-up, fewer than `total_steps` (see `resolve_warmup`).
        wsd_decay_share: share of `total_steps` at the end of "wsd" that decays.

    Raises:
        ConfigError: an unknown schedule or a step outside the run.
    """
    if not 0 <= step < total_steps:
        raise ConfigError(f"step {step} is outside a run of {total_steps} steps (0 to {total_steps - 1})")
    if schedule not in SCHEDULES:
        raise ConfigError(f"lr_schedule={schedule!r} is not one of: {', '.join(SCHEDULES)}.")
    floor = peak if schedule == "constant" else peak * min_ratio
    last = total_steps - 1
    if step == last:
        return floor
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    top = max(warmup_steps - 1, 0)  # the step that has the peak
    if schedule == "wsd":
        top = max(top, last - max(1, round(wsd_decay_share * total_steps)))
    remaining = 1.0 - max(0, step - top) / (last - top)
    return floor + (peak - floor) * _shape(schedule, remaining)


def _shape(schedule: str, remaining: float) -> float:
    """Height above the floor, 1 to 0, when `remaining` (1 to 0) of the decay is left."""
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * remaining))
    return remaining
