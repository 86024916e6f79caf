"""Published folders of tiling families in every layout, and the edges of sizes and clocks that others may try."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dataloaders.errors import MediaError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config

Files = dict[str, Any]
SIZES = ((224, 224), (640, 480), (1024, 768), (1920, 1080), (2480, 3508), (3000, 300), (1, 1))
IDEFICS3 = {
    "do_image_splitting": True,
    "image_processor_type": "Idefics3ImageProcessor",
    "max_image_size": {"longest_edge": 364},
    "processor_class": "Idefics3Processor",
    "size": {"longest_edge": 1456},
}
SMOLVLM = {
    "image_processor_type": "SmolVLMImageProcessor",
    "processor_class": "SmolVLMProcessor",
    "max_image_size": {"longest_edge": 512},
    "size": {"longest_edge": 2048},
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
}
SCOUT = {
    "image_processor_type": "Llama4ImageProcessorFast",
    "processor_class": "Llama4Processor",
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "size": {"height": 336, "width": 336},
    "crop_size": None,
    "do_center_crop": None,
}
PHI4MM = {
    "auto_map": {"AutoProcessor": "processing_phi4mm.Phi4MMProcessor"},
    "image_processor_type": "Phi4MMImageProcessor",
    "processor_class": "Phi4MMProcessor",
    "audio_compression_rate": 8,
    "dynamic_hd": 36,
}
PHI35 = {
    "image_processor_type": "Phi3VImageProcessor",
    "processor_class": "Phi3VProcessor",
    "num_crops": 16,
    "num_img_tokens": 144,
}
KIMI_VL = {
    "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
    "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": 4096,
    "merge_kernel_size": [2, 2],
    "num_pooled_tokens": 1024,
    "pad_input": True,
    "patch_size": 14,
}
DEEPSEEK = {
    "processor_class": "DeepseekVLV2Processor",
    "candidate_resolutions": [
        [384 * across, 384 * down]
        for across, down in (
            *((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 5), (5, 1), (1, 6), (6, 1)),
            *((2, 3), (3, 2), (1, 7), (7, 1), (1, 8), (8, 1), (2, 4), (4, 2), (1, 9), (9, 1), (3, 3)),
        )
    ],
    "downsample_ratio": 2,
    "patch_size": 14,
}
# The counts of the reference table, per size of SIZES.
KNOWN: dict[str, tuple[Files, tuple[int, ...]]] = {
    "idefics3": (IDEFICS3, (2912, 2227, 2227, 2227, 2228, 857, 2912)),
    "smolvlm": ({**SMOLVLM, "image_seq_len": 64, "patch_size": 16}, (1127, 862, 862, 862, 863, 332, 1127)),
    "llama4": (SCOUT, (147, 727, 1887, 2322, 2322, 1452, 147)),
    "phi4mm": (PHI4MM, (545, 1065, 1681, 3918, 9345, 1629, 545)),
    "phi3_v": (PHI35, (2509, 1921, 1921, 2353, 1933, 1609, 2509)),
    "kimi_vl": (KIMI_VL, (64, 414, 1036, 1032, 1053, 1133, 1)),
    "deepseek_vl_v2": (DEEPSEEK, (421, 1023, 1415, 1807, 2017, 1793, 421)),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_every_layout_of_a_published_folder_gives_the_known_counts(kind: str, tmp_path: Path) -> None:
    image, expected = KNOWN[kind]
    unknown = {**image, "a_key_of_tomorrow": {"x": [1]}, "another": None}
    nested = {"processor_class": image.get("processor_class"), "image_processor": image, "image_seq_len": None}
    for number, files in enumerate(
        (
            {"config": {"model_type": kind}, "preprocessor_config": image},
            {"config.json": {"model_type": kind, "text_config": {}}, "preprocessor_config.json": unknown},
            {"preprocessor_config": image},
            {"config": {"model_type": kind}, "processor_config": nested},
            {"model_type": kind, **image},
        )
    ):
        estimators = [estimator_from_config(files)]
        if number < 4:
            folder = tmp_path / str(number)
            folder.mkdir()
            for name, content in files.items():
                (folder / f"{name.removesuffix('.json')}.json").write_text(json.dumps(content))
            estimators += [estimator_from_config(folder), estimator_from_config(str(folder))]
        for estimator in estimators:
            assert tuple(estimator.image(*size).llm_tokens for size in SIZES) == expected, files


@pytest.mark.parametrize(
    ("image", "tokens"),
    [
        ({"image_processor_type": "VideoLlama3ImageProcessorFast"}, 46 * 34),
        ({"image_processor_type": "PaddleOCRVLImageProcessorPil"}, 23 * 17),
        ({"image_processor_type": "Ernie4_5_VLMoeImageProcessor"}, 23 * 17),
        ({"image_processor_type": "ChameleonImageProcessor"}, 1026),
        ({"image_processor_type": "DeepseekVLImageProcessorFast"}, 576),
        ({"image_processor_type": "KimiK25VisionProcessor", "media_proc_cfg": {"in_patch_limit": 16384}}, 414),
    ],
)
def test_a_folder_of_an_image_processor_alone_is_enough(image: Files, tokens: int) -> None:
    assert estimator_from_config({"preprocessor_config": image}).image(640, 480).llm_tokens == tokens


def test_config_json_alone_says_what_the_tower_takes() -> None:
    tower = {"image_size": 560, "max_num_tiles": 4, "patch_size": 14}
    mllama = estimator_from_config({"config": {"model_type": "mllama", "vision_config": tower}}).image(640, 480)
    assert (mllama.visual_tokens, mllama.padded_patches) == (2 * 1601, 4 * 1601)
    llama4 = estimator_from_config({"config": {"model_type": "llama4", "vision_config": {"image_size": 448}}})
    assert llama4.image(448, 448).visual_tokens == 256
    gemma3n = estimator_from_config({"config": {"model_type": "gemma3n", "vision_soft_tokens_per_image": 100}})
    assert gemma3n.image(64, 64).visual_tokens == 100
    assert estimator_from_config({"config": {"model_type": "lfm2-vl"}}).image(224, 224).llm_tokens == 66


def test_padded_patches_are_what_the_tower_runs() -> None:
    aria = estimator_from_config({"model_type": "aria"}).image(640, 480)
    assert (aria.patches, aria.encoded_patches) == (70 * 53, 70 * 70)
    lfm2 = estimator_from_config({"model_type": "lfm2_vl"}).image(1024, 768)
    assert lfm2.patches == 6 * 1024 + (18 * 2) * (13 * 2)
    assert lfm2.encoded_patches == lfm2.full.total == 7 * 1024


@pytest.mark.parametrize("size", [(0, 4096), (4096, 0), (0, 0), (1, 10**18)])
def test_the_nearest_size_to_a_side_of_nothing_works_for_fuyu(size: tuple[int, int]) -> None:
    fuyu = estimator_from_config({"model_type": "fuyu"})
    with pytest.raises(UnfitError) as caught:
        fuyu.image(*size)
    assert caught.value.nearest_size_px is not None
    assert fuyu.image(*caught.value.nearest_size_px).patches >= 1


VIDEO_FAMILIES: dict[str, Files] = {
    "smolvlm": {"num_frames": 64, "fps": 1},
    "minicpmv4_6": {"stack_frames": 5},
    "kimi_k25": {},
    "molmo2": {},
    "gemma4": {},
    "video_llama_3": {"fps": 1},
    "ernie4_5_vl": {},
}


def clip_estimator(kind: str) -> TokenEstimator:
    return estimator_from_config(
        {"config": {"model_type": kind}, "preprocessor_config": {}, "video_preprocessor_config": VIDEO_FAMILIES[kind]}
    )


@pytest.mark.parametrize("kind", VIDEO_FAMILIES)
def test_clocks_without_sense_give_an_answer_or_a_reason(kind: str) -> None:
    estimator = clip_estimator(kind)
    answered, refused = 0, set()
    for num_frames in (0, 1, 5, 300, 1000):
        for fps in (0.0, -1.0, math.nan, math.inf, 1e-9, 0.5, 30.0, 1e300):
            for duration in (0.0, -1.0, math.nan, math.inf, 1e-9, 10.5, 1e12, 1e300):
                try:
                    indices = estimator.frame_indices(num_frames, fps, duration)
                    counts = estimator.video(64, 48, num_frames, fps, duration)
                except UnfitError as error:
                    if error.nearest_frames is not None:
                        estimator.video(64, 48, error.nearest_frames, fps, duration)
                except MediaError as error:
                    refused.add(error.reason)
                else:
                    answered += 1
                    assert counts.llm_tokens > 0 <= indices.min() <= indices.max() < num_frames
    assert answered
    assert refused <= {Reason.CORRUPT, Reason.TOO_FEW_FRAMES}


def test_molmo2_takes_no_frame_behind_the_last() -> None:
    estimator = estimator_from_config(
        {"config": {"model_type": "molmo2"}, "video_preprocessor_config": {"num_frames": 7}}
    )
    indices = estimator.frame_indices(300, 1.0, 300.0).tolist()
    assert indices == [0, 42, 85, 128, 171, 214, 257]
