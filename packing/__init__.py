"""Packing and partitioning of integer sizes and costs: pure numbers, deterministic, with bounds. numpy and numba only.

Reading order: bins.py (pack), parts.py (partition), grid.py (partition_grid) and streaming.py (StreamingPacker), then
registry.py, the algorithm files it names, and the three files of bounds.
"""

from packing._version import __version__ as __version__
from packing.bin_bounds import bin_lower_bound as bin_lower_bound
from packing.bins import pack as pack
from packing.errors import CapacityError as CapacityError
from packing.errors import InfeasiblePartitionError as InfeasiblePartitionError
from packing.errors import ItemTooLargeError as ItemTooLargeError
from packing.errors import NegativeSizeError as NegativeSizeError
from packing.errors import PackingError as PackingError
from packing.errors import SizeOverflowError as SizeOverflowError
from packing.grid import partition_grid as partition_grid
from packing.makespan_bounds import makespan_lower_bound as makespan_lower_bound
from packing.parts import partition as partition
from packing.results import GridResult as GridResult
from packing.results import PackResult as PackResult
from packing.results import PartitionResult as PartitionResult
from packing.stream_state import StreamedBin as StreamedBin
from packing.streaming import StreamingPacker as StreamingPacker
from packing.streaming import pack_stream as pack_stream
from packing.warm_up import warm_up as warm_up
