"""Two plugins for shardrt: the partitioner ``stripes`` and the backend ``metered``."""
