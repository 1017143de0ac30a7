"""Measurements that ship with the package: what ``shardrt bench`` runs."""
