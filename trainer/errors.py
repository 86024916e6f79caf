"""Errors of training: cause, place and remedy in the text. The command line turns them into exit codes."""


class TrainerError(ValueError):
    """Base of all errors of `trainer`; exit code 1 unless a subclass says otherwise."""


class ConfigError(TrainerError):
    """An option, a config file or a run folder that cannot be used as asked; exit code 2."""


class CheckpointError(TrainerError):
    """A checkpoint that is missing, incomplete, or does not fit the model."""


class RemoteError(TrainerError):
    """An error that some rank met, raised on every rank at the same step boundary; the text names that rank."""


class LostRankError(TrainerError):
    """Another rank ended or cannot be reached; this one cannot go on."""


class NumericsError(TrainerError):
    """A loss or gradient that is not finite."""


class ReplacedBudgetError(TrainerError):
    """More samples had to be replaced by stand-ins than the budget allows; the text names the last ones."""


class SkippedBudgetError(TrainerError):
    """More steps in a row had no label token than the budget allows."""


class CheckFailedError(TrainerError):
    """A check that could not be carried out."""
