"""LLaVA, InternVL, Pixtral, Gemma and relatives: the recorded oracle, golden values, options, and common properties."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config
from dataloaders.estimators.nearest_ratio import grids

Files = dict[str, Any]

CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
CLIP_336 = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def square(side: int, **options: Any) -> Files:
    return {"size": {"height": side, "width": side}, **options}


def files(model_type: str, image: Files | None = None, processor: Files | None = None, **more: Any) -> Files:
    """A folder: config.json with `more`, and the files that are given."""
    folder: Files = {"config": {"model_type": model_type, **more}}
    if image is not None:
        folder["preprocessor_config"] = image
    if processor is not None:
        folder["processor_config"] = processor
    return folder


def internvl(**options: Any) -> Files:
    return files("internvl", square(448, crop_to_patches=False, **options), vision_config={"patch_size": [14, 14]})


INTERNVL_CHAT = {
    "model_type": "internvl_chat",
    "force_image_size": 448,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "downsample_ratio": 0.5,
    "vision_config": {"image_size": 448, "patch_size": 14},
}
GEMMA3 = square(896, do_pan_and_scan=None, pan_and_scan_min_crop_size=None, image_seq_length=256)

# Family of the oracle -> a folder as it is published.
IMAGES: dict[str, Files] = {
    "llava_1_5": files("llava", CLIP_336, {"processor_class": "LlavaProcessor", **LLAVA}, vision_config=CLIP),
    "llava_next(v1.6,anyres)": files(
        "llava_next",
        {**CLIP_336, "image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS},
        {"processor_class": "LlavaNextProcessor", **LLAVA},
        vision_config=CLIP,
    ),
    "llava_onevision(anyres_max_9)": files(
        "llava_onevision",
        square(384, image_processor_type="LlavaOnevisionImageProcessor"),
        {"num_image_tokens": 729, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        vision_config=SIGLIP,
    ),
    "internvl2/2.5/3(max12)": {"config": INTERNVL_CHAT},
    "internvl2/2.5/3(max6,train default)": internvl(max_patches=6),
    "gemma3(pan_and_scan=False)": files("gemma3", GEMMA3),
    "gemma3(pan_and_scan=True)": files("gemma3", {**GEMMA3, "do_pan_and_scan": True}),
    "gemma3n": files("gemma3n", square(768, image_processor_type="SiglipImageProcessorFast")),
    "paligemma(224)": files("paligemma", square(224, image_seq_length=256)),
    "paligemma(448)": files("paligemma", square(448, image_seq_length=1024)),
    "paligemma(896)": files("paligemma", square(896, image_seq_length=4096)),
    "pixtral_12b": files(
        "llava",
        {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}},
        {"processor_class": "PixtralProcessor", "patch_size": 16},
        vision_config={"model_type": "pixtral", "patch_size": 16},
    ),
    "mistral3(Small3.1/3.2)": files(
        "mistral3",
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    ),
    "deepseek_vl(v1)": files("deepseek_vl", square(384), {"num_image_tokens": 576}),
    "chameleon": files("chameleon", {"crop_size": {"height": 512, "width": 512}, "size": {"shortest_edge": 512}}),
    "got_ocr2(single)": files("got_ocr2", square(1024)),
    "fuyu": files("fuyu", {"size": {"height": 1080, "width": 1920}, "patch_size": {"height": 30, "width": 30}}),
    "cohere2_vision(approx text)": files("cohere2_vision", square(512)),
    "aria(980,split=False)": files("aria", {"max_image_size": 980, "min_image_size": 336}),
    "aria(980,split=True)": files("aria", {"max_image_size": 980, "min_image_size": 336, "split_image": True}),
}
VIDEOS: dict[str, Files] = {
    "llava_onevision@video(32f)": {
        **IMAGES["llava_onevision(anyres_max_9)"],
        "video_preprocessor_config": {"num_frames": 32, "do_sample_frames": True},
    },
    "internvl@video(8f)": {**internvl(), "video_preprocessor_config": {"num_frames": 8}},
}
OTHERS: dict[str, Files] = {"gemma4": {"config": {"model_type": "gemma4"}}}
ALL = {**IMAGES, **VIDEOS, **OTHERS}
SIDES = st.integers(1, 5000)


def of(name: str) -> TokenEstimator:
    return estimator_from_config(ALL[name])


@pytest.mark.parametrize("family", IMAGES)
def test_every_image_of_the_oracle(family: str, oracle: Callable[[str], list[dict[str, Any]]]) -> None:
    rows, estimator = oracle(family), of(family)
    assert len(rows) >= 247
    for row in rows:
        counts = estimator.image(row["w"], row["h"])
        got = {"llm_tokens": counts.llm_tokens, "embed_tokens": counts.visual_tokens, "patches": counts.patches}
        want = {key: row[key] for key in got if row[key] is not None}
        assert want.items() <= got.items(), (row["w"], row["h"])


@pytest.mark.parametrize("family", VIDEOS)
def test_every_video_of_the_oracle(family: str, oracle: Callable[[str], list[dict[str, Any]]]) -> None:
    rows, estimator = oracle(family), of(family)
    assert len(rows) >= 21
    for row in rows:
        clip = (row["w"], row["h"], row["src_frames"], row["fps"], row["duration"])
        if row["error"]:
            with pytest.raises(UnfitError) as caught:
                estimator.video(*clip)
            assert caught.value.reason is Reason.TOO_FEW_FRAMES
            continue
        counts = estimator.video(*clip)
        assert (counts.frames, counts.patches) == (row["sampled_frames"], row["patches"])
        assert (counts.visual_tokens, counts.llm_tokens) == (row["embed_tokens"], row["llm_tokens"])


GOLDEN_SIZES = [(224, 224), (640, 480), (1024, 768), (1920, 1080), (2480, 3508), (3000, 300), (1, 1)]
GOLDEN = {
    "llava_1_5": [576] * 7,
    "llava_next(v1.6,anyres)": [1176, 2340, 2340, 1948, 2256, 1160, 1176],
    "llava_onevision(anyres_max_9)": [1485, 2929, 4725, 7269, 7353, 3500, 1485],
    "internvl2/2.5/3(max12)": [258, 3330, 3330, 2306, 1794, 2818, 258],
    "internvl2/2.5/3(max6,train default)": [258, 1794, 1794, 770, 1794, 1794, 258],
    "gemma3(pan_and_scan=True)": [260, 795, 795, 795, 795, 1315, 260],
    "pixtral_12b": [210, 1230, 3120, 2340, 3008, 455, 2],
    "mistral3(Small3.1/3.2)": [72, 432, 1064, 1736, 2200, 336, 2],
    "fuyu": [72, 368, 936, 2340, 972, 455, 2],
    "gemma4": [258, 268, 268, 266, 268, 262, 258],
}


@pytest.mark.parametrize("family", GOLDEN)
def test_published_folders_give_published_counts(family: str) -> None:
    estimator = of(family)
    assert [estimator.image(*size).llm_tokens for size in GOLDEN_SIZES] == GOLDEN[family]


def fitting_size(estimator: TokenEstimator, width: int, height: int) -> tuple[int, int]:
    """The size itself, or the nearest one that its refusal names."""
    try:
        estimator.image(width, height)
    except UnfitError as error:
        return error.nearest_size_px or (0, 0)
    return width, height


def fitting_frames(estimator: TokenEstimator, num_frames: int) -> int:
    """The number itself, or the least one that its refusal names."""
    try:
        estimator.video(640, 360, num_frames, 25.0, num_frames / 25)
    except UnfitError as error:
        return error.nearest_frames or 0
    return num_frames


@pytest.mark.parametrize("family", ALL)
@given(width=SIDES, height=SIDES, num_images=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_counts_agree_with_their_parts_and_their_explanation(
    family: str, width: int, height: int, num_images: int
) -> None:
    estimator = of(family)
    width, height = fitting_size(estimator, width, height)
    counts = estimator.image(width, height, num_images=num_images)
    lines = estimator.explain_image(width, height, num_images=num_images)
    assert f"{width}x{height} px" in lines[0]
    assert lines[-1].endswith(f"= {counts.llm_tokens} LLM tokens")
    assert any(f"{counts.patches} patches" in line for line in lines) or family == "fuyu"
    assert 1 <= counts.visual_tokens <= counts.llm_tokens
    assert counts.full.total == counts.patches or family == "fuyu"
    assert counts.full.count in (counts.tiles, 0)
    copy = pickle.loads(pickle.dumps(estimator))
    assert copy.image(width, height, num_images=num_images) == counts


@pytest.mark.parametrize("family", [*VIDEOS, "gemma4"])
@given(num_frames=st.integers(0, 400), fps=st.sampled_from([0.0, 5.0, 29.97]), width=SIDES, height=SIDES)
@settings(max_examples=30, deadline=None)
def test_videos_agree_with_their_frames_and_their_explanation(
    family: str, num_frames: int, fps: float, width: int, height: int
) -> None:
    estimator = of(family)
    num_frames = fitting_frames(estimator, num_frames)
    clip = (num_frames, fps, num_frames / 25)
    counts = estimator.video(width, height, *clip)
    indices = estimator.frame_indices(*clip)
    assert indices.dtype == np.int64
    assert len(indices) == counts.frames == counts.grid[0] == counts.full.count
    assert np.all(np.diff(indices) >= 0)
    assert 0 <= indices[0] <= indices[-1] < num_frames
    assert counts.full.total == counts.patches
    assert estimator.explain_video(width, height, *clip)[-1].endswith(f"= {counts.llm_tokens} LLM tokens")


@pytest.mark.parametrize("family", ALL)
def test_a_side_below_a_pixel_is_too_small_and_says_what_would_do(family: str) -> None:
    for width, height in ((0, 10), (10, -1)):
        with pytest.raises(UnfitError) as caught:
            of(family).image(width, height)
        assert caught.value.reason is Reason.TOO_SMALL
        assert caught.value.nearest_size_px == (max(width, 1), max(height, 1))


@pytest.mark.parametrize("family", [name for name in IMAGES if "onevision" not in name and "max6" not in name])
def test_families_without_videos_refuse_them(family: str) -> None:
    estimator = of(family)
    for call in (
        lambda: estimator.video(640, 360, 100, 25.0, 4.0),
        lambda: estimator.frame_indices(100, 25.0, 4.0),
        lambda: estimator.explain_video(640, 360, 100, 25.0, 4.0),
    ):
        with pytest.raises(MediaError) as caught:
            call()
        assert caught.value.reason is Reason.UNSUPPORTED_MEDIA


def test_fingerprints_tell_configurations_and_texts_apart() -> None:
    prints = [of(name).fingerprint for name in ALL]
    assert len(set(prints)) == len(prints)
    assert prints == [of(name).fingerprint for name in ALL]
    for name in ("gemma3(pan_and_scan=True)", "gemma3n", "internvl@video(8f)", "gemma4"):
        assert estimator_from_config(ALL[name], count_text=len).fingerprint != of(name).fingerprint


def test_folders_nested_and_flat_mappings_say_the_same(tmp_path: Path) -> None:
    separate = IMAGES["mistral3(Small3.1/3.2)"]
    nested = {
        "config": separate["config"],
        "processor_config": {**separate["processor_config"], "image_processor": separate["preprocessor_config"]},
    }
    flat = {"model_type": "mistral3", "size": {"longest_edge": 1540}, "patch_size": 14, "spatial_merge_size": 2}
    for name, content in separate.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    prints = {estimator_from_config(source).fingerprint for source in (separate, nested, flat, tmp_path)}
    assert len(prints) == 1


# LLaVA-1.5 and other families of one tile


@pytest.mark.parametrize(
    ("image", "processor", "vision", "tokens", "patches"),
    [
        (CLIP_336, {**LLAVA, "vision_feature_select_strategy": "full"}, CLIP, 577, 577),
        (CLIP_336, None, CLIP, 576, 577),  # the tower's class token is added, and dropped
        (CLIP_336, {"patch_size": 14}, CLIP, 575, 577),  # as that processor counts
        ({"size": {"height": 384, "width": 384}}, {**LLAVA, "num_additional_image_tokens": 0}, SIGLIP, 728, 729),
        (square(384, image_processor_type="SiglipImageProcessor"), None, SIGLIP, 728, 729),
        ({**CLIP_336, "crop_size": 224, "size": 224}, LLAVA, {**CLIP, "patch_size": 16}, 256, 257),
        ({**CLIP_336, "do_center_crop": False, "size": [224, 448]}, LLAVA, CLIP, 16 * 32, 16 * 32 + 1),
        (None, None, CLIP, 576, 577),  # config.json alone
        ({"do_center_crop": True, "crop_size": None}, LLAVA, None, 256, 257),  # null: the default of the class
    ],
)
def test_llava_follows_its_processor_and_its_tower(
    image: Files | None, processor: Files | None, vision: Files | None, tokens: int, patches: int
) -> None:
    more = {} if vision is None else {"vision_config": vision}
    counts = estimator_from_config(files("llava", image, processor, **more)).image(640, 480)
    assert (counts.llm_tokens, counts.visual_tokens, counts.patches) == (tokens, tokens, patches)


def test_the_patch_of_the_processor_wins_over_that_of_the_tower() -> None:
    folder = files("llava", CLIP_336, {**LLAVA, "patch_size": 28}, vision_config=CLIP)
    assert estimator_from_config(folder).image(10, 10).llm_tokens == 144


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        (files("llava", {**CLIP_336, "do_center_crop": False}, LLAVA), "do_center_crop"),
        (files("llava", square(336, do_resize=False, do_center_crop=False), LLAVA), "do_resize"),
        (
            files("llava", CLIP_336, {**LLAVA, "vision_feature_select_strategy": "cls"}),
            "vision_feature_select_strategy",
        ),
        (files("paligemma", {"size": {"height": "224", "width": "224"}}), "size"),
        (files("paligemma", square(0)), "size"),
        (files("llava_next", CLIP_336, {**LLAVA, "patch_size": {"height": 14, "width": 16}}), "patch_size"),
        (files("llava_next", {**CLIP_336, "image_grid_pinpoints": [[224, 672]]}, LLAVA), "image_grid_pinpoints"),
        (files("llava_next", {**CLIP_336, "image_grid_pinpoints": "(1x1)"}, LLAVA), "image_grid_pinpoints"),
        (files("llava_onevision", square(384), {"vision_aspect_ratio": "square"}), "vision_aspect_ratio"),
        (internvl(min_patches=8, max_patches=4), "min_tiles"),
        ({**internvl(), "video_preprocessor_config": {"initial_shift": 0.0}}, "initial_shift"),
        (files("pixtral", {"do_resize": False}), "do_resize"),
        (files("gemma3", {**GEMMA3, "pan_and_scan_max_num_crops": 300}), "max_crops"),
        (files("fuyu", {"size": {"height": 1000, "width": 1920}}), "max_height_px"),
        (files("aria", {"max_image_size": 720}), "max_image_size"),
        (files("gemma4", {"max_soft_tokens": 100}), "max_soft_tokens"),
        ({**files("llava_onevision"), "video_preprocessor_config": {"num_frames": 8, "fps": 1}}, "fps"),
    ],
)
def test_options_that_are_not_covered_are_named(folder: Files, named: str) -> None:
    with pytest.raises(DataError, match=named):
        estimator_from_config(folder)


def test_paligemma_counts_what_its_image_processor_says() -> None:
    assert estimator_from_config(files("paligemma", square(448))).image(9, 9).llm_tokens == 1024
    assert estimator_from_config(files("paligemma", square(448, image_seq_length=77))).image(9, 9).llm_tokens == 77


# LLaVA-NeXT and LLaVA-OneVision


def test_one_of_several_images_is_a_single_tile_in_onevision() -> None:
    estimator = of("llava_onevision(anyres_max_9)")
    for width, height in ((640, 480), (5000, 3)):
        counts = estimator.image(width, height, num_images=2)
        assert (counts.llm_tokens, counts.tiles, counts.patches) == (730, 1, 729)
    assert estimator.image(640, 480).tiles == 5


def test_llava_next_video_pools_each_frame_by_four() -> None:
    folder = {
        **files("llava_next_video", {**CLIP_336, "image_grid_pinpoints": PINPOINTS}, LLAVA, vision_config=CLIP),
        "video_preprocessor_config": {**CLIP_336, "num_frames": 8},
    }
    estimator = estimator_from_config(folder)
    counts = estimator.video(640, 360, 300, 30.0, 10.0)
    assert (counts.llm_tokens, counts.patches, counts.frames, counts.tiles) == (8 * 144, 8 * 577, 8, 1)
    assert estimator.frame_indices(300, 30.0, 10.0).tolist() == [0, 37, 75, 112, 150, 187, 225, 262]
    assert estimator.explain_video(640, 360, 300, 30.0, 10.0)[-1].endswith("= 1152 LLM tokens")
    image = of("llava_next(v1.6,anyres)")
    assert estimator.image(1920, 1080).llm_tokens == image.image(1920, 1080).llm_tokens == 1948
    with pytest.raises(MediaError):
        image.video(640, 360, 300, 30.0, 10.0)


def test_the_first_of_equal_canvases_is_taken_in_the_order_of_the_configuration() -> None:
    # 10 x 10 px fit both canvases whole, and both waste as much.
    for first, second in (((336, 672), (672, 336)), ((672, 336), (336, 672))):
        folder = files("llava_next", {**CLIP_336, "image_grid_pinpoints": [first, second]}, LLAVA, vision_config=CLIP)
        canvas = estimator_from_config(folder).explain_image(10, 10)[0]
        assert canvas.endswith(f"canvas of {first[1]}x{first[0]} px")


# InternVL and GOT-OCR 2


def test_the_two_kinds_of_internvl_folders_agree() -> None:
    chat = estimator_from_config({**INTERNVL_CHAT, "max_dynamic_patch": 6})
    processor = of("internvl2/2.5/3(max6,train default)")
    sizes = [(w, h) for w in range(40, 2400, 173) for h in range(40, 2400, 211)]
    assert [chat.image(*size) for size in sizes] == [processor.image(*size) for size in sizes]


@pytest.mark.parametrize(
    ("change", "tiles", "tokens"),
    [
        ({}, 13, 3330),
        ({"use_thumbnail": False}, 12, 3074),
        ({"dynamic_image_size": False}, 1, 258),
        ({"max_dynamic_patch": 1}, 1, 258),
        ({"min_dynamic_patch": 4, "max_dynamic_patch": 5}, 5, 1282),
        ({"force_image_size": None, "vision_config": {"image_size": 224, "patch_size": 14}}, 13, 13 * 64 + 2),
        ({"downsample_ratio": 0.25}, 13, 13 * 64 + 2),
        ({"max_dynamic_patch": None}, 7, 1794),  # the class of the remote code has 6
    ],
)
def test_the_remote_code_folder_decides_tiles_and_tokens(change: Files, tiles: int, tokens: int) -> None:
    counts = estimator_from_config({**INTERNVL_CHAT, **change}).image(640, 480)
    assert (counts.tiles, counts.llm_tokens) == (tiles, tokens)


def test_grids_come_by_area_and_then_as_each_code_has_them() -> None:
    assert grids(1, 4) == ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1))
    for least, most in ((1, 12), (2, 6), (5, 40)):
        remote = set()
        for n in range(least, most + 1):
            for i in range(1, n + 1):
                for j in range(1, n + 1):
                    if least <= i * j <= most:
                        remote.add((i, j))
        expected = sorted(remote, key=lambda grid: grid[0] * grid[1])
        assert grids(least, most, remote_code=True) == tuple(expected)
        assert sorted(grids(least, most)) == sorted(expected)


def test_got_ocr_cuts_only_where_its_folder_says_so() -> None:
    whole = of("got_ocr2(single)").image(3000, 1000)
    cut = estimator_from_config(files("got_ocr2", square(1024, crop_to_patches=True, max_patches=3))).image(3000, 1000)
    assert (whole.tiles, whole.llm_tokens) == (1, 258)
    assert (cut.tiles, cut.llm_tokens, cut.patches) == (4, 1026, 4 * 4096)


def test_a_remote_code_folder_that_names_no_frames_takes_no_videos() -> None:
    with pytest.raises(MediaError, match="no videos in InternVL, remote code"):
        estimator_from_config(INTERNVL_CHAT).video(640, 360, 100, 25.0, 4.0)
    folder = {"config": INTERNVL_CHAT, "video_preprocessor_config": {"num_frames": 8}}
    assert estimator_from_config(folder).video(640, 360, 100, 25.0, 4.0).llm_tokens == 2103


def test_frame_labels_are_counted_by_the_text_counter() -> None:
    folder = {**internvl(), "video_preprocessor_config": {"num_frames": 11}}
    counts = estimator_from_config(folder, count_text=len).video(640, 360, 11, 25.0, 1.0)
    label = "\n".join(f"Frame{i + 1}: " for i in range(11))
    assert counts.llm_tokens == 11 * 258 + len(label)


# Pixtral, Mistral 3, Fuyu


@pytest.mark.parametrize("family", ["pixtral_12b", "mistral3(Small3.1/3.2)", "fuyu"])
@pytest.mark.parametrize("size", [(5000, 1), (1, 5000), (60_000, 7), (7, 60_000)])
def test_shapes_that_lose_a_side_are_refused_with_the_nearest_that_does_not(family: str, size: tuple[int, int]) -> None:
    estimator = of(family)
    with pytest.raises(UnfitError) as caught:
        estimator.image(*size)
    assert caught.value.reason is Reason.EXTREME_ASPECT
    width, height = caught.value.nearest_size_px or (0, 0)
    assert estimator.image(width, height).grid[1:] != (0, 0)
    assert max(width, height) == max(size)  # the shorter side grew, and no more than it had to
    with pytest.raises(UnfitError):
        estimator.image(*((width, height - 1) if width > height else (width - 1, height)))


@pytest.mark.parametrize("family", ["pixtral_12b", "mistral3(Small3.1/3.2)", "fuyu"])
@pytest.mark.parametrize("size", [(5000, 0), (0, 10**9), (0, 0)])
def test_the_nearest_to_a_side_of_nothing_keeps_its_shape_acceptable(family: str, size: tuple[int, int]) -> None:
    with pytest.raises(UnfitError) as caught:
        of(family).image(*size)
    assert caught.value.reason is Reason.TOO_SMALL
    assert of(family).image(*(caught.value.nearest_size_px or (0, 0))).llm_tokens > 0


def test_pixtral_by_height_and_width_has_two_bounds() -> None:
    estimator = estimator_from_config(files("pixtral", {"size": {"height": 320, "width": 640}}))
    assert estimator.image(1280, 320).grid == (1, 10, 40)
    assert estimator.image(320, 1280).grid == (1, 20, 5)


# Gemma 3


@pytest.mark.parametrize(
    ("size", "crops"),
    [
        ((1199, 1000), 0),
        ((1200, 1000), 2),
        ((2500, 1000), 3),  # 2.5 rounds up
        ((1000, 3500), 4),
        ((511, 400), 2),  # a crop of ceil(511 / 2) px
        ((510, 400), 0),
        ((3000, 255), 0),
        ((9000, 300), 4),
    ],
)
def test_pan_and_scan_crops_along_the_longer_side(size: tuple[int, int], crops: int) -> None:
    counts = of("gemma3(pan_and_scan=True)").image(*size)
    assert (counts.tiles, counts.patches) == (1 + crops, 4096 * (1 + crops))
    assert of("gemma3(pan_and_scan=False)").image(*size).tiles == 1


def test_texts_of_pan_and_scan_are_counted_by_the_text_counter() -> None:
    one = "\n\n" + "\n\n"
    many = f"Here is the original image {one} and here are some crops to help you see better {one} {one}"
    scanned = estimator_from_config(IMAGES["gemma3(pan_and_scan=True)"], count_text=len)
    assert scanned.image(500, 500).llm_tokens == 258 + len(one)
    assert scanned.image(1200, 600).llm_tokens == 3 * 258 + len(many)


# Gemma 4


def test_gemma4_writes_the_time_of_each_frame() -> None:
    texts: list[str] = []
    folder = {**files("gemma4"), "video_preprocessor_config": {"num_frames": 2}}
    estimator = estimator_from_config(folder, count_text=lambda text: texts.append(text) or len(text))
    counts = estimator.video(640, 360, 7290, 30.0, 243.0)
    assert (counts.frames, counts.grid, counts.padded_patches) == (2, (2, 18, 33), 1260)
    assert counts.llm_tokens == 2 * (66 + 2) + 6 + 7
    assert texts == ["00:00 ", " 02:01 "]
