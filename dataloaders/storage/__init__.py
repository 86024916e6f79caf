"""Storage: listing, opening and reading files wherever they lie, ranges in parallel, with a bounded local cache.

from dataloaders.storage import Storage

storage = Storage()
urls = storage.list("s3://bucket/shard-{000..015}.tar")
first, second = storage.read_many([(urls[0], 0, 512), (urls[1], 0, 512)])
"""

from dataloaders.storage.base import SCHEMES as SCHEMES
from dataloaders.storage.base import FileState as FileState
from dataloaders.storage.base import Range as Range
from dataloaders.storage.base import StorageCounters as StorageCounters
from dataloaders.storage.base import StorageOptions as StorageOptions
from dataloaders.storage.base import StoredFile as StoredFile
from dataloaders.storage.read_ahead import ReadAhead as ReadAhead
from dataloaders.storage.storage import Storage as Storage
from dataloaders.storage.urls import absolute as absolute
from dataloaders.storage.urls import check_scheme as check_scheme
from dataloaders.storage.urls import is_local as is_local
from dataloaders.storage.urls import list_urls as list_urls
from dataloaders.storage.urls import missing_files as missing_files
from dataloaders.storage.urls import repeated as repeated
from dataloaders.storage.urls import scheme_of as scheme_of
from dataloaders.storage.urls import shown as shown
