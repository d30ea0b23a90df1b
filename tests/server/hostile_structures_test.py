#!/usr/bin/env python3
"""Schemas, grammars and tools that are made to hurt, one after the other, while a stream runs: each is answered in
bounded time, refused with the place of what was wrong or served, and the stream goes on.

Arguments: the dovetail binary, a model.
"""
import http.client
import json
import pathlib
import sys
import threading
import time
import unittest
import urllib.parse

PROJECT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(PROJECT / "tests" / "control"))
import processes  # noqa: E402

BINARY, MODEL = sys.argv[1:3]
LONGEST_ANSWER = 20  # seconds, ten times what a quiet machine needs
LONGEST_GAP = 10  # between two pieces of the stream
ANSWER = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def called(result):
    """A conversation in which a tool has answered with `result`."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"tools": [tool("f")],
            "messages": [{"role": "user", "content": "x"},
                         {"role": "assistant", "content": None, "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "call_1", "content": result}]}


def nested(depth, begin, inner, end):
    """As text: Python's own writer does not go as deep."""
    value = begin * depth + inner + end * depth
    return '{"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": ' + value + "}}}"


TREE = {"$ref": "#/$defs/node", "$defs": {"node": {
    "type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["value"], "additionalProperties": False}}}
WIDE = {"type": "object", "additionalProperties": False,
        "properties": {f"property_{i}": {"type": "array", "items": {"enum": [f"{i}-{j}" for j in range(20)]}}
                       for i in range(3000)}}
# What is sent, which statuses may come, and what a refusal has to say.
CASES = {
    "a recursive schema": (schema(TREE), {200}, ""),
    "a schema of 500 levels": (
        nested(500, '{"type":"object","additionalProperties":false,"properties":{"a":', '{"type":"string"}', "}}"),
        {200, 400}, ""),
    "a schema of 100,000 levels": (nested(100_000, '{"items":', "{}", "}"), {400}, ""),
    "a schema of 60,000 enum values in 3,000 properties": (schema(WIDE), {200, 400}, ""),
    "10,000 enum values": (schema({"enum": [f"value number {i}" for i in range(10_000)]}), {200, 400}, ""),
    "a minimum above the maximum": (schema({"type": "integer", "minimum": 5, "maximum": 4}), {400},
                                    "bounds leave no integer"),
    "fewer items than at least": (schema({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 1}),
                                  {400}, "Items"),
    "a type that is none": (schema({"type": "object", "properties": {"a": {"type": "strin"}}}), {400}, "properties"),
    "a reference to itself": (schema({"$ref": "#"}), {400}, "refers to itself"),
    "references in a ring": (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},
                                                                     "b": {"$ref": "#/$defs/a"}}}), {400},
                             "refers to itself"),
    "a reference to nothing": (schema({"$ref": "#/$defs/nothing"}), {400}, "$defs/nothing"),
    "a keyword that is not enforced": (schema({"type": "object", "not": {"type": "null"}}), {400}, "not"),
    "a regex that backtracks for ever": ({"structured_outputs": {"regex": "(a+)+(a|aa)+(a|a?)+$"}}, {200, 400}, ""),
    "a regex of nested counts": ({"structured_outputs": {"regex": "(((a{1,1000}){1,1000}){1,1000})"}}, {400}, "regex"),
    "a regex that is not closed": ({"structured_outputs": {"regex": "(a|b"}}, {400}, "regex"),
    "a pattern of nested counts": (schema({"type": "string", "pattern": "^(([a-z]{1,999}){1,999}){1,999}$"}), {400},
                                   "pattern"),
    "10,000 choices": ({"structured_outputs": {"choice": [f"choice {i}" for i in range(10_000)]}}, {200, 400}, ""),
    "a grammar with left recursion": ({"structured_outputs": {"grammar": 'root ::= root "a" | "b"'}}, {400}, "root"),
    "a grammar with left recursion over two rules": (
        {"grammar": 'root ::= a "x"\na ::= b "y"\nb ::= a "z" | "w"'}, {400}, "left"),
    "a grammar without its root": ({"structured_outputs": {"grammar": 'a ::= "b"'}}, {400}, "root"),
    "a grammar that calls itself and nothing else": ({"structured_outputs": {"grammar": "root ::= root"}}, {400},
                                                     "root"),
    "two tools of one name": ({"tools": [tool("f"), tool("f")]}, {400}, "tools.1.function.name"),
    "a tool without a name": ({"tools": [tool("f"), tool("")]}, {400}, "tools.1.function.name"),
    "a choice of a tool that is not there": (
        {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, {400}, "tool_choice"),
    "a tool whose parameters refer to themselves": (
        {"tools": [tool("f", {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}})],
         "tool_choice": "required"}, {400}, "$ref"),
    "1,000 tools": ({"tools": [tool(f"tool_{i}", TREE) for i in range(1000)], "tool_choice": "required"}, {200, 400},
                    ""),
    "a result of 1 MiB": (called("word " * (1 << 18)), {400}, "context"),
}


class HostileStructures(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = processes.Process(BINARY, "serve", MODEL, "--port", "0", "--device", "cpu", "--chat-template",
                                       "chatml", "--tool-call-parser", "hermes", "--any-model-name")
        cls.url = cls.server.wait_for(r"^listening on (http://\S+)").group(1)

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def answer(self, asked):
        """Status, body and seconds."""
        body = (json.dumps(ANSWER)[:-1] + ", " + asked.removeprefix("{") if isinstance(asked, str)
                else json.dumps({**ANSWER, **asked}))
        begun = time.monotonic()
        connection = http.client.HTTPConnection(urllib.parse.urlparse(self.url).netloc, timeout=LONGEST_ANSWER)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text, time.monotonic() - begun

    def test_each_is_answered_in_time_and_a_stream_goes_on(self):
        gaps, stop, problems = [], threading.Event(), []

        def watch():
            try:
                while not stop.is_set():
                    last = time.monotonic()
                    for _ in processes.stream(self.url, "Once upon a time", max_tokens=200):
                        now = time.monotonic()
                        gaps.append(now - last)
                        last = now
            except (OSError, AssertionError, ValueError) as error:
                problems.append(error)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            for name, (asked, statuses, said) in CASES.items():
                with self.subTest(name):
                    status, text, seconds = self.answer(asked)
                    print(f"{name}: {status} in {seconds * 1e3:.0f} ms: {text[:160]}")
                    self.assertIn(status, statuses, text[:500])
                    if status != 200:
                        error = json.loads(text)["error"]
                        self.assertIn(said, json.dumps([error["message"], error.get("param")]))
                        self.assertLess(len(text), 4096)
        finally:
            stop.set()
            thread.join()
        self.assertEqual(problems, [])
        print(f"{len(gaps)} pieces of the stream, the longest gap {max(gaps) * 1e3:.0f} ms")
        self.assertLess(max(gaps), LONGEST_GAP)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
