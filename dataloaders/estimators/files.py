"""A model folder's configuration files, parsed and bounded: what every estimator is made from.

Files that are read: `config.json`, `preprocessor_config.json`, `video_preprocessor_config.json` and
`processor_config.json` (which may nest the other two under `image_processor` and `video_processor`).
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dataloaders.errors import DataError
from dataloaders.estimators.text import ROUGH, count_text_roughly

Config: TypeAlias = Mapping[str, Any]
CountText: TypeAlias = Callable[[str], int]
Preprocessing: TypeAlias = Literal["transformers", "qwen_vl_utils"]

NAMES = ("config", "preprocessor_config", "video_preprocessor_config", "processor_config")
NESTED = ("image_processor", "video_processor")
# Files of a model folder that say nothing about counts of media, so that a whole folder may be given as a mapping.
_OTHERS = ("added_tokens", "chat_template", "generation_config", "special_tokens_map", "tokenizer_config")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_MAX_CONFIG_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFiles:
    """What a factory of an estimator gets.

    Attributes:
        model: `config.json`.
        image: `preprocessor_config.json`, or what `processor_config.json` nests in its place; empty where absent.
        video: `video_preprocessor_config.json`, likewise; None where absent.
        processor: `processor_config.json` (keys of the processor itself); empty where absent.
        count_text: tokens of a text that the processor writes between visual tokens (timestamps, separators).
        text_rule: what `count_text` is, for fingerprints and people: the name and digest of a
            tokenizer, or "a rough rule".
        preprocessing: the library that resizes media before the processor sees them; None: what the family's users
            do by default.
        place: the folder, for errors.
    """

    model: Config = field(default_factory=dict)
    image: Config = field(default_factory=dict)
    video: Config | None = None
    processor: Config = field(default_factory=dict)
    count_text: CountText = count_text_roughly
    text_rule: str = ROUGH
    preprocessing: Preprocessing | None = None
    place: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names that may say which rule applies, the most exact first: processor, model type, processors of media.

        The processors of media say it only where there is neither of the others: models share their classes.
        """
        told = _names(
            self.processor.get("processor_class"), self.image.get("processor_class"), self.model.get("model_type")
        )
        return told or _names((self.video or {}).get("video_processor_type")) + self.image_kinds

    @property
    def image_kinds(self) -> tuple[str, ...]:
        """Class of the image processor, none where the folder does not say it."""
        return _names(self.image.get("image_processor_type"))

    def with_count_text(self, count_text: CountText, text_rule: str) -> "ProcessorFiles":
        """The same files with another count of texts."""
        return replace(self, count_text=count_text, text_rule=text_rule)


def _names(*candidates: object) -> tuple[str, ...]:
    # Fast and Pillow variants of an image processor count alike.
    names = (re.sub("(Fast|Pil)$", "", kind) for kind in candidates if isinstance(kind, str) and kind)
    return tuple(dict.fromkeys(names))


def read_files(source: str | os.PathLike[str] | Config) -> dict[str, Config]:
    """The parsed files of a model folder; or of a mapping from their names to contents; or of one flat mapping.

    A flat mapping has `model_type` and the image processor's keys, and stands for `config` and `preprocessor_config`;
    one that nests an `image_processor` or a `video_processor` stands for `processor_config` too. `~` is expanded.

    Raises:
        DataError: no such folder, none of the files, a name of no file that is known, damaged JSON.
    """
    if isinstance(source, Mapping):
        return _from_mapping(source)
    folder = model_folder(source)
    files = {name: read_object(folder / f"{name}.json") for name in NAMES if (folder / f"{name}.json").is_file()}
    if not files:
        raise DataError(
            f"none of {', '.join(f'{name}.json' for name in NAMES)}",
            place=str(folder),
            remedy="Name a model folder in Hugging Face format.",
        )
    return files


def model_folder(name: str | os.PathLike[str]) -> Path:
    """The folder that is named, `~` expanded.

    Raises:
        DataError: it is none; the remedy follows from what it is instead.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    if folder.exists():
        raise DataError("a file, not a folder", place=str(name), remedy=f"Name its folder: {folder.parent}")
    remedy = "Name a model folder in Hugging Face format."
    if _HUB_NAME.fullmatch(os.fspath(name)):
        remedy += (
            " Names of the Hugging Face hub are not resolved: download the configuration files of the model "
            f"({', '.join(f'{known}.json' for known in NAMES)}, tokenizer files) into a folder first."
        )
    raise DataError("no such folder", place=str(name), remedy=remedy)


def _from_mapping(source: Config) -> dict[str, Config]:
    named = {str(name).removesuffix(".json"): content for name, content in source.items()}
    nested = {name: source[name] for name in NESTED if isinstance(source.get(name), Mapping)}
    if not any(name in named for name in NAMES):
        whole = dict.fromkeys(("config", "preprocessor_config"), source)
        return {**whole, "processor_config": source} if nested else whole
    unknown = [name for name in named if name not in (*NAMES, *NESTED, *_OTHERS)]
    if unknown:
        raise DataError(
            f"the mapping names {', '.join(map(repr, unknown[:5]))} beside configuration files",
            remedy=f"Files that are read: {', '.join(NAMES)}; beside them may stand {' and '.join(NESTED)}.",
        )
    files = {name: named[name] for name in NAMES if named.get(name) is not None}
    for name, content in files.items():
        if not isinstance(content, Mapping):
            raise DataError(f"{name} is of type {type(content).__name__} where an object is needed")
    if nested:  # beside the files, as attributes of a processor
        files["processor_config"] = {**nested, **files.get("processor_config", {})}
    return files


def read_object(path: Path, *, remedy: str = "Download the file again.") -> Config:
    """The JSON object in a file of at most 16 MiB. Raises DataError where it is none."""
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise DataError(f"a configuration of more than {_MAX_CONFIG_BYTES} bytes", place=str(path))
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", place=str(path), remedy=remedy) from error
    if not isinstance(parsed, dict):
        raise DataError(
            f"JSON of type {type(parsed).__name__} where an object is needed", place=str(path), remedy=remedy
        )
    return parsed
