"""From a mixture as it is written down to the source of its samples: every part opened by `open_source`.

    mixture.yaml --read_mixture--> MixtureSpec --open_mixture--> MixtureSource

All parts share one `Storage`, so its bounds on requests, handles and cache hold for the mixture as a whole.
"""

from pathlib import Path

from dataloaders.errors import DataError
from dataloaders.mixture_source import MixtureSource
from dataloaders.mixture_spec import MixturePartSpec, MixtureSpec
from dataloaders.open_source import open_source
from dataloaders.record_parser import RecordLimits
from dataloaders.source import SampleSource
from dataloaders.storage import Storage


def open_mixture(
    spec: MixtureSpec,
    *,
    storage: Storage | None = None,
    members: Path | None = None,
    limits: RecordLimits | None = None,
) -> MixtureSource:
    """The samples of all parts, in the order in which they are written down.

    Args:
        storage, members, limits: see `open_source`.

    Raises:
        DataError: a part cannot be opened; the text names it.
    """
    storage = storage or Storage()
    return MixtureSource({part.name: _open(part, storage, members, limits) for part in spec.parts})


def _open(part: MixturePartSpec, storage: Storage, members: Path | None, limits: RecordLimits | None) -> SampleSource:
    # A list of one is that one: folders are opened by their name alone.
    data = part.data[0] if len(part.data) == 1 else part.data
    try:
        return open_source(
            data,
            fields=part.fields,
            media_root=part.media_root,
            media_schemes=part.media_schemes,
            storage=storage,
            members=members,
            limits=limits,
        )
    except DataError as error:
        error.cause = f"part {part.name!r}: {error.cause}"
        raise
