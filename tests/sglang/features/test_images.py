"""Models that read images: a server with a profile answers as transformers does with it, about text and pictures."""

from __future__ import annotations

import urllib.error
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from served_layers.two_kinds import TRITON
from tiny.image_models import CAUSAL_IMAGES, KINDS, LONG_IMAGES
from tiny.served_images import SERVED, Picture, save_image_model
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.quant import Transform
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.supported_models import read_cache_geometry
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fixture_types import Json, MakeTokenizer, ProfileOf, RunProgram, SaveProfile, Serve
    from sglang_server import Server
    from tiny.image_models import ImageKind

    from kvtuner.exported_configs.profile.profile import Profile

TOKENS = 24
HADAMARD = Transform(TransformKind.parse("hadamard"))
LAYERS = [LayerQuantization(2, 3, HADAMARD, HADAMARD), LayerQuantization(8, 3), LayerQuantization(3, 8, HADAMARD)]
LONG = "the fox counts the stones near the river, and the crow that follows it counts them once more when "
"""A text that has more tokens than a window."""
PICTURES = [Picture((200, 30, 40)), Picture((20, 220, 90)), Picture((240, 240, 230), before="when ")]
TILED = ("Llama4",)
"""The kinds that cut wide images into tiles."""
ALWAYS = ("Qwen3VL", "Gemma3", "Mistral3")
"""The kinds that are not of the full tests alone: features for layers, images that are read both ways, and neither."""
FLAGS: Mapping[str, tuple[str, ...]] = {
    "Gemma3": ("--enable-multimodal",),
    "Llama4": ("--enable-multimodal", "--trust-remote-code"),
    "Kimi_K25": ("--trust-remote-code",),
}
"""SGLang reads images of the first kinds if asked to, and those of the last by code of the checkpoint."""
FAILS_AFTER_FLUSHING = ("Mistral3",)
"""The kinds for which SGLang's wrapper of processors answers a flush by status 500, once the cache is flushed."""
APART = ("Qwen3_5",)
"""The kinds whose prefixes SGLang shares by less than every token, since it keeps states."""
GIVEN_UP = ("Gemma4",)
"""The kinds of whose prefixes SGLang no longer has what windows read."""
VARIABLES: Mapping[str, dict[str, str]] = {
    "Qwen3_5": {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    "Kimi_K25": {"TORCHDYNAMO_DISABLE": "1"},
}
"""SGLang keeps inputs of convolutions in bfloat16 by default, and compiles how a grid of positions is resized."""
ALONE = ("Gemma3",)
"""The kinds for which SGLang's own code ends where a text has no image and another of the batch has one."""
WINDOWS = {"Gemma4": ExactWindow(8, 2)}
"""The exact windows of profiles, where a kind's fields are its own."""
COUNTS_FROM_ONE = ("Gemma3", "Gemma4")
"""The kinds whose positions SGLang counts from 1, which no prediction tells, but the codes of rotated keys."""


def pictures_of(kind: str) -> list[Picture]:
    """The pictures that a kind is asked about, of which the last is wide where that matters."""
    return [*PICTURES[:2], replace(PICTURES[2], size=(120, 80))] if kind in TILED else PICTURES


def ask(server: Server, kind: str, picture: Picture, top: int) -> Json:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {**picture.request(kind), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": top}
    answer: Json = server.post("/generate", body)
    return answer


def layers_of(config: Any) -> list[LayerQuantization]:
    """Choices for the layers of a model that read all tokens; a latent has one width, and no values beside it."""
    chosen = LAYERS[: read_cache_geometry(config).tuned().num_layers]
    if not hasattr(config.text_config, "kv_lora_rank"):
        return chosen
    return [LayerQuantization(layer.k_bits, layer.k_bits, layer.k_transform) for layer in chosen]


def flush(server: Server, kind: str) -> None:
    with suppress(urllib.error.HTTPError) if kind in FAILS_AFTER_FLUSHING else nullcontext():
        server.flush()


@torch.no_grad()
def log_probs(
    model: Any, cache: Any, inputs: dict[str, torch.Tensor], fed: list[int], first: int | None
) -> torch.Tensor:
    """The host's predictions [tokens, vocabulary] as it reads a server's own tokens, at positions from `first` on.

    Its windows are one token shorter where it decodes, as those of SGLang's Triton backend.
    """
    past = inputs["input_ids"].shape[1]

    def at(start: int, stop: int) -> dict[str, torch.Tensor]:
        return {} if first is None else {"position_ids": torch.arange(first + start, first + stop)[None]}

    rows = [model(**inputs, **at(0, past), past_key_values=cache, use_cache=True)]
    text = model.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    if window:
        text.sliding_window = window - 1
    for place, token in enumerate(fed[:-1], past):
        ids = torch.tensor([[token]])
        rows.append(model(ids, **at(place, place + 1), past_key_values=rows[-1].past_key_values, use_cache=True))
    if window:
        text.sliding_window = window
    return torch.stack([row.logits[0, -1] for row in rows]).double().log_softmax(-1)


def predictions(answer: Json, vocab_size: int) -> torch.Tensor:
    """What a server predicted for each token of an answer [tokens, vocabulary]."""
    predicted = torch.full((TOKENS, vocab_size), torch.nan, dtype=torch.float64)
    for position, top in enumerate(answer["meta_info"]["output_top_logprobs"]):
        predicted[position, [token for _, token, _ in top]] = torch.tensor([p for p, _, _ in top]).double()
    return predicted


def host_of(kind: str, folder: Path) -> Any:
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@dataclass(frozen=True)
class Served:
    """A model that reads images, and what a server of a profile answered about pictures, one after the other."""

    kind: str
    folder: Path
    processor: Any
    profile: Profile
    answers: list[Json]
    cached: list[int]


@pytest.fixture
def served_with_images(
    make_tokenizer: MakeTokenizer, profile_of: ProfileOf, save_profile: SaveProfile, serve: Serve, tmp_path: Path
) -> Callable[..., Served]:
    """`served_with_images(kind, fields=None, **variables)`: pictures that a server answered, also hits of them."""

    def run(kind: str, fields: ImageKind | None = None, **variables: str) -> Served:
        folder = tmp_path / kind
        processor = save_image_model(kind, make_tokenizer(), folder, fields)
        config = AutoConfig.from_pretrained(folder)
        window = None if fields else WINDOWS.get(kind)
        profile: Profile = profile_of(config, layers_of(config), by_kinds=True, window=window)
        flags = ("--kvtuner-profile", str(save_profile(profile)), "--skip-server-warmup", *TRITON, *FLAGS.get(kind, ()))
        variables |= VARIABLES.get(kind, {})
        if "--trust-remote-code" in flags:  # which is copied
            variables["HF_MODULES_CACHE"] = str(tmp_path / "modules")
        with serve(folder, *flags, **variables) as server:
            answers = []
            for picture in pictures_of(kind):
                flush(server, kind)
                answers.append(ask(server, kind, picture, config.text_config.vocab_size))
            flush(server, kind)
            pictures = (*PICTURES[:2], PICTURES[0])
            cached = [ask(server, kind, each, 1)["meta_info"]["cached_tokens"] for each in pictures]
            if kind in ALONE:
                assert_text_runs_beside(server, kind, answers[0])
            assert "self-test passed" in server.log
        return Served(kind, folder, processor, profile, answers, cached)

    return run


def assert_text_runs_beside(server: Server, kind: str, alone: Json) -> None:
    """Assert that a batch of a text and a picture answers the picture as it is answered alone."""
    flush(server, kind)
    request = PICTURES[0].request(kind)
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"text": ["the fox", request["text"]], "image_data": [None, request["image_data"]]}
    text, picture = server.post("/generate", {**body, "sampling_params": sampling})
    assert len(text["output_ids"]) == TOKENS
    assert picture["output_ids"] == alone["output_ids"]
    server.flush()


def assert_agrees(served: Served, share: float = 0.02) -> None:
    """Assert that answers are those of the transformers host with the profile, by the design's agreement.

    Their KL is at most a share of what the profile itself changes.
    """
    kind, folder, profile = served.kind, served.folder, served.profile
    model = host_of(kind, folder)
    vocab_size = model.config.text_config.vocab_size
    found, wanted, exact = [], [], []
    first = 1 if kind in COUNTS_FROM_ONE else None
    for picture, answer in zip(pictures_of(kind), served.answers, strict=True):
        inputs = picture.inputs(kind, served.processor)
        assert answer["meta_info"]["prompt_tokens"] == inputs["input_ids"].shape[1]
        found.append(predictions(answer, vocab_size))
        cache = KVTunerCache.from_profile(profile, model.config)
        wanted.append(log_probs(model, cache, inputs, answer["output_ids"], first))
        exact.append(log_probs(model, None, inputs, answer["output_ids"], first))
    # Another picture in the same text is another prefix.
    assert (found[0][0] - found[1][0]).abs().max() > 0.01
    p, q, unquantized = torch.cat(wanted), torch.cat(found), torch.cat(exact)
    own = (unquantized.exp() * (unquantized - p)).sum(-1).mean().item()
    divergence = (p.exp() * (p - q)).sum(-1).mean().item()
    assert own > 1e-5, "the profile must change something"
    # As the design defines agreement, but for the share of equal tokens: there are 72.
    assert divergence <= share * own + 1e-6
    assert (p.argmax(-1) == q.argmax(-1)).double().mean() >= 0.98


@pytest.mark.parametrize(
    "kind", [kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.full) for kind in SERVED]
)
def test_pictures_are_answered_as_by_the_transformers_host(
    kind: str, served_with_images: Callable[..., Served]
) -> None:
    served = served_with_images(kind)
    assert_agrees(served)
    inputs = PICTURES[0].inputs(kind, served.processor)
    feature = served.processor.tokenizer.convert_tokens_to_ids(KINDS[kind].tokens[0])
    of_image = int((inputs["input_ids"][0] == feature).int().argmax())
    cached = served.cached
    assert cached[0] == 0
    assert cached[1] <= of_image
    assert kind in APART or of_image < cached[2]
    assert kind in (*APART, *GIVEN_UP) or cached[1] > 0


@pytest.mark.full
def test_images_that_are_read_causally_have_no_mask(served_with_images: Callable[..., Served]) -> None:
    assert_agrees(served_with_images("Gemma4", CAUSAL_IMAGES))


@pytest.mark.full
def test_images_longer_than_a_block_of_queries_are_read_both_ways(served_with_images: Callable[..., Served]) -> None:
    served = served_with_images("Gemma3", LONG_IMAGES, KVTUNER_ATTENTION="triton")
    assert_agrees(served, share=0.05)  # more keys of 2 bits lie between two codes


@pytest.mark.parametrize(
    "cuts", [(), pytest.param(("--chunked-prefill-size", "32"), marks=pytest.mark.full)], ids=["hit", "chunks"]
)
@torch.no_grad()
def test_an_image_behind_more_tokens_than_a_window_reads_the_last_of_them(
    cuts: tuple[str, ...], serve: Serve, make_tokenizer: MakeTokenizer, profile_of: ProfileOf,
    save_profile: SaveProfile, tmp_path: Path,
) -> None:  # fmt: skip
    """Two pictures behind the same text, of which the second is behind a hit, with 16 bits everywhere."""
    processor = save_image_model("Gemma3", make_tokenizer(), tmp_path)
    model = host_of("Gemma3", tmp_path)
    text, window = model.config.text_config, model.config.text_config.sliding_window
    layers = read_cache_geometry(model.config).tuned().num_layers
    profile = save_profile(profile_of(model.config, [LayerQuantization(16, 16)] * layers, by_kinds=True))
    flags = ("--kvtuner-profile", str(profile), "--skip-server-warmup", *TRITON, *FLAGS["Gemma3"], *cuts)
    pictures = [replace(picture, before=LONG) for picture in PICTURES[:2]]
    with serve(tmp_path, *flags) as server:
        answers = [ask(server, "Gemma3", picture, text.vocab_size) for picture in pictures]
    assert answers[0]["meta_info"]["cached_tokens"] == 0
    assert answers[1]["meta_info"]["cached_tokens"] > window
    for picture, answer in zip(pictures, answers, strict=True):
        inputs = picture.inputs("Gemma3", processor)
        p = log_probs(model, None, inputs, answer["output_ids"], 1)
        q = predictions(answer, text.vocab_size)
        # Both in float32, of which the transformers host's sums are in another order.
        assert (p.exp() * (p - q)).sum(-1).mean() < 1e-6


def test_masks_of_images_cut_prefixes_in_sglangs_own_kernel(run_program: RunProgram) -> None:
    done = run_program(str(Path(__file__).parents[1] / "programs" / "mask_program.py"))
    assert done.returncode == 0, done.stderr[-3000:]
