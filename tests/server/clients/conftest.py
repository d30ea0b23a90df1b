import os
import re
import shlex
import subprocess

import openai
import pytest


@pytest.fixture(scope="session")
def base_url():
    command = shlex.split(os.environ["DOVETAIL_SERVER_COMMAND"])
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = None
    for line in server.stdout:
        found = re.search(r"listening on (http://\S+)", line)
        if found:
            url = found.group(1)
            break
    assert url, "the server ended without listening"
    yield url
    server.terminate()
    assert server.wait(timeout=240) == 0


@pytest.fixture(scope="session")
def client(base_url):
    return openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, timeout=240)


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id
