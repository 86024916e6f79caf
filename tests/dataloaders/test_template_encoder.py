"""Model folders as encoders: tokens and masks equal transformers', media take their positions, injections stay text."""

import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dataloaders.chat import IGNORED_LABEL, EncodedSample
from dataloaders.chat_template import RenderLimits
from dataloaders.counts import MediaKind
from dataloaders.encoder import RecordEncoder, TextCounts
from dataloaders.errors import DataError, Reason, RecordError
from dataloaders.record import MediaPart, MediaRef, Record, TextPart, Turn
from dataloaders.scan_rows import text_rule
from dataloaders.template_encoder import TemplateEncoder

LINES = ["hello world, what is it? A cat.", "The quick brown fox", "user assistant system\n\n", "more or less 123"] * 4
SPECIALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|box_start|>",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (  # in the manner of Llama 3: bos, headers, contents trimmed
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INSTRUCT = (  # in the manner of Mistral: no switch for the prompt, system text inside the first user turn
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content ~ '\n\n' %}{% elif m.role == 'user' %}[INST] {{ ns.system ~ m.content }} [/INST]"
    "{% set ns.system = '' %}{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
ALTERNATING = (  # in the manner of Gemma: strict roles
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
THINKING = (  # in the manner of Qwen3: reasoning of earlier turns is dropped
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPEN_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
PARTS = (  # in the manner of Qwen2.5-VL: strings or lists
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGES_FIRST = (  # in the manner of LLaVA: lists only, images before the text of a turn
    "{% for m in messages %}{{ m.role.upper() }}: "
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
    "{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
PLAIN_TEMPLATES = {
    "chatml": CHATML,
    "marked": CHATML_MARKED,
    "headers": HEADERS,
    "instruct": INSTRUCT,
    "alternating": ALTERNATING,
    "thinking": THINKING,
    "open thought": OPEN_THOUGHT,
}


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def _sentence_like() -> Tokenizer:
    """BPE with byte fall-back and `▁` for spaces, bos put first by the post-processor: in the manner of Llama 2."""
    letters = sorted({char for line in LINES for char in line} | {"▁"})
    vocab = {name: i for i, name in enumerate(["<unk>", *SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    bos = vocab["<s>"]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def _word_level() -> Tokenizer:
    words = sorted({word for line in LINES for word in line.replace(",", " ,").split()})
    vocab = {name: i for i, name in enumerate(["[UNK]", *SPECIALS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


TOKENIZERS = {"byte level": _byte_level, "sentence like": _sentence_like, "word level": _word_level}
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """`folder(template, tokenizer="byte level", **files)`: a model folder; `files` are JSON contents by stem."""

    def make(template: str, tokenizer: str = "byte level", **files: object) -> Path:
        root = tmp_path_factory.mktemp("model")
        TOKENIZERS[tokenizer]().save(str(root / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (root / "tokenizer_config.json").write_text(json.dumps(config))
        (root / "chat_template.jinja").write_text(template)
        for name, content in files.items():
            (root / f"{name}.json").write_text(json.dumps(content))
        return root

    return make


def _record(*turns: tuple[str, list[str | int]], kinds: tuple[MediaKind, ...] = ()) -> Record:
    parsed = tuple(
        Turn(role=role, parts=tuple(TextPart(p) if isinstance(p, str) else MediaPart(p) for p in parts))
        for role, parts in turns
    )
    media = tuple(MediaRef(kind=kind, member=f"k.{i}", size_bytes=1) for i, kind in enumerate(kinds))
    return Record(shard="s.tar", key="k", turns=parsed, media=media)


DIALOGUE = _record(
    ("user", ["What is it?"]), ("assistant", [" A cat.\n"]), ("user", ["And é🙂?"]), ("assistant", ["A fox"])
)


def _messages(record: Record, *, as_lists: bool = False) -> list[dict[str, object]]:
    return [
        {
            "role": turn.role,
            "content": [
                {"type": "text", "text": p.text} if isinstance(p, TextPart) else _part(record, p) for p in turn.parts
            ]
            if as_lists
            else "".join(part.text for part in turn.parts if isinstance(part, TextPart)),
        }
        for turn in record.turns
    ]


def _part(record: Record, part: MediaPart) -> dict[str, str]:
    return {"type": record.media[part.index].kind.name.lower()}


def _learned(encoder: TemplateEncoder, encoded: EncodedSample) -> str:
    ids = encoded.labels[encoded.labels != IGNORED_LABEL].tolist()
    return str(encoder.tokenizer.load().backend.decode(ids, skip_special_tokens=False))


def _mask(encoded: EncodedSample) -> list[int]:
    """The assistant mask that the shifted labels stand for."""
    return [0, *(encoded.labels[:-1] != IGNORED_LABEL).astype(int).tolist()]


def _reference(root: Path):  # type: ignore[no-untyped-def]
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(root)


# Equal to transformers


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", PLAIN_TEMPLATES)
def test_tokens_equal_those_of_apply_chat_template(folder: Folder, template: str, tokenizer: str) -> None:
    root = folder(PLAIN_TEMPLATES[template], tokenizer)
    record = DIALOGUE if template != "open thought" else _record(*[("user", ["Hi"]), ("assistant", ["A cat."])])
    expected = _reference(root).apply_chat_template(_messages(record), return_dict=True)["input_ids"]
    assert TemplateEncoder.from_folder(root).encode(record, []).tokens.tolist() == expected


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_mask_of_marked_answers_equals_transformers(folder: Folder, tokenizer: str) -> None:
    root = folder(CHATML_MARKED, tokenizer)
    expected = _reference(root).apply_chat_template(
        _messages(DIALOGUE), return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = TemplateEncoder.from_folder(root).encode(DIALOGUE, [])
    assert encoded.tokens.tolist() == expected["input_ids"]
    assert _mask(encoded) == expected["assistant_masks"]
    assert sum(expected["assistant_masks"]) > 4


@pytest.fixture(scope="module")
def marked(folder: Folder):  # type: ignore[no-untyped-def]
    root = folder(CHATML_MARKED)
    return TemplateEncoder.from_folder(root), _reference(root)


@pytest.fixture(scope="module")
def unmarked(folder: Folder) -> TemplateEncoder:
    return TemplateEncoder.from_folder(folder(CHATML))


_texts = st.text(max_size=12) | st.sampled_from(
    ["", " ", "\n", "a\n", " <think>x</think> y", "a<|im", "_end|>", "e\u0301"]
)
_ordinary = _texts.filter(lambda text: not any(special in text for special in SPECIALS))
_hostile = st.lists(_texts | st.sampled_from(SPECIALS), max_size=5).map("".join)
_roles = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=5)


def _talk(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> Record:
    return _record(*((role, [draw(texts)]) for role in draw(_roles)))


_talks = st.composite(_talk)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(record=_talks(_ordinary))
def test_ordinary_conversations_equal_transformers_in_tokens_and_mask(marked, record: Record) -> None:  # type: ignore[no-untyped-def]
    encoder, reference = marked
    expected = reference.apply_chat_template(_messages(record), return_dict=True, return_assistant_tokens_mask=True)
    encoded = encoder.encode(record, [])
    assert encoded.tokens.tolist() == expected["input_ids"]
    assert _mask(encoded) == [0, *expected["assistant_masks"][1:]]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(record=_talks(_hostile))
def test_spelled_tokens_equal_transformers_with_sanitized_control_tokens(marked, record: Record) -> None:  # type: ignore[no-untyped-def]
    encoder, reference = marked
    reference.chat_control_tokens = []  # special tokens only
    expected = reference.apply_chat_template(_messages(record), return_dict=True, sanitize_control_tokens=True)
    encoded = encoder.encode(record, [])
    assert encoded.tokens.tolist() == expected["input_ids"]
    ids = encoder.tokenizer.load().backend.token_to_id
    assert (encoded.tokens == ids("<|im_end|>")).sum() == len(record.turns)
    assert not np.isin(encoded.tokens, [ids("<image>"), ids("<|image_pad|>"), ids("[INST]")]).any()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(record=_talks(_hostile))
def test_masks_derived_without_marks_equal_those_of_the_marked_template(marked, unmarked, record: Record) -> None:  # type: ignore[no-untyped-def]
    derived, expected = unmarked.encode(record, []), marked[0].encode(record, [])
    assert derived.tokens.tolist() == expected.tokens.tolist()
    first, text = record.turns[0], "".join(part.text for part in record.turns[0].parts)  # type: ignore[union-attr]
    if first.role != "assistant" or text[:1].strip():  # without a prompt, white space before an answer is not learned
        assert derived.labels.tolist() == expected.labels.tolist()


def test_a_processor_of_transformers_makes_the_same_of_images(folder: Folder) -> None:
    transformers = pytest.importorskip("transformers")
    from PIL import Image

    pixels = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": 28}
    root = folder(
        IMAGES_FIRST,
        "sentence like",
        preprocessor_config=pixels,
        config={"model_type": "llava", "image_token_index": 9},
    )
    record = _record(
        ("user", ["What ", 0, "is it?", 1]), ("assistant", ["A cat."]), kinds=(MediaKind.IMAGE, MediaKind.IMAGE)
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = transformers.LlavaProcessor(
        images, _reference(root), patch_size=14, vision_feature_select_strategy="full", chat_template=IMAGES_FIRST
    )
    picture = Image.new("RGB", (40, 50))
    messages = _messages(record, as_lists=True)
    for part in messages[0]["content"]:  # type: ignore[attr-defined]
        if part["type"] == "image":
            part["image"] = picture
    expected = processor.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][0]
    encoder = TemplateEncoder.from_folder(root)
    encoded = encoder.encode(record, [4, 4])
    assert encoded.tokens.tolist() == list(expected)
    assert encoded.tokens[0] == encoder.tokenizer.load().backend.token_to_id("<s>")  # the processor puts it there


# Labels


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        ("chatml", " A cat.\n<|im_end|>A fox<|im_end|>"),
        ("marked", " A cat.\n<|im_end|>A fox<|im_end|>"),
        ("headers", "A cat.<|eot_id|>A fox<|eot_id|>"),
        ("instruct", " A cat.\n</s> A fox</s>"),
        ("alternating", "A cat.<end_of_turn>A fox<end_of_turn>"),
        ("open thought", " A cat.\n<|im_end|>A fox<|im_end|>"),
    ],
)
def test_answers_and_their_end_tokens_are_learned(folder: Folder, template: str, learned: str) -> None:
    encoder = TemplateEncoder.from_folder(folder(PLAIN_TEMPLATES[template]))
    assert _learned(encoder, encoder.encode(DIALOGUE, [])).replace(" A fox</s>", " A fox</s>") == learned
    last = TemplateEncoder.from_folder(Path(encoder.tokenizer.path).parent, train_on="last")
    assert _learned(last, last.encode(DIALOGUE, [])) == learned[learned.index("A fox") - (template == "instruct") :]


def test_training_on_all_adds_the_texts_of_other_turns(folder: Folder) -> None:
    record = _record(("system", ["Be brief."]), ("user", [" Hi ", "there "]), ("assistant", ["A cat."]))
    for template in (CHATML, CHATML_MARKED):
        encoder = TemplateEncoder.from_folder(folder(template), train_on="all")
        assert _learned(encoder, encoder.encode(record, [])) == "Be brief.Hi thereA cat.<|im_end|>"


def test_an_answer_that_opens_the_conversation_starts_with_its_text(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(CHATML))
    assert _learned(encoder, encoder.encode(_record(("assistant", ["A cat."])), [])) == "A cat.<|im_end|>"


def test_an_empty_answer_teaches_its_end(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(CHATML))
    assert _learned(encoder, encoder.encode(_record(("user", ["Hi"]), ("assistant", [])), [])) == "<|im_end|>"


def test_a_template_that_drops_earlier_reasoning_is_refused_and_not_masked_wrongly(folder: Folder) -> None:
    record = _record(
        ("user", ["Hi"]),
        ("assistant", ["<think>well</think>\nA cat."]),
        ("user", ["More"]),
        ("assistant", ["<think>hm</think>\nA fox"]),
    )
    root = folder(THINKING)
    with pytest.raises(RecordError, match=r"takes texts apart at shard s.tar, key k. Use the variant .*generation"):
        TemplateEncoder.from_folder(root).encode(record, [])


def test_a_template_that_writes_earlier_turns_otherwise_is_refused(folder: Folder) -> None:
    shifting = CHATML.replace("{{ m.content }}", "{% if loop.revindex == 2 %}(old) {% endif %}{{ m.content }}")
    with pytest.raises(RecordError, match="writes the turns before turn 3 otherwise when there are later ones"):
        TemplateEncoder.from_folder(folder(shifting)).encode(DIALOGUE, [])


def test_a_template_that_rewrites_answers_is_refused_unless_it_marks_them(folder: Folder) -> None:
    loud = CHATML.replace("{{ m.content }}", "{{ m.content | reverse }}")
    with pytest.raises(RecordError, match=r"the chat template (rewrites texts|takes texts apart)"):
        TemplateEncoder.from_folder(folder(loud)).encode(DIALOGUE, [])
    marked = TemplateEncoder.from_folder(folder(CHATML_MARKED.replace("m.content }}", "m.content | upper }}")))
    assert _learned(marked, marked.encode(DIALOGUE, [])) == " A CAT.\n<|im_end|>A FOX<|im_end|>"


# Media

VISION = {"config": {"model_type": "x", "image_token_id": 6, "video_token_id": 7}}
MIXED = _record(
    ("user", ["See ", 0, " and ", 1]),
    ("assistant", ["A cat."]),
    kinds=(MediaKind.IMAGE, MediaKind.VIDEO),
)


def test_media_take_their_positions_and_are_never_learned(folder: Folder) -> None:
    root = folder(PARTS, **VISION)
    encoder = TemplateEncoder.from_folder(root, train_on="all")
    encoded = encoder.encode(MIXED, [3, 5])
    assert [(span.count, span.media_index) for span in encoded.spans] == [(3, 0), (5, 1)]
    assert encoded.tokens[encoded.visual_index].tolist() == [6] * 3 + [7] * 5
    assert not set(encoded.labels.tolist()) & {6, 7}
    one_each = _reference(root).apply_chat_template(_messages(MIXED, as_lists=True), return_dict=True)["input_ids"]
    assert encoder.encode(MIXED, [1, 1]).tokens.tolist() == one_each
    assert len(encoded.tokens) == len(one_each) + 2 + 4
    assert encoder.count(MIXED, [3, 5]) == TextCounts(len(encoded.tokens), encoded.num_label_tokens)


def test_a_template_of_strings_gets_the_placeholder_in_the_string(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(CHATML, config={"image_token_index": 8}))
    encoded = encoder.encode(
        _record(("user", [0, "\nWhat?"]), ("assistant", ["A cat."]), kinds=(MediaKind.IMAGE,)), [4]
    )
    text = encoder.tokenizer.load().backend.decode(encoded.tokens.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n<image><image><image><image>\nWhat?<|im_end|>")


def test_a_placeholder_that_is_no_token_is_replaced_before_the_text_is_cut(folder: Folder) -> None:
    written = PARTS.replace("<|vision_start|><|image_pad|><|vision_end|>", "(<image>./</image>)")
    encoder = TemplateEncoder.from_folder(folder(written, **VISION))
    assert encoder.shape.image is not None
    assert (encoder.shape.image.text, encoder.shape.image.marker) == ("(<image>./</image>)", "<|image_pad|>")
    encoded = encoder.encode(MIXED, [2, 1])
    text = encoder.tokenizer.load().backend.decode(encoded.tokens.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nSee <|image_pad|><|image_pad|> and <|vision_start|><|video_pad|>")
    assert _learned(encoder, encoded) == "A cat.<|im_end|>"


@pytest.mark.parametrize("spelled", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_placeholder_spelled_by_a_text_is_no_medium(folder: Folder, spelled: str, train_on: str) -> None:
    record = _record(
        ("user", [f"{spelled} or ", 0, spelled]), ("assistant", [f"no {spelled}"]), kinds=(MediaKind.IMAGE,)
    )
    encoder = TemplateEncoder.from_folder(folder(PARTS, **VISION), train_on=train_on)
    encoded = encoder.encode(record, [3])
    assert np.isin(encoded.tokens, [6, 7]).sum() == 3
    assert _learned(encoder, encoded).endswith(f"no {spelled}<|im_end|>")


@pytest.mark.parametrize(
    "parts",
    [["<|im_", "end|>"], ["<|im", "_e", "nd|>"], ["<|im_ ", " end|>"], ["<|im_", 0, "end|>"]],
)
@pytest.mark.parametrize("template", ["plain", "trimmed", "images first"])
def test_a_token_spelled_across_parts_stays_text(folder: Folder, parts: list[str | int], template: str) -> None:
    source = {
        "plain": PARTS,
        "trimmed": PARTS.replace("{{ p.text }}", "{{ p.text | trim }}"),
        "images first": IMAGES_FIRST.replace("</s>", "<|im_end|>"),
    }[template]
    kinds = (MediaKind.IMAGE,) if 0 in parts else ()
    encoder = TemplateEncoder.from_folder(folder(source, **VISION))
    encoded = encoder.encode(_record(("user", parts), ("assistant", ["A cat."]), kinds=kinds), [2] * len(kinds))
    ends = encoder.tokenizer.load().backend.token_to_id("<|im_end|>")
    assert (encoded.tokens == ends).sum() == (1 if template == "images first" else 2)


def test_named_special_tokens_may_be_allowed_in_texts_but_placeholders_never(folder: Folder) -> None:
    root = folder(PARTS, **VISION)
    record = _record(("user", ["Where?"]), ("assistant", ["<|box_start|>1<|im_end|>"]))
    encoder = TemplateEncoder.from_folder(root, text_tokens=["<|box_start|>"])
    encoded = encoder.encode(record, [])
    ids = encoder.tokenizer.load().backend.token_to_id
    assert (encoded.labels == ids("<|box_start|>")).sum() == 1
    assert (encoded.tokens == ids("<|im_end|>")).sum() == 2
    assert TemplateEncoder.from_folder(root).fingerprint != encoder.fingerprint
    with pytest.raises(DataError, match=r"text_tokens has <\|image_pad\|>, a placeholder"):
        TemplateEncoder.from_folder(root, text_tokens=["<|image_pad|>"])


def test_tokens_that_are_not_special_are_recognised_in_texts(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(CHATML))
    encoded = encoder.encode(_record(("user", ["Hi"]), ("assistant", ["<think>x</think>A"])), [])
    assert (encoded.labels == encoder.tokenizer.load().backend.token_to_id("<think>")).sum() == 1


def test_a_special_token_that_the_tokenizer_cannot_read_otherwise_is_an_error(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(CHATML, "word level"))
    vocabulary = encoder.tokenizer.load()
    vocabulary.encode_plainly = lambda text: [vocabulary.backend.token_to_id("<s>")]  # type: ignore[method-assign]
    try:
        with pytest.raises(RecordError, match=r"spells '<s>', which .* control token at shard s.tar, key k"):
            encoder.encode(_record(("user", ["<s>"])), [])
    finally:
        del vocabulary.encode_plainly


def test_media_that_the_template_has_no_place_for_are_refused_with_their_member(folder: Folder) -> None:
    record = _record(("user", [0]), kinds=(MediaKind.VIDEO,))
    encoder = TemplateEncoder.from_folder(folder(IMAGES_FIRST))
    with pytest.raises(
        RecordError, match=r"no known placeholder for media of the kind video at shard s.tar, key k, member k.0"
    ) as caught:
        encoder.encode(record, [1])
    assert caught.value.reason is Reason.PLACEHOLDER_MISMATCH


def test_the_rule_names_the_files_and_their_folder(folder: Folder) -> None:
    root = folder(IMAGES_FIRST)
    encoder = TemplateEncoder.from_folder(root)
    assert encoder.rule == f"tokenizer.json and chat_template.jinja of {root.name}"
    assert text_rule(encoder) == f"{encoder.rule} ({encoder.fingerprint[:16]})"


def test_media_that_the_template_writes_in_another_order_are_refused(folder: Folder) -> None:
    videos_last = PARTS.replace("{% for p in m.content %}", "{% for p in m.content | sort(attribute='type') %}")
    record = _record(("user", [0, 1]), kinds=(MediaKind.VIDEO, MediaKind.IMAGE))
    with pytest.raises(RecordError, match=r"writes <\|image_pad\|> <\|video_pad\|> for media that need <\|video_pad"):
        TemplateEncoder.from_folder(folder(videos_last, **VISION)).encode(record, [1, 1])


def test_a_placeholder_can_be_named(folder: Folder) -> None:
    odd = PARTS.replace("<|image_pad|>", "<|box_start|>")
    root = folder(odd, config={})
    assert TemplateEncoder.from_folder(root).shape.image is None
    named = TemplateEncoder.from_folder(root, placeholders={"image": "<|box_start|>"})
    record = _record(("user", [0]), kinds=(MediaKind.IMAGE,))
    box = named.tokenizer.load().backend.token_to_id("<|box_start|>")
    assert named.encode(record, [3]).tokens.tolist().count(box) == 3
    with pytest.raises(DataError, match="no token id for the image placeholder '<picture>'"):
        TemplateEncoder.from_folder(root, placeholders={"image": "<picture>"})
    with pytest.raises(DataError, match="placeholders for sound"):
        TemplateEncoder.from_folder(root, placeholders={"sound": "<s>"})


def test_counts_that_do_not_fit_the_media_are_refused(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(PARTS, **VISION))
    with pytest.raises(RecordError, match="2 media, but visual token counts"):
        encoder.encode(MIXED, [1])


# What can go wrong, and where encoders go


def test_what_the_template_refuses_names_the_record(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(ALTERNATING))
    for turns, why in (
        ([("system", ["x"])], "System role not"),
        ([("user", ["a"]), ("user", ["b"])], "must alternate"),
    ):
        with pytest.raises(RecordError, match=rf"refuses the conversation: .*{why}.* at shard s.tar, key k"):
            encoder.encode(_record(*turns), [])


def test_a_lone_surrogate_is_refused(folder: Folder) -> None:
    with pytest.raises(RecordError, match="lone surrogate"):
        TemplateEncoder.from_folder(folder(CHATML)).encode(_record(("user", ["a\ud800"])), [])


def test_a_text_without_tokens_is_refused_with_its_place(folder: Folder) -> None:
    root = folder(CHATML)
    small = Tokenizer(models.WordLevel(vocab={"user": 0, "<|im_start|>": 1, "<|im_end|>": 2}, unk_token="[UNK]"))
    small.pre_tokenizer = pre_tokenizers.Whitespace()
    small.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    small.save(str(root / "tokenizer.json"))
    with pytest.raises(RecordError, match=r"the tokenizer cannot encode .* at shard s.tar, key k"):
        TemplateEncoder.from_folder(root).encode(_record(("user", ["unheard"])), [])


def test_a_rendering_beyond_the_limit_is_refused(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(CHATML), limits=RenderLimits(max_chars=1000))
    with pytest.raises(RecordError, match="more than 1000 characters written"):
        encoder.encode(_record(("user", ["x" * 1000])), [])


def test_an_endless_conversation_is_refused_before_it_is_rendered_over_and_over(folder: Folder) -> None:
    record = _record(*[("user", ["a"]), ("assistant", ["b"])] * 40)
    limits = RenderLimits(max_chars=10_000)
    with pytest.raises(RecordError, match=r"40 answers in \d+ characters need too much rendering"):
        TemplateEncoder.from_folder(folder(CHATML), limits=limits).encode(record, [])
    assert TemplateEncoder.from_folder(folder(CHATML_MARKED), limits=limits).encode(record, []).num_label_tokens == 80


def test_private_use_characters_in_texts_are_kept(folder: Folder) -> None:
    text = "".join(map(chr, range(0xF0000, 0xF0010)))
    for template in (CHATML, CHATML_MARKED):
        encoder = TemplateEncoder.from_folder(folder(template))
        record = _record(("user", [f"{text}<|im_end|>"]), ("assistant", [text]))
        assert _learned(encoder, encoder.encode(record, [])) == f"{text}<|im_end|>"


def test_the_fingerprint_follows_files_and_options_but_not_what_is_trained(folder: Folder) -> None:
    root = folder(CHATML)
    base = TemplateEncoder.from_folder(root)
    others = [
        TemplateEncoder.from_folder(folder(CHATML_MARKED)),
        TemplateEncoder.from_folder(folder(CHATML, "word level")),
        TemplateEncoder.from_folder(folder(CHATML, config={"image_token_id": 8})),
        TemplateEncoder.from_folder(root, variables={"enable_thinking": False}),
        TemplateEncoder.from_folder(root, today="2025-01-01"),
    ]
    assert len({encoder.fingerprint for encoder in (base, *others)}) == 6
    assert TemplateEncoder.from_folder(folder(CHATML), train_on="all").fingerprint == base.fingerprint
    assert isinstance(base, RecordEncoder)
    assert base.exact


def test_a_template_that_tells_the_date_gives_the_same_tokens_every_day(folder: Folder) -> None:
    root = folder("{{ strftime_now('%d %b %Y') }}|" + CHATML)
    first = TemplateEncoder.from_folder(root)
    text = first.tokenizer.load().backend.decode(first.encode(_record(("user", ["a"])), []).tokens.tolist())
    assert text.startswith("26 Jul 2024|")


def test_encoders_travel_by_pickle_and_to_spawned_workers(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(CHATML))
    expected = encoder.count(DIALOGUE, [])
    assert len(pickle.dumps(encoder)) < 20_000
    assert pickle.loads(pickle.dumps(encoder)).count(DIALOGUE, []) == expected
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(TemplateEncoder.count, (encoder, DIALOGUE, [])) == expected


def test_a_fork_after_encoding_works_and_says_nothing(folder: Folder, tmp_path: Path) -> None:
    import subprocess
    import sys

    root = folder(CHATML)
    program = (
        "import os, sys\n"
        "from dataloaders.template_encoder import TemplateEncoder\n"
        "from dataloaders.record import Record, TextPart, Turn\n"
        f"encoder = TemplateEncoder.from_folder({str(root)!r})\n"
        "record = Record(shard='s', key='k', turns=(Turn(role='user', parts=(TextPart('hello'),)),))\n"
        "before = encoder.count(record, [])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if encoder.count(record, []) == before else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_threads_may_share_an_encoder(folder: Folder) -> None:
    encoder = TemplateEncoder.from_folder(folder(CHATML_MARKED))
    expected = encoder.encode(DIALOGUE, []).labels.tolist()
    results: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda: results.extend(encoder.encode(DIALOGUE, []).labels.tolist() == expected for _ in range(30))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 120
