"""Precision in the server: the default, what is in memory, an answer's own while it is written, and "auto"."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import otaro
from otaro.precision import Precision
from otaro.serve.control import CALM_MOMENTS, AutoWidth
from otaro.serve.opening import open_service
from otaro.serve.service import Limits
from otaro.text import TextStream
from otaro.tokenizer import load_tokenizer, render_chat
from tests.serving import SAY, TIMEOUT, Served, open_paced, open_tiny, serving, until

M3, M4, M5, M6, M7, M8 = reversed(Precision)
CHAT = "/v1/chat/completions"


def widths(served: Served, **body: Any) -> dict[str, int]:
    """The widths that an answer of four tokens was written at."""
    answer = served.post(CHAT, {**SAY, "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["otaro"]["widths"])


# ---- the default, and memory


def test_the_default_and_what_is_in_memory_change_while_it_runs(packed_llama: Path) -> None:
    with serving(open_tiny(packed_llama, default=M6)) as served:
        said = served.client.get("/v1/precision").json()
        assert (said["precision"], said["width"], said["resident"]) == ("E5M6", "E5M6", "E5M8")
        assert [entry["precision"] for entry in said["available"]] == [str(width) for width in Precision]
        assert said["available"][0]["bits_per_weight"] > said["available"][-1]["bits_per_weight"]
        assert widths(served) == {"E5M6": 4}

        assert served.client.put("/v1/precision", json={"precision": "E5M4"}).json()["width"] == "E5M4"
        assert widths(served) == {"E5M4": 4}
        assert widths(served, precision="E5M8") == {"E5M8": 4}

        dropped = served.client.put("/v1/precision", json={"resident": "E5M3"}).json()
        assert (dropped["precision"], dropped["resident"]) == ("E5M3", "E5M3")
        assert dropped["memory"]["weights"] < said["memory"]["weights"]
        refused = served.post(CHAT, {**SAY, "precision": "E5M4"})
        assert refused.status_code == 400
        assert "PUT /v1/precision" in refused.json()["error"]["message"]
        assert served.post(CHAT, {**SAY, "model": "tiny-llama@E5M8"}).status_code == 400

        raised = served.client.put("/v1/precision", json={"resident": "E5M7", "precision": "E5M5"}).json()
        assert (raised["precision"], raised["resident"]) == ("E5M5", "E5M7")
        assert widths(served) == {"E5M5": 4}
        assert widths(served, precision="E5M7") == {"E5M7": 4}

        raised = served.client.put("/v1/precision", json={"resident": "E5M8"}).json()
        assert raised["precision"] == "E5M5"  # what is in memory does not change what is used
        for wrong in ({}, {"precision": "E5M9"}, {"resident": "auto"}, {"precision": 4}, {"width": "E5M4"}):
            assert served.client.put("/v1/precision", json=wrong).status_code == 400
        # What is refused has changed nothing.
        for wrong in ({"resident": "E5M4", "precision": "E5M9"}, {"resident": "E5M4", "precision": "E5M8"}):
            assert served.client.put("/v1/precision", json=wrong).status_code == 400
        said = served.client.get("/v1/precision").json()
        assert (said["precision"], said["resident"]) == ("E5M5", "E5M8")
        assert served.client.get("/metrics").text.count("otaro_resident_mantissa_bits 8.0") == 1


def test_only_what_is_asked_for_is_loaded(packed_llama: Path) -> None:
    with serving(open_tiny(packed_llama, resident=M4)) as served:
        assert served.client.get("/health").json()["resident"] == "E5M4"
        assert served.post(CHAT, {**SAY, "precision": "E5M5"}).status_code == 400
        assert widths(served) == {"E5M4": 4}


def test_wider_planes_that_cannot_be_read_leave_what_is_there(
    packed_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(packed_llama, folder)
    path = folder / "model-m6.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with monkeypatch.context() as patch:  # the background has failed before anything else is made
        patch.setattr("otaro.serve.opening.load_tokenizer", lambda at: time.sleep(0.5) or load_tokenizer(at))
        service = open_service(folder, threads=1)
    with serving(service) as served:
        until(lambda: served.client.get("/health").json()["status"] == "degraded")
        health = served.client.get("/health").json()
        assert (health["width"], health["resident"]) == ("E5M5", "E5M5")
        assert "model-m6" in health["error"] or "E5M6" in health["error"]
        assert widths(served) == {"E5M5": 4}
        assert served.post(CHAT, {**SAY, "precision": "E5M8"}).status_code == 400
        shutil.copy(packed_llama / path.name, path)
        assert served.client.put("/v1/precision", json={"resident": "E5M8"}).json()["resident"] == "E5M8"
        assert served.client.get("/health").json()["status"] == "ok"


def test_answers_begin_with_the_first_file(packed_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The background may not go on until a first answer has been given."""
    from otaro.engine.live import LiveWeights

    loads: list[Any] = []
    monkeypatch.setattr(LiveWeights, "_load", lambda self: loads.append(self))
    with serving(open_service(packed_llama, threads=1)) as served:
        health = served.client.get("/health").json()
        assert (health["status"], health["width"], health["loading"]) == ("loading", "E5M3", "E5M8")
        assert widths(served) == {"E5M3": 4}
        monkeypatch.undo()
        loads[0]._load()
        health = served.client.get("/health").json()
        assert (health["status"], health["width"]) == ("ok", "E5M8")
        assert widths(served) == {"E5M8": 4}


# ---- an answer of its own


def test_an_answer_changes_its_precision_at_the_next_token(packed_llama: Path) -> None:
    service, paced = open_paced(packed_llama)
    with serving(service) as served, served.stream({"precision": "E5M8"}) as response:
        chunks = (json.loads(line[6:]) for line in response.iter_lines() if line and "[DONE]" not in line)
        id = next(chunks)["id"]
        (running,) = paced.open
        seen = []
        for wanted in ("E5M8", "E5M3", "E5M5"):
            answer = served.client.put(f"/v1/precision/{id}", json={"precision": wanted})
            assert answer.json() == {"id": id, "precision": wanted}
            paced.step(running)
            seen.append(next(chunks)["otaro"])
        assert seen == [{"width": width, "tokens": n} for n, width in enumerate(("E5M8", "E5M3", "E5M5"), 1)]
        assert served.client.put(f"/v1/precision/{id}", json={"precision": "E5M9"}).status_code == 400
        running.end("stop")
        list(chunks)
        assert served.client.put(f"/v1/precision/{id}", json={"precision": "E5M8"}).status_code == 404


def test_the_text_is_that_of_the_widths(packed_llama: Path) -> None:
    """With the real scheduler, which waits after three tokens until the precision has been changed."""
    service = open_tiny(packed_llama)
    submit, reached, changed = service.scheduler.submit, threading.Event(), threading.Event()

    def waiting(request: Any, on_token: Any) -> Any:
        made: list[Any] = []

        def hand_over(token: Any) -> None:
            made.append(token)
            on_token(token)
            if len(made) == 3:
                reached.set()
                assert changed.wait(TIMEOUT)

        return submit(request, hand_over)

    service.scheduler.submit = waiting  # type: ignore[method-assign, assignment]
    with serving(service) as served, served.stream({"max_tokens": 20}) as response:
        lines = response.iter_lines()
        id = json.loads(next(lines)[6:])["id"]
        assert reached.wait(TIMEOUT)
        assert served.client.put(f"/v1/precision/{id}", json={"precision": "E5M3"}).status_code == 200
        changed.set()
        chunks = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert chunks[-1]["otaro"] == {"width": "E5M3", "tokens": 20}

    engine = otaro.Engine(packed_llama, threads=1)
    prompt = render_chat(engine.tokenizer, SAY["messages"])  # type: ignore[arg-type]
    stream, expected = TextStream(engine.tokenizer, (), prompt), ""
    for number, token in enumerate(engine.tokens(prompt, max_new_tokens=20), 1):
        expected += stream.push(token)
        if number == 3:
            engine.precision = M3
    assert text == expected + stream.finish()


# ---- auto


def test_auto_falls_with_waiting_and_rises_with_calm() -> None:
    auto = AutoWidth(M4)
    assert auto.width(M8) == M8
    for expected in (M7, M6, M5, M4, M4):
        auto.observe(waiting=1, running=16, seats=16, widest=M8)
        assert auto.width(M8) == expected
    auto.observe(waiting=0, running=16, seats=16, widest=M8)  # busy, but nobody waits
    assert auto.width(M8) == M4
    for expected in (M5, M6):
        for _ in range(CALM_MOMENTS):
            auto.observe(waiting=0, running=8, seats=16, widest=M8)
        assert auto.width(M8) == expected
    auto.observe(waiting=3, running=16, seats=16, widest=M8)
    assert auto.width(M8) == M5
    assert auto.width(M3) == M3  # what is in memory is narrower than the floor


def test_auto_acts_on_answers_that_are_being_written(packed_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otaro.serve.service.MOMENT", 0.05)
    service, paced = open_paced(packed_llama, Limits(seats=2), default="auto")
    with serving(service) as served, ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        left = stack.enter_context(served.stream({}))
        fixed = stack.enter_context(served.stream({"precision": "E5M6"}))
        until(lambda: len(paced.open) == 2)
        assert [one.precision for one in paced.open] == [M8, M6]
        waiting = pool.submit(served.post, CHAT, SAY)
        until(lambda: paced.open[0].precision == M3)
        assert paced.open[1].precision == M6
        said = served.client.get("/v1/precision").json()
        assert (said["precision"], said["width"], said["auto"]) == ("auto", "E5M3", {"width": "E5M3", "floor": "E5M3"})
        paced.all[1].end("stop")
        until(lambda: len(paced.all) == 3)
        assert paced.all[2].precision == M3  # it begins where the others are
        paced.all[2].end("stop")
        waiting.result(10)
        until(lambda: (paced.all[0].precision or M3) > M3)  # nobody waits any more
        paced.all[0].end("stop")
        for response in (left, fixed):
            assert list(response.iter_lines())[-2] == "data: [DONE]"
