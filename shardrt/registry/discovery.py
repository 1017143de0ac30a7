"""Which plugins are installed, read from metadata alone: nothing is imported here."""

from __future__ import annotations

import re
from collections import Counter
from importlib import metadata

import attrs

from shardrt.registry.hookspecs import PROJECT

IN_PROCESS = "in process"
"""The distribution of a plugin that was handed over as an object."""


@attrs.frozen(kw_only=True)
class Origin:
    """Where a plugin comes from, as every message about it says.

    Example:
        >>> from shardrt.registry.discovery import Origin
        >>> str(Origin(name="foo", distribution="shardrt-foo", version="1.2"))
        "plugin 'foo' (shardrt-foo 1.2)"
        >>> str(Origin(name="Observer"))
        "plugin 'Observer' (in process)"
    """

    name: str
    """Unique: the entry point's name, followed by ``@distribution`` where two distributions share it."""
    distribution: str = IN_PROCESS
    version: str = ""
    entry_point: metadata.EntryPoint | None = attrs.field(default=None, repr=False)

    @property
    def alias(self) -> str:
        """The entry point's own name, which is what users ask for."""
        return self.entry_point.name if self.entry_point else self.name

    @property
    def label(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def remedy(self) -> str:
        """What helps against any fault of the plugin itself."""
        if self.distribution == IN_PROCESS:
            return "correct the object handed over as plugin"
        return f"upgrade it (pip install --upgrade {self.distribution}) or leave it out with SHARDRT_PLUGINS"

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.label})"


def installed_plugins() -> tuple[Origin, ...]:
    """Every entry point of the group ``shardrt``, sorted by name, each distribution once.

    Example:
        >>> from shardrt.registry.discovery import installed_plugins
        >>> [origin.distribution for origin in installed_plugins() if origin.name == "sync"]
        ['shardrt']
    """
    found = [
        (entry_point, name, version)
        for name, distribution in _distributions().items()
        for version in (distribution.version,)  # parsed anew each time it is asked for
        for entry_point in distribution.entry_points
        if entry_point.group == PROJECT
    ]
    shared = Counter(entry_point.name for entry_point, _, _ in found)
    origins = [
        Origin(
            name=entry_point.name if shared[entry_point.name] == 1 else f"{entry_point.name}@{name}",
            distribution=name,
            version=version,
            entry_point=entry_point,
        )
        for entry_point, name, version in found
    ]
    return tuple(sorted(origins, key=lambda origin: origin.name))


def _distributions() -> dict[str, metadata.Distribution]:
    """Distributions with plugins, by name. One that is on the path twice counts as what Python itself would take."""
    names: dict[str, str] = {}
    for distribution in metadata.distributions():
        # Entry points first: reading the names of some hundred unrelated distributions would be most of the work.
        if any(entry_point.group == PROJECT for entry_point in distribution.entry_points):
            name = distribution.metadata["Name"]
            if name:
                names.setdefault(re.sub(r"[-_.]+", "-", name).lower(), name)
    return {name: next(iter(metadata.distributions(name=name))) for name in names.values()}
