"""The arguments of each verb, as `argparse` takes them. It imports no verb."""

from __future__ import annotations

from otel_rollout.command.argument_types import (
    address,
    argument,
    count,
    flag,
    key_value,
    lag,
    number,
    option,
    policy_version,
    seconds,
)
from otel_rollout.view import DEFAULT

_INFER = flag(
    "--infer-rollouts", "also make a trajectory of each trace that has model calls, but no rollout"
)
_READ = (argument("sources", nargs="+", metavar="SOURCE", help="see otel-rollout --help"), _INFER)
_ONLY = option("--where", "EXPR", "only those of which this is true")
_SEARCH = option(
    "--search",
    "TEXT",
    'only those whose messages, errors, logs or ids have these words, or this "phrase"',
)
_SORT = option(
    "--sort",
    "FIELD",
    "in order of a field, --sort=-FIELD from the greatest on; unknown ones are last",
)
_CHOICE = (*_READ, _ONLY, _SORT)
"""Sources, which of their trajectories, and in which order."""
_JOBS = option(
    "--jobs",
    "N",
    "processes that read files of trajectories; the output is the same; default: 1",
    type=count,
    default=1,
)
_JSON = flag("--json", "print JSON objects, one a line")
_FORCE = flag("--force", "replace what is there already")
_ROLLOUT_TIMEOUT = option(
    "--rollout-timeout",
    "S",
    "seconds after its last span in which a rollout may become whole; default: 3600",
    type=seconds,
    default=3600.0,
)

REBUILD = (
    argument("sources", nargs="*", metavar="SOURCE", help="see otel-rollout --help"),
    *_CHOICE[1:],
    argument("-o", "--output", default="-", metavar="FILE", help="where to write; default: stdout"),
    _FORCE,
    option(
        "--kafka",
        "BROKERS",
        "rebuild from one topic of these brokers (HOST:PORT,...) into another, until a signal",
    ),
    option("--spans-topic", "TOPIC", "default: %(default)s", default="spans"),
    option("--trajectories-topic", "TOPIC", "default: %(default)s", default="trajectories"),
    option(
        "--consumer",
        "NAME",
        "processes of one name share the partitions; default: %(default)s",
        default="otel-rollout",
    ),
    _ROLLOUT_TIMEOUT,
    option(
        "--set",
        "KEY=VALUE",
        "a setting of librdkafka, such as security.protocol=SSL; may be given several times",
        dest="settings",
        action="append",
        default=[],
        type=key_value,
    ),
)
LIST = (
    *_CHOICE,
    _SEARCH,
    option(
        "--group-by",
        "FIELD",
        "failures, reward, pass rate, pass@k and tokens for each policy_version, or value of a "
        "field, such as task_id",
    ),
    option(
        "--pass-threshold",
        "REWARD",
        "a reward from this one on is a pass; default: %(default)s",
        type=number,
        default=0.5,
    ),
    flag(
        "--scored-only",
        "rates of the trajectories with a reward alone; without it a failure has not passed",
    ),
    _JOBS,
    _JSON,
)
CHECK = (
    argument("sources", nargs="*", metavar="SOURCE", help="see otel-rollout --help"),
    _INFER,
    _ONLY,
    option(
        "--require", "LIST", "what is required; default: %(default)s", default=",".join(DEFAULT)
    ),
    option(
        "--started",
        "FILE",
        "name what began and never ended, by the files FILE.started beside those of trajectories; "
        "without a SOURCE check these",
        nargs="+",
        default=[],
    ),
    option("--expect", "N", "fail unless there are N trajectories", type=count),
    option("--expect-groups", "K", "fail unless each group has K samples", type=count),
    _JOBS,
    _JSON,
)
SHOW = (
    *_CHOICE,
    _SEARCH,
    option("--id", "ID", "only those whose id or trace id begins with this"),
    flag("--full", "do not cut texts"),
)
VIEW = (
    *_READ,
    _ONLY,
    option("--html", "FILE", "write one page that needs no server, and end"),
    _FORCE,
    argument("--port", type=int, default=0, help="default: a free one"),
    argument("--host", default="127.0.0.1", help="address to listen at; default: 127.0.0.1"),
    flag("--no-browser", "only print the address"),
    option("--jaeger", "URL", "link traces to this Jaeger"),
    option(
        "--tokenizer",
        "NAME",
        "tokenizer.json, a folder with one, or a name on the model hub: gives the texts of tokens "
        "whose texts the server did not send",
    ),
    flag("--no-cache", "keep no index"),
)
DRIFT = (
    *_READ,
    flag("--json", "print one JSON object with all forks"),
    flag("--full", "list all forks of each trajectory"),
)
_OPTION = option(
    "--option",
    "KEY=VALUE",
    "an option of the exporter; may be given several times",
    action="append",
    default=[],
    type=key_value,
)
EXPORT = (
    argument("sources", nargs="*", metavar="SOURCE", help="see otel-rollout --help"),
    _INFER,
    option(
        "--where",
        "EXPR",
        "only those of which this is true; before they are grouped: leaving members out of a group "
        "changes the advantages of the others",
    ),
    option("--to", "NAME", "the trainer's format; see --list"),
    argument("-o", "--output", metavar="FILE", help="where to write"),
    _FORCE,
    _OPTION,
    option(
        "--policy-lag",
        "N",
        "leave out what was sampled more than N policy versions before the newest one, before it "
        "is grouped; what that does to what trains is printed",
        type=lag,
    ),
    option(
        "--partition-by",
        "COLUMNS",
        "of parquet: write a folder, with a file for each combination of values of these columns, "
        "such as day,policy_version; the same as --option partition_by=COLUMNS",
        action="append",
        dest="option",
        type=lambda text: ("partition_by", text),
    ),
    argument(
        "--exchanges",
        action="append_const",
        dest="option",
        const=("exchanges", "true"),
        help="of parquet: keep the whole record, from which equal trajectories are read back; the "
        "same as --option exchanges=true",
    ),
    _JOBS,
    flag("--restart", "begin anew"),
    flag("--strict", "end at the first trajectory that the format cannot carry"),
    flag("--list", "list the exporters that are installed"),
)
_SERVED = (
    option(
        "--upstream",
        "URL",
        "base URL of the model server, such as http://localhost:8000/v1",
        required=True,
    ),
    option(
        "--api-key-env",
        "NAME",
        "environment variable with the model server's key, which agents do not get; default: they "
        "send their own",
    ),
    flag(
        "--request-token-ids",
        "ask the model server for token ids and log-probabilities; agents do not see them",
    ),
    option(
        "--renderer",
        "NAME",
        "send the token ids that a conversation has instead of its messages: `server` asks the "
        "model server for those of new messages; else a tokenizer that the package renderers "
        "knows. Needs token ids, and a server that takes them (docs/drift.md)",
    ),
    option(
        "--allow-path",
        "PREFIX",
        "also pass requests to this path of the model server and all below it, which is none of a "
        "model call; may be given several times",
        dest="allow_paths",
        action="append",
    ),
    option(
        "--policy-model",
        "NAME",
        "the model that is trained: calls of others are side calls (docs/side-calls.md)",
    ),
    option(
        "--logprobs-mode",
        "MODE",
        "what the log-probabilities of the model server are: raw (from before temperature and the "
        "like) or processed; `doctor --server` measures it",
        choices=("raw", "processed"),
    ),
    option("--out", "FILE", "append finished trajectories, one JSON object a line"),
    option("--spans", "FILE", "append spans, as OTLP/JSON lines"),
)
"""Arguments of the gateway that a verb serves."""
RUN = (
    *_SERVED,
    argument(
        "--host",
        default="127.0.0.1",
        help="address that the gateway listens on, for a command in a container; default: this "
        "machine alone",
    ),
    option("--task", "ID", "the task that the command works on"),
    option("--samples", "N", "how often to run it; default: 1", type=count, default=1),
    option(
        "--parallel",
        "N",
        "how many samples may run at once; their output is marked [0], [1], ...; default: 1",
        type=count,
        default=1,
    ),
    option("--timeout", "S", "seconds that each sample may take", type=seconds),
    option(
        "--pass-env",
        "NAME",
        "let the command have this variable, which is one of the secrets that it does not get; may "
        "be given several times",
        action="append",
        default=[],
    ),
    argument("--name", help="name of the rollout; default: that of the command"),
    option(
        "--group",
        "ID",
        "the group that a trainer compares, a run of its own where there are several samples; "
        "default: a new one for them",
    ),
    option(
        "--policy-version",
        "VERSION",
        "the version of the weights that sample, a whole number or a text",
        type=policy_version,
    ),
    option(
        "--metadata",
        "KEY=VALUE",
        "metadata of the rollout, a text; may be given several times",
        action="append",
        default=[],
        type=key_value,
    ),
    option(
        "--reward-command",
        "CMD",
        "run through the shell after each sample, with the trajectory on stdin; the last line of "
        "its output is the reward",
    ),
    argument("command", nargs="+", metavar="CMD", help="the command, after --"),
)
REPLAY = (
    argument("sources", nargs="+", metavar="SOURCE", help="see otel-rollout --help; spans alone"),
    option("--id", "ID", "only rollouts whose id or trace id begins with this"),
    option("--listen", "HOST:PORT", "default: a free port of 127.0.0.1", type=address),
    option("--upstream", "URL", "base URL of a model server for calls that were not recorded"),
    option("--api-key-env", "NAME", "environment variable with the key of that server"),
    option("--ignore", "MEMBER", "let this differ; several times", action="append", default=[]),
    flag("--pace", "take as long for each reply as it took; default: answer at once"),
)
REWARD = (
    argument("id", metavar="ID", help="the rollout's id, or how it begins"),
    argument("value", type=number, metavar="VALUE", help="a finite number"),
    argument("--name", help="makes it one of the named rewards"),
    option(
        "--in",
        "SOURCE",
        "where the rollout is; default: the file of --spans",
        dest="sources",
        action="append",
    ),
    option("--spans", "FILE", "append the reward to this file of spans"),
)
GATEWAY = (
    *_SERVED,
    argument(
        "--host", default="127.0.0.1", help="address to listen on; others than this need a secret"
    ),
    argument("--port", type=int, default=4040, help="default: 4040; 0: any free port"),
    option(
        "--workers",
        "N",
        "processes that take the calls, on one port; needs --spans or OTLP; default: 1",
        type=count,
        default=1,
    ),
    option(
        "--secret-env",
        "NAME",
        "environment variable with the secret that /rollouts asks for; default: "
        "OTEL_ROLLOUT_SECRET, else one is made",
    ),
)
AUDIT = (
    argument("sources", nargs="+", metavar="SOURCE", help="see otel-rollout --help"),
    flag("--json", "print one JSON object"),
)
DOCTOR = (
    argument(
        "setup",
        nargs="?",
        metavar="MODULE[:FUNCTION]|SCRIPT",
        help="what sets your program up: a module to import, a function in it to call, or a Python "
        "file to run; default: otel_rollout.configure()",
    ),
    option(
        "--server",
        "URL",
        "base URL of your model server, such as http://localhost:8000/v1; its key is "
        "OPENAI_API_KEY",
    ),
    option("--model", "NAME", "the model to ask there; default: the first it lists"),
)
RECEIVE = (
    option("--out", "FILE", "append trajectories, one JSON object a line", required=True),
    option("--to", "NAME", "append rows of this trainer's format instead; see export --list"),
    _OPTION,
    option("--journal", "FOLDER", "keep what is not handed over yet", required=True),
    option(
        "--grpc",
        "HOST:PORT",
        "OTLP over gRPC; default: 127.0.0.1:4317",
        type=address,
        default=("127.0.0.1", 4317),
    ),
    option(
        "--http",
        "HOST:PORT",
        "OTLP over HTTP, and /metrics; default: 127.0.0.1:4318",
        type=address,
        default=("127.0.0.1", 4318),
    ),
    _ROLLOUT_TIMEOUT,
    option(
        "--group-timeout",
        "S",
        "seconds after the last span of its rollouts in which a group may; default: 7200",
        type=seconds,
        default=7200.0,
    ),
    option("--token", "TOKEN", "what clients have to send (Authorization: Bearer TOKEN)"),
    option("--token-file", "FILE", "a file with this token"),
    option("--tls-cert", "FILE", "certificate, for TLS"),
    option("--tls-key", "FILE", "key of the certificate"),
    option(
        "--journal-bytes",
        "N",
        "bytes of the journal at most; default: as many as the disk takes",
        type=count,
    ),
    option("--jobs", "N", "processes that rebuild trajectories; default: 1", type=count, default=1),
)
