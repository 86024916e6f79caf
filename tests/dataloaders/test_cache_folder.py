"""One rule for the cache folder, and what lies in it."""

from pathlib import Path

import pytest

from dataloaders.cache_folder import cache_folder, make_usable, members_folder, ranges_folder


def test_the_cache_is_the_named_folder_or_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "mllm-balancer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "mllm-balancer"
    assert cache_folder(tmp_path / "mine") == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()


def test_a_usable_folder_is_made_and_another_is_an_error(tmp_path: Path) -> None:
    folder = make_usable(tmp_path / "a" / "b")
    assert list(folder.iterdir()) == []
    assert len({folder, members_folder(folder), ranges_folder(folder)}) == 3
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        make_usable(tmp_path / "file" / "cache")
