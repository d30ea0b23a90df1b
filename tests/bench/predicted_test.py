#!/usr/bin/env python3
"""bench/plan/predicted on machines whose every time is known: what it measures, what it holds out, and which errors it
reports. No binary runs.
"""
import contextlib
import importlib.machinery
import importlib.util
import io
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

PROJECT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader("predicted", str(PROJECT / "bench" / "plan" / "predicted"))
predicted = importlib.util.module_from_spec(importlib.util.spec_from_loader("predicted", LOADER))
LOADER.exec_module(predicted)

START_S, STEP_MS, PROMPT_MS = 3.0, 4.0, 50.0  # of a fake engine: loading, a step, a prompt


def flag(flags, name):
    return flags[flags.index(name) + 1]


def fake_cpu_seconds(_binary, _model, *flags):
    """Of `dovetail bench`: it loads, then takes all prompts, or all steps of answers that are MARGIN longer."""
    if flag(flags, "--batch") == 0:
        return START_S + flag(flags, "--repeat") * PROMPT_MS / 1e3
    tokens = flag(flags, "--batch-output-tokens")
    return START_S + flag(flags, "--repeat") * predicted.MARGIN * tokens * STEP_MS / 1e3


def fake_plan(_binary, _profile, _model, layout, lengths, count, rate="inf"):
    """Steps that take 2 ms and 20 ms for the prompts; of a load: 80 ms, 10 a token, and so for each layout."""
    answer = int(lengths.split("/")[1])
    steps = 1 + answer
    return {"layout": layout, "rate": rate, "count": count,
            "steps": {"count": steps, "mean_ms": (20 + 2 * answer) / steps},
            "ttft_ms": {"mean": 80}, "tpot_ms": {"mean": 10}, "e2el_ms": {"mean": 310}}


class Predicted(unittest.TestCase):
    def setUp(self):
        for name, fake in (("cpu_seconds", fake_cpu_seconds), ("plan", fake_plan)):
            patch = mock.patch.object(predicted, name, fake)
            patch.start()
            self.addCleanup(patch.stop)

    def test_a_step_is_what_longer_answers_take_more(self):
        for estimate in (0.01, 1.0, 4.0, 100.0):  # decides for how long it measures, not what comes out
            measured, more = predicted.measured_decode("b", "m", 8, 32, estimate)
            self.assertAlmostEqual(measured, STEP_MS, 9)
            self.assertTrue(predicted.LEAST_MORE <= more <= predicted.MOST_MORE)

    def test_a_prompt_is_what_more_of_them_take_more(self):
        for estimate in (0.1, 50.0, 1e6):
            self.assertAlmostEqual(predicted.measured_prefill("b", "m", 64, estimate), PROMPT_MS, 9)

    def test_a_predicted_step_has_no_prompt_in_it(self):
        self.assertAlmostEqual(predicted.predicted_step("b", "p", "m", 4, 32, 100), 2.0, 9)
        self.assertAlmostEqual(predicted.predicted_step("b", "p", "m", 1, 64, 0), 22.0, 9)

    def test_points_with_odd_numbers_are_held_out_of_the_factor(self):
        # Measured twice the prediction where the factor comes from, and 1.5 times where it is tried.
        points = [("decode", 1, 32, (3.0 if i % 2 else 4.0) * i1, 2.0 * i1) for i, i1 in enumerate(range(1, 7))]
        with mock.patch.object(predicted, "step_points", lambda *_: iter(points)):
            result = predicted.compare_steps("b", "p", "m")
        self.assertEqual([row["held_out"] for row in result["rows"]], [False, True] * 3)
        self.assertAlmostEqual(result["factor"], 2.0, 9)
        self.assertAlmostEqual(result["error_of_all"], (3 * 0.5 + 3 * (1 / 3)) / 6, 9)
        self.assertAlmostEqual(result["error_of_held_out_with_factor"], 1 / 3, 9)

    def test_every_batch_and_every_prompt_is_a_point(self):
        points = list(predicted.step_points("b", "p", "m"))
        self.assertEqual(len(points), len(predicted.PROMPTS) * len(predicted.BATCHES) + len(predicted.PREFILLS))
        for what, sequences, _, measured, foretold in points:
            self.assertAlmostEqual(measured, STEP_MS if what == "decode" else PROMPT_MS, 9)
            self.assertAlmostEqual(foretold, 2.0 if what == "decode" else 22.0, 9)
            self.assertIn(sequences, predicted.BATCHES)

    def test_loads_are_compared_whole_and_split_without_a_factor(self):
        asked = []

        def measured(_binary, _model, split, load, requests, _folder):
            asked.append((split, load, requests))
            return {"ttft": 100.0, "tpot": 10.0, "e2el": 620.0 if split else 310.0}
        with mock.patch.object(predicted, "measured_load", measured):
            result = predicted.compare_loads("b", "p", "m", 16, "f")
        self.assertEqual(asked, [(split, load, 16) for split in (False, True) for load in predicted.LOADS])
        self.assertEqual([row["processes"] for row in result["rows"]], [1, 1, 3, 3])
        self.assertAlmostEqual(result["errors"]["ttft"], 0.2, 9)
        self.assertAlmostEqual(result["errors"]["tpot"], 0, 9)
        self.assertAlmostEqual(result["errors"]["e2el"], 0.25, 9)

    def test_what_is_printed_says_which_points_were_held_out(self):
        with mock.patch.object(predicted, "measured_load", lambda *_: {"ttft": 100.0, "tpot": 10.0, "e2el": 310.0}):
            result = {"steps": predicted.compare_steps("b", "p", "m"),
                      "loads": predicted.compare_loads("b", "p", "m", 16, "f")}
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            predicted.show("m.gguf", result)
        self.assertIn("| decode | 1 | 32 | 4.00 | 2.00 | 0.50 | factor |", text.getvalue())
        self.assertIn("| decode | 2 | 32 | 4.00 | 2.00 | 0.50 | held out |", text.getvalue())
        self.assertIn("Loads: mean errors ttft 20 %, tpot 0 %, e2el 0 %.", text.getvalue())


class Runs(unittest.TestCase):
    def test_a_program_that_fails_ends_the_script_with_its_words(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "dovetail"
            program.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n", encoding="ascii")
            program.chmod(0o755)
            with self.assertRaises(SystemExit) as ended:
                predicted.run(program, "plan", "m")
        self.assertIn("plan m: no such model", str(ended.exception))


if __name__ == "__main__":
    unittest.main()
