"""OpenAI's own client gets the engine's answers over HTTP, and a clear error for what cannot be."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from kvtuner.runtime_loader.engine.generation import SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "the fox counts"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def answer_of_engine(served: Any, prompt: Any = PROMPT, num_tokens: int = 8, **more: Any) -> Any:
    """What the engine itself answers, by way of its front."""
    import asyncio

    async def ask() -> Any:
        stream = await served.front.submit(
            prompt, SamplingParameters(**{"max_tokens": num_tokens, "ignore_eos": True, **more})
        )
        return await stream.completion()

    return asyncio.run(ask())


def test_a_completion_is_the_engines_whole_and_streamed(served: Any) -> None:
    client, wanted = served.client(), answer_of_engine(served)
    whole = client.completions.create(prompt=PROMPT, max_tokens=8, **GREEDY)
    assert whole.choices[0].text == wanted.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.model == "tiny"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(wanted.prompt_token_ids), 8)
    chunks = list(
        client.completions.create(
            prompt=list(wanted.prompt_token_ids),
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == wanted.text
    assert len(chunks) > 5
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_a_chat_goes_through_the_template(served: Any) -> None:
    from kvtuner.runtime_loader.openai_server.chat_prompt import chat_tokens

    messages: list[Any] = [{"role": "system", "content": "sail"}, {"role": "user", "content": PROMPT}]
    tokens = chat_tokens(served.engine.tokenizer, messages)
    wanted = answer_of_engine(served, tokens)
    in_parts = [messages[0], {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    client = served.client()
    whole = client.chat.completions.create(messages=in_parts, max_completion_tokens=8, **GREEDY)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", wanted.text)
    assert whole.usage.prompt_tokens == len(tokens)
    chunks = list(client.chat.completions.create(messages=messages, max_tokens=8, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_without_a_number_has_the_room_there_is(served: Any) -> None:
    answer = served.client().chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == served.engine.context_length


def test_n_answers_have_seeds_that_follow_one_another(served: Any) -> None:
    client = served.client()
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    three = client.completions.create(n=3, seed=5, temperature=2.0, **asked)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({choice.text for choice in three.choices}) == 3
    for number, choice in enumerate(three.choices):
        assert choice.text == client.completions.create(seed=5 + number, temperature=2.0, **asked).choices[0].text
    texts = ["", "", ""]
    for chunk in client.completions.create(n=3, seed=5, temperature=2.0, stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in three.choices]
    assert three.usage.completion_tokens == 18
    assert three.usage.prompt_tokens == len(answer_of_engine(served).prompt_token_ids)


def test_several_prompts_are_answered_in_their_order(served: Any) -> None:
    prompts = ["one", "a longer one that comes second", "three"]
    answer = served.client().completions.create(prompt=prompts, max_tokens=5, n=2, **GREEDY)
    wanted = [answer_of_engine(served, prompt, 5).text for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == wanted


def test_an_answer_ends_at_a_text_to_stop_at(served: Any) -> None:
    whole = answer_of_engine(served, num_tokens=12).text
    stop = whole[3:5]
    answer = served.client().completions.create(prompt=PROMPT, max_tokens=12, stop=[stop], **GREEDY)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_are_the_engines_with_those_of_the_prompt(served: Any) -> None:
    wanted = answer_of_engine(served, logprobs=2, prompt_logprobs=2)
    answer = served.client().completions.create(prompt=PROMPT, max_tokens=8, logprobs=2, echo=True, **GREEDY)
    choice = answer.choices[0]
    assert choice.text == PROMPT + wanted.text
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    entries = [*wanted.prompt_logprobs, *wanted.logprobs]
    assert logprobs.token_logprobs[1:] == pytest.approx([entry.logprob for entry in entries], abs=1e-5)
    for number, entry in enumerate(entries, 1):
        assert max(logprobs.top_logprobs[number].values()) == pytest.approx(max(dict(entry.top).values()), abs=1e-5)
    decode = served.engine.tokenizer.decode
    assert logprobs.tokens == [decode([token]) for token in (*wanted.prompt_token_ids, *wanted.token_ids)]
    assert logprobs.text_offset[:3] == [0, len(logprobs.tokens[0]), len(logprobs.tokens[0] + logprobs.tokens[1])]
    prompt_alone = served.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    ).json()
    assert prompt_alone["choices"][0]["text"] == PROMPT
    assert len(prompt_alone["choices"][0]["logprobs"]["tokens"]) == len(wanted.prompt_token_ids)
    assert prompt_alone["usage"]["completion_tokens"] == 0
    chunks = list(
        served.client().completions.create(prompt=PROMPT, max_tokens=8, logprobs=2, echo=True, stream=True, **GREEDY)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset] == logprobs.text_offset


def test_a_chat_tells_log_probabilities(served: Any) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    answer = served.client().chat.completions.create(
        messages=messages, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 4
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert len(entry.top_logprobs) == 3
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


def test_models_health_and_what_is_not_there(served: Any) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvtuner"
    assert httpx.get(f"{served.url}/health", trust_env=False).status_code == 200
    with pytest.raises(openai.NotFoundError, match="there is no model 'large'; this server has 'tiny'"):
        client.completions.create(model="large", prompt=PROMPT)
    nowhere = httpx.get(f"{served.url}/nowhere", trust_env=False)
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx.get(f"{served.url}/v1/completions", trust_env=False).status_code == 405


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {}, "prompt: Field required"),
        ("completions", {"prompt": []}, "prompt must not be empty"),
        ("completions", {"prompt": ""}, "a prompt needs at least one token"),
        ("completions", {"prompt": [999]}, "token 999 is outside of the vocabulary of 320"),
        ("completions", {"prompt": "x", "temperature": -1}, "temperature must be at least 0, not -1"),
        ("completions", {"prompt": "x", "temperature": "0"}, "temperature: Input should be a valid number"),
        ("completions", {"prompt": "x", "n": 0}, "n: Input should be greater than or equal to 1"),
        ("completions", {"prompt": "x", "n": 65}, "65 answers are asked for at once, and at most 64"),
        ("completions", {"prompt": "x", "best_of": 2}, "best_of must be n, 1, not 2"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1 without echo"),
        ("completions", {"prompt": "x", "max_tokens": 9999}, "more than the context of 512"),
        ("completions", {"prompt": "x", "logprobs": 101}, "logprobs must be at least 0 and at most 100"),
        ("completions", {"prompt": "x", "stop": [""]}, "a text to stop at must not be empty"),
        ("completions", {"prompt": "x", "logit_bias": {"1": 2}}, "this server does not take logit_bias; leave it out"),
        ("completions", [1], "the body: Input should be a valid dictionary or object"),
        ("chat/completions", {"messages": []}, "messages: List should have at least 1 item"),
        ("chat/completions", {"messages": [{"role": "pirate", "content": "x"}]}, "messages.0.role: Input should be"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
            "this server does not take tools",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
            "top_logprobs needs logprobs",
        ),
    ],
)
def test_bad_input_is_refused_by_name_and_place(path: str, body: Any, message: str, served: Any) -> None:
    answer = served.post(f"/v1/{path}", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert served.is_idle()


def test_bodies_that_are_no_json_or_too_large_are_refused(served: Any) -> None:
    url, headers = f"{served.url}/v1/completions", {"Content-Type": "application/json"}
    broken = httpx.post(url, content=b'{"prompt": ', headers=headers, trust_env=False)
    assert (broken.status_code, "the body is not JSON" in broken.json()["error"]["message"]) == (400, True)
    large = httpx.post(url, content=b'{"prompt": "' + (17 << 20) * b"x" + b'"}', headers=headers, trust_env=False)
    assert large.status_code == 413


def test_nulls_are_defaults(served: Any) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "stop": None, "logprobs": None, "user": "me"}
    assert served.post("/v1/completions", body).status_code == 200


def test_a_key_is_asked_for_where_there_is_one(serve: Callable[..., Any]) -> None:
    with serve(api_key="s3cr3t") as served:
        assert served.client().completions.create(prompt=PROMPT, max_tokens=2, **GREEDY).choices[0].text
        for key in ("wrong", "s3cr3t2"):
            with pytest.raises(openai.AuthenticationError, match="send the server's API key as a bearer token"):
                served.client(api_key=key).completions.create(prompt=PROMPT, **GREEDY)
        assert served.post("/v1/chat/completions", {}).status_code == 401
        assert httpx.get(f"{served.url}/v1/models", trust_env=False).status_code == 401
        for path in ("/health", "/metrics"):
            assert httpx.get(served.url + path, trust_env=False).status_code == 200


def test_clients_that_go_away_free_their_pages(serve: Callable[..., Any]) -> None:
    with serve(max_requests=4) as served:
        for is_stream in (True, False):
            body = {"prompt": PROMPT, "max_tokens": 480, "n": 3, "ignore_eos": True, "stream": is_stream}
            with httpx.Client(trust_env=False) as client:
                if is_stream:
                    with client.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
                        assert next(answer.iter_lines()).startswith("data: ")
                        assert served.front.num_unfinished == 3
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        client.post(f"{served.url}/v1/completions", json=body, timeout=0.2)
            started = served.engine.state.num_answer_tokens
            assert served.is_idle()
            assert served.engine.state.num_answer_tokens - started < 3 * 400, "they went on to their end"
        text = httpx.get(f"{served.url}/metrics", trust_env=False).text
        assert 'sglang:num_aborted_requests_total{model_name="tiny"} 6.0' in text


def test_one_more_than_may_be_is_told_to_come_again(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(most_requests=2) as served:
        client, step = served.client(), served.engine.step

        def step_slowly() -> Any:
            time.sleep(0.03)  # so that what is endless outlasts whatever else keeps this machine busy
            return step()

        monkeypatch.setattr(served.engine, "step", step_slowly)
        endless: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 480, "stream": True, **GREEDY}
        first, second = client.completions.create(**endless), client.completions.create(**endless)
        with pytest.raises(openai.RateLimitError, match="2 requests are unfinished, as many as may be") as refused:
            client.completions.create(prompt=PROMPT, max_tokens=1, **GREEDY)
        assert refused.value.response.headers["Retry-After"] == "1"
        first.close()
        again = served.client(max_retries=4).completions.create(prompt=PROMPT, max_tokens=1, **GREEDY)
        assert again.choices[0].finish_reason == "length"
        second.close()
        assert served.is_idle()
        # Those of a request that did not all find room leave none behind.
        third = client.completions.create(**endless)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(prompt=[PROMPT, "x"], max_tokens=1, **GREEDY)
        assert served.comes_to(1)
        third.close()


def test_an_engine_that_failed_is_unhealthy(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with serve() as served:
        monkeypatch.setattr(served.engine, "step", fail)
        answer = served.post("/v1/completions", {"prompt": PROMPT, "stream": True})
        assert answer.status_code == 200
        assert "the engine failed: out of memory" in answer.text
        assert "[DONE]" not in answer.text
        answer = served.post("/v1/completions", {"prompt": PROMPT})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert httpx.get(f"{served.url}/health", trust_env=False).status_code == 503
