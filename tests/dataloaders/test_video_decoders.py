"""Video decoders: every registered one gives the frames that decoding from the start gives, or says why not."""

import io
import json
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataloaders.counts import MediaKind
from dataloaders.decode import Conformed, PlannedItem, decode_media, decode_video
from dataloaders.errors import DataError, MediaError, Reason
from dataloaders.probe import ProbeLimits, probe_video
from dataloaders.video_decoders import DECODERS, BackendFailed, Clip, choose, measure_health, self_test, take_frames
from dataloaders.video_decoders.base import Picker, Picture, Shot, Taken
from dataloaders.video_decoders.builtin_clip import NUM_FRAMES, builtin_clip, number_shown
from dataloaders.video_decoders.frame_groups import Irregular
from dataloaders.video_decoders.vetting import container_of
from dataloaders.video_decoders.with_decord import DecordReader
from dataloaders.video_decoders.with_pyav import PyavDecoder, _take

SLOW = PyavDecoder(skip_groups=False)
X264 = "keyint=12:min-keyint=12:scenecut=0:threads=1"
X265 = f"{X264.replace(':threads=1', '')}:log-level=none:pools=1:frame-threads=1"


@pytest.fixture(params=sorted(DECODERS))
def name(request: pytest.FixtureRequest) -> str:
    """Every registered decoder that can be used here."""
    problem = DECODERS[request.param].problem()
    if problem:
        pytest.skip(problem)
    return str(request.param)


@lru_cache(maxsize=32)
def moving(
    codec: str,
    container: str,
    options: str = "",
    *,
    num_frames: int = 40,
    group: int = 12,
    pixels: str = "yuv420p",
    muxing: str = "",
    uneven: bool = False,
) -> bytes:
    """A clip of 96 x 64 px in which a picture moves, so that no two frames are alike."""
    rng = np.random.default_rng(3)
    scene = np.asarray(Image.fromarray(rng.integers(0, 256, (16, 20, 3), dtype=np.uint8)).resize((320, 160)))
    out = io.BytesIO()
    with av.open(out, "w", format=container, options=json.loads(muxing or "{}")) as file:
        stream = file.add_stream(codec, rate=25, options=json.loads(options or "{}"))
        stream.width, stream.height, stream.pix_fmt = 96, 64, pixels
        if uneven:
            stream.codec_context.time_base = Fraction(1, 50)
        stream.codec_context.thread_count, stream.codec_context.gop_size = 1, group
        for number in range(num_frames):
            part = scene[number : number + 64, 2 * number : 2 * number + 96]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(part), format="rgb24")
            if uneven:
                frame.pts, frame.time_base = 2 * number + number % 2 + 40 * (number > 20), Fraction(1, 50)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def x264(extra: str = "") -> str:
    return json.dumps({"x264-params": f"{X264}{extra}"})


def x265(extra: str = "") -> str:
    return json.dumps({"x265-params": f"{X265}{extra}"})


LAG = json.dumps({"auto-alt-ref": "1", "lag-in-frames": "16"})
FRAGMENTS = '{"movflags": "frag_keyframe+empty_moov"}'
GENERATED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "H.264 with B-frames": (("libx264", "mp4", x264(":bframes=3")), {}),
    "H.264 with open groups": (("libx264", "mp4", x264(":bframes=3:open-gop=1")), {}),
    "H.264 with open groups in matroska": (("libx264", "matroska", x264(":bframes=3:open-gop=1")), {}),
    "H.264 with intra refresh": (("libx264", "matroska", x264(":intra-refresh=1:bframes=2")), {}),
    "H.264 with a pyramid": (("libx264", "mp4", x264(":bframes=8:b-pyramid=normal:ref=5")), {}),
    "H.264 interlaced": (("libx264", "mp4", x264(":interlaced=1")), {}),
    "H.264 of 10 bits": (("libx264", "mp4", x264()), {"pixels": "yuv420p10le"}),
    "H.264 in fragments": (("libx264", "mp4", x264(":bframes=3")), {"muxing": FRAGMENTS}),
    "H.264 with headers at key frames": (("libx264", "mp4", x264(":repeat-headers=1")), {}),
    "H.264 of uneven rate": (("libx264", "mp4", x264(":bframes=3")), {"uneven": True}),
    "H.264 in MPEG-TS": (("libx264", "mpegts", x264(":bframes=3")), {}),
    "HEVC with open groups": (("libx265", "mp4", x265()), {}),
    "HEVC with closed groups": (("libx265", "matroska", x265(":open-gop=0")), {}),
    "VP8 with hidden frames": (("libvpx", "webm", LAG), {}),
    "VP9 with hidden frames": (("libvpx-vp9", "webm", LAG), {}),
    "VP9 in MP4": (("libvpx-vp9", "mp4", LAG), {}),
    "AV1": (("libsvtav1", "mp4", '{"preset": "12"}'), {}),
    "Motion JPEG in MP4": (("mjpeg", "mp4"), {"pixels": "yuvj420p"}),
    "Motion JPEG in AVI": (("mjpeg", "avi"), {"pixels": "yuvj420p"}),
    "MPEG-4 with B-frames": (("mpeg4", "mp4", '{"bf": "2"}'), {}),
    "MPEG-4 with B-frames in AVI": (("mpeg4", "avi", '{"bf": "2"}'), {}),
    "MPEG-2": (("mpeg2video", "mpeg", '{"bf": "2"}'), {}),
    "FLV": (("flv", "flv"), {}),
}


def made(kind: str) -> bytes:
    arguments, options = GENERATED[kind]
    try:
        av.codec.Codec(arguments[0], "w")
    except ValueError:
        pytest.skip(f"PyAV without {arguments[0]}")
    return moving(*arguments, **options)


def some_of(num_frames: int) -> list[list[int]]:
    rng = np.random.default_rng(num_frames)
    few = sorted(rng.choice(num_frames, size=min(5, num_frames), replace=False).tolist())
    return [[0], [num_frames - 1], [num_frames // 2] * 2, few]


def assert_like_from_the_start(
    take: Callable[[Clip, Sequence[int], Callable[[Picture], Any]], Taken[Any]], data: bytes, what: str
) -> None:
    clip = Clip(data=data, place=what)
    total = SLOW.take(clip, (10**6,), np.shape).num_frames
    assert total
    every = SLOW.take(clip, range(min(total, 200)), np.copy).frames
    for wanted in some_of(len(every)):
        taken = take(clip, wanted, np.copy)
        assert (taken.repeated, taken.bad_packets) == (0, 0), (what, wanted)
        for number, picture in zip(wanted, taken.frames, strict=True):
            assert np.array_equal(picture, every[number]), (what, wanted, number, taken)


# --- Exactness


@pytest.mark.parametrize("kind", GENERATED)
def test_every_decoder_gives_the_frames_that_decoding_from_the_start_gives(kind: str, name: str) -> None:
    assert_like_from_the_start(lambda *arguments: take_frames(*arguments, decoder=name), made(kind), kind)


SOUND = 250_000  # bytes: larger files tell nothing new here


def sound_files(shared_dir: Path) -> Iterator[Path]:
    for path in sorted((shared_dir / "media" / "videos").iterdir()):
        damaged = any(word in path.name for word in ("corrupt", "trunc", "empty"))
        if not damaged and path.stat().st_size < SOUND:
            yield path


def test_every_decoder_gives_them_on_the_reference_files(shared_dir: Path, name: str) -> None:
    for path in sound_files(shared_dir):
        assert_like_from_the_start(
            lambda *arguments: take_frames(*arguments, decoder=name), path.read_bytes(), path.name
        )


SKIPPING = {"H.264 with B-frames", "H.264 in fragments", "HEVC with closed groups", "VP8 with hidden frames"}
SKIPPING |= {"VP9 with hidden frames", "VP9 in MP4", "AV1", "Motion JPEG in MP4", "H.264 with headers at key frames"}


@pytest.mark.parametrize("kind", sorted(SKIPPING))
def test_groups_without_a_wanted_frame_are_not_decoded(kind: str) -> None:
    clip = Clip(data=made(kind))
    last = SLOW.take(clip, (10**6,), np.shape).num_frames - 1  # type: ignore[operator]
    assert PyavDecoder().take(clip, [last], np.shape).num_packets <= 20 < SLOW.take(clip, [last], np.shape).num_packets


@pytest.mark.parametrize("kind", ["H.264 with open groups", "H.264 with intra refresh", "HEVC with open groups"])
def test_a_key_frame_that_forgets_nothing_opens_no_group(kind: str) -> None:
    clip = Clip(data=made(kind))
    # One group, so all is decoded up to the last frame, as from the start.
    assert PyavDecoder().take(clip, [39], np.shape).num_packets == 40


def test_an_edit_list_hides_frames_from_every_decoder(shared_dir: Path, name: str) -> None:
    data = (shared_dir / "media" / "videos" / "v_g_edit.mp4").read_bytes()
    wanted = [0, 60, 121]
    truth = SLOW.take(Clip(data=data), wanted, np.copy).frames
    taken = take_frames(Clip(data=data), wanted, np.copy, decoder=name)
    assert all(np.array_equal(a, b) for a, b in zip(taken.frames, truth, strict=True))
    assert taken.fallback == ("decord: it counts 167 frames where the probe counts 122" if name == "decord" else "")


@pytest.mark.parametrize("turned", [False, True])
def test_vd04_every_decoder_turns_frames_as_they_are_shown(turned: bool, name: str) -> None:
    taken = DECODERS[name].take(
        Clip(data=builtin_clip(turned=turned)), range(NUM_FRAMES), lambda it: number_shown(it, turned=turned)
    )
    assert taken.frames == list(range(NUM_FRAMES))
    assert probe_video(builtin_clip(turned=turned)).rotation == (-90 if turned else 0)


# --- Missing and damaged frames


@given(
    wanted=st.lists(st.integers(0, 30), min_size=1, max_size=12).map(sorted),
    there=st.sets(st.integers(0, 30), min_size=1, max_size=12),
)
def test_a_missing_frame_is_the_last_good_one_before_it(wanted: list[int], there: set[int]) -> None:
    picker = Picker(wanted, lambda picture: int(picture[0, 0, 0]))
    for number in sorted(there):
        picker.add(Shot(number=number, picture=np.full((1, 1, 3), number, dtype=np.uint8)))
    picker.finish()
    before = [[number for number in there if number <= each] for each in wanted]
    assert picker.frames == [max(numbers, default=min(there)) for numbers in before]
    assert picker.repeated == sum(each not in there for each in wanted)


def damaged(data: bytes, broken: Sequence[int]) -> bytes:
    """The clip with the packets of these numbers overwritten."""
    with av.open(io.BytesIO(data)) as file:
        packets = [(packet.pos, packet.size) for packet in file.demux(video=0) if packet.size]
    out = bytearray(data)
    for number in broken:
        start, size = packets[number]
        out[start : start + size] = bytes([0xFF]) * size
    return bytes(out)


def test_vd01_a_damaged_packet_costs_its_own_frame_and_shifts_no_other() -> None:
    sound = made("H.264 with headers at key frames")
    every = SLOW.take(Clip(data=sound), range(40), np.copy).frames
    clip = Clip(data=damaged(sound, [13]))
    taken = take_frames(clip, [0, 30, 39], np.copy, decoder="pyav")
    assert all(np.array_equal(a, every[n]) for a, n in zip(taken.frames, [0, 30, 39], strict=True))
    assert (taken.repeated, taken.bad_packets) == (0, 0)  # the damaged group was not needed
    through = take_frames(clip, range(40), np.copy, decoder="pyav")
    assert through.bad_packets >= 1
    assert np.array_equal(through.frames[30], every[30])


def test_what_is_taken_of_a_damaged_file_does_not_depend_on_what_else_is_wanted(shared_dir: Path) -> None:
    data = (shared_dir / "media" / "videos" / "v_dec_corrupted.mp4").read_bytes()
    clip = Clip(data=data)
    every = take_frames(clip, range(50), np.copy, decoder="pyav")
    assert (every.repeated, every.bad_packets) == (1, 1)
    for number in (0, 20, 35, 49):
        assert np.array_equal(take_frames(clip, [number], np.copy, decoder="pyav").frames[0], every.frames[number])


def test_vd01_a_header_that_promised_more_frames_repeats_the_last_one(name: str) -> None:
    taken = take_frames(Clip(data=builtin_clip()), [3, 11, 12, 40], number_shown, decoder=name)
    assert (taken.frames, taken.repeated, taken.bad_packets) == ([3, 11, 11, 11], 2, 0)


def test_a_clip_above_the_bad_frame_budget_is_refused(name: str) -> None:
    data = damaged(builtin_clip(), [1, 2, 3, 4, 6, 7, 8])
    clip = Clip(data=data, place="shard a.tar, key 7")
    with pytest.raises(MediaError, match=r"max_bad_frames=0\.5") as caught:
        take_frames(clip, range(NUM_FRAMES), number_shown, decoder=name)
    assert caught.value.reason is Reason.CORRUPT
    assert "shard a.tar, key 7" in str(caught.value)
    lenient = replace(clip, limits=ProbeLimits(max_bad_frames=0.9))
    taken = take_frames(lenient, range(NUM_FRAMES), number_shown, decoder=name)
    assert (taken.bad_packets, len(taken.frames)) == (7, NUM_FRAMES)
    with pytest.raises(MediaError, match="max_bad_frames=6"):
        take_frames(replace(clip, limits=ProbeLimits(max_bad_frames=6)), range(NUM_FRAMES), np.shape, decoder=name)
    none = Clip(data=damaged(builtin_clip(), [11]), limits=ProbeLimits(max_bad_frames=0))
    with pytest.raises(MediaError, match="1 of 12 packets"):
        take_frames(none, range(NUM_FRAMES), np.shape, decoder=name)


def test_repeats_without_damage_are_no_bad_frames() -> None:
    ProbeLimits(max_bad_frames=0).check_bad_frames(bad=0, read=3, repeated=90, wanted=100, place="")
    with pytest.raises(ValueError, match="max_bad_frames"):
        ProbeLimits(max_bad_frames=-1)


# --- Choice, fallback, report


def plan(data: bytes, num_frames: int) -> PlannedItem:
    meta = probe_video(data)
    return PlannedItem(
        kind=MediaKind.VIDEO,
        grid=(num_frames // 2, 4, 4),
        height_px=56,
        width_px=56,
        frames=num_frames,
        frame_indices=np.linspace(0, meta.num_frames - 1, num_frames).astype(np.int64),
        source_height_px=meta.height_px,
        source_width_px=meta.width_px,
    )


def test_a_fallback_is_reported_and_changes_nothing_else() -> None:
    if DECODERS["decord"].problem():
        pytest.skip("no decord")
    data = made("AV1")
    patches, report = decode_media(data, plan(data, 4), decoder="decord")
    assert report.fallback == "decord: codec av1 is not handed to it"
    assert not report
    assert report == Conformed(fallback=report.fallback)
    assert np.array_equal(patches, decode_video(data, plan(data, 4), decoder="pyav")[0])


@pytest.mark.parametrize("kind", ["H.264 with B-frames", "MPEG-4 with B-frames", "VP9 in MP4"])
def test_patches_are_equal_whatever_decoder_is_asked_for(kind: str, name: str) -> None:
    data = made(kind)
    patches, report = decode_video(data, plan(data, 6), decoder=name)
    assert (report.fallback, bool(report)) == ("", False)
    assert np.array_equal(patches, decode_video(data, plan(data, 6), decoder="auto")[0])


def test_an_unknown_decoder_is_named() -> None:
    with pytest.raises(DataError, match=r"decoder='opencv' is none of auto, pyav, decord, torchcodec"):
        choose("opencv")
    with pytest.raises(DataError, match="opencv"):
        decode_video(builtin_clip(), plan(builtin_clip(), 4), decoder="opencv")


class Lying:
    """A decoder that is a frame late."""

    name = "lying"

    def problem(self) -> str:
        return ""

    def take(self, clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Any]) -> Taken[Any]:
        return PyavDecoder().take(clip, [number + 1 for number in wanted], keep)


class Unturned(Lying):
    """A decoder that ignores the display rotation."""

    def take(self, clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Any]) -> Taken[Any]:
        return PyavDecoder().take(Clip(data=builtin_clip()), wanted, keep)


def test_the_self_test_finds_wrong_frames_and_wrong_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "plain clip" in self_test(Lying())
    assert "turned clip" in self_test(Unturned())
    assert self_test(PyavDecoder()) == ""
    monkeypatch.setitem(DECODERS, "pyav", Lying())  # type: ignore[arg-type]
    choose.cache_clear()
    try:
        with pytest.raises(DataError, match="decoder pyav cannot be used here: self-test on the plain clip"):
            choose("pyav")
        if not DECODERS["decord"].problem():
            monkeypatch.setitem(sys.modules, "torch", None)
            monkeypatch.delitem(sys.modules, "torch")
            assert choose("auto").name == "decord"  # the next healthy one
    finally:
        monkeypatch.undo()
        choose.cache_clear()
    assert choose("auto").name == "pyav"


def test_auto_imports_neither_torch_nor_decord() -> None:
    script = """
import sys
from dataloaders.video_decoders import choose
choose("auto")
print([name for name in ("torch", "torchcodec", "decord") if name in sys.modules])
"""
    assert run_script(script) == "[]"


def test_a_decoder_that_does_not_import_says_so_and_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchcodec", "torchcodec.decoders", "decord"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("torchcodec", "decord"):
        with pytest.raises(DataError, match=rf"decoder {name} cannot be used here: ModuleNotFoundError"):
            choose(name)
    assert choose("auto").name == "pyav"


def test_torchcodec_without_its_libraries_is_a_reason_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchcodec"
    package.mkdir()
    (package / "__init__.py").write_text('raise RuntimeError("\\nCould not load libtorchcodec.\\nLong list")')
    monkeypatch.syspath_prepend(tmp_path)
    for module in [each for each in sys.modules if each.split(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, module)
    assert DECODERS["torchcodec"].problem() == "RuntimeError: Could not load libtorchcodec."


# --- Processes


class Crashed(Exception):
    """A signal ended the process."""


def run_script(script: str, *arguments: str) -> str:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )
    if done.returncode < 0:
        raise Crashed(f"signal {-done.returncode}: {done.stderr[-2000:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_reader_is_not_pickled_and_refuses_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    if DECODERS["decord"].problem():
        pytest.skip("no decord")
    with DecordReader(builtin_clip()) as reader:
        with pytest.raises(TypeError, match="send the bytes"):
            pickle.dumps(reader)
        closed: list[bool] = []
        monkeypatch.setattr(reader, "close", lambda: closed.append(True))
        with monkeypatch.context() as forked:
            here = os.getpid()
            forked.setattr(os, "getpid", lambda: here + 1)
            with pytest.raises(DataError, match=f"of process {here} is used in process {here + 1}"):
                reader.shots([0])
            reader.__exit__()
            assert closed == []  # its threads are in the other process: closing would wait for them
    assert closed == [True]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_decord_reader_that_a_fork_has_copied_raises_where_decord_hangs() -> None:
    if DECODERS["decord"].problem():
        pytest.skip("no decord")
    script = """
import os
from dataloaders.errors import DataError
from dataloaders.video_decoders.builtin_clip import builtin_clip, number_shown
from dataloaders.video_decoders.with_decord import DecordReader
with DecordReader(builtin_clip()) as reader:
    shots = reader.shots([0, 3])
    assert number_shown(next(shots).picture) == 0
    child = os.fork()
    if child == 0:
        try:
            reader.shots([3])
        except DataError:
            with DecordReader(builtin_clip()) as own:
                os._exit(7 if number_shown(next(own.shots([5])).picture) == 5 else 1)
        os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert number_shown(next(shots).picture) == 3
"""
    assert run_script(script) == "7"


WORKERS = """
import multiprocessing, sys
from dataloaders.video_decoders import Clip, take_frames
from dataloaders.video_decoders.builtin_clip import builtin_clip, number_shown
NAME, METHOD = sys.argv[1], sys.argv[2]

def early_stop(number):
    return take_frames(Clip(data=builtin_clip()), [number % 9], number_shown, decoder=NAME).frames[0] - number % 9

if __name__ == "__main__":
    early_stop(0)  # the parent has used the library, too
    with multiprocessing.get_context(METHOD).Pool(4) as pool:
        print(sum(map(abs, pool.map_async(early_stop, range(200), chunksize=5).get(timeout=100))))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_vd07_two_hundred_early_stops_in_four_workers_end(method: str, name: str, tmp_path: Path) -> None:
    if name == "pyav":
        pytest.skip("test_media_cases.py has it")
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), name, method],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr[-2000:]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_vd05_two_thousand_opens_keep_memory_level(name: str) -> None:
    if name == "pyav":
        pytest.skip("test_media_cases.py has it")
    script = """
import os, sys
from dataloaders.video_decoders import DECODERS
from dataloaders.video_decoders.health import memory_growth
before = len(os.listdir("/proc/self/fd"))
print(memory_growth(DECODERS[sys.argv[1]], 2000), len(os.listdir("/proc/self/fd")) - before)
"""
    grown, handles = run_script(script, name).split()
    assert int(grown) < 50 * 1024**2
    assert int(handles) <= 2  # what a library opens once and keeps


# --- Hostile files


PLAYLISTS = {
    "HLS": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
    "DASH": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>http://127.0.0.1:9/</BaseURL></MPD>',
    "session description": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nm=video 9 RTP/AVP 96\n",
    "an ID3 tag before a playlist": b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + b"#EXTM3U\nhttp://127.0.0.1:9/a.ts\n",
}


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_file_that_names_others_reaches_no_library(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("with_decord", "with_torchcodec"):
        monkeypatch.setattr(f"dataloaders.video_decoders.{module}._library", lambda: pytest.fail("handed over"))
    assert container_of(PLAYLISTS[kind][:16]) == ""
    if name != "pyav":
        with pytest.raises(BackendFailed, match="container unknown"):
            DECODERS[name].take(Clip(data=PLAYLISTS[kind]), [0], np.shape)
    with pytest.raises(MediaError):
        PyavDecoder().take(Clip(data=PLAYLISTS[kind]), [0], np.shape)


def test_ceilings_hold_before_a_library_sees_the_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("with_decord", "with_torchcodec"):
        monkeypatch.setattr(f"dataloaders.video_decoders.{module}._library", lambda: pytest.fail("handed over"))
    data = builtin_clip()
    at = data.index(b"stsz")
    claims = data[: at + 8] + struct.pack(">II", 40, 2**31) + data[at + 16 :]  # 2^31 samples of one size
    small = ProbeLimits(max_frame_pixels=96 * 64 - 1)
    for clip, text in (
        (Clip(data=claims), "2147483648 samples"),
        (Clip(data=data, limits=small), "max_frame_pixels"),
        (Clip(data=data, limits=ProbeLimits(max_bytes=100)), "max_bytes"),
        (Clip(data=b""), "0 bytes"),
    ):
        with pytest.raises(MediaError, match=text):
            DECODERS[name].take(clip, [0], np.shape)


MUTATED = """
import sys
import numpy as np
from dataloaders.errors import MediaError
from dataloaders.video_decoders.base import Clip
from dataloaders.video_decoders.choice import take_frames

rng = np.random.default_rng(11)
original = open(sys.argv[2], "rb").read()
outcomes = set()
for _ in range(60):
    data = bytearray(original)
    for position in rng.integers(0, len(data), size=int(rng.integers(1, 12))):
        data[position] = int(rng.integers(0, 256))
    try:
        taken = take_frames(Clip(data=bytes(data)), [0, 5, 11], np.copy, decoder=sys.argv[1])
    except MediaError:
        outcomes.add("refused")
    else:
        assert len(taken.frames) == 3
        outcomes.add("frames")
print(*sorted(outcomes))
"""


def test_mutated_clips_end_in_frames_or_a_reason(name: str, tmp_path: Path) -> None:
    """In a process of its own: decord may crash on such bytes, now and then, and takes its process with it. A loader
    worker that this happens to is replaced (test_worker_pool.py)."""
    (tmp_path / "clip").write_bytes(builtin_clip())
    try:
        outcomes = run_script(MUTATED, name, str(tmp_path / "clip"))
    except Crashed:
        assert name == "decord"
    else:
        assert outcomes == "frames refused"


# --- Unusual streams and the measurement


def test_a_stream_without_a_fresh_start_is_irregular_and_decoded_all_the_same() -> None:
    clip = Clip(data=made("MPEG-4 with B-frames"))
    with pytest.raises(Irregular):
        _take(clip, [3], np.shape, by_groups=True)
    assert PyavDecoder().take(clip, [3], np.shape).frames == [(64, 96, 3)]


def test_health_tells_exact_wrong_and_refused_apart(tmp_path: Path) -> None:
    (tmp_path / "plain.mp4").write_bytes(made("H.264 with B-frames"))
    (tmp_path / "cut.mp4").write_bytes(made("H.264 with B-frames")[:60])

    class Refusing(Lying):
        def take(self, clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Any]) -> Taken[Any]:
            raise BackendFailed("not today")

    decoders = {"pyav": PyavDecoder(), "lying": Lying(), "refusing": Refusing()}
    rows = {
        row.decoder: row
        for row in measure_health(sorted(tmp_path.iterdir()), decoders, num_frames=4, repeats=1, opens=0)
    }
    assert [row.files for row in rows.values()] == [1, 1, 1]  # the cut file has no truth to compare with
    assert (rows["pyav"].exact, rows["pyav"].wrong, rows["pyav"].refused) == (1, (), {})
    assert (rows["lying"].exact, rows["lying"].wrong) == (0, ("plain.mp4",))
    assert rows["refusing"].refused == {"plain.mp4": "not today"}
