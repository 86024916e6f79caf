"""What a loader worker needs to turn sample ids into a packed cell: source, index, token rule and options. No torch.

ids --prefetch--> source (a hint)
id  --load------> LoadedSample      planned shape, whatever the medium holds
id  --stand_in--> LoadedSample      the same shape without touching the data (a sample that hangs or kills)
samples --pack--> PackedCell        numpy [T], [P, d], ...;  read() = load all, pack, as torch tensors
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balancer.packed_cell import PackedCell, pack_samples
from balancer.room import Room
from dataloaders.decode import Allocate, PixelConfig, new_patches
from dataloaders.encoder import RecordEncoder
from dataloaders.estimators import TokenEstimator
from dataloaders.index import CostIndex
from dataloaders.probe import ProbeLimits
from dataloaders.sample import LoadedSample, check_loadable, load_sample, stand_in_sample
from dataloaders.source import SampleSource, prefetch

if TYPE_CHECKING:
    from balancer.batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReader:
    """How samples are read; pickled into every worker.

    Attributes:
        train_on, encoder, apply_orientation, limits: as in the scan that made `index`.
        loss_reduction, align_tokens: see `balancer.packed_cell.pack_samples`.
        with_pixels: off on pipeline ranks that hold no encoder; their batches carry no patches.
        video_decoder: name of a decoder of `dataloaders.video_decoders`, or `auto`.
    """

    source: SampleSource
    index: CostIndex
    estimator: TokenEstimator
    train_on: str = "assistant"
    apply_orientation: bool = True
    loss_reduction: str = "token_mean"
    align_tokens: int = 1
    with_pixels: bool = True
    video_decoder: str = "auto"
    limits: ProbeLimits | None = None
    encoder: RecordEncoder | None = None

    def prefetch(self, sample_ids: Sequence[int]) -> None:
        """Tell the source which samples are read next."""
        prefetch(self.source, sample_ids, media=self.with_pixels)

    def room_bytes(self, sample_ids: Sequence[int]) -> int:
        """Bytes that the patches of these samples take."""
        if not self.with_pixels:
            return 0
        patch_dim = PixelConfig.of(check_loadable(self.estimator)).patch_dim
        return int(self.index.samples["patches"][list(sample_ids)].sum()) * patch_dim * 4

    def load(self, sample_id: int, *, allocate: Allocate = new_patches) -> LoadedSample:
        """Load and decode one sample; arguments and errors are those of `dataloaders.sample.load_sample`."""
        return load_sample(
            self.source,
            self.index,
            int(sample_id),
            self.estimator,
            train_on=self.train_on,
            encoder=self.encoder,
            apply_orientation=self.apply_orientation,
            with_pixels=self.with_pixels,
            limits=self.limits,
            video_decoder=self.video_decoder,
            allocate=allocate,
        )

    def stand_in(self, sample_id: int, reason: str, *, allocate: Allocate = new_patches) -> LoadedSample:
        """The zero-loss stand-in of a sample, made without reading it."""
        return stand_in_sample(
            self.index,
            int(sample_id),
            self.estimator,
            place=self.place(sample_id),
            reason=reason,
            with_pixels=self.with_pixels,
            allocate=allocate,
        )

    def pack(self, samples: Sequence[LoadedSample], *, step: int = 0, microbatch_index: int = 0) -> PackedCell:
        """The samples as one micro-batch."""
        return pack_samples(
            samples,
            step=step,
            microbatch_index=microbatch_index,
            loss_reduction=self.loss_reduction,
            align_tokens=self.align_tokens,
        )

    def place(self, sample_id: int) -> str:
        """Where a sample lies, for messages."""
        return self.source.place(int(sample_id))

    def read(self, sample_ids: Sequence[int], *, step: int = 0, microbatch_index: int = 0) -> "MicroBatch":
        """Load, decode and pack samples in this process."""
        from balancer.batch import MicroBatch  # workers, which send numpy, start without torch

        room = Room.of(self.room_bytes(sample_ids))
        samples = [self.load(sample_id, allocate=room.allocate) for sample_id in sample_ids]
        return MicroBatch.of(self.pack(samples, step=step, microbatch_index=microbatch_index))
