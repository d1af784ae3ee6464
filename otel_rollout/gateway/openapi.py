"""The control routes, described: as OpenAPI, and as a small page for people."""

from __future__ import annotations

from html import escape

from otel_rollout.wire import Json

_TEXT: Json = {"type": "string"}
_ID: Json = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "The rollout's id, as POST /rollouts gave it.",
    "schema": _TEXT,
}


def _body(**properties: Json) -> Json:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"content": {"application/json": {"schema": schema}}}


def _doc(description: str, text: Json) -> Json:
    return {"description": description, **text}


def _operation(summary: str, body: Json, replies: dict[str, str]) -> Json:
    return {
        "summary": summary,
        "requestBody": body,
        "security": [{"secret": []}, {}],
        "responses": {status: {"description": text} for status, text in replies.items()},
    }


_WRONG = {
    "400": "The request is wrong, as the error has it.",
    "401": "The secret is missing.",
}
_MISSING = {"404": "No such rollout was begun here, or it has ended."}

OPENAPI: Json = {
    "openapi": "3.1.0",
    "info": {
        "title": "otel-rollout gateway",
        "version": "1",
        "description": "Begin a rollout, point a program at its base URL, reward it, end it. "
        "Every model call of the program is recorded as part of the rollout.",
    },
    "components": {"securitySchemes": {"secret": {"type": "http", "scheme": "bearer"}}},
    "paths": {
        "/rollouts": {
            "post": _operation(
                "Begin a rollout; the reply has its id, its base URLs and its environment",
                _body(
                    name=_doc("Name of the agent.", _TEXT),
                    task_id=_doc("The task that it works on.", {"type": ["string", "integer"]}),
                    group_id=_doc(
                        "The group of samples that a trainer compares.",
                        {"type": ["string", "integer"]},
                    ),
                    sample_index=_doc("Number of this sample in its group.", {"type": "integer"}),
                    metadata=_doc("JSON values of yours.", {"type": "object"}),
                    timeout_seconds=_doc(
                        "Seconds without a model call after which it ends as an error.",
                        {"type": "number", "exclusiveMinimum": 0},
                    ),
                ),
                {"201": "It has begun.", **_WRONG},
            )
        },
        "/rollouts/{id}": {
            "parameters": [_ID],
            "patch": _operation(
                "Reward a rollout that runs",
                _body(
                    reward=_doc("The reward.", {"type": "number"}),
                    name=_doc("Its name; none: it is the rollout's own.", _TEXT),
                    completion_id=_doc("The completion that is meant; none: the rollout.", _TEXT),
                    explanation=_doc("Why.", _TEXT),
                    weight=_doc("Its weight in the rollout's reward.", {"type": "number"}),
                    label=_doc("The score in a word.", _TEXT),
                ),
                {"200": "It is rewarded.", **_WRONG, **_MISSING},
            ),
            "delete": _operation(
                "End a rollout",
                _body(
                    output=_doc("What it gave, any JSON value.", {}),
                    error=_doc("What it failed with; none: it is complete.", _TEXT),
                ),
                {"200": "It has ended, and goes to the exporters.", **_WRONG, **_MISSING},
            ),
        },
    },
}
"""The description of the control routes."""


def _row(method: str, path: str, operation: Json) -> str:
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    members = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(member['description'])}</td></tr>"
        for name, member in schema["properties"].items()
    )
    title = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    return f"{title}<p>{escape(operation['summary'])}.</p><table>{members}</table>"


def _page() -> str:
    rows = "".join(
        _row(method, path, operation)
        for path, methods in OPENAPI["paths"].items()
        for method, operation in methods.items()
        if method != "parameters"
    )
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;"
        "color-scheme:light dark}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
    )
    info = OPENAPI["info"]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{info["title"]}</title>'
        f"<style>{style}</style><h1>{info['title']}</h1><p>{escape(info['description'])}</p>"
        f"<p>With a secret, send <code>Authorization: Bearer SECRET</code>. "
        f'The same for programs: <a href="openapi.json">openapi.json</a>.</p>{rows}</html>'
    )


PAGE = _page()
"""The same for people, without anything from elsewhere."""
