"""The one version number of the distribution; its five packages carry the same (a test compares them)."""

__version__ = "0.1.0"
