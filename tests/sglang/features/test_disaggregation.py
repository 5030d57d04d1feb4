"""Disaggregation: one server computes prompts, another answers from the rows that it is sent, as one alone does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from sglang_server import Pair, free_port
from transformers import AutoConfig

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import (
        MixedLayers,
        ModelFolder,
        ProfileOf,
        Prompts,
        Refused,
        SaveProfile,
        Serve,
        ServePair,
    )
    from sglang_server import Server

TOKENS = 24
LONG = 130


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    return model_folder("llama-gqa", num_hidden_layers=4)


@pytest.fixture(scope="module")
def flags(folder: Path, profile_of: ProfileOf, mixed_layers: MixedLayers, save_profile: SaveProfile) -> tuple[str, ...]:
    """The flags of a profile whose layers and sides have rows of many lengths, one of them unquantized."""
    config = AutoConfig.from_pretrained(folder)
    return ("--kvtuner-profile", str(save_profile(profile_of(config, mixed_layers(config)))))


def answers_of(server: Server | Pair, prompts: list[list[int]]) -> list[list[int]]:
    """What each prompt is answered, first alone and then all at once, which must be the same."""
    alone = [server.generate([prompt], TOKENS)[0]["output_ids"] for prompt in prompts]
    assert [answer["output_ids"] for answer in server.generate(prompts, TOKENS)] == alone
    return alone


@pytest.mark.parametrize(
    "options",
    [
        ("--kvtuner-attend", "cache", "--page-size", "1", "--chunked-prefill-size", "32"),
        pytest.param(("--kvtuner-attend", "fresh", "--page-size", "16"), marks=pytest.mark.full),
        ("--kvtuner-attend", "cache", "--page-size", "16", "--tp-size", "2"),
    ],
    ids=["tokens in chunks", "pages", "pages of two ranks"],
)
def test_two_servers_answer_as_one_alone(
    options: tuple[str, ...],
    folder: Path,
    flags: tuple[str, ...],
    prompts: Prompts,
    serve: Serve,
    serve_pair: ServePair,
) -> None:
    asked = prompts(40, 9, 70)
    with serve(folder, *flags, *options, "--disable-radix-cache") as server:
        alone = answers_of(server, asked)
    # By fresh a hit is read otherwise than what is computed.
    prefill = ["--disable-radix-cache"] if "fresh" in options else []
    with serve_pair(folder, *flags, *options, prefill=prefill) as pair:
        assert answers_of(pair, asked) == alone
        ranks = 2 if "--tp-size" in options else 1
        assert pair.prefill.log.count("self-test passed") == pair.decode.log.count("self-test passed") == ranks


def test_answers_that_a_decode_server_interrupts_go_on_from_their_rows(
    folder: Path, flags: tuple[str, ...], prompts: Prompts, serve: Serve, serve_pair: ServePair
) -> None:
    growing = prompts(*[40] * 6, seed=9)
    reading = (*flags, "--kvtuner-attend", "cache")
    small = ("--max-total-tokens", "512", "--schedule-conservativeness", "0.1", "--num-reserved-decode-tokens", "8")
    with serve(folder, *reading, "--disable-radix-cache") as server:
        alone = [answer["output_ids"] for answer in server.generate(growing, LONG)]
    with serve_pair(folder, *reading, decode=small) as pair:
        assert [answer["output_ids"] for answer in pair.generate(growing, LONG)] == alone
        assert "Retract requests" in pair.decode.log


def test_a_decode_server_fails_requests_of_servers_that_do_not_fit_and_serves_on(
    folder: Path, flags: tuple[str, ...], prompts: Prompts, serve: Serve, serve_pair: ServePair
) -> None:
    (ids,) = prompts(40)
    reading = (*flags, "--kvtuner-attend", "cache", "--page-size", "16")
    others = {
        (*flags, "--kvtuner-attend", "fresh", "--page-size", "16"): "attend=fresh float32, but decode server has",
        ("--page-size", "16", "--attention-backend", "triton"): "packed by kvtuner, sha256:",
        (*reading, "--tp-size", "2"): "split over 2 ranks, and that of this decode server over 1",
    }
    with serve_pair(folder, *reading) as pair:
        answer = answers_of(pair, [ids])
        for options, reason in others.items():
            port = str(pair.bootstrap_port + 1)
            side = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", port)
            with serve(folder, *options, *side) as other:
                misfitting = replace(pair, prefill=other, bootstrap_port=int(port))
                refusal = misfitting.refusal(ids)
            assert f"kvtuner: the prefill server at 127.0.0.1:{port} does not fit: " in refusal
            assert reason in refusal
        assert answers_of(pair, [ids]) == answer


@pytest.mark.full
def test_a_decode_server_without_a_profile_refuses_packed_rows(
    folder: Path, flags: tuple[str, ...], prompts: Prompts, serve: Serve
) -> None:
    port = str(free_port())
    side = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", port)
    unpacked = ("--attention-backend", "triton", "--disaggregation-mode", "decode")
    with serve(folder, *flags, *side) as prefill, serve(folder, *unpacked) as decode:
        with pytest.raises(OSError):  # SGLang ends a decode server of another cache
            Pair(prefill, decode, int(port)).generate(prompts(40), 2)
        assert "KV cache dtype mismatch" in decode.log


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--disaggregation-transfer-backend", "nixl"), "no test moved packed rows by it"),
        (("--disaggregation-decode-retraction-backup", "host_pool"), "its host pool holds rows of one width"),
        (("--disaggregation-decode-enable-radix-cache",), "it was never tried"),
    ],
    ids=str,
)
def test_what_does_not_work_beside_it_is_refused_by_name(
    options: tuple[str, ...], reason: str, folder: Path, flags: tuple[str, ...], refused: Refused
) -> None:
    line = refused(folder, *flags, "--disaggregation-mode", "decode", *options)
    assert line.startswith(f"{' '.join(options)} does not work with disaggregation of a packed KV pool: {reason}")
