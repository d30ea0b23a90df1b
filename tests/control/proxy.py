"""A TCP proxy that can lose what passes it: between a member and its scheduler."""
import contextlib
import socket
import struct
import threading


class Proxy:
    """Forwards connections to HOST:PORT until told otherwise. `address` is where it listens."""

    def __init__(self, target):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.lock, self.pairs, self.held = threading.Lock(), [], False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()
        self.cut()

    def hold(self):
        """From now on what comes is lost, both ways; connections stay."""
        with self.lock:
            self.held = True

    def cut(self):
        """Breaks all connections, and forwards those that are made from now on."""
        with self.lock:
            pairs, self.pairs, self.held = self.pairs, [], False
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                # A reset, which loses what the other side has not read.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
                with self.lock:
                    self.pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                with self.lock:
                    if self.held:
                        continue
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
