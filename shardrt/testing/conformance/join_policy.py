"""What every join policy must get right."""

from __future__ import annotations

import itertools

import pytest

from shardrt.protocols import JoinPolicy

_WORLD_SIZES = (1, 2, 3, 8, 1000)
_each_world = pytest.mark.parametrize("world_size", _WORLD_SIZES)


class JoinPolicyConformance:
    """Subclass it in a test module as ``class TestMine(JoinPolicyConformance)`` and say how to make yours.

    Example:
        >>> from shardrt.testing import JoinPolicyConformance
        >>> class HalfIsEnough:
        ...     name = "half"
        ...     def goes_on(self, active, world_size):
        ...         return 2 * active >= world_size
        ...     def divisor(self, active, world_size):
        ...         return active
        >>> class TestHalfIsEnough(JoinPolicyConformance):
        ...     @classmethod
        ...     def make(cls):
        ...         return HalfIsEnough()
        >>> TestHalfIsEnough().test_an_end_is_final(world_size=8)
    """

    @classmethod
    def make(cls) -> JoinPolicy:
        """A new instance of the policy under test."""
        raise NotImplementedError("a conformance class must say how to make its policy: override make()")

    def test_is_a_join_policy(self) -> None:
        """It has the attributes of the protocol."""
        policy = self.make()
        assert isinstance(policy, JoinPolicy)
        assert isinstance(policy.name, str)

    @_each_world
    def test_goes_on_while_everybody_has_inputs(self, world_size: int) -> None:
        """With even inputs a block does what a loop without it does."""
        assert self.make().goes_on(world_size, world_size) is True

    @_each_world
    def test_averages_over_all_while_everybody_has_inputs(self, world_size: int) -> None:
        """With even inputs a block averages as without it."""
        assert self.make().divisor(world_size, world_size) == world_size

    @_each_world
    def test_divides_by_a_whole_number_above_zero(self, world_size: int) -> None:
        """Whatever is left: a gradient divided by nothing, or turned round, is no average."""
        policy = self.make()
        for active in range(1, world_size + 1):
            divisor = policy.divisor(active, world_size)
            assert isinstance(divisor, int) and not isinstance(divisor, bool) and divisor >= 1, (active, divisor)

    @_each_world
    def test_an_end_is_final(self, world_size: int) -> None:
        """Inputs only get fewer: a policy that would stop and then go on has been asked in vain."""
        policy = self.make()
        answers = [policy.goes_on(active, world_size) for active in range(world_size, 0, -1)]
        assert all(earlier or not later for earlier, later in itertools.pairwise(answers)), answers

    @_each_world
    def test_the_same_question_has_the_same_answer(self, world_size: int) -> None:
        """Every rank asks its own instance, not equally often: answers depend on the two numbers alone."""
        policy, other = self.make(), self.make()
        for active in range(1, min(world_size, 8) + 1):
            asked = [(one.goes_on(active, world_size), one.divisor(active, world_size)) for one in (policy, policy)]
            assert asked == [(other.goes_on(active, world_size), other.divisor(active, world_size))] * 2
