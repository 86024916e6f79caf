"""What is inside the demo corpus: captions agree with the pixels, files are what the recipe asked for.

The measurements here are independent of `dataloaders.demo.facts`: Pillow's own HSV, all pixels, all frames.
"""

import importlib.util
import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageOps

from dataloaders.demo import DEMO_PROCESSOR, build_demo_corpus
from dataloaders.demo.facts import BRIGHTNESS, COLOURS, HUES, MOTIONS
from dataloaders.demo.recipe import SampleSpec, plan_samples
from dataloaders.estimators import estimator_from_config

if not all(importlib.util.find_spec(package) for package in ("skimage", "sklearn")):
    pytest.skip("the photographs come with mllm-balancer[train]", allow_module_level=True)

NUM_SAMPLES, SEED = 60, 3
ORIENTATION = 0x0112


@dataclass
class Sample:
    spec: SampleSpec
    record: dict[str, Any]
    media: dict[str, bytes] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        return str(self.record["messages"][1]["content"])

    @property
    def question(self) -> str:
        content = self.record["messages"][0]["content"]
        if isinstance(content, str):
            return content
        return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    corpus = build_demo_corpus(
        tmp_path_factory.mktemp("content"), seed=SEED, num_samples=NUM_SAMPLES, samples_per_shard=20
    )
    specs, found = plan_samples(NUM_SAMPLES, SEED), []
    for shard in corpus.shards:
        found += _read(shard, specs)
    assert len(found) == NUM_SAMPLES
    return found


def _read(shard: Path, specs: tuple[SampleSpec, ...]) -> list[Sample]:
    found: list[Sample] = []
    with tarfile.open(shard) as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            data = tar.extractfile(member).read()  # type: ignore[union-attr]
            if suffix == "json":  # the JSON opens every sample
                found.append(Sample(specs[int(key)], json.loads(data)))
                assert found[-1].record["id"] == key
            else:
                assert found[-1].record["id"] == key
                found[-1].media[suffix] = data
    return found


def _of_kind(samples: list[Sample], *kinds: str) -> list[Sample]:
    return [sample for sample in samples if sample.spec.kind in kinds]


def _pixels(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as opened:
        return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))


def _frames(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _independent_facts(rgb: np.ndarray) -> tuple[str, str]:
    """Colour and brightness by Pillow's HSV (hue in 256 steps) over every pixel."""
    hsv = np.asarray(Image.fromarray(rgb.reshape(-1, rgb.shape[-2], 3)).convert("HSV")).reshape(-1, 3).astype(float)
    hue, saturation, value = hsv[:, 0] * 360 / 256, hsv[:, 1] / 255, hsv[:, 2] / 255
    coloured = (saturation >= 0.25) & (value >= 0.06)
    counts = [np.sum(coloured & (np.abs((hue - centre + 180) % 360 - 180) < 30)) for centre in range(0, 360, 60)]
    colour = HUES[int(np.argmax(counts))] if coloured.mean() >= 0.35 else "neutral"
    mean = value.mean()
    return colour, "dark" if mean < 0.38 else "medium" if mean < 0.62 else "bright"


def test_captions_of_pictures_agree_with_an_independent_measurement(samples: list[Sample]) -> None:
    checked = 0
    for sample in _of_kind(samples, "image", "images"):
        measured = [_independent_facts(_pixels(data)) for data in sample.media.values()]
        truth = sample.record["truth"]
        assert measured == list(zip(truth["colour"], truth["brightness"], strict=True)), sample.record["id"]
        checked += len(measured)
    assert checked > 40


def test_captions_of_clips_agree_with_an_independent_measurement(samples: list[Sample]) -> None:
    for sample in _of_kind(samples, "clip"):
        truth = sample.record["truth"]
        frames = _frames(sample.media["mp4"])[::7]  # not those that the build has measured
        assert _independent_facts(frames) == (truth["colour"][0], truth["brightness"][0])


def _shift(first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
    """(dy, dx) by which the content moved, from the peak of the phase correlation."""
    window = np.hanning(first.shape[0])[:, None] * np.hanning(first.shape[1])[None, :]
    spectrum = np.fft.fft2((second - second.mean()) * window) * np.conj(np.fft.fft2((first - first.mean()) * window))
    peak = np.abs(np.fft.ifft2(spectrum / (np.abs(spectrum) + 1e-3)))
    dy, dx = np.unravel_index(int(peak.argmax()), peak.shape)
    height, width = first.shape
    return (int(dy) + height // 2) % height - height // 2, (int(dx) + width // 2) % width - width // 2


def _zoom_error(near: np.ndarray, far: np.ndarray) -> float:
    """How badly the centre of `far`, enlarged by the best factor, explains `near`."""
    height, width = far.shape
    picture, errors = Image.fromarray(far.astype(np.uint8)), []
    for factor in np.arange(1.2, 2.3, 0.1):
        half_w, half_h = width / factor / 2, height / factor / 2
        box = (width / 2 - half_w, height / 2 - half_h, width / 2 + half_w, height / 2 + half_h)
        errors.append(float(np.abs(np.asarray(picture.resize((width, height), box=box), dtype=float) - near).mean()))
    return min(errors)


def test_the_camera_moves_where_the_caption_says(samples: list[Sample]) -> None:
    # The content moves against the camera.
    expected = {"left": (0, 1), "right": (0, -1), "up": (1, 0), "down": (-1, 0)}
    seen = set()
    for sample in _of_kind(samples, "clip"):
        motion, frames = sample.record["truth"]["motion"], _frames(sample.media["mp4"]).max(axis=3).astype(float)
        seen.add(motion)
        if motion in expected:
            step = min(len(frames) - 1, 20)
            assert tuple(np.sign(_shift(frames[0], frames[step]))) == expected[motion], sample.record["id"]
        else:
            grows = _zoom_error(frames[-1], frames[0]) < _zoom_error(frames[0], frames[-1])
            assert grows == (motion == "in"), sample.record["id"]
    assert seen == set(MOTIONS)


def test_every_fact_stands_in_the_answer_as_often_as_it_is_listed(samples: list[Sample]) -> None:
    words = {*COLOURS, *BRIGHTNESS, *MOTIONS}
    for sample in samples:
        facts = sample.record["facts"]
        assert set(facts) <= words
        for fact in set(facts):
            assert sample.answer.count(fact) == facts.count(fact), sample.answer


def test_facts_are_the_measured_ones(samples: list[Sample]) -> None:
    for sample in _of_kind(samples, "image", "images", "clip"):
        truth = sample.record["truth"]
        known = {*truth["colour"], *truth["brightness"], truth.get("motion")}
        assert sample.record["facts"]
        assert set(sample.record["facts"]) <= known


def test_a_list_of_colours_is_in_the_order_of_the_pictures(samples: list[Sample]) -> None:
    lists = [sample for sample in _of_kind(samples, "images") if "each" in sample.question]
    assert lists
    for sample in lists:
        colours = [_independent_facts(_pixels(data))[0] for _, data in sorted(sample.media.items())]
        assert sample.answer == ", ".join(f"{i} {colour}" for i, colour in enumerate(colours, 1)) + "."


def test_questions_do_not_give_the_answer_away(samples: list[Sample]) -> None:
    for sample in _of_kind(samples, "image", "images", "clip"):
        listed = sum(word in sample.question for word in BRIGHTNESS)
        assert listed in (0, 3)  # none, or all the choices
        assert not any(word in sample.question for word in COLOURS)


def test_questions_and_answers_about_media_are_short(samples: list[Sample]) -> None:
    for sample in _of_kind(samples, "image", "images", "clip"):
        assert len(sample.answer.encode()) <= 66
        assert len(sample.question.rsplit("\n", 1)[-1].encode()) <= 60


def test_placeholders_match_the_media_in_both_spellings(samples: list[Sample]) -> None:
    spellings = set()
    for sample in samples:
        images = sum(not suffix.endswith("mp4") for suffix in sample.media)
        assert sample.question.count("<image>") == images
        assert sample.question.count("<video>") == len(sample.media) - images
        spellings.add(type(sample.record["messages"][0]["content"]))
        assert [message["role"] for message in sample.record["messages"]] == ["user", "assistant"]
    assert spellings == {str, list}


def test_text_only_samples_have_no_media_and_no_facts(samples: list[Sample]) -> None:
    texts = _of_kind(samples, "text")
    assert texts
    for sample in texts:
        assert not sample.media
        assert sample.record["facts"] == []
        assert sample.answer


def test_pictures_have_the_displayed_size_and_format_of_the_recipe(samples: list[Sample]) -> None:
    formats = set()
    for sample in _of_kind(samples, "image", "images"):
        for (suffix, data), spec in zip(sample.media.items(), sample.spec.pictures, strict=True):
            height, width, _ = _pixels(data).shape
            assert (width, height) == (spec.width_px, spec.height_px)
            name = Image.open(io.BytesIO(data)).format
            assert {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[str(name)] == suffix.split(".")[-1] == spec.format
            formats.add(name)
    assert formats == {"JPEG", "PNG", "WEBP"}


def test_orientation_is_written_and_the_stored_pixels_are_turned(samples: list[Sample]) -> None:
    orientations = set()
    for sample in _of_kind(samples, "image", "images"):
        for data, spec in zip(sample.media.values(), sample.spec.pictures, strict=True):
            with Image.open(io.BytesIO(data)) as opened:
                assert opened.getexif().get(ORIENTATION, 1) == spec.orientation
                turned = spec.orientation in (5, 6, 7, 8)
                stored = (spec.height_px, spec.width_px) if turned else (spec.width_px, spec.height_px)
                assert opened.size == stored
            orientations.add(spec.orientation)
    assert {1, 6, 8} <= orientations
    assert orientations & {5, 6, 7, 8}


def test_some_pictures_have_one_channel(samples: list[Sample]) -> None:
    modes = {
        Image.open(io.BytesIO(data)).mode for s in _of_kind(samples, "image", "images") for data in s.media.values()
    }
    assert modes == {"RGB", "L"}


def test_clips_are_h264_of_the_planned_length(samples: list[Sample]) -> None:
    for sample in _of_kind(samples, "clip"):
        spec = sample.spec.clip
        assert spec is not None
        with av.open(io.BytesIO(sample.media["mp4"])) as container:
            stream = container.streams.video[0]
            assert stream.codec_context.name == "h264"
            assert (stream.width, stream.height) == (spec.width_px, spec.height_px)
            assert stream.average_rate == pytest.approx(float(spec.fps), rel=1e-3)
            assert stream.frames == spec.num_frames == len(list(container.decode(stream)))
            assert 1 <= spec.num_frames / float(spec.fps) <= 12


def test_costs_of_the_real_files_are_heavy_tailed(samples: list[Sample]) -> None:
    estimator = estimator_from_config(DEMO_PROCESSOR)
    pictures = [_pixels(data).shape for s in _of_kind(samples, "image", "images") for data in s.media.values()]
    tokens = sorted(estimator.image(width, height).llm_tokens for height, width, _ in pictures)
    assert tokens[0] <= 12
    assert 230 <= tokens[-1] <= 256
    assert tokens[-1] > 2 * tokens[len(tokens) // 2]
