"""From what users write to files: local spellings, remote addresses, and what is refused."""

from pathlib import Path

import pytest

from dataloaders.errors import SourceError
from dataloaders.storage import FileState, Storage, StorageOptions, check_scheme, list_urls, shown, urls
from dataloaders.storage.urls import local_path, scheme_of


def test_braces_wildcards_and_file_urls_name_the_same_files(tmp_path: Path) -> None:
    names = [str(tmp_path / f"s-{n}.tar") for n in range(3)]
    for name in names:
        Path(name).touch()
    for spelling in (
        f"{tmp_path}/s-{{0..2}}.tar",
        f"{tmp_path}/s-*.tar",
        f"file:{tmp_path}/s-?.tar",
        f"file://{tmp_path}/s-{{0,1,2}}.tar",
        f"FILE://{tmp_path}/s-{{0,1,2}}.tar",
        names,
    ):
        assert list_urls(spelling) == Storage().list(spelling) == names


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.tar").touch()
    assert list_urls("~/*.tar") == [str(tmp_path / "a.tar")]
    assert local_path("file://~/a.tar") == str(tmp_path / "a.tar")


def test_a_name_with_braces_and_brackets_is_taken_as_it_stands(tmp_path: Path) -> None:
    name = tmp_path / "a{1..2}[x]\\.tar"
    name.touch()
    assert list_urls(str(name)) == [str(name)]


def test_braces_in_addresses_are_expanded_without_a_look_at_the_server() -> None:
    assert list_urls(["s3://b/{x,y}-{0..1}.tar", "https://h/a.tar?token={k}"][0]) == [
        "s3://b/x-0.tar",
        "s3://b/x-1.tar",
        "s3://b/y-0.tar",
        "s3://b/y-1.tar",
    ]


def test_a_question_mark_is_a_wildcard_in_object_stores_but_not_in_http() -> None:
    assert list_urls("https://h/a.tar?signature=a*b") == ["https://h/a.tar?signature=a*b"]
    asked: list[str] = []
    assert list_urls("s3://b/?.tar", remote_glob=lambda url: asked.append(url) or ["s3://b/2.tar", "s3://b/1.tar"]) == [
        "s3://b/1.tar",
        "s3://b/2.tar",
    ]
    assert asked == ["s3://b/?.tar"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere-*.tar", r"no shard matches 'nowhere-[*]\.tar'\. Check"),
        ([], r"no shard is named\. Name tar files"),
        ("pipe:rm -rf x", r"'pipe:rm -rf x' is a command, .* are not run.*TarStream\(\.\.\., allow_pipe=True\)"),
        ("pipe:cat https://host/a.tar", "commands are not run"),
        ("ftp://host/a.tar", r"the scheme 'ftp' is not one of file, http, .* at ftp://host/a.tar.*StorageOptions"),
        ("gopher://h/a.tar", r"allow it: StorageOptions\(schemes=\(\*SCHEMES, 'gopher'\)\)"),
        ("simplecache::s3://b/a.tar", r"'simplecache::s3://b/a.tar' is a chain of URLs, and chains .*cache_dir="),
        ("zip://a.tar::s3://b/c.zip", "is a chain of URLs, and chains are not followed.*unpack archives"),
        ("zip://a.tar::/b/c.zip", "the scheme 'zip' is not one of"),
        ("a::b.tar", "1 of 1 shards are missing or no files: a::b.tar"),
        ("file://host/a.tar", r"names the host 'host'\. Write file:///path"),
        ("s-{0..1.tar", "unbalanced braces in 's-{0..1.tar'"),
        ("{0..9}{0..99}.tar", "names more than 500 shards"),
        ("{0..99999999999}.tar", "names more than 500 shards"),
        (["s3://b/a.tar", "s3://b/a.tar"], "shards listed twice: s3://b/a.tar"),
        ("s3://b/*.tar", "has wildcards. Name remote files by braces"),
        ("\udcff.tar", "not UTF-8 text: .*udcff"),
    ],
)
def test_what_is_no_list_of_files_is_an_error(
    given: str | list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urls, "MAX_SHARDS", 500)
    with pytest.raises(SourceError, match=message):
        Storage().states(list_urls(given))


def _local_states(given: str) -> list[FileState]:
    local_only = Storage(StorageOptions(schemes=("file",)))
    return local_only.states(local_only.list(given))


def test_missing_files_are_listed_and_a_folder_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"2 of 2 shards are missing or no files: .*a-0.tar, .*a-1.tar. Check"):
        _local_states(f"{tmp_path}/a-{{0..1}}.tar")
    with pytest.raises(SourceError, match=rf"For a folder write {tmp_path}/\*\.tar"):
        _local_states(str(tmp_path))
    with pytest.raises(SourceError, match=r"1 of 1 tables are missing or no files: "):
        Storage().states([f"{tmp_path}/a"], noun="table")


def test_only_configured_schemes_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    remote_only = Storage(StorageOptions(schemes=("HTTPS",)))
    assert remote_only.list("https://h/a.tar") == ["https://h/a.tar"]
    for action in (remote_only.open, remote_only.list, lambda url: remote_only.read_many([(url, 0, 1)])):
        for url in (str(tmp_path / "a"), f"file:{tmp_path}/a", "http://h/a.tar", "pipe:x"):
            with pytest.raises(SourceError, match=r"the scheme 'file'|the scheme 'http'|commands are not run"):
                action(url)
    with pytest.raises(SourceError, match=r"'https://h/a.tar' is not a local file.*Copy the shards"):
        _local_states("https://h/a.tar")


def test_messages_hold_no_passwords_and_no_signatures() -> None:
    url = "https://me:secret@host/a.tar?X-Signature=secret"
    assert shown(url) == "https://...@host/a.tar?..."
    with pytest.raises(SourceError) as caught:
        check_scheme(url, ("file", "s3"))
    assert "secret" not in str(caught.value)


def test_schemes_are_compared_without_case() -> None:
    assert [scheme_of(url) for url in ("HTTPS://h/a", "s3://b", "/a/b://c", "c:/x", "file:///a")] == [
        "https",
        "s3",
        "file",
        "file",
        "file",
    ]
