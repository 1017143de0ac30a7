"""Whole modules, sharded: which strategy, which units, and when their parameters come and go."""
