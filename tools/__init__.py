"""Reports on data sets and runs: the command `balancer-analyze`. Works without torch.

Reading order: cli.py (the commands), then run_report.py, data_report.py, compared_steps.py and timeline_svg.py.
"""

from balancer._version import __version__ as __version__
