"""Quantiles of public tables, from which the shipped workloads are drawn.

Only summary numbers are here, never rows. Sources: text lengths of the Azure LLM inference traces 2023 (CC BY 4.0)
and Mooncake (Apache-2.0); captions tokenised from Flickr30k, alt texts of LAION-400M (CC BY 4.0); image sizes of
PASCAL VOC, TACO, SROIE and documentation figures; durations of ActivityNet 1.3 (MIT repository) and MS-ASL; request
statistics of ServeGen as published; tiles per image and text of four InternVL training sets as a coarse fit to the
published medians (that table has no licence, so nothing finer is shipped).
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Probabilities of the length tables below.
LENGTH_LEVELS = (
    *(0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    *(0.95, 0.98, 0.99, 0.995, 0.999, 1.0),
)

AZURE_CONVERSATION_TOKENS = (
    *(64, 197, 296, 368, 434, 473, 491, 506, 528, 800, 1319, 1412, 1444, 1469, 1494, 1522, 1558, 1628, 1998, 2820),
    *(4136, 4186, 4259, 4915, 6301, 14089),
)
MOONCAKE_CONVERSATION_TOKENS = (
    *(895, 963, 1120, 1343, 1588, 2038, 2692, 3635, 4563, 5291, 6200, 7255, 8529, 9886, 11572, 13574, 15658, 18246),
    *(21903, 27723, 40052, 66760, 85851, 101068, 121894, 126527),
)
CAPTION_TOKENS = (*(2, 6, 7, 8, 9, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 19, 21, 25, 29, 33, 37, 48, 85),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDomain:
    """Sizes of one kind of picture at SIZE_LEVELS: square root of the area in px, and width / height."""

    share: float
    side_px: tuple[int, ...]
    aspect: tuple[float, ...]


SIZE_LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

# Shares are ours (a mixture for instruction tuning); sizes and shapes are those of the tables.
IMAGE_DOMAINS: Mapping[str, ImageDomain] = {
    "web photo": ImageDomain(
        share=0.45,
        side_px=(188, 386, 408, 433, 433, 447, 500),
        aspect=(0.28, 0.67, 1.33, 1.33, 1.49, 1.52, 7.0),
    ),
    "phone photo": ImageDomain(
        share=0.15,
        side_px=(302, 987, 2701, 3464, 3464, 3603, 4899),
        aspect=(0.21, 0.46, 0.75, 0.75, 1.33, 1.5, 4.3),
    ),
    "document or figure": ImageDomain(
        share=0.25,
        side_px=(28, 51, 149, 238, 324, 600, 4711),
        aspect=(0.1, 0.7, 1.0, 1.32, 2.15, 4.78, 20.5),
    ),
    "screenshot": ImageDomain(
        share=0.10,
        side_px=(28, 32, 438, 744, 1274, 2771, 11139),
        aspect=(0.1, 0.78, 1.25, 1.78, 2.53, 5.73, 40.0),
    ),
    "scanned receipt": ImageDomain(
        share=0.05,
        side_px=(242, 772, 958, 1188, 1385, 5900, 5900),
        aspect=(0.26, 0.34, 0.42, 0.5, 0.59, 0.71, 3.3),
    ),
}

# Seconds of video at DURATION_LEVELS: trimmed clips (MS-ASL) and whole videos (ActivityNet).
DURATION_LEVELS = (0.0, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0)
CLIP_SECONDS = (0.3, 1.0, 1.3, 1.8, 2.4, 3.1, 4.2, 4.9, 6.3, 9.0)
VIDEO_SECONDS = (1.6, 17.9, 29.0, 69.3, 113.6, 160.2, 210.8, 224.3, 236.6, 975.1)

# ServeGen, vision-language requests as published: images per request, text, output, tokens of a single image.
SERVEGEN_IMAGES = (0, 1, 2, 3, 4, 6, 9, 16, 30, 49)
SERVEGEN_IMAGE_SHARES = (0.006, 0.80, 0.067, 0.077, 0.02, 0.015, 0.009, 0.004, 0.0015, 0.0005)
SERVEGEN_LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
SERVEGEN_TEXT_TOKENS = (4, 20, 45, 106, 420, 1500, 2359, 4200, 24000)
SERVEGEN_OUTPUT_TOKENS = (1, 10, 35, 100, 190, 280, 338, 700, 2000)
SERVEGEN_SINGLE_IMAGE_TOKENS = (4, 230, 460, 820, 1130, 1230, 1260, 1280, 1280)
SERVEGEN_OTHER_IMAGE_TOKENS = (4, 80, 180, 340, 550, 820, 1000, 1230, 1280)

# InternVL: shares of tiles per image over four sets, and text beside them.
INTERNVL_TILES = (1, 3, 4, 5)
INTERNVL_TILE_SHARES = (0.09, 0.34, 0.01, 0.56)
INTERNVL_LEVELS = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
INTERNVL_TEXT_TOKENS = (35, 44, 90, 230, 640, 1250)
