"""What this rank did last, what the others were last heard to do, and what is written down when a wait fails."""

from shardrt.flight.recorder import FlightRecorder, Operation

__all__ = ["FlightRecorder", "Operation"]
