"""The web application: API routes, pages, error responses and request metrics around a :class:`Service`."""

from __future__ import annotations

import pathlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cclnet import __version__
from cclnet.deploy.predictor import Model
from cclnet.deploy.serve.answers import NOTICE, Answer, Examples, ModelInfo, Reason, Status, model_info
from cclnet.deploy.serve.guard import Guard, Refused, ServeSettings, busy, host_of
from cclnet.deploy.serve.service import Service
from cclnet.settings import read_settings

API = read_settings(pathlib.Path(__file__).with_name("api.toml"))
LOADER = PackageLoader("cclnet.deploy.serve")
TEMPLATES = Environment(loader=LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def create_app(model: Model, settings: ServeSettings, on_ready: Callable[[], object] = lambda: None) -> FastAPI:
    """Return the ASGI application that serves a model; it calls ``on_ready`` when it can answer requests."""
    service, info = Service(model, settings), model_info(model, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        on_ready()
        yield
        await service.close()

    app = FastAPI(title=f"cclnet: {settings.name}", version=__version__, description=NOTICE, lifespan=lifespan,
                  docs_url=None, redoc_url=None)  # fmt: skip  # these would load scripts from another server
    _add_api(app, service, info)
    _add_pages(app, info, settings)
    _add_error_handlers(app)
    app.add_middleware(Guard, settings=settings, sign_in_page=lambda error: render("sign_in.html", error=error))
    app.add_middleware(RequestMetrics, service=service)
    return app


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Reason, "description": API["refusals"][str(status)]} for status in statuses}


def _route(path: str) -> dict[str, Any]:
    """Return the arguments of a route decorator, with the descriptions in api.toml."""
    about = dict(API["routes"][path])
    responses = _refusals(*about.pop("refusals", ()))
    for status, changes in about.pop("responses", {}).items():
        responses[int(status)] = {**responses.get(int(status), {}), **changes}
    return {"path": path, "responses": responses, **about}


def _add_api(app: FastAPI, service: Service, info: ModelInfo) -> None:
    """Add the API. The dependency on a token only documents it in the schema; :class:`Guard` checks it."""
    public = APIRouter(responses=_refusals(421, 431))
    dependencies = [Depends(HTTPBearer(auto_error=False))] if service.settings.token else []
    private = APIRouter(dependencies=dependencies, responses=_refusals(421, 431, *([401] if dependencies else [])))

    @private.post(**_route("/predict"), openapi_extra={"requestBody": API["upload"]})
    async def predict(
        request: Request,
        explain: Annotated[bool, Query(description="Add a heat map of the evidence.")] = False,
        picture: Annotated[bool, Query(description="Add a preview of the upright image.")] = False,
    ) -> Answer:
        return await service.predict(request, explain, picture)

    @private.get(**_route("/model"))
    async def model() -> ModelInfo:
        return info

    @private.get(**_route("/examples/{index}"))
    async def examples(index: Annotated[int, Path(ge=0, description="Index of the class.")]) -> Examples:
        classes, pictures = service.model.classes, service.settings.examples
        if index >= len(classes) or not pictures:
            raise Refused(404, "There are no examples of this class to show.")
        return Examples(name=classes[index], pictures=pictures.get(classes[index], []))

    @private.get(**_route("/metrics"), response_class=Response)
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(service.metrics.registry), media_type=content_type)

    @public.get(**_route("/healthz"))
    async def healthz() -> Status:
        if not service.healthy:
            raise Refused(503, "This server cannot recover by itself: restart it.")
        return Status(status="ok")

    @public.get(**_route("/readyz"))
    async def readyz() -> Status:
        if not service.ready:
            raise busy("The decoding processes are being restarted.")
        return Status(status="ready")

    app.include_router(private)
    app.include_router(public)


def _add_pages(app: FastAPI, info: ModelInfo, settings: ServeSettings) -> None:
    page = render("page.html", model=info, limits=settings.limits)
    proxies = {host.lower() for host in settings.allowed_hosts}

    @app.get("/", include_in_schema=False)
    async def front() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        address = str(request.base_url).rstrip("/")
        if host_of(request.headers.get("host", "")) in proxies:  # a token must not be sent to a proxy unencrypted
            address = address.replace("http://", "https://", 1)
        return HTMLResponse(render("docs.html", schema=app.openapi(), address=address, with_token=bool(settings.token)))

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in static_files():
            raise Refused(404, "There is nothing at this address.")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(static_files()[name], media_type=kind, headers={"cache-control": "no-cache"})


def _add_error_handlers(app: FastAPI) -> None:
    """Give all errors the same form: {"reason": "…"}."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        reasons = {404: "There is nothing at this address.", 405: "This address does not accept that method."}
        reason = reasons.get(error.status_code, str(error.detail))
        return JSONResponse({"reason": reason}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())
        return JSONResponse({"reason": f"{errors}."}, 422)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"reason": "Internal error. The server has logged it."}, 500)


class RequestMetrics:
    """ASGI middleware that counts and times requests by route. Unknown paths share one label."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        # By path: requests that the guard refuses reach no route.
        fixed = ("/", "/predict", "/model", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/sign-in")
        self.routes = {path: path for path in fixed}
        self.routes |= {f"/static/{name}": "/static/{name}" for name in static_files()}
        self.routes |= {f"/examples/{k}": "/examples/{index}" for k in range(len(service.model.classes))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.service.requests_in_progress += 1
        try:
            await self.app(scope, receive, observed)
        finally:
            self.service.requests_in_progress -= 1
            route = self.routes.get(scope["path"], "other")
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            self.service.metrics.requests.labels(route, method, str(status)).inc()
            if route == "/predict" and method == "POST":
                self.service.metrics.predict_seconds.observe(time.perf_counter() - start)


def render(template: str, **context: Any) -> str:
    """Fill in a template of this package; all values are escaped."""
    return TEMPLATES.get_template(template).render(version=__version__, notice=NOTICE, **context)


@cache
def static_files() -> dict[str, bytes]:
    """Return the scripts and the style sheet of the pages by name. The style sheet extends that of the reports."""
    package = files("cclnet")
    templates = package / "deploy" / "serve" / "templates"
    found = {item.name: item.read_bytes() for item in templates.iterdir() if item.name.endswith((".css", ".js"))}
    found["page.css"] = (package / "report" / "templates" / "page.css").read_bytes() + found["page.css"]
    return found
