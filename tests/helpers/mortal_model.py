"""A model of ``--model-from`` whose forward kills its process: MORTAL, "PROCESS:FORWARD ...", counts forwards of training.

"PROCESS:sample": in the sample from the trained model, whose text is shorter than the windows of training and validation.
"""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

from helpers.own_model import build as build_own

MORTAL = "SHARDWISE_TEST_MORTAL"
CONTEXT = 16
num_forwards = 0  # of this process, over all models that it has built


def _count(model: nn.Module, args: tuple[torch.Tensor]) -> None:
    global num_forwards
    kills = os.environ.get(MORTAL, "").split()
    if not model.training and args[0].shape[-1] < CONTEXT and f"{os.environ.get('RANK')}:sample" in kills:
        os.kill(os.getpid(), signal.SIGKILL)
    if model.training and torch.is_grad_enabled():
        num_forwards += 1
        if f"{os.environ.get('RANK')}:{num_forwards}" in kills:
            os.kill(os.getpid(), signal.SIGKILL)


def build(vocabulary: int) -> nn.Module:
    model = build_own(vocabulary)
    model.register_forward_pre_hook(_count)
    return model
