"""From options to samples: what cannot be loaded is refused before anything is scanned, unfit media at the scan."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dataloaders.demo import DEMO_PROCESSOR
from dataloaders.errors import DataError
from trainer.config import PlacementOptions
from trainer.data import prepare

pytestmark = pytest.mark.torch
Make = Callable[..., bytes]


@pytest.fixture
def strip(tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make) -> str:
    """A strip of 8000 x 20 between two good pictures (CE-02)."""
    sizes = [(60, 40), (8000, 20), (80, 60)]
    members = [(f"{n}.json", chat_json("<image>?", "Yes.")) for n in range(3)]
    members += [(f"{n}.png", image_bytes(*size)) for n, size in enumerate(sizes)]
    return str(write_shard(tmp_path / "strip.tar", sorted(members)))


def test_ce02_a_strip_among_many_is_named_at_launch_and_skipped_when_asked(strip: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)1 of 3 samples cannot be used:.*8000x20 px.*key 1, member 1.png"):
        prepare(PlacementOptions(cache_dir=tmp_path / "cache"), strip, DEMO_PROCESSOR)
    side = prepare(PlacementOptions(cache_dir=tmp_path / "cache", bad_records="skip"), strip, DEMO_PROCESSOR)
    assert side.ids.tolist() == [0, 2]
    assert [(bad.sample_id, bad.reason, bad.unfit) for bad in side.bad] == [(1, "extreme_aspect", True)]


def test_a_model_that_cannot_be_loaded_is_refused_before_the_scan(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can be costed but not loaded"):
        prepare(PlacementOptions(cache_dir=tmp_path / "cache"), "no-such.tar", {"model_type": "internvl"})
