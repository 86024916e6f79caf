"""The version, without importing a sibling package for it (a test compares the five)."""

__version__ = "0.1.0"
