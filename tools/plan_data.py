"""The samples that `balancer-analyze plan` plans: an index, or data that are scanned first.

    folder of an index                             --> Opened(index)
    tar shards, .jsonl, .json, .parquet, saved set --> scan of headers --> Opened(index, source, rules)

A scan is not kept: `balancer-analyze index` writes an index that later plans open at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from balancer.model_config import model_shape
from dataloaders.estimators import TokenEstimator
from dataloaders.index import CostIndex
from dataloaders.open_source import open_source
from dataloaders.scan import scan_source
from dataloaders.shard_scan import shard_notes
from dataloaders.source import SampleSource
from tools import data_report
from tools.errors import UsageError
from tools.model_folder import ModelRules, load_encoder, load_estimator, load_rules
from tools.plan_command import PlanCommand
from tools.plan_family import config_folder
from tools.reach import reach

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opened:
    """Data as found.

    Attributes:
        source: what it was scanned from; None for an index.
        rules: what it was counted by; None for an index.
    """

    index: CostIndex
    source: SampleSource | None
    rules: ModelRules | None
    notes: tuple[str, ...]


class NoRecords:
    """The source of an index whose data nobody named (a `SampleSource` that holds counts only)."""

    fingerprint = ""

    def __len__(self) -> int:
        return 0

    def _refuse(self, *_: int) -> Never:
        raise UsageError(
            "--oversize truncate_text reads the text of samples, and an index has none: name the data in its place."
        )

    record = media_reader = media_bytes = place = _refuse


def open_data(command: PlanCommand, progress: Progress | None = None) -> Opened:
    """The index that is named, or that of a scan of the data.

    Raises:
        UsageError: neither; or options for the other of them.
    """
    names = list(command.sources)
    indices = [name for name in names if data_report.is_index(name)]
    if not indices:
        return _scanned(command, names, progress)
    if len(names) > 1:
        raise UsageError(f"{indices[0]} is an index; name one index alone, or data.")
    given = {
        "--media-root": command.media_root is not None,
        "--text": command.text != "auto",
        "--preprocessing": command.preprocessing is not None,
    }
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: an index is counted already. Leave it out, or name the data.")
    index = CostIndex.open(Path(names[0]).expanduser())
    return Opened(index=index, source=None, rules=None, notes=tuple(shard_notes(index.shards)))


def _scanned(command: PlanCommand, names: list[str], progress: Progress | None) -> Opened:
    for name in names:
        data_report.check_named(name)
    reached = reach(command.cache_dir)
    rules = _rules(command)
    source = open_source(
        names[0] if len(names) == 1 else names,
        media_root=command.media_root,
        storage=reached.storage,
        members=reached.members,
    )
    index = scan_source(source, rules.estimator, encoder=rules.encoder, progress=progress)
    return Opened(index=index, source=source, rules=rules, notes=(rules.note,) if rules.note else ())


def _rules(command: PlanCommand) -> ModelRules:
    """What text and media cost. A language model alone has no processor: its folder counts text, as its preset would
    media are counted by the published settings."""
    folder = processor_folder(command)
    if folder is None or media_folder(command) is not None:
        return load_rules(folder, text=command.text, train_on=command.train_on, preprocessing=command.preprocessing)
    encoder, note = load_encoder(folder, command.text, command.train_on)
    return ModelRules(estimator=load_estimator(None, preprocessing=command.preprocessing), encoder=encoder, note=note)


def media_folder(command: PlanCommand) -> Path | None:
    """`processor_folder`, if it has a processor: the folder of a language model alone has none."""
    folder = processor_folder(command)
    if folder is None or command.processor is not None or command.model is None:
        return folder
    return None if model_shape(command.model).encoder is None else folder


def processor_folder(command: PlanCommand) -> Path | None:
    """The folder whose processor counts media, if one is named."""
    if command.processor is not None:
        return command.processor
    return None if command.model is None else config_folder(command.model)


def estimator_of(command: PlanCommand, opened: Opened) -> TokenEstimator:
    """The rule that the data were counted by; of an index only where it is asked for smaller media.

    Raises:
        UsageError: `shrink` of an index without the processor that it was made for.
    """
    if opened.rules is not None:
        return opened.rules.estimator
    estimator = load_estimator(media_folder(command) if command.oversize == "shrink" else None)
    if command.oversize == "shrink" and estimator.fingerprint != opened.index.key.estimator:
        raise UsageError(
            f"--oversize shrink: media of the index are counted by {opened.index.rules.get('media', '?')!r}, not by "
            f"{estimator.rule!r}. Name the folder that it was made for: --processor FOLDER."
        )
    return estimator
