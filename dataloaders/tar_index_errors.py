"""Why an index beside a shard is not believed."""


class NotBelieved(Exception):
    """An index that does not fit its shard, is older than it, or cannot be read: never the end of anything."""
