"""The photographs of the demo corpus: where they lie, where they came from and under which licence.

They ship inside the wheels of scikit-learn and scikit-image, so the demo downloads nothing. The files are found without
importing those packages (an import would cost seconds). Some are grey; the corpus tints all of them, see `render`.

The table `PHOTOS` gives origin and licence of each, as the packages state them (README of `sklearn/datasets/images`,
docstrings of `skimage.data`); `ORIGINS` is the same as Markdown and lies beside every corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from dataloaders.errors import SourceError

INSTALL = 'Install the packages that ship the photographs: pip install "mllm-balancer[train]"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Photo:
    """One source photograph.

    Attributes:
        package: import name of the package whose wheel holds it; `distribution` is its name for pip.
        path: path inside the package folder.
        trim: share cut from each edge before use (some photographs have a black frame).
    """

    package: str
    path: str
    shows: str
    origin: str
    licence: str
    trim: float = 0.0

    @property
    def distribution(self) -> str:
        """The name under which pip knows the package."""
        return {"sklearn": "scikit-learn", "skimage": "scikit-image"}[self.package]

    @property
    def name(self) -> str:
        """File name."""
        return self.path.rsplit("/", 1)[-1]


def _sklearn(name: str, shows: str, origin: str) -> Photo:
    return Photo(package="sklearn", path=f"datasets/images/{name}", shows=shows, origin=origin, licence="CC BY 2.0")


def _skimage(name: str, shows: str, origin: str, licence: str = "CC0 1.0", trim: float = 0.0) -> Photo:
    return Photo(package="skimage", path=f"data/{name}", shows=shows, origin=origin, licence=licence, trim=trim)


PHOTOS: tuple[Photo, ...] = (
    _sklearn("china.jpg", "a Chinese temple tower", "danielbuechele, https://www.flickr.com/photos/danielbuechele/"),
    _sklearn("flower.jpg", "a dahlia", "vultilion, https://www.flickr.com/photos/vultilion/"),
    _skimage("astronaut.png", "the astronaut Eileen Collins", "NASA Great Images database", "public domain"),
    _skimage("chelsea.png", "a cat", "Stefan van der Walt"),
    _skimage("coffee.png", "a cup of coffee", "Rachel Michetti, courtesy of Pikolo Espresso Bar"),
    _skimage("rocket.jpg", "Falcon 9 on the launch pad", "SpaceX, flickr 16511594820", "public domain"),
    _skimage(
        "ihc.png", "stained tissue", "Center for Microscopy And Molecular Imaging", "no known copyright restrictions"
    ),
    _skimage("retina.jpg", "a retina", "Mikael Häggström, Wikimedia Commons", trim=0.18),
    _skimage("camera.png", "a man with a camera", "Lav Varshney"),
    _skimage("brick.png", "a brick pavement", "CC0Textures, Bricks25"),
    _skimage("grass.png", "grass", "linolafett, DeviantArt 434853879"),
    _skimage("gravel.png", "gravel", "CC0Textures, Gravel04"),
)


def _origins(photos: Sequence[Photo]) -> str:
    rows = [f"| {p.name} | {p.distribution} | {p.shows} | {p.origin} | {p.licence} |" for p in photos]
    head = ["| file | shipped by | shows | origin | licence |", "|---|---|---|---|---|"]
    note = "Every picture and clip of the corpus is cropped, resized and tinted from one of these."
    return "\n".join([note, "", *head, *rows]) + "\n"


ORIGINS = _origins(PHOTOS)
"""Markdown table of all source photographs with origin and licence, for the documentation and the corpus folder."""


def photo_path(photo: Photo) -> Path:
    """Path of the photograph in the installed package.

    Raises:
        SourceError: the package or the file is not there; names the extra to install.
    """
    try:
        spec = find_spec(photo.package)
    except ValueError:  # a half-initialised module of that name in sys.modules
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(f"The demo corpus needs {photo.distribution}, which is not installed", remedy=INSTALL)
    for folder in spec.submodule_search_locations:
        path = Path(folder) / photo.path
        if path.is_file():
            return path
    raise SourceError(
        f"The installed {photo.distribution} does not hold the photograph {photo.path}",
        place=str(next(iter(spec.submodule_search_locations))),
        remedy=INSTALL,
    )


@lru_cache(maxsize=len(PHOTOS))
def load_photo(index: int) -> Image.Image:
    """`PHOTOS[index]` as RGB, black frame trimmed. Decoded once; callers must not change it.

    Raises:
        SourceError: see `photo_path`.
    """
    photo = PHOTOS[index]
    with Image.open(photo_path(photo)) as opened:
        picture = opened.convert("RGB")
    if photo.trim:
        width, height = picture.size
        dx, dy = round(width * photo.trim), round(height * photo.trim)
        picture = picture.crop((dx, dy, width - dx, height - dy))
    return picture
