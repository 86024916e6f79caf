"""Families that make the same number of tokens of every image: LLaVA-1.5, PaliGemma, Gemma 3n, DeepSeek-VL, Chameleon.

    any size -> resize, crop or pad -> one tile of height x width px -> patches (+ class token) -> visual tokens

    LLaVA       (height // patch) * (width // patch) + num_additional_image_tokens - (1 where the first is dropped)
    PaliGemma   image_seq_length                    DeepSeek-VL  num_image_tokens
    Gemma 3n    image_seq_length + delimiters       Chameleon    image_seq_length + 2 delimiters

Sources: the processors of transformers 5.24. Without a processor file, LLaVA's additional tokens are the tower's: one
class token of CLIP, none of SigLIP. With one that leaves them out they are 0, the default of the class (a CLIP model
then refuses what its processor makes: a known fault of folders of 2024).
"""

from dataclasses import dataclass

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators import pixtral
from dataloaders.estimators.base import TokenEstimator, equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    option,
    patch_px,
    require_positive,
    switch,
    tile_px,
    vision_config,
)

_RULE = "fixed/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_NO_CLASS_TOKEN = ("siglip_vision_model", "siglip2_vision_model")
_UNCROPPED = ("SiglipImageProcessor", "ViTImageProcessor")
PARAGRAPH = "\n\n"  # Gemma 3 and 3n write one before and one after each image


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedConfig:
    """What decides the counts of every image alike.

    Attributes:
        family: name for people.
        height_px, width_px: the tile.
        patch_px: side of a patch.
        class_tokens: tokens of the tower beside the patches.
        visual_tokens: positions that receive an embedding.
        text_tokens: positions that the processor writes around them.
    """

    family: str
    height_px: int
    width_px: int
    patch_px: int
    class_tokens: int = 0
    visual_tokens: int
    text_tokens: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "height_px", "width_px", "patch_px", "visual_tokens")
        if min(self.height_px, self.width_px) < self.patch_px:
            raise DataError(f"FixedConfig: patches of {self.patch_px} px in {self.width_px}x{self.height_px} px")


class FixedEstimator(ImagesOnly):
    """`TokenEstimator` of families with one tile of one size; immutable, picklable."""

    def __init__(self, config: FixedConfig, text_rule: str = "") -> None:
        self.config = config
        self.rule = f"{config.family}, transformers 5.24 processor: the same counts for every image"
        self.fingerprint = fingerprint(_RULE, config, text_rule)
        rows, columns = config.height_px // config.patch_px, config.width_px // config.patch_px
        patches = rows * columns + config.class_tokens
        self._counts = ItemCounts(
            llm_tokens=config.visual_tokens + config.text_tokens,
            visual_tokens=config.visual_tokens,
            patches=patches,
            grid=(1, rows, columns),
            height_px=config.height_px,
            width_px=config.width_px,
            full=equal_segments(1, patches),
        )

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """The counts of every image."""
        check_sides(width_px, height_px)
        return self._counts

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts, config = self.image(width_px, height_px), self.config
        return (
            f"{width_px}x{height_px} px -> one tile of {config.width_px}x{config.height_px} px, as for every image",
            f"grid {counts.grid[1]} x {counts.grid[2]} + {config.class_tokens} class tokens = {counts.patches} patches",
            f"{counts.visual_tokens} visual + {config.text_tokens} written = {counts.llm_tokens} LLM tokens",
        )


def _llava(files: ProcessorFiles) -> TokenEstimator:
    if vision_config(files).get("model_type") == "pixtral":  # Pixtral's folder says model_type llava
        return pixtral.FACTORIES["pixtral"](files)
    patch = patch_px(files, 14)
    height, width = tile_px(files, default=224, crops=crops_by_default(files), square=_pads_to_square(files))
    features = (height // patch) * (width // patch)
    return FixedEstimator(
        FixedConfig(
            family="LLaVA",
            height_px=height,
            width_px=width,
            patch_px=patch,
            class_tokens=int(has_class_token(files)),
            visual_tokens=features + added_tokens(files) - dropped_tokens(files, "default"),
        )
    )


def has_class_token(files: ProcessorFiles, *, default: bool = True) -> bool:
    """Whether the vision tower adds a class token to the patches; `default`: where its type is not said."""
    kind = vision_config(files).get("model_type")
    return default if kind is None else kind not in _NO_CLASS_TOKEN


def added_tokens(files: ProcessorFiles) -> int:
    """`num_additional_image_tokens`, as the module's docstring says where it is absent."""
    added = option(files, "num_additional_image_tokens")
    if added is not None:
        return int(added)
    return 0 if files.processor.get("patch_size") is not None else int(has_class_token(files))


def crops_by_default(files: ProcessorFiles) -> bool:
    """Whether the class of the image processor crops the centre: CLIP's does, SigLIP's does not."""
    if files.image.get("image_processor_type") is None:
        return files.image.get("crop_size") is not None or has_class_token(files)
    return not any(kind in files.image_kinds for kind in _UNCROPPED)


def _pads_to_square(files: ProcessorFiles) -> bool:
    return "LlavaImageProcessor" in files.image_kinds and switch(files.image, "do_pad", False)


def dropped_tokens(files: ProcessorFiles, default: str) -> int:
    """1 where `vision_feature_select_strategy` drops the tower's first token, else 0."""
    strategy = option(files, "vision_feature_select_strategy", default)
    if strategy not in ("default", "full"):
        raise DataError(f"vision_feature_select_strategy={strategy!r}: use 'default' or 'full'")
    return int(strategy == "default")


def _paligemma(files: ProcessorFiles) -> FixedEstimator:
    height, width = tile_px(files, default=224, crops=False, square=False)
    patch = patch_px(files, 14)
    made = (height // patch) * (width // patch)
    # The processor has the number from its image processor; `config.json` has the tower's, which must be the same.
    tokens = files.processor.get("image_seq_length") or files.image.get("image_seq_length") or made
    return FixedEstimator(
        FixedConfig(family="PaliGemma", height_px=height, width_px=width, patch_px=patch, visual_tokens=tokens)
    )


def _gemma3n(files: ProcessorFiles) -> FixedEstimator:
    height, width = tile_px(files, default=768, crops=False, square=False)
    config = FixedConfig(
        family="Gemma 3n",
        height_px=height,
        width_px=width,
        patch_px=16,  # a convolutional tower: positions at its stride of 16, where its attention begins
        visual_tokens=option(files, "image_seq_length", files.model.get("vision_soft_tokens_per_image") or 256),
        text_tokens=2 + 2 * files.count_text(PARAGRAPH),
    )
    return FixedEstimator(config, files.text_rule)


def _deepseek_vl(files: ProcessorFiles) -> FixedEstimator:
    height, width = tile_px(files, default=384, crops=False, square=True)
    return FixedEstimator(
        FixedConfig(
            family="DeepSeek-VL",
            height_px=height,
            width_px=width,
            patch_px=patch_px(files, 16),
            visual_tokens=option(files, "num_image_tokens", 576),
        )
    )


def _chameleon(files: ProcessorFiles) -> FixedEstimator:
    height, width = tile_px(files, default=512, crops=True, square=False)
    return FixedEstimator(
        FixedConfig(
            family="Chameleon",
            height_px=height,
            width_px=width,
            patch_px=16,  # the image tokenizer halves its resolution four times
            visual_tokens=option(files, "image_seq_length", 1024),
            text_tokens=2,
        )
    )


FACTORIES = {
    "llava": _llava,
    "vipllava": _llava,
    "LlavaProcessor": _llava,
    "paligemma": _paligemma,
    "PaliGemmaProcessor": _paligemma,
    "gemma3n": _gemma3n,
    "Gemma3nProcessor": _gemma3n,
    "deepseek_vl": _deepseek_vl,
    "DeepseekVLProcessor": _deepseek_vl,
    "DeepseekVLImageProcessor": _deepseek_vl,
    "chameleon": _chameleon,
    "ChameleonProcessor": _chameleon,
    "ChameleonImageProcessor": _chameleon,
}
