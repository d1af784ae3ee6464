"""A gateway in front of a model server: calls of any program become exchanges of a rollout.

    async with otel_rollout.gateway.serve("http://127.0.0.1:8000/v1") as gateway:
        with rollout("agent"):
            subprocess.run(command, env={**os.environ, **gateway.environment()})

A gateway is a process that continues rollouts. It needs the extra `gateway`.
"""

from otel_rollout.gateway.application import LIMITS as LIMITS
from otel_rollout.gateway.application import Settings as Settings
from otel_rollout.gateway.around import around as around
from otel_rollout.gateway.around import close_gateways as close_gateways
from otel_rollout.gateway.around import gateway_here as gateway_here
from otel_rollout.gateway.http import ClientGone as ClientGone
from otel_rollout.gateway.http import HeldBodies as HeldBodies
from otel_rollout.gateway.http import Receive as Receive
from otel_rollout.gateway.http import Refusal as Refusal
from otel_rollout.gateway.http import Scope as Scope
from otel_rollout.gateway.http import Send as Send
from otel_rollout.gateway.http import answer as answer
from otel_rollout.gateway.http import is_foreign as is_foreign
from otel_rollout.gateway.http import read_body as read_body
from otel_rollout.gateway.replaying import ReplayServer as ReplayServer
from otel_rollout.gateway.request_difference import Difference as Difference
from otel_rollout.gateway.serving import Gateway as Gateway
from otel_rollout.gateway.serving import Served as Served
from otel_rollout.gateway.serving import application as application
from otel_rollout.gateway.serving import serve as serve
from otel_rollout.gateway.tokens import TokenError as TokenError
from otel_rollout.gateway.upstream import listening_socket as listening_socket
from otel_rollout.gateway.upstream import root_of as root_of
