"""Estimators: a model folder (or its configuration as a mapping) -> the exact token arithmetic of its processor.

    estimator_from_config("path/to/model").image(width_px=640, height_px=480).llm_tokens

Files that are read: `config.json`, `preprocessor_config.json`, `video_preprocessor_config.json` and
`processor_config.json` (the last nests the other two under `image_processor` and `video_processor`). A family is added
with `register_estimator(model_type, factory)`; nothing is ever guessed from a family name alone.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from dataloaders.errors import DataError
from dataloaders.estimators.base import TokenEstimator as TokenEstimator
from dataloaders.estimators.qwen2_5_vl import Qwen25VLConfig as Qwen25VLConfig
from dataloaders.estimators.qwen2_5_vl import Qwen25VLEstimator as Qwen25VLEstimator
from dataloaders.estimators.qwen2_5_vl import smart_resize as smart_resize

Config: TypeAlias = Mapping[str, Any]
Factory: TypeAlias = Callable[[Config, Config, Config | None], TokenEstimator]

_NAMES = ("config", "preprocessor_config", "video_preprocessor_config", "processor_config")
_MAX_CONFIG_BYTES = 16 * 1024**2
_registry: dict[str, Factory] = {}


def register_estimator(model_type: str, factory: Factory) -> None:
    """Register `factory(model, image, video) -> TokenEstimator` for a `model_type`.

    The arguments are the parsed `config.json`, `preprocessor_config.json` and `video_preprocessor_config.json` (None
    where there is none).

    Raises:
        DataError: `model_type` is registered already.
    """
    if model_type in _registry:
        raise DataError(f"an estimator for model_type {model_type!r} is registered already")
    _registry[model_type] = factory


def estimator_from_config(source: str | os.PathLike[str] | Config) -> TokenEstimator:
    """The estimator of a model.

    Args:
        source: a model folder; or a mapping from the names above (without `.json`) to parsed files; or one flat
            mapping with `model_type` and the image processor's keys.

    Raises:
        DataError: no such folder or file, damaged JSON, no `model_type`, or one that is not registered.
    """
    place = "" if isinstance(source, Mapping) else str(source)
    files = _from_mapping(source) if isinstance(source, Mapping) else _from_folder(Path(source))
    model, processor = files.get("config", {}), files.get("processor_config", {})
    model_type = model.get("model_type")
    if not isinstance(model_type, str) or model_type not in _registry:
        raise DataError(
            f"no estimator for model_type {model_type!r}; available: {', '.join(sorted(_registry))}",
            place=place,
            remedy="Add one with dataloaders.estimators.register_estimator(model_type, factory).",
        )
    image = files.get("preprocessor_config") or processor.get("image_processor") or {}
    video = files.get("video_preprocessor_config") or processor.get("video_processor")
    try:
        return _registry[model_type](model, image, video)
    except (AttributeError, TypeError) as error:  # a text or a list where a number or an object is needed
        raise DataError(
            f"the processor options do not have the expected types: {error}",
            place=place,
            remedy="Compare them with the published ones of this model.",
        ) from error


def _from_mapping(source: Config) -> dict[str, Config]:
    if any(name in source for name in _NAMES):
        files = {name: source[name] for name in _NAMES if source.get(name) is not None}
        for name, content in files.items():
            if not isinstance(content, Mapping):
                raise DataError(f"{name} is of type {type(content).__name__} where an object is needed")
        return files
    return {"config": source, "preprocessor_config": source}


def _from_folder(folder: Path) -> dict[str, Config]:
    if not (folder / "config.json").is_file():
        raise DataError("no config.json", place=str(folder), remedy="Name a model folder in Hugging Face format.")
    return {name: _read(folder / f"{name}.json") for name in _NAMES if (folder / f"{name}.json").is_file()}


def _read(path: Path) -> Config:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise DataError(f"a configuration of more than {_MAX_CONFIG_BYTES} bytes", place=str(path))
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", place=str(path), remedy="Download the file again.") from error
    if not isinstance(parsed, dict):
        raise DataError(f"JSON of type {type(parsed).__name__} where an object is needed", place=str(path))
    return parsed


def _qwen2_5_vl(model: Config, image: Config, video: Config | None) -> TokenEstimator:
    return Qwen25VLEstimator(Qwen25VLConfig.from_hf(model, image, video))


register_estimator("qwen2_5_vl", _qwen2_5_vl)
