"""The shared resize: sides, budgets, the shapes it refuses, and the helpers of transformers over many sizes."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import smart_resize
from dataloaders.estimators.native import area_bounds
from dataloaders.estimators.resize_rule import Budget, ResizeRule, resize_all

Refusal = Callable[..., UnfitError | None]
SIDES = st.integers(1, 4000)
RULES: tuple[ResizeRule, ...] = ("transformers", "qwen_vl_utils", "paddleocr", "volume")
PLANE: tuple[ResizeRule, ...] = ("transformers", "qwen_vl_utils")


@given(height=SIDES, width=SIDES, tokens=st.integers(4, 20_000), rule=st.sampled_from(PLANE))
def test_ce01_sides_are_positive_multiples_whatever_the_budget(
    height: int, width: int, tokens: int, rule: ResizeRule
) -> None:
    assume(max(height, width) / min(height, width) <= 200)
    factor, least, most = 28, 4 * 784, tokens * 784
    new_height, new_width = smart_resize(height, width, factor, least, most, rule=rule)
    assert min(new_height, new_width) >= factor
    assert new_height % factor == new_width % factor == 0
    # Above the budget only where a side was held at one factor, or where growing to the minimum overshot it.
    if new_height * new_width > most:
        assert min(new_height, new_width) == factor or height * width < least


def test_ce01_a_narrow_image_under_a_small_budget_keeps_a_row_of_patches() -> None:
    for rule in PLANE:
        assert smart_resize(639, 31, 28, 4 * 784, 20 * 784, rule=rule) == (560, 28)
        # 200 to 1 under four tokens: the short side would be 0 px in qwen-vl-utils.
        assert smart_resize(4000, 20, 28, 784, 4 * 784, rule=rule) == (784, 28)


def test_rounding_is_half_to_even() -> None:
    assert smart_resize(70, 98, 28, 1, 10**9) == (56, 112)  # 2.5 -> 2, 3.5 -> 4


def test_the_two_libraries_differ_only_below_half_a_factor() -> None:
    assert smart_resize(13, 2600, 28, 3136, 12845056) == (28, 812)
    assert smart_resize(13, 2600, 28, 3136, 12845056, rule="qwen_vl_utils") == (28, 2604)
    for height in range(15, 100):
        assert smart_resize(height, 900, 28, 3136, 10**7) == smart_resize(
            height, 900, 28, 3136, 10**7, rule="qwen_vl_utils"
        )


@given(height=st.integers(0, 6000), width=st.integers(0, 6000), rule=st.sampled_from(RULES))
def test_a_refused_shape_comes_with_one_that_is_taken(
    refusal: Refusal, height: int, width: int, rule: ResizeRule
) -> None:
    budget = Budget(factor=28, min_pixels=3136, max_pixels=10**6, rule=rule)
    error = refusal(budget.resize, height, width)
    if error is None:
        assert max(height, width) / min(height, width) <= (200 if rule in PLANE else 240)
    else:
        assert error.reason is (Reason.TOO_SMALL if min(height, width) < 1 else Reason.EXTREME_ASPECT)
        assert error.nearest_size_px is not None
        nearest_width, nearest_height = error.nearest_size_px
        budget.resize(nearest_height, nearest_width)
        assert max(nearest_height, nearest_width) == max(height, width, 1)


@pytest.mark.parametrize(
    ("width", "height", "nearest"), [(8000, 20, (8000, 40)), (20, 8000, (40, 8000)), (1, 201, (2, 201))]
)
def test_ce02_extreme_shapes_are_refused_with_a_reason(width: int, height: int, nearest: tuple[int, int]) -> None:
    with pytest.raises(UnfitError, match=f"{width}x{height}") as caught:
        smart_resize(height, width, 28, 3136, 10**6)
    assert (caught.value.reason, caught.value.nearest_size_px) == (Reason.EXTREME_ASPECT, nearest)


@given(height=SIDES, width=SIDES, least=st.integers(4, 800), most=st.integers(800, 20_000))
def test_a_chain_refuses_or_gives_what_its_parts_give(
    refusal: Refusal, height: int, width: int, least: int, most: int
) -> None:
    chain = (
        Budget(factor=28, min_pixels=4 * 784, max_pixels=16384 * 784, rule="qwen_vl_utils"),
        Budget(factor=28, min_pixels=least * 784, max_pixels=most * 784),
    )
    error = refusal(resize_all, height, width, chain)
    if error is None:
        assert resize_all(height, width, chain) == chain[1].resize(*chain[0].resize(height, width))
    else:
        assert error.nearest_size_px is not None
        resize_all(error.nearest_size_px[1], error.nearest_size_px[0], chain)


@given(height=SIDES, width=SIDES, frames=st.integers(1, 60), most=st.integers(20, 30_000), rule=st.sampled_from(RULES))
def test_the_steps_end_with_the_size(height: int, width: int, frames: int, most: int, rule: ResizeRule) -> None:
    budget = Budget(
        factor=28, min_pixels=16 * 784, max_pixels=most * 784, rule=rule, num_frames=frames if rule == "volume" else 1
    )
    try:
        new_height, new_width = budget.resize(height, width)
    except MediaError:
        return
    last = budget.steps(height, width)[-1]
    text = f"{new_width}x{new_height} px" if not last.endswith("kept") else f"{new_width} x {new_height} ="
    assert text in last


def reference(family: str, module: str) -> Callable[..., tuple[int, int]]:
    found: Callable[..., tuple[int, int]] = importlib.import_module(
        f"transformers.models.{family}.{module}"
    ).smart_resize
    return found


@pytest.mark.parametrize(
    ("rule", "family", "module"),
    [
        ("transformers", "qwen2_vl", "image_processing_pil_qwen2_vl"),
        ("transformers", "video_llama_3", "image_processing_pil_video_llama_3"),
        ("transformers", "ernie4_5_vl_moe", "image_processing_pil_ernie4_5_vl_moe"),
        ("paddleocr", "paddleocr_vl", "image_processing_pil_paddleocr_vl"),
        ("volume", "glm4v", "image_processing_pil_glm4v"),
        ("volume", "glm46v", "image_processing_pil_glm46v"),
    ],
)
@settings(deadline=None)  # the first call imports transformers
@given(data=st.data())
def test_the_helper_of_transformers_agrees(rule: ResizeRule, family: str, module: str, data: Any) -> None:
    pytest.importorskip("transformers")
    theirs = reference(family, module)
    height, width = data.draw(SIDES | st.integers(1, 60)), data.draw(SIDES | st.integers(1, 60))
    factor = data.draw(st.sampled_from([14, 28, 32]))
    least, most = sorted(data.draw(st.tuples(st.integers(1, 2 * 10**6), st.integers(1, 2 * 10**7))))
    options: dict[str, Any] = {}
    if rule == "volume":
        options = {"num_frames": data.draw(st.integers(1, 40)), "temporal_factor": data.draw(st.integers(1, 3))}
    budget = Budget(factor=factor, min_pixels=least, max_pixels=most, rule=rule, **options)
    try:
        ours = budget.resize(height, width)
    except UnfitError:
        with pytest.raises(ValueError, match=r"aspect ratio|larger than temporal"):
            theirs(height=height, width=width, factor=factor, min_pixels=least, max_pixels=most, **options)
    else:
        assert ours == theirs(height=height, width=width, factor=factor, min_pixels=least, max_pixels=most, **options)


def test_bounds_of_an_area_in_every_spelling() -> None:
    default = (3136, 1_003_520)
    assert area_bounds({}, default, pixel_keys=True) == default
    assert area_bounds({"max_pixels": 5000}, default, pixel_keys=True) == (3136, 5000)
    assert area_bounds({"size": {"shortest_edge": 1, "longest_edge": 2}}, default, pixel_keys=True) == (1, 2)
    both = {"size": {"shortest_edge": 1, "longest_edge": 2}, "max_pixels": 9, "min_pixels": None}
    assert area_bounds(both, default, pixel_keys=True) == (1, 9)
    assert area_bounds(both, default, pixel_keys=False) == (1, 2)
    assert area_bounds({"size": {"min_pixels": 3, "max_pixels": 4}}, default, pixel_keys=True) == (3, 4)
    for size in ({"longest_edge": 5}, 448, {"height": 4, "width": 4}):
        with pytest.raises(DataError, match="needs shortest_edge and longest_edge"):
            area_bounds({"size": size}, default, pixel_keys=True)
    with pytest.raises(TypeError, match="max_pixels='many'"):
        area_bounds({"max_pixels": "many"}, default, pixel_keys=True)
