"""What ranks tell and send each other while they load: numbers, texts, errors, and encoded samples.

    gather_numbers   int64 [k]       -> int64 [R, k]                 one collective of fixed size
    gather_rows      int64 [n_r, C]  -> R arrays                     padded to the longest, whose length is known
    gather_texts     text            -> R texts                      likewise, in bytes
    send_bytes       blobs for every rank -> bytes from every rank   uneven all-to-all of uint8, exact sizes, in rounds

Every rank calls the same functions in the same order, on a gloo group of its own that nothing else uses. An error of
one rank is *told*, in place of numbers, and raised on all of them by `raise_together`: none waits for a rank that gave
up.

Price: in a round every rank holds at most `round_bytes` more to send and as many to receive; a round takes as long as
its slowest pair. A rank that dies, rather than fails, is noticed when its connection breaks or the group's time ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from balancer.counts import Int64Array
from balancer.errors import PlanError, RankError

ROUND_BYTES = 64 * 1024**2
MAX_ERROR_BYTES = 64 * 1024
Blob = bytes | bytearray | memoryview


@dataclass(slots=True, kw_only=True)
class ExchangeCounters:
    """What this rank has exchanged since the start.

    Attributes:
        sent_bytes, received_bytes: of samples, to and from other ranks.
        kept_bytes: of samples that run on the rank that read them.
        rounds: collectives it took.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    kept_bytes: int = 0
    rounds: int = 0


class RankGroup:
    """The ranks that read a stream together.

    Args:
        group: a gloo process group for this purpose alone; None: one process, and every call returns its input.

    Raises:
        PlanError: a group of another back end, which cannot carry bytes in the host's memory.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if group is not None and "gloo" not in str(dist.get_backend_config(group)):
            raise PlanError(
                f"the group runs on {dist.get_backend(group)}; streams are exchanged in host memory over gloo: make it "
                'with torch.distributed.new_group(backend="gloo")'
            )
        self.counters = ExchangeCounters()

    def gather_numbers(self, numbers: Sequence[int] | Int64Array) -> Int64Array:
        """int64 [R, k] of the int64 [k] of every rank; k is the same everywhere."""
        own = np.ascontiguousarray(numbers, dtype=np.int64)
        if self._group is None:
            return own[None].copy()
        gathered = np.zeros((self.size, len(own)), dtype=np.int64)
        parts = [torch.from_numpy(row) for row in gathered]
        dist.all_gather(parts, torch.from_numpy(own.copy()), group=self._group)
        return gathered

    def gather_rows(self, rows: Int64Array, counts: Sequence[int]) -> list[Int64Array]:
        """int64 [n_r, C] of every rank; `counts` [R] are the n_r, gathered before."""
        if self._group is None:
            return [rows]
        width = rows.shape[1]
        padded = np.zeros(max(counts) * width, dtype=np.int64)
        padded[: rows.size] = rows.ravel()
        gathered = self.gather_numbers(padded)
        return [gathered[rank, : count * width].reshape(count, width) for rank, count in enumerate(counts)]

    def gather_texts(self, text: str) -> list[str]:
        """The text of every rank."""
        if self._group is None:
            return [text]
        raw = np.frombuffer(text.encode("utf-8", "backslashreplace"), dtype=np.uint8)
        sizes = self.gather_numbers([len(raw)])[:, 0]
        words = np.zeros(-(-int(sizes.max()) // 8), dtype=np.int64)
        words.view(np.uint8)[: len(raw)] = raw
        gathered = self.gather_numbers(words)
        return [row.view(np.uint8)[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]

    def raise_together(self, failed: Sequence[int], error: Exception | None, doing: str) -> None:
        """Raise on every rank if any has failed.

        Args:
            failed: [R], 0 or 1, gathered before. error: of this rank. doing: what was tried.

        Raises:
            RankError: with the text of every rank that failed. With one process, the error itself.
        """
        if not any(failed):
            return
        if self._group is None and error is not None:
            raise error
        said = "" if error is None else "\n".join([f"{type(error).__name__}: {error}", *_notes(error)])
        texts = self.gather_texts(said.encode("utf-8", "backslashreplace")[:MAX_ERROR_BYTES].decode("utf-8", "ignore"))
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if failed[rank]]
        raise RankError(f"{doing} failed on {len(lines)} of {self.size} ranks:\n" + "\n".join(lines)) from error

    def send_bytes(
        self, outgoing: Sequence[Sequence[Blob]], moved: Int64Array, *, round_bytes: int = ROUND_BYTES
    ) -> list[memoryview]:
        """The bytes that every rank has for this one, in rank order; those of this rank itself are not moved.

        Args:
            outgoing: [R], blobs for every rank, in order; own ones are ignored.
            moved: int64 [R, R], bytes from rank r to rank c: the same on every rank, diagonal ignored.
            round_bytes: bound on what a rank sends in one collective, and on what it receives.

        Raises:
            PlanError: the blobs are not as many bytes as `moved` says. Before anything is sent, so only by a fault.
        """
        between = moved.copy()
        np.fill_diagonal(between, 0)
        feeds = [_Feed(blobs if rank != self.rank else ()) for rank, blobs in enumerate(outgoing)]
        if [feed.size for feed in feeds] != between[self.rank].tolist():
            raise PlanError(
                f"rank {self.rank} holds {[feed.size for feed in feeds]} bytes for the ranks; the plan says "
                f"{between[self.rank].tolist()}"
            )
        received = [memoryview(bytearray(int(count))) for count in between[:, self.rank]]
        for sends, receives in rounds(between, self.rank, round_bytes=round_bytes):
            self._round(feeds, received, sends, receives)
        self.counters.kept_bytes += int(moved[self.rank, self.rank])
        return received

    def _round(
        self, feeds: Sequence["_Feed"], received: list[memoryview], sends: Int64Array, receives: NDArray[np.int64]
    ) -> None:
        """One collective: `sends` [R] bytes to every rank, `receives` [2, R] offsets and bytes from every rank."""
        offsets, sizes = receives
        out = np.empty(int(sends.sum()), dtype=np.uint8)
        view, at = out.data, 0
        for feed, size in zip(feeds, sends.tolist(), strict=True):
            feed.take_into(view[at : at + size])
            at += size
        got = np.empty(int(sizes.sum()), dtype=np.uint8)
        dist.all_to_all_single(
            torch.from_numpy(got),
            torch.from_numpy(out),
            output_split_sizes=sizes.tolist(),
            input_split_sizes=sends.tolist(),
            group=self._group,
        )
        at = 0
        for rank, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
            received[rank][offset : offset + size] = got[at : at + size].data
            at += size
        self.counters.sent_bytes += len(out)
        self.counters.received_bytes += len(got)
        self.counters.rounds += 1


def _notes(error: Exception) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def rounds(between: Int64Array, rank: int, *, round_bytes: int) -> list[tuple[Int64Array, Int64Array]]:
    """The collectives that move int64 [R, R] bytes, as seen by `rank`: (sends [R], receives [2, R]: offset and bytes).

    The bytes from r to c are cut into pieces of `round_bytes / R`, and the k-th pieces of all pairs make round k: as
    many rounds on every rank, and all sizes known on both sides. No round where nothing moves.
    """
    if round_bytes < 1:
        raise PlanError(f"round_bytes={round_bytes}: at least 1")
    piece = max(1, round_bytes // len(between))
    made = []
    for start in range(0, int(between.max(initial=0)), piece):
        sizes = np.clip(between - start, 0, piece)
        receives = np.stack([np.minimum(between[:, rank], start), sizes[:, rank]])
        made.append((sizes[rank], receives))
    return made


class _Feed:
    """Blobs as one run of bytes that is taken in pieces, without joining them first."""

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self._blobs = [memoryview(blob) for blob in blobs]
        self._blob, self._at = 0, 0
        self.size = sum(map(len, self._blobs))

    def take_into(self, target: memoryview) -> None:
        """Fill `target` with the bytes that come next."""
        filled = 0
        while filled < len(target):
            blob = self._blobs[self._blob]
            size = min(len(blob) - self._at, len(target) - filled)
            target[filled : filled + size] = blob[self._at : self._at + size]
            filled, self._at = filled + size, self._at + size
            if self._at == len(blob):
                self._blob, self._at = self._blob + 1, 0
