#!/usr/bin/env python3
"""TLS of the clients' ports of a `dovetail serve` process, asked with curl and with Python's ssl.
Arguments: the dovetail binary, a model.
"""
import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "control"))
import processes  # noqa: E402
from certificates import Certificates, openssl  # noqa: E402

BINARY, MODEL = sys.argv[1], os.path.join(os.environ.get("DOVETAIL_TEST_DATA", ""), sys.argv[2])
del sys.argv[1:3]
PATIENCE = 30


class TlsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.certificates = Certificates(self.folder)
        self.certificates.issue("server")
        self.path = self.certificates.path
        self.ssl = ("--ssl-certfile", self.path("server.pem"), "--ssl-keyfile", self.path("server.key"))

    def serve(self, *flags):
        process = processes.Process(BINARY, "serve", MODEL, "--port", "0", "--ignore-model-name", *flags)
        self.addCleanup(process.stop)
        self.port = int(process.wait_for(r"^listening on https://127.0.0.1:(\d+)").group(1))
        return process

    def context(self, ca="ca", client=None):
        context = ssl.create_default_context(cafile=self.path(f"{ca}.pem"))
        if client is not None:
            context.load_cert_chain(self.path(f"{client}.pem"), self.path(f"{client}.key"))
        return context

    def ask(self, path, body=None, context=None):
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE,
                                                 context=context or self.context())
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def connect(self, context, port=None):
        plain = socket.create_connection(("127.0.0.1", port or self.port), timeout=PATIENCE)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def test_curl_and_python_ask_over_tls_one_and_streams_and_large_bodies_arrive_whole(self):
        self.serve(*self.ssl)
        url = f"https://127.0.0.1:{self.port}/v1/models"
        for flags in ([], ["--tls-max", "1.2"]):
            done = subprocess.run(["curl", "-sS", "--max-time", "20", "--cacert", self.path("ca.pem"), *flags, url],
                                  capture_output=True, text=True, check=False)
            self.assertEqual(json.loads(done.stdout)["object"], "list", done.stderr)
        untrusting = subprocess.run(["curl", "-sS", "--max-time", "20", url], capture_output=True, check=False)
        self.assertEqual(untrusting.returncode, 60)  # no CA that it knows
        body = {"model": "x", "prompt": "Once", "max_tokens": 490, "n": 4, "ignore_eos": True, "temperature": 0}
        status, whole = self.ask("/v1/completions", body)
        self.assertEqual(status, 200)
        status, stream = self.ask("/v1/completions", body | {"stream": True})
        self.assertTrue(stream.endswith("data: [DONE]\n\n"))
        texts = [""] * 4
        for line in stream.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
        self.assertEqual(texts, [choice["text"] for choice in json.loads(whole)["choices"]])
        status, tokens = self.ask("/tokenize", {"model": "x", "prompt": "a b " * 200_000})
        self.assertEqual(status, 200)
        self.assertGreater(json.loads(tokens)["count"], 200_000)

    def test_what_is_spoken(self):
        self.serve(*self.ssl)
        context = self.context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        with self.connect(context) as connection:
            self.assertEqual((connection.version(), connection.selected_alpn_protocol()), ("TLSv1.3", "http/1.1"))
        context.set_alpn_protocols(["h2"])
        with self.assertRaises(ssl.SSLError):
            self.connect(context)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with self.assertRaises((ssl.SSLError, ConnectionError)):
            self.connect(old)
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b"".join(iter(lambda: plain.recv(4096), b""))
        self.assertIn(b"HTTP/1.1 400 ", answer)
        self.assertIn(b"This port speaks HTTPS", answer)

    def test_failed_handshakes_are_counted_by_reason_and_the_first_of_a_while_is_logged(self):
        self.certificates.issue("client", roles=[])
        foreign = Certificates(self.folder, "foreign")
        foreign.issue("stranger", roles=[])
        server = self.serve(*self.ssl, "--ssl-ca-certs", self.path("ca.pem"), "--ssl-cert-reqs", "2")
        known = self.context(client="client")
        silent = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

        def logged():
            return sum("the handshake with" in line for line in server.lines)

        def count(reason):
            text = self.ask("/metrics", context=known)[1]
            return int(re.search(rf'tls_handshakes_failed_total{{.*reason="{reason}"}} (\d+)', text).group(1))

        def fails(reason, attempt):
            attempt()
            end = time.monotonic() + PATIENCE
            while count(reason) != 1 and time.monotonic() < end:
                time.sleep(0.01)
            self.assertEqual(count(reason), 1, reason)

        def send(data, context=None):
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as plain:
                    if context is None:
                        plain.sendall(data)
                        if data:
                            plain.recv(4096)
                    else:
                        with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
                            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                            connection.recv(4096)

        h2_only = self.context(client="client")
        h2_only.set_alpn_protocols(["h2"])
        fails("client_left", lambda: send(b""))
        self.assertEqual(logged(), 0)
        fails("client_certificate", lambda: send(None, self.context()))
        server.wait_for(r"the handshake with 127.0.0.1 failed \(client_certificate\): "
                        r"peer did not return a certificate; 0 more")
        fails("nothing_shared", lambda: send(None, h2_only))
        fails("plain_http", lambda: send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
        fails("no_tls", lambda: send(b"SSH-2.0-OpenSSH_9.2\r\n" * 20))
        fails("alert", lambda: send(None, self.context("foreign", client="client")))
        for _ in range(60):
            send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        self.assertEqual(count("plain_http"), 61)
        self.assertLess(logged(), 20)
        fails("timeout", lambda: None)
        silent.close()

    def test_clients_that_do_not_go_on_hold_up_no_other(self):
        self.serve(*self.ssl)
        silent = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(50)]
        for index, connection in enumerate(silent):
            connection.sendall(b"\x16\x03\x01\x02\x00"[:index % 6])  # a part of a ClientHello
        self.assertEqual(self.ask("/health")[0], 200)
        for connection in silent:
            connection.close()
        self.assertEqual(self.ask("/health")[0], 200)

    def test_certificates_of_clients(self):
        self.certificates.issue("client", roles=[])
        foreign = Certificates(self.folder, "foreign")
        foreign.issue("stranger", roles=[])
        authority = ("--ssl-ca-certs", self.path("ca.pem"), "--ssl-cert-reqs")
        required = self.serve(*self.ssl, *authority, "2")
        self.assertEqual(self.ask("/health", context=self.context(client="client"))[0], 200)
        for client in (None, "stranger"):
            with self.assertRaises((ssl.SSLError, ConnectionError)):
                self.ask("/health", context=self.context(client=client))
        required.stop()
        self.serve(*self.ssl, *authority, "1")
        for client in (None, "client"):
            self.assertEqual(self.ask("/health", context=self.context(client=client))[0], 200)
        with self.assertRaises((ssl.SSLError, ConnectionError)):
            self.ask("/health", context=self.context(client="stranger"))

    def test_a_renewed_certificate_is_used_without_a_restart_and_a_broken_one_is_not(self):
        server = self.serve(*self.ssl)
        kept = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=self.context())

        def ask_kept():
            kept.request("GET", "/health")
            return kept.getresponse().read()

        def told_end(ca):
            metrics = self.ask("/metrics", context=self.context(ca))[1]
            found = re.search(r'certificate_expiration_timestamp_seconds{role="https",worker=""} (\S+)', metrics)
            return int(float(found.group(1)))

        self.assertIn(b"ok", ask_kept())
        self.assertEqual(told_end("ca"), self.certificates.end("server"))
        renewed = Certificates(self.folder, "ca2")
        renewed.issue("server", days="1")
        server.wait_for("server.pem has changed and is used for new connections")
        self.assertEqual(self.ask("/health", context=self.context("ca2"))[0], 200)
        self.assertEqual(told_end("ca2"), renewed.end("server"))
        with self.assertRaises(ssl.SSLCertVerificationError):
            self.ask("/health")
        self.assertIn(b"ok", ask_kept())
        kept.close()
        with open(self.path("server.pem"), "w", encoding="ascii") as broken:
            broken.write("no certificate\n")
        server.wait_for("the new certificate is not used, the one before is; --ssl-certfile: .*server.pem")
        self.assertEqual(self.ask("/health", context=self.context("ca2"))[0], 200)

    def test_what_cannot_be_used_is_named_at_start(self):
        self.certificates.issue("other")
        with open(self.path("text"), "w", encoding="ascii") as text:
            text.write("no certificate\n")
        openssl("pkey", "-aes128", "-passout", "pass:word", "-in", self.path("server.key"), "-out", self.path("locked"))
        pem, key = self.path("server.pem"), self.path("server.key")
        for flags, said in (((pem, self.path("none")), "--ssl-keyfile: .*none cannot be read"),
                            ((self.path("none"), key), "--ssl-certfile: .*none cannot be read"),
                            ((self.folder, key), "--ssl-certfile: .* cannot be read"),
                            ((pem, self.path("other.key")), "other.key is not the key of the certificate .*server.pem"),
                            ((self.path("text"), key), "--ssl-certfile: .*text holds no usable PEM certificate"),
                            ((pem, self.path("locked")), "locked holds no PEM private key without a passphrase"),
                            ((pem,), "--ssl-keyfile: is missing"),
                            ((pem, key, "--ssl-ca-certs", pem), "--ssl-ca-certs: .* give --ssl-cert-reqs"),
                            ((pem, key, "--ssl-cert-reqs", "2"), "--ssl-cert-reqs: .*--ssl-ca-certs; give it too")):
            flags = ("--ssl-certfile", *flags) if len(flags) == 1 else ("--ssl-certfile", flags[0], "--ssl-keyfile",
                                                                       *flags[1:])
            done = subprocess.run([BINARY, "serve", MODEL, "--port", "0", *flags], capture_output=True, text=True,
                                  timeout=60, check=False)
            self.assertEqual(done.returncode, 1, said)
            self.assertRegex(done.stderr, said)
        self.certificates.issue("late", days="-1")
        server = self.serve("--ssl-certfile", self.path("late.pem"), "--ssl-keyfile", self.path("late.key"))
        server.wait_for("late.pem has expired")

    def test_the_grpc_port_has_the_same_certificate(self):
        server = self.serve(*self.ssl, "--grpc-listen", "127.0.0.1:0")
        port = int(server.wait_for(r"^listening on grpcs://127.0.0.1:(\d+)").group(1))
        context = self.context()
        context.set_alpn_protocols(["h2"])
        end = time.monotonic() + PATIENCE
        with self.connect(context, port) as connection:
            self.assertEqual(connection.selected_alpn_protocol(), "h2")
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            head = b""
            while len(head) < 9 and time.monotonic() < end:
                head += connection.recv(9 - len(head))
            self.assertEqual(head[3], 4, "HTTP/2 SETTINGS")


if __name__ == "__main__":
    if not os.path.exists(MODEL):
        print("skipped: no", MODEL)
        sys.exit(77)
    unittest.main()
