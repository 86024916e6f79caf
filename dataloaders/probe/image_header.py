"""What every image header parser returns."""

from typing import NamedTuple


class ImageHeader(NamedTuple):
    """Facts of one image file, before the orientation switch and the ceilings are applied.

    Attributes:
        format: Pillow's name of the format.
        width_px, height_px: size of the pixels as the decoder gives them before orientation is applied.
        mode: Pillow's mode of the pixels.
        orientation: EXIF value 1..8.
        frames: of the animation, pages of the file.
        frames_exact: False where counting stopped early, or the file claims what it cannot hold: `frames` are sure.
        turned: whether the decoder of this format turns the pixels itself, whatever the orientation switch says.
        decodable: False where no decoder is known; what needs a plug-in (HEIC) is decided later.
    """

    format: str
    width_px: int
    height_px: int
    mode: str
    orientation: int = 1
    frames: int = 1
    frames_exact: bool = True
    turned: bool = False
    decodable: bool = True
