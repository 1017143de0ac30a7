"""Parameter lists that have broken partitioners before, or would."""

from __future__ import annotations

from collections.abc import Sequence

from shardrt.plan import ParamSpec

WORLD_SIZES = (1, 2, 3, 4, 7, 64)


def parameter_lists() -> dict[str, tuple[ParamSpec, ...]]:
    """Named lists of parameters.

    Example:
        >>> from shardrt.testing.conformance.zoo import parameter_lists
        >>> len(parameter_lists()["thousand"])
        1000
    """
    block = [(64, 64), (64,), (256, 64), (256,), (64, 256), (64,)]
    return {
        "empty": (),
        "one_scalar": _params([()]),
        "scalars": _params([()] * 5),
        "no_elements": _params([(0,), (3, 0, 2)]),
        "some_without_elements": _params([(4,), (0,), (5, 2), (0, 7), ()]),
        "one_parameter": _params([(13, 7)]),
        "fewer_than_ranks": _params([(10,), (3, 3)]),
        "all_alike": _params([(8,)] * 12),
        "mixed_dtypes": _params(
            [(33, 3), (7,), (128,), (5, 5), (9,), (64, 2)],
            dtypes=("float32", "bfloat16", "float16", "float64", "complex64"),
        ),
        "frozen": _params([(16, 16), (16,), (40, 16), (40,)], frozen_every=2),
        "all_frozen": _params([(16,), (4, 4)], frozen_every=1),
        "embedding_and_small": _params([(50_000, 64), *block * 4, (64,)]),
        "thousand": _params([(1 + (index * 7919) % 97, 1 + index % 5) for index in range(1000)]),
        "several_groups": _params([(30, 4), (30,), (12, 30), (12,)], groups=2),
    }


def _params(
    shapes: Sequence[tuple[int, ...]], *, dtypes: Sequence[str] = ("float32",), frozen_every: int = 0, groups: int = 1
) -> tuple[ParamSpec, ...]:
    return tuple(
        ParamSpec(
            name=f"layer{index}.weight",
            shape=shape,
            dtype=dtypes[index % len(dtypes)],
            trainable=not (frozen_every and index % frozen_every == 0),
            group=index * groups // len(shapes),
        )
        for index, shape in enumerate(shapes)
    )
