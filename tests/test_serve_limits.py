"""What the server does not let happen: large bodies, strangers, one client before all others, answers nobody reads."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from otaro.errors import OtaroError
from otaro.serve import completions
from otaro.serve.problems import Problem
from otaro.serve.queue import Queue
from otaro.serve.service import LONG_PROMPT, Limits
from tests.serving import SAY, Paced, PacedRunning, Served, open_paced, open_tiny, serving, until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(packed_llama: Path) -> Iterator[Served]:
    """A server with the usual limits and a scheduler whose answers are empty at once."""
    service, paced = open_paced(packed_llama)
    submit = paced.submit

    def end_at_once(request: Any, on_token: Any) -> PacedRunning:
        running = submit(request, on_token)
        running.end("stop")
        return running

    paced.submit = end_at_once  # type: ignore[method-assign]
    with serving(service) as served:
        yield served


def refused(response: httpx2.Response, status: int, *words: str) -> dict[str, Any]:
    """An error in OpenAI's shape, one sentence long."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    for word in words:
        assert word in error["message"]
    return dict(error)


# ---- bodies


def test_a_large_body_is_refused_before_it_is_read(served: Served) -> None:
    refused(served.client.post(CHAT, content=b"x" * 10_000_000), 413, "larger than 2097152 bytes")
    sent = []
    pieces = (sent.append(number) or b"x" * 65536 for number in range(16_000))  # a gigabyte, not told beforehand
    refused(served.client.post(CHAT, content=pieces, headers={"Content-Type": "application/json"}), 413)
    assert len(sent) < 2000
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="tiny", prompt="x" * 10_000_000)
        assert caught.value.status_code == 413


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages":' * 5000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_not_a_request_is_one_sentence(served: Served, content: bytes) -> None:
    refused(served.client.post(CHAT, content=content, headers={"Content-Type": "application/json"}), 400)


def test_what_no_page_may_send_unasked_is_refused(served: Served) -> None:
    """A form or a page of another site can send text, but not JSON without being asked first."""
    body = json.dumps(SAY).encode()
    refused(served.client.post(CHAT, content=body, headers={"Content-Type": "text/plain"}), 400)
    assert served.client.post(CHAT, content=body, headers={"Content-Type": "application/json"}).status_code == 200


def test_tools_that_are_nested_too_deeply_are_refused(served: Served) -> None:
    deep = '{"a": ' * 100_000 + "1" + "}" * 100_000
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    body = json.dumps({**SAY, "tools": []}).replace('"tools": []', f'"tools": [{tool}]')
    refused(served.client.post(CHAT, content=body, headers={"Content-Type": "application/json"}), 400)


def test_other_addresses_have_nothing(served: Served) -> None:
    refused(served.client.get("/v1/embeddings"), 404, "/v1/embeddings")
    refused(served.client.get("/../../etc/passwd"), 404)
    refused(served.client.get("/page/../page.js/..%2f..%2fserver.py"), 404)
    refused(served.client.delete("/v1/models"), 405, "DELETE")
    refused(served.client.put("/v1/precision/..%2F..%2Fx", json={"precision": "E5M4"}), 404)


def test_a_prompt_must_have_tokens_of_the_model(served: Served) -> None:
    refused(served.post("/v1/completions", {"prompt": ""}), 400, "no tokens")
    refused(served.post("/v1/completions", {"prompt": [5, 100_000]}), 400, "100000", "vocabulary")
    assert refused(served.post("/v1/completions", {"prompt": "a" * 200}), 400)["code"] == "context_length_exceeded"


def test_the_server_limits_tokens(packed_llama: Path) -> None:
    with serving(open_tiny(packed_llama, limits=Limits(tokens=5))) as served:
        for body in (SAY, {**SAY, "max_tokens": 6}):
            answer = served.post(CHAT, body).json()
            assert answer["usage"]["completion_tokens"] == 5
            assert answer["choices"][0]["finish_reason"] == "length"


def test_a_template_that_does_not_end_is_one_sentence(packed_llama: Path) -> None:
    service, _ = open_paced(packed_llama)
    service.tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with serving(service) as served:
        refused(served.post(CHAT, SAY), 400, "did not come to an end")
        assert served.client.get("/health").json()["status"] == "ok"


# ---- who may come in


def test_a_key_is_asked_for(packed_llama: Path) -> None:
    service, _ = open_paced(packed_llama)
    with serving(service, keys=["open"]) as served:
        for given in (None, "Bearer wrong", "open", "Basic open"):
            headers = {} if given is None else {"Authorization": given}
            for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/metrics"), ("PUT", "/v1/precision")):
                error = refused(served.client.request(method, path, headers=headers, json=SAY), 401, "Bearer")
                assert error["code"] == "invalid_api_key"
        assert served.client.get("/v1/models", headers={"Authorization": "Bearer open"}).status_code == 200
        for path in ("/", "/page.js", "/health"):
            assert served.client.get(path).status_code == 200
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="open") as client:
            assert list(client.models.list())


def test_other_sites_are_kept_out_unless_allowed(packed_llama: Path) -> None:
    service, _ = open_paced(packed_llama)
    elsewhere = {"Origin": "https://example.org"}
    with serving(service, hosts=["127.0.0.1", "localhost"]) as served:
        refused(served.client.put("/v1/precision", json={"precision": "E5M4"}, headers=elsewhere), 403, "--cors")
        refused(served.client.get("/v1/models", headers={"Origin": "null"}), 403)
        refused(served.client.get("/v1/models", headers={"Host": "rebound.example.org"}), 403, "own name")
        own = served.client.get("/v1/models", headers={"Origin": served.url})
        assert own.status_code == 200
        assert "access-control-allow-origin" not in own.headers
        preflight = {**elsewhere, "Access-Control-Request-Method": "POST"}
        assert served.client.options(CHAT, headers=preflight).status_code == 403
    service, _ = open_paced(packed_llama)
    with serving(service, origins=["https://example.org"]) as served:
        answer = served.client.get("/v1/models", headers=elsewhere)
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        assert served.client.options(CHAT, headers=preflight).status_code == 200
        refused(served.client.get("/v1/models", headers={"Origin": "https://example.com"}), 403)


def test_every_answer_says_what_a_browser_may_do_with_it(served: Served) -> None:
    for path in ("/", "/v1/models", "/nothing"):
        headers = served.client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


def test_nothing_that_was_said_is_in_the_log(
    packed_llama: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "xylophone"
    with serving(open_tiny(packed_llama)) as served:
        said = {"messages": [{"role": "user", "content": secret}], "max_tokens": 3}
        assert served.post(CHAT, said).status_code == 200
        assert served.post(CHAT, {**said, "precision": "E5M9"}).status_code == 400
        assert served.post(CHAT, {**said, secret: 1}).status_code == 400
        assert served.post("/v1/completions", {"prompt": secret * 100}).status_code == 400
        assert secret not in served.client.get("/metrics").text
    out, err = capfd.readouterr()
    assert "chatcmpl-" in caplog.text
    assert secret not in caplog.text + out + err


# ---- turns


class Crowd:
    """Clients that ask at the same time."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.taken = 0
        self._pool = ThreadPoolExecutor(32)
        self._count_takes()

    def ask(self, name: str, **body: Any) -> Future[httpx2.Response]:
        """A request that has reached the queue, or is answered."""
        headers = {"Authorization": f"Bearer {name}"}
        before = self.taken
        asked = self._pool.submit(self.served.post, CHAT, {**SAY, "max_tokens": 50, **body}, headers=headers)
        until(lambda: asked.done() or self.taken > before)
        return asked

    def _count_takes(self) -> None:
        take = self.served.service.queue.take

        async def counted(client: str, seats: int) -> None:
            turn = asyncio.ensure_future(take(client, seats))
            await asyncio.sleep(0)
            self.taken += 1
            await turn

        self.served.service.queue.take = counted  # type: ignore[method-assign]


@pytest.fixture
def crowd(packed_llama: Path) -> Iterator[tuple[Crowd, Paced]]:
    """Two answers at a time, three that wait, clients a, b and c."""
    service, paced = open_paced(packed_llama, Limits(seats=2, waiting=3))
    with serving(service, keys=["a", "b", "c"]) as served:
        yield Crowd(served), paced


def test_more_than_the_queue_holds_are_told_to_come_back(crowd: tuple[Crowd, Paced]) -> None:
    everyone, paced = crowd
    asked = [everyone.ask("a") for _ in range(5)]
    assert (everyone.served.service.queue.running, everyone.served.service.queue.waiting) == (2, 3)
    answer = everyone.ask("a").result(10)
    assert refused(answer, 429, "try again")["code"] == "rate_limit_exceeded"
    assert int(answer.headers["retry-after"]) > 0
    client = openai.OpenAI(base_url=f"{everyone.served.url}/v1", api_key="a", max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=SAY["messages"])  # type: ignore[arg-type]
    while not all(one.done() for one in asked):
        for running in paced.open:
            running.end("stop")
        time.sleep(0.01)
    assert [one.result().status_code for one in asked] == [200] * 5
    assert everyone.served.service.queue.running == 0


def test_turns_go_round_between_clients(crowd: tuple[Crowd, Paced]) -> None:
    everyone, paced = crowd
    first = [everyone.ask("a"), everyone.ask("a")]
    second = [everyone.ask("a", seed=1), everyone.ask("a", seed=2), everyone.ask("b", seed=3)]
    paced.open[0].end("stop")
    until(lambda: len(paced.all) == 3)
    assert paced.all[2].request.sampling.seed == 3  # b asked last and has nothing yet
    paced.open[0].end("stop")
    until(lambda: len(paced.all) == 4)
    assert paced.all[3].request.sampling.seed == 1
    for running in (*paced.open,):
        running.end("stop")
    until(lambda: len(paced.all) == 5)
    paced.open[0].end("stop")
    assert {one.result(10).status_code for one in first + second} == {200}


def test_a_client_that_fills_the_queue_makes_room_for_others(crowd: tuple[Crowd, Paced]) -> None:
    everyone, paced = crowd
    asked = [everyone.ask("a", seed=number) for number in range(5)]
    other = everyone.ask("b", seed=9)
    refused(asked[4].result(10), 429)  # the latest of the one that waits with most
    assert everyone.served.service.queue.waiting == 3
    assert not other.done()
    paced.open[0].end("stop")
    until(lambda: len(paced.all) == 3)
    assert paced.all[2].request.sampling.seed == 9


def test_several_answers_wait_for_as_many_seats(crowd: tuple[Crowd, Paced]) -> None:
    everyone, paced = crowd
    one, two = everyone.ask("a"), everyone.ask("b", n=2)
    assert len(paced.all) == 1
    paced.open[0].end("stop")
    until(lambda: len(paced.all) == 3)
    refused(everyone.ask("c", n=3).result(10), 400, "3 answers", "2 are possible")
    for running in paced.open:
        running.end("stop")
    assert len(two.result(10).json()["choices"]) == 2
    assert one.result(10).status_code == 200


# ---- clients that leave


def is_free(served: Served) -> bool:
    return served.service.queue.running == 0 and served.service.queue.waiting == 0 and served.service.answering == 0


def test_an_answer_ends_when_its_reader_leaves(packed_llama: Path) -> None:
    service, paced = open_paced(packed_llama, Limits(seats=1))
    with serving(service) as served, ExitStack() as reading:
        lines = reading.enter_context(served.stream({})).iter_lines()
        next(lines)
        paced.step(paced.open[0])
        waiting = httpx2.Client(base_url=served.url, timeout=0.3)
        with pytest.raises(httpx2.ReadTimeout):
            waiting.post(CHAT, json=SAY)  # waits for its turn, and goes
        waiting.close()
        until(lambda: service.queue.waiting == 0)
        reading.close()
        until(lambda: is_free(served))
        assert paced.all[0].finish_reason == "cancelled"
        assert len(paced.all) == 1
        with pytest.raises(httpx2.ReadTimeout):
            served.post(CHAT, SAY, timeout=0.3)  # not streamed, and gone before the end
        until(lambda: is_free(served))
        assert paced.all[1].finish_reason == "cancelled"


def test_a_client_that_is_killed_frees_its_seat(packed_llama: Path) -> None:
    service, paced = open_paced(packed_llama, Limits(seats=1))
    code = (
        "import http.client, json, sys\n"
        "connection = http.client.HTTPConnection(sys.argv[1])\n"
        "connection.request('POST', '/v1/chat/completions', sys.argv[2], {'Content-Type': 'application/json'})\n"
        "print(connection.getresponse().readline(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    body = json.dumps({**SAY, "stream": True})
    with serving(service) as served:
        command = [sys.executable, "-c", code, served.url.removeprefix("http://"), body]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert b"assistant" in client.stdout.readline()
        assert service.queue.running == 1
        client.send_signal(signal.SIGKILL)
        client.wait()
        until(lambda: is_free(served))
        assert paced.all[0].finish_reason == "cancelled"


def test_an_answer_ends_after_its_time(packed_llama: Path) -> None:
    service, paced = open_paced(packed_llama, Limits(seats=1, seconds=0.5))
    with serving(service) as served, served.stream({}) as response:
        until(lambda: paced.open)
        paced.step(paced.open[0], "x")
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line and "[DONE]" not in line]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "x"
        assert is_free(served)


def test_waiting_ends_after_its_time(packed_llama: Path) -> None:
    service, paced = open_paced(packed_llama, Limits(seats=1, seconds=0.2))
    with serving(service) as served:
        asyncio.run(service.queue.take("somebody", 1))  # who never gives it back
        refused(served.post(CHAT, SAY), 503, "no turn came")
        assert service.queue.waiting == 0
        assert not paced.all


def test_a_model_that_fails_is_an_error_and_no_more(packed_llama: Path) -> None:
    service, paced = open_paced(packed_llama)
    with serving(service) as served:
        with served.stream({}) as response:
            until(lambda: paced.open)
            paced.step(paced.open[0])
            paced.open[0].error = OtaroError("the model's logits are not finite")
            paced.open[0].end("error")
            lines = [line for line in response.iter_lines() if line]
        assert "not finite" in json.loads(lines[-1][6:])["error"]["message"]
        assert not any("[DONE]" in line for line in lines)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(served.post, CHAT, SAY)
            until(lambda: paced.open)
            paced.open[0].end("error")
            assert refused(asked.result(10), 500)["type"] == "server_error"
        assert is_free(served)


# ---- the end


def test_at_the_end_answers_are_finished_and_others_refused(packed_llama: Path) -> None:
    service, paced = open_paced(packed_llama, Limits(seats=1))
    with serving(service) as served, ThreadPoolExecutor(2) as pool, served.stream({}) as response:
        until(lambda: paced.open)
        waiting = pool.submit(served.post, CHAT, SAY)
        until(lambda: service.queue.waiting == 1)
        served.stop()
        refused(waiting.result(10), 503, "stopping")
        with pytest.raises(httpx2.TransportError):  # nobody listens any more
            until(lambda: httpx2.get(f"{served.url}/health") is None)
        paced.step(paced.open[0], "z")
        paced.open[0].end("stop")
        lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert any('"z"' in line for line in lines)
        served.thread.join(20)
        assert not served.thread.is_alive()


@pytest.mark.parametrize("twice", [False, True])
def test_an_answer_that_does_not_end_is_ended(packed_llama: Path, twice: bool) -> None:
    service, paced = open_paced(packed_llama, Limits(grace=30.0 if twice else 0.2))
    with serving(service) as served, served.stream({}) as response:
        until(lambda: paced.open)
        served.stop()
        if twice:
            served.stop()
        lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-1][6:])["error"]["code"] == "stopping"
        served.thread.join(20)
        assert not served.thread.is_alive()
    assert paced.closed


def test_a_seat_that_comes_free_as_a_client_leaves_goes_to_the_next() -> None:
    async def leave_and_free() -> None:
        queue = Queue(1, 10)
        await queue.take("first", 1)
        leaving, staying = (asyncio.ensure_future(queue.take(client, 1)) for client in ("leaving", "staying"))
        await asyncio.sleep(0)
        leaving.cancel()
        queue.give_back("first")  # in the same turn of the loop
        await asyncio.wait_for(staying, 5)
        assert (queue.running, queue.waiting) == (1, 0)
        leaving, staying = (asyncio.ensure_future(queue.take(client, 1)) for client in ("leaving", "staying"))
        await asyncio.sleep(0)
        leaving.cancel()
        queue.close()
        with pytest.raises(Problem, match="stopping"):
            await staying

    asyncio.run(leave_and_free())


def test_scoring_a_prompt_ends_with_its_time(packed_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any, ended: Any, **__: Any) -> None:
        while not ended():
            time.sleep(0.01)

    monkeypatch.setattr("otaro.serve.service.scores", endless)
    with serving(open_tiny(packed_llama, limits=Limits(seconds=1.5))) as served:
        asked = {"prompt": "a b c", "echo": True, "logprobs": 1, "max_tokens": 1}
        answer = served.post("/v1/completions", asked)
        assert answer.status_code == 503
        assert "in time" in answer.json()["error"]["message"]
        until(lambda: served.service.queue.running == 0)


# ---- prompts that take long, and requests for much


def test_a_request_for_many_seats_lets_others_pass() -> None:
    async def run() -> None:
        queue = Queue(4, 4)
        await queue.take("long", 1)
        many = asyncio.create_task(queue.take("many", 4))
        await asyncio.sleep(0)
        for client in ("many", "other", "third"):
            await asyncio.wait_for(queue.take(client, 1), 1)
        assert not many.done()
        for client in ("many", "other", "third", "long"):
            assert not many.done()
            queue.give_back(client)
        await asyncio.wait_for(many, 1)
        assert (queue.running, queue.waiting) == (4, 0)

    asyncio.run(run())


def test_a_prompt_that_cannot_fit_is_refused_unread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("otaro.serve.completions.encode_prompt", never)
    monkeypatch.setattr("otaro.serve.chat.render_chat", never)
    context, long = served.service.engine.context, "x" * 1_000_000
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": long}),
    ):
        error = refused(served.post(path, body), 400, f"context of {context} tokens")
        assert error["code"] == "context_length_exceeded"


def test_long_prompts_of_one_client_keep_no_other_waiting(packed_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter whether that client stays; and the server's end waits for none of them."""
    service, paced = open_paced(packed_llama)
    service._most_letters = 10**9
    goes_on, begun = threading.Event(), []
    encode = completions.encode_prompt

    def slow(tokenizer: Any, text: str) -> list[int]:
        if len(text) > LONG_PROMPT:
            begun.append(text)
            goes_on.wait(60)
            text = "long"
        return encode(tokenizer, text)

    monkeypatch.setattr(completions, "encode_prompt", slow)
    long = {"prompt": "x" * 100_000, "max_tokens": 2}
    with serving(service) as served, ThreadPoolExecutor(6) as pool, ExitStack() as leaving:
        answers = [pool.submit(served.post, "/v1/completions", long) for _ in range(5)]
        until(lambda: begun)
        impatient = leaving.enter_context(httpx2.Client(base_url=served.url, timeout=0.3))
        with pytest.raises(httpx2.TimeoutException):
            impatient.post("/v1/completions", json=long)
        short = pool.submit(served.post, "/v1/completions", {"prompt": "a", "max_tokens": 2})
        until(lambda: paced.open)
        paced.open[0].end("length")
        assert short.result(10).status_code == 200
        assert len(begun) == 1
        served.stop()
        served.stop()
        for answer in answers:
            refused(answer.result(30), 503, "stopping")
        served.thread.join(10)
        assert not served.thread.is_alive()
    goes_on.set()


def test_the_log_counts_all_tokens_and_knows_why_an_answer_ended(
    packed_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, paced = open_paced(packed_llama)
    with serving(service) as served, ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO, "otaro.serve"):
        answer = pool.submit(served.post, CHAT, {**SAY, "stop": "x"})
        until(lambda: paced.open)
        (running,) = paced.open
        for letter in "abx":
            paced.step(running, letter)
        assert answer.result(10).json()["choices"][0]["finish_reason"] == "stop"
        until(lambda: any("tokens of prompt" in message for message in caplog.messages))
        (line,) = [message for message in caplog.messages if "tokens of prompt" in message]
        assert "3 new, stop, first after" in line
        assert 'otaro_answers_total{reason="stop"} 1.0' in served.client.get("/metrics").text


@pytest.mark.parametrize(
    ("content", "param", "code"),
    [
        (b'{"prompt": "a", "stop": "\\ud800"}', "stop", "invalid_value"),
        (b'{"prompt": "a\\ud800"}', None, None),
        (b'{"prompt": "\xe4"}', None, "invalid_json"),
        (b"[" * 100_000, None, "invalid_json"),
    ],
)
def test_what_is_wrong_is_called_by_its_name(served: Served, content: bytes, param: str | None, code: str) -> None:
    headers = {"Content-Type": "application/json"}
    error = refused(served.client.post("/v1/completions", content=content, headers=headers), 400)
    assert (error["param"], error["code"]) == (param, code)
