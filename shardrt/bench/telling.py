"""Words and numbers of a document of ``shardrt bench all``, for tables, Markdown and the page alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from shardrt.bench.full_run import DOCUMENT_KIND
from shardrt.errors import ConfigError

Document = Mapping[str, Any]

LEVEL_TITLES: Mapping[str, str] = {
    "replicated": "Nothing sharded",
    "zero1": "Optimizer state sharded (ZeRO-1)",
    "zero2": "Gradients too (ZeRO-2)",
    "zero3": "Parameters too (ZeRO-3)",
    "hybrid": "All sharded inside a host, replicated across",
}
HEADLINE_RIVALS: Mapping[str, tuple[str, ...]] = {
    "zero1": ("ddp_torch_zero", "ddp_adamw", "deepspeed_1"),
    "zero3": ("fsdp2_reshard", "fsdp1_full_shard", "deepspeed_3"),
}
"""Which ratios stand at the top."""
LEAST_MEANT = 0.005
"""What two digits still show."""


@attrs.frozen(kw_only=True)
class Headline:
    """The fastest of ours that shards so much, over one backend, beside one rival."""

    scenario: str
    title: str
    backend: str
    level: str
    ours: str
    rival: str
    time: float
    memory: float | None


def measured(document: Document) -> list[Document]:
    """The scenarios that have results."""
    return [one for one in document["scenarios"] if one["state"] == "measured"]


def headlines(scenario: Document) -> list[Headline]:
    """The ratios that sum a scenario up. Every other one is in its ``comparisons``."""
    rows = {row["name"]: row for row in scenario["contestants"]}
    ratios = {(one["ours"], one["rival"]): one for one in scenario["comparisons"]}
    found = []
    for backend in dict.fromkeys(row["backend"] for row in rows.values() if row["ours"]):
        for level, rivals in HEADLINE_RIVALS.items():
            ours = [row for row in rows.values() if row["ours"] and (row["backend"], row["level"]) == (backend, level)]
            if not ours:
                continue
            best = min(ours, key=lambda row: row["times_ddp_adamw"])
            for rival in rivals:
                one = ratios.get((best["name"], rival))
                if one is not None:
                    found.append(
                        Headline(
                            scenario=scenario["name"],
                            title=scenario["title"],
                            backend=backend,
                            level=level,
                            ours=best["label"],
                            rival=rows[rival]["label"],
                            time=one["time"],
                            memory=one["memory"],
                        )
                    )
    return found


def by_level(scenario: Document) -> Iterator[tuple[str, list[Document]]]:
    """Contestants that shard as much, together, peers first."""
    for level, title in LEVEL_TITLES.items():
        rows = [row for row in scenario["contestants"] if row["level"] == level]
        if rows:
            yield title, sorted(rows, key=lambda row: row["ours"])


def milliseconds(value: float) -> str:
    """With as many digits as mean something.

    Example:
        >>> from shardrt.bench.telling import milliseconds
        >>> milliseconds(1234.5), milliseconds(56.78), milliseconds(1.234)
        ('1,234', '56.8', '1.23')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def megabytes(value: float | None) -> str:
    """Bytes as megabytes; nothing where nobody knows.

    Example:
        >>> from shardrt.bench.telling import megabytes
        >>> megabytes(158_500_000), megabytes(2_540_000), megabytes(None)
        ('158', '2.54', '')
    """
    return "" if value is None else milliseconds(value / 1e6)


def ratio(value: float | None) -> str:
    """Two digits; nothing where there is no ratio.

    Example:
        >>> from shardrt.bench.telling import ratio
        >>> ratio(0.4972), ratio(None)
        ('0.50', '')
    """
    return "" if value is None else f"{value:.2f}"


def minutes(seconds: float) -> str:
    """A duration for people.

    Example:
        >>> from shardrt.bench.telling import minutes
        >>> minutes(42), minutes(610)
        ('42 s', '10 min')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def facts(document: Document) -> list[tuple[str, str]]:
    """What ran where, for the top of everything."""
    absent = document["backends_missing"].values()
    steps = f"{document['rounds']} rounds of {document['steps']} steps, interleaved"
    return [
        ("machine", str(document["machine"])),
        ("system", f"{document['system']}, Python {document['python']}"),
        ("shardrt", str(document["shardrt"])),
        ("torch", str(document["torch"])),
        ("DeepSpeed", str(document["deepspeed"] or "not installed")),
        (
            "backends",
            ", ".join([*document["backends"], *(f"not {why}" for why in absent)]),
        ),
        ("measured", f"{steps}; AdamW, fp32, one thread per rank"),
        ("date", f"{document['date']}, {minutes(document['seconds'])}"),
    ]


def setting(scenario: Document) -> str:
    """One line of what a scenario trained, and how."""
    hosts = f"on 2 hosts, {scenario['ranks_per_host']} each" if scenario["link"] != "none" else "on loopback"
    buckets = "" if scenario["bucket_mb"] is None else f", buckets of {scenario['bucket_mb']:g} MB"
    return (
        f"{scenario['parameters']:,} parameters ({megabytes(scenario['parameter_bytes'])} MB), {scenario['ranks']} "
        f"ranks {hosts}, batch {scenario['batch']} x {scenario['context']}{buckets}; forward and backward alone take "
        f"{milliseconds(scenario['compute_ms'])} ms"
    )


def complaints(scenario: Document) -> list[str]:
    """Who did not train what it should have."""
    told = []
    for row in scenario["contestants"]:
        if not row["ranks_agree"]:
            told.append(f"{row['label']}: ranks ended with different parameters.")
        if not row["alike"]:
            told.append(f"{row['label']}: did not train what DDP + AdamW trains.")
    return told


def absences(scenario: Document) -> list[tuple[str, str]]:
    """Reasons why contestants are missing, and who they are; then who was not asked."""
    by_reason: dict[str, list[str]] = {}
    for one in scenario["missing"]:
        by_reason.setdefault(one["reason"], []).append(one["label"])
    found = [(", ".join(labels), reason) for reason, labels in by_reason.items()]
    if scenario["not_asked"]:
        found.append((", ".join(one["label"] for one in scenario["not_asked"]), "not part of this scenario"))
    return found


def read_document(path: Path) -> Document:
    """A document that an earlier run wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as JSON: {error}") from error
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind != DOCUMENT_KIND:
        raise ConfigError(
            f"{str(path)!r} is no document of `shardrt bench all`: its kind is {kind!r}, not {DOCUMENT_KIND!r}; write "
            "one with --json FILE"
        )
    document: Document = found
    return document
