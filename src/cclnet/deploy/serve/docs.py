"""The page that describes the API, from its own schema. The usual ones fetch their scripts from elsewhere."""

from __future__ import annotations

import re
from typing import Any

from cclnet.deploy.serve.page import render

Schema = dict[str, Any]


def docs_page(schema: Schema, address: str, with_token: bool) -> str:
    """The calls of an OpenAPI schema, each with a line to try it, and what the answers hold."""
    calls = [
        _call(path, method, call, address, with_token)
        for path, methods in schema["paths"].items()
        for method, call in methods.items()
    ]
    described = [
        (
            name,
            one.get("description", ""),
            [(f, kind(p), p.get("description", "")) for f, p in one["properties"].items()],
        )
        for name, one in schema["components"]["schemas"].items()
        if "properties" in one
    ]
    return render("docs.html", calls=calls, schemas=described, info=schema["info"], with_token=with_token)


def _call(path: str, method: str, call: Schema, address: str, with_token: bool) -> Schema:
    body = call.get("requestBody", {}).get("content", {})
    token = " -H 'Authorization: Bearer TOKEN'" if with_token and path != "/healthz" else ""
    form, query = (" -F image=@photo.jpg", "?explain=true") if body else ("", "")
    return {
        "method": method.upper(),
        "path": path,
        "summary": call.get("summary", ""),
        "curl": f"curl{token}{form} '{address}{re.sub('{.*?}', '0', path)}{query}'",
        "body": list(body),
        "parameters": [_parameter(one) for one in call.get("parameters", [])],
        "answers": [
            (status, answer["description"], ", ".join(_content(*one) for one in answer.get("content", {}).items()))
            for status, answer in call["responses"].items()
        ],
    }


def _parameter(one: Schema) -> tuple[str, str, str, str]:
    default = "" if one.get("required") else f", {str(one['schema'].get('default')).lower()} unless given"
    return one["name"], one["in"], kind(one["schema"]) + default, one.get("description", "")


def _content(media_type: str, content: Schema) -> str:
    return kind(content["schema"]) if "$ref" in content.get("schema", {}) else media_type


def kind(schema: Schema) -> str:
    """What a value is, in words.

    >>> kind({"anyOf": [{"type": "array", "items": {"$ref": "#/components/schemas/Seen"}}, {"type": "null"}]})
    'list of Seen, or null'
    """
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return ", or ".join(map(kind, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {kind(schema['items'])}"
    return str(schema.get("type", "anything"))
