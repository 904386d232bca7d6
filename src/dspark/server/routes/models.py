"""`/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from dspark.server.reply import Json
from dspark.server.service import Service

router = APIRouter()


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(request: Request) -> Json:
    """The one model that is served."""
    return {"object": "list", "data": [_card(request.app.state.service)]}


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> Json:
    """The model by its name."""
    service: Service = request.app.state.service
    service.check_model(name)
    return _card(service)


def _card(service: Service) -> Json:
    engine = service.engine.engine
    return {
        "id": service.settings.name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "dspark",
        "max_model_len": service.limit,
        "speculative": {
            "drafter": None if engine.drafter is None else engine.drafter.config.algorithm,
            "max_draft": service.max_draft,
        },
    }
