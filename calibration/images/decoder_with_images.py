"""Runs a model's decoder as the model itself does, on text or beside images. Knows nothing of layers.

A model makes the decoder's inputs of images: embeddings in the place of their tokens, positions, masks, features for
some layers. So the whole model runs, and only the positions are moved to where the sequence begins in its context.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from kvtuner.calibration.images.sequence_images import SequenceImages

_POSITIONS = "position_ids"


def run_decoder(
    model: PreTrainedModel, decoder: nn.Module, input_ids: Tensor, position_ids: Tensor, images: SequenceImages | None
) -> Tensor:
    """Final hidden states [batch, tokens, hidden_size] of ids at positions, [batch, tokens] each.

    Beside images positions are those of the model for them, as if the tokens before the first position were text.
    """
    if images is None:
        final: Tensor = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return final
    thread = get_ident()
    finals: list[Tensor] = []

    def move(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if get_ident() != thread:  # another sequence of this model, which runs beside
            return None
        assert kwargs is not None  # torch leaves it out where another thread has just removed its hook
        own = kwargs.get(_POSITIONS)
        # Images have three positions a token, [3 or more, batch, tokens].
        moved = position_ids if own is None else own + position_ids[:, :1]
        return args, {**kwargs, _POSITIONS: moved}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == thread:
            finals.append(output.last_hidden_state)

    handles = [decoder.register_forward_pre_hook(move, with_kwargs=True), decoder.register_forward_hook(keep)]
    try:
        inputs = {name: value.to(input_ids.device) for name, value in images.inputs.items()}
        model(input_ids=input_ids, **inputs, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    assert len(finals) == 1, f"the decoder ran {len(finals)} times"
    return finals[0]
