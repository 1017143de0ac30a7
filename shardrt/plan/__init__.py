"""Planning: parameters, shards, buckets and plans, without tensors."""

from shardrt.plan.balance import spread_largest_first, starting_loads
from shardrt.plan.buckets import Bucket, build_buckets, build_still_buckets, check_buckets, group_for_travel
from shardrt.plan.cuts import BLOCK, EvenCutter
from shardrt.plan.options import refuse_unknown_choice, refuse_unknown_options
from shardrt.plan.params import ITEM_SIZES, ParamSpec
from shardrt.plan.partition import Partition, Shard
from shardrt.plan.plan import Plan

__all__ = [
    "BLOCK",
    "ITEM_SIZES",
    "Bucket",
    "EvenCutter",
    "ParamSpec",
    "Partition",
    "Plan",
    "Shard",
    "build_buckets",
    "build_still_buckets",
    "check_buckets",
    "group_for_travel",
    "refuse_unknown_choice",
    "refuse_unknown_options",
    "spread_largest_first",
    "starting_loads",
]
