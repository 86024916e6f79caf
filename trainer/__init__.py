"""`balancer-train`: train a vision-language model on planned, packed micro-batches; imports nothing heavy by itself."""

from balancer._version import __version__ as __version__
