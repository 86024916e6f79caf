"""Measurements behind the numbers in docs/measurements.md; run by hand, never by the tests."""
