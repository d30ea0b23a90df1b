#!/usr/bin/env python3
"""/infill of a real model: stories260K with tokens to fill in a text. The vocabulary is that of the file, in which the
last and rarest pieces are renamed here.

Arguments: the dovetail binary, the model below the test data.
"""
import http.client
import json
import os
import struct
import sys
import tempfile
import unittest
import urllib.parse

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "control"))
import processes  # noqa: E402

BINARY, MODEL = sys.argv[1], os.path.join(os.environ.get("DOVETAIL_TEST_DATA", ""), sys.argv[2])
del sys.argv[1:3]

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
DEEPSEEK = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
CONTROL, ALIGNMENT = 3, 32
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, size):
        self.at += size
        return self.data[self.at - size:self.at]

    def number(self, format_):
        return struct.unpack("<" + format_, self.take(struct.calcsize(format_)))[0]

    def text(self):
        return self.take(self.number("Q"))

    def value(self, kind):
        """The bytes of a value; of an array its kind and the bytes of each."""
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            return self.take(SIZES[kind])
        of, count = self.number("I"), self.number("Q")
        return of, [self.value(of) for _ in range(count)]


def text(value):
    return struct.pack("<Q", len(value)) + value


def written(kind, value):
    if kind == TEXT:
        return text(value)
    if kind != ARRAY:
        return value
    of, values = value
    return struct.pack("<IQ", of, len(values)) + b"".join(written(of, one) for one in values)


def with_tokens(model, names, to):
    """Writes the GGUF file `model` to `to`, with `names` in place of its last tokens."""
    with open(model, "rb") as file:
        data = file.read()
    reader = Reader(data)
    magic, version, tensors, count = reader.take(4), reader.number("I"), reader.number("Q"), reader.number("Q")
    pairs = []
    for _ in range(count):
        name, kind = reader.text(), reader.number("I")
        value = reader.value(kind)
        if name == b"tokenizer.ggml.tokens":
            value[1][-len(names):] = [one.encode() for one in names]
        if name == b"tokenizer.ggml.token_type":
            value[1][-len(names):] = [struct.pack("<i", CONTROL)] * len(names)
        pairs.append((name, kind, value))
    infos = reader.at
    for _ in range(tensors):  # their places count from where the data begins
        reader.text()
        reader.take(8 * reader.number("I") + 4 + 8)
    begin = -(-reader.at // ALIGNMENT) * ALIGNMENT
    made = magic + struct.pack("<IQQ", version, tensors, count)
    for name, kind, value in pairs:
        made += text(name) + struct.pack("<I", kind) + written(kind, value)
    made += data[infos:reader.at]
    made += b"\0" * (-len(made) % ALIGNMENT)
    with open(to, "wb") as file:
        file.write(made + data[begin:])


class Server:
    """`dovetail serve` of the model with these tokens; of none: the file as it is."""

    def __init__(self, names):
        self.folder = tempfile.TemporaryDirectory()
        path = MODEL
        if names:
            path = os.path.join(self.folder.name, "fills-in.gguf")
            with_tokens(MODEL, names, path)
        self.process = processes.Process(BINARY, "serve", path, "--port", "0")

    def __enter__(self):
        self.process.__enter__()
        self.url = urllib.parse.urlsplit(self.process.wait_for(r"listening on (http://\S+)").group(1))
        return self

    def __exit__(self, *error):
        self.process.__exit__(*error)
        self.folder.cleanup()

    def ask(self, path, **fields):
        connection = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=120)
        connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def ids(self, content):
        return self.ask("/tokenize", content=content, add_special=False, parse_special=False)["tokens"]

    def fills_in(self, **fields):
        return self.ask("/infill", temperature=0, return_tokens=True, **fields)

    def completes(self, ids, **fields):
        return self.ask("/completion", prompt=ids, temperature=0, return_tokens=True, **fields)


class Infill(unittest.TestCase):
    def same_as(self, server, ids, **fields):
        """/infill gives what /completion gives for these tokens."""
        filled, completed = server.fills_in(n_predict=12, **fields), server.completes(ids, n_predict=12)
        self.assertEqual(filled.get("tokens_evaluated"), len(ids), filled)
        self.assertEqual(filled["tokens"], completed["tokens"])
        self.assertEqual(filled["content"], completed["content"])
        self.assertTrue(filled["content"])

    def test_the_prompt_is_as_the_model_was_taught(self):
        before, after = "Once upon a time, there was a", " who liked to play."
        with Server(DEEPSEEK) as server:
            first = 512 - len(DEEPSEEK)
            bos = [1]
            prefix, suffix, middle = first, first + 1, first + 2
            self.same_as(server, bos + [prefix] + server.ids(before) + [suffix] + server.ids(after) + [middle],
                         input_prefix=before, input_suffix=after)
            self.same_as(server, bos + [prefix] + server.ids(before) + [suffix, middle] + server.ids(" big"),
                         input_prefix=before, prompt=" big")
            # A text cannot say the tokens.
            self.same_as(server, bos + [prefix] + server.ids("a " + DEEPSEEK[2]) + [suffix, middle],
                         input_prefix="a " + DEEPSEEK[2])

    def test_a_model_that_knows_projects_gets_one(self):
        with Server(QWEN) as server:
            prefix, suffix, middle, repo, file = range(512 - len(QWEN), 512)
            begin = [1, repo] + server.ids("myproject\n")
            here = [file] + server.ids("filename\n")
            self.same_as(server, begin + here + [prefix] + server.ids("One day") + [suffix, middle],
                         input_prefix="One day")
            extra = [{"filename": "one", "text": "Tom ran."}, {"filename": "two", "text": "Lily sat."}]
            files = [id_ for chunk in extra
                     for id_ in [file] + server.ids(chunk["filename"] + "\n" + chunk["text"] + "\n")]
            self.same_as(server, begin + files + here + [prefix] + server.ids("One day") + [suffix] +
                         server.ids(" the end.") + [middle],
                         input_prefix="One day", input_suffix=" the end.", input_extra=extra)

    def test_lengths_are_limited(self):
        with Server(QWEN) as server:
            answer = server.fills_in(input_prefix="One", n_predict=5)
            self.assertEqual((answer["tokens_predicted"], answer["stop_type"]), (5, "limit"))
            long = server.fills_in(input_prefix="One day " * 2000, n_predict=5)["error"]
            self.assertEqual(long["type"], "exceed_context_size_error")
            self.assertGreater(long["n_prompt_tokens"], long["n_ctx"])
            for fields, param in (({"input_prefix": 1}, "input_prefix"), ({}, "input_prefix"),
                                  ({"input_prefix": "a", "input_extra": [{"text": 1}]}, "input_extra.0.text"),
                                  ({"input_prefix": "a", "prompt": [1]}, "prompt")):
                self.assertEqual(server.fills_in(**fields)["error"]["param"], param)

    def test_a_model_without_the_tokens_says_so(self):
        with Server([]) as server:
            error = server.fills_in(input_prefix="a", input_suffix="b")["error"]
            self.assertEqual((error["type"], error["param"]), ("invalid_request_error", "input_prefix"))
            self.assertIn("no tokens to fill in a text", error["message"])
            self.assertIn("/completion", error["message"])


if __name__ == "__main__":
    if not os.path.exists(MODEL):
        print("missing test data:", MODEL)
        sys.exit(77)
    unittest.main(verbosity=2)
