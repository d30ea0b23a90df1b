#!/usr/bin/env python3
"""docs/reference.md has every flag and every metric: it is what the binary says, and nothing that the sources name is
missing.

Arguments: the dovetail binary.
"""
import glob
import os
import re
import subprocess
import sys
import unittest

BINARY = os.path.abspath(sys.argv.pop(1))
PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def sources(folder):
    return "\n".join(read(path) for path in sorted(glob.glob(os.path.join(PROJECT, folder, "*.cc"))))


class Reference(unittest.TestCase):
    def setUp(self):
        self.text = read(os.path.join(PROJECT, "docs", "reference.md"))

    def test_it_is_what_the_binary_says(self):
        done = subprocess.run([os.path.join(PROJECT, "scripts", "render_reference"), BINARY, "--check"],
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_it_has_every_flag_that_the_sources_add(self):
        added = set(re.findall(r"add_(?:option|flag)\(\s*\"(--[\w-]+)", sources("server/cli")))
        self.assertGreater(len(added), 60)
        self.assertEqual({flag for flag in added if not re.search(rf"`[^`]*{flag}[ ,`]", self.text)}, set())

    def test_it_has_every_metric_that_the_sources_make(self):
        text = sources("server/metrics")
        made = set(re.findall(r"make_\s*\.?\s*\.(?:Counter|Gauge|Histogram)\(\s*\"(\w+)\"", text))
        made |= set(re.findall(r"MakeFamily\(registry, \"(\w+)\"", text)) | set(re.findall(r"\"dovetail:(\w+)\"", text))
        self.assertGreater(len(made), 60)
        self.assertEqual({name for name in made if f"`dovetail:{name}`" not in self.text}, set())

    def test_operations_names_no_flag_that_there_is_not(self):
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", read(os.path.join(PROJECT, "docs", "operations.md"))))
        others = {"--help", "--set", "--preset", "--version", "--from-file", "--from-literal", "--reuse-values"}
        self.assertEqual({flag for flag in named - others if f"{flag}" not in self.text}, set())


if __name__ == "__main__":
    unittest.main()
