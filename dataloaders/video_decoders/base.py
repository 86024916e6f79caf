"""What every video decoder keeps to: encoded bytes and frame numbers -> upright RGB frames and a report.

    Clip(data, limits, place), wanted [n] ascending --VideoDecoder.take(keep)--> Taken(frames [n], repeated, bad, ...)

    reader: shots (number, picture uint8 [H, W, 3]) in ascending order --Picker--> keep(picture) once per wanted frame

Contract, the same for every backend and tested for all of them:

* pictures are RGB, uint8, turned as the display rotation says, in display order, numbered as the probe counts them;
* a wanted frame that the stream does not deliver is the last good one before it (the first good one behind it at the
  start of a clip), and is counted in `repeated`;
* one thread; a reader is opened and closed inside one call, in the process that uses it. It refuses to work in a forked
  child, where decord would hang, and to be pickled;
* the ceilings and the allow-list of containers of `dataloaders.probe` hold before a library sees a byte.

`keep` is called per picture (it resizes), so full frames do not pile up: the price is one callback per wanted frame.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError, MediaError, Reason
from dataloaders.probe.limits import ProbeLimits

Picture: TypeAlias = NDArray[np.uint8]
Kept = TypeVar("Kept")


class BackendFailed(Exception):
    """A backend cannot decode a clip, or must not be trusted with it; PyAV takes over. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What is to be decoded.

    Attributes:
        data: the encoded bytes.
        limits: ceilings.
        place: what errors name as the origin.
    """

    data: bytes
    limits: ProbeLimits = field(default_factory=ProbeLimits)
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A decoded frame: its number in display order, and its picture uint8 [H, W, 3]."""

    number: int
    picture: Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Generic[Kept]):
    """What was taken of a clip.

    Attributes:
        frames: what `keep` made of each wanted frame, in order.
        repeated: wanted frames that the stream did not deliver; a neighbour stands there.
        bad_packets: packets that did not decode.
        num_packets: packets that were decoded, bad ones included.
        num_frames: frames of the whole stream; None where decoding stopped before its end.
        decoder: the backend that delivered.
        fallback: backend and reason, where another one was asked for and PyAV took over.
    """

    frames: list[Kept]
    repeated: int = 0
    bad_packets: int = 0
    num_packets: int = 0
    num_frames: int | None = None
    decoder: str = ""
    fallback: str = ""


class VideoDecoder(Protocol):
    """A backend. It holds no reader: `take` opens and closes one."""

    @property
    def name(self) -> str:
        """As in the registry."""
        ...

    def problem(self) -> str:
        """Why it cannot be used in this process; "" if it can. May import the library, which costs up to seconds."""
        ...

    def take(self, clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Kept]) -> Taken[Kept]:
        """Decode the frames numbered `wanted` (ascending, repeats allowed).

        Raises:
            MediaError: not one frame decodes, or the file is refused.
            BackendFailed: this backend cannot, another one may.
        """
        ...


class ProcessBound(ABC):
    """A reader of one clip: belongs to the process that opened it, closes with its `with` block, is never pickled."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if os.getpid() == self._pid:  # in a forked child the library's threads are gone: closing would wait for them
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: a reader of a clip is not pickled; send the bytes, open it there")

    def shots(self, wanted: Sequence[int]) -> Iterator[Shot]:
        """The wanted frames in order and, where one is missing, the last good frame before it.

        Raises:
            DataError: in another process than the one that opened the reader.
        """
        if os.getpid() != self._pid:
            raise DataError(
                f"a {type(self).__name__} of process {self._pid} is used in process {os.getpid()}",
                remedy="Open clips inside the worker that decodes them; a reader does not survive a fork.",
            )
        return self._shots(wanted)

    @abstractmethod
    def _shots(self, wanted: Sequence[int]) -> Iterator[Shot]: ...

    @abstractmethod
    def close(self) -> None:
        """Give back what the library holds."""


class Picker(Generic[Kept]):
    """Fills the wanted frames from shots in ascending order.

    Wanted 2, 5, 9 and shots 2, 4, 9 give frames 2, 4, 9 with one repeated; shots 2 alone give 2, 2, 2 with two.
    """

    def __init__(self, wanted: Sequence[int], keep: Callable[[Picture], Kept]) -> None:
        self._wanted, self._keep = wanted, keep
        self._spare: Shot | None = None
        self._kept: tuple[int, Any] | None = None
        self.frames: list[Kept] = []
        self.repeated = 0

    @property
    def done(self) -> bool:
        """Whether every wanted frame is there."""
        return len(self.frames) == len(self._wanted)

    @property
    def empty(self) -> bool:
        """Whether no shot came at all."""
        return self._spare is None

    def add(self, shot: Shot) -> None:
        """Take the next shot."""
        while not self.done and self._wanted[len(self.frames)] < shot.number:
            self._fill(self._spare or shot)
        self._spare = shot
        while not self.done and self._wanted[len(self.frames)] == shot.number:
            self.frames.append(self._made(shot))

    def finish(self) -> None:
        """The stream is at its end: the last good frame stands for all that is still missing."""
        while not self.done and self._spare is not None:
            self._fill(self._spare)

    def _fill(self, shot: Shot) -> None:
        self.frames.append(self._made(shot))
        self.repeated += 1

    def _made(self, shot: Shot) -> Kept:
        if self._kept is None or self._kept[0] != shot.number:
            self._kept = (shot.number, self._keep(shot.picture))
        made: Kept = self._kept[1]
        return made


def no_frame(bad_packets: int, place: str) -> MediaError:
    """The error of a clip of which nothing decodes."""
    reason = Reason.CORRUPT if bad_packets else Reason.TRUNCATED
    return MediaError(
        reason, f"no frame decodes ({bad_packets} packets failed)", place=place, remedy="Remove or replace the file."
    )
