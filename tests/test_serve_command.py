"""``otaro serve``: what it refuses to start with, and its end by signals."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from otaro import cli
from otaro.serve.listening import bind
from tests.serving import SAY, TIMEOUT, until


def refused(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one sentence that the command ends with."""
    capfd.readouterr()
    assert cli.main(["serve", *map(str, arguments)]) == 2
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line]
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("otaro: error: ")
    return lines[0]


def test_a_folder_that_cannot_be_served_is_one_sentence(
    packed_llama: Path, tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = ("--port", "0")
    assert "does not exist" in refused(capfd, tmp_path / "nothing", *port)
    assert "otaro pack" in refused(capfd, tiny_llama, *port)
    for name, spoil in (
        ("model-m3.safetensors", lambda content: content[:-100]),
        ("model-m3.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("model-m7.safetensors", lambda content: content[:1000]),
        ("config.json", lambda content: content[:50]),
        ("tokenizer.json", lambda content: b"{}"),
    ):
        folder = tmp_path / f"spoilt-{name}"
        shutil.copytree(packed_llama, folder, dirs_exist_ok=True)
        (folder / name).write_bytes(spoil((folder / name).read_bytes()))
        assert refused(capfd, folder, *port)
    shutil.copytree(packed_llama, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    assert "natively" in refused(capfd, tmp_path / "other", *port)


def test_a_port_in_use_is_one_sentence(packed_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in refused(capfd, packed_llama, "--port", str(port))
    assert "no address" in refused(capfd, packed_llama, "--host", "nowhere.invalid", "--port", "0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--precision", "E5M9"), "unknown precision"),
        (("--precision", "E5M6", "--resident", "E5M4"), "wider than --resident"),
        (("--auto-floor", "low"), "unknown precision"),
        (("--max-body", "big"), "not a size"),
        (("--api-key", ""), "not an API key"),
        (("--api-key", "with space"), "not an API key"),
        (("--cors", "example.org"), "not an origin"),
        (("--name", "a@b"), "--name"),
        (("--context", "100000"), "not possible"),
        (("--parallel", "0"), "--parallel"),
        (("--port", "70000"), "--port"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(
    packed_llama: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    port = () if "--port" in arguments else ("--port", "0")
    assert words in refused(capfd, packed_llama, *port, *arguments)


def test_a_precision_that_is_not_on_disk_is_one_sentence(
    packed_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(packed_llama, tmp_path / "part")
    (tmp_path / "part" / "model-m7.safetensors").unlink()
    for option in ("--precision", "--resident"):
        assert "model-m7.safetensors is missing" in refused(capfd, tmp_path / "part", option, "E5M8", "--port", "0")


def test_what_is_not_installed_is_named(
    packed_llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'otaro-llm[serve]'" in refused(capfd, packed_llama)


# ---- a process of its own


@pytest.fixture(scope="module")
def long_llama(packed_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a long context, so that an answer takes a while."""
    folder = tmp_path_factory.mktemp("packed") / "long-llama"
    shutil.copytree(packed_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command in a process of its own; where it listens, and what it says on stderr by and by."""
    command = [sys.executable, "-m", "otaro", "serve", str(folder), "--port", "0", "--threads", "1", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            found = re.search(r"http://[\d.]+:\d+", line)
            if found:
                yield process, found[0], said
                return
        raise AssertionError("".join(said))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


LONG: dict[str, Any] = {**SAY, "stream": True, "max_tokens": 8000}


def test_a_signal_ends_the_server_in_good_order(long_llama: Path) -> None:
    key = {"Authorization": "Bearer key"}
    with started(long_llama, "--grace", "0.3", "--api-key", "key", "--precision", "auto") as (process, url, _):
        client = httpx2.Client(base_url=url, timeout=TIMEOUT, headers=key)
        with client, client.stream("POST", "/v1/chat/completions", json={**LONG, "n": 16}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
            assert json.loads(rest[-1][6:])["error"]["message"] == "the server is stopping"
        assert process.wait(TIMEOUT) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert said.splitlines()[-1] == "otaro: the server has stopped"
        assert "Traceback" not in said


def test_a_server_that_is_killed_leaves_nobody_waiting(long_llama: Path) -> None:
    with started(long_llama) as (process, url, _), httpx2.Client(base_url=url, timeout=TIMEOUT) as client:
        with client.stream("POST", "/v1/chat/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            process.kill()
            process.wait()
            with pytest.raises(httpx2.RemoteProtocolError):  # it breaks off, and does not look like an end
                list(lines)
        host, port = url.removeprefix("http://").split(":")
        bind(host, int(port)).close()  # a new server can take its place at once


def test_clients_that_come_before_the_model_wait(packed_llama: Path) -> None:
    """The socket is taken first: whoever connects while libraries and model are being loaded gets an answer later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "otaro", "serve", str(packed_llama), "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: process.poll() is not None or socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        early = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT)
        assert early.json()["status"] in ("loading", "ok")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert "Traceback" not in said
    finally:
        process.kill()
        process.communicate()
