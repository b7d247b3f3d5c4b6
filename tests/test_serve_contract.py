"""A fuzzer of contracts (schemathesis) against the document that the server describes itself with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from otaro.serve.service import Limits
from tests.serving import Served, open_tiny, serving

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("PUT", "/v1/precision"),
    ("GET", "/v1/precision"),
    ("PUT", "/v1/precision/{id}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="module")
def served(packed_llama: Path) -> Iterator[Served]:
    load_all_checks()
    with serving(open_tiny(packed_llama, limits=Limits(tokens=8))) as served:
        yield served


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_no_request_is_too_much(served: Served, method: str, path: str, mode: schemathesis.GenerationMode) -> None:
    operation = schemathesis.openapi.from_url(f"{served.url}/openapi.json")[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
        return  # nothing that could be wrong

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def fuzz(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    fuzz()


def test_every_route_is_described(served: Served) -> None:
    described = served.client.get("/openapi.json").json()
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == {*OPERATIONS}
    chat = described["components"]["schemas"]["ChatBody"]["properties"]
    assert "tiny-llama@E5M4" in chat["model"]["enum"]
    assert all(
        "422" not in method["responses"] for methods in described["paths"].values() for method in methods.values()
    )
