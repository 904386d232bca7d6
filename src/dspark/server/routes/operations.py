"""For whoever runs the server: `/health`, `/ready`, `/metrics`, and `/rounds` as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from dspark.server.errors import ApiError
from dspark.server.rounds import MAX_WATCHERS
from dspark.server.service import Service
from dspark.server.sse import EventStream, event

router = APIRouter()
watching = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 as long as the engine lives."""
    service: Service = request.app.state.service
    if service.engine.failure is not None:
        return JSONResponse({"status": "failed", "reason": "the engine failed"}, 503)
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 as long as new requests are taken."""
    service: Service = request.app.state.service
    if service.engine.failure is not None:
        return JSONResponse({"status": "failed", "reason": "the engine failed"}, 503)
    if service.draining:
        return JSONResponse({"status": "draining", "reason": "the server is shutting down"}, 503)
    return JSONResponse({"status": "ready"})


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    service: Service = request.app.state.service
    encode, kind = choose_encoder(request.headers.get("accept", ""))
    text = await asyncio.to_thread(encode, service.metrics.registry)
    return Response(text, media_type=kind)


@watching.get("/rounds")
async def rounds(request: Request, past: Annotated[int, Query(ge=0, le=10_000)] = 0) -> Response:
    """Server-sent events, one a step: the rounds of that step, one a request; `past` of them from before."""
    service: Service = request.app.state.service
    if not service.settings.round_events:
        raise ApiError(404, "rounds are not kept here: set round_events above 0", code="rounds_off")
    if service.rounds.num_watchers >= MAX_WATCHERS:
        raise ApiError(429, f"{MAX_WATCHERS} others watch the rounds", headers={"retry-after": "5"})

    async def events() -> AsyncIterator[bytes]:
        async for step in service.rounds.watch(past):
            yield event(step.events())

    return EventStream(events(), lambda: None)
