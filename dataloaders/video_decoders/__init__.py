"""Video decoders behind one protocol: PyAV (always there), decord, torchcodec; see `base` for the contract.

take_frames(clip, wanted, keep, decoder="auto" | "pyav" | "decord" | "torchcodec") -> Taken
"""

from dataloaders.video_decoders.base import BackendFailed as BackendFailed
from dataloaders.video_decoders.base import Clip as Clip
from dataloaders.video_decoders.base import Picture as Picture
from dataloaders.video_decoders.base import Taken as Taken
from dataloaders.video_decoders.base import VideoDecoder as VideoDecoder
from dataloaders.video_decoders.choice import AUTO as AUTO
from dataloaders.video_decoders.choice import AUTO_ORDER as AUTO_ORDER
from dataloaders.video_decoders.choice import DECODERS as DECODERS
from dataloaders.video_decoders.choice import choose as choose
from dataloaders.video_decoders.choice import self_test as self_test
from dataloaders.video_decoders.choice import take_frames as take_frames
from dataloaders.video_decoders.health import Health as Health
from dataloaders.video_decoders.health import measure_health as measure_health
