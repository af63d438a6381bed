"""The ASGI application: routes, authorization, limits, and how answers travel."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from h2o_stream.serve.access import Gate
from h2o_stream.serve.aside import LONG, PatientDecoder, aside, patient_json
from h2o_stream.serve.chat import answer_chat, parse_chat, previous_chat, stream_chat
from h2o_stream.serve.completions import answer_completion, parse_completion, stream_completion
from h2o_stream.serve.errors import ApiError, wrong
from h2o_stream.serve.fields import ELSEWHERE, Endpoint, read_fields
from h2o_stream.serve.grammars import ASKER
from h2o_stream.serve.requests import is_kept, parse_json
from h2o_stream.serve.response_events import stream_response
from h2o_stream.serve.responses import answer_response, parse_response
from h2o_stream.serve.service import Service
from h2o_stream.serve.sse import streamed, while_connected
from h2o_stream.serve.wording import renamed

_log = logging.getLogger(__name__)

_PAGE = Path(__file__).with_name("page")

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Of the page and its files. Nothing in it comes from elsewhere, and no text of a reply becomes a script."""

_UNKNOWN = "h2o-unknown-fields"
"""Header of answers: fields of the request that are not in the table."""

_BODIES = 16
"""How many requests of the largest size are held at once. Short ones are never refused for the sake of long ones."""

_SERVED = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /health and /metrics"


def make_app(service: Service) -> Starlette:
    """The application of a service, which it starts and closes."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.close)

    posts: dict[Endpoint, Callable[[Service, Request, dict[str, Any]], Awaitable[Response]]] = {
        "chat/completions": _chat,
        "completions": _completion,
        "responses": _response,
    }
    gets: dict[str, Callable[[Service, Request], Response]] = {
        "/v1/models": _models,
        "/v1/models/{name:path}": _model,
        "/health": _health,
        "/metrics": _metrics,
    }
    routes = [
        Route("/", lambda request: FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)),
        Mount("/page", _PageFiles(directory=_PAGE)),
        *(Route(path, partial(_answer_get, service, handler)) for path, handler in gets.items()),
        *(
            Route(f"/v1/{endpoint}", partial(_answer_post, service, handler, endpoint), methods=["POST"])
            for endpoint, handler in posts.items()
        ),
    ]
    handlers = {HTTPException: _http_error, Exception: _unexpected}
    middleware = [Middleware(Gate, access=service.access)]
    if origins := service.config.allow_origin:
        methods, headers = ("GET", "POST"), ("*",)
        middleware.append(Middleware(CORSMiddleware, origins, allow_methods=methods, allow_headers=headers))
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)  # type: ignore[arg-type]


class _PageFiles(StaticFiles):
    """The files of the page, which browsers ask for again each time."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """See `StaticFiles`."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


async def _answer_get(service: Service, handler: Callable[[Service, Request], Response], request: Request) -> Response:
    try:
        if handler is not _health:
            service.access.owner(request.headers)
        return handler(service, request)
    except ApiError as error:
        return _refusal(error)


async def _answer_post(
    service: Service,
    handler: Callable[[Service, Request, dict[str, Any]], Awaitable[Response]],
    endpoint: Endpoint,
    request: Request,
) -> Response:
    names: Mapping[str, str] = {}
    request.state.size = 0
    try:
        request.state.owner = service.access.owner(request.headers)
        ASKER.set(request.state.owner or (request.client.host if request.client else ""))
        body = await _body(service, request)
        fields, unknown, names = await aside(request.state.size, partial(read_fields, body, endpoint))
        _check_names(service, fields.get("model"), unknown)
        response = await handler(service, request, fields)
        if unknown:
            response.headers[_UNKNOWN] = _shown(unknown)
    except ApiError as error:
        response = _refusal(renamed(error, names))
    except ClientDisconnect:
        response = Response(status_code=499)
    finally:
        service.body_bytes -= request.state.size
    service.metrics.answered(f"/v1/{endpoint}", response.status_code)
    return response


async def _body(service: Service, request: Request) -> dict[str, Any]:
    parts = list[bytes]()
    _check_size(service, request, int(request.headers.get("content-length", 0)))
    try:
        async with asyncio.timeout(service.config.unread_s):
            async for part in request.stream():
                parts.append(part)
                _check_size(service, request, len(part))
                request.state.size += len(part)
                service.body_bytes += len(part)
    except TimeoutError as error:
        raise ApiError(408, f"the request took longer than {service.config.unread_s:g} s to arrive") from error
    try:
        data = b"".join(parts)
        size = request.state.size
        body = await aside(size, partial(parse_json, data, PatientDecoder if size >= LONG else None))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is not JSON: {str(error)[:100]}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the request is not a JSON object", code="invalid_json")
    return body


def _check_size(service: Service, request: Request, new: int) -> None:
    """Refuse a request that is too large, or a long one while others hold as much memory as bodies may."""
    size, limit = request.state.size + new, service.config.max_body
    if size > limit:
        raise ApiError(413, f"the request is larger than {limit} bytes", code="too_large")
    if size >= LONG and service.body_bytes + new > _BODIES * limit:
        raise ApiError(503, "the server is reading other long requests", code="busy", retry_after_s=2)


def _check_names(service: Service, model: Any, unknown: Sequence[str]) -> None:
    """Say, or with ``--strict`` refuse, what a request names and this server does not have."""
    if model is not None and not isinstance(model, str):
        raise wrong("model", model, "a text")
    if unknown:
        _log.info("fields that nobody documents are not followed: %s", _shown(unknown))
        if service.config.strict:
            raise ApiError(400, f"nobody documents the field {_shown(unknown[:1])}", unknown[0], "unknown_parameter")
    if model not in (None, "", "h2o", service.name, service.model.name):
        _log.info("a request names the model %s; %s answers", _shown([model]), service.name)
        if service.config.strict:
            raise _no_model(service, model)


def _no_model(service: Service, name: str) -> ApiError:
    message = f"there is no model {name[:60]}; this server has {service.name}"
    return ApiError(404, message, "model", "model_not_found")


def _shown(names: Sequence[str]) -> str:
    """Names of a request, as a header can have them."""
    return ", ".join(name[:60].encode("unicode_escape").decode().replace(" ", r"\x20") for name in names[:10])


async def _chat(service: Service, request: Request, body: dict[str, Any]) -> Response:
    after, keep = previous_chat(body), is_kept(body)
    asked = await aside(request.state.size, partial(parse_chat, body, service, request.state.owner))
    if not asked[2].stream:
        answer = await while_connected(request, answer_chat(service, asked, after, keep))
        return await _whole(answer, asked[2].listed)
    name = secrets.token_hex(16)
    dialogue, options, sampled = asked
    opened = service.replies([dialogue], options, sampled, after, keep, response=name)
    return await streamed(request, opened, partial(stream_chat, service, asked, name))


async def _completion(service: Service, request: Request, body: dict[str, Any]) -> Response:
    asked = await aside(request.state.size, partial(parse_completion, body, service))
    if not asked.sampled.stream:
        answer = await while_connected(request, answer_completion(service, asked))
        return await _whole(answer, asked.sampled.listed * len(asked.prompts))
    return await streamed(request, asked.replies(service), partial(stream_completion, service, asked))


async def _response(service: Service, request: Request, body: dict[str, Any]) -> Response:
    asked = await aside(request.state.size, partial(parse_response, body, service, request.state.owner))
    if not asked.sampled.stream:
        return JSONResponse(await while_connected(request, answer_response(service, asked)))
    return await streamed(request, asked.replies(service), partial(stream_response, service, asked), named=True)


async def _whole(answer: Mapping[str, Any], listed: int) -> Response:
    """The response with an answer, which lists so many tokens at most."""
    if listed < LONG:
        return JSONResponse(answer)
    return Response(await aside(listed, partial(patient_json, answer)), media_type="application/json")


def _models(service: Service, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_described(service)]})


def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name != service.name:
        raise _no_model(service, name)
    return JSONResponse(_described(service))


def _described(service: Service) -> dict[str, Any]:
    cache = service.options.cache
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "h2o_stream",
        "h2o": {"policy": cache.policy, "window": cache.window, "context": service.model.model.context},
    }


def _health(service: Service, request: Request) -> Response:
    return JSONResponse({"status": "ok", "active": service.active})


def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics_text(), media_type="text/plain; version=0.0.4")


def _refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code not in (404, 405):
        return _refusal(ApiError(error.status_code, error.detail))
    path = request.scope["path"]
    why = next((why for part in path.split("/") if (why := ELSEWHERE.get(part))), error.detail)
    response = _refusal(ApiError(error.status_code, f"{request.method[:60]} {path[:60]}: {why}. Served are {_SERVED}"))
    response.headers.update(error.headers or {})  # which methods there are
    return response


async def _unexpected(_: Request, error: Exception) -> Response:  # which uvicorn logs
    return _refusal(ApiError(500, f"unexpected {type(error).__name__}"))
