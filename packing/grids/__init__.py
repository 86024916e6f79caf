"""Grid placers: items into ranks x slots. One algorithm per file, named in packing/registry.py."""
