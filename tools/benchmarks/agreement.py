"""Token rules against a table of what the reference processors gave: one row a family of `token_oracle.parquet`.

    row (family, w, h | frames, fps, duration) --estimator of the family's configuration--> patches, visual, LLM tokens

`CONFIGURATIONS` names the model folder that stands behind a family, in the files people publish; numbers that
`token_oracle_params.json` states are taken from there. `NOTES` says why a family's rows may differ.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dataloaders.errors import MediaError
from dataloaders.estimators import Preprocessing, TokenEstimator, estimator_from_config

Options = Mapping[str, Any]
TABLE, PARAMS = "token_oracle.parquet", "token_oracle_params.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How the rows of a family compare.

    Attributes:
        rows: of the family. equal: patches, visual and LLM tokens are the same. refused: both fail.
        texts: patches and visual tokens are the same, LLM tokens are not.
        differ: any other. note: why rows differ, where they do.
    """

    family: str
    rows: int
    equal: int
    refused: int
    texts: int
    differ: int
    note: str = ""


def agreement_rows(folder: Path) -> list[Agreement]:
    """One row a family of the table in `folder`."""
    import pyarrow.parquet

    params = json.loads((folder / PARAMS).read_text(encoding="utf-8"))
    rows: dict[str, list[Options]] = defaultdict(list)
    for row in pyarrow.parquet.read_table(folder / TABLE).to_pylist():
        rows[row["family"]].append(row)
    return [_agreement(family, found, params[family]) for family, found in rows.items()]


def _agreement(family: str, rows: list[Options], params: Options) -> Agreement:
    estimator = CONFIGURATIONS[family](params)
    found = Counter(_verdict(estimator, row) for row in rows)
    clean = found["equal"] + found["refused"] == len(rows)
    return Agreement(
        family=family,
        rows=len(rows),
        equal=found["equal"],
        refused=found["refused"],
        texts=found["texts"],
        differ=found["differ"],
        note="" if clean else NOTES.get(family, "unexplained"),
    )


def _verdict(estimator: TokenEstimator, row: Options) -> str:
    try:
        if row["kind"] == "image":
            counts = estimator.image(row["w"], row["h"])
        else:
            counts = estimator.video(row["w"], row["h"], row["src_frames"], row["fps"], row["duration"])
    except MediaError:
        return "refused" if row["error"] else "differ"
    # Some rows have LLM tokens alone.
    found = {"patches": counts.patches, "embed_tokens": counts.visual_tokens}
    if any(row[name] not in (None, value) for name, value in found.items()):
        return "differ"
    return "equal" if counts.llm_tokens == row["llm_tokens"] else "texts"


def _of(
    model_type: str,
    image: Options | None = None,
    *,
    video: Options | None = None,
    processor: Options | None = None,
    preprocessing: Preprocessing | None = None,
    **model: Any,
) -> TokenEstimator:
    files: dict[str, Options | None] = {
        "config": {"model_type": model_type, **model},
        "preprocessor_config": image or {},
        "video_preprocessor_config": video,
        "processor_config": processor,
    }
    return estimator_from_config({k: v for k, v in files.items() if v is not None}, preprocessing=preprocessing)


def _images(model_type: str) -> Callable[[Options], TokenEstimator]:
    return lambda params: _of(model_type, params)


def _videos(model_type: str, image: Options | None = None) -> Callable[[Options], TokenEstimator]:
    return lambda params: _of(model_type, image, video=params)


def _square(side: int, **more: Any) -> Options:
    return {"size": {"height": side, "width": side}, **more}


def _longest(side: int, **more: Any) -> Options:
    return {"size": {"longest_edge": side}, **more}


_CLIP = {"patch_size": 14, "image_size": 336, "model_type": "clip_vision_model"}
_SELECT = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_CROP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
_ONEVISION = {
    "num_image_tokens": 729,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
    "processor_class": "LlavaOnevisionProcessor",
}
_SIGLIP = {"patch_size": 14, "image_size": 384, "model_type": "siglip_vision_model"}
_QWEN3 = {"patch_size": 16}


def _internvl(params: Options) -> TokenEstimator:
    return _of(
        "internvl_chat",
        force_image_size=params["tile"],
        dynamic_image_size=True,
        use_thumbnail=params["thumbnail"],
        min_dynamic_patch=params["min"],
        max_dynamic_patch=params["max"],
        downsample_ratio=0.5,
        vision_config={"image_size": params["tile"], "patch_size": 14},
    )


def _smolvlm(params: Options, *, tile: int, scale: int) -> TokenEstimator:
    image = _longest(
        params.get("longest", 1536),
        max_image_size={"longest_edge": tile},
        video_sampling={"fps": 1, "max_frames": 64, "video_size": {"longest_edge": tile}},
    )
    vision = {"patch_size": params.get("patch", 14)}
    return _of("smolvlm", image, processor={"image_seq_len": params["seq"]}, vision_config=vision, scale_factor=scale)


def _pixtral(model_type: str, side: int, patch: int, merge: int) -> TokenEstimator:
    processor = {"processor_class": "PixtralProcessor", "patch_size": patch, "spatial_merge_size": merge}
    return _of(model_type, _longest(side, patch_size=patch), processor=processor)


def _paligemma(params: Options) -> TokenEstimator:
    side = params["size"]
    return _of("paligemma", _square(side, image_seq_length=(side // 14) ** 2))


CONFIGURATIONS: Mapping[str, Callable[[Options], TokenEstimator]] = MappingProxyType(
    {
        "qwen2_vl": _images("qwen2_vl"),
        "qwen2_vl@class_default": _images("qwen2_vl"),
        "qwen2_5_vl": _images("qwen2_5_vl"),
        "qwen2_5_vl@max1280tok": _images("qwen2_5_vl"),
        "qwen3_vl": _images("qwen3_vl"),
        "glm4v(4.1V/4.5V)": _images("glm4v"),
        "video_llama_3": _images("video_llama_3"),
        "paddleocr_vl": _images("paddleocr_vl"),
        "qwen2_5_vl+qwen_vl_utils0.0.14": lambda p: _of(
            "qwen2_5_vl", {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384}, preprocessing="qwen_vl_utils"
        ),
        "qwen3_vl+qwen_vl_utils0.0.14": lambda p: _of(
            "qwen3_vl",
            {**_QWEN3, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
            preprocessing="qwen_vl_utils",
        ),
        "kimi_k25": _images("kimi_k25"),
        "kimi_vl(approx: navit_resize,max_patches 4096)": lambda p: _of(
            "kimi_vl", {"in_token_limit": 4096, "patch_size": 14, "merge_kernel_size": [2, 2], "pad_input": True}
        ),
        "llava_1_5": lambda p: _of("llava", _CROP, processor=_SELECT, vision_config=_CLIP),
        "llava_next(v1.6,anyres)": lambda p: _of(
            "llava_next", {**_CROP, "image_grid_pinpoints": p["pinpoints"]}, processor=_SELECT, vision_config=_CLIP
        ),
        "llava_onevision(anyres_max_9)": lambda p: _of(
            "llava_onevision", _square(384), processor=_ONEVISION, vision_config=_SIGLIP
        ),
        "internvl2/2.5/3(max12)": _internvl,
        "internvl2/2.5/3(max6,train default)": _internvl,
        "idefics2(split=False)": lambda p: _of("idefics2", _idefics2(p), vision_config={"patch_size": 14}),
        "idefics2(split=True)": lambda p: _of("idefics2", _idefics2(p), vision_config={"patch_size": 14}),
        "idefics3(8B)": lambda p: _of(
            "idefics3",
            _longest(p["longest"], max_image_size={"longest_edge": p["tile"]}),
            processor={"image_seq_len": p["seq"]},
            vision_config={"patch_size": p["patch"]},
        ),
        "gemma3(pan_and_scan=False)": lambda p: _of("gemma3", _square(896)),
        "gemma3(pan_and_scan=True)": lambda p: _of("gemma3", _square(896, do_pan_and_scan=True)),
        "gemma3n": lambda p: _of("gemma3n", _square(768)),
        "paligemma(224)": _paligemma,
        "paligemma(448)": _paligemma,
        "paligemma(896)": _paligemma,
        "llama4": lambda p: _of("llama4", _square(p["tile"], max_patches=p["max_patches"])),
        "mllama(3.2V,cross-attn)": lambda p: _of("mllama", _square(p["tile"], max_image_tiles=p["max_tiles"])),
        "pixtral_12b": lambda p: _pixtral("llava", p["longest"], p["patch"], p["merge"]),
        "mistral3(Small3.1/3.2)": lambda p: _pixtral("mistral3", p["longest"], p["patch"], p["merge"]),
        "phi4_multimodal": lambda p: _of("phi4_multimodal", {"dynamic_hd": p["dynamic_hd"]}),
        "phi3.5_vision(hd16)": lambda p: _of("phi3_v", {"num_crops": p["num_crops"]}),
        "minicpm_v2.6(64/slice)": lambda p: _of(
            "minicpmv",
            {"scale_resolution": p["scale"], "max_slice_nums": p["max_slice"], "image_feature_size": p["query"]},
        ),
        "deepseek_vl(v1)": lambda p: _of("deepseek_vl", _square(p["size"]), processor={"num_image_tokens": 576}),
        "fuyu": lambda p: _of("fuyu", {"size": p["size"], "patch_size": p["patch"]}),
        "cohere2_vision(approx text)": lambda p: _of("cohere2_vision", {"size": p["size"], "max_patches": p["max"]}),
        "chameleon": lambda p: _of("chameleon", {"size": {"shortest_edge": p["size"]}}),
        "got_ocr2(single)": lambda p: _of("got_ocr2", _square(p["size"])),
        "smolvlm2(2.2B)": lambda p: _smolvlm(p, tile=p["tile"], scale=3),
        "smolvlm2(256M/500M)": lambda p: _smolvlm(p, tile=p["tile"], scale=4),
        "aria(980,split=False)": lambda p: _of("aria", {"max_image_size": p["max_image_size"], "min_image_size": 336}),
        "aria(980,split=True)": lambda p: _of(
            "aria", {"max_image_size": p["max_image_size"], "min_image_size": 336, "split_image": True}
        ),
        "qwen2/2.5_vl@video class default": _videos("qwen2_5_vl"),
        "qwen2/2.5_vl@video capped": _videos("qwen2_5_vl"),
        "qwen2/2.5_vl@video hub cfg": _videos("qwen2_5_vl"),
        "qwen3_vl@video hub cfg": _videos("qwen3_vl", _QWEN3),
        "qwen3_vl@video hub cfg capped": _videos("qwen3_vl", _QWEN3),
        "qwen3_vl@video class default": _videos("qwen3_vl", _QWEN3),
        "qwen2.5_vl+qwen_vl_utils0.0.14@video": lambda p: _of("qwen2_5_vl", preprocessing="qwen_vl_utils"),
        "qwen3_vl+qwen_vl_utils0.0.14@video": lambda p: _of("qwen3_vl", _QWEN3, preprocessing="qwen_vl_utils"),
        "glm4v(4.1V/4.5V)@video": _videos("glm4v"),
        "kimi_k25@video": lambda p: _of("kimi_k25", video={}),
        "llava_onevision@video(32f)": lambda p: _of(
            "llava_onevision",
            _square(384),
            processor=_ONEVISION,
            vision_config=_SIGLIP,
            video={"num_frames": p["num_frames"], "do_sample_frames": True},
        ),
        "internvl@video(8f)": lambda p: _of("internvl", _square(448), video={"num_frames": p["num_frames"]}),
        "smolvlm2(2.2B)@video": lambda p: _smolvlm(p, tile=384, scale=3),
        "video_llama_3@video": _videos("video_llama_3"),
    }
)


def _idefics2(params: Options) -> Options:
    size = {"shortest_edge": params["size"]["shortest"], "longest_edge": params["size"]["longest"]}
    return {"size": size, "do_image_splitting": params["split"]}


_NO_TEXTS = "the table leaves out the texts that the processor writes between frames"
NOTES: Mapping[str, str] = MappingProxyType(
    {
        "qwen2/2.5_vl@video capped": "most rows come from a helper of transformers 5.24 that forgets the cap; the "
        "processor itself applies it",
        "qwen3_vl+qwen_vl_utils0.0.14@video": _NO_TEXTS,
        "glm4v(4.1V/4.5V)@video": f"{_NO_TEXTS}, but for 21 rows, which are equal",
        "kimi_k25@video": f"{_NO_TEXTS}, but for 21 rows, which are equal",
        "smolvlm2(2.2B)@video": _NO_TEXTS,
        "video_llama_3@video": _NO_TEXTS,
        "video_llama_3": "the table divides by 2 x 2, the processor and its prompt by 1 x 1 (merge_size of the family)",
        "kimi_vl(approx: navit_resize,max_patches 4096)": "the table scales sides above 512 patches; Kimi-VL fails",
        "minicpm_v2.6(64/slice)": "the table takes 1,024 patches a slice; ours are those of the resized slices",
    }
)
