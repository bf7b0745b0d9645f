# SPDX-License-Identifier: Apache-2.0
"""The words of a job over ssh: its hosts, what the two ends tell each other, and what is said where no end comes up."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.errors import ConfigurationError, LaunchError
from rankwise.launch.hosts.host_list import Host, filled, parse_hosts
from rankwise.launch.hosts.ssh import passed_on, ssh_argv
from rankwise.launch.hosts.ssh_sessions import MessageExtractor, line, mark
from rankwise.launch.messages import (
    EndJob,
    HostHere,
    HostSpec,
    Refuse,
    RemoteCommand,
    decode,
    encode,
    error_of,
    refusal,
)
from rankwise.launch.options import LaunchOptions
from rankwise.launch.rendezvous import listen_towards
from rankwise.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [Host(name="a")]),
        ("a, b", [Host(name="a"), Host(name="b")]),
        ("me@a:4,b:2", [Host(name="a", user="me", num_ranks=4), Host(name="b", num_ranks=2)]),
        ("me@[fd00::1]:4", [Host(name="fd00::1", user="me", num_ranks=4)]),
        ("[::1],fd00::2", [Host(name="::1"), Host(name="fd00::2")]),
    ],
)
def test_hosts_are_written_so(text: str, expected: list[Host]) -> None:
    assert parse_hosts(text) == tuple(expected)


@pytest.mark.parametrize(
    "text", ["", "a,", "a:", "a:0", "a:-1", "a:x", "-oProxyCommand=x", "-l@a", "@a", "a b", "[::1", "[::1]4"]
)
def test_an_invalid_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_hosts(text)


def test_a_host_named_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_hosts("a:2,b,me@A:3")
    assert str(error.value) == (
        "The host A is given twice in --hosts a:2,b,me@A:3.\n"
        "  do        give it once, with the number of its ranks: A:5"
    )


def test_hosts_are_filled_in_order_and_hosts_after_the_last_rank_get_none() -> None:
    assert filled([("a", 2), ("b", 0), ("c", 2), ("d", 2)], 3) == [("a", 2), ("c", 1)]


def test_a_host_spec_comes_through_whole() -> None:
    spec = HostSpec(
        folder="/work/ä b",
        command=RemoteCommand(target="train.py", is_module=False, arguments=("--lr", "1e-3")),
        options=LaunchOptions(num_ranks=3, nodes=(1, 2), node_rank=1, rendezvous=("10.0.0.1", 0), check=True),
        secret="of the job",  # noqa: S106 - an example
        variables={"NCCL_DEBUG": "WARN"},
    )
    text = line(spec)
    extractor = MessageExtractor("token", "a")
    output, messages = extractor.split(mark("token") + text)
    assert (output, messages) == (b"", [spec])


@pytest.mark.parametrize("kind", [ConfigurationError, LaunchError])
def test_an_error_comes_through_whole(kind: type[ConfigurationError | LaunchError]) -> None:
    error = kind("It cannot be.", where="host0", evidence="one\ntwo", do="this")
    came = decode(encode(refusal(error)), "a")
    assert isinstance(came, Refuse)
    came = error_of(came)
    assert (type(came), str(came)) == (kind, str(error))


@given(st.data())
def test_messages_are_found_wherever_the_stream_is_cut(data: st.DataObject) -> None:
    """In the middle of a line too, and between bytes that look like the beginning of a mark."""
    written = st.lists(st.sampled_from([b"a", b"\n", b"\x1e", b"\x1erankwise ", b"\xff"]), max_size=4).map(b"".join)
    parts = [data.draw(written) for _ in range(3)]
    sent = [HostHere(rankwise="1", address="10.0.0.1"), EndJob(exit_code=0, what="two\nlines")]
    stream = parts[0] + mark("t") + line(sent[0]) + parts[1] + mark("t") + line(sent[1]) + parts[2] + b"end"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    extractor, output, messages = MessageExtractor("t", "a"), b"", []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        more, found = extractor.split(stream[start:end])
        output, messages = output + more, messages + found
    assert (output, messages) == (b"".join(parts) + b"end", sent)


def test_the_words_for_ssh_hold_no_secret_and_ask_nothing() -> None:
    host = Host(name="a", user="me")
    words = ssh_argv(["ssh", "-F", "f"], host, ["/a b/python", "-B"], "token", "/x:/y")
    assert words[:4] == ["ssh", "-F", "f", "-T"]
    assert "BatchMode=yes" in words
    assert words[-3:-1] == ["--", "me@a"]
    remote = shlex.split(words[-1])
    assert remote[:5] == ["exec", "env", "PYTHONPATH=/x:/y", "/a b/python", "-B"]
    assert remote[-1] == "token"


def test_few_variables_are_passed_on() -> None:
    given = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "RANKWISE_SECRET": "s", "HOME": "/root", "RANK": "0"}
    assert passed_on(given) == {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO"}


def test_the_first_host_listens_on_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_SECRET", "of the job")
    options = LaunchOptions(nodes=(1, 2), node_rank=0, rendezvous=("10.0.0.9", 0), interface="lo")
    job = listen_towards("10.0.0.9", options)
    assert job.listener is not None
    with job.listener:
        assert (job.listener.getsockname(), job.interface, job.secret) == (job.address, "lo", "of the job")
        assert job.address[0] == "127.0.0.1"
    with pytest.raises(ConfigurationError) as error:
        listen_towards("10.0.0.9", replace(options, interface="nowhere"))
    assert error.value.what == "Interface nowhere does not exist or has no address."
    assert "lo: 127.0.0.1" in str(error.value.evidence)


def run(tmp_path: Path, ssh: str, *options: str) -> tuple[int, str]:
    """Run a command whose ssh is a shell script; its last argument is the command for the host."""
    script = tmp_path / "ssh"
    script.write_text(f"#!/bin/sh\nfor remote; do :; done\n{ssh}\n", encoding="utf-8")
    script.chmod(0o755)
    words = ["--hosts", "a", "--ssh", f"{script} -F x", *options, "train.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "rankwise", "run", *words], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    return ran.returncode, ran.stderr


@pytest.mark.parametrize(
    ("ssh", "expected"),
    [
        (
            "echo 'Host key failed.' >&2; exit 255",
            "LaunchError: ssh cannot connect to a.\n  evidence  Host key failed.\n  do        {ssh} -F x a true\n",
        ),
        (
            "exec /nowhere/python",
            "ConfigurationError: {python} does not exist on a.\n",
        ),
        (
            'exec env -u PYTHONPATH {python} -S -c "import rankwise.launch.hosts.remote"',
            "ConfigurationError: rankwise is not installed for {python} on a.\n",
        ),
        (
            "echo \"ModuleNotFoundError: No module named 'rankwise.launch.hosts.remote'\" >&2; exit 1",
            "ConfigurationError: a has an older rankwise.\n",
        ),
        (
            'eval "$remote" | sed -u \'s/"rankwise": "[^"]*"/"rankwise": "9.9"/\'',
            (
                "ConfigurationError: a has rankwise 9.9, but this machine has {version}.\n"
                "  do        {ssh} -F x a {python} -m pip install rankwise=={version}\n"
            ),
        ),
        ("echo hello; exit 3", "LaunchError: a exited before any rank was started: exit code 3.\n  evidence  hello\n"),
        (
            'echo noise; cd /; eval "$remote"',
            "ConfigurationError: Script 'train.py' does not exist.\n",
        ),
    ],
)
def test_a_host_that_does_not_come_up_is_named_with_the_next_command(tmp_path: Path, ssh: str, expected: str) -> None:
    exit_code, said = run(tmp_path, ssh.replace("{python}", sys.executable))
    assert exit_code == 2
    assert said.startswith(expected.format(python=sys.executable, ssh=tmp_path / "ssh", version=VERSION))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--node-rank", "0"], "--node-rank is for one command per machine, and --hosts is one command for all."),
        (["--rendezvous", "a:1"], "--rendezvous is for one command per machine"),
        (["--nodes", "2"], "--nodes allows up to 2 hosts, but --hosts has 1."),
        (["--max-restarts", "-1"], "max_restarts must be >= 0, got -1."),
    ],
)
def test_options_that_contradict_hosts_are_refused_before_any_connection(
    tmp_path: Path, options: list[str], expected: str
) -> None:
    exit_code, said = run(tmp_path, "touch connected", *options)
    assert exit_code == 2
    assert said.startswith(f"ConfigurationError: {expected}")
    assert not (tmp_path / "connected").exists()
