"""What `--help` of each verb says beside its arguments."""

from __future__ import annotations

SOURCES = """\
A source is a file (- for stdin) of
  OTLP/JSON lines, such as the collector's file exporter writes
  OTLP/protobuf, one message or the collector's `format: proto`
  rows of ClickHouse's otel_traces (FORMAT JSONEachRow, JSON, JSONCompact)
  an answer of Jaeger's API v3, of Phoenix or of MLflow
or the address of a trace in Jaeger, Phoenix or MLflow, such as
  http://127.0.0.1:16686/trace/6f2a...
or of a project in Phoenix; or an export of LangSmith, Langfuse, Weave, LiteLLM;
or, but for rebuild and replay, a file of trajectories: JsonlTrajectoryExporter,
  Parquet with exchanges (and a folder of it, partitioned or not),
  Harbor and Terminal-Bench (ATIF), mini-swe-agent, Pydantic AI, NeMo Gym, or
  a list of chat messages.
What a file is, its content says; it may be gzipped."""
REBUILD = """\
Rebuild trajectories from recorded spans, one JSON object a line, as
JsonlTrajectoryExporter writes them. The spans of a rollout may be spread over
sources, in any order and more than once. They are brought together in files
beside the output: memory holds those of one rollout. What cannot be read is
reported and left out; the output is written whole, or not.

With --kafka no SOURCE is read: it runs until a signal, and any number may run
(docs/scale.md)."""
LIST = """\
List trajectories: a line for each as it is read, and a footer with their number,
endings, rewards, and what does not train and why. Of files of trajectories the
first line comes at once; spans are read to their end before, since a reward may
come late. With --sort the lines come at the end; memory holds a line for each.
--json prints one JSON object a line, the last one is {"summary": ...}."""
CHECK = """\
Check that trajectories are what a trainer needs; for a pipeline, before it.
Exit status: 0 they are; 1 a trajectory lacks something that is required, or there
is no trajectory; 2 a source could not be read, in whole or in part, or the command
line is wrong. --json prints one JSON object a line with all findings of a
trajectory, the last one is {"summary": ...}.

--require takes some of these, with commas between them:
"""
WHERE = """\
EXPR of --where is a comparison of fields, or several with and, or, not:
  reward < 0.5 and status == "error"
  "drift" in findings or metrics["tests_passed"] >= 3
  reward is None and versions is not None
A comparison with a field that is None is not known, and not kept."""
SHOW = """\
Show trajectories as trees: who said what, what of it trains, how it went."""
VIEW = """\
Show trajectories on a page of this machine, in the browser: a list to filter,
groups side by side, messages, tokens, what does not train and why. The page is
for you alone: its address, which is printed first, has a secret in it. Sources
are read once and kept in an index in your cache; files that grow are followed.
Ctrl-C ends it. It needs the extra: otel-rollout[view].
Environment: OTEL_ROLLOUT_VIEW_INDEX, a file for the index in place of the cache;
OTEL_ROLLOUT_VIEW_REACHABLE=1 allows a --host that other machines reach."""
EXPORT = """\
Write trajectories as the rows that a trainer reads. Trajectories of one group
are brought together wherever they are; memory holds one group at a time.
Beside FILE are FILE.part and FILE.groups until it is finished:
the same command, given again after it was interrupted, goes on from there."""
DRIFT = """\
Show which calls continue the messages of an earlier call and not its token
ids, and why: reasoning dropped, arguments reformatted, tokens merged, template
changed, truncated, other. Each of them begins a training row of its own, and
the server reads again what it had in its cache. The ratio is that of merged
calls to all of which it is known. Trajectories without such a call are only
counted. docs/drift.md says what to do about them."""
DOCTOR = """\
Check a set-up and say what would be lost: versions, provider, span limits,
processors, instrumentations, environment. Then run a rollout with two calls
through it, to a server of this process, and compare its trajectory with the
one that is rebuilt from its spans. With --server, also make a streamed call
with tools to your model server, and compare the token ids that come with its
own count: some servers lose tokens of such calls."""
RUN = """\
Run a command, of any language, as a rollout: its model calls go through a
gateway of this process to the model server, and become a trajectory. The
command finds the gateway in OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and those of other clients, and its
rollout in OTEL_ROLLOUT_ID, OTEL_ROLLOUT_TASK and OTEL_ROLLOUT_SAMPLE. Signals
go to the command. The exit status is the command's own, of several samples the
highest; without any model call it is never 0. Limits of the gateway are set by the
environment, see otel-rollout gateway --help.

  otel-rollout run --upstream http://localhost:8000/v1 --request-token-ids \\
      --task t1 --samples 8 --out trajectories.jsonl -- claude -p "Mend the tests" """
REPLAY = """\
Answer a command's model calls with the replies that were recorded, byte for byte,
without a model server: SOURCE has the spans of `run` or of your own program.

  otel-rollout replay spans.jsonl --id 8bdc -- claude -p "Mend the tests"

The command gets its addresses as `run` gives them. A call has to ask what was
recorded, in any order; the first that does not is answered with 422, and so are
all after it, and both requests are printed side by side. With --upstream, calls
that were not recorded go to that model server. The exit status is the command's
own, but never 0 after such a call. Without a command it serves until a signal
ends it; the first line of its output is its address."""
REWARD = """\
Give a rollout that has ended a reward. It is a span on the rollout's trace: in a
file of spans, or sent over OTLP as OTEL_EXPORTER_OTLP_ENDPOINT says. `rebuild`
then gives the trajectory with the reward; of several with one name, the last."""
AUDIT = """\
What became of all rollouts: which began and never ended, of which something is
missing, which groups are short of samples, what is there twice and what came too
late. By attributes alone: no reply is read. Files FILE.started, and journals of
receivers (their folders), are sources, too, also while a receiver runs.
Exit status: 0 nothing is missing; 1 something is, or no rollout is there; 2 unreadable."""
RECEIVE = """\
Receive spans of rollouts over OTLP, from otel-rollout or a collector, and append
their trajectories to a file when they are whole: a rollout when its spans prove
it, a group when it has its samples, one line after the other. A request is
answered when its spans are on the disk, in the journal: killed at any moment, a
receiver goes on where it was. What is not whole in time is handed over with what
is missing; `otel-rollout audit JOURNAL` has it all. When the journal is full,
clients have to try again (503, UNAVAILABLE).
The first line of output has the addresses. SIGTERM or SIGINT ends it.
Environment: each limit of otel_rollout.receive.Limits after
OTEL_ROLLOUT_RECEIVER_, such as OTEL_ROLLOUT_RECEIVER_BODY_BYTES."""
GATEWAY = """\
Stand between agents and their model server, and record every model call. An
agent in any language says which rollout a call belongs to: by its base URL
(/r/TOKEN/v1), its API key (or-TOKEN) or the headers traceparent and baggage.
POST /rollouts begins a rollout and gives them; /docs describes it.
The first line of output is the address. SIGTERM or SIGINT ends it. Spans also
go out over OTLP if OTEL_EXPORTER_OTLP_ENDPOINT is set.
Environment: each limit of otel_rollout.gateway.serve after OTEL_ROLLOUT_GATEWAY_,
such as OTEL_ROLLOUT_GATEWAY_MAX_BODY_BYTES or OTEL_ROLLOUT_GATEWAY_BODY_SECONDS."""
