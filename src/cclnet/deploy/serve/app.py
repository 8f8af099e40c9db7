"""The application: its routes, and what stands before them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from cclnet import __version__
from cclnet.deploy.model import Model
from cclnet.deploy.serve.about import ModelCard, model_card
from cclnet.deploy.serve.answers import Answer
from cclnet.deploy.serve.docs import docs_page
from cclnet.deploy.serve.forms import FIELD
from cclnet.deploy.serve.guard import Guard
from cclnet.deploy.serve.limits import Refused
from cclnet.deploy.serve.metrics import CONTENT_TYPE, Measured, Metrics
from cclnet.deploy.serve.page import render, static_files
from cclnet.deploy.serve.service import ServeSettings, Service
from cclnet.deploy.serve.words import NOTICE

log = logging.getLogger(__name__)


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
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Reason, "description": "The form is broken, or the connection was."},
    403: {"model": Reason, "description": "Sent by a page elsewhere."},
    408: {"model": Reason, "description": "The image took too long to arrive."},
    413: {"model": Reason, "description": "The file is too large."},
    415: {"model": Reason, "description": "Neither a form nor an image."},
    421: {"model": Reason, "description": "Sent to a name that this server does not go by."},
    422: {"model": Reason, "description": "The file cannot be used; the reason says why."},
    431: {"model": Reason, "description": "A field of the form has too long headers."},
    503: {"model": Reason, "description": "Too much is waiting: try again in a moment."},
    507: {"model": Reason, "description": "Images are to be kept, but there is no room for them."},
}


def create_app(
    model: Model, settings: ServeSettings, *, host: str = "127.0.0.1", allowed_hosts: tuple[str, ...] = (),
    token: str | None = None,
) -> FastAPI:  # fmt: skip
    """A model as an ASGI application: the page, the API, health and metrics."""
    metrics = Metrics()
    service = Service(model, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.close()

    app = FastAPI(
        title=f"cclnet: {settings.name}", version=__version__, description=NOTICE, docs_url=None, redoc_url=None,
        lifespan=lifespan, responses={k: REFUSALS[k] for k in (421,)}, dependencies=_documented_token(token),
    )  # fmt: skip
    _add_api(app, service, metrics)
    _add_pages(app, service, token is not None)
    _add_reasons(app)
    app.add_middleware(Guard, host=host, allowed_hosts=allowed_hosts, token=token)
    app.add_middleware(Measured, metrics=metrics, routes=_templates_of_paths(service))
    return app


def _add_api(app: FastAPI, service: Service, metrics: Metrics) -> None:
    settings = service.settings
    card = model_card(
        settings.name, service.model, settings.limits,
        heat_maps=service.heat_maps, examples=bool(settings.examples), kept=settings.kept_in is not None,
    )  # fmt: skip
    app.state.card = card

    @app.post("/predict", summary="What the model says about an image.", responses=REFUSALS,
              openapi_extra={"requestBody": BODY})  # fmt: skip
    async def predict(
        request: Request,
        explain: Annotated[bool, Query(description="Also say where the network looked.")] = False,
        picture: Annotated[bool, Query(description="Also send the upright image back, made small.")] = False,
    ) -> Answer:
        return await service.predict(request, explain, picture)

    @app.get("/model", summary="What the model is, and what this server takes.")
    async def about() -> ModelCard:
        return card

    @app.get("/examples/{index}", summary="Training images of a class, where they may be shown.",
             responses={404: {"model": Reason, "description": "No such class, or not to be shown."},
                        422: {"model": Reason, "description": "The number of a class, from 0."}})  # fmt: skip
    async def examples(index: Annotated[int, Path(ge=0, description="Place among the classes.")]) -> Examples:
        classes = service.model.classes
        if index >= len(classes) or not settings.examples:
            raise Refused(404, "There are no examples of this class to show.")
        return Examples(name=classes[index], pictures=settings.examples.get(classes[index], []))

    @app.get("/healthz", summary="Whether the server is up. Needs no token.")
    async def healthz() -> Health:
        return Health(status="ok")

    @app.get("/metrics", summary="Counters in the text format of Prometheus.", response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _add_pages(app: FastAPI, service: Service, with_token: bool) -> None:
    page = render("page.html", card=app.state.card, limits=service.settings.limits, with_token=with_token)

    @app.get("/", include_in_schema=False)
    async def front() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi(), str(request.base_url).rstrip("/"), with_token))

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in static_files():
            raise Refused(404, "There is nothing here.")
        content, kind = static_files()[name]
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})


def _add_reasons(app: FastAPI) -> None:
    """Whatever goes wrong is told in one form: {"reason": words}."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"reason": error.reason}, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        words = {404: "There is nothing here.", 405: "This address does not take that method."}
        return JSONResponse(
            {"reason": words.get(error.status_code, str(error.detail))}, error.status_code, error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors())
        return JSONResponse({"reason": f"{faults}."}, 422)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"reason": "Something went wrong here, not with your request. It has been noted."}, 500)


def _documented_token(token: str | None) -> list[Any]:
    """Says in the schema that a token is needed; the guard is what asks for it."""
    return [] if token is None else [Depends(HTTPBearer(auto_error=False))]


def _templates_of_paths(service: Service) -> dict[str, str]:
    """Paths that are counted under a name of their own; whatever else is asked for is one more."""
    plain = ("/", "/predict", "/model", "/healthz", "/metrics", "/docs", "/openapi.json", "/sign-in")
    templates = {path: path for path in plain}
    templates |= {f"/static/{name}": "/static/{name}" for name in static_files()}
    return templates | {f"/examples/{k}": "/examples/{index}" for k in range(len(service.model.classes))}
