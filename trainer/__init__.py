"""`balancer-train`: train a vision-language model on planned, packed micro-batches; imports nothing heavy by itself."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mllm-balancer")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
