"""Real distributions in a temporary folder: metadata and modules as pip would leave them, without pip."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest


class FakeSite:
    """A folder on ``sys.path``, the only one in which plugins are looked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = [str(folder)]
        self.modules: list[str] = []

    def install(
        self, distribution: str, plugins: Mapping[str, str], *, version: str = "1.0", folder: Path | None = None
    ) -> None:
        """Install a distribution whose entry points each have a module with the given source."""
        folder = folder or self.folder
        prefix = distribution.replace("-", "_")
        info = folder / f"{prefix}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = ["[shardrt]"]
        for name, source in plugins.items():
            module = f"{prefix}_{name}"
            (folder / f"{module}.py").write_text(f"import shardrt\n{textwrap.dedent(source)}")
            lines.append(f"{name} = {module}")
            self.modules.append(module)
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        importlib.invalidate_caches()


def make_site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A site for one test; what it imported is forgotten afterwards."""
    site = FakeSite(folder)
    monkeypatch.syspath_prepend(str(folder))
    # The built-ins would be found as well, and each test is about its own plugins alone.
    look = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda **context: look(path=site.path, **context))
    for switch in ("SHARDRT_PLUGINS", "SHARDRT_TRACE_HOOKS"):
        monkeypatch.delenv(switch, raising=False)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)


def offering(kind: str, name: str, **fields: str) -> str:
    """The source of a plugin with one record; ``kind`` is like ``backend`` or ``state_format``."""
    record = "".join(word.capitalize() for word in kind.split("_"))
    plural = {"join_policy": "join_policies"}.get(kind, f"{kind}s")
    more = "".join(f", {field}={value}" for field, value in fields.items())
    return (
        f"@shardrt.hookimpl\ndef shardrt_{plural}():\n"
        f"    yield shardrt.{record}Record(name={name!r}, summary='the {name} {kind}', factory=object{more})\n"
    )
