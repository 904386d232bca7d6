"""The web application over one service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import dspark
from dspark.server.bodies import check_body
from dspark.server.errors import install_handlers
from dspark.server.middleware import BodyLimit, RequestContext, check_key
from dspark.server.routes import chat, completions, models, operations, page, tokens
from dspark.server.service import Service


def make_app(service: Service) -> ASGIApp:
    """Every endpoint of a service. The engine's thread runs as long as the app does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.stop()

    settings = service.settings
    app = FastAPI(
        title="dspark",
        version=dspark.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    install_handlers(app)
    app.include_router(operations.router)
    app.include_router(page.router)
    for router in (models.router, operations.watching):
        app.include_router(router, dependencies=[Depends(check_key)])
    for router in (chat.router, completions.router, tokens.router):
        app.include_router(router, dependencies=[Depends(check_key), Depends(check_body)])
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    _name_the_model(app, settings.name)
    app.add_middleware(BodyLimit, max_bytes=settings.limits.max_body_bytes)
    return RequestContext(app, service.metrics)


def _name_the_model(app: FastAPI, name: str) -> None:
    """Have the schema tell the one name that requests may give as `model`."""
    for schema in app.openapi()["components"]["schemas"].values():  # made once, and kept by the app
        field = schema.get("properties", {}).get("model")
        if field is not None:
            for kind in field.get("anyOf", [field]):
                if kind["type"] == "string":
                    kind["const"] = name
