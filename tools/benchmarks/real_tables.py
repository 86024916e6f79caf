"""Public tables of real samples, read from a folder that is given; the project ships none of them.

text_lengths.parquet            source, prompt_tokens (may be missing), response_tokens
omnibal_internvl_joint.parquet  tiles, llm_tokens, visual_tokens, text_tokens of InternVL training sets
image_sizes.parquet             width, height; joined at random with the captions of text_lengths.parquet

Rows of the Azure and Mooncake sources are in order of arrival. Reading needs pyarrow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tools.benchmarks.image_patches import PATCHES_PER_TOKEN, image_patches

IntArray = npt.NDArray[np.int64]

TEXT_FILE = "text_lengths.parquet"
JOINT_FILE = "omnibal_internvl_joint.parquet"
IMAGE_FILE = "image_sizes.parquet"
CAPTIONS = "multi30k_caption"
PATCHES_PER_TILE = 1024
JOIN_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Columns int64 [n] of samples: text and visual tokens, encoder sequences, their patches and squares of patches."""

    text: IntArray
    visual: IntArray
    images: IntArray
    patches: IntArray
    patch_squares: IntArray

    def take(self, index: IntArray) -> "Rows":
        """The rows `index` [m]."""
        return Rows(
            text=self.text[index],
            visual=self.visual[index],
            images=self.images[index],
            patches=self.patches[index],
            patch_squares=self.patch_squares[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RealTable:
    """One workload: the files it needs and how they are read."""

    files: tuple[str, ...]
    read: Callable[[Path], Rows]

    def is_in(self, folder: Path) -> bool:
        """Whether all files are there."""
        return all((folder / name).is_file() for name in self.files)


def only_text(text: IntArray) -> Rows:
    """Rows without images."""
    zeros = np.zeros(len(text), np.int64)
    return Rows(text=text, visual=zeros, images=zeros, patches=zeros, patch_squares=zeros)


@cache
def _columns(path: Path, names: tuple[str, ...]) -> dict[str, npt.NDArray[np.generic]]:
    from pyarrow.parquet import read_table

    table = read_table(path, columns=list(names))
    return {name: table.column(name).to_numpy() for name in names}


def _text_lengths(folder: Path, source: str) -> IntArray:
    columns = _columns(folder / TEXT_FILE, ("source", "prompt_tokens", "response_tokens"))
    here = np.array([str(name).startswith(source) for name in columns["source"]])
    prompt = np.nan_to_num(columns["prompt_tokens"][here].astype(np.float64)).astype(np.int64)
    lengths: IntArray = prompt + columns["response_tokens"][here].astype(np.int64)
    return lengths


def _read_text(source: str, folder: Path) -> Rows:
    return only_text(_text_lengths(folder, source))


def _read_joint(folder: Path) -> Rows:
    columns = _columns(folder / JOINT_FILE, ("tiles", "visual_tokens", "text_tokens"))
    tiles = columns["tiles"].astype(np.int64)
    return Rows(
        text=columns["text_tokens"].astype(np.int64),
        visual=columns["visual_tokens"].astype(np.int64),
        images=tiles,
        patches=tiles * PATCHES_PER_TILE,
        patch_squares=tiles * PATCHES_PER_TILE**2,
    )


def _read_images(folder: Path) -> Rows:
    """A picture and a caption each; which caption goes with which picture is drawn at random."""
    columns = _columns(folder / IMAGE_FILE, ("width", "height"))
    patches = image_patches(columns["width"].astype(np.float64), columns["height"].astype(np.float64))
    captions = _text_lengths(folder, CAPTIONS)
    generator = np.random.Generator(np.random.Philox(JOIN_SEED))
    return Rows(
        text=captions[generator.integers(0, len(captions), len(patches))],
        visual=patches // PATCHES_PER_TOKEN,
        images=np.ones(len(patches), np.int64),
        patches=patches,
        patch_squares=patches * patches,
    )


def _text_table(source: str) -> RealTable:
    return RealTable(files=(TEXT_FILE,), read=partial(_read_text, source))


REAL_TABLES: Mapping[str, RealTable] = MappingProxyType(
    {
        "real_azure_conversations": _text_table("azure_llm_2023_conv"),
        "real_azure_code": _text_table("azure_llm_2023_code"),
        "real_mooncake_conversations": _text_table("mooncake_fast25_conv"),
        "real_mooncake_synthetic": _text_table("mooncake_fast25_synth"),
        "real_captions": _text_table(CAPTIONS),
        "real_alt_texts": _text_table("laion400m_alt_text"),
        "real_internvl": RealTable(files=(JOINT_FILE,), read=_read_joint),
        "real_image_captions": RealTable(files=(TEXT_FILE, IMAGE_FILE), read=_read_images),
    }
)

ARRIVAL_TABLES = ("real_azure_conversations", "real_azure_code", "real_mooncake_conversations")
"""Tables whose rows are in order of arrival."""
