"""The web application: API routes, pages, error responses and request metrics around a :class:`Service`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
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
from cclnet.deploy.serve.decoding import FORM_FIELD
from cclnet.deploy.serve.guard import Guard, host_of
from cclnet.deploy.serve.limits import Refused, busy
from cclnet.deploy.serve.service import ServeSettings, Service

UPLOAD_SCHEMA = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": [FORM_FIELD],
                "properties": {FORM_FIELD: {"type": "string", "format": "binary", "description": "The image file."}},
            }
        },
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}
REFUSALS = {
    400: "The form is invalid, or the connection was closed.",
    401: "The token is missing or wrong.",
    403: "Sent by a page of another site.",
    404: "Unknown class, or examples are not shown.",
    408: "The upload took too long.",
    413: "The file is too large.",
    415: "The body is neither a form nor an image.",
    421: "Unknown host name.",
    422: "The upload or a parameter is invalid; see the reason.",
    431: "The headers are too long.",
    503: "Not available now: try again in a moment.",
    507: "Uploads are to be kept, but cannot be written.",
}
CONTENT_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def create_app(
    model: Model,
    settings: ServeSettings,
    *,
    host: str = "127.0.0.1",
    allowed_hosts: Sequence[str] = (),
    token: str | None = None,
    on_ready: Callable[[], object] = lambda: None,
) -> FastAPI:
    """Return the ASGI application that serves a model; it calls ``on_ready`` when it can answer requests."""
    service = Service(model, settings)
    info = model_info(
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
        on_ready()
        yield
        await service.close()

    title = f"cclnet: {settings.name}"
    # FastAPI's own documentation pages load scripts from another server.
    app = FastAPI(
        title=title, version=__version__, description=NOTICE, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    _add_api(app, service, info, token is not None)
    _add_pages(app, info, settings, token is not None, allowed_hosts)
    _add_error_handlers(app)

    def sign_in_page(error: str) -> str:
        return render("sign_in.html", error=error)

    app.add_middleware(Guard, host=host, allowed_hosts=allowed_hosts, token=token, sign_in_page=sign_in_page)
    app.add_middleware(RequestMetrics, service=service, routes=_route_labels(len(model.classes)))
    return app


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Reason, "description": REFUSALS[status]} for status in statuses}


def _add_api(app: FastAPI, service: Service, info: ModelInfo, with_token: bool) -> None:
    """Add the API. The dependency on a token only documents it in the schema; :class:`Guard` checks it."""
    public = APIRouter(responses=_refusals(421, 431))
    dependencies = [Depends(HTTPBearer(auto_error=False))] if with_token else []
    private = APIRouter(dependencies=dependencies, responses=_refusals(421, 431, *([401] if with_token else [])))

    @private.post(
        "/predict",
        summary="Predict the class of an image.",
        response_description="The prediction.",
        responses=_refusals(400, 403, 408, 413, 415, 422, 503, 507),
        openapi_extra={"requestBody": UPLOAD_SCHEMA},
    )
    async def predict(
        request: Request,
        explain: Annotated[bool, Query(description="Add a heat map of the evidence.")] = False,
        picture: Annotated[bool, Query(description="Add a preview of the upright image.")] = False,
    ) -> Answer:
        return await service.predict(request, explain, picture)

    @private.get("/model", summary="Describe the model and the upload limits.", response_description="The model.")
    async def model() -> ModelInfo:
        return info

    @private.get(
        "/examples/{index}",
        summary="Training images of a class, if the server may show them.",
        response_description="The images.",
        responses=_refusals(404, 422),
    )
    async def examples(index: Annotated[int, Path(ge=0, description="Index of the class.")]) -> Examples:
        classes, pictures = service.model.classes, service.settings.examples
        if index >= len(classes) or not pictures:
            raise Refused(404, "There are no examples of this class to show.")
        return Examples(name=classes[index], pictures=pictures.get(classes[index], []))

    @private.get(
        "/metrics",
        summary="Metrics in the text format of Prometheus.",
        response_description="The metrics.",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(service.metrics.registry), media_type=content_type)

    @public.get(
        "/healthz",
        summary="Liveness: whether the server runs, or recovers by itself. Needs no token.",
        response_description="It does.",
        responses={503: {"model": Reason, "description": "It must be restarted."}},
    )
    async def healthz() -> Status:
        if not service.healthy:
            raise Refused(503, "This server cannot recover by itself: restart it.")
        return Status(status="ok")

    @public.get(
        "/readyz",
        summary="Readiness: whether the server can answer /predict now. Needs no token.",
        response_description="It can.",
        responses=_refusals(503),
    )
    async def readyz() -> Status:
        if not service.ready:
            raise busy("The decoding processes are being restarted.")
        return Status(status="ready")

    app.include_router(private)
    app.include_router(public)


def _add_pages(
    app: FastAPI, info: ModelInfo, settings: ServeSettings, with_token: bool, allowed_hosts: Sequence[str]
) -> None:
    page = render("page.html", model=info, limits=settings.limits)
    proxies = {host.lower() for host in allowed_hosts}

    @app.get("/", include_in_schema=False)
    async def front() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        address = str(request.base_url).rstrip("/")
        if host_of(request.headers.get("host", "")) in proxies:  # a token must not be sent to a proxy unencrypted
            address = address.replace("http://", "https://", 1)
        return HTMLResponse(render("docs.html", schema=app.openapi(), address=address, with_token=with_token))

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in static_files():
            raise Refused(404, "There is nothing at this address.")
        kind = CONTENT_TYPES[name.rpartition(".")[2]]
        return Response(static_files()[name], media_type=kind, headers={"cache-control": "no-cache"})


def _add_error_handlers(app: FastAPI) -> None:
    """Give all errors the same form: {"reason": "…"}."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"reason": error.reason}, error.status, error.headers)

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

    def __init__(self, app: ASGIApp, service: Service, routes: dict[str, str]) -> None:
        self.app, self.service, self.routes = app, service, routes

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


def _route_labels(classes: int) -> dict[str, str]:
    """Return the label of each path. It also covers requests that the guard refuses, which reach no route."""
    fixed = ("/", "/predict", "/model", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/sign-in")
    labels = {path: path for path in fixed}
    labels |= {f"/static/{name}": "/static/{name}" for name in static_files()}
    return labels | {f"/examples/{k}": "/examples/{index}" for k in range(classes)}


def render(template: str, **context: Any) -> str:
    """Fill in a template of this package; all values are escaped."""
    return _templates().get_template(template).render(version=__version__, notice=NOTICE, **context)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("cclnet.deploy.serve"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["schema_type"] = schema_type
    return environment


@cache
def static_files() -> dict[str, bytes]:
    """Return the scripts and the style sheet of the pages by name. The style sheet extends that of the reports."""
    package = files("cclnet")
    templates = package / "deploy" / "serve" / "templates"
    found = {item.name: item.read_bytes() for item in templates.iterdir() if item.name.endswith((".css", ".js"))}
    found["page.css"] = (package / "report" / "templates" / "page.css").read_bytes() + found["page.css"]
    return found


def schema_type(schema: dict[str, Any]) -> str:
    """Return the type of an OpenAPI schema in words.

    >>> schema_type({"anyOf": [{"type": "array", "items": {"$ref": "#/components/schemas/Seen"}}, {"type": "null"}]})
    'list of Seen, or null'
    """
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return ", or ".join(map(schema_type, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {schema_type(schema['items'])}"
    return str(schema.get("type", "anything"))
