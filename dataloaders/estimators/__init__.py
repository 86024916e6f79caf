"""Estimators: a model folder (or its configuration as a mapping) -> the exact token arithmetic of its processor.

    estimator_from_config("path/to/model").image(width_px=640, height_px=480).llm_tokens

One file a family. The rule follows from the configuration alone, never from a family's name: the same clip costs 400
to 29,160 tokens under configurations that are in use. Another family is added with `register_estimator(kind, factory)`.
"""

import os
from collections.abc import Callable, Mapping
from typing import TypeAlias

from dataloaders.errors import DataError
from dataloaders.estimators import (
    aria,
    cohere2_vision,
    deepseek_vl2,
    ernie4_5_vl,
    fixed,
    fuyu,
    gemma3,
    gemma4,
    glm4v,
    idefics2,
    idefics3,
    internvl,
    kimi,
    lfm2_vl,
    llama4,
    llava_next,
    llava_onevision,
    minicpmv,
    minicpmv4_6,
    mllama,
    molmo2,
    paddleocr_vl,
    phi3_v,
    phi4_multimodal,
    pixtral,
    qwen2_5_vl,
    qwen3_vl,
    smolvlm,
    video_llama_3,
)
from dataloaders.estimators.base import PatchEstimator as PatchEstimator
from dataloaders.estimators.base import TokenEstimator as TokenEstimator
from dataloaders.estimators.files import NESTED, read_files
from dataloaders.estimators.files import Config as Config
from dataloaders.estimators.files import CountText as CountText
from dataloaders.estimators.files import Preprocessing as Preprocessing
from dataloaders.estimators.files import ProcessorFiles as ProcessorFiles
from dataloaders.estimators.qwen2_5_vl import Qwen25VLConfig as Qwen25VLConfig
from dataloaders.estimators.qwen2_5_vl import Qwen25VLEstimator as Qwen25VLEstimator
from dataloaders.estimators.resize_rule import smart_resize as smart_resize
from dataloaders.estimators.text import count_text_of

Factory: TypeAlias = Callable[[ProcessorFiles], TokenEstimator]

_FAMILIES = (  # each module has FACTORIES: kind -> factory
    aria,
    cohere2_vision,
    deepseek_vl2,
    ernie4_5_vl,
    fixed,
    fuyu,
    gemma3,
    gemma4,
    glm4v,
    idefics2,
    idefics3,
    internvl,
    kimi,
    lfm2_vl,
    llama4,
    llava_next,
    llava_onevision,
    minicpmv,
    minicpmv4_6,
    mllama,
    molmo2,
    paddleocr_vl,
    phi3_v,
    phi4_multimodal,
    pixtral,
    qwen2_5_vl,
    qwen3_vl,
    smolvlm,
    video_llama_3,
)
_registry: dict[str, Factory] = {}


def register_estimator(kind: str, factory: Factory) -> None:
    """Register `factory(files) -> TokenEstimator` for a `model_type`, or for the class name of a processor.

    Raises:
        DataError: `kind` is registered already.
    """
    if kind in _registry:
        raise DataError(f"an estimator for {kind!r} is registered already")
    _registry[kind] = factory


def registered_estimators() -> tuple[str, ...]:
    """All registered kinds, sorted."""
    return tuple(sorted(_registry))


def estimator_from_config(
    source: str | os.PathLike[str] | Config,
    *,
    preprocessing: Preprocessing | None = None,
    count_text: CountText | None = None,
) -> TokenEstimator:
    """The estimator of a model.

    Args:
        source: a model folder; or a mapping from names of its configuration files (with or without `.json`) to their
            contents; or one flat mapping with `model_type` and the image processor's keys.
        preprocessing: the library that resizes media before the processor sees them: `transformers` or
            `qwen_vl_utils`. None: what the family's users do by default.
        count_text: tokens of a text that the processor writes between visual tokens. None: the tokenizer of the
            folder, or the rule of `dataloaders.estimators.text`, marked "rough" in `.rule`.

    Raises:
        DataError: no such folder or file, a mapping that names other files, damaged JSON, options of wrong types, or a
            kind that is not registered.
    """
    place = "" if isinstance(source, Mapping) else os.path.expanduser(source)
    files = _processor_files(read_files(source), preprocessing, count_text, place)
    factory = next((_registry[kind] for kind in files.kinds if kind in _registry), None)
    if factory is None:
        raise DataError(
            f"no estimator for {' or '.join(map(repr, files.kinds)) or 'a configuration without model_type'}",
            place=place,
            remedy="Add one with dataloaders.estimators.register_estimator(kind, factory). Model types that have one: "
            + ", ".join(kind for kind in registered_estimators() if kind.islower()),
        )
    try:
        return factory(files)
    except (AttributeError, TypeError) as error:  # a text or a list where a number or an object is needed
        raise DataError(
            f"the processor options do not have the expected types: {error}",
            place=place,
            remedy="Compare them with the published ones of this model.",
        ) from error


def _processor_files(
    found: Mapping[str, Config], preprocessing: Preprocessing | None, count_text: CountText | None, place: str
) -> ProcessorFiles:
    processor = found.get("processor_config", {})
    # As in transformers: what is nested wins over the files of its own, which an older version saved.
    nested = {name: processor[name] for name in NESTED if processor.get(name)}  # an empty one says nothing
    for name, content in nested.items():
        if not isinstance(content, Mapping):
            raise DataError(f"{name}={content!r}: needs an object", place=place)
    files = ProcessorFiles(
        model=found.get("config", {}),
        image=nested.get("image_processor", found.get("preprocessor_config", {})),
        video=nested.get("video_processor", found.get("video_preprocessor_config")),
        processor=processor,
        preprocessing=preprocessing,
        place=place,
    )
    if count_text is not None:
        return files.with_count_text(count_text, "a given function")
    own = count_text_of(place) if place else None
    return files if own is None else files.with_count_text(*own)


def _without_qwen_vl_utils(factory: Factory) -> Factory:
    """The same factory, for a family whose media qwen-vl-utils does not prepare."""

    def checked(files: ProcessorFiles) -> TokenEstimator:
        if files.preprocessing == "qwen_vl_utils":
            raise DataError(
                "qwen_vl_utils does not prepare media of this family",
                place=files.place or " or ".join(files.kinds),
                remedy="Leave `preprocessing` out.",
            )
        return factory(files)

    return checked


for _family in _FAMILIES:
    for _kind, _factory in _family.FACTORIES.items():
        _takes_utils = _family in (qwen2_5_vl, qwen3_vl)
        register_estimator(_kind, _factory if _takes_utils else _without_qwen_vl_utils(_factory))
