"""Plan, balance and pack multimodal training steps; the front door of `mllm-balancer`.

    from balancer import BalancedDataLoader        # needs torch: mllm-balancer[loader]
    from balancer import Layout, plan_step         # no torch

Names are loaded on first use, so importing `balancer` needs neither torch nor a compiled kernel.
"""

import importlib
from typing import TYPE_CHECKING, Any

from balancer._installation import verify_siblings

verify_siblings()

from balancer._version import __version__  # noqa: E402  (nothing before the sibling check)

if TYPE_CHECKING:
    from balancer.batch import MicroBatch
    from balancer.cost_model import CostModel
    from balancer.counts import StepCounts
    from balancer.layout import Layout
    from balancer.loader import BalancedBatchSampler, BalancedDataLoader
    from balancer.plan import Capacities, StepPlan
    from balancer.planner import plan_step
    from balancer.records import StepRecord
    from balancer.schedule import build_schedule
    from balancer.simulate import simulate

_HOME_OF = {
    "BalancedBatchSampler": "balancer.loader",
    "BalancedDataLoader": "balancer.loader",
    "Capacities": "balancer.plan",
    "CostModel": "balancer.cost_model",
    "Layout": "balancer.layout",
    "MicroBatch": "balancer.batch",
    "StepCounts": "balancer.counts",
    "StepPlan": "balancer.plan",
    "StepRecord": "balancer.records",
    "build_schedule": "balancer.schedule",
    "plan_step": "balancer.planner",
    "simulate": "balancer.simulate",
}

__all__ = [
    "BalancedBatchSampler",
    "BalancedDataLoader",
    "Capacities",
    "CostModel",
    "Layout",
    "MicroBatch",
    "StepCounts",
    "StepPlan",
    "StepRecord",
    "__version__",
    "build_schedule",
    "plan_step",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'balancer' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            message = f"balancer.{name} needs torch. Install it with: pip install 'mllm-balancer[loader]'"
            raise ModuleNotFoundError(message, name="torch") from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
