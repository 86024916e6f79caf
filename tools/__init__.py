"""Reports on data sets and runs: the command `balancer-analyze`. Works without torch.

Reading order: cli.py (the commands); model_folder.py (which rules a folder gives), tokens_report.py, index_command.py,
data_report.py with cost_histogram.py and cost_plot.py; run_report.py, compared_steps.py and timeline_svg.py.
"""

from balancer._version import __version__ as __version__
