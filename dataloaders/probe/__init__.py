"""Header probing: what a medium is and how big it is, before any pixel is decoded.

    bytes | path | ByteReader  --probe_image-->  ImageMeta(width_px, height_px, frames, ...)
                               --probe_video-->  VideoMeta(width_px, height_px, num_frames, fps, ...)

Whatever cannot be used raises `MediaError` with a stable reason code; an unreadable *shard* stays an `OSError`.
"""

from dataloaders.probe.image import ImageMeta as ImageMeta
from dataloaders.probe.image import probe_image as probe_image
from dataloaders.probe.limits import ProbeLimits as ProbeLimits
from dataloaders.probe.reader import ByteReader as ByteReader
from dataloaders.probe.reader import MediaSource as MediaSource
from dataloaders.probe.video import VideoMeta as VideoMeta
from dataloaders.probe.video import probe_video as probe_video
