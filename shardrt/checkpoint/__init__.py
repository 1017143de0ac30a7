"""Checkpoints: one file per rank and a manifest, there wholly or not at all, readable at any other world size."""
