"""Plan, balance and pack multimodal training steps; the front door of `mllm-balancer`.

    from balancer import BalancedDataLoader        # needs torch: mllm-balancer[loader]
    from balancer import ParallelSpec, plan_step   # no torch

Names are loaded on first use, so importing `balancer` needs neither torch nor a compiled kernel. A function may have
the name of its module (`simulate`): the name is the function, whatever was imported before.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from balancer._installation import verify_siblings

verify_siblings()

from balancer._version import __version__  # noqa: E402  (nothing before the sibling check)

if TYPE_CHECKING:
    from balancer.batch import MicroBatch
    from balancer.cost_model import CostModel
    from balancer.counts import StepCounts
    from balancer.layout import Domain, Layout, ParallelSpec
    from balancer.loader import BalancedBatchSampler, BalancedDataLoader
    from balancer.plan import Capacities, StepPlan
    from balancer.plan_check import verify
    from balancer.planner import plan_step
    from balancer.records import StepRecord
    from balancer.sample_dataset import SampleDataset
    from balancer.schedule import build_schedule
    from balancer.simulate import simulate

_HOME_OF = {
    "BalancedBatchSampler": "balancer.loader",
    "BalancedDataLoader": "balancer.loader",
    "Capacities": "balancer.plan",
    "CostModel": "balancer.cost_model",
    "Domain": "balancer.layout",
    "Layout": "balancer.layout",
    "MicroBatch": "balancer.batch",
    "ParallelSpec": "balancer.layout",
    "SampleDataset": "balancer.sample_dataset",
    "StepCounts": "balancer.counts",
    "StepPlan": "balancer.plan",
    "StepRecord": "balancer.records",
    "build_schedule": "balancer.schedule",
    "plan_step": "balancer.planner",
    "simulate": "balancer.simulate",
    "verify": "balancer.plan_check",
}

__all__ = [
    "BalancedBatchSampler",
    "BalancedDataLoader",
    "Capacities",
    "CostModel",
    "Domain",
    "Layout",
    "MicroBatch",
    "ParallelSpec",
    "SampleDataset",
    "StepCounts",
    "StepPlan",
    "StepRecord",
    "__version__",
    "build_schedule",
    "plan_step",
    "simulate",
    "verify",
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


class _Package(ModuleType):
    """Importing a submodule binds it in its package, which would hide a lazy name for good; such a binding is left out.

    `from balancer.simulate import peak_live` is not concerned: it finds the module in `sys.modules`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
