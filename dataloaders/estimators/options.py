"""Options of a model folder as transformers reads them, and what every tiling estimator shares.

    processor_config.json  >  preprocessor_config.json  >  config.json  >  default of the class

A key that is null counts as absent, as it does in transformers' image processors. Sizes come in several spellings:
448, [448, 448], {"height": 448, "width": 448}, {"shortest_edge": 448}, {"longest_edge": 448}.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators.files import Config, ProcessorFiles


def option(files: ProcessorFiles, name: str, default: Any = None) -> Any:
    """The value of `name`, from the first file that has one."""
    for source in (files.processor, files.image, files.model):
        if source.get(name) is not None:
            return source[name]
    return default


def switch(settings: Config, name: str, default: bool) -> bool:
    """A boolean option; null and absent give the default."""
    value = settings.get(name)
    return default if value is None else bool(value)


def vision_config(files: ProcessorFiles) -> Config:
    """The `vision_config` of `config.json`; empty where absent."""
    return files.model.get("vision_config") or {}


def first(name: str, *sources: Config | None, default: Any = None) -> Any:
    """The value of `name` in the first of these mappings that has one."""
    return next((source[name] for source in sources if source and source.get(name) is not None), default)


def side(value: Any, name: str) -> int:
    """The side of a square, in any spelling of a size.

    Raises:
        DataError: as `size_px`, or the sides differ.
    """
    height, width = size_px(value, name)
    if height != width:
        raise DataError(f"{name}={value!r}: height and width must be equal")
    return height


def size_px(value: Any, name: str) -> tuple[int, int]:
    """(height, width) of any spelling of a size; an edge stands for a square.

    Raises:
        DataError: another spelling, or a side that is no positive integer.
    """
    if isinstance(value, Mapping):
        edges = [value[key] for key in ("shortest_edge", "longest_edge") if value.get(key) is not None]
        sides: list[Any] = edges[:1] * 2 if value.get("height") is None else [value["height"], value.get("width")]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        sides = list(value) * (2 if len(value) == 1 else 1)
    else:
        sides = [value, value]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise DataError(f"{name}={value!r}: needs a positive side, or height and width")
    return sides[0], sides[1]


def tower_px(files: ProcessorFiles, default: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of the images that the vision tower is made for."""
    size = vision_config(files).get("image_size")
    return default if size is None else size_px(size, "vision_config.image_size")


def patch_px(files: ProcessorFiles, default: int) -> int:
    """Side of a patch: of the processor, else of the tower."""
    value = option(files, "patch_size", vision_config(files).get("patch_size"))
    height, width = size_px(default if value is None else value, "patch_size")
    if height != width:
        raise DataError(f"patch_size={value!r}: patches that are not square")
    return height


def tile_px(files: ProcessorFiles, *, default: int, crops: bool, square: bool) -> tuple[int, int]:
    """(height, width) that an image processor makes of any image: its centre crop, else its resize.

    Args:
        default: side in the image processor's class.
        crops: the class crops the centre unless it is told otherwise.
        square: what is resized is square already, so an edge stands for both sides.

    Raises:
        DataError: the size would depend on the image, which the tower does not take.
    """
    standard = tower_px(files, (default, default))
    if switch(files.image, "do_center_crop", crops):
        crop = files.image.get("crop_size")
        return standard if crop is None else size_px(crop, "crop_size")
    require_resize(files.image)
    size = files.image.get("size")
    if size is None:
        return standard
    if isinstance(size, Mapping) and size.get("height") is None and not square:
        raise DataError(
            f"size={dict(size)!r} without do_center_crop: the size would depend on the image",
            remedy="Set do_center_crop and crop_size, or height and width.",
        )
    return size_px(size, "size")


def require_resize(*settings: Config) -> None:
    """Raises DataError where resizing is off, so that counts would depend on the pixels that the files have."""
    if not all(switch(one, "do_resize", True) for one in settings):
        raise DataError("do_resize is false: sizes would depend on the files alone", remedy="Set do_resize to true.")


def require_absent(settings: Config, *names: str) -> None:
    """Raises DataError for the first of these options that is set (not null): the rule does not cover it."""
    for name in names:
        if settings.get(name) is not None:
            raise DataError(f"{name}={settings[name]!r} is not supported by this estimator", remedy="Set it to null.")


def require_positive(owner: object, *names: str) -> None:
    """Raises DataError for the first of these attributes that is not above zero."""
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise DataError(f"{type(owner).__name__}.{name}={value!r}: must be positive")


def fingerprint(rule: str, config: Any, *texts: str) -> str:
    """Digest of a rule's name and version, its configuration (a dataclass or its dict), and what counts texts."""
    settings = config if isinstance(config, Mapping) else asdict(config)
    return hashlib.sha256(json.dumps([rule, settings, *texts], sort_keys=True).encode()).hexdigest()


def check_sides(width_px: int, height_px: int, *, least_px: int = 1) -> None:
    """Raises UnfitError for a side below `least_px`."""
    if width_px < least_px or height_px < least_px:
        raise UnfitError(
            Reason.TOO_SMALL,
            f"{width_px}x{height_px} px: a side is below {least_px} px",
            remedy="Enlarge or drop the item.",
            nearest_size_px=(max(width_px, least_px), max(height_px, least_px)),
        )


class ImagesOnly:
    """The video side of an estimator whose processor takes no videos.

    Attributes:
        rule: the rule in words; errors name it.
    """

    rule: str

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Raises MediaError: `unsupported_media`."""
        raise self._no_videos()

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Raises MediaError: `unsupported_media`."""
        raise self._no_videos()

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """Raises MediaError: `unsupported_media`."""
        raise self._no_videos()

    def _no_videos(self) -> MediaError:
        return MediaError(
            Reason.UNSUPPORTED_MEDIA,
            f"no videos in {self.rule}",
            remedy="Drop the item, or choose a model that takes videos.",
        )
