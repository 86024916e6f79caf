"""What single media cost under a model: tokens, patches, tiles, frames, and the steps of the formula.

    640x480 | 1280x720x300@29.97 | photo.jpg | clip.mp4  --size, or header of the file-->  MediaSize
    model folder  --estimator_from_config-->  TokenEstimator
    both  -->  TokensRow(counts, steps | reason and the nearest size or number of frames that works)

A size stands for an image; with frames and their rate, for a video. What exists as a file is taken as one.
"""

import re
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from balancer.printable import printable
from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import Preprocessing, TokenEstimator, estimator_from_config
from dataloaders.estimators.files import read_files
from dataloaders.probe import probe_image, probe_video
from dataloaders.probe.image_sniff import foreign_name
from tools.errors import UsageError
from tools.model_folder import named_folder

EXAMPLE = "balancer-analyze tokens 640x480 1280x720x300@29.97 photo.jpg clip.mp4 --model MODEL_FOLDER"
_NOT_USABLE = "not_usable"  # stands where a reason code does, for an argument that names no medium
_RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")
_SIZE = re.compile(r"(\d{1,9})\s*[xX×*]\s*(\d{1,9})(?:\s*[xX×*]\s*(\d{1,9})\s*(?:@\s*(\d[\d./]*))?)?\s*(?:fps)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSize:
    """What an estimator needs to know of a medium.

    Attributes:
        width_px, height_px: display size.
        num_frames, fps, duration_s: of a video; 0 for an image.
        source: where the numbers are from, for people.
    """

    kind: Literal["image", "video"]
    width_px: int
    height_px: int
    num_frames: int = 0
    fps: float = 0.0
    duration_s: float = 0.0
    source: str = "as given"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensRow:
    """One argument.

    Attributes:
        argument: as given.
        media: None: it names no medium, or its header cannot be read.
        counts: None: it cannot be used; then `reason` and `message` say why.
        steps: lines of the formula.
        reason: stable code, "" where all is well.
        nearest: the nearest argument that works, written as an argument; "" where there is none.
        nearest_tokens: its LLM tokens.
    """

    argument: str
    media: MediaSize | None = None
    counts: ItemCounts | None = None
    steps: tuple[str, ...] = ()
    reason: str = ""
    message: str = ""
    nearest: str = ""
    nearest_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensReport:
    """All arguments under one model.

    Attributes:
        rule, fingerprint: of the estimator.
        model, files: the folder, and the configuration files in it that were read.
        num_images: images of the sample that each image is taken to be in.
    """

    rows: tuple[TokensRow, ...]
    rule: str
    fingerprint: str
    model: str
    files: tuple[str, ...]
    num_images: int

    @property
    def num_failed(self) -> int:
        """Arguments without counts."""
        return sum(row.counts is None for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain objects, for JSON."""
        return asdict(self)


def report_on(
    arguments: Sequence[str],
    *,
    model: Path | None,
    preprocessing: Preprocessing | None = None,
    num_images: int = 1,
    apply_orientation: bool = True,
) -> TokensReport:
    """Counts of every argument, in order.

    Args:
        arguments: files, or sizes such as 640x480 and 1280x720x300@29.97.
        model: a model folder.
        preprocessing: see `estimator_from_config`.
        num_images: images in the sample of each image (some families do not tile many).
        apply_orientation: turn images as their EXIF orientation says.

    Raises:
        UsageError: no argument, no model folder, or no argument that names a medium.
        DataError: a model of which nothing is known, or damaged files in its folder.
    """
    if not arguments:
        raise UsageError(f"no medium is named. Name files or sizes, for example: {EXAMPLE}")
    if num_images < 1:
        raise UsageError(f"--num-images {num_images}: a sample has at least one image.")
    folder = _model_folder(model)
    estimator = estimator_from_config(folder, preprocessing=preprocessing)
    rows = tuple(_row(argument, estimator, num_images, apply_orientation) for argument in arguments)
    if all(row.reason == _NOT_USABLE for row in rows):
        raise UsageError("\n".join(row.message for row in rows))
    return TokensReport(
        rows=rows,
        rule=estimator.rule,
        fingerprint=estimator.fingerprint,
        model=str(folder),
        files=tuple(f"{name}.json" for name in read_files(folder)),
        num_images=num_images,
    )


def parse_size(argument: str) -> MediaSize | None:
    """The size that an argument spells: WxH, or WxHxFRAMES@FPS; `X`, `×` and `*` serve as `x`. None: it spells none.

    Raises:
        UsageError: it looks like a size, and something in it is missing or not a number.
    """
    match = _SIZE.fullmatch(argument.strip())
    if match is None:
        if re.match(r"\d+\s*[xX×*]", argument.strip()):
            raise UsageError(f"{argument!r}: not a size. Write WxH or WxHxFRAMES@FPS, for example 1280x720x300@29.97")
        return None
    width, height, frames, rate = match.groups()
    if frames is None:
        return MediaSize(kind="image", width_px=int(width), height_px=int(height))
    fps = _rate(argument, rate)
    return MediaSize(
        kind="video",
        width_px=int(width),
        height_px=int(height),
        num_frames=int(frames),
        fps=fps,
        duration_s=int(frames) / fps,
    )


def probe_file(path: Path, *, apply_orientation: bool = True) -> MediaSize:
    """The size of an image or a video file, from its header; which it is follows from its content.

    Raises:
        MediaError: neither.
    """
    with path.open("rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
    data = "a tar" if _is_tar(head) else "records of samples" if path.suffix.lower() in _RECORDS else ""
    if data:  # FFmpeg would take the first picture in a tar for a film
        remedy = "Use balancer-analyze index or data for data sets."
        raise MediaError(Reason.UNKNOWN_FORMAT, data, place=str(path), remedy=remedy)
    try:
        image = probe_image(path, apply_orientation=apply_orientation)
    except MediaError as error:
        # What is plainly something else (a page, an archive) is no video either; FFmpeg's message would be vaguer.
        if error.reason is not Reason.UNKNOWN_FORMAT or foreign_name(head) not in ("", "HEIC"):
            raise
    else:
        more = f", the first of {image.frames} pictures" if image.frames > 1 else ""
        return MediaSize(
            kind="image", width_px=image.width_px, height_px=image.height_px, source=f"{image.format} header{more}"
        )
    video = probe_video(path)
    return MediaSize(
        kind="video",
        width_px=video.width_px,
        height_px=video.height_px,
        num_frames=video.num_frames,
        fps=video.fps,
        duration_s=video.duration_s,
        source=f"{video.codec}, frames {video.confidence}",
    )


def print_report(report: TokensReport, console: Console) -> None:
    """The rule, then for each argument its numbers and the steps that lead to them."""
    _line(console, f"rule: {report.rule}", style="bold")
    _line(console, f"model: {report.model} ({', '.join(report.files)})")
    for row in report.rows:
        console.print()
        _line(console, _title(row), style="bold")
        if row.counts is None:
            _line(console, f"  {row.reason}: {row.message}")
            if row.nearest:
                _line(console, f"  nearest that works: {row.nearest} ({row.nearest_tokens:,} LLM tokens)")
            continue
        for line in _counted(row.counts):
            _line(console, f"  {line}")
        for step in row.steps:
            _line(console, f"    {step}")


def _is_tar(head: bytes) -> bool:
    """Whether a file begins with the header of a tar member, of whatever dialect."""
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _model_folder(model: Path | None) -> Path:
    if model is None:
        raise UsageError(f"--model is missing: it names a folder of a model. For example: {EXAMPLE}")
    return named_folder(model)


def _row(argument: str, estimator: TokenEstimator, num_images: int, apply_orientation: bool) -> TokensRow:
    media: MediaSize | None = None
    try:
        media = _media(argument, apply_orientation)
        counts, steps = _counts(estimator, media, num_images)
    except UsageError as error:
        return TokensRow(argument=argument, reason=_NOT_USABLE, message=str(error))
    except UnfitError as error:
        nearest = None if media is None else _nearest(media, error)
        found = TokensRow(argument=argument, media=media, reason=error.reason, message=str(error))
        return found if nearest is None else _with_nearest(found, estimator, nearest, num_images)
    except MediaError as error:
        return TokensRow(argument=argument, media=media, reason=error.reason, message=str(error))
    except (DataError, OSError) as error:
        return TokensRow(argument=argument, media=media, reason=Reason.MISSING_MEDIA, message=str(error))
    return TokensRow(argument=argument, media=media, counts=counts, steps=steps)


def _media(argument: str, apply_orientation: bool) -> MediaSize:
    path = Path(argument).expanduser()
    if path.is_file():
        return probe_file(path, apply_orientation=apply_orientation)
    size = parse_size(argument)
    if size is None:
        what = "a folder; name the files in it" if path.is_dir() else "neither a file nor a size"
        raise UsageError(f"{argument!r}: {what}. For example: {EXAMPLE}")
    return size


def _rate(argument: str, text: str | None) -> float:
    try:
        fps = float(Fraction(text or "0"))
    except (ValueError, ZeroDivisionError):
        fps = 0.0
    if fps <= 0:
        raise UsageError(f"{argument!r}: frames need a rate. Write WxHxFRAMES@FPS, for example 1280x720x300@29.97")
    return fps


def _counts(estimator: TokenEstimator, media: MediaSize, num_images: int) -> tuple[ItemCounts, tuple[str, ...]]:
    if media.kind == "image":
        size = media.width_px, media.height_px
        return estimator.image(*size, num_images=num_images), estimator.explain_image(*size, num_images=num_images)
    clip = media.width_px, media.height_px, media.num_frames, media.fps, media.duration_s
    return estimator.video(*clip), estimator.explain_video(*clip)


def _nearest(media: MediaSize, error: UnfitError) -> MediaSize | None:
    """The medium with the nearest size and number of frames that the error names; None: it names none."""
    if error.nearest_size_px is None and error.nearest_frames is None:
        return None
    width, height = error.nearest_size_px or (media.width_px, media.height_px)
    frames = media.num_frames if error.nearest_frames is None else error.nearest_frames
    return MediaSize(
        kind=media.kind,
        width_px=width,
        height_px=height,
        num_frames=frames,
        fps=media.fps,
        # The frames that are added take their time, unless they only fill a duration that was promised.
        duration_s=max(media.duration_s, frames / media.fps) if media.fps > 0 else media.duration_s,
        source="nearest",
    )


def _with_nearest(row: TokensRow, estimator: TokenEstimator, nearest: MediaSize, num_images: int) -> TokensRow:
    try:
        counts, _ = _counts(estimator, nearest, num_images)
    except DataError:  # two things are wrong at once: the size that helps one does not help the other
        return row
    return TokensRow(
        argument=row.argument,
        media=row.media,
        reason=row.reason,
        message=row.message,
        nearest=_spelled(nearest),
        nearest_tokens=counts.llm_tokens,
    )


def _spelled(media: MediaSize) -> str:
    """The argument that gives this size."""
    size = f"{media.width_px}x{media.height_px}"
    return size if media.kind == "image" else f"{size}x{media.num_frames}@{media.fps:g}"


def _title(row: TokensRow) -> str:
    if row.media is None:
        return row.argument
    time = f", {row.media.duration_s:.2f} s" if row.media.kind == "video" else ""
    return f"{row.argument}: {row.media.kind} {_spelled(row.media)}{time} ({row.media.source})"


def _counted(counts: ItemCounts) -> tuple[str, ...]:
    padded = "" if counts.padded_patches is None else f" ({counts.padded_patches:,} beside the largest batch mate)"
    grid = "tiles of several sizes" if counts.grid == (0, 0, 0) else "x".join(map(str, counts.grid))
    visual = f"of which visual {counts.visual_tokens:,}"
    if counts.visual_tokens > counts.llm_tokens:
        visual = f"and {counts.visual_tokens:,} visual ones beside them, as keys of cross-attention"
    return (
        f"LLM tokens {counts.llm_tokens:,}, {visual}",
        f"patches {counts.patches:,}{padded}, tiles {counts.tiles}, frames {counts.frames}, grid {grid}, "
        f"resized to {counts.width_px}x{counts.height_px} px",
    )


def _line(console: Console, text: str, *, style: str | None = None) -> None:
    # Names of files are data: no markup in them counts, no control character is shown.
    console.print(printable(text), markup=False, style=style)
