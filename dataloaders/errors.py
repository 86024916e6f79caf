"""Errors of the data layer: each says the cause, the place and the remedy.

A record or a medium is named by shard and key (and member) so that a person can open the very file that failed.
"""

from enum import StrEnum

from dataloaders.printable import printable


class Reason(StrEnum):
    """Why a medium or a record cannot be used: the stable code that reports and indices carry."""

    EMPTY_FILE = "empty_file"
    UNKNOWN_FORMAT = "unknown_format"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    TOO_LARGE = "too_large"
    TOO_SMALL = "too_small"
    EXTREME_ASPECT = "extreme_aspect"
    TOO_FEW_FRAMES = "too_few_frames"
    NO_VIDEO_STREAM = "no_video_stream"
    TIMEOUT = "timeout"
    UNSUPPORTED_MEDIA = "unsupported_media"
    BAD_RECORD = "bad_record"
    PLACEHOLDER_MISMATCH = "placeholder_mismatch"
    MISSING_MEDIA = "missing_media"


class DataError(ValueError):
    """Base of all errors of `dataloaders`.

    Args:
        cause: what is wrong, with the offending values.
        place: where: shard, key, member, path or option.
        remedy: what the user can do.
    """

    def __init__(self, cause: str, *, place: str = "", remedy: str = "") -> None:
        self.cause, self.place, self.remedy = cause, place, remedy
        super().__init__(cause, place, remedy)

    def __str__(self) -> str:
        parts = [self.cause]
        if self.place:
            parts.append(f"at {self.place}")
        text = " ".join(parts)
        text = f"{text}. {self.remedy}" if self.remedy else text
        return "\n".join(map(printable, text.split("\n")))  # names in it come from data

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (loader workers, other ranks), so keyword arguments must survive pickling.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[DataError], state: dict[str, object]) -> DataError:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    Exception.__init__(error, state.get("cause", ""), state.get("place", ""), state.get("remedy", ""))
    return error


class MediaError(DataError):
    """A medium (image, video) that cannot be probed or decoded; `reason` is its stable code."""

    def __init__(self, reason: Reason, cause: str, *, place: str = "", remedy: str = "") -> None:
        super().__init__(cause, place=place, remedy=remedy)
        self.reason = reason


class UnfitError(MediaError):
    """A sound medium that the model's processor would fail on: too long and thin, too few frames, a side below a pixel.

    Args:
        nearest_size_px: nearest (width, height) that the processor takes; None: the size is not at fault, or no
            size near it would do.
        nearest_frames: the least number of frames that it takes; None: their number is not at fault.
    """

    def __init__(
        self,
        reason: Reason,
        cause: str,
        *,
        place: str = "",
        remedy: str = "",
        nearest_size_px: tuple[int, int] | None = None,
        nearest_frames: int | None = None,
    ) -> None:
        super().__init__(reason, cause, place=place, remedy=remedy)
        self.nearest_size_px, self.nearest_frames = nearest_size_px, nearest_frames


class RecordError(DataError):
    """A record (conversation) that does not parse or does not match its media."""

    def __init__(self, reason: Reason, cause: str, *, place: str = "", remedy: str = "") -> None:
        super().__init__(cause, place=place, remedy=remedy)
        self.reason = reason


class SourceError(DataError):
    """A shard or folder that is missing, unreadable or empty."""


class MissingFileError(SourceError):
    """Files that are named and not there."""


class IndexFormatError(DataError):
    """A cost index that is stale, foreign, damaged or of another format version."""
