"""Encoder tokens of many images at once, by `smart_resize` of Qwen2.5-VL with its default limits.

`dataloaders.estimators.qwen2_5_vl` is the rule one image at a time; a test compares the two.
"""

import numpy as np
import numpy.typing as npt

PATCHES_PER_TOKEN = 4
FACTOR_PX = 28
MIN_PX = 56 * 56
MAX_PX = 1280 * FACTOR_PX**2
MAX_ASPECT = 200


def image_patches(width_px: npt.NDArray[np.float64], height_px: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Patches of images [m]. Shapes beyond 200 : 1, which the rule refuses, are cut to it."""
    width = np.minimum(width_px, MAX_ASPECT * height_px)
    height = np.minimum(height_px, MAX_ASPECT * width_px)
    columns = np.maximum(np.rint(width / FACTOR_PX), 1)
    rows = np.maximum(np.rint(height / FACTOR_PX), 1)
    area = columns * rows * FACTOR_PX**2
    shrink = np.sqrt(width * height / MAX_PX)
    grow = np.sqrt(MIN_PX / (width * height))
    columns = np.where(area > MAX_PX, np.maximum(np.floor(width / shrink / FACTOR_PX), 1), columns)
    rows = np.where(area > MAX_PX, np.maximum(np.floor(height / shrink / FACTOR_PX), 1), rows)
    columns = np.where(area < MIN_PX, np.ceil(width * grow / FACTOR_PX), columns)
    rows = np.where(area < MIN_PX, np.ceil(height * grow / FACTOR_PX), rows)
    return (columns * rows).astype(np.int64) * PATCHES_PER_TOKEN
