"""The tokenizer of a model folder: `tokenizer.json` with the tokens that `tokenizer_config.json` adds to it.

    folder --read_tokenizer--> TokenizerFile(path, digest, added tokens, special tokens by name)   plain data, picklable
                                    | .load()   once per process
                                    v
                               tokenizers.Tokenizer

A `TokenizerFile` travels to loader workers as a path and a digest; each process reads the file when it first encodes,
and refuses a file that has changed since. Texts are encoded one at a time, never in parallel batches, so a process may
fork afterwards. The order in which tokens are added follows transformers 5.24, so ids agree.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer

from dataloaders.errors import DataError

TOKENIZER_NAME = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 * 1024**2
MAX_CONFIG_BYTES = 16 * 1024**2
_DAMAGED = "Download the model folder again."


class AddedSpec(NamedTuple):
    """One added token with its flags."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True

    def to_token(self) -> AddedToken:
        return AddedToken(
            self.content,
            single_word=self.single_word,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            normalized=self.normalized,
            special=self.special,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """Where a tokenizer lies and what is added to it.

    Attributes:
        path: `tokenizer.json`; digest: SHA-256 of it.
        added: tokens with flags, which win over those in the file, in order of their ids.
        more: tokens that are added, as special ones, where they are missing.
        names: special tokens by name (`bos_token`, `eos_token`, `image_token`, ...), as templates see them.
    """

    path: str
    digest: str
    added: tuple[AddedSpec, ...] = ()
    more: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def identity(self) -> str:
        """Hex digest of all that decides about ids."""
        made_of = [self.digest, self.added, self.more]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()

    def load(self) -> "LoadedTokenizer":
        """The tokenizer, read once per process.

        Raises:
            DataError: the file is gone, damaged, or has changed.
        """
        return _load(self.path, self.digest, self.added, self.more)


class LoadedTokenizer:
    """A tokenizer in memory: text to ids and character offsets. Safe to share between threads."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.added = {token.content: token for token in backend.get_added_tokens_decoder().values()}

    def encode(self, text: str) -> Encoding:
        """`text` with added tokens recognised; nothing is put around it.

        Raises:
            DataError: the tokenizer has no token for something in it.
        """
        try:
            return self.backend.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from error

    def encode_plainly(self, text: str) -> list[int]:
        """Ids of `text` where no added token is recognised, special or not."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = [text]
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self.backend.model.tokenize(word)]

    def special_contents(self) -> list[str]:
        """The special tokens, as text."""
        return [content for content, token in self.added.items() if token.special]

    def count_between_specials(self, text: str) -> int:
        """Ids of `text` where special tokens stand before and behind it."""
        if not text:
            return 0
        edge = self.separator
        return len(self.encode(f"{edge}{text}{edge}").ids) - (2 if edge else 0)

    @cached_property
    def surrounding(self) -> tuple[list[int], list[int]]:
        """Ids that the post-processor puts (before, behind) a text when it may."""
        bare = self.encode("a").ids
        try:
            full = self.backend.encode("a", add_special_tokens=True).ids
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"the tokenizer cannot put tokens around a text: {error}") from error
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    @cached_property
    def separator(self) -> str:
        """A special token that leaves the text beside it alone; nothing where there is none."""
        tokens = self.added.values()
        plain = (t.content for t in tokens if t.special and not (t.lstrip or t.rstrip or t.single_word))
        return next((content for content in plain if self.encode(content).tokens == [content]), "")


def read_tokenizer(folder: str | Path) -> TokenizerFile:
    """The tokenizer of a model folder; `tokenizer.json` is only digested.

    Raises:
        DataError: no `tokenizer.json`, files that are too large, damaged or not of the published form.
    """
    root = Path(folder)
    path = root / TOKENIZER_NAME
    if not path.is_file():
        raise DataError(
            f"no {TOKENIZER_NAME}",
            place=str(root),
            remedy="Save it once with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
        )
    config = dict(read_object(root / "tokenizer_config.json"))
    if "added_tokens_decoder" not in config:  # the older layout
        config |= read_object(root / "special_tokens_map.json")
    names = dict(_named_tokens(config))
    return TokenizerFile(
        path=str(path),
        digest=hashlib.sha256(read_bounded(path, MAX_TOKENIZER_BYTES)).hexdigest(),
        added=tuple(_added_tokens(config, str(root))),
        more=tuple(dict.fromkeys([*names.values(), *_additional_tokens(config)])),
        names=names,
    )


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Content of a file of at most `max_bytes`."""
    size = path.stat().st_size
    if size > max_bytes:
        raise DataError(f"{size} bytes, above the {max_bytes} that are read", place=str(path))
    return path.read_bytes()


def read_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Mapping[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    raw = read_bounded(path, max_bytes)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", place=str(path), remedy=_DAMAGED) from error
    if not isinstance(value, dict):
        raise DataError(f"JSON of type {type(value).__name__} where an object is needed", place=str(path))
    return value


def token_content(value: object) -> str | None:
    """The text of a token that a configuration gives as a string or as an object with `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) and content else None


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    extra = config.get("extra_special_tokens")
    nested = extra if isinstance(extra, Mapping) else {}
    specific = config.get("model_specific_special_tokens")
    for mapping in (config, nested, specific if isinstance(specific, Mapping) else {}):
        for name, value in mapping.items():
            content = token_content(value)
            if content is not None and name.endswith("_token"):
                yield name, content


def _added_tokens(config: Mapping[str, Any], place: str) -> Iterator[AddedSpec]:
    decoder = config.get("added_tokens_decoder") or {}
    try:
        for _, value in sorted((int(index), value) for index, value in decoder.items()):
            flags = {name: value[name] for name in AddedSpec._fields if name in value}
            spec = AddedSpec(**{"normalized": not flags.get("special", False), "special": False, **flags})
            spec.to_token()  # raises TypeError for flags of other types
            yield spec
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"added_tokens_decoder of tokenizer_config.json: {error}", place=place, remedy=_DAMAGED
        ) from error


def _additional_tokens(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    contents = map(token_content, listed) if isinstance(listed, (list, tuple)) else ()
    return [content for content in contents if content is not None]


@lru_cache(maxsize=8)
def _load(path: str, digest: str, added: tuple[AddedSpec, ...], more: tuple[str, ...]) -> LoadedTokenizer:
    try:
        raw = read_bounded(Path(path), MAX_TOKENIZER_BYTES)
    except FileNotFoundError as error:
        raise DataError("the tokenizer is gone", place=path, remedy="Put the model folder back.") from error
    if hashlib.sha256(raw).hexdigest() != digest:
        raise DataError("the tokenizer has changed since it was first read", place=path, remedy="Start again.")
    try:
        backend = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"not a tokenizer of the library tokenizers: {error}", place=path, remedy=_DAMAGED) from error
    # Settings for padded batches are no part of the vocabulary.
    backend.no_truncation()
    backend.no_padding()
    known = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    tokens = [spec.to_token() for spec in added if known.get(spec.content) != repr(spec.to_token())]
    missing = [AddedSpec(content).to_token() for content in more if content not in known]
    there = {token.content for token in tokens}
    backend.add_tokens([*tokens, *(token for token in missing if token.content not in there)])
    return LoadedTokenizer(backend)
