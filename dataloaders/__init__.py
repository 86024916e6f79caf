"""Media headers, token arithmetic, sources, the cost index and decoding: everything about samples, without torch.

    from dataloaders import TarSource, build_index, estimator_from_config, load_sample

    source = TarSource("shards/{000..015}.tar")
    estimator = estimator_from_config("path/to/model")          # what media cost; image(640, 480).llm_tokens
    index = build_index(source, estimator, "index-folder")      # what every sample costs, from headers alone
    sample = load_sample(source, index, 0, estimator)           # of models that `check_loadable` accepts

Text is one token a byte unless an `encoder` says otherwise; `TemplateEncoder` is loaded on first use, since its chat
templates bring jinja2. The guide is docs/costs.md.
"""

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
from dataloaders.errors import Reason as Reason
from dataloaders.errors import RecordError as RecordError
from dataloaders.errors import SourceError as SourceError
from dataloaders.errors import UnfitError as UnfitError
from dataloaders.estimators import PatchEstimator as PatchEstimator
from dataloaders.estimators import TokenEstimator as TokenEstimator
from dataloaders.estimators import estimator_from_config as estimator_from_config
from dataloaders.estimators import register_estimator as register_estimator
from dataloaders.estimators import registered_estimators as registered_estimators
from dataloaders.index import BadSample as BadSample
from dataloaders.index import Confidence as Confidence
from dataloaders.index import CostIndex as CostIndex
from dataloaders.index import IndexKey as IndexKey
from dataloaders.index import write_index as write_index
from dataloaders.index_build import Part as Part
from dataloaders.index_build import build_shards as build_shards
from dataloaders.index_merge import merge_parts as merge_parts
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
from dataloaders.tar_source import TarSource as TarSource
from dataloaders.tokenizer import ByteTokenizer as ByteTokenizer
from dataloaders.tokenizer import Special as Special

if TYPE_CHECKING:
    from dataloaders.template_encoder import TemplateEncoder as TemplateEncoder
else:
    # What is imported above, without the modules that come with it, and what is loaded on first use.
    __all__ = [name for name, value in globals().items() if getattr(value, "__module__", "").startswith("dataloaders.")]
    __all__.append("TemplateEncoder")

    def __dir__() -> list[str]:
        return sorted({*globals(), "TemplateEncoder"})

    def __getattr__(name: str) -> object:
        if name != "TemplateEncoder":
            raise AttributeError(f"module 'dataloaders' has no attribute {name!r}")
        from dataloaders.template_encoder import TemplateEncoder

        return TemplateEncoder
