"""Programs that a rollout starts: with a gateway each is given its environment, else it is counted.

Nothing is set in this process, where other rollouts run at the same time. `subprocess` is given
the environment; a process of `multiprocessing` that is spawned, or comes from a fork server, gets
it with what it is prepared by, before it imports the main module. A forked one needs none: its
calls are captured as they are here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from operator import methodcaller
from typing import Any

from opentelemetry import context as otel_context

from otel_rollout import semconv as sc
from otel_rollout.record.boundary import guarded
from otel_rollout.record.context import CAPTURE_OFF, ROLLOUT
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.hooks import Hook

BASE_URLS = {
    "OPENAI_BASE_URL": "OPENAI_API_KEY",
    "OPENAI_API_BASE": "OPENAI_API_KEY",
    "LLM_BASE_URL": "LLM_API_KEY",
    "ANTHROPIC_BASE_URL": "ANTHROPIC_API_KEY",
    "ANTHROPIC_API_BASE": "ANTHROPIC_API_KEY",
    "GOOGLE_GEMINI_BASE_URL": "GEMINI_API_KEY",
}
"""Variables of base URLs, of OpenAI's clients, LiteLLM and aider, OpenHands, Anthropic's and
Google's clients, each with the variable of its key."""
_GATEWAY = "OTEL_ROLLOUT_GATEWAY"
"""A variable that only programs have whose calls a gateway records."""
_MOST_NAMES = 20
_LONGEST_NAME = 80
_UNKNOWN = "..."
_ENV = 10
"""Place of `env` among the arguments of `Popen`."""
_NOT_SET = "a program that a rollout starts could not be looked at; its calls are not captured"
_variables: ContextVar[dict[str, str] | None] = ContextVar("otel_rollout_variables", default=None)
"""The variables of the process of `multiprocessing` that is being started."""


def beginning() -> ActiveRollout | None:
    """The rollout that a process begins in here."""
    context = otel_context.get_current()
    active = context.get(ROLLOUT, process_state.default)
    if context.get(CAPTURE_OFF) or not isinstance(active, ActiveRollout) or not active.running:
        return None
    return active


def with_variables(env: Mapping[Any, Any] | None, variables: dict[str, str]) -> dict[str, Any]:
    """The environment of a program with these variables.

    env: as it was asked for. None: that of this process. A variable to which it gives a value of
    its own, such as the address of another model server, stays.
    """
    if env is None:
        return {**os.environ, **variables}
    asked = {os.fsdecode(name): value for name, value in env.items()}
    own = {name for name in asked if os.fsdecode(asked[name]) != os.environ.get(name)}
    return asked | {name: value for name, value in variables.items() if name not in own}


def _popen(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    with guarded(_NOT_SET):
        active = beginning()
        if active is not None and active.gateway is not None:
            variables = active.gateway.environment_of(active)
            if len(args) > _ENV:
                args = (*args[:_ENV], with_variables(args[_ENV], variables), *args[_ENV + 1 :])
            else:
                kwargs = {**kwargs, "env": with_variables(kwargs.get("env"), variables)}
        elif active is not None:
            env = args[_ENV] if len(args) > _ENV else kwargs.get("env")
            _note_program(active, args[0] if args else kwargs.get("args", ""), env)
    return wrapped(*args, **kwargs)


def _note_program(active: ActiveRollout, command: Any, env: Mapping[Any, Any] | None) -> None:
    """Count a program whose calls nobody captures, by its name: arguments may be secrets."""
    known = os.environ if env is None else env
    if _GATEWAY in known or sc.ROLLOUT_ID in str(known.get("BAGGAGE", "")):
        return
    models = (*BASE_URLS, *BASE_URLS.values())
    is_given = any(known.get(name) not in (None, "", os.environ.get(name)) for name in models)
    name = _name_of(command)
    given = sc.GIVEN * is_given
    with active.lock:
        active.programs = active.programs or {}
        _count(active.programs, name, given)
    with process_state.forking:
        _count(process_state.programs, name, given)


def _count(programs: dict[tuple[str, str], int], name: str, given: str) -> None:
    names = {name for name, _ in programs}
    which = name if name in names or len(names) < _MOST_NAMES else _UNKNOWN, given
    programs[which] = programs.get(which, 0) + 1


def _name_of(command: Any) -> str:
    """The name of the program that a command starts; "..." where only `Popen` may read it."""
    if isinstance(command, list | tuple):
        return os.path.basename(os.fsdecode(command[0]))[:_LONGEST_NAME] if command else ""
    if not isinstance(command, str | bytes | os.PathLike):
        return _UNKNOWN
    first = os.fsdecode(command).partition(" ")[0]
    if "=" in first:  # a shell assigns it, and it may be a secret
        return "sh"
    return os.path.basename(first)[:_LONGEST_NAME]


# --- multiprocessing


@contextmanager
def starting(process: Any, active: ActiveRollout | None) -> Iterator[None]:
    """A process of `multiprocessing` that starts in the block has the variables of its rollout."""
    variables = None
    if active is not None and active.gateway is not None and not _is_of_older_pool(process, active):
        with guarded(_NOT_SET):
            variables = active.gateway.environment_of(active)
    token = _variables.set(variables)
    try:
        yield
    finally:
        _variables.reset(token)


_POOL = "concurrent.futures.process"
_MADE_IN = "_otel_rollout"
"""Attribute of a pool's queue: the id of the rollout that the pool was made in."""


def _is_of_older_pool(process: Any, active: ActiveRollout) -> bool:
    """True for a worker of an executor that is older than the rollout, and may serve others."""
    if getattr(getattr(process, "_target", None), "__module__", None) != _POOL:
        return False
    queue = next(iter(getattr(process, "_args", ())), None)
    return getattr(queue, _MADE_IN, None) != active.id


def _made(wrapped: Callable[..., Any], executor: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    with guarded(_NOT_SET):
        active = beginning()
        queue = getattr(executor, "_call_queue", None)
        if active is not None and queue is not None:
            setattr(queue, _MADE_IN, active.id)
    return result


def _prepare(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    data = wrapped(*args, **kwargs)
    variables = _variables.get()
    return data if variables is None else {**data, "otel_rollout": _Update(variables)}


class _Update:
    """Its copy in another process is made by an update of the environment there.

    That needs nothing but the standard library: the process may not find this package yet.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def __reduce__(self) -> tuple[Any, ...]:
        environ = Made(getattr, Made(import_module, "os"), "environ")
        return methodcaller("update", self._variables), (environ,)


class Made:
    """Its copy in another process is what a function returns there."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._made = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made


HOOKS = {
    "subprocess": (Hook("Popen", "__init__", _popen),),
    "multiprocessing.spawn": (Hook("", "get_preparation_data", _prepare),),
    _POOL: (Hook("ProcessPoolExecutor", "__init__", _made),),
}
"""The hooks that give programs their environment, by the module that has the method."""
