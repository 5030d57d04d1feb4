"""Models that read images: a server with a profile answers as transformers does with it, about text and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tiny.image_models import KINDS, Picture, save_image_model
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.quant import Transform
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import Json, MakeTokenizer, ProfileOf, SaveProfile, Serve
    from sglang_server import Server

    from kvtuner.exported_configs.profile.profile import Profile

TOKENS = 24
PICTURES = [Picture((200, 30, 40)), Picture((20, 220, 90)), Picture((240, 240, 230), before="when ")]
HADAMARD = Transform(TransformKind.parse("hadamard"))


def ask(server: Server, picture: Picture, top: int) -> Json:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {**picture.request, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": top}
    answer: Json = server.post("/generate", body)
    return answer


@torch.no_grad()
def log_probs(model: Any, cache: Any, inputs: dict[str, torch.Tensor], fed: list[int]) -> torch.Tensor:
    """The host's predictions [tokens, vocabulary] as it reads a server's own tokens."""
    rows = [model(**inputs, past_key_values=cache, use_cache=True)]
    for token in fed[:-1]:
        rows.append(model(torch.tensor([[token]]), past_key_values=rows[-1].past_key_values, use_cache=True))
    return torch.stack([row.logits[0, -1] for row in rows]).double().log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_answered_as_by_the_transformers_host(
    kind: str, make_tokenizer: MakeTokenizer, profile_of: ProfileOf, save_profile: SaveProfile, serve: Serve,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = save_image_model(kind, make_tokenizer(), tmp_path / kind)
    layers = [LayerQuantization(4, 4, HADAMARD, HADAMARD), LayerQuantization(8, 3), LayerQuantization(3, 8, HADAMARD)]
    profile: Profile = profile_of(AutoConfig.from_pretrained(folder), layers)
    model = getattr(transformers, f"{kind}ForConditionalGeneration").from_pretrained(folder, dtype=torch.float32).eval()
    vocab_size = model.config.text_config.vocab_size
    flags = ("--kvtuner-profile", str(save_profile(profile)), "--skip-server-warmup")
    with serve(folder, *flags) as server:
        answers = []
        for picture in PICTURES:
            server.flush()
            answers.append(ask(server, picture, vocab_size))
        server.flush()
        cached = [ask(server, picture, 1)["meta_info"]["cached_tokens"] for picture in (*PICTURES[:2], PICTURES[0])]
        assert "self-test passed" in server.log
    found, wanted, exact = [], [], []
    for picture, answer in zip(PICTURES, answers, strict=True):
        inputs = picture.inputs(folder)
        assert answer["meta_info"]["prompt_tokens"] == inputs["input_ids"].shape[1]
        served = torch.full((TOKENS, vocab_size), torch.nan, dtype=torch.float64)
        for position, top in enumerate(answer["meta_info"]["output_top_logprobs"]):
            served[position, [token for _, token, _ in top]] = torch.tensor([p for p, _, _ in top]).double()
        found.append(served)
        cache = KVTunerCache.from_profile(profile, model.config)
        wanted.append(log_probs(model, cache, inputs, answer["output_ids"]))
        exact.append(log_probs(model, None, inputs, answer["output_ids"]))
    # Another picture in the same text is another prefix.
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    first = int(PICTURES[0].inputs(folder)["mm_token_type_ids"][0].argmax())
    assert cached[0] == 0 < cached[1] <= first < cached[2]
    p, q, unquantized = torch.cat(wanted), torch.cat(found), torch.cat(exact)
    own = (unquantized.exp() * (unquantized - p)).sum(-1).mean().item()
    divergence = (p.exp() * (p - q)).sum(-1).mean().item()
    assert own > 1e-4, "the profile must change something"
    # As the design defines agreement, but for the share of equal tokens: there are 72.
    assert divergence <= 0.02 * own + 1e-6
    assert (p.argmax(-1) == q.argmax(-1)).double().mean() >= 0.98
