"""What every partitioner must get right."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
import sys
import types
from typing import Any, NoReturn

import pytest

from shardrt.errors import UnsupportedError
from shardrt.plan import Partition, Plan
from shardrt.protocols import Partitioner, PartitionRequest
from shardrt.testing.conformance.zoo import WORLD_SIZES, parameter_lists
from shardrt.testing.functions import import_path, resolve

_LISTS = parameter_lists()
_each_list = pytest.mark.parametrize("params", list(_LISTS))
_each_world = pytest.mark.parametrize("world_size", WORLD_SIZES)
_BUCKET_BYTES = 4096


class PartitionerConformance:
    """Subclass it in a test module as ``class TestMine(PartitionerConformance)`` and say how to make yours.

    Example:
        >>> from shardrt import Partition, Shard
        >>> from shardrt.testing import PartitionerConformance
        >>> class EverythingToRankZero:
        ...     name = "rank-zero"
        ...     cuts_parameters = False
        ...     def partition(self, request):
        ...         shards = tuple(Shard(spec.name, 0, spec.numel, 0) for spec in request.params)
        ...         return Partition(world_size=request.world_size, shards=shards)
        >>> class TestEverythingToRankZero(PartitionerConformance):
        ...     @classmethod
        ...     def make(cls):
        ...         return EverythingToRankZero()
        >>> TestEverythingToRankZero().test_covers_every_element_once("thousand", world_size=7)
    """

    @classmethod
    def make(cls) -> Partitioner:
        """A new instance of the partitioner under test."""
        raise NotImplementedError("a conformance class must say how to make its partitioner: override make()")

    def test_is_a_partitioner(self) -> None:
        """It has the attributes of the protocol."""
        partitioner = self.make()
        assert isinstance(partitioner, Partitioner)
        assert isinstance(partitioner.name, str)
        assert isinstance(partitioner.cuts_parameters, bool)

    @_each_world
    @_each_list
    def test_covers_every_element_once(self, params: str, world_size: int) -> None:
        """Every element of every parameter has one owner, with buckets and without."""
        for bucket_bytes in (None, _BUCKET_BYTES):
            request = _request(params, world_size, bucket_bytes=bucket_bytes)
            partition = self.make().partition(request)
            assert isinstance(partition, Partition)
            assert partition.world_size == world_size
            partition.check(request.params)

    @_each_list
    def test_shards_are_in_order(self, params: str) -> None:
        """Shards come in parameter order and, inside a parameter, in element order."""
        request = _request(params, 3, bucket_bytes=_BUCKET_BYTES)
        place = {spec.name: index for index, spec in enumerate(request.params)}
        keys = [(place[shard.param], shard.start, shard.stop) for shard in self.make().partition(request).shards]
        assert keys == sorted(keys)

    @_each_list
    def test_whole_parameters_are_honoured_or_refused(self, params: str) -> None:
        """Asked not to cut, it does not, or refuses and names a partitioner that does not."""
        partitioner = self.make()
        request = _request(params, 3, whole_parameters=True, bucket_bytes=_BUCKET_BYTES)
        try:
            partition = partitioner.partition(request)
        except UnsupportedError as error:
            assert partitioner.cuts_parameters, "a partitioner that never cuts has no reason to refuse whole parameters"
            assert _names_another(str(error), partitioner.name), f"names no other installed partitioner: {error}"
        else:
            cut = [name for name, shards in partition.by_param.items() if len(shards) != 1]
            assert not cut, f"cut although whole parameters were asked for: {cut[:5]}"

    @_each_list
    def test_cuts_only_if_it_says_so(self, params: str) -> None:
        """``cuts_parameters`` tells the truth."""
        partitioner = self.make()
        partition = partitioner.partition(_request(params, 3))
        cut = [name for name, shards in partition.by_param.items() if len(shards) != 1]
        assert partitioner.cuts_parameters or not cut, f"cut although cuts_parameters is False: {cut[:5]}"

    @_each_list
    def test_is_deterministic(self, params: str) -> None:
        """The same request gives the same partition: again, and from another instance."""
        partitioner = self.make()
        request = _request(params, 4, bucket_bytes=_BUCKET_BYTES)
        first = partitioner.partition(request)
        assert partitioner.partition(request) == first
        assert self.make().partition(request) == first

    @_each_list
    def test_leaves_the_request_alone(self, params: str) -> None:
        """The request is the same afterwards."""
        request = _request(params, 3)
        before = copy.deepcopy(request)
        self.make().partition(request)
        assert request == before

    def test_gives_the_same_in_another_process(self) -> None:
        """Nothing depends on hash seeds, addresses or what ran before."""
        here = {name: plan_fingerprint(self.make(), name) for name in _LISTS}
        code = f"from {__name__} import print_fingerprints; print_fingerprints({import_path(type(self))!r})"
        for seed in ("1", "2"):
            environment = {
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout) == here

    @_each_list
    def test_honours_load(self, params: str) -> None:
        """What ranks own already is taken without complaint, and the cover stays complete."""
        request = _request(params, 3, load=(1_000_000, 0, 5))
        self.make().partition(request).check(request.params)

    def test_never_touches_torch_distributed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It works without a process group and without asking for one."""
        import torch.distributed as dist

        for name, value in list(vars(dist).items()):
            if type(value) is types.FunctionType:  # isinstance would wake torch's deprecated names
                monkeypatch.setattr(dist, name, functools.partial(_refuse, name))
        for params in _LISTS:
            self.make().partition(_request(params, 3))

    @_each_list
    def test_plan_survives_json(self, params: str) -> None:
        """The plan made from it is the same after a trip through JSON, fingerprint included."""
        partitioner = self.make()
        request = _request(params, 3, bucket_bytes=_BUCKET_BYTES)
        plan = Plan.build(
            request.params,
            partitioner.partition(request),
            partitioner=partitioner.name,
            bucket_bytes=request.bucket_bytes,
        )
        again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
        assert again == plan
        assert again.fingerprint == plan.fingerprint


def plan_fingerprint(partitioner: Partitioner, params: str) -> str:
    """The fingerprint of the plan for one list of the zoo on four ranks."""
    request = _request(params, 4, bucket_bytes=_BUCKET_BYTES)
    return Plan.build(request.params, partitioner.partition(request), partitioner=partitioner.name).fingerprint


def print_fingerprints(kit: str) -> None:
    """For another process: the fingerprints of all plans, as JSON."""
    made = resolve(kit).make()
    sys.stdout.write(json.dumps({name: plan_fingerprint(made, name) for name in _LISTS}))


def _request(params: str, world_size: int, **options: Any) -> PartitionRequest:
    return PartitionRequest(params=_LISTS[params], world_size=world_size, **options)


def _names_another(text: str, own: str) -> bool:
    from shardrt.registry import load_registry

    installed = {entry.record.name for entry in load_registry().partitioners} - {own}
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in installed)


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise AssertionError(f"a partitioner called torch.distributed.{name}; it must be pure")
