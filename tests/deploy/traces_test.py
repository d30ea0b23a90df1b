#!/usr/bin/env python3
"""Traces of a whole cluster, as a collector gets them: every body is what opentelemetry-proto's JSON mapping allows,
and a request's spans (server, scheduler, both kinds of workers) hang together under the client's.

Arguments: the dovetail binary, a model. Run by with_tools, which has opentelemetry-proto.
"""
import base64
import collections
import http.client
import http.server
import json
import os
import sys
import threading
import time
import unittest
import urllib.parse

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "control"))
import processes  # noqa: E402

BINARY, MODEL = sys.argv[1], sys.argv[2]
del sys.argv[1:3]
IDS = ("traceId", "spanId", "parentSpanId")
SECRET = "the prompt that no trace may hold"
LIMIT = 60

Seen = collections.namedtuple("Seen", "service span attributes")


def as_proto(body):
    """Parsed strictly; ids are hexadecimal in OTLP's JSON, where protobuf's own mapping has base64."""
    def convert(value):
        if isinstance(value, list):
            return [convert(item) for item in value]
        if isinstance(value, dict):
            return {key: base64.b64encode(bytes.fromhex(item)).decode() if key in IDS else convert(item)
                    for key, item in value.items()}
        return value
    return json_format.ParseDict(convert(json.loads(body)), ExportTraceServiceRequest(), ignore_unknown_fields=False)


def value_of(value):
    return getattr(value, value.WhichOneof("value"))


class Collector:
    """An OTLP/HTTP receiver. `answers`: statuses of the first requests; then 200."""

    def __init__(self, answers=()):
        collector = self
        self.answers, self.spans, self.problems, self.bodies = list(answers), [], [], 0
        self.changed = threading.Condition()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):  # noqa: N802
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                with collector.changed:
                    collector.bodies += 1
                    status = collector.answers.pop(0) if collector.answers else 200
                    if status == 200:
                        collector.take(self.path, self.headers["Content-Type"], body)
                    collector.changed.notify_all()
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def take(self, path, content_type, body):
        if path != "/v1/traces" or content_type != "application/json":
            self.problems.append(f"{path} {content_type}")
        if SECRET in body:
            self.problems.append("a prompt in a trace")
        try:
            request = as_proto(body)
        except (json_format.ParseError, ValueError) as error:
            self.problems.append(f"{error}: {body[:500]}")
            return
        for resource in request.resource_spans:
            about = {item.key: value_of(item.value) for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {item.key: value_of(item.value) for item in span.attributes}
                    self.spans.append(Seen(about["service.name"], span, attributes))

    def of(self, trace_id):
        return [seen for seen in self.spans if seen.span.trace_id.hex() == trace_id]

    def wait_for(self, condition):
        """Until condition(self), called with the lock held."""
        end = time.monotonic() + LIMIT
        with self.changed:
            while not condition(self):
                left = end - time.monotonic()
                if left <= 0:
                    names = collections.Counter((seen.service, seen.span.name) for seen in self.spans)
                    raise AssertionError(f"not within {LIMIT} s: {names} {self.problems}")
                self.changed.wait(left)


def ask(url, traceparent=None, **fields):
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
    body = {"model": "x", "prompt": SECRET, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json", **({"traceparent": traceparent} if traceparent else {})}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


class Traces(unittest.TestCase):
    def test_a_request_of_a_cluster_is_one_tree_under_the_clients_span(self):
        trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        with Collector() as collector:
            with processes.Process(BINARY, "up", MODEL, "--port", "0", "--ignore-model-name", "--compute-workers", "2",
                                   "--attention-workers", "2", "--prefill-rank-tokens", "128",
                                   "--otlp-traces-endpoint", collector.url, "--otlp-traces-sample-rate", "0") as up:
                url = up.wait_for(r"^ready: (http://\S+)").group(1)
                prompt = (SECRET + " and more of it ") * 40
                self.assertEqual(ask(url, f"00-{trace}-{parent}-01", prompt=prompt, max_tokens=40)[0], 200)
                self.assertEqual(ask(url, "00-" + "1" * 32 + f"-{parent}-00", max_tokens=4)[0], 200)
                self.assertEqual(ask(url, max_tokens=4)[0], 200)
                collector.wait_for(lambda c: {"llm_request", "queue", "prefill", "decode", "compute.prefill",
                                              "compute.decode", "attention.prefill", "attention.decode"} <=
                                   {seen.span.name for seen in c.of(trace)})
            self.assertEqual(collector.problems, [])
            self.assertEqual({seen.span.trace_id.hex() for seen in collector.spans}, {trace},
                             "a client that does not sample, and a rate of 0")
            spans = collector.of(trace)
            root = next(seen for seen in spans if seen.span.name == "llm_request")
            self.assertEqual((root.service, root.span.parent_span_id.hex()), ("dovetail-server", parent))
            self.assertEqual(root.span.kind, 2)
            self.assertEqual(root.attributes["gen_ai.usage.completion_tokens"], 40)
            services = {"queue": "dovetail-scheduler", "prefill": "dovetail-scheduler", "decode": "dovetail-scheduler",
                        "compute.prefill": "dovetail-compute-worker", "compute.decode": "dovetail-compute-worker",
                        "attention.prefill": "dovetail-attention-worker",
                        "attention.decode": "dovetail-attention-worker", "move": "dovetail-scheduler",
                        "attention.receive": "dovetail-attention-worker"}
            for seen in spans:
                if seen is root:
                    continue
                self.assertEqual(seen.service, services[seen.span.name], seen)
                self.assertEqual(seen.span.parent_span_id, root.span.span_id, seen)
                self.assertLessEqual(seen.span.start_time_unix_nano, seen.span.end_time_unix_nano)
            self.assertEqual(len({seen.span.span_id for seen in spans}), len(spans))
            for name in ("prefill", "compute.prefill"):
                parts = [seen for seen in spans if seen.span.name == name]
                computed = root.attributes["gen_ai.usage.prompt_tokens"] - root.attributes["dovetail.cached_tokens"]
                self.assertEqual(sum(seen.attributes["dovetail.tokens"] for seen in parts), computed)
                ranks = {(seen.attributes["dovetail.rank"], seen.attributes["dovetail.ranks"]) for seen in parts
                         if "dovetail.rank" in seen.attributes}
                self.assertEqual(ranks, {(0, 2), (1, 2)}, "a part for each rank of the prefill group")
            for name in ("decode", "compute.decode", "attention.decode"):
                tokens = sum(seen.attributes["dovetail.tokens"] for seen in spans if seen.span.name == name)
                self.assertEqual(tokens, 39, name)

    def test_a_killed_worker_is_a_failure_in_the_traces_of_its_requests(self):
        trace = "5" * 32
        with Collector() as collector:
            with processes.Process(BINARY, "up", MODEL, "--port", "0", "--ignore-model-name", "--otlp-traces-endpoint",
                                   collector.url, "--attention-workers", "2") as up:
                url = up.wait_for(r"^ready: (http://\S+)").group(1)
                enough = threading.Event()

                def ask_until_enough():
                    while not enough.is_set():
                        ask(url, f"00-{trace}-{'7' * 16}-01", max_tokens=600)

                threads = [threading.Thread(target=ask_until_enough) for _ in range(4)]
                for thread in threads:
                    thread.start()
                try:
                    collector.wait_for(lambda c: any(seen.span.name == "decode" for seen in c.of(trace)))
                    victim = next(pid for pid, arguments in processes.children_of(up.pid).items()
                                  if "--name attention-1 " in arguments)
                    os.kill(victim, 9)
                    collector.wait_for(lambda c: any(seen.span.name == "failure" for seen in c.of(trace)))
                finally:
                    enough.set()
                    for thread in threads:
                        thread.join()
            failures = [seen.span for seen in collector.of(trace) if seen.span.name == "failure"]
            self.assertTrue(all(span.status.code == 2 and "was lost" in span.status.message for span in failures))
            self.assertEqual(collector.problems, [])

    def test_a_collector_that_is_busy_is_asked_again_and_one_that_is_gone_holds_nothing_up(self):
        with Collector(answers=[503, 429]) as collector:
            with processes.Process(BINARY, "serve", MODEL, "--port", "0", "--ignore-model-name",
                                   "--otlp-traces-endpoint", collector.url) as serve:
                url = serve.wait_for(r"^listening on (http://\S+)").group(1)
                self.assertEqual(ask(url, max_tokens=4)[0], 200)
                collector.wait_for(lambda c: any(seen.span.name == "llm_request" for seen in c.spans))
            self.assertEqual(collector.problems, [])
        with processes.Process(BINARY, "serve", MODEL, "--port", "0", "--ignore-model-name", "--otlp-traces-endpoint",
                               collector.url) as serve:
            url = serve.wait_for(r"^listening on (http://\S+)").group(1)
            self.assertEqual(ask(url, max_tokens=4)[0], 200)
            serve.wait_for(r"W .* traces: http://127.0.0.1:\d+/v1/traces does not take them")
            began = time.monotonic()
            self.assertEqual(serve.stop(), 0)
            self.assertLess(time.monotonic() - began, 10)


if __name__ == "__main__":
    unittest.main()
