"""A small model that really learns, trained sharded and unsharded on the ranks of one machine: ``shardrt demo``."""
