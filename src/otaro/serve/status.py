"""What the server says of itself, and its precision: /health, /metrics, /v1/models, /v1/precision."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from otaro.serve.openai import PrecisionBody, RunningBody
from otaro.serve.problems import Problem
from otaro.serve.service import Service

router = APIRouter()
_changing = threading.Lock()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/health", summary="Whether the server answers, and at which width", response_model=None)
async def health(request: Request) -> JSONResponse:
    service = _service(request)
    loading = service.control.resident < service.engine.limit and service.loading_error is None
    status = "stopping" if service.stopping else "degraded" if service.loading_error else "loading" if loading else "ok"
    content = {
        "status": status,
        "width": str(service.control.width),
        "resident": str(service.control.resident),
        "loading": str(service.engine.limit) if loading else None,
        "error": service.loading_error,
        "running": service.queue.running,
        "waiting": service.queue.waiting,
    }
    return JSONResponse(content, 503 if service.stopping else 200)


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> PlainTextResponse:
    text = await asyncio.to_thread(_service(request).metrics.text)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


@router.get("/v1/models", summary="The model, and the model at each precision")
async def models(request: Request) -> dict[str, Any]:
    service = _service(request)
    return {"object": "list", "data": [_model(service, id) for id in service.control.model_ids()]}


@router.get("/v1/models/{model:path}", summary="One of them")
async def model(model: str, request: Request) -> dict[str, Any]:
    service = _service(request)
    if model not in service.control.model_ids():
        raise Problem(404, f"there is no model {model}", param="model", code="model_not_found")
    return _model(service, model)


def _model(service: Service, id: str) -> dict[str, Any]:
    return {"id": id, "object": "model", "created": service.created, "owned_by": "otaro"}


@router.get("/v1/precision", summary="The precision, and what is in memory")
async def precision(request: Request) -> dict[str, Any]:
    service = _service(request)
    return await asyncio.to_thread(_precision, service)


@router.put("/v1/precision", summary="Set the default precision, or how much is in memory")
async def set_precision(body: PrecisionBody, request: Request) -> dict[str, Any]:
    service = _service(request)
    if body.precision is None and body.resident is None:
        raise Problem(400, "nothing is to be changed: give precision, resident, or both")
    return await asyncio.to_thread(_set_precision, service, body)


@router.put("/v1/precision/{id}", summary="Change the precision of an answer while it is written")
async def set_running_precision(id: str, body: RunningBody, request: Request) -> dict[str, Any]:
    return {"id": id, "precision": str(_service(request).control.set_running(id, body.precision))}


def _set_precision(service: Service, body: PrecisionBody) -> dict[str, Any]:
    control = service.control
    with _changing:  # planes are read and freed by one request at a time
        resident = None if body.resident is None else control.on_disk(body.resident)
        # All is looked at before anything is changed.
        default = None if body.precision is None else control.parse_default(body.precision, resident)
        if resident is not None:
            control.set_resident(resident)
            service.loading_error = None
        if default is not None:
            control.set_default(default)
    return _precision(service)


def _precision(service: Service) -> dict[str, Any]:
    control, info = service.control, service.info
    return {
        "precision": str(control.default),
        "width": str(control.width),
        "resident": str(control.resident),
        "limit": str(service.engine.limit),
        "available": [
            {
                "precision": str(width),
                "bits_per_weight": round(info.bits_per_weight(width), 3),
                "bytes": info.size(width),
            }
            for width in control.available
        ],
        "auto": {"width": str(control.auto.width(control.resident)), "floor": str(control.auto.floor)},
        "memory": service.engine.memory,
    }
