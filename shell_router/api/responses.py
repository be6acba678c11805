"""/v1/responses: OpenAI's newer shape of a chat, translated to a chat completion and back."""

from contextlib import nullcontext
from hashlib import blake2b

import orjson

from shell_router.api.admission import ADMISSION
from shell_router.api.background import PREFIX, BackgroundResponse, find_response
from shell_router.api.bodies import as_json, read_object
from shell_router.api.chat import answer_chat, count_prompt
from shell_router.api.conversation import drop_other_tools
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.response_translation import (
    OWN_FIELDS,
    RESPONSE,
    STATEFUL,
    ResponseTranslation,
    as_chat,
)
from shell_router.api.runs import KEY_HEADER, make_reuse_error, read_key, read_position
from shell_router.api.services import SERVICES
from shell_router.api.translation import name_own_fields
from shell_router.http.app import Reply, Request


async def create_response(request: Request) -> Reply:
    """Answer in the shape of OpenAI's responses, by way of a chat completion."""
    sent, ignored = drop_other_tools(await read_object(request), "function")
    body, chat, places = as_chat(sent)
    ignored += RESPONSE.find_unknown(sent, STATEFUL)
    if body.get("truncation") == "auto":
        ignored.append("truncation")
    if "verbosity" in body.get("text", {}):
        ignored.append("text.verbosity")
    if body.get("store") and not body.get("background"):
        ignored.insert(0, "store")
    services = request.app[SERVICES]
    warnings = note_ignored(request, ignored)
    id = services.new_id()
    created = int(services.wall())
    is_streamed = body.get("stream", False)
    if body.get("background"):
        is_keyed = KEY_HEADER in request.headers
        if is_keyed:
            id = blake2b(read_key(request).encode(), digest_size=16).hexdigest()
        head = as_json(sent, orjson.OPT_SORT_KEYS)
        response = BackgroundResponse(request, PREFIX + id, head, created, is_streamed, 0, warnings)
        state = await response.look() if is_keyed else None
        if state is not None and state.head != head:
            raise make_reuse_error()
        return await response.show(state)
    translation = ResponseTranslation(id, created, sent, warnings)
    translation.place = read_position(request) if is_streamed else None
    with name_own_fields(request, OWN_FIELDS, places):
        return await answer_chat(request, chat, translation)


async def count_input_tokens(request: Request) -> Reply:
    """Count the tokens of a response's prompt; see `count_prompt`."""
    sent, _ = drop_other_tools(await read_object(request), "function")
    _, chat, places = as_chat(sent)
    with name_own_fields(request, OWN_FIELDS, places):
        tokens = await count_prompt(request, chat)
    return json_reply(request, {"object": "response.input_tokens", "input_tokens": tokens})


async def show_response(request: Request) -> Reply:
    """Answer with a background response as it is now, or with its events."""
    response, state = await find_response(request)
    with request.app[ADMISSION].wait(request) if response.stream else nullcontext():
        return await response.show(state)


async def cancel_response(request: Request) -> Reply:
    """End a background response; one that has ended stays as it is."""
    response, _ = await find_response(request)
    await response.cancel()
    return await show_response(request)
