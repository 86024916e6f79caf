"""Measurements against public baselines, which are re-implemented here once; run by hand, never by the tests."""
