"""Media headers, token arithmetic, sources, the cost index and decoding: everything about samples, without torch.

    from dataloaders import TarSource, build_index, estimator_from_config, load_sample

    source = TarSource("shards/{000..015}.tar")
    estimator = estimator_from_config("path/to/model")          # what media cost; image(640, 480).llm_tokens
    index = build_index(source, estimator, "index-folder")      # what every sample costs, from headers alone
    sample = load_sample(source, index, 0, estimator)           # of models that `check_loadable` accepts

Text is one token a byte unless an `encoder` says otherwise. Guides: docs/sources.md for data, docs/costs.md for costs.
Names that few programs need are loaded on first use; `open_source` and `open_mixture` are not, because modules have the
same names and would take their place.
"""

import importlib
from typing import TYPE_CHECKING

from dataloaders._version import __version__ as __version__
from dataloaders.chat import EncodedSample as EncodedSample
from dataloaders.chat import MediaSpan as MediaSpan
from dataloaders.chat import encode_prompt as encode_prompt
from dataloaders.chat import encode_record as encode_record
from dataloaders.chat import fact_mask as fact_mask
from dataloaders.chat import prompt_of as prompt_of
from dataloaders.counts import ItemCounts as ItemCounts
from dataloaders.counts import MediaKind as MediaKind
from dataloaders.counts import SegmentStats as SegmentStats
from dataloaders.decode import Conformed as Conformed
from dataloaders.decode import PixelConfig as PixelConfig
from dataloaders.decode import PlannedItem as PlannedItem
from dataloaders.encoder import ByteEncoder as ByteEncoder
from dataloaders.encoder import RecordEncoder as RecordEncoder
from dataloaders.encoder import TextCounts as TextCounts
from dataloaders.errors import DataError as DataError
from dataloaders.errors import IndexFormatError as IndexFormatError
from dataloaders.errors import MediaError as MediaError
from dataloaders.errors import MissingFileError as MissingFileError
from dataloaders.errors import Reason as Reason
from dataloaders.errors import RecordError as RecordError
from dataloaders.errors import SourceError as SourceError
from dataloaders.errors import UnfitError as UnfitError
from dataloaders.estimators import PatchEstimator as PatchEstimator
from dataloaders.estimators import TokenEstimator as TokenEstimator
from dataloaders.estimators import estimator_from_config as estimator_from_config
from dataloaders.estimators import register_estimator as register_estimator
from dataloaders.estimators import registered_estimators as registered_estimators
from dataloaders.hf_source import HFDatasetSource as HFDatasetSource
from dataloaders.index import BadSample as BadSample
from dataloaders.index import Confidence as Confidence
from dataloaders.index import CostIndex as CostIndex
from dataloaders.index import IndexKey as IndexKey
from dataloaders.index import write_index as write_index
from dataloaders.index_build import Part as Part
from dataloaders.index_build import build_shards as build_shards
from dataloaders.index_merge import merge_parts as merge_parts
from dataloaders.jsonl_source import JsonlSource as JsonlSource
from dataloaders.mixture_source import MixtureSource as MixtureSource
from dataloaders.mixture_spec import read_mixture as read_mixture
from dataloaders.open_mixture import open_mixture as open_mixture
from dataloaders.open_source import open_source as open_source
from dataloaders.parquet_source import ParquetSource as ParquetSource
from dataloaders.positions import mrope_positions as mrope_positions
from dataloaders.probe import ByteReader as ByteReader
from dataloaders.probe import ProbeLimits as ProbeLimits
from dataloaders.probe import probe_image as probe_image
from dataloaders.probe import probe_video as probe_video
from dataloaders.record import MediaPart as MediaPart
from dataloaders.record import MediaRef as MediaRef
from dataloaders.record import Record as Record
from dataloaders.record import TextPart as TextPart
from dataloaders.record import Turn as Turn
from dataloaders.record_parser import RecordLimits as RecordLimits
from dataloaders.record_parser import parse_record as parse_record
from dataloaders.rough_encoder import RoughEncoder as RoughEncoder
from dataloaders.row_source import RowOptions as RowOptions
from dataloaders.rows import RowFields as RowFields
from dataloaders.sample import LoadedSample as LoadedSample
from dataloaders.sample import check_loadable as check_loadable
from dataloaders.sample import load_sample as load_sample
from dataloaders.scan import Modalities as Modalities
from dataloaders.scan import build_index as build_index
from dataloaders.scan import count_modalities as count_modalities
from dataloaders.scan import scan_source as scan_source
from dataloaders.scan_rows import ScanOptions as ScanOptions
from dataloaders.shuffled import ShuffledMediaSource as ShuffledMediaSource
from dataloaders.shuffled import SubsetSource as SubsetSource
from dataloaders.source import SampleSource as SampleSource
from dataloaders.storage import Storage as Storage
from dataloaders.storage import StorageOptions as StorageOptions
from dataloaders.tar_source import TarSource as TarSource
from dataloaders.tokenizer import ByteTokenizer as ByteTokenizer
from dataloaders.tokenizer import Special as Special

if TYPE_CHECKING:
    from dataloaders.byte_stream import StreamLimits as StreamLimits
    from dataloaders.index_concat import IndexConcat as IndexConcat
    from dataloaders.map_source import MapDatasetSource as MapDatasetSource
    from dataloaders.raw_sample import MemorySource as MemorySource
    from dataloaders.raw_sample import RawSample as RawSample
    from dataloaders.stream_source import HFStream as HFStream
    from dataloaders.stream_source import IterableStream as IterableStream
    from dataloaders.tar_stream import TarStream as TarStream
    from dataloaders.template_encoder import TemplateEncoder as TemplateEncoder
else:
    _HOME_OF = {
        "HFStream": "dataloaders.stream_source",
        "IndexConcat": "dataloaders.index_concat",
        "IterableStream": "dataloaders.stream_source",
        "MapDatasetSource": "dataloaders.map_source",
        "MemorySource": "dataloaders.raw_sample",
        "RawSample": "dataloaders.raw_sample",
        "StreamLimits": "dataloaders.byte_stream",
        "TarStream": "dataloaders.tar_stream",
        "TemplateEncoder": "dataloaders.template_encoder",  # brings jinja2
    }

    # What is imported above, without the modules that come with it, and what is loaded on first use.
    __all__ = [name for name, value in globals().items() if getattr(value, "__module__", "").startswith("dataloaders.")]
    __all__ += list(_HOME_OF)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME_OF})

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'dataloaders' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME_OF[name]), name)
