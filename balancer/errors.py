"""Errors of planning and scheduling: cause, place, remedy in the text; every rank raises the same one."""


class BalancerError(ValueError):
    """Base of all errors of `balancer`."""


class LayoutError(BalancerError):
    """A layout that cannot exist on the given world."""


class PlanError(BalancerError):
    """A step that cannot be planned: capacity, micro-batch count or selection."""


class OversizeError(PlanError):
    """Samples larger than a micro-batch's capacity under the oversize policy `error`; the text lists all of them."""


class PlanMismatchError(PlanError):
    """Ranks derived different plans: another index, config, seed or version on one of them."""


class ScheduleError(BalancerError):
    """A schedule that is incomplete, out of order, or would deadlock; the text shows the cycle."""


class LostWorkerError(BalancerError):
    """A decoding process ended without a result."""


class InstallationError(ImportError):
    """A sibling package comes from somewhere else than this installation."""


class CostModelError(BalancerError):
    """Dimensions or coefficients from which no cost can be computed."""


class RecordFormatError(BalancerError):
    """A step log that is damaged, of another format version, or not continued at the step that follows."""


class LedgerError(BalancerError):
    """A ledger that is damaged, of another format version, or of another run."""


class PackingError(BalancerError):
    """A model or layout that does not keep the samples of a pack apart."""


class MissingCostError(BalancerError):
    """No cost is known for the samples of a dataset; the text shows the line to add."""


class RankError(BalancerError):
    """Loading failed on some rank; raised on every rank, at the same place, with the text of the ranks that failed."""


class LoaderStateError(BalancerError):
    """A saved position that this loader cannot go on from: other data, another seed, inside a step."""
