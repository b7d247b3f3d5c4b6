"""`otaro serve` under load: many clients at mixed widths, a third of which leave midway.

    python bench/bench_serve.py PACKED [--clients 32] [--seconds 60] [--json FILE]
    python bench/bench_serve.py PACKED --against llama.cpp [--python ENVIRONMENT/bin/python]

The first run asks a pool of requests at every width, over and over. Reported are the time to the first token, tokens a
second over all clients, and the server's memory (VmRSS) from the end of a warm-up on. Then every request of the pool
is asked once more with the server to itself: each greedy answer given under load must be that one to the letter, and
what a client that left had read must be its beginning. Errors other than 429, memory that grows by more than 5 % and
answers that differ make the exit code 1.

With `--against llama.cpp` the same load, at E5M4 and with prompts that are never asked twice, goes to `otaro serve` and
to `python -m llama_cpp.server` with the twin of E5M4 (Q5_1, `otaro export`), one after the other on the same cores.
`--python` names an interpreter that has `llama-cpp-python[server]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

WIDTHS = ("E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3")
BEGINNINGS = (
    "The lighthouse keeper wrote in the log that",
    "In the morning the market was full of people who",
    "A good way to learn a language is to",
    "The river had risen during the night, and",
    "When the experiment was repeated with a larger sample,",
    "She opened the letter, which said that",
    "The most common mistake in arithmetic is",
    "Before the invention of the railway,",
)
MIDDLE = (
    " nobody had expected it, least of all those who had been there from the beginning and had seen how it started,"
)
LEAVING = 1 / 3
GROWTH = 0.05
READY_SECONDS = 300


@dataclass(frozen=True)
class Ask:
    """A request, greedy and streamed."""

    prompt: str
    tokens: int
    width: str | None

    def body(self, model: str) -> dict[str, Any]:
        named = model if self.width is None else f"{model}@{self.width}"
        return {
            "model": named,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "stream": True,
        }


@dataclass
class Load:
    """What came of a run."""

    first: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: list[tuple[Ask, str, bool]] = field(default_factory=list)
    """The request, what was read, and whether that was all."""
    statuses: Counter[int] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        ordered = sorted(self.first)
        return {
            "seconds": round(self.seconds, 1),
            "answers": sum(whole for _, _, whole in self.answers),
            "left": sum(not whole for _, _, whole in self.answers),
            "refused": self.statuses[429],
            "errors": len(self.errors),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "first_token_p50": round(statistics.median(ordered), 3) if ordered else None,
            "first_token_p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3) if ordered else None,
        }


def pool(count: int) -> list[Ask]:
    """Requests of all widths and several lengths; some prompts begin alike."""
    draw = random.Random(0)
    return [
        Ask(
            BEGINNINGS[number % len(BEGINNINGS)] + draw.randrange(6) * MIDDLE,
            draw.choice((16, 32, 64)),
            WIDTHS[number % len(WIDTHS)],
        )
        for number in range(count)
    ]


async def ask(client: httpx2.AsyncClient, model: str, wanted: Ask, load: Load, leave_after: int | None) -> None:
    """One request; a client that leaves does so after some pieces of the answer."""
    begun, text, pieces = time.monotonic(), "", 0
    async with client.stream("POST", "/v1/completions", json=wanted.body(model)) as response:
        load.statuses[response.status_code] += 1
        if response.status_code == 429:
            await asyncio.sleep(float(response.headers.get("retry-after", 1)))
            return
        if response.status_code != 200:
            load.errors.append(f"{response.status_code}: {(await response.aread())[:200]!r}")
            return
        counted = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                load.answers.append((wanted, text, True))
                return
            chunk = json.loads(line[6:])
            if "error" in chunk:
                load.errors.append(chunk["error"]["message"])
                return
            if pieces == 0:
                load.first.append(time.monotonic() - begun)
            pieces += 1
            made = chunk["otaro"]["tokens"] if "otaro" in chunk else pieces  # llama.cpp sends token by token
            load.tokens += made - counted
            counted = made
            text += chunk["choices"][0]["text"]
            if leave_after is not None and pieces >= leave_after:
                load.answers.append((wanted, text, False))
                return
    load.errors.append("an answer broke off")


async def run_load(
    url: str, model: str, clients: int, seconds: float, next_ask: Callable[[], Ask], process: int
) -> Load:
    load, draw, end = Load(), random.Random(1), time.monotonic() + seconds

    async def one() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
            while time.monotonic() < end:
                leave = draw.randrange(1, 12) if draw.random() < LEAVING else None
                try:
                    await ask(client, model, next_ask(), load, leave)
                except httpx2.HTTPError as error:
                    load.errors.append(repr(error))

    async def watch() -> None:
        while True:
            load.memory.append((time.monotonic(), resident(process)))
            await asyncio.sleep(0.5)

    begun = time.monotonic()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(one() for _ in range(clients)))
    watching.cancel()
    load.seconds = time.monotonic() - begun
    return load


def resident(process: int) -> int:
    return 1024 * int(re.search(r"VmRSS:\s*(\d+)", Path(f"/proc/{process}/status").read_text())[1])  # type: ignore[index]


def growth(load: Load, warm_up: float) -> float:
    """How far memory rose after the warm-up: the most of the last quarter over the most of the first one after it."""
    start = load.memory[0][0] + warm_up
    after = [size for moment, size in load.memory if moment >= start]
    part = max(1, len(after) // 4)
    return max(after[-part:]) / max(after[:part]) - 1


@contextlib.contextmanager
def started(command: list[str], port: int) -> Iterator[tuple[str, int]]:
    """A server; its address and process. What it says goes to a file, and to the screen if it does not start."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
        try:
            while True:
                with contextlib.suppress(httpx2.HTTPError):
                    health = httpx2.get(f"{url}/v1/models", timeout=READY_SECONDS)
                    ready = httpx2.get(f"{url}/health", timeout=10)
                    if health.status_code == 200 and (ready.status_code == 404 or ready.json()["status"] == "ok"):
                        break
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise SystemExit(f"the server did not start: {said.read()[-2000:]}")
                time.sleep(0.2)
            yield url, process.pid
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise SystemExit("the server did not end") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def otaro(packed: Path, port: int, threads: int | None) -> list[str]:
    chosen = [] if threads is None else ["--threads", str(threads)]
    return [
        sys.executable,
        "-m",
        "otaro",
        "serve",
        str(packed),
        "--name",
        "model",
        "--port",
        str(port),
        *chosen,
    ]


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The mixed load, and each answer compared with the same request alone."""
    asked, draw, port = pool(arguments.requests), random.Random(2), free_port()
    with started(otaro(arguments.packed, port, arguments.threads), port) as (url, process):
        load = asyncio.run(
            run_load(url, "model", arguments.clients, arguments.seconds, lambda: draw.choice(asked), process)
        )
        alone = Load()

        async def one_by_one() -> None:
            async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
                for wanted in asked:
                    await ask(client, "model", wanted, alone, None)

        asyncio.run(one_by_one())
        metrics = httpx2.get(f"{url}/metrics").text
    expected = {wanted: text for wanted, text, _ in alone.answers}
    different = [
        wanted
        for wanted, text, whole in load.answers
        if (text != expected[wanted] if whole else not expected[wanted].startswith(text))
    ]
    rise = growth(load, arguments.warm_up)
    left_running = re.search(r"^otaro_running_answers (\S+)$", metrics, re.MULTILINE)
    figures = {
        **load.figures(),
        "clients": arguments.clients,
        "compared": len(load.answers),
        "different": len(different),
        "memory_growth": round(rise, 4),
        "memory_mb": round(max(size for _, size in load.memory) / 1e6),
        "running_afterwards": float(left_running[1]) if left_running else None,
    }
    for error in sorted({*load.errors, *alone.errors}):
        print(f"error: {error}", file=sys.stderr)
    for wanted in different[:3]:
        print(f"different: {wanted}", file=sys.stderr)
    good = not load.errors and not alone.errors and not different and rise <= GROWTH
    return figures, good and figures["running_afterwards"] == 0


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same load on both servers."""

    def fresh(width: str | None) -> Callable[[], Ask]:
        draw, number = random.Random(3), iter(range(10**9))

        def next_ask() -> Ask:
            beginning = draw.choice(BEGINNINGS) + draw.randrange(6) * MIDDLE
            return Ask(f"Note {next(number)}. {beginning}", draw.choice((16, 32, 64)), width)

        return next_ask

    found = {}
    with tempfile.TemporaryDirectory(prefix="otaro-bench-") as folder:
        twin = Path(folder) / "model.gguf"
        export = [sys.executable, "-m", "otaro", "export", str(arguments.packed), str(twin), "--precision", "E5M4"]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        port = free_port()
        theirs = [arguments.python, "-m", "llama_cpp.server", "--model", str(twin), "--model_alias", "model"]
        theirs += ["--port", str(port), "--n_ctx", "2048", "--interrupt_requests", "False"]
        if arguments.threads is not None:
            theirs += ["--n_threads", str(arguments.threads), "--n_threads_batch", str(arguments.threads)]
        for name, command, width in (
            ("otaro", otaro(arguments.packed, port, arguments.threads), "E5M4"),
            ("llama.cpp", theirs, None),
        ):
            with started(command, port) as (url, process):
                model = "model"
                load = asyncio.run(run_load(url, model, arguments.clients, arguments.seconds, fresh(width), process))
            found[name] = load.figures()
            for error in sorted({*load.errors}):
                print(f"{name}: error: {error}", file=sys.stderr)
    ratio = found["otaro"]["tokens_per_second"] / found["llama.cpp"]["tokens_per_second"]
    return {**found, "throughput_ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds after which memory shall not grow")
    parser.add_argument("--requests", type=int, default=48, help="in the pool")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--against", choices=["llama.cpp"])
    parser.add_argument("--python", default=sys.executable, help="an interpreter with llama-cpp-python[server]")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures, good = measure(arguments)
    result: dict[str, Any] = {"load": figures}
    print(json.dumps(figures))
    if arguments.against is not None:
        result["against"] = compare(arguments)
        print(json.dumps(result["against"], indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
