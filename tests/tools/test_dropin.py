"""The benchmark of the drop-in loader: mixes, methods, fit, statistics, and all of it together at its smallest size."""

import importlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts
from dataloaders.chat import IGNORED_LABEL
from dataloaders.tokenizer import Special
from tools.benchmarks.dropin import QUICK_OVERHEAD, main, measured, parser, worker_options
from tools.benchmarks.dropin_fit import TERMS, cell_ms, columns, fit_cells, random_cells
from tools.benchmarks.dropin_methods import METHODS, OURS, POLICIES, REBALANCE, StepSetup, place
from tools.benchmarks.dropin_mixes import (
    MAX_IMAGE_TOKENS,
    MAX_TEXT_TOKENS,
    MAX_VIDEO_TOKENS,
    MIXES,
    Mix,
    MixIndex,
    SampleShape,
    counts_of,
)
from tools.benchmarks.dropin_models import MODELS
from tools.benchmarks.dropin_overhead import (
    LoadingRow,
    OverheadOptions,
    Pictures,
    WaitingRow,
    in_pairs,
    overhead_markdown,
    stacked,
    waits,
)
from tools.benchmarks.dropin_rows import (
    Compared,
    Interval,
    by_method,
    compare,
    interval,
    steps_markdown,
    verdicts,
)
from tools.benchmarks.dropin_steps import measure_steps, run_of
from tools.benchmarks.dropin_worker import Run, WorkerOptions

TERMS_OF_LLM = StageTerms(per_token_ns=1000.0, per_token_sq_ns=1.0)
TERMS_OF_ENCODER = StageTerms(per_patch_ns=500.0)
COSTS = CostModel(
    stages=(
        StageCost(forward=TERMS_OF_ENCODER, backward=TERMS_OF_ENCODER),
        StageCost(forward=TERMS_OF_LLM, backward=TERMS_OF_LLM),
    )
)
SETUP = StepSetup(num_ranks=2, num_microbatches=2, batch_size=4)


def step_counts(mix: str, *, seed: int = 0, setup: StepSetup = SETUP) -> StepCounts:
    return Mix(mix, setup.global_batch_size, seed=seed, with_pixels=False).counts


# Mixes


@pytest.mark.parametrize("name", MIXES)
def test_what_a_sample_holds_is_what_the_planner_was_told(name: str) -> None:
    mix = Mix(name, 40)
    for number in range(len(mix)):
        sample, counts = mix[number], mix.counts
        assert sample.sample_id == number
        assert len(sample.tokens) == len(sample.labels) == sample.position_ids.shape[1] == counts.llm_tokens[number]
        assert (sample.labels != IGNORED_LABEL).sum() == counts.label_tokens[number] >= 1
        assert len(sample.visual_index) == counts.visual_tokens[number]
        assert len(sample.patches) == sample.grids.prod(axis=1).sum() == counts.patches[number]
        assert len(sample.grids) == counts.num_items[number]
        placeholders = np.flatnonzero(np.isin(sample.tokens, (Special.IMAGE_PAD, Special.VIDEO_PAD)))
        assert placeholders.tolist() == sample.visual_index.tolist()


@pytest.mark.parametrize("name", MIXES)
def test_a_label_is_the_token_that_follows(name: str) -> None:
    for sample in map(Mix(name, 20, with_pixels=False).__getitem__, range(20)):
        learned = np.flatnonzero(sample.labels != IGNORED_LABEL)
        assert (sample.labels[learned] == sample.tokens[learned + 1]).all()
        assert sample.labels[-1] == IGNORED_LABEL


def test_a_placeholder_says_whether_it_is_of_an_image_or_of_a_video() -> None:
    mix = Mix("video", 60, with_pixels=False)
    kinds = set()
    for number in range(len(mix)):
        tokens = mix[number].tokens[mix[number].visual_index]
        kinds |= set(tokens.tolist())
        if len(mix.shapes[number].grids) == 1:
            is_image = mix.shapes[number].grids[0][0] == 1
            assert set(tokens.tolist()) == {Special.IMAGE_PAD if is_image else Special.VIDEO_PAD}
    assert kinds == {Special.IMAGE_PAD, Special.VIDEO_PAD}


def test_mixes_differ_in_what_they_hold() -> None:
    text, vlm, video = (Mix(name, 400, with_pixels=False) for name in ("text", "vlm", "video"))
    assert text.counts.patches.sum() == 0
    assert all(grid[0] == 1 for shape in vlm.shapes for grid in shape.grids)
    assert 0.4 < np.mean([any(grid[0] > 1 for grid in shape.grids) for shape in video.shapes]) < 0.6
    # Skew is what is to be balanced: the heaviest hundredth is several times the median.
    for mix, column in ((text, "llm_tokens"), (vlm, "patches"), (video, "patches")):
        values = getattr(mix.counts, column)
        assert np.quantile(values, 0.99) > 5 * np.median(values)


def test_sizes_stay_within_what_a_small_machine_can_do() -> None:
    for name in MIXES:
        for shape in Mix(name, 500, with_pixels=False).shapes:
            assert shape.text_tokens <= MAX_TEXT_TOKENS
            for t, h, w in shape.grids:
                assert h % 2 == w % 2 == 0
                assert t * h * w // 4 <= (MAX_IMAGE_TOKENS if t == 1 else MAX_VIDEO_TOKENS)


def test_a_mix_is_a_function_of_its_arguments() -> None:
    mix, same, other = Mix("vlm", 10, seed=3), Mix("vlm", 10, seed=3), Mix("vlm", 10, seed=4)
    assert mix.shapes == same.shapes != other.shapes
    assert Mix("vlm", 20, seed=3).shapes[:10] == mix.shapes
    assert all((mix[i].tokens == same[i].tokens).all() for i in range(10))
    assert all((mix[i].patches == same[i].patches).all() for i in range(10))
    sent = pickle.loads(pickle.dumps(mix))
    assert (sent[5].patches == mix[5].patches).all()


def test_pickled_without_its_pixels_a_mix_is_small() -> None:
    mix = Mix("video", 20)
    assert sum(len(mix[i].patches) for i in range(20)) > 0
    assert len(pickle.dumps(mix)) < 50_000


def test_an_unknown_mix_names_those_there_are() -> None:
    with pytest.raises(KeyError, match="mix 'audio' does not exist; choose one of text, vlm, video"):
        Mix("audio", 1)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(8, 100),
            st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), max_size=3),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_an_index_of_any_shapes_gives_their_counts_back(drawn: list[tuple[int, list[tuple[int, int, int]]]]) -> None:
    shapes = [
        SampleShape(text_tokens=text, label_tokens=1, grids=tuple((t, 2 * h, 2 * w) for t, h, w in grids))
        for text, grids in drawn
    ]
    counts = counts_of(shapes)
    assert counts.patches.tolist() == [sum(t * h * w for t, h, w in shape.grids) for shape in shapes]
    assert counts.llm_tokens.tolist() == [shape.text_tokens + shape.visual_tokens for shape in shapes]
    again = StepCounts.from_index(MixIndex(counts), counts.sample_ids)
    for name in ("llm_tokens", "patches", "num_items", "full_total_sq", "window_total_sq", "item_patches"):
        assert getattr(again, name).tolist() == getattr(counts, name).tolist(), name


# Methods


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_places_every_sample_and_leaves_no_cell_empty(method: str, mix: str) -> None:
    counts = step_counts(mix)
    cells, num_microbatches = place(method, counts, SETUP, COSTS)
    assert num_microbatches == 2
    assert cells.shape == (len(counts), 2)
    assert {tuple(cell) for cell in cells.tolist()} == {(r, m) for r in range(2) for m in range(2)}


def test_sequential_is_equal_counts_in_order() -> None:
    cells, _ = place("sequential", step_counts("vlm"), SETUP, COSTS)
    assert cells.tolist() == [[r, m] for r in range(2) for m in range(2) for _ in range(4)]


def test_batch_rebalance_sees_lengths_alone() -> None:
    counts = step_counts("vlm")
    cells, _ = place(REBALANCE, counts, SETUP, COSTS)
    nothing = np.zeros(len(counts), np.int64)
    blind = StepCounts(
        sample_ids=counts.sample_ids,
        llm_tokens=counts.llm_tokens,
        label_tokens=counts.label_tokens,
        visual_tokens=nothing,
        patches=nothing,
        num_items=nothing,
        full_total_sq=nothing,
        window_total_sq=nothing,
    )
    assert place(REBALANCE, blind, SETUP, COSTS)[0].tolist() == cells.tolist()


@pytest.mark.torch
@pytest.mark.parametrize("mix", MIXES)
def test_batch_rebalance_is_that_of_transformers(mix: str) -> None:
    pytest.importorskip("torch")
    trainer = pytest.importorskip("transformers.trainer_pt_utils")
    counts = step_counts(mix, seed=5)
    cells, _ = place(REBALANCE, counts, SETUP, COSTS)
    lengths = counts.llm_tokens.tolist()
    sampler = trainer.BatchRebalanceSampler(lengths, len(lengths), 2, 2, shuffle=False)
    for rank, slots in enumerate(sampler._assign(list(range(len(lengths))), lengths)):
        for slot, items in enumerate(slots):
            assert sorted(np.flatnonzero((cells == (rank, slot)).all(axis=1))) == sorted(items)


@pytest.mark.parametrize("method", METHODS)
def test_a_capacity_holds_for_every_method(method: str) -> None:
    counts = step_counts("video", seed=2)
    tokens, patches = int(counts.llm_tokens.max()) + 200, int(counts.patches.max()) + 500
    setup = StepSetup(num_ranks=2, num_microbatches=1, batch_size=8, capacity_tokens=tokens, capacity_patches=patches)
    cells, num_microbatches = place(method, counts, setup, COSTS)
    for cell in {tuple(cell) for cell in cells.tolist()}:
        mine = (cells == cell).all(axis=1)
        assert counts.llm_tokens[mine].sum() <= tokens
        assert counts.patches[mine].sum() <= patches
    assert cells[:, 1].max() < num_microbatches
    assert num_microbatches * 2 * tokens >= counts.llm_tokens.sum()


def test_without_capacities_every_method_has_as_many_micro_batches() -> None:
    assert SETUP.parallel().num_microbatches == 2
    limited = StepSetup(num_ranks=2, num_microbatches=2, batch_size=4, capacity_tokens=4096)
    assert limited.parallel().num_microbatches is None
    assert limited.parallel().min_num_microbatches == 2


def test_capacities_that_no_grouping_holds_are_named() -> None:
    counts = step_counts("text")
    setup = StepSetup(num_ranks=2, num_microbatches=1, batch_size=8, capacity_tokens=int(counts.llm_tokens.max()) - 1)
    with pytest.raises(ValueError, match=r"batch_rebalance: 16 samples on 2 ranks do not hold capacity_tokens=\d+"):
        place(REBALANCE, counts, setup, COSTS)


def test_an_unknown_method_names_those_there_are() -> None:
    with pytest.raises(KeyError, match="method 'best' does not exist; choose one of sequential, length_grouped"):
        place("best", step_counts("text"), SETUP, COSTS)


@pytest.mark.parametrize("mix", MIXES)
def test_ours_is_predicted_never_slower_than_the_other_policies(mix: str) -> None:
    for seed in range(5):
        counts = step_counts(mix, seed=seed)
        longest = {
            method: cell_ms(COSTS, counts, place(method, counts, SETUP, COSTS)[0], (2, 2)).sum(axis=1).max()
            for method in POLICIES
        }
        assert longest[OURS] <= min(longest.values()) * (1 + 1e-6)


# Fit


def test_a_fit_finds_what_made_the_times() -> None:
    mixes = {name: Mix(name, 100, seed=9, with_pixels=False) for name in MIXES}
    cells = random_cells({name: mix.shapes for name, mix in mixes.items()}, count=60, largest=12, seed=1)
    table = np.concatenate(
        [
            columns(
                StepCounts.from_index(mixes[cell[0][0]].index, [sample for _, sample in cell]),
                np.zeros(len(cell), np.int64),
                1,
            )
            for cell in cells
        ]
    )
    truth = np.zeros(len(TERMS))
    for name, value in {"constant": 3.0, "encodes": 1.0, "tokens": 0.05, "patches": 0.02, "token_sq": 1e-5}.items():
        truth[TERMS.index(name)] = value
    fitted = fit_cells(table, table @ truth)
    assert fitted.median_error < 1e-6
    assert fitted.model.absolute
    counts = step_counts("video", seed=4)
    placed, _ = place("sequential", counts, SETUP, fitted.model)
    expected = (columns(counts, placed[:, 0] * 2 + placed[:, 1], 4) @ truth).reshape(2, 2)
    assert cell_ms(fitted.model, counts, placed, (2, 2)) == pytest.approx(expected, rel=1e-6)


def test_a_fit_never_says_that_work_takes_less_than_no_time() -> None:
    random = np.random.Generator(np.random.Philox(0))
    table = random.uniform(0.0, 100.0, (30, len(TERMS)))
    fitted = fit_cells(table, random.uniform(1.0, 2.0, 30))
    for stage in fitted.model.stages:
        assert min(stage.forward.per_patch_ns, stage.forward.per_token_ns, stage.backward.constant_ns) >= 0.0
    assert 0.0 < fitted.median_error <= fitted.p95_error


def test_a_fit_of_too_few_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="2 micro-batches were measured; a fit needs at least 3"):
        fit_cells(np.ones((2, len(TERMS))), np.ones(2))


def test_a_micro_batch_without_media_does_not_pay_for_starting_the_encoder() -> None:
    model = CostModel(
        stages=(
            StageCost(forward=StageTerms(constant_ns=2e6), backward=StageTerms()),
            StageCost(forward=StageTerms(constant_ns=1e6), backward=StageTerms()),
        )
    )
    counts = counts_of(
        [
            SampleShape(text_tokens=10, label_tokens=1),
            SampleShape(text_tokens=10, label_tokens=1, grids=((1, 4, 4),)),
        ]
    )
    times = cell_ms(model, counts, np.array([[0, 0], [1, 0]]), (2, 2))
    assert times.tolist() == [[1.0, 0.0], [3.0, 0.0]]


def test_random_cells_are_of_one_mix_each_and_hold_a_sample_once() -> None:
    shapes = {name: Mix(name, 30, with_pixels=False).shapes for name in ("text", "video")}
    cells = random_cells(shapes, count=20, largest=10, seed=0)
    assert [cell[0][0] for cell in cells] == ["text", "video"] * 10
    for cell in cells:
        assert len({name for name, _ in cell}) == 1
        assert len({sample for _, sample in cell}) == len(cell) <= 10
    assert {len(cell) for cell in cells} > {1}


# Statistics


def runs_of(ms: dict[str, list[float]], *, mix: str = "video", turns: int = 2, loss: float = 5.0) -> list[Run]:
    """Runs in which step k of a method takes ms[method][k], twice as slow in the second turn."""
    return [
        Run(
            model="demo",
            mix=mix,
            step=step,
            turn=turn,
            method=method,
            num_microbatches=2,
            step_ms=value * (turn + 1),
            compute_ms=(0.9 * value * (turn + 1), 0.5 * value * (turn + 1)),
            predicted_ms=(0.9 * value, 0.5 * value),
            predicted_step_ms=value,
            wait_ms=1.5,
            loss=loss,
        )
        for method, values in ms.items()
        for step, value in enumerate(values)
        for turn in range(turns)
    ]


EVEN = {"sequential": [20.0] * 6, "length_grouped": [12.0] * 6, REBALANCE: [10.0] * 6, OURS: [10.0] * 6}


def test_a_machine_that_slows_down_between_passes_moves_no_ratio() -> None:
    rows = {row.method: row for row in compare(runs_of(EVEN))}
    assert rows["sequential"].step_ratio == Interval(value=2.0, low=2.0, high=2.0)
    assert rows["sequential"].run_ratio.value == rows["sequential"].predicted_run_ratio == 2.0
    assert rows["sequential"].gain_error == 0.0
    assert rows["length_grouped"].verdict == "faster"
    assert rows[REBALANCE].verdict == "no difference shown"


def test_a_method_that_is_faster_than_ours_is_said_to_be() -> None:
    rows = compare(runs_of({**EVEN, "sequential": [9.0] * 6}))
    assert {row.method: row.verdict for row in rows}["sequential"] == "slower"
    assert "- never slower than another method: MISS (demo video against sequential)" in verdicts(rows)


def test_a_long_step_counts_more_in_a_run_than_in_the_median() -> None:
    sequential = [10.0] * 5 + [100.0]
    row = next(row for row in compare(runs_of({**EVEN, "sequential": sequential})) if row.method == "sequential")
    assert row.step_ratio.value == 1.0
    assert row.run_ratio.value == pytest.approx(150 / 60)
    assert row.run_ratio.low == pytest.approx(1.0)  # one step out of six is not much evidence
    assert row.verdict == "no difference shown"


def test_an_interval_holds_its_figure_and_narrows_with_more_steps() -> None:
    random = np.random.Generator(np.random.Philox(0))
    few, many = (interval(random.normal(1.2, 0.1, count), np.median) for count in (8, 400))
    assert few.low < few.value < few.high
    assert many.high - many.low < (few.high - few.low) / 2
    assert str(Interval(value=1.25, low=1.2, high=1.3)) == "1.250 (1.200 to 1.300)"


def test_verdicts_name_what_was_missed() -> None:
    slow = Interval(value=0.9, low=0.85, high=0.95)
    row = Compared(
        model="hf",
        mix="video",
        method="sequential",
        num_steps=4,
        step_ratio=slow,
        run_ratio=slow,
        predicted_step_ratio=1.1,
        predicted_run_ratio=1.1,
    )
    assert verdicts([row]) == [
        "- never slower than another method: MISS (hf video against sequential)",
        "- faster than every other on the video-heavy mix: MISS (hf video against sequential)",
        "- ratio within 10% of the predicted one: MISS (hf video against sequential)",
    ]


def test_a_mix_that_was_not_measured_passes_nothing() -> None:
    lines = verdicts(compare(runs_of(EVEN, mix="text")))
    assert lines[1] == "- faster than every other on the video-heavy mix: not measured"
    assert lines[0].endswith("PASS")


def test_methods_that_trained_on_other_samples_are_refused() -> None:
    runs = runs_of({OURS: [10.0]}) + runs_of({"sequential": [10.0]}, loss=5.1)
    with pytest.raises(ValueError, match=r"step 0 of demo, video: losses 5.0 to 5.1: the methods did not train on the"):
        compare(runs)


def test_numbers_of_a_method_are_medians_over_its_steps() -> None:
    row = next(row for row in by_method(runs_of(EVEN, turns=1)) if row.method == "length_grouped")
    assert (row.step_ms, row.num_microbatches, row.wait_ms) == (12.0, 2.0, 1.5)
    assert (row.longest_ms, row.shortest_ms) == pytest.approx((10.8, 6.0))
    assert row.imbalance == pytest.approx(0.9 / 0.7)
    assert row.prediction_error == pytest.approx(0.0)


def test_the_tables_have_a_row_for_every_method() -> None:
    runs = runs_of(EVEN)
    table = steps_markdown(compare(runs), by_method(runs))
    assert "| demo | video | sequential | 6 | 2.000 (2.000 to 2.000) | 2.000 | 2.000 (2.000 to 2.000) | 2.000 " in table
    assert table.count("| demo | video | ") == 3 + 4
    assert "- faster than every other on the video-heavy mix: MISS (demo video against batch_rebalance)" in table


def test_a_run_survives_json() -> None:
    (run,) = runs_of({OURS: [3.0]}, turns=1)
    assert run_of(json.loads(json.dumps({name: getattr(run, name) for name in Run.__slots__}))) == run


# Overhead


def test_pairs_swap_their_order_and_begin_with_a_pass_that_is_not_counted() -> None:
    seen: list[str] = []

    def measure(start: Any) -> str:
        seen.append(next(start()))
        return seen[-1]

    found = in_pairs(measure, lambda: iter(["ours"]), lambda: iter(["plain"]), pairs=2)
    assert found == [("ours", "plain")] * 2
    assert seen == ["ours", "plain", "ours", "plain", "plain", "ours"]


def test_waiting_leaves_out_computing_and_the_first_steps() -> None:
    computed: list[int] = []

    def start() -> Iterator[int]:
        yield from range(9)

    inside, periods = waits(start, lambda: computed.append(1))
    # Nine batches: the first is not timed, three more are skipped; the last computation finds the end.
    assert len(inside) == len(periods) == 5
    assert len(computed) == 9
    assert all(period >= wait >= 0.0 for wait, period in zip(inside, periods, strict=True))


def test_the_overhead_table_judges_its_worst_row() -> None:
    loaded = [
        LoadingRow(
            items="JPEG", num_workers=0, plain_ms=600.0, ours_ms=606.0, ratio=1.01, ratio_min=1.0, ratio_max=1.02
        ),
        LoadingRow(
            items="JPEG", num_workers=2, plain_ms=300.0, ours_ms=312.0, ratio=1.04, ratio_min=1.0, ratio_max=1.1
        ),
        LoadingRow(items="pixels", num_workers=2, plain_ms=60.0, ours_ms=90.0, ratio=1.5, ratio_min=1.4, ratio_max=1.6),
    ]
    waited = [
        WaitingRow(
            num_workers=0,
            compute="sleep",
            plain_wait_ms=0.2,
            ours_wait_ms=0.7,
            added_wait_ms=0.5,
            added_wait_max_ms=2.0,
            added_period_ms=0.6,
        )
    ]
    table = overhead_markdown(OverheadOptions(), loaded, waited)
    assert "| JPEG | 2 | 10.00 | 10.40 | 1.040 (1.000 to 1.100) |" in table
    assert "| 0 | sleep | 0.200 | 0.700 | +0.500 | +2.00 | +0.60 |" in table
    assert "- ours / plain at most 1.03, JPEG: MISS (1.040)" in table
    assert "- added wait below 1 ms at 8,192 samples a step: PASS (+0.500 ms)" in table


def test_pictures_are_the_same_decoded_before_or_when_asked_for() -> None:
    kept, decoded = Pictures(20), Pictures(20, decoded=True)
    assert len(kept) == len(decoded) == 20
    assert (kept[9] == decoded[9]).all()
    assert (kept[9] == kept[1]).all()
    assert kept[0].shape == (3, 224, 224)
    assert stacked([kept[0], kept[1]]).shape == (2, 3, 224, 224)
    assert -2.1 < kept[0].min() < 0.0 < kept[0].max() < 2.1


@pytest.mark.torch
def test_both_loaders_give_the_same_batches_pass_after_pass() -> None:
    pytest.importorskip("torch")
    overhead = importlib.import_module("tools.benchmarks.dropin_overhead")
    ours, plain = overhead.loaders(
        overhead.Numbers(64), overhead.numbers, costs=np.arange(64), batch_size=4, num_ranks=4, num_workers=0
    )
    first = [batch.tolist() for batch in ours()]
    assert first == [batch.tolist() for batch in plain()] == [batch.tolist() for batch in ours()]
    assert len(first) == 4


@pytest.mark.torch
def test_overhead_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["overhead", "--quick", "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / "dropin.md").read_text(encoding="utf-8")
    assert text.startswith("## Overhead")
    content = json.loads((tmp_path / "dropin.json").read_text(encoding="utf-8"))
    assert content["overhead"]["options"]["waiting_samples"] == QUICK_OVERHEAD.waiting_samples
    assert [row["compute"] for row in content["overhead"]["waiting"]] == ["sleep", "matmul"]
    assert "steps" not in content


# Models and the whole


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_a_pack_has_the_loss_of_its_samples_one_by_one(name: str) -> None:
    torch = pytest.importorskip("torch")
    if name == "hf":
        pytest.importorskip("transformers")
    models, batch = importlib.import_module("tools.benchmarks.dropin_models"), importlib.import_module("balancer.batch")
    model = models.build(name, tiny=True)
    samples = [Mix(mix, 4, seed=7)[i] for mix in ("text", "vlm", "video") for i in range(4)]
    with torch.no_grad():
        packed = model.loss_sum(model.prepare(batch.collate(samples))).item()
        alone = [model.loss_sum(model.prepare(batch.collate([sample]))).item() for sample in samples]
    assert packed == pytest.approx(sum(alone), rel=1e-5)


@pytest.mark.torch
def test_both_models_have_about_as_many_parameters() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    models = importlib.import_module("tools.benchmarks.dropin_models")
    sizes = [sum(parameter.numel() for parameter in models.build(name).parameters) for name in MODELS]
    assert max(sizes) < 1.1 * min(sizes)


def test_an_unknown_model_names_those_there_are() -> None:
    models = importlib.import_module("tools.benchmarks.dropin_models")
    with pytest.raises(KeyError, match="model 'gpt' does not exist; choose one of demo, hf"):
        models.build("gpt")


def test_the_command_line_asks_for_the_sizes_of_the_docs() -> None:
    options = worker_options(parser().parse_args(["steps"]))
    assert (options.num_steps, options.rounds, options.mixes) == (20, 2, ("text", "vlm", "video"))
    assert not options.tiny
    asked = worker_options(parser().parse_args(["steps", "--mixes", "text", "--capacity-tokens", "4096", "--quick"]))
    assert (asked.mixes, asked.capacity_tokens, asked.tiny) == (("text",), 4096, True)
    assert asked.setup(2).is_limited


@pytest.mark.torch
@pytest.mark.multirank
def test_two_ranks_measure_every_method_on_the_same_samples(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = WorkerOptions(
        model="",
        output="",
        mixes=("text", "video"),
        tiny=True,
        batch_size=2,
        num_steps=2,
        rounds=1,
        fit_cells=4,
        fit_repeats=1,
    )
    measured_steps = measure_steps(["demo"], options, tmp_path)
    keys = [(run.mix, run.step, run.turn, run.method) for run in measured_steps.runs]
    assert len(keys) == len(set(keys)) == 2 * 2 * 2 * len(METHODS)
    # A B C D, then D C B A.
    assert [key[3] for key in keys[:8]] == [*METHODS, *reversed(METHODS)]
    for run in measured_steps.runs:
        assert len(run.compute_ms) == len(run.predicted_ms) == 2
        assert run.step_ms >= max(run.compute_ms) > 0.0
        assert run.predicted_step_ms >= max(run.predicted_ms) > 0.0
        assert run.num_microbatches == 2
    # Losses are checked when rows are made: equal for all methods, to rounding.
    assert [(row.mix, row.method) for row in measured_steps.compared()] == [
        (mix, method) for mix in ("text", "video") for method in METHODS if method != OURS
    ]
    text = measured_steps.markdown()
    assert text.count("| demo | text | ") == 3 + 4
    assert "Fit of demo: median error " in text
    assert json.loads(json.dumps(measured_steps.as_json()))["fits"]["demo"]["rest_ms"] > 0.0


@pytest.mark.torch
@pytest.mark.multirank
def test_steps_run_from_the_command_line_under_a_capacity() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    asked = ["steps", "--quick", "--models", "hf", "--mixes", "vlm", "--capacity-tokens", "1200"]
    text, content = measured(parser().parse_args([*asked, "--num-microbatches", "1"]))
    assert text.startswith("## Steps")
    assert {run["method"] for run in content["steps"]["runs"]} == set(METHODS)
    assert content["steps"]["options"]["capacity_tokens"] == 1200
