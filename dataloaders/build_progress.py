"""How far a build of an index is, and what went wrong in it: the news of its pieces, added up.

piece (shard or slice) --PieceEvent--> Tracker --> BuildProgress --> who watches
                                               --> errors, raised together when all pieces were tried
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataloaders.errors import SourceError
from dataloaders.index_workers import Job, PieceEvent

MAX_LISTED = 20


@dataclass(slots=True, kw_only=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        noun: what its pieces are: "shard", or "slice" (of the samples of a source without shards).
        shards, num_shards: pieces that are done, in all. reused: of those done, how many were not read.
        bytes, num_bytes: of the shards; 0 for slices.
        samples: scanned or taken over. num_samples: in all; 0 for shards, which are not opened yet.
        failed: pieces that could not be scanned.
    """

    num_shards: int
    num_bytes: int = 0
    num_samples: int = 0
    noun: str = "shard"
    shards: int = 0
    reused: int = 0
    bytes: int = 0
    samples: int = 0
    failed: int = 0

    @property
    def share(self) -> float:
        """What part of the work is done, 0 to 1: of the bytes, or of the samples."""
        return self.bytes / self.num_bytes if self.num_bytes else self.samples / max(self.num_samples, 1)


@dataclass(slots=True)
class Tracker:
    """Adds up the news of the pieces, and keeps their errors."""

    state: BuildProgress
    tell: Callable[[BuildProgress], None] | None
    partly: dict[Job[Any], tuple[int, int]] = field(default_factory=dict)
    errors: list[tuple[str, Exception]] = field(default_factory=list)

    def reuse(self, job: Job[Any], num_samples: int) -> None:
        """A piece of so many samples need not be scanned."""
        self.state.reused += 1
        self.hear(PieceEvent(job=job, samples=num_samples, total=num_samples, finished=True))

    def hear(self, event: PieceEvent) -> None:
        """News of a piece."""
        job, state = event.job, self.state
        share = 1.0 if event.finished else event.samples / event.total if event.total else 0.0
        now = (event.samples, int(share * job.size) if state.num_bytes else 0)
        before = self.partly.pop(job, (0, 0))
        state.samples, state.bytes = state.samples + now[0] - before[0], state.bytes + now[1] - before[1]
        if event.error is not None:
            self.errors.append((job.name, event.error))
            state.failed += 1
        elif event.finished:
            state.shards += 1
        else:
            self.partly[job] = now
        if self.tell is not None:
            self.tell(state)

    def raise_failed(self) -> None:
        """Raise the error of one piece as it is, or one error that lists those of several; none: nothing."""
        errors, noun = self.errors, self.state.noun
        if len(errors) == 1:
            raise errors[0][1]
        if errors:
            more = [f"  and {len(errors) - MAX_LISTED} more"] if len(errors) > MAX_LISTED else []
            told = (f"  {name}: {error}" for name, error in sorted(errors[:MAX_LISTED], key=lambda pair: pair[0]))
            raise SourceError(
                "\n".join([f"{len(errors)} of {self.state.num_shards} {noun}s cannot be scanned:", *told, *more]),
                remedy="Repair or leave them out and start again: the others are kept."
                if noun == "shard"
                else "Repair the data and start again: finished slices are kept while the source is unchanged.",
            )
