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
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeAlias

from dataloaders.estimators import estimator_from_config
from dataloaders.probe import probe_image, probe_video
from dataloaders.scan import scan_source
from dataloaders.tar_source import MemberReader, TarSource

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


def members(shards: Sequence[Path], extensions: tuple[str, ...] = (".jpg", ".mp4", ".mkv")) -> list[MemberReader]:
    """Media of the shards by range reads; the member table is made before the clock runs, for all methods alike."""
    source = TarSource([str(shard) for shard in shards])
    return [
        source.media_reader(i, j)
        for i in range(len(source))
        for j, ref in enumerate(source.record(i).media)
        if ref.member.endswith(extensions)
    ]


def header_methods(found: Sequence[MemberReader], kind: str) -> Mapping[str, Callable[[], int]]:
    """name -> method over the members of one kind: `images`, or one of clips."""
    return {
        name: partial(_count_understood, call, found)
        for name, (package, call) in (_IMAGES if kind == "images" else _CLIPS).items()
        if not package or _is_installed(package)
    }


def _count_understood(call: Callable[[MemberReader], object], found: Sequence[MemberReader]) -> int:
    return sum(call(member) is not None for member in found)


def _imagesize(member: MemberReader) -> object:
    imagesize: Any = importlib.import_module("imagesize")
    return imagesize.get(io.BytesIO(member.read(0, 65_536)))


def _pil_open(member: MemberReader) -> object:
    image: Any = importlib.import_module("PIL.Image")
    return image.open(io.BytesIO(member.read(0, 65_536))).size


def _pil_exif(member: MemberReader) -> object:
    image: Any = importlib.import_module("PIL.Image")
    opened = image.open(io.BytesIO(member.read(0, 65_536)))
    opened.getexif().get(0x0112)
    return opened.size


def _pil_decode(member: MemberReader) -> object:
    image: Any = importlib.import_module("PIL.Image")
    return image.open(io.BytesIO(member.read(0, member.size))).convert("RGB").size


def _pyav_open(member: MemberReader) -> object:
    av: Any = importlib.import_module("av")
    with av.open(io.BytesIO(member.read(0, member.size))) as container:
        stream = container.streams.best("video")
        return stream.width, stream.height, stream.frames


def _pyav_demux(member: MemberReader) -> object:
    av: Any = importlib.import_module("av")
    with av.open(io.BytesIO(member.read(0, member.size))) as container:
        return sum(packet.size > 0 for packet in container.demux(container.streams.best("video")))


def _decord_open(member: MemberReader) -> object:
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
            Path(folder, shard.name).symlink_to(shard)
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


_Header: TypeAlias = tuple[str, Callable[[MemberReader], object]]  # the package it needs, and what it does
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
