"""Timelines: what a run reduced, stepped and gathered, when, and how long anyone waited. No torch here."""

from __future__ import annotations

from shardrt.timeline.recorder import LANES, Timeline

__all__ = ["LANES", "Timeline"]
