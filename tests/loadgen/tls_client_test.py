#!/usr/bin/env python3
"""`dovetail bench serve` as a client of TLS: which servers it trusts, what it says of the others, and that a load over
TLS is measured whole. Arguments: the dovetail binary, a model.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "control"))
import processes  # noqa: E402
from certificates import Certificates  # noqa: E402

BINARY, MODEL = sys.argv[1], sys.argv[2]
del sys.argv[1:3]
PROMPTS, TOKENS = 12, 24


class TlsClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.certificates = Certificates(cls.folder)
        cls.certificates.issue("server")  # for 127.0.0.1 and localhost

    def serve(self, *flags, host="127.0.0.1"):
        process = processes.Process(BINARY, "serve", MODEL, "--host", host, "--port", "0", "--served-model-name", "m",
                                    *flags)
        self.addCleanup(process.stop)
        return int(process.wait_for(rf"^listening on https?://{host}:(\d+)").group(1))

    def serve_tls(self, host="127.0.0.1"):
        return self.serve("--ssl-certfile", self.certificates.path("server.pem"), "--ssl-keyfile",
                          self.certificates.path("server.key"), host=host)

    def bench(self, url, *flags, trusts=True):
        """Status, what it said, and the result if there is one."""
        path = os.path.join(self.folder, "result.json")
        if os.path.exists(path):
            os.remove(path)
        trusted = self.certificates.path("ca.pem" if trusts else "none.pem")
        done = subprocess.run(
            [BINARY, "bench", "serve", "--base-url", url, "--num-prompts", str(PROMPTS), "--random-input-len", "32",
             "--random-output-len", str(TOKENS), "--max-concurrency", "4", "--save-result", "--result-filename", path,
             *flags],
            capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "SSL_CERT_FILE": trusted, "SSL_CERT_DIR": self.folder + "/none"})
        result = None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                result = json.load(file)
        return done.returncode, done.stderr, result

    def check_whole(self, answer):
        status, said, result = answer
        self.assertEqual(status, 0, said)
        self.assertEqual((result["completed"], result["failed"]), (PROMPTS, 0))
        self.assertEqual(result["total_output_tokens"], PROMPTS * TOKENS)
        self.assertGreater(result["median_ttft_ms"], 0)

    def test_a_load_on_a_server_that_it_trusts_is_measured_whole(self):
        port = self.serve_tls()
        self.check_whole(self.bench(f"https://127.0.0.1:{port}"))
        self.check_whole(self.bench(f"https://localhost:{port}"))

    def test_a_server_that_it_does_not_trust_is_refused_unless_told_otherwise(self):
        url = f"https://127.0.0.1:{self.serve_tls()}"
        status, said, result = self.bench(url, trusts=False)
        self.assertNotEqual(status, 0)
        self.assertIn("certificate verify failed", said)
        self.assertIn(url.removeprefix("https://"), said)
        self.assertIn("--insecure", said)
        self.assertIsNone(result)
        self.check_whole(self.bench(url, "--insecure", trusts=False))

    def test_a_certificate_for_another_name_is_refused(self):
        url = f"https://127.0.0.2:{self.serve_tls(host='127.0.0.2')}"
        status, said, result = self.bench(url)
        self.assertNotEqual(status, 0)
        self.assertIn("certificate verify failed", said)
        self.assertIsNone(result)
        self.check_whole(self.bench(url, "--insecure"))

    def test_a_port_that_speaks_no_tls_and_one_that_speaks_nothing_else_are_named(self):
        plain = self.serve()
        status, said, _ = self.bench(f"https://127.0.0.1:{plain}")
        self.assertNotEqual(status, 0)
        self.assertIn(f"127.0.0.1:{plain}", said)
        tls = self.serve_tls()
        status, said, _ = self.bench(f"http://127.0.0.1:{tls}")
        self.assertNotEqual(status, 0)
        self.assertIn("This port speaks HTTPS: ask https:// in place of http://", said)


if __name__ == "__main__":
    unittest.main()
