"""Parameters that may be read only once their gather is done: whoever reads one earlier waits for it, unknowingly.

Note [Unfinished parameters]: a gather that overlaps with the next forward writes into the memory of parameters that
anybody may read at any time: a layer, ``state_dict``, an evaluation, a trainer's moving average. So a parameter under
way changes its class, for that time, to one whose ``__torch_function__`` waits for the gather before it lets any
operation near the values. Questions that do not touch values (shape, gradient, ...) are answered at once. The first
reader turns all parameters of the bucket back into what they were. The tensor itself stays the same object, with the
same memory and the same place in autograd.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from shardrt.errors import StateError
from shardrt.protocols import Work

_ASKS = (
    "shape grad _grad requires_grad dtype device layout is_leaf grad_fn ndim _version retains_grad is_cuda is_cpu "
    "is_sparse is_quantized is_meta is_nested names _backward_hooks _post_accumulate_grad_hooks output_nr itemsize"
)
_CALLS = (
    "size dim numel nelement stride is_contiguous is_floating_point is_complex element_size storage_offset get_device "
    "is_shared register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad __len__ __hash__"
)
SHOWN = "_shardrt_shown"
"""Attribute of a parameter that has no memory of its own: it shows that of other ranks."""
_UNFINISHED: dict[int, Callable[[], Readable | None]] = {}
"""By the identity of the parameter, which whoever is asked keeps alive."""


class Readable(Protocol):
    """Whoever knows how to let a parameter be read."""

    def read(self) -> None:
        """Return once the values are there, with the parameter's class given back, or raise."""
        ...


class KeptByModule:
    """A readable whose module keeps it: holding it here would keep the module, and all that is sharded, for ever."""


def watch_reads(tensors: Iterable[torch.Tensor], readable: Readable) -> None:
    """From now on whoever reads one of these asks ``readable`` first."""
    for tensor in tensors:
        key = id(tensor)
        if isinstance(readable, KeptByModule):
            _UNFINISHED[key] = weakref.ref(readable, functools.partial(_forget, key))
        else:
            _UNFINISHED[key] = functools.partial(_same, readable)
        if not isinstance(tensor, _WaitsForReaders):
            tensor.__class__ = _unfinished_class(type(tensor))


def _same(readable: Readable) -> Readable:
    return readable


def _forget(key: int, reference: object) -> None:
    if _UNFINISHED.get(key) is reference:  # else somebody else watches it by now
        del _UNFINISHED[key]


def is_watched(tensor: torch.Tensor) -> bool:
    """Whether its values are not there, or not yet."""
    return id(tensor) in _UNFINISHED


def watched_by(tensor: torch.Tensor) -> Readable | None:
    """Who hears of reads of this one."""
    asked = _UNFINISHED.get(id(tensor))
    return None if asked is None else asked()


def let_read(tensors: Iterable[torch.Tensor]) -> None:
    """These may be read by anybody again."""
    for tensor in tensors:
        _UNFINISHED.pop(id(tensor), None)
        _give_class_back(tensor)


class UnfinishedBucket:
    """The parameters of a bucket whose gather is under way."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        work: Work,
        *,
        on_read: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """``on_read`` is called when a reader has waited, ``on_failure`` when the gather failed."""
        self._tensors = tensors
        self._work = work
        self._on_read = on_read
        self._on_failure = on_failure
        self._done = False
        self._lock = threading.Lock()
        watch_reads(tensors, self)

    def read(self) -> None:
        """Somebody wants values: wait until they are there."""
        if self.finish():
            self._on_read()

    def finish(self) -> bool:
        """Wait for the gather and give the parameters their class back; says whether that was still to be done.

        After a failure the values are not all there: parameters stay as they are, and every reader gets the error.
        """
        with self._lock:
            if self._done:
                return False
            try:
                # Finishing may copy into the parameters themselves, which must not wait for their own end.
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    self._work.wait()
            except Exception as error:
                self._on_failure(error)
                raise
            let_read(self._tensors)
            self._done = True
            return True


class Reading:
    """Waiting for a bucket that was left to readers."""

    def __init__(self, unfinished: UnfinishedBucket) -> None:
        self._unfinished = unfinished

    def wait(self) -> None:
        """See :class:`shardrt.protocols.Work`."""
        self._unfinished.finish()


def may_be_read_later() -> bool:
    """Whether reads can be watched. Compiled code looks at the class of its inputs and would be compiled anew each
    time: once torch.compile has been at work in this process, gathers are waited for inside the step."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler is None or not compiler.counters["frames"]


def _give_class_back(tensor: torch.Tensor) -> None:
    original = getattr(type(tensor), "_shardrt_finished_class", None)
    if original is not None:
        tensor.__class__ = original


def _read(tensor: torch.Tensor) -> None:
    readable = watched_by(tensor)
    if readable is not None:
        readable.read()
        return
    with torch._C.DisableTorchFunctionSubclass():
        is_empty = tensor.numel() and not tensor.is_meta and not tensor.untyped_storage().nbytes()
        if is_empty or SHOWN in vars(tensor):
            raise StateError(
                "this parameter was sharded with a module that is gone, and its values with it; keep the module, or "
                "take rt.full_state_dict(module) before it goes"
            )
    _give_class_back(tensor)


@functools.cache
def _unfinished_class(original: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(original.__name__, (_WaitsForReaders, original), {"_shardrt_finished_class": original})


class _WaitsForReaders:
    """What a parameter under way has in front of its own class."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func in _harmless():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in pytree.tree_iter((args, kwargs)):
            if isinstance(leaf, _WaitsForReaders):
                _read(leaf)  # type: ignore[arg-type]
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        import copy

        _read(self)  # type: ignore[arg-type]
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _read(self)  # type: ignore[arg-type]
        return self.__reduce_ex__(protocol)


@functools.cache
def _harmless() -> frozenset[Callable[..., Any]]:
    """Functions that say something about a tensor, or hang something on it, without looking at its values."""
    found: set[Callable[..., Any]] = set()
    for name in _ASKS.split():
        attribute = getattr(torch.Tensor, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            if attribute is not None and hasattr(attribute, access):
                found.add(getattr(attribute, access))
    found.update(getattr(torch.Tensor, name) for name in _CALLS.split() if hasattr(torch.Tensor, name))
    return frozenset(found)
