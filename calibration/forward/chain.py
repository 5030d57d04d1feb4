"""A decoder as a chain of layers that can be run from any layer on. Knows nothing of quantization or data.

The chain is found by looking, not by name: one traced forward shows what each layer is called with, that a layer's
output is the next one's input, and which module turns the last output into the final hidden states. A model that is not
such a chain is refused.
"""

from __future__ import annotations

from inspect import signature
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvtuner.calibration.forward.attention_hook import AttentionHook, hooked
from kvtuner.calibration.forward.decoder_layers import find_decoder_layers, merged_streams, output_embeddings
from kvtuner.calibration.forward.finite_check import check_finite, check_residual
from kvtuner.calibration.forward.latents import CACHE_ARGUMENT, LatentRecorder, check_latent
from kvtuner.calibration.forward.probe import check_attention, check_indexes
from kvtuner.calibration.forward.read_plan import AttentionCall, attend
from kvtuner.calibration.forward.streamed_layers import on_disk, streamed_layers_of
from kvtuner.calibration.forward.trace import (
    ForwardCount,
    LayerCall,
    Trace,
    added_between,
    handed_on,
    is_close,
    is_same,
    largest_difference,
    refusing_model,
)
from kvtuner.calibration.images.decoder_with_images import run_decoder
from kvtuner.calibration.placement.sharded_weights import logits_of_tokens
from kvtuner.errors import NonFiniteActivationError, UnsupportedModelError
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import CacheGeometry
from kvtuner.supported_models import has_states

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel

    from kvtuner.calibration.images.sequence_images import SequenceImages

LOGITS_IN_FLIGHT = 1 << 23  # 32 MiB of float32, of which a comparison holds several
MAX_LOGIT_ROWS = 128  # of a small vocabulary: what is done to logits then stays in a core's cache


class DecoderChain:
    """Runs a causal language model layer by layer."""

    def __init__(self, model: PreTrainedModel, geometry: ModelGeometry | CacheGeometry) -> None:
        """Find the chain in `model` and check it on a probe of a few tokens.

        Raises:
            UnsupportedModelError: The model is not a chain of layers, of which those with keys call attention once.
            NonFiniteActivationError: NaN or infinity in a layer.
        """
        self.model = model
        self.cache = CacheGeometry.of(geometry) if isinstance(geometry, ModelGeometry) else geometry
        """The cache of all layers; heads and channels of windows as the probe shows them."""
        self.geometry = geometry if isinstance(geometry, ModelGeometry) else geometry.tuned()
        """The layers whose precision is chosen."""
        self.runs_prompts_again = has_states(model.config) or any(layer.index_dim for layer in self.cache.layers)
        """Whether tokens depend on earlier ones by more than their keys and values, such as by keys of an index."""
        self.name = type(model).__name__
        self.elements_per_token = 0
        """The numbers of one token that all layers cache, and of keys and values that are made of latents."""
        self.count = ForwardCount()
        found = find_decoder_layers(model, len(self.cache.layers))
        if found is None:
            raise UnsupportedModelError(f"{self.name} has no list of {len(self.cache.layers)} decoder layers")
        self.decoder, self.layers = found[0], list(found[1])
        arguments = signature(self.decoder.forward).parameters
        if "hidden_states" in arguments and "input_ids" not in arguments:
            raise UnsupportedModelError(
                f"{self.name}: its layers lie in {type(self.decoder).__name__}, which reads no token ids; only decoders"
                " that read them themselves are supported"
            )
        self._streamed = streamed_layers_of(model)
        head = output_embeddings(model)
        if head is None:
            raise UnsupportedModelError(f"{self.name} has no output embeddings: is it a causal language model?")
        self.head = head
        self._norm: nn.Module | None = None
        self._scales_logits = True
        with refusing_model(self.name, "layer by layer"):
            self._check_on_probe()

    @property
    def input_device(self) -> torch.device:
        """The device that token ids must be on."""
        return next(iter(self.model.get_input_embeddings().parameters())).device

    @torch.no_grad()
    def trace(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hook: AttentionHook | None = None,
        *,
        images: SequenceImages | None = None,
    ) -> Trace:
        """Run the whole decoder once, keeping the residual stream; ids and positions are [batch, tokens].

        The hook is called with the layer whose cache is read, as in `run`.

        Raises:
            NonFiniteActivationError: Raised by the hook, if it checks; names the first layer that gave any.
        """
        return self._trace(input_ids, position_ids, self._by_owner(hook), images)

    def _trace(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hook: AttentionHook | None,
        images: SequenceImages | None = None,
    ) -> Trace:
        """A trace as `trace` gives it, with a hook that is called with the layer that attends."""
        residual: list[Tensor] = []
        calls: list[LayerCall] = []
        outputs: list[Any] = []
        thread = get_ident()

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            if get_ident() != thread:  # another sequence of this model, which runs beside
                return None
            assert kwargs is not None  # torch leaves it out where another thread has just removed its hook
            layer = self.cache.layers[self.layers.index(module)]
            is_latent = layer.kind.name == "latent"
            if is_latent:
                kwargs = {**kwargs, CACHE_ARGUMENT: LatentRecorder()}
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            hidden = args[0] if args else kwargs["hidden_states"]
            residual.append(hidden if self._streamed is None else on_disk(hidden))
            before = outputs[-1] if outputs else None
            added = None if images is None or before is None else added_between(_first(before), hidden)
            call = LayerCall(args[1:], rest, added, handed_on(before, rest))
            # A layer with an index of its own reads nothing of what the layer before selected.
            calls.append(call.without_handed() if layer.index_dim else call)
            return (args, kwargs) if is_latent else None

        def keep_output(module: nn.Module, args: Any, output: Any) -> None:
            if get_ident() == thread:
                outputs[:] = [output]

        handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self.layers]
        handles += [layer.register_forward_hook(keep_output) for layer in self.layers]
        try:
            with hooked(hook):
                final = run_decoder(self.model, self.decoder, input_ids, position_ids, images)
        except NonFiniteActivationError:
            check_residual(residual)  # a layer that was given NaN is not the one that made it
            raise
        finally:
            for handle in handles:
                handle.remove()
        self.count.add(input_ids.numel() * len(self.layers))
        return Trace(residual, calls, final)

    @torch.no_grad()
    def run(
        self,
        hidden: Tensor,
        calls: Sequence[LayerCall],
        hook: AttentionHook | None = None,
        *,
        start: int = 0,
        on_input: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Final hidden states when layers from `start` on run, from its input [batch, tokens, hidden_size].

        The calls are those of a trace of the same batch. `on_input` is called with the input of every layer that runs.
        The hook is called with the layer whose cache is read: that of a layer which has none is called for each reader.
        Keys and values of layers before `start`, which later ones read, are those of the trace, as is what the layer
        before hands on.
        """
        states = calls[0].own_states()
        if states is not None and start == 0:
            states.clear()
        output: Any = None
        with hooked(self._by_owner(hook)):
            for layer_id in range(start, len(self.layers)):
                if layer_id > start:
                    hidden = calls[layer_id].input_after(_first(output))
                if on_input is not None:
                    on_input(layer_id, hidden)
                output = self._output_of(layer_id, hidden, calls[layer_id], calls[layer_id].kwargs_with(states, output))
        return self.finish(_first(output))

    def run_layer(self, layer_id: int, hidden: Tensor, call: LayerCall) -> Tensor:
        """Output of one layer; gradients flow if they are enabled.

        It finds other layers' keys and values, and what the layer before hands on, as in the trace.
        """
        return _first(self._output_of(layer_id, hidden, call, call.kwargs_with(call.own_states())))

    def _output_of(self, layer_id: int, hidden: Tensor, call: LayerCall, kwargs: Mapping[str, Any]) -> Any:
        """All that a layer gives, its hidden states first."""
        if self._streamed is not None:
            hidden = hidden.to(self._streamed.device)
        output = self.layers[layer_id](hidden, *call.args, **kwargs)
        self.count.add(hidden.shape[-3] * hidden.shape[-2])
        return output

    def run_layer_exactly(self, layer_id: int, hidden: Tensor, call: LayerCall) -> Tensor:
        """Output of one layer with unquantized attention."""
        with hooked(None):
            return self.run_layer(layer_id, hidden, call)

    def finish(self, hidden: Tensor) -> Tensor:
        """Final hidden states of the last layer's output."""
        hidden = merged_streams(self.decoder, hidden)
        result = hidden if self._norm is None else self._norm(hidden)
        assert isinstance(result, Tensor)
        return result

    def logits(self, final: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits of final hidden states, float32, of all tokens or some; scaled and capped as the model does it.

        Some tokens can be asked for where `has_rows_of_tokens`.
        """
        final = final.to(self.logits_device)
        if tokens is None:
            logits: Tensor = self.head(final).to(torch.float32)
        else:
            assert isinstance(self.head, nn.Linear)
            logits = logits_of_tokens(self.head, final, tokens)
        return self._scaled(logits) if self._scales_logits else logits

    def _scaled(self, logits: Tensor) -> Tensor:
        """Logits as the decoder's configuration scales and caps them."""
        config = self.model.config.get_text_config(decoder=True)
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def logits_device(self) -> torch.device:
        """The device of the head."""
        return next(iter(self.head.parameters())).device

    @property
    def has_rows_of_tokens(self) -> bool:
        """Whether the head is a plain matrix with a row for each token, at hand."""
        return type(self.head) is nn.Linear and self.head.weight.device.type != "meta"

    @property
    def vocab_size(self) -> int:
        """Logits per token."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def rows_in_flight(self) -> int:
        """Token rows whose logits are held at a time."""
        return max(1, min(MAX_LOGIT_ROWS, LOGITS_IN_FLIGHT // self.vocab_size))

    def _by_owner(self, hook: AttentionHook | None) -> AttentionHook | None:
        """A hook by the layer whose cache is read, as one by the layer that reads it."""
        return None if hook is None else lambda layer_id, call: hook(self.cache.owner_of(layer_id), call)

    def _check_on_probe(self) -> None:
        device = self.input_device
        # Eight tokens that differ, past those that vocabularies begin with.
        ids = torch.arange(2, 10, device=device).unsqueeze(0) % self.model.config.get_text_config().vocab_size
        positions = torch.arange(8, device=device).unsqueeze(0)
        attention_calls: list[tuple[int, AttentionCall]] = []

        def hook(layer_id: int, call: AttentionCall) -> Tensor:
            check_finite(layer_id, queries=call.q, keys=call.k, values=call.v)
            if (layer := self.cache.layers[layer_id]).kind.name == "latent":
                check_latent(f"{self.name}: layer {layer_id}", layer, call)
            attention_calls.append((layer_id, call))
            return attend(call)

        trace, outputs, self._norm = self._watch(lambda: self._trace(ids, positions, hook))
        self.cache, self.elements_per_token = check_attention(self.name, self.cache, attention_calls)
        check_indexes(self.name, self.cache, trace.calls)
        for layer_id, output in enumerate(outputs):
            check_finite(layer_id, outputs=output)
        for layer_id in range(1, len(self.layers)):
            if not is_same(trace.residual[layer_id], outputs[layer_id - 1]):
                raise UnsupportedModelError(
                    f"{self.name}: layer {layer_id} does not read layer {layer_id - 1}'s output alone;"
                    " only plain chains of decoder layers are supported"
                )
        with torch.no_grad():
            replayed = self.run(trace.residual[0], trace.calls)
            if not is_close(replayed, trace.final):
                raise UnsupportedModelError(f"{self.name}: running its layers one by one gives another result")
            with hooked(None):
                whole = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        self._scales_logits = self._is_scaled(trace.final, whole)
        if not is_close(self.logits(trace.final).to(whole.dtype), whole):
            raise UnsupportedModelError(f"{self.name}: its logits are not the output embeddings of its hidden states")

    def _is_scaled(self, final: Tensor, whole: Tensor) -> bool:
        """Whether the model's logits are scaled and capped, as its decoder's configuration says.

        Classes that read images may leave that out. What comes closer to the model's logits tells, and where rounding
        alone may decide between the two the configuration does.
        """
        plain = self.head(final.to(self.logits_device)).to(torch.float32)
        scaled = self._scaled(plain)
        of_plain, of_scaled = (largest_difference(each.to(whole.dtype), whole) for each in (plain, scaled))
        return not of_plain < of_scaled / 2

    def _watch(self, run: Callable[[], Trace]) -> tuple[Trace, list[Tensor], nn.Module | None]:
        """A trace, the layers' outputs in it, and the module that reads the last of them; None without one."""
        outputs: list[Tensor] = []
        candidates: list[tuple[nn.Module, Tensor]] = []

        def after_layer(module: nn.Module, args: Any, output: Any) -> None:
            outputs.append(_first(output))

        def after_child(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                candidates.append((module, args[0]))

        handles = [layer.register_forward_hook(after_layer) for layer in self.layers]
        handles += [child.register_forward_hook(after_child) for child in self.decoder.children()]
        try:
            trace = run()
        finally:
            for handle in handles:
                handle.remove()
        last = merged_streams(self.decoder, outputs[-1])
        norms = [m for m, x in candidates if x.shape == last.shape and is_same(x, last)]
        return trace, outputs, norms[-1] if norms else None


def _first(output: Any) -> Tensor:
    """A layer's hidden states, which some layers give beside others."""
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden
