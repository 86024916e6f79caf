"""Fixtures of the tests of estimators: the table of counts that the reference processors gave, and their options."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from dataloaders.counts import ItemCounts
from dataloaders.errors import UnfitError
from dataloaders.estimators import TokenEstimator

Row = dict[str, Any]


@pytest.fixture(scope="session")
def refusal() -> Callable[..., UnfitError | None]:
    """`refusal(call, *args)`: the `UnfitError` that the call raises; None where it returns."""

    def call_it(call: Callable[..., object], *args: object) -> UnfitError | None:
        try:
            call(*args)
        except UnfitError as error:
            return error
        return None

    return call_it


@pytest.fixture(scope="session")
def counts_of() -> Callable[[TokenEstimator, Row], ItemCounts | None]:
    """`counts_of(estimator, row)`: counts of the medium of an oracle row; None where the processor fails on it, too."""

    def count(estimator: TokenEstimator, row: Row) -> ItemCounts | None:
        try:
            if row["kind"] == "image":
                return estimator.image(row["w"], row["h"])
            return estimator.video(row["w"], row["h"], row["src_frames"], row["fps"], row["duration"])
        except UnfitError:
            assert row["error"] is not None, row
            return None

    return count


@pytest.fixture(scope="session")
def oracle(shared_dir: Path) -> Callable[[str], list[Row]]:
    """`oracle(family)`: its rows; keys kind, w, h, src_frames, fps, duration, sampled_frames, patches, embed_tokens,
    llm_tokens, method, agree, error (None where a key does not apply)."""
    rows: dict[str, list[Row]] = {}
    for row in pyarrow.parquet.read_table(shared_dir / "data" / "token_oracle.parquet").to_pylist():
        rows.setdefault(row["family"], []).append(row)
    return rows.__getitem__  # an unknown family is a KeyError: a test that compares nothing must not pass


@pytest.fixture(scope="session")
def oracle_params(shared_dir: Path) -> Callable[[str], dict[str, Any]]:
    """`oracle_params(family)`: the options that its rows were made with."""
    params: dict[str, dict[str, Any]] = json.loads((shared_dir / "data" / "token_oracle_params.json").read_text())
    return params.__getitem__
