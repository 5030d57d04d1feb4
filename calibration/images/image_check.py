"""Checks that a model runs layer by layer beside images as it does by itself. Knows nothing of data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtuner.calibration.forward.read_plan import AttentionCall, attend
from kvtuner.calibration.forward.trace import is_close, is_same, refusing_model
from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.attention_hook import AttentionHook
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.forward.trace import Trace
    from kvtuner.calibration.images.sequence_images import SequenceImages


def check_images(chain: DecoderChain, batch: Batch, images: SequenceImages) -> None:
    """Check on a batch with images that layers one by one give what the model does, whatever attention reads.

    Raises:
        UnsupportedModelError: The model reads no images, or does more beside them than to add to layers' inputs.
    """

    def trace(hook: AttentionHook | None, images: SequenceImages) -> Trace:
        return chain.trace(batch.input_ids, batch.position_ids, hook, images=images)

    with refusing_model(chain.name, "beside images"):
        exact = trace(None, images)
        for hook in (None, _other_attention):
            expected = exact if hook is None else trace(hook, images)
            if not is_close(chain.run(exact.residual[0], exact.calls, hook), expected.final):
                raise UnsupportedModelError(
                    f"{chain.name}: running its layers one by one beside images gives another result; give --data of"
                    " text"
                )
        if is_same(trace(None, images.blank()).final, exact.final):
            raise UnsupportedModelError(f"{chain.name} predicts the same whatever an image holds; give --data of text")


def _other_attention(_: int, call: AttentionCall) -> Tensor:
    """Attention that reads the values of other tokens, by half."""
    return 0.5 * attend(replace(call, v=call.v.roll(1, dims=2)))
