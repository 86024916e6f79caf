"""Image families against the installed transformers processors: real pixels, real expansion of the placeholder.

The tokenizer has the special tokens and otherwise one token a character, so texts are counted by `len`.
"""

import importlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataloaders.errors import UnfitError
from dataloaders.estimators import estimator_from_config

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("transformers")

Files = dict[str, Any]
SIZES = [(1, 1), (3, 5), (5, 3), (37, 1), (1, 37), (90, 30), (64, 64), (100, 75), (131, 257), (257, 131), (640, 480)]
SIZES += [(32, 32), (333, 1000), (1000, 90), (511, 401), (1024, 256), (700, 699)]


def of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def blank(width_px: int, height_px: int) -> Image.Image:
    return Image.new("RGB", (width_px, height_px), (90, 120, 30))


def tiny_tokenizer(**special: str) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = importlib.import_module("transformers")
    model = tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=special, **names)


def inserted(processor: Any, image: Image.Image, placeholder: str, **options: Any) -> int:
    """Tokens that the processor makes of a prompt that is the placeholder alone."""
    return len(processor(images=[[image]], text=[placeholder], images_kwargs=options)["input_ids"][0])


def expanded(processor: Any, image: Image.Image, tokens: dict[str, str], images: Any = None, **options: Any) -> int:
    """Tokens of the text that replaces the placeholder; `tokens`: the special ones in it."""
    for name, token in tokens.items():
        setattr(processor, name, token)
    _, texts = processor._process_images([image] if images is None else images, **options)
    text = texts[0]
    number = 0
    for token in tokens.values():
        number += text.count(token)
        text = text.replace(token, "")
    return number + len(text)


def bare(kind: Any, **attributes: Any) -> Any:
    """A processor without a tokenizer or a video processor: transformers has none without torchvision."""
    processor = object.__new__(kind)
    for name, value in attributes.items():
        setattr(processor, name, value)
    return processor


@pytest.mark.parametrize(
    ("image", "options"),
    [
        ({"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}, {}),
        ({"size": 70, "crop_size": 63}, {"vision_feature_select_strategy": "full"}),
        ({"size": {"shortest_edge": 40}, "crop_size": {"height": 28, "width": 70}}, {"num_additional_image_tokens": 0}),
        ({"size": {"height": 35, "width": 49}, "do_center_crop": False}, {}),
    ],
)
def test_llava(image: Files, options: Files) -> None:
    settings = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    settings |= options
    kind = of("clip.image_processing_pil_clip", "CLIPImageProcessorPil")
    processor = of("llava.processing_llava", "LlavaProcessor")(
        image_processor=kind(**image), tokenizer=tiny_tokenizer(image_token="<image>"), **settings
    )
    image = {"image_processor_type": "CLIPImageProcessor", **image}
    files = {"config": {"model_type": "llava"}, "preprocessor_config": image, "processor_config": settings}
    estimator = estimator_from_config(files)
    for size in SIZES[:8]:
        assert estimator.image(*size).llm_tokens == inserted(processor, blank(*size), "<image>")


def test_llava_with_the_image_processor_that_pads_to_a_square() -> None:
    image = {"size": {"shortest_edge": 56}, "do_center_crop": False, "do_pad": True}
    settings = {"patch_size": 7, "vision_feature_select_strategy": "full"}
    processor = of("llava.processing_llava", "LlavaProcessor")(
        image_processor=of("llava.image_processing_pil_llava", "LlavaImageProcessorPil")(**image),
        tokenizer=tiny_tokenizer(image_token="<image>"),
        **settings,
    )
    image = {"image_processor_type": "LlavaImageProcessorFast", **image}
    files = {"config": {"model_type": "llava"}, "preprocessor_config": image, "processor_config": settings}
    for size in SIZES[:8]:
        assert (
            estimator_from_config(files).image(*size).llm_tokens == inserted(processor, blank(*size), "<image>") == 64
        )


PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


@pytest.mark.parametrize(
    ("image", "options"),
    [
        ({"image_grid_pinpoints": PINPOINTS}, {}),
        ({"image_grid_pinpoints": [[56, 84], [84, 56], [140, 28]]}, {"vision_feature_select_strategy": "full"}),
        ({"image_grid_pinpoints": PINPOINTS[:1]}, {"num_additional_image_tokens": 0, "patch_size": 4}),
        ({"image_grid_pinpoints": PINPOINTS, "do_center_crop": False, "size": {"height": 28, "width": 28}}, {}),
    ],
)
def test_llava_next(image: Files, options: Files) -> None:
    image = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, **image}
    settings = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    settings |= options
    pixels = of("llava_next.image_processing_pil_llava_next", "LlavaNextImageProcessorPil")(**image)
    processor = of("llava_next.processing_llava_next", "LlavaNextProcessor")(
        image_processor=pixels, tokenizer=tiny_tokenizer(image_token="<image>"), **settings
    )
    files = {"config": {"model_type": "llava_next"}, "preprocessor_config": image, "processor_config": settings}
    estimator = estimator_from_config(files)
    for size in SIZES:
        counts = estimator.image(*size)
        assert counts.llm_tokens == inserted(processor, blank(*size), "<image>"), size
        assert counts.tiles == len(pixels([blank(*size)])["pixel_values"][0])


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("canvases", "options"),
    [
        ([[28 * i, 28 * j] for i in range(1, 7) for j in range(1, 7)], {"vision_aspect_ratio": "anyres_max_9"}),
        ([[28 * i, 28 * j] for j in range(1, 5) for i in range(1, 5)], {"vision_aspect_ratio": "anyres_max_2"}),
        ([[28, 56], [84, 28]], {"vision_feature_select_strategy": "default"}),
    ],
)
def test_llava_onevision(canvases: list[list[int]], options: Files, several: bool) -> None:
    image = {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": canvases}
    settings = {"num_image_tokens": 49, "vision_feature_select_strategy": "full", **options}
    pixels = of("llava_onevision.image_processing_pil_llava_onevision", "LlavaOnevisionImageProcessorPil")(**image)
    attributes = {"vision_aspect_ratio": "anyres_max_9", **settings}
    kind = of("llava_onevision.processing_llava_onevision", "LlavaOnevisionProcessor")
    processor = bare(kind, image_processor=pixels, **attributes)
    files = {
        "config": {"model_type": "llava_onevision", "vision_config": {"patch_size": 4}},
        "preprocessor_config": image,
        "processor_config": settings,
    }
    estimator = estimator_from_config(files)
    for size in SIZES:
        batch = [[blank(*size)] * (2 if several else 1)]
        counts = estimator.image(*size, num_images=len(batch[0]))
        assert counts.llm_tokens == expanded(processor, blank(*size), {"image_token": "<image>"}, batch), size
        assert counts.tiles == len(pixels(batch)["pixel_values"][0])
    frames = kind.replace_video_token
    processor.video_token = "<video>"
    text = frames(processor, {"pixel_values_videos": [np.zeros((5, 1))]}, 0)
    assert estimator.video(640, 360, 5, 25.0, 0.2).llm_tokens == text.count("<video>")


@pytest.mark.parametrize(
    "image",
    [
        {"size": {"height": 28, "width": 28}},
        {"size": {"height": 28, "width": 28}, "max_patches": 6, "crop_to_patches": False},
        {"size": {"height": 28, "width": 28}, "min_patches": 3, "max_patches": 7},
        {"size": {"height": 112, "width": 112}, "max_patches": 12},
        {"size": {"height": 32, "width": 16}},  # 32 x 32 px: a tie, at exactly half the pixels of the larger grid
        {"size": {"height": 28, "width": 28}, "max_patches": 1},
    ],
)
def test_internvl(image: Files) -> None:
    pixels = of("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil")(**image)
    kind = of("internvl.processing_internvl", "InternVLProcessor")
    processor = bare(kind, image_processor=pixels, image_seq_length=4)
    tokens = {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<c>"}
    files = {
        "config": {"model_type": "internvl"},
        "preprocessor_config": image,
        "processor_config": {"image_seq_length": 4},
    }
    estimator = estimator_from_config(files, count_text=len)
    for size in SIZES:
        counts = estimator.image(*size)
        assert counts.llm_tokens == expanded(processor, blank(*size), tokens, **kind.images_kwargs), size
        assert counts.tiles == pixels([blank(*size)], crop_to_patches=True)["num_patches"][0]
    text = kind.replace_video_token(processor, {"pixel_values_videos": [np.zeros((12, 1))]}, 0)
    for token in tokens.values():
        text = text.replace(token, "x")
    assert estimator.video(640, 360, 12, 25.0, 0.5).llm_tokens == len(text)


@pytest.mark.parametrize("cut", [False, True])
def test_got_ocr2(cut: bool) -> None:
    image = {"size": {"height": 32, "width": 32}, "crop_to_patches": cut}
    processor = of("got_ocr2.processing_got_ocr2", "GotOcr2Processor")(
        image_processor=of("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil")(**image),
        tokenizer=tiny_tokenizer(image_token="<imgpad>", start="<img>", end="</img>"),
    )
    estimator = estimator_from_config({"config": {"model_type": "got_ocr2"}, "preprocessor_config": image})
    for size in SIZES:
        encoded = processor(images=blank(*size), text="<img><imgpad></img>", images_kwargs={"crop_to_patches": cut})
        assert estimator.image(*size).llm_tokens == len(encoded["input_ids"][0])


@pytest.mark.parametrize(("patch", "merge", "longest"), [(16, 1, 256), (14, 2, 154), (4, 3, 1000), (7, 1, 29)])
def test_pixtral(patch: int, merge: int, longest: int) -> None:
    kind = of("pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil")
    processor = kind(size={"longest_edge": longest}, patch_size=patch * merge)
    files = {
        "config": {"model_type": "mistral3"},
        "preprocessor_config": {"size": {"longest_edge": longest}},
        "processor_config": {"patch_size": patch, "spatial_merge_size": merge},
    }
    estimator = estimator_from_config(files)
    for size in SIZES:
        try:
            counts = estimator.image(*size)
        except UnfitError:
            with pytest.raises(ValueError, match="Size must contain"):
                processor([blank(*size)])
            continue
        height, width = processor([blank(*size)])["image_sizes"][0]
        assert (counts.height_px, counts.width_px) == (height, width), size
        rows, columns = height // (patch * merge), width // (patch * merge)
        assert counts.llm_tokens == rows * (columns + 1)
        assert counts.patches == height * width // patch**2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_pan_and_scan": True},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 7},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 90, "pan_and_scan_min_ratio_to_activate": 1.01},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 1},
    ],
)
def test_gemma3(options: Files) -> None:
    image = {"size": {"height": 28, "width": 28}}
    processor = of("gemma3.processing_gemma3", "Gemma3Processor")(
        of("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil")(**image),
        tiny_tokenizer(image_token="<soft>", boi_token="<boi>", eoi_token="<eoi>"),
        image_seq_length=5,
    )
    files = {
        "config": {"model_type": "gemma3"},
        "preprocessor_config": {**image, **options},
        "processor_config": {"image_seq_length": 5},
    }
    estimator = estimator_from_config(files, count_text=len)
    for size in SIZES:
        assert estimator.image(*size).llm_tokens == inserted(processor, blank(*size), "<boi>", **options), size


@pytest.mark.parametrize("options", [{}, {"max_soft_tokens": 70}, {"max_soft_tokens": 1120, "pooling_kernel_size": 1}])
def test_gemma4(options: Files) -> None:
    pixels = of("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil")(**options)
    files = {"config": {"model_type": "gemma4"}, "preprocessor_config": options}
    estimator = estimator_from_config(files, count_text=len)
    for size in SIZES:
        counts, encoded = estimator.image(*size), pixels([blank(*size)])
        assert counts.visual_tokens == encoded["num_soft_tokens_per_image"][0], size
        assert counts.patches == int((encoded["image_position_ids"][0][:, 0] >= 0).sum())
        assert counts.padded_patches == encoded["pixel_values"][0].shape[0]
    metadata = importlib.import_module("transformers.video_utils").VideoMetadata(
        total_num_frames=3000, fps=25.0, frames_indices=estimator.frame_indices(3000, 25.0, 120.0)
    )
    processor = bare(of("gemma4.processing_gemma4", "Gemma4Processor"), boi_token="<", eoi_token=">", video_token="x")
    clip = estimator.video(640, 480, 3000, 25.0, 120.0)
    soft = {"num_soft_tokens_per_video": [clip.visual_tokens // 32], "video_metadata": [metadata]}
    assert clip.llm_tokens == len(processor.replace_video_token(soft, 0))


def test_paligemma() -> None:
    pixels = of("siglip.image_processing_pil_siglip", "SiglipImageProcessorPil")(size={"height": 28, "width": 28})
    pixels.image_seq_length = 4
    kind = of("paligemma.processing_paligemma", "PaliGemmaProcessor")
    processor = bare(kind, image_processor=pixels, image_seq_length=4)
    image = {"size": {"height": 28, "width": 28}, "image_seq_length": 4}
    estimator = estimator_from_config({"config": {"model_type": "paligemma"}, "preprocessor_config": image})
    for size in SIZES[:6]:
        assert estimator.image(*size).llm_tokens == expanded(processor, blank(*size), {"image_token": "<image>"})


@pytest.mark.parametrize("size_px", [{"height": 90, "width": 120}, {"height": 1080, "width": 1920}])
def test_fuyu(size_px: Files) -> None:
    pixels = of("fuyu.image_processing_pil_fuyu", "FuyuImageProcessorPil")(size=size_px)
    estimator = estimator_from_config({"config": {"model_type": "fuyu"}, "preprocessor_config": {"size": size_px}})
    for size in SIZES:
        try:
            counts = estimator.image(*size)
        except UnfitError:
            with pytest.raises(ValueError, match="Size must contain"):
                pixels([[blank(*size)]])
            continue
        encoded = pixels([[blank(*size)]])
        rows = -(-encoded["image_unpadded_heights"][0][0] // 30)
        columns = -(-encoded["image_unpadded_widths"][0][0] // 30)
        assert (counts.grid, counts.llm_tokens) == ((1, rows, columns), rows * (columns + 1)), size


@pytest.mark.parametrize("options", [{}, {"split_image": True}, {"split_image": True, "max_image_size": 490}])
def test_aria(options: Files) -> None:
    pixels = of("aria.image_processing_pil_aria", "AriaImageProcessorPil")(**options)
    estimator = estimator_from_config({"config": {"model_type": "aria"}, "preprocessor_config": options})
    for size in SIZES[3::3]:
        counts, encoded = estimator.image(*size), pixels([blank(*size)])
        assert counts.tiles == encoded["num_crops"]
        drawn = [mask[::14, ::14].sum() for mask in encoded["pixel_mask"]]
        assert counts.patches == sum(drawn)
        assert counts.llm_tokens == counts.tiles * (128 if options.get("max_image_size") == 490 else 256)


# The processors' own helpers, over many more sizes than pixels allow.


def many_sizes() -> list[tuple[int, int]]:
    rng = np.random.Generator(np.random.Philox(5))
    spread = np.exp(rng.uniform(0, np.log(9000), (400, 2))).astype(int)
    equal = [(448 * i // k, 448 * j // k) for i in range(1, 7) for j in range(1, 7) for k in (1, 2, 3)]
    rounded = [(55, 88), (110, 352), (176, 55), (748, 352)]  # LLaVA-NeXT rounds to 7 digits before it floors
    return [(int(width), int(height)) for width, height in spread] + equal + rounded


@pytest.mark.parametrize("options", [{}, {"max_patches": 6}, {"min_patches": 2, "max_patches": 40}])
def test_internvl_tiles_of_many_sizes(options: Files) -> None:
    image = {"size": {"height": 448, "width": 448}, **options}
    pixels = of("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil")(**image)
    estimator = estimator_from_config({"config": {"model_type": "internvl"}, "preprocessor_config": image})
    for width, height in many_sizes():
        tiles = pixels.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        assert estimator.image(width, height).tiles == tiles, (width, height)


def test_features_of_many_sizes_in_llava_next_and_onevision() -> None:
    published = {
        "llava_next": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        "llava_onevision": {"size": {"height": 384, "width": 384}},
    }
    for family, image in published.items():
        class_name = {"llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}[family]
        pixels = of(f"{family}.image_processing_pil_{family}", f"{class_name}ImageProcessorPil")(**image)
        settings = {"patch_size": 14, "num_additional_image_tokens": 1, "num_image_tokens": 729}
        settings |= {"vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
        kind = of(f"{family}.processing_{family}", f"{class_name}Processor")
        processor = bare(kind, image_processor=pixels, **settings)
        files = {"config": {"model_type": family}, "preprocessor_config": image, "processor_config": settings}
        estimator = estimator_from_config(files)
        side = 336 if family == "llava_next" else 384
        for width, height in many_sizes():
            features = processor._get_number_of_features(height, width, side, side)
            assert estimator.image(width, height).llm_tokens == features, (family, width, height)


def test_resized_sides_of_many_sizes_in_pixtral_and_gemma4() -> None:
    resized = of("pixtral.image_processing_pil_pixtral", "get_resize_output_image_size")
    pixtral = estimator_from_config({"model_type": "mistral3", "size": {"longest_edge": 1540}, "patch_size": 14})
    budget = of("gemma4.image_processing_pil_gemma4", "get_aspect_ratio_preserving_size")
    gemma4 = estimator_from_config({"model_type": "gemma4"})
    for width, height in many_sizes():
        empty = np.broadcast_to(np.uint8(0), (3, height, width))
        sides = resized(empty, 1540, 28, "channels_first")
        try:
            counts = pixtral.image(width, height)
        except UnfitError:
            assert 0 in sides
        else:
            assert (counts.height_px, counts.width_px) == sides, (width, height)
        counts = gemma4.image(width, height)
        assert (counts.height_px, counts.width_px) == budget(height, width, 16, 2520, 3), (width, height)


def test_crops_of_many_sizes_in_gemma3_and_aria() -> None:
    gemma = of("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil")()
    gemma3 = estimator_from_config({"model_type": "gemma3", "do_pan_and_scan": True})
    split = of("aria.image_processing_pil_aria", "AriaImageProcessorPil")(split_image=True)
    aria = estimator_from_config({"model_type": "aria", "split_image": True})
    for width, height in many_sizes():
        crops = gemma.pan_and_scan(np.broadcast_to(np.uint8(0), (3, height, width)), 256, 4, 1.2)
        assert gemma3.image(width, height).tiles == 1 + len(crops), (width, height)
        assert aria.image(width, height).tiles == split.get_number_of_image_patches(height, width), (width, height)
