"""tokenizer.json with what the configuration adds: ids as in transformers, bounded, read once per process."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers

from dataloaders import hf_tokenizer
from dataloaders.errors import DataError
from dataloaders.estimators import estimator_from_config
from dataloaders.estimators.text import FolderTextCounter, count_text_of, count_text_roughly
from dataloaders.hf_tokenizer import read_tokenizer

TEXT = "hello <s> world <|x|>a <pic> [B] <e>"


def _train(*specials: str, tokens: tuple[AddedToken, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world seconds", "what is it"] * 3, trainer)
    tokenizer.add_tokens(list(tokens))
    return tokenizer


Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    def make(tokenizer: Tokenizer | None = None, **files: object) -> Path:
        (tokenizer or _train("<s>", "<|x|>")).save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


def _flags(content: str, **flags: bool) -> dict[str, object]:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"bos_token": "<s>", "eos_token": "<e>", "image_token": "<pic>"}},
        {
            "tokenizer_config": {
                "bos_token": "<s>",
                "extra_special_tokens": {"image_token": "<pic>", "boi_token": "[B]"},
            }
        },
        {"tokenizer_config": {"bos_token": "<s>", "additional_special_tokens": ["[B]", "<e>"]}},
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": _flags("<e>", rstrip=True)}},
        {
            "tokenizer_config": {
                "eos_token": "<e>",
                "added_tokens_decoder": {
                    "301": _flags("[B]", lstrip=True, special=True),
                    "300": _flags("<pic>", special=False),
                    "1": _flags("<|x|>", lstrip=True, special=True),
                },
            }
        },
    ],
)
def test_ids_equal_those_of_transformers(folder: Folder, files: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    root = folder(**files)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(root)
    file = read_tokenizer(root)
    loaded = file.load()
    assert loaded.encode(TEXT).ids == reference(TEXT, add_special_tokens=False)["input_ids"]
    assert {k: v for k, v in reference.special_tokens_map.items() if k in file.names} == dict(file.names)
    assert sorted(loaded.added) == sorted(reference.added_tokens_encoder)
    special = {token.content for token in reference.added_tokens_decoder.values() if token.special}
    assert set(loaded.special_contents()) == special


def test_text_that_is_encoded_plainly_holds_no_added_token(folder: Folder) -> None:
    loaded = read_tokenizer(folder()).load()
    ids = loaded.encode_plainly(TEXT)
    assert loaded.backend.token_to_id("<|x|>") in loaded.encode(TEXT).ids
    assert not {loaded.backend.token_to_id(content) for content in loaded.added} & set(ids)


def test_settings_for_padded_batches_are_left_out(folder: Folder) -> None:
    tokenizer = _train("<s>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    assert 2 < len(read_tokenizer(folder(tokenizer)).load().encode("what is it what is it").ids) < 64


def test_what_the_post_processor_puts_around_a_text_is_known(folder: Folder) -> None:
    tokenizer = _train("<s>", "</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert read_tokenizer(folder(tokenizer)).load().surrounding == ([0], [1])


def test_texts_are_counted_as_they_stand_between_special_tokens(folder: Folder) -> None:
    tokenizer = _train("<s>")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    loaded = read_tokenizer(folder(tokenizer)).load()
    alone, within = len(loaded.encode("hello").ids), loaded.count_between_specials("hello")
    assert alone > within == 1
    assert loaded.count_between_specials("") == 0


def test_count_text_of_a_folder_counts_with_its_tokenizer(folder: Folder, tmp_path: Path) -> None:
    assert count_text_of(tmp_path) is None
    found = count_text_of(folder())
    assert found is not None
    count, rule = found
    text = "\u00e9\u00e9\u00e9"
    assert count(text) == 6 == len(read_tokenizer(tmp_path).load().encode(text).ids) != count_text_roughly(text)
    assert rule.startswith("tokenizer.json ")
    assert pickle.loads(pickle.dumps(count)) == count
    assert count_text_of(folder(_train("<s>", "<|y|>")))[1] != rule  # type: ignore[index]


def test_the_tokenizer_is_read_only_when_a_text_is_counted(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder()
    monkeypatch.setattr(hf_tokenizer, "_load", lambda *_: pytest.fail("read too early"))
    assert isinstance(count_text_of(root)[0], FolderTextCounter)  # type: ignore[index]
    config = {"model_type": "qwen2_5_vl", "vision_config": {}}
    (root / "config.json").write_text(json.dumps(config))
    (root / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14}))
    assert estimator_from_config(root).image(280, 280).llm_tokens == 100


def test_missing_damaged_huge_and_changed_files_are_refused(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer.json at .*save_pretrained"):
        read_tokenizer(tmp_path)
    file = read_tokenizer(folder())
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match="has changed since it was first read"):
        file.load()
    with pytest.raises(DataError, match="not a tokenizer of the library tokenizers"):
        read_tokenizer(tmp_path).load()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="the tokenizer is gone"):
        file.load()


def test_files_above_the_ceiling_are_not_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_tokenizer, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(DataError, match=r"\d+ bytes, above the 100 that are read"):
        read_tokenizer(folder())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "JSON of type list"),
        ('{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ('{"added_tokens_decoder": {"1": {"content": 5}}}', "added_tokens_decoder"),
        ('{"added_tokens_decoder": [1]}', "added_tokens_decoder"),
    ],
)
def test_damaged_configurations_are_refused(folder: Folder, content: str, why: str) -> None:
    root = folder()
    (root / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=why):
        read_tokenizer(root).load()
