"""Bytes of messages under a ``CompressionPolicy``: as the codec lays them out, for ranks that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.codec.block_codes import BlockCode
from shardwise.codec.coded_sections import CodedSection
from shardwise.codec.compression_policy import CompressionPolicy, takes
from shardwise.layout.bucket import Bucket, align, by_size
from shardwise.layout.shard import ChunkShard
from shardwise.planner.profile import ParamFacts

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, slots=True)
class Coded:
    """The message of one section.

    Attributes:
        message_bytes: of it.  coded_numel: elements that are coded, padding to blocks included; rest_bytes: of the others.
    """

    message_bytes: int
    coded_numel: int
    rest_bytes: int


@dataclass(frozen=True, slots=True)
class Codings:
    """What a policy makes of the sections of a model."""

    policy: CompressionPolicy
    num_shards: int

    def gathered(self, params: Sequence[ParamFacts], bucket: Bucket, itemsize: int) -> Coded | None:
        """Return the message of a section of an all-gather; None if it is not coded."""
        coding = self.policy.gather
        return None if coding is None else self._section(params, bucket, itemsize, BlockCode(coding, self.policy.block))

    def reduced(self, params: Sequence[ParamFacts], bucket: Bucket, itemsize: int) -> Coded | None:
        """Return the message of a section of a reduction; None if it is not coded."""
        coding = self.policy.reduce
        return None if coding is None else self._section(params, bucket, itemsize, BlockCode(coding, self.policy.block))

    def between(self, coded: Coded, replicas: int) -> int:
        """Return the bytes that a rank sends to each other one of ``replicas`` to sum a coded section and share the sum."""
        assert self.policy.reduce is not None
        code = BlockCode(self.policy.reduce, self.policy.block)
        mine = align(-(-coded.coded_numel // replicas), self.policy.block)
        return 2 * align(code.num_bytes(mine), 16)

    def _section(self, params: Sequence[ParamFacts], bucket: Bucket, itemsize: int, code: BlockCode) -> Coded | None:
        order = by_size([ChunkShard(param.shape, 0, self.num_shards) for param in params])
        is_coded = [self.is_coded(params[number]) for number in order]
        section = CodedSection.of(bucket, is_coded, _DTYPES[itemsize], code)
        if not section.runs:
            return None
        return Coded(section.message_bytes, section.coded_numel, section.rest_numel * itemsize)

    def is_coded(self, param: ParamFacts) -> bool:
        """Return True if the policy takes ``param``."""
        return param.is_floating and takes(self.policy, param.name, param.shape, param.itemsize)
