"""What tools of torch ask of a sharded module beside public methods: its class, and the end of a pipeline's step."""

from __future__ import annotations

from torch import nn

from shardwise import torch_private
from shardwise.engine.attachment import Attachment
from shardwise.engine.by_hand import end_step
from shardwise.engine.roots import provisional_engine
from shardwise.optim.clip import clip_grad_norm_


class StageState:
    """What a stage of ``torch.distributed.pipelining`` finds behind a module when its last microbatch is through.

    Before torch 2.15 it asks for the states of all sharded modules below, to end the backward of each by hand, then ends the
    step at the root.  Here the root's engine ends all of them: there is no other state.

    Attributes:
        all_states: none.  _state_ctx: where the stage looks for them.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self.all_states: tuple[object, ...] = ()

    @property
    def _state_ctx(self) -> StageState:
        return self  # no attribute: a module is freed with its last name

    def _root_post_backward_final_callback(self) -> None:
        end_step(provisional_engine(self._attachment))


def tool_classes() -> tuple[type, ...]:
    """Return what to put last among the bases of a sharded module's class, for tools that ask ``isinstance``.

    Last, so that nothing of it is used: every method is found before.
    """
    known = torch_private.class_that_tools_ask_for()
    return () if known is None else (known,)


def show_to_tools(module: nn.Module, attachment: Attachment) -> None:
    """Give ``module`` the state that torch's tools read, and make torch's own composable APIs skip the module.

    Also let torch's ``clip_grad_norm_`` accept shards together with ignored parameters.
    """
    # torch's replicate skips modules that have the first name, its fully_shard and FSDP1 those that have the second.
    for name in ("fully_shard", "replicate"):
        torch_private.enter_composable_api(module, name)
    torch_private.clip_mixed_by(clip_grad_norm_)
    torch_private.put_state_that_tools_ask_for(module, StageState(attachment))
