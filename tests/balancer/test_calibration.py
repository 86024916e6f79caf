"""Calibration: known coefficients come back, nothing is negative, and what the data cannot say is said."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.calibration import MIN_MICROBATCHES, accuracy, fit
from balancer.cost_model import CostModel
from balancer.cost_terms import COEFFICIENTS
from balancer.counts import StepCounts
from balancer.errors import CostModelError
from balancer.fit_report import Fit, read_cost_model
from balancer.layout import ParallelSpec
from balancer.observations import COLUMNS, Observations, cell_counts
from balancer.plan import Capacities
from balancer.planner import plan_step
from balancer.stage_fit import CONSTANT, TERM_FIELDS

ENCODER = {CONSTANT: 4e6, "patches": 1.5e4, "full_sq": 8.0, "window_sq": 20.0, "items": 3e4}
LLM = {CONSTANT: 5e6, "tokens": 3e4, "token_sq": 20.0, "samples": 2e5, "visual": 2e3, "labels": 4e3}
TRUTH = {(0, "F"): ENCODER, (0, "B"): ENCODER, (1, "F"): LLM, (1, "B"): {n: 2 * v for n, v in LLM.items()}}


def spread_cells(rng: np.random.Generator, count: int) -> np.ndarray:
    """Micro-batches whose columns are drawn apart from each other; every fifth has no media."""
    cells = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    tokens = np.exp(rng.uniform(np.log(64), np.log(4096), count)).astype(np.int64)
    patches = np.exp(rng.uniform(np.log(16), np.log(8192), count)).astype(np.int64)
    patches[::5] = 0
    longest = rng.uniform(1 / 20, 1, count)
    columns = {
        "samples": np.maximum(1, (tokens / 64 * rng.uniform(0, 1, count)).astype(np.int64)),
        "items": np.where(patches > 0, 1 + patches // 256 * rng.integers(1, 4, count), 0),
        "tokens": tokens,
        "labels": (tokens * rng.uniform(0.1, 0.9, count)).astype(np.int64),
        "visual": np.minimum(patches // 4, tokens // 2),
        "patches": patches,
        "full_sq": (patches**2 * longest).astype(np.int64),
        "window_sq": patches * rng.integers(8, 64, count),
        "token_sq": (tokens**2 * rng.uniform(1 / 20, 1, count)).astype(np.int64),
    }
    for index, name in enumerate(COLUMNS):
        cells[:, index] = columns[name]
    return cells


def measured(
    cells: np.ndarray, truth: dict[tuple[int, str], dict[str, float]], *, noise: float = 0.0, seed: int = 0
) -> Observations:
    """Acts of every stage and op of `truth` on the cells that run them, three repetitions."""
    rng = np.random.Generator(np.random.Philox(seed))
    rows = []
    for (stage, op), terms in truth.items():
        for cell, counts in enumerate(cells):
            if stage == 0 and not counts[COLUMNS.index("patches")]:
                continue
            exact = terms.get(CONSTANT, 0.0)
            exact += sum(value * counts[COLUMNS.index(name)] for name, value in terms.items() if name != CONSTANT)
            rows += [(cell, stage, op, exact * math.exp(noise * rng.standard_normal())) for _ in range(3)]
    return Observations(
        cells=cells,
        cell=np.array([row[0] for row in rows]),
        stage=np.array([row[1] for row in rows]),
        op=np.array([row[2] for row in rows], dtype="U1"),
        duration_ns=np.array([max(1, round(row[3])) for row in rows], dtype=np.int64),
    )


def cells_of(seed: int = 0, count: int = 40) -> np.ndarray:
    return spread_cells(np.random.Generator(np.random.Philox(seed)), count)


def column(cells: np.ndarray, name: str) -> np.ndarray:
    return cells[:, COLUMNS.index(name)]


coefficient = st.floats(1e2, 1e5)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32),
    st.fixed_dictionaries(
        {name: st.one_of(st.just(0.0), coefficient) for name in ("tokens", "token_sq", "samples", "labels")}
    ),
)
def test_known_coefficients_are_recovered(seed: int, terms: dict[str, float]) -> None:
    llm = {CONSTANT: 1e6, **terms}
    fitted = fit(measured(cells_of(seed), {(0, "F"): ENCODER, (0, "B"): ENCODER, (1, "F"): llm, (1, "B"): llm}))
    for stage in fitted.stages:
        for name, value in (ENCODER if stage.stage == 0 else llm).items():
            # What the term costs in the largest micro-batch; nanoseconds are rounded, so a part in a million is lost.
            largest = stage.ranges.get(name, (1, 1))[1]
            assert stage.terms[name] * largest == pytest.approx(value * largest, rel=1e-3, abs=1e3)
        assert stage.left_out == {}
        assert stage.held_out.p95 < 1e-4
        assert stage.r2 > 0.9999 or math.isnan(stage.r2)  # nothing but the constant: no variance to explain


def test_noise_leaves_a_small_error_on_microbatches_that_were_not_fitted() -> None:
    fitted = fit(measured(cells_of(), TRUTH, noise=0.05))
    others = measured(cells_of(99), TRUTH, seed=5)
    rows = accuracy(fitted, others)
    assert [(row.stage, row.op) for row in rows] == [(0, "F"), (0, "B"), (1, "F"), (1, "B")]
    assert max(row.median for row in rows) < 0.05
    assert max(row.p95 for row in rows) < 0.15
    assert min(stage.r2 for stage in fitted.stages) > 0.98


def test_a_few_slow_outliers_do_not_bend_the_fit() -> None:
    observations = measured(cells_of(), TRUTH)
    slow = observations.duration_ns.copy()
    slow[np.isin(observations.cell, [3, 11, 28])] *= 6  # all repetitions: the median cannot help
    fitted = fit(dataclasses.replace(observations, duration_ns=slow))
    assert max(row.median for row in accuracy(fitted, measured(cells_of(7), TRUTH))) < 0.01


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_no_coefficient_is_ever_negative_whatever_was_measured(seed: int) -> None:
    rng = np.random.Generator(np.random.Philox(seed))
    observations = measured(cells_of(seed, 12), TRUTH)
    nonsense = np.exp(rng.uniform(5, 25, len(observations))).astype(np.int64)
    fitted = fit(dataclasses.replace(observations, duration_ns=nonsense))
    assert all(value >= 0.0 for stage in fitted.stages for value in stage.terms.values())
    assert all(getattr(s.forward, name) >= 0.0 for s in fitted.model.stages for name in COEFFICIENTS)


def test_collinear_and_constant_columns_are_named_not_fitted() -> None:
    cells = cells_of()
    cells[:, COLUMNS.index("labels")] = 3 * column(cells, "tokens")
    cells[:, COLUMNS.index("samples")] = 1
    cells[:, COLUMNS.index("visual")] = 1000 * column(cells, "tokens") + column(cells, "token_sq")
    fitted = fit(measured(cells, TRUTH))
    forward = next(stage for stage in fitted.stages if (stage.stage, stage.op) == (1, "F"))
    assert forward.left_out["labels"] == "moves with tokens"
    assert forward.left_out["samples"] == "never varies: 1 in every micro-batch"
    assert forward.left_out["visual"].endswith("together")
    assert set(forward.terms) == {CONSTANT, "tokens", "token_sq"}
    assert "labels moves with tokens" in fitted.model.note
    assert any("labels left out, moves with tokens" in line for line in fitted.lines())
    # What was left out is found in what it moves with: predictions inside the data stay right.
    assert forward.held_out.p95 < 1e-3


def test_a_microbatch_outside_the_calibrated_range_is_flagged_and_one_inside_is_not() -> None:
    cells = cells_of()
    fitted = fit(measured(cells, TRUTH))
    assert fitted.extrapolates(cells) == ()
    beyond = cells[1:2].copy()
    beyond[0, COLUMNS.index("token_sq")] = 10**9
    (sentence,) = fitted.extrapolates(beyond)
    assert sentence.startswith("token_sq of stage 1: 1000000000 to 1000000000 in 1 of 1 micro-batches, calibrated on")
    # A column that was left out is watched too: it had only one value, so nothing is known about others.
    cells[:, COLUMNS.index("samples")] = 1
    fitted = fit(measured(cells, TRUTH))
    many = cells.copy()
    many[0, COLUMNS.index("samples")] = 2
    assert any(line.startswith("samples of stage 1: 2 to 2") for line in fitted.extrapolates(many))


def test_stages_that_a_microbatch_does_not_run_are_neither_predicted_nor_flagged() -> None:
    cells = cells_of()
    fitted = fit(measured(cells, TRUTH))
    text = cells[column(cells, "patches") == 0]
    encoder = fitted.stages[0]
    assert encoder.predict_ns(text).tolist() == [0.0] * len(text)
    assert fitted.extrapolates(text) == ()


def test_the_file_keeps_model_and_evidence_to_the_bit(tmp_path) -> None:
    fitted = fit(measured(cells_of(), TRUTH, noise=0.1), subject={"model": "demo", "clock": "cpu"})
    fitted = dataclasses.replace(fitted, verified=accuracy(fitted, measured(cells_of(3), TRUTH)))
    again = Fit.from_json(fitted.to_json())
    assert again == fitted
    assert again.model.fingerprint == fitted.model.fingerprint
    path = tmp_path / "cost.json"
    path.write_text(fitted.to_json(), encoding="utf-8")
    assert read_cost_model(path) == (fitted.model, fitted)
    path.write_text(fitted.model.to_json(), encoding="utf-8")
    assert read_cost_model(path) == (fitted.model, None)


def test_a_damaged_file_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "cost.json"
    text = fit(measured(cells_of(), TRUTH)).to_json()
    for broken, message in [
        (text[:-30], "cannot be read"),
        (text.replace('"fit_format_version": 1', '"fit_format_version": 9'), "format 9; this version reads 1"),
        (text.replace('"per_token_ns": ', '"per_token_ns": 1'), "edited by hand"),
        ("{}", "cannot be read"),
    ]:
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(CostModelError, match=message) as caught:
            read_cost_model(path)
        assert str(path) in str(caught.value)
    with pytest.raises(CostModelError, match=r"missing\.json"):
        read_cost_model(tmp_path / "missing.json")


def stored(**changed: object) -> dict[str, object]:
    """The content of a file, checked on other micro-batches as well."""
    fitted = fit(measured(cells_of(), TRUTH, noise=0.1), layers=(3, 5), subject={"model": "demo"})
    fitted = dataclasses.replace(fitted, verified=accuracy(fitted, measured(cells_of(3), TRUTH)))
    return {**json.loads(fitted.to_json()), **changed}


HUGE = 10**400
DAMAGE: list[tuple[tuple[str | int, ...], object]] = [
    *((("stages", 2, "terms"), value) for value in (5, {}, {"tokens": 1.0}, {"constant": 1.0, "zz": 1.0})),
    *((("stages", 2, "terms", "tokens"), value) for value in (-5, "x", None, HUGE, float("inf"), True, 5e4)),
    *((("stages", 2, "stage"), value) for value in (77, -1, 1.0, "x", None, True, 0)),
    *((("stages", 0, "op"), value) for value in ("X", "\x1b[31m", None, 5, ["F"])),
    *((("stages", 2, "domain"), value) for value in ("\x1b[2J", None, "decoder", "encoder", "generator")),
    *((("stages", 2, "ranges"), value) for value in ({}, 5, [], {"zz": [1, 2]})),
    *(
        (("stages", 2, "ranges", "tokens"), value)
        for value in (
            [9, 2],
            [1],
            [1, 2, 3],
            5,
            [0, HUGE],
            [0, float("inf")],
            [0, 2**100],
            [-1, 5],
            [0.5, 5],
            ["1", "2"],
        )
    ),
    *((("stages", 2, "left_out"), value) for value in (5, {"zz": "x"}, {"tokens": "x"}, {"\x1b": "x"})),
    *((("stages", 2, "num_microbatches"), value) for value in (0, -1, "x", 1.5, HUGE)),
    *((("stages", 2, "repeats"), value) for value in ("x", -1, None)),
    *((("stages", 2, "r2"), value) for value in ("x", 2.0, HUGE, float("inf"))),
    *((("stages", 2, "held_out"), value) for value in (5, None, {})),
    *((("stages", 2, "held_out", name), "x") for name in ("median", "p95", "largest", "bias", "stage", "op")),
    *((("stages", 2, "held_out", "median"), value) for value in (-0.1, None, HUGE, float("inf"))),
    (("stages", 2, "held_out", "stage"), 0),
    *((("stages",), value) for value in ([], 5, None, {})),
    *((("causal_window",), value) for value in ("x", -4, 1.5, None, 2**40, True)),
    *((("subject",), value) for value in (5, None, [], {"\x1b": 1}, {"x": float("nan")})),
    *((("verified", 0, name), value) for name in ("median", "stage", "op") for value in ("x", None, -1)),
    *((("verified",), value) for value in (5, [5], [{}])),
    (("model", "stages", 0, "forward", "per_patch_ns"), HUGE),
    (("model", "stages", 0, "forward", "causal_window"), "x"),
    (("model", "domains"), ["llm", "llm"]),
    (("model",), 5),
    (("fit_format_version",), "1"),
    (("extra",), 1),
]


@pytest.mark.parametrize(("place", "value"), DAMAGE, ids=lambda part: ascii(part)[:60])
def test_whatever_is_damaged_in_a_file_is_refused_with_one_kind_of_error(
    tmp_path, place: tuple[str | int, ...], value: object
) -> None:
    content = stored()
    part = content
    for key in place[:-1]:
        part = part[key]  # type: ignore[index, assignment]
    part[place[-1]] = value  # type: ignore[index]
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CostModelError) as caught:
        read_cost_model(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1), (2, 3)])
def test_a_stage_without_its_evidence_is_no_calibration(gone: tuple[int, ...]) -> None:
    content = stored()
    content["stages"] = [row for index, row in enumerate(content["stages"]) if index not in gone]  # type: ignore
    content["verified"] = []
    with pytest.raises(CostModelError, match=r"evidence of every stage|F and B, or F, I and W, are needed"):
        Fit.from_json(json.dumps(content))


def test_a_stage_and_op_given_twice_is_no_calibration() -> None:
    content = stored()
    content["stages"] = [*content["stages"], content["stages"][0]]  # type: ignore
    with pytest.raises(CostModelError, match="each stage and op once"):
        Fit.from_json(json.dumps(content))


def test_a_file_that_names_the_domains_of_its_evidence_alone_gives_them_to_its_model() -> None:
    content = stored()
    del content["model"]["domains"], content["model"]["layers"]  # type: ignore
    model = Fit.from_json(json.dumps(content)).model
    assert (model.domains, model.layers) == (("encoder", "llm"), ())
    assert model.other_split(("llm", "llm")) == ("is of 2 stages: encoder, llm, the layout is 2 stages: llm, llm")


@pytest.mark.parametrize("name", ["cost.json", "zero"])
def test_a_pipe_or_a_device_is_no_cost_model_and_is_not_waited_for(tmp_path, name: str) -> None:
    os.mkfifo(tmp_path / "cost.json")
    os.symlink("/dev/zero", tmp_path / "zero")
    with pytest.raises(CostModelError, match=f"{name}: no regular file"):
        read_cost_model(tmp_path / name)


def test_a_fit_that_predicts_badly_says_so_and_why() -> None:
    good = fit(measured(cells_of(), TRUTH, noise=0.05))
    assert good.doubts() == ()
    stage = good.stages[2]
    bad = dataclasses.replace(stage, held_out=dataclasses.replace(stage.held_out, median=3.05))
    (said,) = dataclasses.replace(good, stages=(*good.stages[:2], bad, good.stages[3])).doubts()
    assert said.startswith("stage 1 F (llm) is predicted with a median error of 305%; times vary by more")
    few = dataclasses.replace(bad, num_microbatches=12)
    (said,) = dataclasses.replace(good, stages=(*good.stages[:2], few, good.stages[3])).doubts()
    assert "12 micro-batches are few for 6 terms: measure more" in said
    # Other micro-batches than those of the fit count as well.
    rows = accuracy(good, measured(cells_of(3), {key: {n: 3 * v for n, v in t.items()} for key, t in TRUTH.items()}))
    assert len(dataclasses.replace(good, verified=rows).doubts()) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 10**9}, "num_stages=1000000000: a pipeline has 1 to 4096 stages"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_stages": 2.0}, "num_stages=2.0"),
        ({"num_stages": "2"}, "num_stages=2: a pipeline"),
        ({"domains": "llm"}, "acts of 2 stages|choose encoder"),
        ({"subject": {"x": float("nan")}}, "subject=.*as JSON has them"),
        ({"subject": {"x": object()}}, "subject=.*as JSON has them"),
        ({"subject": {"x": np.int64(3)}}, "subject=.*as JSON has them"),
        ({"subject": {5: "x"}}, "subject=.*as JSON has them"),
        ({"domains": ("llm", "encoder")}, "domains llm, encoder: the chain is encoder, llm, generator, in this order"),
        ({"layers": (1,)}, r"layers=\(1,\): one per stage, 2"),
        ({"layers": ("a", "b")}, "layers=.*one per stage"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_before_anything_is_made_for_it(options, message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        fit(measured(cells_of(), TRUTH), **options)


@pytest.mark.parametrize("nothing", [[], None, "x"])
def test_only_observations_are_fitted(nothing: object) -> None:
    with pytest.raises(CostModelError, match=f"fit takes Observations, not {type(nothing).__name__}"):
        fit(nothing)  # type: ignore[arg-type]


def test_two_hosts_that_read_the_same_file_make_the_same_plan(counts_of) -> None:
    text = fit(measured(cells_of(), TRUTH, noise=0.1)).to_json()
    counts = counts_of([100, 900, 400, 50, 700, 300], patches=[64, 0, 256, 16, 0, 1024])
    plans = [
        plan_step(
            counts,
            parallel=ParallelSpec.pipeline(dp_size=2),
            cost_model=Fit.from_json(text).model,
            capacities=Capacities(tokens=2048),
        )
        for _ in range(2)
    ]
    assert (plans[0].inputs_digest, plans[0].digest) == (plans[1].inputs_digest, plans[1].digest)
    # Another measurement is another input, and the ranks would say so before the first forward.
    other = json.loads(text)["model"]
    assert other["fingerprint"] == CostModel.from_json(json.dumps(other)).fingerprint


def test_a_cell_is_predicted_as_the_cost_model_adds_it_up(counts_of) -> None:
    fitted = fit(measured(cells_of(), TRUTH))
    counts: StepCounts = counts_of([100, 900, 400, 50], patches=[64, 0, 256, 16])
    cells = cell_counts(counts, np.zeros(4, dtype=np.int64), num_cells=1)
    planned = fitted.model.forward_ns(counts).sum(axis=0) + fitted.model.forward_constant_ns()
    predicted = [stage.predict_ns(cells)[0] for stage in fitted.stages if stage.op == "F"]
    assert planned.tolist() == pytest.approx(predicted, abs=40)  # half a nanosecond per term and sample


def test_split_backwards_are_added_and_their_weight_part_is_kept() -> None:
    truth = {
        (0, "F"): ENCODER,
        (0, "B"): ENCODER,
        (1, "F"): LLM,
        (1, "I"): LLM,
        (1, "W"): {CONSTANT: 1e6, "tokens": 1e4},
    }
    (_, llm) = fit(measured(cells_of(), truth)).model.stages
    assert llm.weight.per_token_ns == pytest.approx(1e4, rel=1e-3)
    assert llm.backward.per_token_ns == pytest.approx(4e4, rel=1e-3)
    assert llm.backward.per_token_sq_ns == pytest.approx(20.0, rel=1e-3)
    assert llm.weight.constant_ns < llm.backward.constant_ns


def test_middle_stages_are_not_fitted_on_labels_or_visual_tokens() -> None:
    plain = {CONSTANT: 1e6, "tokens": 1e4, "token_sq": 5.0}
    truth = {(stage, op): (ENCODER if stage == 0 else plain) for stage in range(4) for op in "FB"}
    fitted = fit(measured(cells_of(), truth), num_stages=4)
    known = {stage.stage: set(stage.ranges) for stage in fitted.stages}
    llm = {"tokens", "token_sq", "samples"}
    assert known == {
        0: {"patches", "full_sq", "window_sq", "items"},
        1: llm | {"visual"},
        2: llm,
        3: llm | {"labels"},
    }


@pytest.mark.parametrize(
    ("truth", "options", "message"),
    [
        ({(1, "F"): LLM, (1, "B"): LLM}, {}, r"stage 0 \(encoder\) has acts of no op"),
        ({(0, "F"): ENCODER, (1, "F"): LLM}, {}, "F and B, or F, I and W, are needed"),
        (TRUTH, {"domains": ["encoder"]}, "acts of 2 stages"),
        (TRUTH, {"domains": ["encoder", "decoder"]}, "choose encoder, llm, generator"),
        (TRUTH, {"num_stages": 3, "domains": ["encoder", "llm"]}, "num_stages=3, but 2 domains"),
    ],
)
def test_what_was_not_measured_is_not_invented(truth, options, message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        fit(measured(cells_of(), truth), **options)


def test_too_few_microbatches_are_refused() -> None:
    with pytest.raises(CostModelError, match=f"a fit needs at least {MIN_MICROBATCHES}"):
        fit(measured(cells_of(1, 3), TRUTH))


def test_every_term_of_a_fit_is_a_coefficient_of_the_cost_model() -> None:
    assert set(TERM_FIELDS.values()) == set(COEFFICIENTS)
