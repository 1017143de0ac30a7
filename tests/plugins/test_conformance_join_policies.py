"""Every built-in join policy passes the same kit as anyone's, and the kit finds what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardrt import load_registry
from shardrt.protocols import JoinPolicy
from shardrt.testing import JoinPolicyConformance


class TestActive(JoinPolicyConformance):
    @classmethod
    def make(cls) -> JoinPolicy:
        return load_registry().join_policies.get("active").factory()


class TestAll(JoinPolicyConformance):
    @classmethod
    def make(cls) -> JoinPolicy:
        return load_registry().join_policies.get("all").factory()


class TestShortest(JoinPolicyConformance):
    @classmethod
    def make(cls) -> JoinPolicy:
        return load_registry().join_policies.get("shortest").factory()


class Wrong:
    """Says what it is told to say."""

    name = "wrong"

    def __init__(self, goes_on: Callable[[int, int], bool], divisor: Callable[[int, int], int]) -> None:
        self._goes_on, self._divisor = goes_on, divisor

    def goes_on(self, active: int, world_size: int) -> bool:
        return self._goes_on(active, world_size)

    def divisor(self, active: int, world_size: int) -> int:
        return self._divisor(active, world_size)


@pytest.mark.parametrize(
    ("check", "goes_on", "divisor"),
    [
        ("test_goes_on_while_everybody_has_inputs", lambda active, size: False, lambda active, size: active),
        ("test_averages_over_all_while_everybody_has_inputs", lambda active, size: True, lambda active, size: 1),
        ("test_divides_by_a_whole_number_above_zero", lambda active, size: True, lambda active, size: size - active),
        ("test_an_end_is_final", lambda active, size: active % 2 == 0, lambda active, size: active),
    ],
)
def test_the_kit_finds_what_is_wrong(
    check: str, goes_on: Callable[[int, int], bool], divisor: Callable[[int, int], int]
) -> None:
    class Kit(JoinPolicyConformance):
        @classmethod
        def make(cls) -> JoinPolicy:
            return Wrong(goes_on, divisor)

    with pytest.raises(AssertionError):
        getattr(Kit(), check)(world_size=8)
