"""Every error shardrt raises on purpose, in one tree.

A message names what it got, what there is, and what to do about it. Errors that concern several ranks name the rank.

Example:
    >>> from shardrt.errors import ConfigError, ShardrtError
    >>> issubclass(ConfigError, ShardrtError) and issubclass(ConfigError, ValueError)
    True
"""

from __future__ import annotations


class ShardrtError(Exception):
    """Base of every error of ours: ``except shardrt.ShardrtError`` catches them all.

    Example:
        >>> import shardrt
        >>> try:
        ...     shardrt.Runtime(partitioner="gredy")
        ... except shardrt.ShardrtError as error:
        ...     print(type(error).__name__, "did you mean 'greedy'?" in str(error))
        UnknownPluginError True
    """

    explained: bool = False
    """Whether the text already says what each rank did last."""


class ConfigError(ShardrtError, ValueError):
    """An argument or a configuration value that cannot be meant."""


class PluginError(ShardrtError):
    """Something is wrong with a plugin or with the choice of one."""


class UnknownPluginError(PluginError, LookupError):
    """No installed plugin has the name that was asked for."""


class PluginConflictError(PluginError):
    """Two distributions register the same name."""


class PluginLoadError(PluginError, ImportError):
    """A plugin raised while it was imported or asked for its records."""


class HookSignatureError(PluginError, TypeError):
    """A hook implementation takes arguments its specification does not have, or implements an unknown hook."""


class RecordTypeError(PluginError, TypeError):
    """A registration hook yielded something that is not the record it promises."""


class HookVersionError(PluginError):
    """A plugin was made for a version of the hooks that this core does not speak."""


class PlanError(ShardrtError, ValueError):
    """A partition or a plan that does not cover every element once, or does not fit its parameters."""


class UnsupportedError(ShardrtError):
    """A combination that could not be right is refused when it is built, naming one that can."""


class BackendUnavailableError(UnsupportedError):
    """The chosen backend cannot run here: says why and what would make it run."""


class CapabilityError(UnsupportedError):
    """A backend lacks something that no checked fallback replaces."""


class HandshakeError(ShardrtError):
    """Ranks differ in something they must share; raised on every rank with the rank, the field and both values."""


class PeerError(ShardrtError):
    """Another rank failed: the message carries its rank and what it said."""


class CommunicationError(ShardrtError):
    """A collective failed or timed out: the message names the operation, this rank and the peers it waited for."""

    ranks: tuple[int, ...] = ()
    """The ranks that were waited for, where that is known."""


class OptimizerError(ShardrtError):
    """A sharded optimizer was used in a way that has no right answer."""


class SparseGradientError(OptimizerError):
    """A parameter received a sparse gradient; flat buffers hold dense ones only."""


class StateError(ShardrtError, ValueError):
    """A state dict that does not fit what it is loaded into, or holds what cannot be stored."""


class CheckpointError(ShardrtError):
    """A checkpoint could not be written, or what was found is not one: names the file and what is wrong with it."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's bytes are not those that were written: names the file and the tensor."""


class NoCheckpointError(CheckpointError, LookupError):
    """There is no complete checkpoint where one was asked for."""
