"""The application: API and pages, what stands before them, and what is said when something goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from cclnet import __version__
from cclnet.deploy.model import Model
from cclnet.deploy.serve.about import ModelCard, model_card
from cclnet.deploy.serve.api import api
from cclnet.deploy.serve.docs import docs_page
from cclnet.deploy.serve.guard import Guard, host_of
from cclnet.deploy.serve.limits import Limits, Refused
from cclnet.deploy.serve.metrics import Measured, Metrics
from cclnet.deploy.serve.nursery import Nursery
from cclnet.deploy.serve.page import render, static_files
from cclnet.deploy.serve.service import ServeSettings, Service
from cclnet.deploy.serve.words import NOTICE


def create_app(
    model: Model,
    settings: ServeSettings,
    *,
    host: str = "127.0.0.1",
    allowed_hosts: tuple[str, ...] = (),
    token: str | None = None,
    nursery: Nursery | None = None,
    ready: Callable[[], object] = lambda: None,
) -> FastAPI:
    """A model as an ASGI application: the page, the API, health and metrics.

    ``nursery`` starts the processes that read uploads, where one is there already; ``ready`` is called when the first
    request can be answered.
    """
    service = Service(model, settings, Metrics(), nursery)
    card = model_card(
        settings.name,
        model,
        settings.limits,
        heat_maps=service.heat_maps,
        examples=bool(settings.examples),
        kept=settings.kept_in is not None,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        ready()
        yield
        await service.close()

    app = FastAPI(
        title=f"cclnet: {settings.name}",
        version=__version__,
        description=NOTICE,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.include_router(api(service, card, token is not None))
    _add_pages(app, card, settings.limits, token is not None, allowed_hosts)
    _add_reasons(app)
    app.add_middleware(Guard, host=host, allowed_hosts=allowed_hosts, token=token)
    app.add_middleware(Measured, metrics=service.metrics, routes=_templates_of_paths(len(model.classes)))
    return app


def _add_pages(app: FastAPI, card: ModelCard, limits: Limits, with_token: bool, allowed_hosts: Iterable[str]) -> None:
    page = render("page.html", card=card, limits=limits)

    @app.get("/", include_in_schema=False)
    async def front() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        name, plain = host_of(request.headers.get("host", "")), str(request.base_url).rstrip("/")
        # Names that were allowed are those of a proxy; a token must not be sent to one in the clear.
        behind = name in {host.lower() for host in allowed_hosts}
        address = plain.replace("http://", "https://", 1) if behind else plain
        return HTMLResponse(docs_page(app.openapi(), address, with_token))

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
        reason = words.get(error.status_code, str(error.detail))
        return JSONResponse({"reason": reason}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors())
        return JSONResponse({"reason": f"{faults}."}, 422)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"reason": "Something went wrong here, not with your request. It has been noted."}, 500)


def _templates_of_paths(classes: int) -> dict[str, str]:
    """Paths that are counted under a name of their own; whatever else is asked for is one more."""
    plain = ("/", "/predict", "/model", "/healthz", "/metrics", "/docs", "/openapi.json", "/sign-in")
    templates = {path: path for path in plain}
    templates |= {f"/static/{name}": "/static/{name}" for name in static_files()}
    return templates | {f"/examples/{k}": "/examples/{index}" for k in range(classes)}
