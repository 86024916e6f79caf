"""Idefics2 and Idefics3 against the reference table, the installed processors end to end, and their own properties."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config
from dataloaders.estimators.idefics3 import TileConfig, tile_rows_cols

Oracle = Callable[[str], list[dict[str, Any]]]

SIZES = [(1, 1), (3, 2), (2, 9), (50, 50), (91, 92), (92, 91), (640, 480), (377, 1000), (1300, 40), (17, 900)]
IDEFICS2 = {"model_type": "idefics2", "vision_config": {"patch_size": 14}}
IDEFICS3 = {
    "config": {"model_type": "idefics3", "vision_config": {"patch_size": 14}, "scale_factor": 2},
    "preprocessor_config": {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    "processor_config": {"processor_class": "Idefics3Processor", "image_seq_len": 169},
}


def idefics2(**image: Any) -> TokenEstimator:
    return estimator_from_config({"config": IDEFICS2, "preprocessor_config": image})


def idefics3(tokens: int = 169, count_text: Callable[[str], int] | None = None, **image: Any) -> TokenEstimator:
    files = {
        "config": IDEFICS3["config"],
        "preprocessor_config": {**IDEFICS3["preprocessor_config"], **image},
        "processor_config": {"image_processor": {}, "image_seq_len": tokens},
    }
    return estimator_from_config(files, count_text=count_text)


def tiny_tokenizer() -> Any:
    """Every byte is a token; the special tokens of both families, with row and column tags up to 6."""
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>")
    tags = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
    tokenizer.add_tokens(["<image>", "<fake_token_around_image>", "<global-img>", *tags], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(("family", "split"), [("idefics2(split=False)", False), ("idefics2(split=True)", True)])
def test_idefics2_equals_every_row_of_the_table(oracle: Oracle, family: str, split: bool) -> None:
    estimator = idefics2(do_image_splitting=split, size={"shortest_edge": 378, "longest_edge": 980})
    for row in oracle(family):
        if row["error"]:
            with pytest.raises(UnfitError):
                estimator.image(row["w"], row["h"])
            continue
        counts = estimator.image(row["w"], row["h"])
        got = (counts.patches, counts.visual_tokens, counts.llm_tokens)
        assert got == (row["patches"], row["embed_tokens"], row["llm_tokens"]), row


def test_idefics3_equals_every_row_of_the_table(oracle: Oracle) -> None:
    estimator = estimator_from_config(IDEFICS3)
    for row in oracle("idefics3(8B)"):
        counts = estimator.image(row["w"], row["h"])
        got = (counts.patches, counts.visual_tokens, counts.llm_tokens)
        assert got == (row["patches"], row["embed_tokens"], row["llm_tokens"]), row


@pytest.mark.parametrize(
    ("estimator", "size", "expected"),
    [
        (idefics2(), (640, 480), (1, 46 * 35, 64, 66)),
        (idefics2(do_image_splitting=True), (640, 480), (5, 4 * 27 * 27 + 46 * 35, 320, 326)),
        (idefics2(size={"shortest_edge": 28, "longest_edge": 56}), (112, 56), (1, 4 * 2, 64, 66)),
        (idefics3(), (640, 480), (13, 13 * 676, 13 * 169, 2227)),
        (idefics3(), (480, 640), (13, 13 * 676, 13 * 169, 2228)),
        (idefics3(), (1, 1), (17, 17 * 676, 17 * 169, 2912)),
        (idefics3(do_image_splitting=False), (640, 480), (1, 676, 169, 172)),
        (idefics3(size={"longest_edge": 364}), (640, 480), (1, 676, 169, 172)),
    ],
)
def test_known_counts(estimator: TokenEstimator, size: tuple[int, int], expected: tuple[int, ...]) -> None:
    counts = estimator.image(*size)
    assert (counts.tiles, counts.patches, counts.visual_tokens, counts.llm_tokens) == expected
    assert counts.full.total == counts.patches


@pytest.mark.parametrize("split", [False, True])
def test_idefics2_equals_the_installed_processor_run_end_to_end(split: bool) -> None:
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.idefics2.image_processing_pil_idefics2")
    size = {"shortest_edge": 40, "longest_edge": 100}
    tokenizer = tiny_tokenizer()
    processor = transformers.Idefics2Processor(
        module.Idefics2ImageProcessorPil(do_image_splitting=split, size=size), tokenizer, image_seq_len=5
    )
    files = {
        "config": {"model_type": "idefics2", "vision_config": {"patch_size": 10}},
        "preprocessor_config": {"do_image_splitting": split, "size": size},
        "processor_config": {"image_seq_len": 5},
    }
    estimator = estimator_from_config(files)
    for width, height in [size for size in SIZES if not split or min(size) > 1]:
        inputs = processor(images=[blank(width, height)], text="<image>", return_tensors="np")
        counts = estimator.image(width, height)
        image_id = tokenizer.convert_tokens_to_ids("<image>")
        assert inputs["input_ids"].shape[-1] == counts.llm_tokens, (width, height)
        assert (inputs["input_ids"] == image_id).sum() == counts.visual_tokens
        assert inputs["pixel_values"].shape[1] == counts.tiles
        height_px, width_px = inputs["pixel_values"].shape[-2:]
        in_image = (
            inputs["pixel_attention_mask"][0, -1].any(1).sum(),
            inputs["pixel_attention_mask"][0, -1].any(0).sum(),
        )
        assert in_image == (counts.height_px, counts.width_px)
        padded = counts.tiles * (height_px // 10) * (width_px // 10)
        assert counts.padded_patches is not None
        assert padded <= counts.padded_patches


@pytest.mark.parametrize("longest", [120, 64, 40, 97, 300])
def test_idefics3_equals_the_installed_processor_run_end_to_end(longest: int) -> None:
    """At a longest edge of 300 px there are more rows and columns than tags in the tokenizer."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3")
    tokenizer = tiny_tokenizer()
    image = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 32}}
    processor = transformers.Idefics3Processor(module.Idefics3ImageProcessorPil(**image), tokenizer, image_seq_len=4)
    estimator = idefics3(4, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]), **image)
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    for width, height in SIZES:
        inputs = processor(images=[blank(width, height)], text="<image>", return_tensors="np")
        counts = estimator.image(width, height)
        assert inputs["input_ids"].shape[-1] == counts.llm_tokens, (width, height)
        assert (inputs["input_ids"] == image_id).sum() == counts.visual_tokens
        assert inputs["pixel_values"].shape[1] == counts.tiles
        assert inputs["pixel_values"].shape[-2:] == (32, 32)


@pytest.mark.parametrize("longest", [1456, 1820, 728, 4368])
def test_idefics3_equals_the_helper_of_the_installed_processor(longest: int) -> None:
    """Where the longest edge is a multiple of a tile, below 4096 px or not."""
    module = pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3")
    processor = module.Idefics3ImageProcessorPil(size={"longest_edge": longest})
    config = TileConfig(longest_px=longest)
    for width in (1, 7, 100, 363, 364, 365, 1000, 1456, 5000):
        for height in (1, 8, 91, 364, 728, 729, 1091, 4097):
            _, rows, cols = processor.get_number_of_image_patches(height, width, {})
            if longest <= 4096:  # above it the helper rounds the shorter side up on its own
                assert tile_rows_cols(width, height, config) == (rows, cols), (width, height)
            else:
                assert max(tile_rows_cols(width, height, config)) == max(rows, cols), (width, height)


def blank(width: int, height: int) -> Any:
    return pytest.importorskip("PIL.Image").new("RGB", (width, height), (90, 20, 200))


@pytest.mark.parametrize("size", [(1, 40), (40, 1), (1, 1), (0, 5)])
def test_a_side_that_cannot_be_halved_is_refused_with_the_nearest_size(size: tuple[int, int]) -> None:
    estimator = idefics2(do_image_splitting=True)
    with pytest.raises(UnfitError, match="below 2 px") as caught:
        estimator.image(*size)
    assert caught.value.reason is Reason.TOO_SMALL
    assert caught.value.nearest_size_px == (max(size[0], 2), max(size[1], 2))
    assert estimator.image(*caught.value.nearest_size_px).llm_tokens == 326


@given(width=st.integers(2, 60_000), height=st.integers(2, 60_000))
def test_explanations_end_with_the_counts(width: int, height: int) -> None:
    for estimator in (idefics2(do_image_splitting=True), idefics3()):
        counts = estimator.image(width, height)
        *_, last = estimator.explain_image(width, height)
        assert last.startswith("LLM tokens: ")
        assert last.endswith(f"= {counts.llm_tokens}")


@given(width=st.integers(1, 60_000), height=st.integers(1, 60_000), longest=st.integers(20, 5000))
def test_tiles_cover_the_image_and_the_longer_side_has_most_of_them(width: int, height: int, longest: int) -> None:
    rows, cols = tile_rows_cols(width, height, TileConfig(longest_px=longest, tile_px=100))
    most = -(-min(longest, 4096) // 100)
    assert max(rows, cols) == (most if most > 1 else 0)
    assert (rows >= cols) if height > width else (cols >= rows)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: idefics2(do_resize=False), "do_resize"),
        (lambda: idefics3(do_resize=False), "do_resize"),
        (lambda: idefics2(size={"longest_edge": 980}), "shortest_edge"),
        (lambda: idefics3(size={"height": 10, "width": 10}), "longest_edge"),
        (lambda: idefics3(size={"longest_edge": -4}), "longest_px"),
        (lambda: idefics3(tokens=0), "tokens"),
        (lambda: idefics3(max_image_size={"longest_edge": 13}), "patch_px"),
    ],
)
def test_options_that_are_not_covered_are_refused_by_name(build: Callable[[], TokenEstimator], named: str) -> None:
    with pytest.raises(DataError, match=named):
        build()


def test_tokens_of_a_tile_follow_the_model_where_no_processor_file_tells() -> None:
    """SmolVLM-256M: 512 px tiles of 16 px patches, shuffled 4 x 4."""
    files = {
        "config": {"model_type": "idefics3", "vision_config": {"patch_size": 16}, "scale_factor": 4},
        "preprocessor_config": {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}},
    }
    assert estimator_from_config(files).image(10, 10).visual_tokens == 17 * 64
    assert estimator_from_config({"model_type": "idefics3"}).image(10, 10).visual_tokens == 17 * 169


@pytest.mark.parametrize("estimator", [idefics2(), idefics3()])
def test_estimators_pickle_and_refuse_videos(estimator: TokenEstimator) -> None:
    again = pickle.loads(pickle.dumps(estimator))
    assert again.image(640, 480) == estimator.image(640, 480)
    assert again.fingerprint == estimator.fingerprint
    for call in (estimator.video, estimator.explain_video):
        with pytest.raises(MediaError) as caught:
            call(640, 480, 10, 25.0, 0.4)
        assert caught.value.reason is Reason.UNSUPPORTED_MEDIA


def test_fingerprints_tell_options_apart() -> None:
    estimators = [idefics2(), idefics2(do_image_splitting=True), idefics3(), idefics3(64), idefics3(count_text=len)]
    assert len({estimator.fingerprint for estimator in estimators}) == len(estimators)
