"""A mixture written down: everything strange in it is an error that names the entry, and nothing in it is executed."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError
from dataloaders.mixture_spec import MAX_FILE_BYTES, MixturePartSpec, MixtureSpec, parse_mixture, read_mixture
from dataloaders.rows import RowFields
from dataloaders.weight_schedule import RAMP_PHASES, WeightSchedule, WeightStep

TEXT = """
unit: llm_tokens
parts:
  - name: captions
    data: "captions/{000..063}.tar"
    weight: 1
  - name: pages
    data: [pages-a.jsonl, "https://host/b.jsonl", /abs/c.jsonl, ~/d.jsonl]
    media_root: images
    schedule:
      - {start: 0, weight: 1}
      - {start: 1000, weight: 0.3, over: 400}
    max_epochs: 4
"""
GOOD = {"unit": "samples", "parts": [{"name": "a", "data": "a.tar", "weight": 1}]}


def parse(values: object) -> MixtureSpec:
    return parse_mixture(json.dumps(values), folder=Path("/mixes"), is_json=True)


def part(**changes: object) -> object:
    """GOOD with changes of its part; None removes a key."""
    entry = {**GOOD["parts"][0], **changes}  # type: ignore[dict-item]
    return {"unit": "samples", "parts": [{key: value for key, value in entry.items() if value is not None}]}


def test_a_file_becomes_plain_dataclasses_with_resolved_paths(tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text(TEXT, encoding="utf-8")
    spec = read_mixture(tmp_path / "mixture.yaml")
    assert spec == MixtureSpec(
        unit="llm_tokens",
        parts=(
            MixturePartSpec(
                name="captions", data=(f"{tmp_path}/captions/{{000..063}}.tar",), schedule=WeightSchedule.constant(1)
            ),
            MixturePartSpec(
                name="pages",
                data=(f"{tmp_path}/pages-a.jsonl", "https://host/b.jsonl", "/abs/c.jsonl", "~/d.jsonl"),
                schedule=WeightSchedule((WeightStep(weight=1), WeightStep(start=1000, weight=0.3, over=400))),
                media_root=f"{tmp_path}/images",
                max_epochs=4,
            ),
        ),
    )


def test_a_part_may_name_its_fields_and_what_its_records_may_fetch() -> None:
    entry = part(media_schemes="https", fields={"conversation": "turns", "images": "pic", "videos": ["a", "b"]})
    (read,) = parse(entry).parts
    assert read.media_schemes == ("https",)
    assert read.fields == RowFields(conversation="turns", images="pic", videos=("a", "b"))
    assert parse(part(media_schemes=["https", "s3"])).parts[0].media_schemes == ("https", "s3")


def test_json_and_yaml_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(GOOD), encoding="utf-8")
    (tmp_path / "m.yaml").write_text(json.dumps(GOOD), encoding="utf-8")
    assert read_mixture(tmp_path / "m.json") == read_mixture(tmp_path / "m.yaml")
    assert parse(GOOD).parts[0].data == ("/mixes/a.tar",)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"unit": "tokens", "parts": []}, r"unit is 'tokens' at mixture. Did you mean llm_tokens\?"),
        ({"parts": []}, "unit is missing at mixture. Add unit."),
        ({**GOOD, "part": 1}, r"unknown key 'part' at mixture. Did you mean parts\?"),
        ({"unit": "samples", "parts": []}, "parts is a list of 0 at mixture. It is a list of 1 to 1000 entries."),
        ({"unit": "samples", "parts": {"a": 1}}, "parts is a mapping of 1 at mixture. It is a list"),
        ({"unit": "samples", "parts": ["a.tar"]}, r"'a.tar' where keys are expected at mixture, parts\[0\]. Give name"),
        ({"unit": "samples", "parts": GOOD["parts"] * 2}, "part 'a' is there twice"),
        (part(wieght=2), r"unknown key 'wieght' at mixture, parts\[0\]. Did you mean weight\?"),
        (part(fields={"image": "a"}), r"unknown key 'image' at .*\(a\), fields. Did you mean images\?"),
        (part(fields="turns"), r"'turns' where keys are expected at .*, fields. Give conversation"),
        (part(fields={"images": []}), "images is a list of 0"),
        (part(media_schemes=[3]), "media_schemes is a list of 1"),
        (part(xyz=2), r"unknown key 'xyz' .* There are name, data, weight"),
        (part(weight=None), r"it has no weight at mixture, parts\[0\] \(a\). Give one."),
        (part(schedule=[]), "it has both weight and schedule"),
        (part(weight="1e-3"), "weight is '1e-3' .* It is a number, such as 0.5; YAML reads 1e-3 as a text."),
        (part(weight=True), "weight is True"),
        (part(weight=-1), r"weight=-1.0 at mixture, parts\[0\] \(a\). A weight is a finite number of at least 0."),
        (part(weight=10**400), "weight is an integer of 1329 bits .* It is too large."),
        (part(name=False), "name is False .* It is a text; put it in quotes."),
        (part(name=""), "name is ''"),
        (part(data=[]), "data is a list of 0"),
        (part(data=["a", 3]), "data is a list of 2 .* put them in quotes"),
        (part(data=None), "data is missing"),
        (part(data="a\0b"), "data is 'a.x00b'"),
        (part(media_root=3), "media_root is 3"),
        (part(max_epochs=0), "max_epochs is 0 .* It is an integer of at least 1."),
        (part(max_epochs=2.5), "max_epochs is 2.5"),
        (part(weight=None, schedule=[{"start": 3, "weight": 1}]), "the schedule begins at step 3, not at step 0"),
        (part(weight=None, schedule=[{"weight": 1}]), r"start is missing at mixture, parts\[0\] \(a\), schedule\[0\]"),
        (part(weight=None, schedule=[{"start": 0, "weight": 1, "ramp": 3}]), "unknown key 'ramp'"),
        (
            part(
                weight=None,
                schedule=[{"start": 0, "weight": 1}, {"start": 9, "weight": 2, "over": 5}, {"start": 13, "weight": 1}],
            ),
            r"the change at step 13 begins before the one at step 9 \(over 5 steps\) is complete",
        ),
        (part(weight=None, schedule=[{"start": 0, "weight": 1}, {"start": 2**60, "weight": 2}]), "start=11529"),
        ([GOOD], "a list of 1 where keys are expected"),
        (None, "None where keys are expected"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(values: object, text: str) -> None:
    with pytest.raises(DataError, match=text):
        parse(values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("unit: samples\nunit: samples\n", "key 'unit' is given twice"),
        ("unit: &a samples\nparts: *a\n", "an alias in line 2; write it out"),
        ("unit: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
        ("unit: [", "not a mixture in YAML"),
        ("? [a, b]\n: 1\n", "not a mixture in YAML: unhashable|found unhashable"),
        ("[" * 5000, "not a mixture in YAML: nested too deeply"),
        ("unit: samples\nparts: [{name: a, data: a, weight: .inf}]", "weight=inf"),
        ("unit: samples\nparts: [{name: a, data: a, weight: .nan}]", "weight=nan"),
    ],
)
def test_yaml_that_is_broken_or_hostile_is_refused(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_mixture(text, folder=Path("/"))


@pytest.mark.parametrize("text", ['{"unit": 1, "unit": 2}', "{", "[" * 100_000, '{"unit": NaN}'])
def test_json_that_is_broken_or_hostile_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"not a mixture in JSON|unit is nan"):
        parse_mixture(text, folder=Path("/"), is_json=True)


def test_files_that_are_missing_large_or_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the mixture cannot be read: .*No such file"):
        read_mixture(tmp_path / "none.yaml")
    (tmp_path / "large.yaml").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(DataError, match=f"a mixture of more than {MAX_FILE_BYTES} bytes"):
        read_mixture(tmp_path / "large.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="the mixture cannot be read"):
        read_mixture(tmp_path / "binary.yaml")


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
                        st.sampled_from(["unit", "parts", "name", "data", "weight", "schedule", "start", "x"]), inner,
                        max_size=5), max_leaves=12))  # fmt: skip
def test_any_content_is_a_mixture_or_an_error_in_words(values: object) -> None:
    refused = None
    try:
        assert parse(values).parts
    except DataError as error:
        refused = error
    assert refused is None or (refused.place and refused.remedy)


def test_a_ramp_is_pieces_of_constant_weight_that_lead_to_its_end() -> None:
    pieces = WeightSchedule((WeightStep(weight=1), WeightStep(start=100, weight=3, over=6400))).pieces()
    starts, weights = zip(*pieces, strict=True)
    assert len(pieces) == RAMP_PHASES + 2
    assert starts[:3] == (0, 100, 300)
    assert (pieces[0], pieces[-1]) == ((0, 1), (6500, 3))
    assert list(weights) == sorted(weights)
    for start, weight in pieces[1:-1]:  # each holds the middle of its 200 steps
        assert float(weight) == pytest.approx(1 + 2 * (start + 100 - 100) / 6400)


def test_a_short_ramp_has_a_piece_per_step_and_a_late_start_is_an_error() -> None:
    pieces = WeightSchedule((WeightStep(weight=0), WeightStep(start=3, weight=1, over=2))).pieces()
    assert [(start, float(weight)) for start, weight in pieces] == [(0, 0), (3, 0.25), (4, 0.75), (5, 1)]
    with pytest.raises(DataError, match="the schedule begins at step 2, not at step 0"):
        WeightSchedule((WeightStep(weight=0, over=2),))
    with pytest.raises(DataError, match="a schedule of 0 weights"):
        WeightSchedule(())
