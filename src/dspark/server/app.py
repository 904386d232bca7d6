"""The web application over one service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import dspark
from dspark.server.errors import install_handlers
from dspark.server.routes import chat, models, operations
from dspark.server.service import Service


def make_app(service: Service) -> FastAPI:
    """Every endpoint of a service. The engine's thread runs as long as the app does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.stop()

    app = FastAPI(title="dspark", version=dspark.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    install_handlers(app)
    for routes in (chat, models, operations):
        app.include_router(routes.router)
    return app
