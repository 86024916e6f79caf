"""Media headers, token arithmetic, sources, the cost index and decoding: everything about samples, without torch.

from dataloaders import TarSource, build_index, estimator_from_config, load_sample

source = TarSource("shards/{000..015}.tar")
estimator = estimator_from_config("path/to/model")
index = build_index(source, estimator, "index-folder")
sample = load_sample(source, index, 0, estimator)
"""

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
from dataloaders.errors import DataError as DataError
from dataloaders.errors import IndexFormatError as IndexFormatError
from dataloaders.errors import MediaError as MediaError
from dataloaders.errors import Reason as Reason
from dataloaders.errors import RecordError as RecordError
from dataloaders.errors import SourceError as SourceError
from dataloaders.estimators import TokenEstimator as TokenEstimator
from dataloaders.estimators import estimator_from_config as estimator_from_config
from dataloaders.estimators import register_estimator as register_estimator
from dataloaders.index import BadSample as BadSample
from dataloaders.index import Confidence as Confidence
from dataloaders.index import CostIndex as CostIndex
from dataloaders.index import IndexKey as IndexKey
from dataloaders.index import write_index as write_index
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
from dataloaders.sample import LoadedSample as LoadedSample
from dataloaders.sample import load_sample as load_sample
from dataloaders.scan import Modalities as Modalities
from dataloaders.scan import build_index as build_index
from dataloaders.scan import count_modalities as count_modalities
from dataloaders.scan import scan_source as scan_source
from dataloaders.shuffled import ShuffledMediaSource as ShuffledMediaSource
from dataloaders.shuffled import SubsetSource as SubsetSource
from dataloaders.source import SampleSource as SampleSource
from dataloaders.tar_source import TarSource as TarSource
from dataloaders.tokenizer import ByteTokenizer as ByteTokenizer
from dataloaders.tokenizer import Special as Special
