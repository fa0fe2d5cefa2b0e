"""A model of ``--model-from`` whose forward kills its process: MORTAL, "PROCESS:FORWARD ...", counts forwards of training."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

from helpers.own_model import build as build_own

MORTAL = "SHARDWISE_TEST_MORTAL"
num_forwards = 0  # of this process, over all models that it has built


def _count(model: nn.Module, _args: object) -> None:
    global num_forwards
    if model.training and torch.is_grad_enabled():
        num_forwards += 1
        if f"{os.environ.get('RANK')}:{num_forwards}" in os.environ.get(MORTAL, "").split():
            os.kill(os.getpid(), signal.SIGKILL)


def build(vocabulary: int) -> nn.Module:
    model = build_own(vocabulary)
    model.register_forward_pre_hook(_count)
    return model
