"""Packers: items into as few bins as possible. One algorithm per file, named in packing/registry.py."""
