"""GET and POST /v1/precision: the width of a running `vllm serve`.

An endpoint plugin of vLLM, which loads it where the environment names it: ``VLLM_PLUGINS=otaro``. Under /v1 it is
guarded by the server's API key like the other routes.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from otaro.errors import PrecisionError
from otaro.precision import Precision
from otaro.vllm import NAME, WORKER_METHOD, set_precision_async


class PrecisionRoute:
    """vLLM's protocol `EndpointPlugin`."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/v1/precision", _read, methods=["GET"])
        app.add_api_route("/v1/precision", _change, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        state.otaro_engine = engine_client


async def _read(request: Request) -> JSONResponse:
    return JSONResponse(await _state(request))


async def _change(request: Request) -> JSONResponse:
    try:
        body = await request.json()
        precision = Precision(body["precision"])
    except PrecisionError as error:
        return _refused(str(error))
    except (ValueError, KeyError, TypeError):
        return _refused('the body is not {"precision": "E5M4"}')
    held = (await _state(request))["precisions"]
    if str(precision) not in held:
        return _refused(f"precision {precision} is not loaded: this server holds {', '.join(held)}")
    await set_precision_async(request.app.state.otaro_engine, precision)
    return JSONResponse(await _state(request))


async def _state(request: Request) -> dict[str, Any]:
    answers = await request.app.state.otaro_engine.collective_rpc(WORKER_METHOD)
    return dict(answers[0])


def _refused(message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": "precision", "code": None}
    return JSONResponse({"error": error}, 400)
