"""The calls of the API, and what its schema says about them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field

from cclnet.deploy.serve.about import ModelCard
from cclnet.deploy.serve.answers import Answer
from cclnet.deploy.serve.forms import FIELD
from cclnet.deploy.serve.limits import Refused
from cclnet.deploy.serve.metrics import CONTENT_TYPE
from cclnet.deploy.serve.service import Service


class Reason(BaseModel):
    """Why there is no answer."""

    reason: str


class Health(BaseModel):
    status: str = Field(description="ok")


class Examples(BaseModel):
    name: str = Field(description="The class.")
    pictures: list[str] = Field(description="Data URIs of training images of the class, made small.")


BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": [FIELD],
                "properties": {FIELD: {"type": "string", "format": "binary", "description": "The image file."}},
            }
        },
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}
REASONS = {
    400: "The form is broken, or the connection was.",
    401: "The token is missing or wrong.",
    403: "Sent by a page elsewhere.",
    404: "No such class, or not to be shown.",
    408: "The image took too long to arrive.",
    413: "The file is too large.",
    415: "Neither a form nor an image.",
    421: "Sent to a name that this server does not go by.",
    422: "It cannot be used; the reason says why.",
    431: "The headers are too long.",
    503: "Too much is waiting: try again in a moment.",
    507: "Images are to be kept, but there is no room for them.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Reason, "description": REASONS[status]} for status in statuses}


def api(service: Service, card: ModelCard, with_token: bool) -> APIRouter:
    """All calls. Where a token is needed the schema says so; the guard is what asks for it."""
    everyone = APIRouter(responses=refusals(421, 431))
    closed = [Depends(HTTPBearer(auto_error=False))] if with_token else []
    members = APIRouter(dependencies=closed, responses=refusals(401) if with_token else {})

    @everyone.get("/healthz", summary="Whether the server is up. Needs no token.", response_description="It is.")
    async def healthz() -> Health:
        return Health(status="ok")

    @members.post(
        "/predict",
        summary="What the model says about an image.",
        response_description="The answer.",
        responses=refusals(400, 403, 408, 413, 415, 422, 503, 507),
        openapi_extra={"requestBody": BODY},
    )
    async def predict(
        request: Request,
        explain: Annotated[bool, Query(description="Also say where the network looked.")] = False,
        picture: Annotated[bool, Query(description="Also send the upright image back, made small.")] = False,
    ) -> Answer:
        return await service.predict(request, explain, picture)

    @members.get("/model", summary="What the model is, and what this server takes.", response_description="Its card.")
    async def model() -> ModelCard:
        return card

    @members.get(
        "/examples/{index}",
        summary="Training images of a class, where they may be shown.",
        response_description="The pictures.",
        responses=refusals(404, 422),
    )
    async def examples(index: Annotated[int, Path(ge=0, description="Place among the classes.")]) -> Examples:
        classes, pictures = service.model.classes, service.settings.examples
        if index >= len(classes) or not pictures:
            raise Refused(404, "There are no examples of this class to show.")
        return Examples(name=classes[index], pictures=pictures.get(classes[index], []))

    @members.get(
        "/metrics",
        summary="Counters in the text format of Prometheus.",
        response_description="The counters.",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    everyone.include_router(members)
    return everyone
