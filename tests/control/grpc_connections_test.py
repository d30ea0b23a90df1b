#!/usr/bin/env python3
"""Strangers that open more connections to a gRPC port than the process may have files.

Arguments: the dovetail binary, a model.
"""
import contextlib
import os
import socket
import sys
import time
import unittest
import urllib.request

import processes

BINARY, MODEL = sys.argv.pop(1), sys.argv.pop(1)
FILES = 160  # `ulimit -n`
STRANGERS = 2 * FILES
SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # HTTP/2: an empty frame of them, on stream 0
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS


def limited(*arguments):
    """A process that may open FILES files."""
    return processes.Process("bash", "-c", f'ulimit -n {FILES}; exec "$@"', "bash", BINARY, *arguments)


def address_of(text):
    host, port = text.rsplit(":", 1)
    return host, int(port)


def speaks_http2(address):
    """Whether a server of HTTP/2 answers there."""
    try:
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(HELLO)
            return connection.recv(9)[3:4] == SETTINGS[3:4]
    except OSError:
        return False


def becomes_true(condition, limit):
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def open_files(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


class Strangers(contextlib.ExitStack):
    """Connections that say nothing, as many as a process can have files and more."""

    def __init__(self, address):
        super().__init__()
        for _ in range(STRANGERS):
            self.enter_context(socket.create_connection(address, timeout=10))


class GrpcConnectionsTest(unittest.TestCase):
    def check(self, process, address, meanwhile):
        self.assertTrue(speaks_http2(address))
        before = open_files(process)
        with Strangers(address):
            process.wait_for("a gRPC connection was turned away")
            self.assertLess(open_files(process), FILES)
            meanwhile()
            # They never begin to speak, and are closed in time.
            self.assertTrue(becomes_true(lambda: open_files(process) <= before + 4, 30), open_files(process))
            self.assertTrue(speaks_http2(address))
        with Strangers(address):
            pass
        self.assertTrue(becomes_true(lambda: speaks_http2(address), 10), "it accepts no connection any more")

    def test_cost_a_scheduler_no_later_connection(self):
        with limited("scheduler", "--listen", "127.0.0.1:0") as scheduler:
            self.check(scheduler, address_of(scheduler.wait_for(r"^listening on (\S+)").group(1)), lambda: None)

    def test_cost_a_server_neither_its_grpc_port_nor_its_probes(self):
        with limited("serve", MODEL, "--port", "0", "--grpc-listen", "127.0.0.1:0", "--threads", "1",
                     "--ignore-model-name") as server:
            url = server.wait_for(r"^listening on (http://\S+)").group(1)

            def probe():
                with urllib.request.urlopen(url + "/health", timeout=10) as answer:
                    self.assertEqual(answer.status, 200)

            self.check(server, address_of(server.wait_for(r"^listening on grpc://(\S+)").group(1)), probe)


if __name__ == "__main__":
    unittest.main(verbosity=2)
