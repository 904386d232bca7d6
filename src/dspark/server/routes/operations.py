"""`/health` and `/ready`: for whoever keeps the process running, and whoever sends it requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from dspark.server.service import Service

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 as long as the engine lives."""
    service: Service = request.app.state.service
    if service.engine.failure is not None:
        return JSONResponse({"status": "failed", "reason": "the engine failed"}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 as long as new requests are taken."""
    service: Service = request.app.state.service
    if service.engine.failure is not None:
        return JSONResponse({"status": "failed", "reason": "the engine failed"}, 503)
    if service.draining:
        return JSONResponse({"status": "draining", "reason": "the server is shutting down"}, 503)
    return JSONResponse({"status": "ready"})
