"""From a model folder to the two rules of a scan: what media cost, and what text costs.

    folder in Hugging Face format   media: its processor's configuration   text: its tokenizer and chat template,
                                                                           or rough where they are not there
    folder of balancer-train export media: processor.json                  text: bytes
    none                            media: published Qwen2.5-VL settings   text: bytes

What was chosen is said by the reports and stored in the index.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from balancer.model_config import preset_names
from dataloaders.encoder import ByteEncoder, RecordEncoder
from dataloaders.errors import DataError
from dataloaders.estimators import Preprocessing, TokenEstimator, estimator_from_config
from dataloaders.estimators.files import model_folder, read_object
from dataloaders.hf_tokenizer import TOKENIZER_NAME
from dataloaders.rough_encoder import RoughEncoder
from dataloaders.template_encoder import TemplateEncoder
from dataloaders.template_files import find_template
from tools.errors import UsageError

TextRule: TypeAlias = Literal["auto", "template", "bytes", "rough"]
TrainOn: TypeAlias = Literal["assistant", "last", "all"]

PUBLISHED: Mapping[str, Any] = {"model_type": "qwen2_5_vl", "min_pixels": 4 * 28**2, "max_pixels": 16_384 * 28**2}
EXPORTED_FILE = "processor.json"  # what `balancer-train export` calls the rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRules:
    """What media and text cost.

    Attributes:
        note: why text is estimated although nobody asked for that; "" where it is not.
    """

    estimator: TokenEstimator
    encoder: RecordEncoder
    note: str = ""


def load_rules(
    model: Path | None,
    *,
    text: TextRule = "auto",
    train_on: TrainOn = "assistant",
    preprocessing: Preprocessing | None = None,
) -> ModelRules:
    """The rules of a model folder; None: the published Qwen2.5-VL settings.

    Args:
        text: `template`: tokenizer and chat template of the folder; `bytes`: one token a byte; `rough`: an estimate
            from bytes; `auto`: the folder's own where it has them, see the module.
        preprocessing: see `estimator_from_config`.

    Raises:
        UsageError: no such folder.
        DataError: no known rule in it, or no template under `text="template"`.
    """
    estimator = load_estimator(model, preprocessing=preprocessing)
    encoder, note = load_encoder(model, text, train_on)
    return ModelRules(estimator=estimator, encoder=encoder, note=note)


def named_folder(model: Path) -> Path:
    """The folder that --model names, `~` expanded. Raises UsageError where it is none."""
    try:
        return model_folder(model)
    except DataError as error:
        if str(model).lower() in preset_names():
            raise UsageError(
                f"--model {model}: presets name costs for balancer-analyze plan alone. Counting media needs a folder "
                "with the configuration files of the model's processor (config.json, preprocessor_config.json)."
            ) from None
        raise UsageError(f"--model {model}: {error.cause}. {error.remedy}") from None


def load_estimator(model: Path | None, *, preprocessing: Preprocessing | None = None) -> TokenEstimator:
    """The media rule of a model folder in Hugging Face format or of `balancer-train export`."""
    if model is None:
        return estimator_from_config(PUBLISHED, preprocessing=preprocessing)
    model = named_folder(model)
    exported = model / EXPORTED_FILE
    if exported.is_file():
        return estimator_from_config(read_object(exported, remedy="Export the run again."), preprocessing=preprocessing)
    return estimator_from_config(model, preprocessing=preprocessing)


def load_encoder(model: Path | None, text: TextRule, train_on: TrainOn) -> tuple[RecordEncoder, str]:
    """(the text rule of a model folder, why it estimates although nobody asked for that)."""
    model, note = None if model is None else named_folder(model), ""
    if text == "auto":
        text, note = _own_text_rule(model)
    if text == "bytes":
        return ByteEncoder(train_on=train_on), note
    if text == "rough":
        return RoughEncoder(train_on=train_on), note
    if model is None:
        raise DataError(
            "there is no chat template without a model folder", place="--text template", remedy="Give --model FOLDER."
        )
    return TemplateEncoder.from_folder(model, train_on=train_on), note


def _own_text_rule(model: Path | None) -> tuple[TextRule, str]:
    if model is None or (model / EXPORTED_FILE).is_file():
        return "bytes", ""
    if not (model / TOKENIZER_NAME).is_file():
        return "rough", f"text is estimated: no {TOKENIZER_NAME} in {model}"
    try:
        find_template(model)
    except DataError as error:  # a tokenizer alone does not say what stands around the turns
        return "rough", f"text is estimated although {TOKENIZER_NAME} is there: {error}"
    return "template", ""
