"""`otel-rollout run`: a command as a rollout, its calls, its ending, its rewards."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from otel_rollout import JsonlTrajectoryExporter, Trajectory, reconstruct
from otel_rollout.command.cli import main
from otel_rollout.gateway import serve
from otel_rollout.otlp import read_json_lines
from otel_rollout.testing import ModelServer, Raw, Reply
from tests.command.agents import agent
from tests.kit.programs import ROOT
from tests.kit.receivers import HttpReceiver

pytestmark = pytest.mark.slow


@dataclass
class Ran:
    """What a run gave and left."""

    status: int
    out: str
    err: str
    trajectories: list[Trajectory]

    @property
    def trajectory(self) -> Trajectory:
        """The only one."""
        (trajectory,) = self.trajectories
        return trajectory


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the verb; its trajectories are those that its spans rebuild."""

    def ran(server: ModelServer, command: Sequence[str], *options: str) -> Ran:
        out, spans = tmp_path / "out.jsonl", tmp_path / "spans.jsonl"
        files = ("--out", str(out), "--spans", str(spans))
        where = ("--upstream", server.base_url)
        status = main(["run", *where, *files, *options, "--", *command])
        live = sorted(JsonlTrajectoryExporter.read(out), key=lambda each: each.id)
        rebuilt = reconstruct(read_json_lines(spans)) if spans.exists() else []
        assert sorted(rebuilt, key=lambda each: each.id) == live
        return Ran(status, *capfd.readouterr(), live)

    return ran


def test_a_command_is_a_rollout(run: Run):
    """Its calls are the trajectory, and its options are those of the rollout."""
    with ModelServer(["one", "two"], token_ids=True, logprobs=True) as server:
        ran = run(
            server,
            agent("print(ask('a'), ask('b'), sys.argv[1:])", "--samples", "--", "x"),
            *("--task", "t1", "--name", "mine", "--group", "g1", "--metadata", "seed=3"),
            *("--policy-version", "12"),
        )
        sent = [exchange.request for exchange in server.exchanges]
    assert ran.status == 0
    assert ran.out == "one two ['--samples', '--', 'x']\n"
    found = ran.trajectory
    assert (found.name, found.sample_index) == ("mine", 0)
    assert found.metadata == {"seed": "3"}
    assert found.policy_version == 12
    assert found.policy_versions == [12]
    assert (found.status, found.warnings) == ("complete", [])
    assert [each.message["content"] for each in found.completions if each.message] == ["one", "two"]
    assert [each.request for each in found.completions] == [json.loads(each) for each in sent]
    assert f"mine {found.id}\n├─ complete  task t1  group g1  sample 0  versions 12\n" in ran.err
    assert "└─ 2 of 2 completions train" in ran.err
    assert re.search(r"\n-> .*/out\.jsonl \(trajectories\), .*/spans\.jsonl \(spans\)\n$", ran.err)


def test_the_garbage_collector_skips_what_is_imported(run: Run):
    """In a process of the command's own; `serve` leaves the collector of its process alone."""
    gc.unfreeze()
    with ModelServer("yes") as server:
        with serve(server.base_url):
            assert gc.get_freeze_count() == 0
        run(server, agent("ask('x')"))
    assert gc.get_freeze_count() > 50_000


def test_what_the_command_is_told(run: Run):
    """Where its rollout is, in variables that any language can read."""
    names = ("OTEL_ROLLOUT_ID", "OTEL_ROLLOUT_TASK", "OTEL_ROLLOUT_SAMPLE", "ANTHROPIC_BASE_URL")
    code = f"ask('x'); print(json.dumps([os.environ[n] for n in {names}]))"
    with ModelServer("yes") as server:
        ran = run(server, agent(code), "--task", "t 1")
    id_, task, sample, url = json.loads(ran.out)
    assert (id_, task, sample) == (ran.trajectory.id, "t 1", "0")
    assert "/r/" in url
    assert not url.endswith("/v1")


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("sys.exit(3)", 3, "the command exited with status 3"),
        ("os.kill(os.getpid(), 9)", 137, "the command was ended by SIGKILL"),
    ],
)
def test_a_command_that_fails(run: Run, code: str, status: int, message: str):
    """The exit status is its own, and the rollout says how it ended."""
    with ModelServer("yes") as server:
        ran = run(server, agent(f"ask('x'); {code}"))
    assert ran.status == status
    found = ran.trajectory
    assert (found.status, found.termination_reason) == ("error", "error")
    assert found.error is not None
    assert (found.error["type"], found.error["message"]) == ("CommandError", message)
    assert len(found.completions) == 1
    assert message in ran.err


def test_a_command_that_takes_too_long(run: Run):
    """It ends with 124, and the rollout by its time limit; what it did is kept."""
    with ModelServer("yes") as server:
        ran = run(server, agent("ask('x'); import time; time.sleep(1000)"), "--timeout", "3")
    assert ran.status == 124
    found = ran.trajectory
    assert (found.status, found.termination_reason) == ("error", "timeout")
    assert found.error is not None
    assert found.error["message"] == "the command took longer than the time limit of 3 s"
    assert len(found.completions) == 1


def test_a_model_that_never_answers(run: Run):
    """A call that is open when the time is over is in the trajectory, and does not train."""
    with ModelServer(Raw(delay=1000)) as server:
        ran = run(server, agent("ask('x')"), "--timeout", "2")
    assert ran.status == 124
    (completion,) = ran.trajectory.completions
    assert not completion.trainable


SECRETS = (
    *("OTEL_ROLLOUT_SECRET", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
    *("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS", "MODEL_KEY"),
    "OTEL_ROLLOUT_TRAIN_HEADERS",
)


def test_the_command_gets_no_secret(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Neither the model server's key, nor what rewards rollouts, nor what sends spans."""
    for name in SECRETS:
        monkeypatch.setenv(name, f"of={name.lower()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_X", "kept")
    got = f"sorted({set(SECRETS)} & os.environ.keys()), os.environ['OTEL_EXPORTER_OTLP_X']"
    code = f"ask('x'); print({got})"
    with ModelServer(["yes", "yes"]) as server:
        ran = run(server, agent(code), "--api-key-env", "MODEL_KEY")
        assert ran.out == "[] kept\n"
        passed = ("--pass-env", "MODEL_KEY", "--pass-env", "OTEL_EXPORTER_OTLP_HEADERS")
        ran = run(server, agent(code), "--api-key-env", "MODEL_KEY", *passed)
    assert ran.out == "['MODEL_KEY', 'OTEL_EXPORTER_OTLP_HEADERS'] kept\n"


def test_the_command_rewards_no_rollout(run: Run, monkeypatch: pytest.MonkeyPatch):
    """What it knows, its own id and token, opens no control route."""
    monkeypatch.setenv("OTEL_ROLLOUT_SECRET", "s3cret-of-the-harness")
    code = """
ask("x")
import urllib.error
root, key = os.environ["OTEL_ROLLOUT_GATEWAY"], os.environ["OPENAI_API_KEY"]
for path, method, auth in (
    ("/rollouts", "POST", ""),
    ("/rollouts/" + os.environ["OTEL_ROLLOUT_ID"], "PATCH", key[3:]),
    ("/rollouts/" + os.environ["OTEL_ROLLOUT_ID"], "DELETE", key),
):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + auth}
    request = urllib.request.Request(root + path, b'{"reward": 99}', headers, method=method)
    try: urllib.request.urlopen(request)
    except urllib.error.HTTPError as error: print(error.code)
"""
    with ModelServer("yes") as server:
        ran = run(server, agent(code))
    assert ran.out.split() == ["401", "401", "403"]
    assert ran.trajectory.reward is None


@pytest.mark.parametrize(("code", "status"), [("pass", 1), ("sys.exit(3)", 3)])
def test_no_call_is_an_error(run: Run, code: str, status: int):
    """It says which variables were set and what to look at, and shows no token."""
    with ModelServer("yes") as server:
        ran = run(server, agent(f"print(os.environ['OPENAI_API_KEY']); {code}"))
    assert ran.status == status
    assert ran.trajectory.status == "error"
    assert "no model call came through the gateway: there is nothing to train on" in ran.err
    assert "  OPENAI_BASE_URL=http://127.0.0.1:" in ran.err
    assert "/r/.../v1\n" in ran.err
    for name in ("ANTHROPIC_BASE_URL=", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "TRACEPARENT"):
        assert name in ran.err
    token = ran.out.strip().removeprefix("or-")
    assert len(token) > 40
    assert token not in ran.err


def test_what_came_instead_of_a_call_is_named(run: Run):
    """An agent that asks another API finds it refused, and the hint names its path."""
    code = """
import urllib.error
os.environ["OPENAI_BASE_URL"] += "/interactions?x="
for _ in range(2):
    try: ask("x")
    except urllib.error.HTTPError as error: print(error.code)
"""
    with ModelServer("yes") as server:
        ran = run(server, agent(code))
        assert server.exchanges == []
    assert ran.out == "403\n403\n"
    path = "/v1/interactions"
    assert f"2 requests to {path} went through the gateway, which refuses" in ran.err
    assert ran.trajectory.status == "error"


def test_no_call_is_told_from_a_failed_call(run: Run):
    """A call that the server refused came through the gateway."""
    with ModelServer(Raw(500, b"{}")) as server:
        ran = run(server, agent("\ntry: ask('x')\nexcept OSError: pass"))
    assert ran.status == 0
    assert "no model call" not in ran.err
    assert [each.status for each in ran.trajectory.completions] == ["error"]


def test_several_samples(run: Run):
    """They are a group; the highest exit status counts; only what they print is theirs."""
    code = "n = os.environ['OTEL_ROLLOUT_SAMPLE']; ask(n); print('at', n); sys.exit(int(n))"
    with ModelServer() as server:
        ran = run(server, agent(code), "--samples", "3", "--task", "t")
    assert ran.status == 2
    assert ran.out == "at 0\nat 1\nat 2\n"
    assert sorted(each.sample_index or 0 for each in ran.trajectories) == [0, 1, 2]
    (group,) = {each.group_id for each in ran.trajectories}
    assert isinstance(group, str)
    for each in ran.trajectories:
        (completion,) = each.completions
        assert completion.request_messages[0]["content"] == str(each.sample_index)


def test_several_at_once(run: Run):
    """Those that run at once wait for each other here, and each line says whose it is."""
    code = "n = os.environ['OTEL_ROLLOUT_SAMPLE']; print('at', n, flush=True); ask(n)"
    both = threading.Barrier(2)

    def reply(_: object) -> str:
        both.wait(60)
        return "yes"

    with ModelServer(reply) as server:
        ran = run(server, agent(code), "--samples", "4", "--parallel", "2")
    assert ran.status == 0
    assert sorted(ran.out.splitlines()) == [f"[{n}] at {n}" for n in range(4)]
    for each in ran.trajectories:
        (completion,) = each.completions
        assert completion.request_messages[0]["content"] == str(each.sample_index)


READ = "ask('x'); print(repr(sys.stdin.read()))"


def test_stdin_is_for_one(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One sample reads what we are given; of several none does."""
    (tmp_path / "in").write_text("hello")
    kept = os.dup(0)
    try:
        for options, expected in ((), "'hello'\n"), (("--samples", "2"), "''\n''\n"):
            with open(tmp_path / "in") as file, ModelServer("yes") as server:
                os.dup2(file.fileno(), 0)
                assert run(server, agent(READ), *options).out.endswith(expected)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]):
    """It is said before anything is opened."""
    assert main(["run", "--upstream", "http://127.0.0.1:1", "--", "no-such-program"]) == 127
    assert capsys.readouterr().err == "otel-rollout: no-such-program: no such command\n"


def test_another_address(run: Run):
    """The gateway listens where a container reaches it, and lets nobody begin rollouts there."""
    code = (
        "ask('x'); print(os.environ['OPENAI_BASE_URL'].split(':')[1])\n"
        "url = os.environ['OPENAI_BASE_URL'].split('/r/')[0] + '/rollouts'\n"
        "request = urllib.request.Request(url, b'{}', {'Content-Type': 'application/json'})\n"
        "try: urllib.request.urlopen(request)\n"
        "except urllib.error.HTTPError as error: print(error.code)"
    )
    with ModelServer("yes") as server:
        ran = run(server, agent(code), "--host", "127.0.0.2")
    assert ran.out == "//127.0.0.2\n401\n"
    assert len(ran.trajectory.completions) == 1


def test_a_key_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    """A variable that is not set is a mistake, not a server without a key."""
    where = ("--upstream", "http://127.0.0.1:1", "--api-key-env", "NO_SUCH_KEY")
    assert main(["run", *where, "--", "true"]) == 1
    assert "NO_SUCH_KEY: this environment variable is not set" in capsys.readouterr().err


def test_the_key_of_the_model_server(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The server gets it; the command does not, nor is it or a token in any file."""
    monkeypatch.setenv("MY_KEY", "sk-the-secret")
    code = "ask('x'); print(os.environ.get('MY_KEY'), os.environ['OPENAI_API_KEY'])"
    with ModelServer("yes") as server:
        ran = run(server, agent(code), "--api-key-env", "MY_KEY")
        (exchange,) = server.exchanges
    assert exchange.request_headers["authorization"] == "Bearer sk-the-secret"
    key, token = ran.out.split()
    assert key == "None"
    for file in ("out.jsonl", "spans.jsonl"):
        text = (tmp_path / file).read_text()
        assert "sk-the-secret" not in text
        assert token.removeprefix("or-") not in text


def test_over_otlp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Spans go to the endpoint of the environment; where, is said."""
    with HttpReceiver() as receiver, ModelServer("yes") as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        assert main(["run", "--upstream", server.base_url, "--", *agent("ask('x')")]) == 0
    (found,) = reconstruct(receiver.spans)
    assert len(found.completions) == 1
    assert capsys.readouterr().err.endswith(f"-> {receiver.url} (spans, OTLP)\n")


def test_not_all_spans_arrived(capsys: pytest.CaptureFixture[str]):
    """A full disk is no success."""
    with ModelServer("yes") as server:
        options = ("--upstream", server.base_url, "--spans", "/dev/full")
        assert main(["run", *options, "--", *agent("ask('x')")]) == 1
    assert "not all of it arrived" in capsys.readouterr().err


def test_nothing_was_kept(capsys: pytest.CaptureFixture[str]):
    """With no place for it, the trajectory is only shown."""
    with ModelServer("yes") as server:
        assert main(["run", "--upstream", server.base_url, "--", *agent("ask('x')")]) == 0
    assert "nothing was kept: give --out or --spans" in capsys.readouterr().err


def test_an_agent_that_records_itself(run: Run, monkeypatch: pytest.MonkeyPatch):
    """A Python agent that is configured records no call a second time."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = (
        "import openai, otel_rollout\notel_rollout.configure()\nclient = openai.OpenAI()\n"
        "message = {'role': 'user', 'content': 'x'}\n"
        "client.chat.completions.create(model='m', messages=[message])\nask('y')\n"
    )
    with ModelServer(["one", "two"]) as server:
        ran = run(server, agent(code))
    assert ran.status == 0, ran.err
    assert len(ran.trajectory.completions) == 2


def test_a_streamed_call(run: Run):
    """A stream that the real client reads is a completion with its token ids."""
    code = (
        "import openai\nmessage = {'role': 'user', 'content': 'x'}\n"
        "client = openai.OpenAI()\n"
        "stream = client.chat.completions.create(model='m', messages=[message], stream=True)\n"
        "print(''.join(c.choices[0].delta.content or '' for c in stream if c.choices))\n"
    )
    with ModelServer(Reply("a longer text for you"), token_ids=True, logprobs=True) as server:
        ran = run(server, agent(code))
    assert ran.out == "a longer text for you\n"
    (completion,) = ran.trajectory.completions
    assert (completion.stream, completion.status) == (True, "complete")
    assert completion.token_ids


def test_token_ids_are_asked_for(run: Run):
    """On request, and only then, the server is asked for what a trainer needs."""
    with ModelServer("yes") as server:
        with_ids = run(server, agent("ask('x')"), "--request-token-ids")
    (completion,) = with_ids.trajectory.completions
    assert completion.token_ids
    assert completion.logprobs


def test_token_ids_are_not_asked_for(run: Run):
    """Without the option each request is as the command sends it."""
    with ModelServer("yes") as server:
        without = run(server, agent("ask('x')"))
        (exchange,) = server.exchanges
    (completion,) = without.trajectory.completions
    assert completion.token_ids is None
    assert b"return_token_ids" not in exchange.request


STREAM = """
import openai
message = {"role": "user", "content": "x"}
client = openai.OpenAI(max_retries=0)
stream = client.chat.completions.create(model="m", messages=[message], stream=True)
"""


def test_a_command_that_is_killed_in_a_stream(run: Run):
    """The call that it left is there, and does not train."""
    code = STREAM + "next(stream)\nos.kill(os.getpid(), 9)"
    with ModelServer(Reply("a text that comes slowly", chunk_delay=0.2)) as server:
        ran = run(server, agent(code))
    assert ran.status == 137
    (completion,) = ran.trajectory.completions
    assert completion.status in ("cancelled", "abandoned")
    assert not completion.trainable


def test_a_model_server_that_breaks_off(run: Run):
    """The command sees a stream that broke off, and so does the trajectory."""
    code = STREAM + "\ntry: list(stream)\nexcept Exception as error: print('broken')"
    with ModelServer(Reply("a text that is cut", cut_after=2)) as server:
        ran = run(server, agent(code))
    assert ran.out == "broken\n"
    assert [each.status for each in ran.trajectory.completions] == ["error"]


# --- rewards

JUDGE = f"""PYTHONPATH={ROOT} {sys.executable} -c '
import json, os, sys, otel_rollout
told = json.load(sys.stdin)
(completion,) = otel_rollout.Trajectory.from_dict(told).completions
assert completion.token_ids
assert told["id"] == os.environ["OTEL_ROLLOUT_ID"]
assert "OPENAI_BASE_URL" not in os.environ
print("looking", file=sys.stderr)
assert told["error"]["message"] == "the command exited with status 4"
print(told["status"], os.environ["OTEL_ROLLOUT_EXIT_STATUS"], told["history"][-1]["content"])
print(0.5)
'"""


def test_a_reward_command(run: Run):
    """It reads the trajectory, and the last line that it prints is the reward."""
    with ModelServer("yes", token_ids=True, logprobs=True) as server:
        ran = run(server, agent("ask('x'); sys.exit(4)"), "--reward-command", JUDGE)
    assert ran.status == 4
    assert ran.trajectory.reward == 0.5
    assert "looking\n" in ran.err
    assert "├─ reward: 0.5" in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo 1; exit 2", "--reward-command: the command exited with status 2"),
        ("echo 1; echo no", "expected a finite number as its last line, got 'no'"),
        ("true", "expected a finite number as its last line, got ''"),
        ("echo nan", "expected a finite number as its last line, got 'nan'"),
    ],
)
def test_a_reward_command_that_fails(run: Run, command: str, said: str):
    """It is said, there is no reward, and the exit status is that of the agent."""
    with ModelServer("yes") as server:
        ran = run(server, agent("ask('x')"), "--reward-command", command)
    assert ran.status == 0
    assert ran.trajectory.reward is None
    assert f"no reward for {ran.trajectory.id}: " in ran.err
    assert said in ran.err


def test_a_reward_command_has_the_key(run: Run, monkeypatch: pytest.MonkeyPatch):
    """It is the harness's, and may ask a model; the command that is judged has no key."""
    monkeypatch.setenv("SERVER_KEY", "a-key-of-the-server")
    judge = 'test "$SERVER_KEY" = a-key-of-the-server && echo 1'
    code = "ask('x'); assert 'SERVER_KEY' not in os.environ"
    with ModelServer("yes", token_ids=True, logprobs=True) as server:
        ran = run(server, agent(code), "--api-key-env", "SERVER_KEY", "--reward-command", judge)
    assert (ran.status, ran.trajectory.reward) == (0, 1.0)


def test_nothing_to_judge(run: Run, tmp_path: Path):
    """Without a call no reward is asked for."""
    with ModelServer("yes") as server:
        ran = run(server, agent("pass"), "--reward-command", f"touch {tmp_path}/judged; echo 1")
    assert ran.trajectory.reward is None
    assert not (tmp_path / "judged").exists()


@pytest.mark.not_replayed("the reward comes after the rollout was handed over")
def test_a_later_reward(run: Run, tmp_path: Path):
    """`reward` rewards a run that has ended, and its rows have it."""
    with ModelServer("yes", token_ids=True, logprobs=True) as server:
        ran = run(server, agent("ask('x')"), "--task", "t1")
    spans, rows = str(tmp_path / "spans.jsonl"), tmp_path / "rows.jsonl"
    assert main(["reward", ran.trajectory.id, "0.25", "--spans", spans]) == 0
    assert main(["export", "--to", "tokens", spans, "-o", str(rows)]) == 0
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert row["reward"] == 0.25


def test_the_end_of_everything(tmp_path: Path):
    """Killed by SIGKILL, it leaves the calls that were written, and what is missing is said."""
    spans = tmp_path / "spans.jsonl"
    with ModelServer("yes") as server:
        code = "import time; ask('x'); print('ready', flush=True); parent = os.getppid()\n"
        code += "while os.getppid() == parent: time.sleep(0.05)"
        process = started(server, tmp_path, code, "--spans", str(spans))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while not (spans.exists() and '"recording' in spans.read_text()):
            time.sleep(0.05)
        process.kill()
        process.communicate(timeout=120)
    (found,) = reconstruct(read_json_lines(spans))
    assert len(found.completions) == 1
    assert "the rollout's own span did not come" in found.warnings[0]


# --- signals


def started(server: ModelServer, tmp_path: Path, code: str, *options: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    program = "import sys; from otel_rollout.command.cli import main; sys.exit(main())"
    where = ("--upstream", server.base_url, "--out", str(tmp_path / "out.jsonl"))
    return subprocess.Popen(
        [sys.executable, "-c", program, "run", *where, *options, "--", *agent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WAITS = "import time; ask('x'); print('ready', flush=True); time.sleep(1000)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal(tmp_path: Path, number: signal.Signals):
    """The command gets it; what it did until then is kept, as a cancelled rollout."""
    with ModelServer("yes") as server:
        process = started(server, tmp_path, WAITS, "--samples", "3")
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    interrupted = number is signal.SIGINT  # Python ends with 130 by a signal to itself
    assert process.returncode == 128 + number, err
    (found,) = JsonlTrajectoryExporter.read(tmp_path / "out.jsonl")
    assert (found.status, len(found.completions)) == ("cancelled", 1)
    assert f"{number.name}: 2 of 3 were not run" in err
    assert ("KeyboardInterrupt" in err) is interrupted


def test_a_signal_that_is_handled(tmp_path: Path):
    """An agent that ends well on a signal has a complete rollout."""
    code = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAITS
    with ModelServer("yes") as server:
        process = started(server, tmp_path, code)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (found,) = JsonlTrajectoryExporter.read(tmp_path / "out.jsonl")
    assert found.status == "complete"
