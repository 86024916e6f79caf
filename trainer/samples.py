"""Held-out items shown at the end of a run: the picture file, the truth, and what the model says.

A pipeline's ranks hold a part of the model each, so generation gathers nothing: it loads the final checkpoint into
one process. Greedy decoding; answers are short.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from balancer.plan_loader import SampleReader
from dataloaders.chat import encode_prompt
from dataloaders.record import Record, TextPart
from dataloaders.tokenizer import ByteTokenizer, Special
from trainer.model import generate
from trainer.pieces import ModelPieces

MAX_NEW_TOKENS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One held-out item: files written to the run folder, question, truth and generated answer."""

    files: tuple[Path, ...]
    question: str
    truth: str
    generated: str


def choose(reader: SampleReader, held_out: Sequence[int], count: int) -> list[int]:
    """The first `count` held-out samples with an answer, those with media before those without."""
    # With train_on="all" a sample has labels without an answer.
    answered = [i for i in held_out if any(turn.role == "assistant" for turn in reader.source.record(int(i)).turns)]
    return sorted(answered, key=lambda i: reader.index.samples["num_items"][i] == 0)[:count]


def show(
    pieces: ModelPieces, reader: SampleReader, sample_ids: Sequence[int], write: Callable[[str, bytes], Path]
) -> list[Shown]:
    """Store the media of `sample_ids` and answer each question with `pieces` (the whole model).

    Args:
        write: stores content under a file name and returns its path, as `RunFolder.write_sample` does.
    """
    shown = []
    for sample_id in sample_ids:
        record = reader.source.record(sample_id)
        files = []
        for j, media in enumerate(record.media):
            # Only the extension of the member name is used: names in an archive are data, not paths.
            suffix = "".join(c for c in PurePosixPath(media.member).suffix if c.isalnum() or c == ".")[:8]
            name = f"sample_{sample_id:06d}_{j}{suffix}"
            files.append(write(name, reader.source.media_bytes(sample_id, j)))
        answer = _answer(pieces, reader, sample_id)
        question, truth = _texts(record)
        shown.append(Shown(files=tuple(files), question=question, truth=truth, generated=answer))
    return shown


def _answer(pieces: ModelPieces, reader: SampleReader, sample_id: int) -> str:
    """Greedy continuation of the sample's prompt: everything up to where its last assistant turn starts."""
    batch = reader.read([sample_id]).to(pieces.device, pieces.dtype)
    record = reader.source.record(sample_id)
    length = len(encode_prompt(record, reader.index.item_tokens(sample_id)).tokens)
    before = batch.visual_index < length
    if not bool(before.all()):  # media inside the answer itself: nothing to generate from text alone
        return ""
    ids = generate(
        pieces.modules,
        tokens=batch.tokens[:length],
        position_ids=batch.position_ids[:, :length],
        visual_index=batch.visual_index,
        patches=batch.patches,
        grids=batch.grids,
        max_new_tokens=MAX_NEW_TOKENS,
        stop_id=Special.IM_END,
    )
    return ByteTokenizer().decode(ids).strip()


def _texts(record: Record) -> tuple[str, str]:
    def text(parts: Sequence[object]) -> str:
        return "".join(part.text for part in parts if isinstance(part, TextPart)).strip()

    last = max(i for i, turn in enumerate(record.turns) if turn.role == "assistant")
    question = next((text(turn.parts) for turn in reversed(record.turns[:last]) if turn.role == "user"), "")
    return question, text(record.turns[last].parts)
