"""Claude Code and Codex CLI, the programs themselves, each with one question to a real model. Their own instructions
are replaced by short ones, as the model is small; their tools are what they always send. Claude Code is asked once more
as it comes: the model then has positions that it was not made for, and answers with nonsense."""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import struct
import subprocess
import time
import urllib.request

import pytest

INSTRUCTIONS = "Answer in one short sentence."
QUESTION = "Say hello."


def program(package, path):
    return str(pathlib.Path(importlib.util.find_spec(package).origin).parent / path)


@pytest.fixture
def ask(tmp_path):
    """Runs a program in an empty home, which knows no account, and returns what it printed."""
    def run(command, seconds=240, **variables):
        home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **variables}
        done = subprocess.run(command, env=home, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=seconds, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout
    return run


def test_claude_code(ask, base_url, model):
    answer = ask([program("claude_agent_sdk", "_bundled/claude"), "-p", QUESTION, "--bare", "--tools", "Bash",
                  "--system-prompt", INSTRUCTIONS],
                 ANTHROPIC_BASE_URL=base_url, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL=model,
                 CLAUDE_CODE_MAX_OUTPUT_TOKENS="100", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", IS_SANDBOX="1")
    assert answer.strip()


def with_positions(gguf, positions, to):
    """A copy of a GGUF file that says that it has so many."""
    data = bytearray(pathlib.Path(gguf).read_bytes())
    key = b"llama.context_length" + struct.pack("<I", 4)  # a number of 32 bits
    struct.pack_into("<I", data, data.index(key) + len(key), positions)
    to.write_bytes(data)


@pytest.fixture
def roomy(tmp_path):
    """The address of a server with room for what Claude Code sends of its own, and the model's name."""
    command = shlex.split(os.environ["DOVETAIL_SERVER_COMMAND"])
    copy = tmp_path / "roomy.gguf"
    with_positions(command[2], 32768, copy)
    server = subprocess.Popen([command[0], "serve", str(copy), "--port", "0", "--host", "127.0.0.1"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield next(found.group(1) for line in server.stdout if (found := re.search(r"listening on (http://\S+)", line)))
    finally:
        server.terminate()
        log = server.communicate(timeout=240)[0]
    assert server.returncode == 0
    answered = [int(tokens) for tokens in re.findall(r"route=/v1/messages status=200 .*prompt_tokens=([0-9]+)", log)]
    assert answered and max(answered) > 8192, log[-2000:]


def seconds_to_read(base_url, tokens):
    body = json.dumps({"model": "roomy", "prompt": [1 + i % 1000 for i in range(tokens)], "max_tokens": 1}).encode()
    begin = time.monotonic()
    request = urllib.request.Request(f"{base_url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        assert answer.status == 200
    return time.monotonic() - begin


def test_claude_code_as_it_comes(ask, roomy):
    # It sends some 12,000 tokens, and attention makes each of them dearer than one of 2,000.
    patience = 120 + 30 * seconds_to_read(roomy, 2000)
    try:
        answer = ask([program("claude_agent_sdk", "_bundled/claude"), "-p", QUESTION], seconds=patience,
                     ANTHROPIC_BASE_URL=roomy, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="roomy",
                     CLAUDE_CODE_MAX_OUTPUT_TOKENS="24", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", IS_SANDBOX="1")
    except AssertionError as failed:  # nonsense may not end by itself; roomy sees that the server answered
        assert "exceeded the 24 output token maximum" in str(failed)
        return
    assert answer.strip()


@pytest.mark.parametrize("web_search", ["disabled", "cached"])
def test_codex(ask, base_url, model, tmp_path, web_search):
    (tmp_path / "instructions.md").write_text(INSTRUCTIONS)
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(f"""
model = "{model}"
model_provider = "dovetail"
web_search = "{web_search}"
model_instructions_file = "{tmp_path}/instructions.md"
[model_providers.dovetail]
name = "Dovetail"
base_url = "{base_url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
""")
    codex = program("codex_cli_bin", "bin/codex")
    command = [codex, "exec", "--skip-git-repo-check", "--sandbox", "read-only", QUESTION]
    if web_search == "disabled":
        assert ask(command).strip()
        return
    with pytest.raises(AssertionError, match='web_search = ."disabled."'):  # what the server says is to be done
        ask(command)
