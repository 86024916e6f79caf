"""Partitioners: items into k parts of even load. One algorithm per file, named in packing/registry.py."""
