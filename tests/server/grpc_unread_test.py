#!/usr/bin/env python3
"""Messages over gRPC that miss their last byte take no more of the server's memory than --max-unread-grpc-bytes.

Arguments: the dovetail binary, a model that it can serve.
"""
import os
import selectors
import socket
import struct
import sys
import time
import unittest
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../control"))
import processes  # pylint: disable=wrong-import-position

BINARY, MODEL = sys.argv[1:3]
FLAGS = sys.argv[3:] or ["--max-unread-grpc-bytes", "32MiB"]
del sys.argv[1:]
MESSAGE = 4 << 20
CALLS = 150
PATH = "/vllm.grpc.engine.VllmEngine/Generate"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name, value):
    """A header that is neither indexed nor compressed."""
    return b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


class UnfinishedCall:
    """An HTTP/2 connection with one gRPC call, which sends its message but for the last byte as fast as it may."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.received, self.ended = b"", False
        self.stream_window = self.window = self.initial = 65535
        self.left = b"\x00" + struct.pack(">I", MESSAGE) + bytes(MESSAGE - 1)
        headers = b"".join(literal(*header) for header in ((":method", "POST"), (":scheme", "http"), (":path", PATH),
                                                           (":authority", "t"), ("content-type", "application/grpc"),
                                                           ("te", "trailers")))
        self.to_send = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, headers)

    def wants_to_write(self):
        return not self.ended and (self.to_send or (self.left and min(self.window, self.stream_window) > 0))

    def write(self):
        size = min(16384, self.window, self.stream_window, len(self.left))
        if not self.to_send and size > 0:
            self.to_send, self.left = frame(DATA, 0, 1, self.left[:size]), self.left[size:]
            self.window -= size
            self.stream_window -= size
        try:
            self.to_send = self.to_send[self.socket.send(self.to_send):]
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True

    def read(self):
        try:
            received = self.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.ended = True
        self.received += received
        while len(self.received) >= 9:
            length = int.from_bytes(self.received[:3], "big")
            if len(self.received) < 9 + length:
                return
            kind, flags, stream = self.received[3], self.received[4], struct.unpack(">I", self.received[5:9])[0]
            payload, self.received = self.received[9:9 + length], self.received[9 + length:]
            self.take(kind, flags, stream, payload)

    def take(self, kind, flags, stream, payload):
        if kind == WINDOW_UPDATE:
            if stream:
                self.stream_window += struct.unpack(">I", payload)[0]
            else:
                self.window += struct.unpack(">I", payload)[0]
        elif kind == SETTINGS and not flags & 1:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at:at + 6])
                if name == 4:
                    self.stream_window += value - self.initial
                    self.initial = value
            self.to_send += frame(SETTINGS, 1, 0)
        elif kind == PING and not flags & 1:
            self.to_send += frame(PING, 1, 0, payload)
        elif kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & 1):
            self.ended = True


def resident(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))


def send_all(calls):
    """Until nothing can be sent any more for a while."""
    chosen = selectors.DefaultSelector()
    for call in calls:
        chosen.register(call.socket, selectors.EVENT_READ, call)
    last = time.monotonic()
    while time.monotonic() < last + 2:
        for call in calls:
            before = len(call.left) + len(call.to_send)
            if call.wants_to_write():
                call.write()
            if len(call.left) + len(call.to_send) != before:
                last = time.monotonic()
        for key, _ in chosen.select(0.001):
            key.data.read()
            if key.data.ended:
                chosen.unregister(key.data.socket)


class UnreadMessages(unittest.TestCase):
    def test_take_no_more_memory_than_they_may(self):
        with processes.Process(BINARY, "serve", MODEL, "--port", "0", "--grpc-listen", "127.0.0.1:0", "--threads", "1",
                               "--kv-cache-memory-bytes", "16MiB", "--shutdown-timeout", "1", *FLAGS) as server:
            port = int(server.wait_for(r"^listening on grpc://127.0.0.1:(\d+)").group(1))
            url = server.wait_for(r"^listening on (http://\S+)").group(1)
            before = resident(server.pid)
            calls = [UnfinishedCall(port) for _ in range(CALLS)]
            send_all(calls)
            grown = (resident(server.pid) - before) >> 20
            sent = sum(MESSAGE - len(call.left) for call in calls) >> 20
            ended = sum(call.ended for call in calls)
            print(f"{CALLS} unfinished messages: {sent} MiB sent, {ended} ended, the server has {grown} MiB more")
            self.assertLess(grown, 100)
            with urllib.request.urlopen(url + "/health", timeout=60) as health:
                self.assertEqual(health.status, 200)
            for call in calls:
                call.socket.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
