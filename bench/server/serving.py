"""`dovetail serve` for measurements, and streams of its completions."""
import http.client
import json
import re
import subprocess
import tempfile
import threading
import time


class Server:
    def __init__(self, binary, model, flags):
        command = [binary, 'serve', model, '--port', '0', '--served-model-name', 'm', *flags]
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        for line in self.process.stdout:
            if found := re.search(r'listening on http://\S+:(\d+)\s*$', line):
                self.port = int(found.group(1))
                break
        else:
            self.log.seek(0)
            raise SystemExit(f'the server ended: {" ".join(command)}\n{self.log.read().decode()[-3000:]}')
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def tokens(self, prompt, count, seen, ended=None):
        """The ids of `count` tokens. Appends to `seen` when each came; fewer come once `ended` is set."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=600)
        body = {'model': 'm', 'prompt': prompt, 'max_tokens': count, 'stream': True, 'ignore_eos': True,
                'temperature': 0, 'return_token_ids': True}
        connection.request('POST', '/v1/completions', json.dumps(body), {'Content-Type': 'application/json'})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f'{response.status}: {response.read()[:300]}')
        ids = []
        for line in response:
            if line.startswith(b'data: {'):
                seen.append(time.monotonic())
                for choice in json.loads(line[6:])['choices']:
                    ids += choice.get('token_ids') or []
            if ended is not None and ended.is_set():
                break
        connection.close()
        return ids

    def metric(self, name):
        """Servers hear of a scheduler's counters once a second."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        connection.request('GET', '/metrics')
        found = re.search(rf'^dovetail:{name}{{[^}}]*}} (\S+)$', connection.getresponse().read().decode(), re.M)
        return float(found.group(1)) if found else float('nan')


class Streams:
    """Threads that read a stream each, of so many tokens, until `end`. `seen`: when the tokens of each came."""

    def __init__(self, server, prompts, tokens):
        self.seen = [[] for _ in prompts]
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=server.tokens, args=(prompt, tokens, seen, self.ended))
                        for prompt, seen in zip(prompts, self.seen)]
        for thread in self.threads:
            thread.start()
        while any(len(seen) < 5 for seen in self.seen):
            if not all(thread.is_alive() for thread in self.threads):
                raise SystemExit('a stream ended as it began: are its tokens more than a sequence may have?')
            time.sleep(0.01)

    def end(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def gaps(self, begin, end):
        return [b - a for seen in self.seen for a, b in zip(seen, seen[1:]) if b > begin and a < end]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
