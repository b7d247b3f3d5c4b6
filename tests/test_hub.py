"""A packed model on the hub: what is fetched for a width, seen by a hub of our own on this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM

import otaro
from otaro.checkpoint.layout import stem
from otaro.errors import OtaroError, PrecisionError
from otaro.precision import Precision
from otaro.sefp import Format

NAME, COMMIT = "some-org/some-model", "0123456789abcdef0123456789abcdef01234567"
UNWANTED = ("README.md", "model.safetensors", "pytorch_model.bin", "modeling.py", "results.json", "sub/config.json")


class Hub(ThreadingHTTPServer):
    """Serves `folder` as the only commit of a repository, and writes down whose content was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = Path()
        self.fetched: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path, folder = self.path.partition("?")[0], self.server.folder
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        if path in (f"/api/models/{NAME}/revision/{revision}" for revision in ("main", COMMIT)):
            siblings = [{"rfilename": name} for name in names]
            self.send(json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            self.send(json.dumps([self.entry(name) for name in names]).encode())
        else:
            name = path.removeprefix(f"/{NAME}/resolve/").partition("/")[2]
            if name not in names:
                self.send(b"", 404)
                return
            if self.command == "GET":
                self.server.fetched.append(name)
            self.send((folder / name).read_bytes())

    def entry(self, name: str) -> dict[str, object]:
        content = (self.server.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub for huggingface_hub and transformers, asked by a machine that has nothing of it yet."""
    address = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.fetched.clear()
    return server


@pytest.fixture(scope="module", params=["whole", "shards", "nearest"])
def repository(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed folder beside files that nobody needs."""
    folder = tmp_path_factory.mktemp("repository") / "packed"
    otaro.pack(
        tiny_llama,
        folder,
        format=Format("nearest" if request.param == "nearest" else "nested"),
        embedding_floor="E5M5",
        max_shard_size=8_000 if request.param == "shards" else 1 << 30,
    )
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    assert (len(list(folder.glob("model-m8*"))) > 2) == (request.param == "shards")
    return folder


def weight_files(folder: Path, precision: Precision) -> set[str]:
    """All files, indexes included, whose planes a width needs."""
    stored = otaro.inspect(folder).format.stored(precision)
    widths = [width for width in Precision if width <= stored]
    return {path.name for width in widths for path in folder.glob(f"{stem(width)}*")}


def other_files(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith("model-m")} - set(UNWANTED)


def test_a_width_fetches_its_own_files_once_and_no_other(hub: Hub, repository: Path) -> None:
    hub.folder = repository
    for precision in sorted(Precision):
        assert otaro.load(NAME, precision).precision == precision
        assert sorted(hub.fetched) == sorted(weight_files(repository, precision) | other_files(repository))


def test_without_a_width_all_are_fetched(hub: Hub, repository: Path) -> None:
    hub.folder = repository
    assert otaro.load(NAME).precision == Precision.E5M8
    assert sorted(hub.fetched) == sorted(weight_files(repository, Precision.E5M8) | other_files(repository))


def test_from_pretrained_fetches_weights_and_settings_alone(hub: Hub, repository: Path) -> None:
    hub.folder = repository
    model = AutoModelForCausalLM.from_pretrained(NAME)
    assert model.precisions == list(Precision)
    needed = weight_files(repository, Precision.E5M8) | {"config.json", "generation_config.json"}
    assert sorted(hub.fetched) == sorted(needed)


def test_from_pretrained_goes_on_where_it_was_told_to_look(hub: Hub, packed_llama: Path, tmp_path: Path) -> None:
    hub.folder = tmp_path / "repository"
    shutil.copytree(packed_llama, hub.folder / "packed")
    model = AutoModelForCausalLM.from_pretrained(NAME, revision=COMMIT, subfolder="packed", cache_dir=tmp_path / "own")
    assert model.precisions == list(Precision)
    assert not list(Path(huggingface_hub.constants.HF_HUB_CACHE).rglob("*.safetensors"))


def test_no_weights_are_fetched_for_a_width_that_is_not_there(hub: Hub, tiny_llama: Path, tmp_path: Path) -> None:
    hub.folder = tmp_path / "packed"
    otaro.pack(tiny_llama, hub.folder, precision="E5M4")
    with pytest.raises(PrecisionError, match="does not hold precision E5M5: it holds E5M4, E5M3"):
        otaro.load(NAME, "E5M5")
    assert not any("safetensors" in name for name in hub.fetched)


def test_a_hub_that_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OtaroError, match="there is no folder some-org/some-model, and the hub could not be asked"):
        otaro.load(NAME, "E5M4")
