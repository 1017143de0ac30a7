"""Which plugins and limits a runtime is built with, from Python, a mapping or a TOML file; checked before use."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from shardrt.errors import ConfigError
from shardrt.registry.nearness import did_you_mean, listed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _frozen(key: str, value: object) -> Any:
    """Plain JSON values only, since ranks compare them; copied, so that nobody changes them afterwards."""
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(key, item) for item in value)
    if isinstance(value, Mapping) and all(isinstance(inner, str) for inner in value):
        return MappingProxyType({inner: _frozen(f"{key}.{inner}", item) for inner, item in value.items()})
    raise ConfigError(
        f"{key} = {value!r} of type {type(value).__name__} cannot be an option; "
        f"options are text, finite numbers, true, false, lists and tables of these"
    )


def _frozen_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    frozen: Mapping[str, Any] = _frozen("options", options)
    return frozen


@attrs.frozen(kw_only=True)
class Choice:
    """A plugin by name, and the options its factory is called with.

    Example:
        >>> from shardrt.config import Choice
        >>> choice = Choice.parse("partitioner", {"name": "greedy", "cost": "bytes"})
        >>> choice.name, dict(choice.options)
        ('greedy', {'cost': 'bytes'})
        >>> Choice.parse("schedule", "sync").to_json()
        {'name': 'sync'}
    """

    name: str
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_options, hash=False)

    @classmethod
    def parse(cls, key: str, value: object) -> Choice:
        """A name, a mapping with ``name`` and options, or a choice already; ``key`` is for the message."""
        if isinstance(value, Choice):
            return value
        if isinstance(value, Mapping):
            if "name" not in value:
                raise ConfigError(
                    f"{key} = {dict(value)!r} has no 'name'; give the plugin's name beside its options, "
                    f"as in {{'name': {_default(key)!r}, ...}}"
                )
            options = {option: given for option, given in value.items() if option != "name"}
            return cls(name=_name(f"{key}.name", value["name"]), options=_frozen(key, options))
        return cls(name=_name(key, value))

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {"name": self.name, **_thawed(self.options)}


def _partitioner(value: str | Mapping[str, Any] | Choice) -> Choice:
    return Choice.parse("partitioner", value)


def _backend(value: str | Mapping[str, Any] | Choice) -> Choice:
    return Choice.parse("backend", value)


def _schedule(value: str | Mapping[str, Any] | Choice) -> Choice:
    return Choice.parse("schedule", value)


def _state_format(value: str | Mapping[str, Any] | Choice) -> Choice:
    return Choice.parse("state_format", value)


def _place(value: str | Mapping[str, Any] | Choice) -> Choice:
    return Choice.parse("place", value)


def _is_text_or_none(_: Any, field: attrs.Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(
            f"{field.name} = {value!r} is not a device; give one as text, like 'cpu' or 'cuda:0', or leave it out"
        )


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _is_directory_or_none(_: Any, field: attrs.Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{field.name} = {value!r} is not a directory; give its path as text, or leave it out")


def _is_positive(_: Any, field: attrs.Attribute[Any], value: object) -> None:
    if value is None and field.default is None:
        return
    # bool is an int to Python, and nobody means "timeout = true" as one second.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value <= sys.float_info.max):
        unit = "seconds" if field.name == "timeout" else "megabytes"
        otherwise = ", or leave it out" if field.default is None else ""
        raise ConfigError(f"{field.name} = {value!r} is not possible; give a number of {unit} above 0{otherwise}")


@attrs.frozen(kw_only=True)
class RuntimeConfig:
    """Everything a runtime can be configured with.

    Example:
        >>> from shardrt.config import RuntimeConfig
        >>> config = RuntimeConfig.from_mapping({"partitioner": {"name": "greedy", "cost": "bytes"}, "timeout": 60})
        >>> config.partitioner.options["cost"], config.schedule.name, config.timeout
        ('bytes', 'sync', 60)
        >>> RuntimeConfig.from_mapping({"partitoner": "greedy"})
        Traceback (most recent call last):
        ...
        shardrt.errors.ConfigError: unknown key 'partitoner' in the configuration; \
known: backend, bucket_mb, device, hang_reports, partitioner, place, schedule, state_format, timeline, timeout; \
did you mean 'partitioner'?
    """

    partitioner: Choice = attrs.field(default=Choice(name="greedy"), converter=_partitioner)
    backend: Choice = attrs.field(default=Choice(name="auto"), converter=_backend)
    schedule: Choice = attrs.field(default=Choice(name="sync"), converter=_schedule)
    state_format: Choice = attrs.field(default=Choice(name="safetensors"), converter=_state_format)
    place: Choice = attrs.field(default=Choice(name="files"), converter=_place)
    device: str | None = attrs.field(default=None, validator=_is_text_or_none)
    """A torch device; None is the accelerator, or the CPU where there is none."""
    bucket_mb: float | None = attrs.field(default=None, validator=_is_positive)
    """Megabytes that travel together; None is what the schedule works best with."""
    timeout: float = attrs.field(default=300.0, validator=_is_positive)
    """Seconds that any wait for another rank may take."""
    timeline: str | None = attrs.field(default=None, converter=_path_text, validator=_is_directory_or_none)
    """The directory that each rank writes a timeline to; None is the variable SHARDRT_TIMELINE's, or no timeline."""
    hang_reports: str | None = attrs.field(default=None, converter=_path_text, validator=_is_directory_or_none)
    """The directory that a rank writes a report to when a wait fails; None is the variable SHARDRT_HANG_DIR's, or no
    report."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RuntimeConfig:
        """From keys named as the fields are."""
        return cls._from_table(mapping, "the configuration")

    @classmethod
    def from_toml(cls, path: str | Path) -> RuntimeConfig:
        """From a TOML file: its table ``[shardrt]``, ``[tool.shardrt]`` as in a pyproject.toml, or its top level.

        Example:
            >>> import pathlib, tempfile
            >>> from shardrt.config import RuntimeConfig
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "train.toml")
            ...     _ = path.write_text('[shardrt]\\nbackend = "gloo"\\n[shardrt.partitioner]\\nname = "flat"')
            ...     config = RuntimeConfig.from_toml(path)
            >>> config.backend.name, config.partitioner.name
            ('gloo', 'flat')
        """
        path = Path(path)
        return cls._from_table(*_table_of(_parsed(path), path))

    @classmethod
    def _from_table(cls, table: object, where: str) -> RuntimeConfig:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where} is {table!r}; it must be a mapping of keys: {listed(_keys())}")
        for key in table:
            if key not in _keys():
                raise ConfigError(
                    f"unknown key {key!r} in {where}; known: {listed(_keys())}{did_you_mean(key, _keys())}"
                )
        return cls(**table)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values, which ranks compare before they start.

        Example:
            >>> from shardrt.config import RuntimeConfig
            >>> config = RuntimeConfig(backend="gloo")
            >>> RuntimeConfig.from_mapping(config.to_json()) == config
            True
        """
        return {
            "partitioner": self.partitioner.to_json(),
            "backend": self.backend.to_json(),
            "schedule": self.schedule.to_json(),
            "state_format": self.state_format.to_json(),
            "place": self.place.to_json(),
            "device": self.device,
            # 60 and 60.0 are one timeout, and must be one text.
            "bucket_mb": None if self.bucket_mb is None else float(self.bucket_mb),
            "timeout": float(self.timeout),
            "timeline": self.timeline,
            "hang_reports": self.hang_reports,
        }


def _keys() -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(RuntimeConfig))


def _default(key: str) -> str:
    default: Any = attrs.fields_dict(RuntimeConfig)[key].default
    return str(default.name)


def _name(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{key} = {value!r} is not a plugin's name; give a name, or a mapping with a name and options "
            f"(`shardrt plugins` lists the names)"
        )
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {str(path)!r} does not exist; check its path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}; check it") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {str(path)!r} is not valid TOML: {error}; correct it there") from error


def _table_of(document: dict[str, Any], path: Path) -> tuple[object, str]:
    tool = document.get("tool")
    under_tool = isinstance(tool, Mapping) and "shardrt" in tool
    if under_tool and "shardrt" in document:
        raise ConfigError(f"{str(path)!r} has both [shardrt] and [tool.shardrt]; keep one")
    if under_tool:
        return document["tool"]["shardrt"], f"[tool.shardrt] of {str(path)!r}"
    if "shardrt" in document:
        return document["shardrt"], f"[shardrt] of {str(path)!r}"
    if path.name == "pyproject.toml":
        raise ConfigError(f"{str(path)!r} has no table [tool.shardrt]; add one")
    return document, repr(str(path))
