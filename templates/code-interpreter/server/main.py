"""The code interpreter's HTTP server: what E2B's code-interpreter SDKs ask on port 49999.

`GET /health` answers once the default contexts stand ready. Started by the template's start command, as `user`.
"""

import asyncio
import json
import logging
import os
from typing import Any, Dict

import aiohttp
from aiohttp import web

from contexts import HOME, Context, Contexts, NoSuchLanguage
from languages import normalized

PORT = int(os.environ.get("CODE_INTERPRETER_PORT", "49999"))
# Where a sandbox's own variables are to be had.
ENVD = os.environ.get("ENVD_URL", "http://localhost:49983")
READY_LANGUAGES = ["python", "javascript"]
# Longer than the idle time of whoever is in between.
KEEPALIVE_SECONDS = 640

CONTEXTS = web.AppKey("contexts", Contexts)
log = logging.getLogger("code-interpreter")
routes = web.RouteTableDef()


def text(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=message)


async def body(request: web.Request) -> Dict[str, Any]:
    try:
        value = json.loads(await request.text() or "{}")
    except ValueError as error:
        raise web.HTTPUnprocessableEntity(text=f"body: {error}")
    if not isinstance(value, dict):
        raise web.HTTPUnprocessableEntity(text="body: must be an object")
    return value


def field(value: Dict[str, Any], name: str, kind: type) -> Any:
    found = value.get(name)
    if found is not None and not isinstance(found, kind):
        raise web.HTTPUnprocessableEntity(text=f"{name}: must be a {kind.__name__}")
    return found


def named(request: web.Request) -> Context:
    id = request.match_info["id"]
    context = request.app[CONTEXTS].get(id)
    if context is None:
        raise web.HTTPNotFound(text=f"Context {id} not found")
    return context


@routes.get("/health")
async def health(_request: web.Request) -> web.Response:
    return web.json_response("OK")


@routes.get("/contexts")
async def list_contexts(request: web.Request) -> web.Response:
    return web.json_response([context.describe() for context in request.app[CONTEXTS].list()])


@routes.post("/contexts")
async def create_context(request: web.Request) -> web.Response:
    value = await body(request)
    language, cwd = field(value, "language", str), field(value, "cwd", str) or HOME
    try:
        context = await request.app[CONTEXTS].create(normalized(language), cwd)
    except (NoSuchLanguage, OSError, RuntimeError) as error:
        return text(500, str(error))
    return web.json_response(context.describe())


@routes.delete("/contexts/{id}")
async def remove_context(request: web.Request) -> web.Response:
    await request.app[CONTEXTS].remove(named(request))
    return web.json_response(None)


@routes.post("/contexts/{id}/restart")
async def restart_context(request: web.Request) -> web.Response:
    await named(request).restart()
    return web.json_response(None)


@routes.post("/execute")
async def execute(request: web.Request) -> web.StreamResponse:
    value = await body(request)
    code, id, language = (field(value, name, str) for name in ("code", "context_id", "language"))
    variables = field(value, "env_vars", dict)
    if code is None:
        return text(422, "code: is missing")
    if any(not isinstance(each, str) for each in (variables or {}).values()):
        return text(422, "env_vars: values must be strings")
    if id and language:
        return text(400, "Only one of context_id or language can be provided")
    contexts = request.app[CONTEXTS]
    if id:
        context = contexts.get(id)
        if context is None:
            return text(404, f"Context {id} not found")
    else:
        try:
            context = await contexts.of_language(normalized(language))
        except (NoSuchLanguage, OSError, RuntimeError) as error:
            return text(500, str(error))

    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    token = request.headers.get("X-Access-Token")
    lines = context.execute(code, variables, lambda: sandbox_variables(token))
    try:
        async for line in lines:
            await write(response, line)
        await write(response, {"type": "end_of_execution"})
    finally:
        # Also when the client is gone: that is what interrupts its code.
        await lines.aclose()
    await response.write_eof()
    return response


async def write(response: web.StreamResponse, line: Dict[str, Any]) -> None:
    await response.write(json.dumps(line, ensure_ascii=False, default=str).encode() + b"\n")


async def sandbox_variables(token: str | None) -> Dict[str, str] | None:
    """What the sandbox was given when it was made; None if its agent did not say: code runs all the same."""
    headers = {"X-Access-Token": token} if token else {}
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            async with session.get(f"{ENVD}/envs", headers=headers) as answer:
                answer.raise_for_status()
                return await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError) as error:
        log.warning("the sandbox's variables are not to be had: %s", error)
        return None


@web.middleware
async def open_to_all_origins(request: web.Request, handler) -> web.StreamResponse:
    if request.method == "OPTIONS":
        response = web.Response(status=204)
    else:
        try:
            response = await handler(request)
        except web.HTTPException as answer:
            response = answer
    if not response.prepared:
        wanted = request.headers.get("Access-Control-Request-Headers", "*")
        response.headers.update(
            {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Methods": "*", "Access-Control-Allow-Headers": wanted}
        )
    if isinstance(response, web.HTTPException):
        raise response
    return response


async def allow_streams(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.setdefault("Access-Control-Allow-Origin", "*")


async def stand_ready(app: web.Application):
    contexts = app[CONTEXTS]

    async def ready(language: str) -> None:
        await (await contexts.of_language(language)).warm_up()

    await asyncio.gather(*(ready(language) for language in READY_LANGUAGES))
    yield
    await contexts.close()


def application() -> web.Application:
    app = web.Application(middlewares=[open_to_all_origins])
    app[CONTEXTS] = Contexts()
    app.add_routes(routes)
    app.on_response_prepare.append(allow_streams)
    app.cleanup_ctx.append(stand_ready)
    return app


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    web.run_app(application(), host="0.0.0.0", port=PORT, keepalive_timeout=KEEPALIVE_SECONDS, handler_cancellation=True, access_log=None)
