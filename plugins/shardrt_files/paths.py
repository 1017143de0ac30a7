"""Relative paths, as every place takes them."""

from __future__ import annotations

from shardrt.errors import CheckpointError


def parts_of(path: str, root: str) -> tuple[str, ...]:
    """The parts of a path below a root; whatever could lead out of it, or means two things, is refused.

    Example:
        >>> from shardrt_files.paths import parts_of
        >>> parts_of("step-100/rank0.safetensors", "/runs")
        ('step-100', 'rank0.safetensors')
        >>> parts_of("a/../../secret", "/runs")
        Traceback (most recent call last):
        ...
        shardrt.errors.CheckpointError: 'a/../../secret' is no path below /runs: it has a part '..'; ...
    """
    parts = tuple(path.split("/")) if isinstance(path, str) else ()
    if wrong := _what_is_wrong(path, parts):
        raise CheckpointError(
            f"{path!r} is no path below {root}: {wrong}; write it relative to that root, such as 'step-100/rank0'"
        )
    return parts


def _what_is_wrong(path: object, parts: tuple[str, ...]) -> str:
    if not isinstance(path, str):
        return f"it is of type {type(path).__name__} instead of str"
    if path.startswith("/"):
        return "it is absolute"
    for part in parts:
        if part in ("", ".", ".."):
            return f"it has a part {part!r}"
        if found := next((char for char in ("\\", "\0") if char in part), None):
            return f"it has a {found!r}"
    return ""
