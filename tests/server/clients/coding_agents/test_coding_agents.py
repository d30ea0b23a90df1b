"""Claude Code and Codex CLI, the programs themselves, each with one question to a real model. Their own instructions
are replaced by short ones, as the model is small; their tools are what they always send."""

import importlib.util
import pathlib
import subprocess

import pytest

INSTRUCTIONS = "Answer in one short sentence."
QUESTION = "Say hello."


def program(package, path):
    return str(pathlib.Path(importlib.util.find_spec(package).origin).parent / path)


@pytest.fixture
def ask(tmp_path):
    """Runs a program in an empty home, which knows no account, and returns what it printed."""
    def run(command, **variables):
        home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **variables}
        done = subprocess.run(command, env=home, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=240, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout
    return run


def test_claude_code(ask, base_url, model):
    answer = ask([program("claude_agent_sdk", "_bundled/claude"), "-p", QUESTION, "--bare", "--tools", "Bash",
                  "--system-prompt", INSTRUCTIONS],
                 ANTHROPIC_BASE_URL=base_url, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL=model,
                 CLAUDE_CODE_MAX_OUTPUT_TOKENS="100", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", IS_SANDBOX="1")
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
