"""Errors of the analysis tool: cause, place and remedy in the text. The command line turns them into exit codes."""


class AnalyzeError(ValueError):
    """The input was found but does not hold what the report needs; exit code 1."""


class UsageError(AnalyzeError):
    """An argument that names nothing that can be analysed; exit code 2."""
