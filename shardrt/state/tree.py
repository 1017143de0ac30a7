"""Values of any nesting as JSON, with the tensors in them taken out: how state that is not a plain tensor is stored.

Only kinds that are listed here go in, and only they come out: reading a tree calls nothing but their constructors.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shardrt.errors import ShardrtError, StateError
from shardrt.plan.params import ITEM_SIZES
from shardrt.state.portable import LazyTensor

_MARK = "$"
"""The key that tells a marked value from a plain mapping."""
_DEEPEST = 64
_PLAIN = (bool, int, str, type(None))
_NUMPY_DTYPE = re.compile(r"[<>|=][biuf][0-9]{1,2}\Z")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Put = Callable[[torch.Tensor], str]
PutLazy = Callable[[LazyTensor], str]
Get = Callable[[str], torch.Tensor | LazyTensor]
_Keep = Callable[[torch.Tensor | LazyTensor], str]


def pack(value: Any, put: Put, *, where: str, put_lazy: PutLazy | None = None) -> Any:
    """A JSON value from which :func:`unpack` makes an equal one; ``put`` keeps a tensor and says its name.

    ``where`` says in errors what this is. Tensors that are not in memory go to ``put_lazy``.

    Example:
        >>> import torch
        >>> from shardrt.state.tree import pack, unpack
        >>> kept = {}
        >>> def put(tensor):
        ...     kept["t"] = tensor
        ...     return "t"
        >>> tree = pack({"betas": (0.9, 0.99), "mean": torch.ones(2)}, put, where="extra")
        >>> tree
        {'betas': {'$': 'tuple', 'items': [0.9, 0.99]}, 'mean': {'$': 'tensor', 'name': 't'}}
        >>> unpack(tree, kept.__getitem__, where="extra")
        {'betas': (0.9, 0.99), 'mean': tensor([1., 1.])}
    """

    def keep(tensor: torch.Tensor | LazyTensor) -> str:
        if not isinstance(tensor, LazyTensor):
            return put(tensor)
        if put_lazy is None:
            raise StateError(f"{where} holds a tensor that is not in memory; read it with whole() first")
        return put_lazy(tensor)

    return _pack(value, keep, where, 0)


def unpack(tree: Any, get: Get, *, where: str) -> Any:
    """The inverse of :func:`pack`; whatever it could not have made is a :class:`~shardrt.errors.StateError`."""
    return _unpack(tree, get, where, 0)


def tensor_names(tree: Any, depth: int = 0) -> list[str]:
    """The names of the tensors in a tree, in order.

    Example:
        >>> from shardrt.state.tree import tensor_names
        >>> tensor_names([1, {"$": "tensor", "name": "t"}])
        ['t']
    """
    if depth > 2 * _DEEPEST:
        return []
    if isinstance(tree, dict) and tree.get(_MARK) in ("tensor", "array"):
        return [str(tree.get("name"))]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [name for item in inside for name in tensor_names(item, depth + 1)]


def _pack(value: Any, put: _Keep, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise StateError(f"{where} is nested more than {_DEEPEST} deep, or contains itself; store something flatter")
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {_MARK: "float", "value": str(value)}
    if kind is LazyTensor:
        return {_MARK: "tensor", "name": put(value)}
    if isinstance(value, torch.Tensor):
        return _packed_tensor(value, put, where)
    if kind is list:
        return [_pack(item, put, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if kind is dict and all(type(key) is str and key != _MARK for key in value):
        return {key: _pack(item, put, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if kind in _PAIRED:
        pairs = [
            [_pack(key, put, f"a key of {where}", depth + 1), _pack(item, put, f"{where}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {_MARK: _PAIRED[kind], "items": pairs}
    if kind in _LISTED:
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        packed = [_pack(item, put, f"{where}[{index}]", depth + 1) for index, item in enumerate(items)]
        return {_MARK: _LISTED[kind], "items": packed}
    return _packed_leaf(value, put, where)


_PAIRED: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_LISTED: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "Size"}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{name: kind for kind, name in _PAIRED.items()},
    **{name: kind for kind, name in _LISTED.items()},
}


def _packed_tensor(value: torch.Tensor, put: _Keep, where: str) -> Any:
    if value.layout is not torch.strided:
        raise StateError(f"{where} is a tensor of layout {value.layout}, which cannot be stored; make it dense")
    if str(value.dtype).removeprefix("torch.") not in ITEM_SIZES:
        raise StateError(f"{where} is a tensor of {value.dtype}; those that can be stored: {', '.join(ITEM_SIZES)}")
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise StateError(f"{where} is a {type(value).__name__}, laid out by another library; store a plain tensor")
    return {_MARK: "tensor", "name": put(value.detach())}


def _packed_leaf(value: Any, put: _Keep, where: str) -> Any:
    if isinstance(value, complex):
        return {_MARK: "complex", "parts": [_pack(part, put, where, 0) for part in (value.real, value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {_MARK: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_MARK: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_MARK: "device", "name": str(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {_MARK: "numpy", "dtype": value.dtype.str, "value": _pack(value.item(), put, where, 0)}
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        flat = np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8).copy()
        name = put(torch.from_numpy(flat))
        return {_MARK: "array", "dtype": value.dtype.str, "shape": list(value.shape), "name": name}
    raise StateError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored without running its "
        "code when it is read back; store numbers, text, tensors, lists and mappings of them (often: its state_dict())"
    )


def _unpack(tree: Any, get: Get, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise StateError(f"{where} is nested more than {_DEEPEST} deep, which nothing that was stored is")
    if type(tree) in (*_PLAIN, float):
        return tree
    if type(tree) is list:
        return [_unpack(item, get, where, depth + 1) for item in tree]
    if type(tree) is not dict:
        raise StateError(f"{where} holds a {type(tree).__name__}, which is no JSON")
    if _MARK not in tree:
        return {key: _unpack(item, get, where, depth + 1) for key, item in tree.items()}
    try:
        return _unpack_marked(tree, get, where, depth)
    except ShardrtError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, SyntaxError) as error:
        raise StateError(f"{where} holds {_shown(tree)}, which cannot be read: {error}") from error


def _unpack_marked(tree: Mapping[str, Any], get: Get, where: str, depth: int) -> Any:
    kind = tree[_MARK]
    if kind == "tensor":
        return get(_text(tree["name"]))
    if kind == "float":
        return _FLOATS[tree["value"]]
    if kind == "complex":
        real, imaginary = (_unpack(part, get, where, depth + 1) for part in _list(tree["parts"]))
        return complex(real, imaginary)
    if kind == "bytes":
        return base64.b64decode(_text(tree["base64"]), validate=True)
    if kind == "dtype":
        if tree["name"] not in ITEM_SIZES:
            raise StateError(f"{where} has an unknown dtype {tree['name']!r}")
        return getattr(torch, tree["name"])
    if kind == "device":
        return torch.device(_text(tree["name"]))
    if kind == "numpy":
        value = _unpack(tree["value"], get, where, depth + 1)
        if type(value) not in (bool, int, float):
            raise TypeError(f"a {type(value).__name__} is no number")
        return _numpy_dtype(tree).type(value)
    if kind == "array":
        data = get(_text(tree["name"]))
        data = data.whole() if isinstance(data, LazyTensor) else data
        return np.frombuffer(data.numpy().tobytes(), dtype=_numpy_dtype(tree)).reshape(_list(tree["shape"])).copy()
    if kind in ("dict", "OrderedDict", "Counter"):
        pairs = [[_unpack(part, get, where, depth + 1) for part in pair] for pair in _list(tree["items"])]
        return _MAKERS[kind](dict(pairs))
    if kind in _MAKERS:
        return _MAKERS[kind]([_unpack(item, get, where, depth + 1) for item in _list(tree["items"])])
    raise StateError(f"{where} holds a {kind!r}, which this version of shardrt does not know; use a newer one")


def _shown(tree: Mapping[str, Any]) -> str:
    """What a marked value says it is; what is in it may be nested deeper than it can be printed."""
    return "{" + ", ".join(f"{key!r}: {_plainly(value)}" for key, value in list(tree.items())[:4])[:200] + "}"


def _plainly(value: Any) -> str:
    return repr(value)[:60] if type(value) in (*_PLAIN, float) else f"a {type(value).__name__}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} is no text")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"a {type(value).__name__} is no list")
    return value


def _numpy_dtype(tree: Mapping[str, Any]) -> np.dtype[Any]:
    # By its form first: numpy reads whole expressions.
    text = _text(tree["dtype"])
    if not _NUMPY_DTYPE.match(text):
        raise ValueError(f"dtype {text[:60]!r} is no plain number")
    return np.dtype(text)
