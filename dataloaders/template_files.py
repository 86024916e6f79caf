"""Where a model folder keeps its chat template, in the order in which transformers 5.24 looks.

    processor_config.json "chat_template"  >  chat_template.json  >  chat_template.jinja  >  tokenizer_config.json

Other templates than the default lie in `additional_chat_templates/NAME.jinja`, or in a list of named ones.
"""

from collections.abc import Iterator
from pathlib import Path

from dataloaders.errors import DataError
from dataloaders.hf_tokenizer import read_bounded, read_object

MAX_TEMPLATE_BYTES = 1024**2
_ADDITIONAL = "additional_chat_templates"


def find_template(folder: Path, name: str = "default") -> tuple[str, str]:
    """(jinja text, place of it) of the template called `name`.

    Raises:
        DataError: there is none of that name, or a file is damaged or too large.
    """
    seen: list[str] = []
    for names, place in _sources(folder):
        if name in names:
            return names[name], place
        seen += names
    raise DataError(
        f"no chat template {name!r}" + (f"; there are {', '.join(sorted(set(seen)))}" if seen else ""),
        place=str(folder),
        remedy="Put the model's template into chat_template.jinja."
        if not seen
        else "Choose one of them with template_name.",
    )


def _sources(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    for file in ("processor_config.json", "chat_template.json"):
        yield _of_json(folder / file)
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / _ADDITIONAL).glob("*.jinja"))}
    for template_name, path in files.items():
        if path.is_file():
            yield {template_name: _text(path)}, str(path)
    yield _of_json(folder / "tokenizer_config.json")


def _of_json(path: Path) -> tuple[dict[str, str], str]:
    value = read_object(path).get("chat_template")
    place = f"{path}, chat_template"
    if isinstance(value, str):
        names = {"default": value}
    elif isinstance(value, dict):
        names = {str(name): text for name, text in value.items() if isinstance(text, str)}
    elif isinstance(value, list):
        names = {
            str(entry.get("name")): entry["template"]
            for entry in value
            if isinstance(entry, dict) and isinstance(entry.get("template"), str)
        }
    else:
        names = {}
    if any(len(text) > MAX_TEMPLATE_BYTES for text in names.values()):
        raise DataError(f"a chat template of more than {MAX_TEMPLATE_BYTES} characters", place=place)
    return names, place


def _text(path: Path) -> str:
    try:
        return read_bounded(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error}", place=str(path), remedy="Save it as UTF-8.") from error
