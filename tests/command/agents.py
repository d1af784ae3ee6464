"""Agents of the tests: programs of Python that use nothing of this library."""

from __future__ import annotations

import sys

ASK = """
import json, os, sys, urllib.request

def ask(text):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    headers["Content-Type"] = "application/json"
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

"""
"""What an agent begins with."""


def agent(code: str, *arguments: str) -> tuple[str, ...]:
    """An agent that is a Python program; it can `ask` the model."""
    return (sys.executable, "-c", ASK + code, *arguments)
