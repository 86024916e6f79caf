"""The picture is to scale, complete, escaped and self-contained."""

import re
from xml.etree import ElementTree

import pytest

from tools.compared_steps import StepPair
from tools.timeline_svg import LEFT_PX, PLOT_PX, SHADES, nice_step_ms, render_pair

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def pair(make_record) -> StepPair:
    off = [(0, 0, "F", 0, 0.0, 40.0), (0, 1, "B", 1, 50.0, 200.0), (1, 0, "F", 0, 0.0, 20.0)]
    on = [(0, 0, "F", 0, 0.0, 100.0), (1, 0, "F", 0, 10.0, 90.0)]
    return StepPair(before=make_record(7, off, policy="sequential"), after=make_record(7, on))


def _panel(svg: str, name: str) -> ElementTree.Element:
    (panel,) = (group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.get("id") == name)
    return panel


def _bars(svg: str, name: str) -> list[ElementTree.Element]:
    return [rect for rect in _panel(svg, name).iter(f"{SVG}rect") if rect.get("class") == "act"]


def _texts(element: ElementTree.Element) -> str:
    return "\n".join(text.text or "" for text in element.iter(f"{SVG}text"))


def test_each_act_is_one_bar(pair: StepPair) -> None:
    svg = render_pair(pair)
    assert (len(_bars(svg, "before")), len(_bars(svg, "after"))) == (3, 2)


def test_both_panels_share_one_time_axis_to_scale(pair: StepPair) -> None:
    svg = render_pair(pair)  # the longer step, 200 ms, spans the plot
    first, second, third = _bars(svg, "before")
    assert float(first.get("x")) == LEFT_PX
    assert float(first.get("width")) == pytest.approx(PLOT_PX * 40 / 200, abs=1)
    assert float(second.get("x")) == pytest.approx(LEFT_PX + PLOT_PX * 50 / 200, abs=0.1)
    assert float(third.get("width")) == pytest.approx(PLOT_PX * 20 / 200, abs=1)
    assert float(_bars(svg, "after")[0].get("width")) == pytest.approx(PLOT_PX * 100 / 200, abs=1)


def test_each_rank_has_a_row_of_its_own_and_idle_ones_are_kept(make_record) -> None:
    off = [(0, 0, "F", 0, 0.0, 40.0), (2, 0, "F", 0, 0.0, 20.0)]
    svg = render_pair(
        StepPair(before=make_record(1, off, policy="sequential"), after=make_record(1, [(0, 0, "F", 0, 0.0, 9.0)]))
    )
    lanes = [rect for rect in _panel(svg, "before").iter(f"{SVG}rect") if rect.get("class") == "lane"]
    assert len({lane.get("y") for lane in lanes}) == 3
    assert "rank 1: idle" in _texts(_panel(svg, "before"))
    top, bottom = (float(bar.get("y")) for bar in _bars(svg, "before"))
    assert bottom > top


def test_captions_carry_the_measured_numbers(pair: StepPair) -> None:
    svg = render_pair(pair)
    before = _texts(_panel(svg, "before"))
    assert "before: balancer off (policy sequential), step 200.0 ms" in before
    # Busy 190 and 20 of 200 ms on two ranks.
    assert "bubble_ratio 0.475" in before
    assert f"imbalance {190 / 105:.2f} over 2 replicas" in before
    assert "after: balancer on (policy lpt), step 100.0 ms" in _texts(_panel(svg, "after"))
    assert "2.00x as fast" in svg


def test_a_slower_step_is_called_slower(make_record) -> None:
    fast, slow = [(0, 0, "F", 0, 0.0, 10.0)], [(0, 0, "F", 0, 0.0, 20.0)]
    svg = render_pair(StepPair(before=make_record(1, fast, policy="sequential"), after=make_record(1, slow)))
    assert "0.50x as fast (slower)" in svg


def test_one_replica_shows_the_imbalance_of_its_micro_batches(make_record) -> None:
    acts = [(0, 0, "F", 0, 0.0, 30.0), (0, 0, "F", 1, 30.0, 40.0)]
    svg = render_pair(StepPair(before=make_record(1, acts, policy="sequential"), after=make_record(1, acts)))
    assert "imbalance 1.50 over micro-batches" in svg


def test_colours_follow_stage_and_op_and_the_legend_names_those_drawn(pair: StepPair) -> None:
    svg = render_pair(pair)
    fills = [bar.get("fill") for bar in _bars(svg, "before")]
    assert fills == [SHADES[0][0], SHADES[1][1], SHADES[0][0]]
    key = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text") if text.get("class") == "key"]
    assert key == ["stage 0 encoder forward", "stage 1 LLM backward"]


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("forward", "backward"), SHADES)
def test_forward_and_backward_differ_without_hue_and_numbers_on_them_are_readable(forward: str, backward: str) -> None:
    assert _contrast(forward, backward) > 2.2
    assert _contrast(forward, "#1b1f24") > 4.5
    assert _contrast(backward, "#ffffff") > 3.8


def test_wide_bars_carry_their_micro_batch_and_every_bar_a_hint(pair: StepPair) -> None:
    panel = _panel(render_pair(pair), "before")
    hints = [title.text for title in panel.iter(f"{SVG}title")]
    assert hints[1] == "stage 1 LLM backward, micro-batch 1: 50.0 to 200.0 ms (150.0 ms)"
    assert len(hints) == 3
    assert [text.text for text in panel.iter(f"{SVG}text") if (text.get("class") or "").startswith("on-")] == [
        "0",
        "1",
        "0",
    ]


def test_text_from_records_is_escaped(make_record) -> None:
    acts = [(0, 0, "F", 0, 0.0, 10.0)]
    evil = make_record(1, acts, policy='"><script>alert(1)</script>&')
    svg = render_pair(StepPair(before=make_record(1, acts, policy="sequential"), after=evil))
    root = ElementTree.fromstring(svg)
    assert [element for element in root.iter() if element.tag.endswith("script")] == []
    assert '(policy "><script>alert(1)</script>&)' in _texts(root)


def test_the_document_loads_nothing_and_adapts_to_a_dark_scheme(pair: StepPair) -> None:
    svg = render_pair(pair)
    assert "prefers-color-scheme: dark" in svg
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|@import|url\(|<script|<image", svg)


def test_the_picture_names_itself_for_readers_who_do_not_see_it(pair: StepPair) -> None:
    root = ElementTree.fromstring(render_pair(pair))
    assert root.get("role") == "img"
    assert "balancer off and on" in (root.findtext(f"{SVG}title") or "")
    assert "step 200.0 ms" in (root.findtext(f"{SVG}desc") or "")


def test_the_same_pair_gives_the_same_bytes(pair: StepPair) -> None:
    assert render_pair(pair) == render_pair(pair)


@pytest.mark.parametrize(
    ("axis_ms", "step_ms"), [(200.0, 20.0), (100.0, 10.0), (348.1, 50.0), (7.0, 1.0), (0.03, 0.005)]
)
def test_ticks_stand_at_round_numbers(axis_ms: float, step_ms: float) -> None:
    assert nice_step_ms(axis_ms) == pytest.approx(step_ms)


def test_an_act_that_ends_after_the_recorded_step_stays_inside_the_plot(make_record) -> None:
    record = make_record(1, [(0, 0, "F", 0, 0.0, 30.0)], step_ms=20.0, policy="sequential")
    (bar,) = _bars(render_pair(StepPair(before=record, after=record)), "before")
    assert float(bar.get("x")) + float(bar.get("width")) <= LEFT_PX + PLOT_PX
