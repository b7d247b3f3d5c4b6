"""The server as the `openai` package sees it, unmodified: every route, streamed and not, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import otaro
from otaro.engine.scoring import scores
from otaro.precision import Precision
from tests.serving import SAY, Served, open_tiny, serving

SAID = [{"role": "user", "content": "Say something"}]
NAMES = ["tiny-llama", *(f"tiny-llama@{width}" for width in Precision)]


@pytest.fixture(scope="module")
def served(packed_llama: Path) -> Iterator[Served]:
    with serving(open_tiny(packed_llama)) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def engine(packed_llama: Path) -> otaro.Engine:
    return otaro.Engine(packed_llama, threads=1)


def alone(engine: otaro.Engine, precision: str = "E5M8", tokens: int = 12, **settings: Any) -> str:
    """The answer that the engine gives by itself."""
    engine.precision = precision  # type: ignore[assignment]
    return engine.chat(SAID, max_new_tokens=tokens, **settings).text


def test_metrics_count_tokens_prompts_and_every_answer(packed_llama: Path) -> None:
    with serving(open_tiny(packed_llama)) as served:
        body = {"model": "tiny-llama@E5M4", "prompt": "Once", "max_tokens": 3, "n": 2, "temperature": 1}
        used = served.client.post("/v1/completions", json=body).json()["usage"]
        text = served.client.get("/metrics").text
        counts = dict(line.rsplit(maxsplit=1) for line in text.splitlines() if not line.startswith("#"))
        ended = sum(float(count) for name, count in counts.items() if name.startswith("otaro_answers_total"))
        assert ended == 2
        assert float(counts['otaro_generated_tokens_total{width="E5M4"}']) == used["completion_tokens"]
        assert float(counts["otaro_prompt_tokens_total"]) > 0
        assert float(counts["otaro_answer_seconds_count"]) == 1


# ---- models


def test_models_are_the_model_and_the_model_at_each_precision(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == NAMES
    assert client.models.retrieve("tiny-llama@E5M4").object == "model"
    with pytest.raises(openai.NotFoundError, match="no model tiny-llama@E5M9"):
        client.models.retrieve("tiny-llama@E5M9")


def test_only_precisions_on_disk_are_listed(packed_llama: Path, tmp_path: Path) -> None:
    otaro.cut(packed_llama, tmp_path / "small", "E5M4")
    with serving(open_tiny(tmp_path / "small")) as served:
        assert [entry["id"] for entry in served.client.get("/v1/models").json()["data"]] == [
            "small",
            "small@E5M4",
            "small@E5M3",
        ]
        refused = served.post("/v1/chat/completions", {**SAY, "precision": "E5M8"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "precision"
        assert "E5M4, E5M3" in refused.json()["error"]["message"]


# ---- chats


@pytest.mark.parametrize("model", NAMES[1:])
def test_a_chat_says_what_the_engine_says_at_that_precision(
    client: openai.OpenAI, engine: otaro.Engine, model: str
) -> None:
    answer = client.chat.completions.create(model=model, messages=SAID, temperature=0, max_completion_tokens=12)
    assert answer.choices[0].message.content == alone(engine, model.partition("@")[2])
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", model)
    assert answer.usage is not None
    prompt = answer.usage.prompt_tokens
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, prompt + 12)
    assert answer.model_extra is not None
    assert answer.model_extra["otaro"] == {"widths": {model.partition("@")[2]: 12}}


def test_precision_can_be_a_field_of_the_body(client: openai.OpenAI, engine: otaro.Engine) -> None:
    def ask(precision: Any) -> Any:
        return client.chat.completions.create(
            model="tiny-llama", messages=SAID, temperature=0, max_tokens=12, extra_body={"precision": precision}
        )

    assert ask("E5M3").choices[0].message.content == alone(engine, "E5M3")
    answer = ask({"prefill": "E5M3", "decode": "E5M6"})
    assert answer.choices[0].message.content == alone(engine, "E5M6", prefill="E5M3")
    assert ask("auto").otaro["widths"] == {"E5M8": 12}  # nobody waits
    for wrong, words in (("E5M9", "unknown precision"), ({"decode": "FP8"}, "unknown precision"), ("", "unknown")):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            ask(wrong)
        assert (caught.value.param, caught.value.code) == ("precision", "precision_not_available")
    with pytest.raises(openai.BadRequestError, match="leave out precision"):
        client.chat.completions.create(model="tiny-llama@E5M4", messages=SAID, extra_body={"precision": "E5M8"})


def test_a_stream_comes_in_openais_order(served: Served, client: openai.OpenAI, engine: otaro.Engine) -> None:
    body = {"stream_options": {"include_usage": True}, "max_tokens": 12}
    with served.stream(body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["delta"] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(chunks) - 2) + ["length"]
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks[1:-2])
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == alone(engine)
    assert chunks[-2]["otaro"] == {"width": "E5M8", "tokens": 12}

    streamed = client.chat.completions.create(
        model="tiny-llama", messages=SAID, temperature=0, max_tokens=12, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text


def test_several_answers_differ_by_their_seeds_alone(client: openai.OpenAI) -> None:
    def ask(**settings: Any) -> list[str | None]:
        found = client.chat.completions.create(
            model="tiny-llama", messages=SAID, max_tokens=12, temperature=1.5, **settings
        )
        assert [choice.index for choice in found.choices] == list(range(len(found.choices)))
        return [choice.message.content for choice in found.choices]

    several = ask(n=3, seed=-7)
    assert len({*several}) == 3
    assert several == [ask(seed=seed)[0] for seed in (-7, -6, -5)]
    streamed = client.chat.completions.create(
        model="tiny-llama", messages=SAID, max_tokens=12, temperature=1.5, n=3, seed=-7, stream=True
    )
    texts = ["", "", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == several


def test_an_answer_ends_before_a_stop_string(client: openai.OpenAI, engine: otaro.Engine) -> None:
    text = alone(engine, tokens=30)
    stop = text[10:13]
    for settings in ({"stop": stop}, {"stop": ["never there", stop]}):
        answer = client.chat.completions.create(
            model="tiny-llama", messages=SAID, temperature=0, max_tokens=30, **settings
        )
        assert answer.choices[0].message.content == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    def ask(stream: bool) -> list[Any]:
        found = client.chat.completions.create(
            model="tiny-llama", messages=SAID, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3, stream=stream
        )
        choices = [chunk.choices[0] for chunk in found] if stream else found.choices
        return [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]

    whole = ask(False)
    assert len(whole) == 8
    for entry in whole:
        assert [entry.token, entry.logprob] == [entry.top_logprobs[0].token, entry.top_logprobs[0].logprob]
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) < 1
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    assert ask(True) == whole


def test_tools_and_parts_reach_the_template(packed_llama: Path) -> None:
    service = open_tiny(packed_llama)
    service.tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for message in messages %}{{ message.role }}:{{ message.content }}"
        "{% for call in message.tool_calls or [] %}({{ call.function.arguments.city }}){% endfor %};{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    with serving(service) as served:

        def length(**settings: Any) -> int:
            answer = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **settings})
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens"]

        said = "system:be brief;assistant:(Oslo);tool:rain;"
        assert length() == len(said)  # one token for every byte
        assert length(tools=[tool], tool_choice="auto") == len("[weather]" + said)
        assert length(tools=[tool], tool_choice="none") == len(said)


# ---- completions


def test_a_completion_goes_on_from_a_text_or_tokens(client: openai.OpenAI, engine: otaro.Engine) -> None:
    engine.precision = Precision.E5M4
    expected = [engine.generate(text, raw=True, max_new_tokens=10).text for text in ("Once upon", "There was")]

    def ask(prompt: Any, **settings: Any) -> Any:
        settings = {"max_tokens": 10, **settings}
        return client.completions.create(model="tiny-llama@E5M4", prompt=prompt, temperature=0, **settings)

    ids = engine.tokenizer(["Once upon", "There was"])["input_ids"]
    assert ask("Once upon").choices[0].text == expected[0]
    assert ask(ids[0]).choices[0].text == expected[0]
    for prompts in (["Once upon", "There was"], ids):
        assert [choice.text for choice in ask(prompts, n=2).choices] == [text for text in expected for _ in range(2)]
    assert ask(ids, n=2).usage.prompt_tokens == 2 * len("Once upon")
    streamed = list(ask("Once upon", stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected[0]
    assert streamed[-1].choices[0].finish_reason == "length"
    assert ask("Once upon", max_tokens=None).usage.completion_tokens == 16


def test_log_probabilities_of_completions(client: openai.OpenAI, engine: otaro.Engine) -> None:
    engine.precision = Precision.E5M8
    answer = client.completions.create(
        model="tiny-llama", prompt="Once upon", temperature=0, max_tokens=5, logprobs=2, echo=True
    ).choices[0]
    found = answer.logprobs
    assert found is not None
    assert found.tokens is not None
    assert answer.text.startswith("Once upon")
    assert "".join(found.tokens[:9]) == "Once upon"
    assert found.text_offset == [sum(map(len, found.tokens[:place])) for place in range(14)]
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    ids = engine.tokenizer("Once upon")["input_ids"]
    assert found.token_logprobs[1:9] == pytest.approx([value for value, _ in scores(engine, ids)])
    assert found.top_logprobs is not None
    for value, top in zip(found.token_logprobs[9:], found.top_logprobs[9:], strict=True):
        assert value == max(top.values())  # the likeliest was taken
        assert len(top) <= 2


def test_a_scored_prompt_is_followed_by_a_token_even_if_it_is_the_end(packed_llama: Path) -> None:
    """lm-eval takes the last entry for the one token it asked for."""
    service = open_tiny(packed_llama)
    service.end = list(range(service.engine.weights.model.shape.vocabulary))
    body = {"prompt": "Once upon", "max_tokens": 1, "logprobs": 1, "temperature": 0}
    with serving(service) as served:
        scored = served.post("/v1/completions", {**body, "echo": True}).json()["choices"][0]
        assert len(scored["logprobs"]["tokens"]) == len("Once upon") + 1
        ended = served.post("/v1/completions", body).json()["choices"][0]
        assert (ended["text"], ended["finish_reason"]) == ("", "stop")


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "param", "code"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"extra_body": {"grammar": "x"}}, "grammar", "unknown_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"stop": [""]}, "stop.0", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", None),
        ({"model": "gpt-4o"}, "model", "model_not_found"),
        ({"messages": [{"role": "user", "content": "long " * 100}]}, None, "context_length_exceeded"),
    ],
)
def test_what_the_server_does_not_have_is_refused_by_name(
    client: openai.OpenAI, settings: dict[str, Any], param: str | None, code: str | None
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{"model": "tiny-llama", "messages": SAID, **settings})
    assert caught.value.status_code == (404 if code == "model_not_found" else 400)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert code is None or caught.value.code == code
    assert "\n" not in caught.value.body["message"]  # type: ignore[index]


def test_an_answer_ends_with_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny-llama", messages=SAID, temperature=0, max_tokens=100_000)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 128
    assert answer.choices[0].finish_reason == "length"


def test_what_asks_for_nothing_is_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny-llama",
        messages=SAID,
        max_tokens=1,
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
        user="somebody",
        store=False,
        n=1,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
