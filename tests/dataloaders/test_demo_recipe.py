"""The recipe of the demo corpus, its measuring stick and its questions: everything that draws no file."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.demo import DEMO_PROCESSOR, texts
from dataloaders.demo.facts import BRIGHTNESS, COLOURS, HUES, MOTIONS, Measure, measure
from dataloaders.demo.photos import PHOTOS
from dataloaders.demo.quantiles import (
    CLIP_DURATION_S,
    CLIP_FPS,
    CLIP_FRAME_PX,
    PICTURE_DOMAINS,
    PROBABILITIES,
    domain_at,
    pick_share,
    value_at,
)
from dataloaders.demo.recipe import (
    CLIP_MAX_SIDE_PX,
    CLIP_MIN_SIDE_PX,
    MAX_SIDE_PX,
    MIN_SIDE_PX,
    SampleSpec,
    clip_size,
    picture_size,
    plan_samples,
    rng_for,
)
from dataloaders.demo.render import tint
from dataloaders.estimators import estimator_from_config

UNIT = st.floats(0, 1, exclude_max=True)


@pytest.fixture(scope="module")
def full() -> tuple[SampleSpec, ...]:
    return plan_samples(480, 0)


def _visual_tokens(spec: SampleSpec) -> int:
    estimator = estimator_from_config(DEMO_PROCESSOR)
    total = sum(estimator.image(p.width_px, p.height_px).llm_tokens for p in spec.pictures)
    if spec.clip is not None:
        clip, fps = spec.clip, float(spec.clip.fps)
        counts = estimator.video(clip.width_px, clip.height_px, clip.num_frames, fps, clip.num_frames / fps)
        total += counts.llm_tokens
    return total


# Recipe ---------------------------------------------------------------------------------------------------------------


def test_the_recipe_is_a_pure_function_of_seed_and_size(full: tuple[SampleSpec, ...]) -> None:
    assert plan_samples(480, 0) == full
    assert plan_samples(480, 1) != full


def test_kinds_have_their_shares(full: tuple[SampleSpec, ...]) -> None:
    assert Counter(spec.kind for spec in full) == {"image": 216, "text": 96, "clip": 96, "images": 72}


def test_kinds_are_mixed_in_every_shard(full: tuple[SampleSpec, ...]) -> None:
    for first in range(0, 480, 48):
        assert len({spec.kind for spec in full[first : first + 48]}) == 4


def test_no_class_of_facts_dominates(full: tuple[SampleSpec, ...]) -> None:
    for media in ([p for s in full for p in s.pictures], [s.clip for s in full if s.clip]):
        colours, brightness = Counter(m.colour for m in media), Counter(m.brightness for m in media)
        assert set(colours) == set(COLOURS)
        assert set(brightness) == set(BRIGHTNESS)
        assert max(colours.values()) - min(colours.values()) <= 1
        assert max(brightness.values()) - min(brightness.values()) <= 1
    motions = Counter(s.clip.motion for s in full if s.clip)
    assert set(motions) == set(MOTIONS)
    assert set(motions.values()) == {16}


def test_several_pictures_means_two_to_six(full: tuple[SampleSpec, ...]) -> None:
    assert {len(s.pictures) for s in full if s.kind == "images"} == {2, 3, 4, 5, 6}


def test_all_photographs_are_used(full: tuple[SampleSpec, ...]) -> None:
    used = {p.photo for s in full for p in s.pictures}
    assert used == set(range(len(PHOTOS)))


def test_only_jpegs_carry_an_orientation(full: tuple[SampleSpec, ...]) -> None:
    turned = [p for s in full for p in s.pictures if p.orientation != 1]
    assert {p.format for p in turned} == {"jpg"}
    assert {p.orientation for p in turned} == {2, 3, 4, 5, 6, 7, 8}


def test_the_whole_corpus_costs_what_two_cores_can_train(full: tuple[SampleSpec, ...]) -> None:
    assert 55_000 <= sum(_visual_tokens(spec) for spec in full) <= 90_000


def test_costs_over_the_corpus_are_heavy_tailed(full: tuple[SampleSpec, ...]) -> None:
    tokens = sorted(_visual_tokens(spec) for spec in full if spec.kind != "text")
    median = tokens[len(tokens) // 2]
    assert tokens[0] <= 4
    assert tokens[-1] >= 7 * median
    assert sum(tokens[-len(tokens) // 10 :]) >= 0.25 * sum(tokens)  # a tenth of the samples costs a quarter


def test_one_picture_costs_at_most_256_tokens_and_one_clip_at_most_400(full: tuple[SampleSpec, ...]) -> None:
    singles = [_visual_tokens(s) for s in full if s.kind == "image"]
    clips = [_visual_tokens(s) for s in full if s.kind == "clip"]
    assert (min(singles), max(singles)) == (4, 256)
    assert 300 <= max(clips) <= 400


@settings(max_examples=40, deadline=None)
@given(num_samples=st.integers(1, 70), seed=st.integers(0, 2**64 - 1))
def test_every_size_and_seed_gives_a_sound_recipe(num_samples: int, seed: int) -> None:
    specs = plan_samples(num_samples, seed)
    assert [spec.sample_id for spec in specs] == list(range(num_samples))
    for spec in specs:
        number = {"text": (0, 0), "image": (1, 1), "images": (2, 6), "clip": (0, 0)}[spec.kind]
        assert number[0] <= len(spec.pictures) <= number[1]
        assert (spec.clip is not None) == (spec.kind == "clip")
        assert 0 <= spec.question < 12
        assert 0 <= spec.length < 1
    assert any(spec.kind != "text" for spec in specs)


@given(UNIT, UNIT, UNIT)
def test_picture_sizes_stay_in_bounds(domain: float, side: float, aspect: float) -> None:
    width, height = picture_size(domain, side, aspect)
    assert MIN_SIDE_PX <= min(width, height) <= max(width, height) <= MAX_SIDE_PX


@given(UNIT)
def test_clip_sizes_stay_in_bounds_and_are_even(draw: float) -> None:
    width, height = clip_size(draw)
    assert CLIP_MIN_SIDE_PX <= min(width, height) <= max(width, height) <= CLIP_MAX_SIDE_PX
    assert width % 2 == height % 2 == 0


def test_streams_of_samples_are_independent() -> None:
    assert rng_for(0, 1).random() == rng_for(0, 1).random()
    assert len({float(rng_for(seed, stream).random()) for seed in range(4) for stream in range(4)}) == 16


# Quantiles ------------------------------------------------------------------------------------------------------------


def test_tables_are_complete_and_ascending() -> None:
    tables = [CLIP_DURATION_S, *(t for d in PICTURE_DOMAINS for t in (d.side_px, d.aspect))]
    for table in tables:
        assert len(table) == len(PROBABILITIES)
        assert list(table) == sorted(table)
    assert sum(d.weight for d in PICTURE_DOMAINS) == pytest.approx(1)
    for shares in (CLIP_FPS, CLIP_FRAME_PX):
        assert shares[-1][1] == 1.0


def test_value_at_returns_the_table_at_its_own_probabilities() -> None:
    for probability, value in zip(PROBABILITIES, CLIP_DURATION_S, strict=True):
        assert value_at(CLIP_DURATION_S, probability) == pytest.approx(value)
    assert value_at(CLIP_DURATION_S, 0.0) == CLIP_DURATION_S[0]
    assert value_at(CLIP_DURATION_S, 1.0) == CLIP_DURATION_S[-1]


@given(UNIT, UNIT)
def test_value_at_never_decreases(first: float, second: float) -> None:
    low, high = sorted((first, second))
    table = PICTURE_DOMAINS[0].side_px
    assert value_at(table, low) <= value_at(table, high)


def test_shares_are_met_by_evenly_spread_draws() -> None:
    draws = (np.arange(1000) + 0.5) / 1000
    names = Counter(domain_at(float(u)).name for u in draws)
    assert all(abs(names[d.name] - 1000 * d.weight) <= 1 for d in PICTURE_DOMAINS)
    sizes = Counter(pick_share(CLIP_FRAME_PX, float(u)) for u in draws)
    assert sizes[(1280, 720)] == 440
    assert domain_at(1.0) is PICTURE_DOMAINS[-1]


SOURCES = {
    "web photo": ("web photo (Flickr, <=500 px)", "web photo (ImageNet)"),
    "product photo": ("product photo (short side 400 px)",),
    "house photo": ("real-estate photo",),
    "phone photo": ("phone photo (full resolution)",),
    "clip art": ("clip art",),
    "screenshot": ("UI screenshot/doc figure",),
    "receipt": ("scanned receipt",),
}


def test_picture_tables_are_the_quantiles_of_the_real_sizes(shared_dir: Path) -> None:
    table = pq.read_table(shared_dir / "data" / "image_sizes.parquet", columns=["domain", "width", "height"])
    names = np.asarray(table["domain"].to_pylist())
    width, height = (table[name].to_numpy().astype(float) for name in ("width", "height"))
    for domain in PICTURE_DOMAINS:
        rows = np.isin(names, SOURCES[domain.name])
        side = np.quantile(np.sqrt(width[rows] * height[rows]), PROBABILITIES)
        aspect = np.quantile(width[rows] / height[rows], PROBABILITIES)
        assert domain.side_px == pytest.approx(side, abs=0.51)
        assert domain.aspect == pytest.approx(aspect, abs=0.0051)


def test_clip_durations_are_the_quantiles_of_the_real_clips(shared_dir: Path) -> None:
    table = pq.read_table(shared_dir / "data" / "videos.parquet", columns=["source", "duration"])
    names, duration = np.asarray(table["source"].to_pylist()), table["duration"].to_numpy().astype(float)
    usable = (duration >= 1) & (duration <= 12)
    signs = duration[usable & (names == "ms_asl")]
    others = duration[usable & np.isin(names, ("konvid", "live_vqc", "cvd2014"))]
    for probability, value in zip(PROBABILITIES, CLIP_DURATION_S, strict=True):
        below = 0.6 * (signs < value - 0.006).mean() + 0.4 * (others < value - 0.006).mean()
        upto = 0.6 * (signs <= value + 0.006).mean() + 0.4 * (others <= value + 0.006).mean()
        assert below - 1e-3 <= probability <= upto + 1e-3


# Facts ----------------------------------------------------------------------------------------------------------------


def _plain(*rgb: int) -> np.ndarray:
    return np.full((8, 8, 3), rgb, dtype=np.uint8)


@pytest.mark.parametrize(
    ("rgb", "colour", "brightness"),
    [
        ((255, 0, 0), "red", "bright"),
        ((120, 120, 10), "yellow", "medium"),
        ((0, 60, 0), "green", "dark"),
        ((20, 200, 210), "cyan", "bright"),
        ((10, 0, 80), "blue", "dark"),
        ((140, 20, 140), "magenta", "medium"),
        ((255, 0, 20), "red", "bright"),
        ((128, 128, 128), "neutral", "medium"),
        ((250, 240, 245), "neutral", "bright"),
        ((0, 0, 0), "neutral", "dark"),
    ],
)
def test_plain_pictures_are_named_as_a_person_would(rgb: tuple[int, int, int], colour: str, brightness: str) -> None:
    facts = measure(_plain(*rgb))
    assert (facts.colour, facts.brightness) == (colour, brightness)
    assert facts.mean_value == pytest.approx(max(rgb) / 255)


def test_the_fullest_hue_wins_over_a_smaller_one() -> None:
    picture = _plain(200, 0, 0)
    picture[:, :3] = (0, 0, 200)
    facts = measure(picture)
    assert facts.colour == "red"
    assert facts.lead == pytest.approx(5 / 3)
    picture[:, :5] = (0, 0, 200)
    assert measure(picture).colour == "blue"


def test_a_third_of_colour_is_still_neutral_and_more_is_not() -> None:
    picture = np.full((10, 100, 3), 128, dtype=np.uint8)
    picture[:, :34] = (200, 0, 0)
    assert measure(picture).colour == "neutral"
    picture[:, :35] = (200, 0, 0)
    assert measure(picture).colour == "red"


def test_what_is_close_to_a_border_is_not_clear() -> None:
    assert measure(_plain(200, 0, 0)).clear
    assert not measure(_plain(int(0.61 * 255), 0, 0)).clear  # between medium and bright
    mixed = _plain(200, 0, 0)
    mixed[:, :4] = (0, 200, 0)
    assert not measure(mixed).clear  # half red, half green
    few = np.full((10, 100, 3), 128, dtype=np.uint8)
    few[:, :40] = (130, 0, 0)
    assert not measure(few).clear  # 40 % coloured


def test_a_stack_of_frames_is_measured_as_one_picture() -> None:
    frames = np.stack([_plain(200, 0, 0), _plain(200, 0, 0), _plain(0, 0, 200)])
    assert measure(frames).colour == "red"
    assert measure(frames).lead == pytest.approx(2)


def test_large_pictures_are_read_on_a_grid_with_the_same_result() -> None:
    small = np.random.default_rng(0).integers(0, 255, (60, 70, 3), dtype=np.uint8)
    large = small.repeat(8, axis=0).repeat(8, axis=1)
    assert measure(large).mean_value == pytest.approx(measure(small).mean_value, abs=0.02)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_pixels_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (36, 3), dtype=np.uint8)
    assert measure(pixels.reshape(6, 6, 3)) == measure(rng.permutation(pixels).reshape(9, 4, 3))


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("brightness", BRIGHTNESS)
def test_a_full_tint_brings_any_photograph_to_the_facts_aimed_at(colour: str, brightness: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    facts = measure(tint(noise, colour, brightness, 1.0, 8.0))
    assert (facts.colour, facts.brightness) == (colour, brightness)
    assert facts.clear


def test_a_flat_photograph_can_be_tinted() -> None:
    facts = measure(tint(_plain(77, 77, 77), "green", "bright", 1.0, 0.0))
    assert (facts.colour, facts.brightness) == ("green", "bright")


# Texts ----------------------------------------------------------------------------------------------------------------


def _fact(colour: str, brightness: str = "dark") -> Measure:
    return Measure(colour=colour, brightness=brightness, coloured_share=0.9, lead=9.0, mean_value=0.2)


def _all_dialogues() -> list[texts.Dialogue]:
    found = []
    for question in range(12):
        for colour in COLOURS:
            for brightness in BRIGHTNESS:
                found.append(texts.ask_picture(question, _fact(colour, brightness)))
                found += [texts.ask_clip(question, _fact(colour, brightness), motion) for motion in MOTIONS]
            found += [texts.ask_pictures(question, [_fact(colour), *map(_fact, COLOURS[:n])]) for n in range(1, 6)]
    return found


def test_every_template_lists_each_fact_as_often_as_it_occurs() -> None:
    for dialogue in _all_dialogues():
        assert dialogue.facts
        for fact in set(dialogue.facts):
            assert dialogue.answer.count(fact) == dialogue.facts.count(fact), dialogue
        assert len(dialogue.question) <= 60
        assert len(dialogue.answer) <= 66


def test_names_of_a_fact_begin_with_different_letters() -> None:
    for names in (COLOURS, BRIGHTNESS, MOTIONS):
        assert len({name[0] for name in names}) == len(names)
    assert set(HUES) < set(COLOURS)


def test_the_number_of_pictures_is_stated_but_is_no_fact() -> None:
    dialogue = texts.ask_pictures(11, [_fact("red"), _fact("blue"), _fact("cyan")])
    assert dialogue.answer == "3, the last is cyan."
    assert dialogue.facts == ("cyan",)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 11), UNIT, st.integers(0, 1000))
def test_text_tasks_have_right_answers_and_bounded_length(question: int, length: float, seed: int) -> None:
    task = texts.text_only(question, length, rng_for(seed, 1))
    assert task.facts == ()
    assert len(task.question) + len(task.answer) <= 660
    if task.question.startswith("What is"):
        first, second = (int(word) for word in task.question.removesuffix("?").split() if word.isdigit())
        assert task.answer == f"{first + second}."
    elif task.question.startswith("Count"):
        numbers = [int(word) for word in task.answer.removesuffix(".").split()]
        low, high = (int(word) for word in task.question.removesuffix(".").split() if word.isdigit())
        assert numbers == list(range(low, high + 1))
    else:
        head, words = task.question.split(": ")
        assert task.answer == words.split()[0 if "first" in head else -1] + "."


def test_texts_have_a_tail() -> None:
    sizes = sorted(
        len(task.question) + len(task.answer)
        for i in range(200)
        for task in [texts.text_only(i % 12, (i + 0.5) / 200, rng_for(0, i))]
    )
    assert sizes[0] < 25
    assert sizes[100] < 120
    assert sizes[-1] > 450


@pytest.mark.parametrize("parts_style", [True, False])
def test_both_spellings_of_a_record_say_the_same(parts_style: bool) -> None:
    dialogue = texts.Dialogue(question="Which?", answer="1 red, 2 blue.", facts=("red", "blue"))
    raw = texts.record_json("k", dialogue, ["image", "image"], parts_style=parts_style, truth={"kind": "images"})
    record = json.loads(raw)
    content = record["messages"][0]["content"]
    if parts_style:
        assert [part["type"] for part in content] == ["text", "image", "text", "image", "text"]
        content = "".join(part.get("text", "<image>") for part in content)
    assert content == "1 <image>2 <image>\nWhich?"
    assert record["facts"] == ["red", "blue"]
    assert record["messages"][1] == {"role": "assistant", "content": "1 red, 2 blue."}


def test_frame_rates_are_exact_fractions(full: tuple[SampleSpec, ...]) -> None:
    rates = {s.clip.fps for s in full if s.clip}
    assert Fraction(30_000, 1001) in rates
    assert all(15 <= rate <= 30 for rate in rates)
