"""Ways to learn the sizes of media in tar shards: ours, and the packages people use, called as they are.

    images, clips   header of every medium, by range reads into the shard (what an index costs)
    index           a whole pass that ends with a table or a stream of samples

A method is a function of the shards that returns how many media it has understood. Packages are imported on first use.
"""

import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, BinaryIO, TypeAlias

from dataloaders.estimators import estimator_from_config
from dataloaders.probe import probe_image, probe_video
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource

Method: TypeAlias = Callable[[Sequence[Path]], int]
PACKAGES = ("PIL", "imagesize", "av", "decord", "webdataset", "megatron.energon")
_DISTRIBUTIONS = {"PIL": "pillow", "megatron.energon": "megatron-energon"}


def installed_versions() -> dict[str, str]:
    """Version of each package that is installed."""
    return {
        _DISTRIBUTIONS.get(name, name): importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
        for name in PACKAGES
        if _is_installed(name)
    }


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class Member:
    """One medium in a shard by offset: the `ByteReader` of a data set that reads with pread."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self._descriptor, self._offset, self.size = descriptor, offset, size

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of the medium."""
        return os.pread(self._descriptor, min(size, self.size - offset), self._offset + offset)


@contextmanager
def members(shards: Sequence[Path], extensions: tuple[str, ...] = (".jpg", ".mp4", ".mkv")) -> Iterator[list[Member]]:
    """Media of the shards; the member table is made before the clock runs, for all methods alike."""
    files: list[BinaryIO] = []
    found: list[Member] = []
    try:
        for shard in shards:
            files.append(open(shard, "rb"))  # noqa: SIM115  closed below, when the caller is done
            with tarfile.open(shard) as tar:
                found += [Member(files[-1].fileno(), m.offset_data, m.size) for m in tar if m.name.endswith(extensions)]
        yield found
    finally:
        for file in files:
            file.close()


def header_methods(found: Sequence[Member], kind: str) -> Mapping[str, Callable[[], int]]:
    """name -> method over the members of one kind: `images`, or one of clips."""
    return {
        name: partial(_count_understood, call, found)
        for name, (package, call) in (_IMAGES if kind == "images" else _CLIPS).items()
        if not package or _is_installed(package)
    }


def _count_understood(call: Callable[[Member], object], found: Sequence[Member]) -> int:
    return sum(call(member) is not None for member in found)


def _imagesize(member: Member) -> object:
    imagesize: Any = importlib.import_module("imagesize")
    return imagesize.get(io.BytesIO(member.read(0, 65_536)))


def _pil_open(member: Member) -> object:
    image: Any = importlib.import_module("PIL.Image")
    return image.open(io.BytesIO(member.read(0, 65_536))).size


def _pil_exif(member: Member) -> object:
    image: Any = importlib.import_module("PIL.Image")
    opened = image.open(io.BytesIO(member.read(0, 65_536)))
    opened.getexif().get(0x0112)
    return opened.size


def _pil_decode(member: Member) -> object:
    image: Any = importlib.import_module("PIL.Image")
    return image.open(io.BytesIO(member.read(0, member.size))).convert("RGB").size


def _pyav_open(member: Member) -> object:
    av: Any = importlib.import_module("av")
    with av.open(io.BytesIO(member.read(0, member.size))) as container:
        stream = container.streams.best("video")
        return stream.width, stream.height, stream.frames


def _pyav_demux(member: Member) -> object:
    av: Any = importlib.import_module("av")
    with av.open(io.BytesIO(member.read(0, member.size))) as container:
        return sum(packet.size > 0 for packet in container.demux(container.streams.best("video")))


def _decord_open(member: Member) -> object:
    decord: Any = importlib.import_module("decord")
    reader = decord.VideoReader(io.BytesIO(member.read(0, member.size)), num_threads=1)
    return len(reader), reader.get_avg_fps()


def _ours_scan(shards: Sequence[Path]) -> int:
    index = scan_source(
        TarSource([str(shard) for shard in shards]), estimator_from_config({"model_type": "qwen2_5_vl"})
    )
    return int((index.samples["llm_tokens"] > 0).sum())


def _wds_stream(shards: Sequence[Path]) -> int:
    wds: Any = importlib.import_module("webdataset")
    return sum(1 for _ in wds.WebDataset([str(shard) for shard in shards], shardshuffle=False))


def _wds_decode(shards: Sequence[Path]) -> int:
    wds: Any = importlib.import_module("webdataset")
    return sum(1 for _ in wds.WebDataset([str(shard) for shard in shards], shardshuffle=False).decode("pil"))


def _tarfile_index(shards: Sequence[Path]) -> int:
    count = 0
    for shard in shards:
        with tarfile.open(shard) as tar:
            count += sum(not member.name.endswith(".txt") for member in tar)
    return count


def _energon(shards: Sequence[Path], *, with_media: bool) -> int:
    prepare: Any = importlib.import_module("megatron.energon.flavors.webdataset.prepare").WebdatasetPreparator
    extractor: Any = importlib.import_module("megatron.energon.media.extractor")
    epath: Any = importlib.import_module("megatron.energon.epathlib").EPath
    media = extractor.MediaFilterConfig.parse(None, False, True) if with_media else None
    with TemporaryDirectory() as folder:  # it writes its index beside the shards
        for shard in shards:
            os.link(shard, Path(folder, shard.name)) if _same_device(shard, folder) else shutil.copy(shard, folder)
        with redirect_stdout(io.StringIO()):
            prepare.prepare_dataset(
                epath(folder),
                [shard.name for shard in shards],
                split_parts_ratio=[("train", 1.0)],
                workers=1,
                media_filter=media,
            )
        counts = json.loads(Path(folder, ".nv-meta", ".info.json").read_text(encoding="utf-8"))["shard_counts"]
        return int(sum(counts.values()))


def _same_device(shard: Path, folder: str) -> bool:
    return shard.stat().st_dev == os.stat(folder).st_dev


_Header: TypeAlias = tuple[str, Callable[[Member], object]]  # the package it needs, and what it does
_IMAGES: Mapping[str, _Header] = MappingProxyType(
    {
        "ours: probe_image": ("", probe_image),
        "imagesize on 64 KiB": ("imagesize", _imagesize),
        "PIL open on 64 KiB": ("PIL", _pil_open),
        "PIL open and EXIF": ("PIL", _pil_exif),
        "PIL decode": ("PIL", _pil_decode),
    }
)
_CLIPS: Mapping[str, _Header] = MappingProxyType(
    {
        "ours: probe_video": ("", probe_video),
        "PyAV open": ("av", _pyav_open),
        "PyAV demux": ("av", _pyav_demux),
        "decord open": ("decord", _decord_open),
    }
)
_INDEX: Mapping[str, tuple[str, Method]] = MappingProxyType(
    {
        "ours: scan (sizes, tokens, labels)": ("", _ours_scan),
        "tarfile, member table only": ("", _tarfile_index),
        "webdataset, undecoded": ("webdataset", _wds_stream),
        'webdataset, decode("pil")': ("webdataset", _wds_decode),
        "energon prepare": ("megatron.energon", partial(_energon, with_media=False)),
        "energon prepare with media sizes": ("megatron.energon", partial(_energon, with_media=True)),
    }
)


def index_methods(shards: Sequence[Path]) -> Mapping[str, Callable[[], int]]:
    """name -> a whole pass over the shards."""
    return {
        name: partial(run, shards) for name, (package, run) in _INDEX.items() if not package or _is_installed(package)
    }
