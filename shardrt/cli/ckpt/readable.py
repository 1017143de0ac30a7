"""Stored values as JSON that people read: what is no JSON is told in words, and tensors by dtype and shape."""

from __future__ import annotations

from typing import Any

from shardrt.checkpoint.manifest import Manifest


def readable(tree: Any, manifest: Manifest, file: int) -> Any:
    """A packed value (see :mod:`shardrt.state.tree`), whose tensors are in the file of this number.

    Lists and tuples look alike here, and a key that is no text becomes one: this is for looking, not for reading back.
    """
    if isinstance(tree, list):
        return [readable(item, manifest, file) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("$")
    if kind is None:
        return {key: readable(item, manifest, file) for key, item in tree.items()}
    if kind == "tensor":
        return f"tensor {_spec(tree.get('name'), manifest, file)}"
    if kind == "array":
        return f"array {tree.get('dtype')} {tree.get('shape')}"
    if kind == "bytes":
        return f"bytes {tree.get('base64')}"
    items = tree.get("items")
    if kind in ("dict", "OrderedDict", "Counter") and isinstance(items, list):
        pairs = [pair for pair in items if isinstance(pair, list) and len(pair) == 2]
        return {str(readable(key, manifest, file)): readable(item, manifest, file) for key, item in pairs}
    if isinstance(items, list):
        return readable(items, manifest, file)
    if "value" in tree:
        return readable(tree["value"], manifest, file)
    if kind == "complex":
        return f"complex {readable(tree.get('parts'), manifest, file)}"
    return f"{kind} {tree.get('name', '')}".strip()


def _spec(name: Any, manifest: Manifest, file: int) -> str:
    stored = manifest.files[file].tensors.get(name) if file < len(manifest.files) else None
    return f"{stored.spec.dtype} {list(stored.spec.shape)}" if stored is not None else f"{name!r}, which is missing"
