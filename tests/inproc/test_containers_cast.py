"""What is moved to a device is moved in every container that modules take."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pack_sequence

from shardwise.containers import Conversion

X = torch.ones(2)


def test_what_is_moved_to_a_device_is_moved_in_containers_too() -> None:
    meta = torch.device("meta")
    box = {
        "x": [X],
        "n": torch.ones(2, dtype=torch.int64),
        "sequence": pack_sequence([X[:, None]], enforce_sorted=False),
    }
    sequence = box["sequence"]
    conversion = Conversion(torch.bfloat16, meta)
    (x, moved), kwargs = conversion.arguments((X, box), {"y": X})
    assert x is kwargs["y"] is moved["x"][0]
    assert x.device == moved["n"].device == moved["sequence"].sorted_indices.device == meta
    assert moved["sequence"].batch_sizes is sequence.batch_sizes
    assert x.dtype == torch.bfloat16
    moved["x"].append("put")
    conversion.take_back()
    assert moved is box
    assert box["sequence"] is sequence
    assert box["x"][0] is X
    assert box["x"][1:] == ["put"]
