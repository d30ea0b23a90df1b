#!/usr/bin/env python3
"""A conversation of `dovetail run` in a terminal: a pseudo-terminal with a keyboard of its own.

Arguments: the dovetail binary, a model.
"""
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
import unittest

BINARY, MODEL = sys.argv[1], sys.argv[2]
del sys.argv[1:3]
LIMIT = 120
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Terminal:
    """`dovetail run MODEL FLAGS` in a terminal."""

    def __init__(self, *flags, **environment):
        self.screen, self.seen = "", 0
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", **environment})
            os.execv(BINARY, [BINARY, "run", MODEL, "--temperature", "0", *flags])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)
        try:
            os.kill(self.pid, 9)
        except ProcessLookupError:
            pass
        if self.pid:
            try:
                os.waitpid(self.pid, 0)
            except ChildProcessError:
                pass

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, pattern):
        """The match of what came since the last one."""
        end = time.monotonic() + LIMIT
        while True:
            if found := re.search(pattern, self.screen[self.seen:]):
                self.seen += found.end()
                return found
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            try:
                data = os.read(self.fd, 65536) if ready else b""
            except OSError:
                data = b""
            if not data:
                raise AssertionError(f"{pattern} did not come: {self.screen[self.seen:]!r} after {self.screen!r}")
            self.raw = getattr(self, "raw", b"") + data
            self.screen = ESCAPES.sub("", self.raw.decode(errors="replace"))

    def wait_until_a_line_is_edited(self):
        end = time.monotonic() + LIMIT
        while termios.tcgetattr(self.fd)[3] & termios.ICANON:
            if time.monotonic() > end:
                raise AssertionError(f"no line is edited: {self.screen!r}")
            time.sleep(0.01)

    def leave(self):
        """Its exit status after Ctrl-D. One that comes just when the terminal changes its mode may be lost."""
        for _ in range(LIMIT):
            self.type("\x04")
            end = time.monotonic() + 1
            while time.monotonic() < end:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid != 0:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.01)
        raise AssertionError(f"it did not end: {self.screen!r}")

    def ended(self):
        """Its exit status."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class Repl(unittest.TestCase):
    def test_messages_are_answered_until_the_end_and_lines_are_edited(self):
        with Terminal("--max-tokens", "12") as terminal:
            terminal.wait_for(">>> ")
            terminal.type("The fx\x02o\x05 sat\n")  # Ctrl-B: back; Ctrl-E: to the end of the line
            terminal.wait_for(r"\[\d+ tokens(, [\d.]+ tok/s)?, the first after [\d.]+ s")
            terminal.wait_for(">>> ")
            terminal.type("\x10")  # the line before, from the history
            terminal.wait_for("The fox sat")
            terminal.type("\n")
            terminal.wait_for(r"\[\d+ tokens")
            terminal.wait_for(">>> ")
            terminal.type("/nothing\n")
            terminal.wait_for("there is no command /nothing; /help lists them")
            terminal.wait_for(">>> ")
            terminal.type("/help\n")
            terminal.wait_for("/system TEXT")
            terminal.wait_for(">>> ")
            terminal.type("/system be brief\n")
            terminal.wait_for(">>> ")
            terminal.type("/clear\n")
            terminal.wait_for(">>> ")
            self.assertEqual(terminal.leave(), 0)

    def test_ctrl_d_ends_it_after_one_that_was_lost_and_during_an_answer(self):
        with Terminal("--max-tokens", "4") as terminal:
            terminal.wait_for(">>> ")
            terminal.wait_until_a_line_is_edited()
            terminal.type("\x00")  # what Linux makes of a Ctrl-D that comes before that
            self.assertEqual(terminal.leave(), 0)
        with Terminal("--max-tokens", "400") as terminal:
            terminal.wait_for(">>> ")
            terminal.type("Tell it all\n")
            terminal.wait_for(r"\n(?!Tell)[^>\n]{10}")
            self.assertEqual(terminal.leave(), 0)

    def test_a_message_of_several_lines(self):
        with Terminal("--max-tokens", "4") as terminal:
            terminal.wait_for(">>> ")
            for begin, end in (('"""one', 'two"""'), ("one \\", "two")):
                terminal.type(begin + "\n")
                terminal.wait_for(r"\.\.\. ")
                terminal.type(end + "\n")
                terminal.wait_for(r"\[\d+ tokens")
                terminal.wait_for(">>> ")
            terminal.type("/exit\n")
            self.assertEqual(terminal.ended(), 0)

    def stop_an_answer(self):
        """Whether Ctrl-C came before the answer's end, and then left a prompt."""
        with Terminal("--max-tokens", "4000") as terminal:
            terminal.wait_for(">>> ")
            terminal.type("Tell it all\n")
            terminal.wait_for(r"\n(?!Tell)[^>\n]{10}")  # of the answer; the line may be echoed twice
            terminal.type("\x03")
            if "stopped" not in terminal.wait_for(r"\[\d+ tokens[^\]]*\]")[0]:
                return False
            terminal.wait_for(">>> ")
            terminal.type("/exit\n")
            self.assertEqual(terminal.ended(), 0)
        return True

    def test_ctrl_c_stops_the_answer_and_not_the_program(self):
        # The answer takes a third of a second, and this process may get no time meanwhile.
        self.assertTrue(any(self.stop_an_answer() for _ in range(100)), "100 answers came to their end")

    def test_ctrl_c_ends_a_line(self):
        with Terminal() as terminal:
            terminal.wait_for(">>> ")
            for _ in range(20):
                terminal.type("half a line\x03")
                terminal.wait_for(">>> ")
            terminal.type("/exit\n")
            self.assertEqual(terminal.ended(), 0)

    def test_no_colour_where_it_is_not_wanted(self):
        for environment, colours in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
            with Terminal("--max-tokens", "2", **environment) as terminal:
                terminal.wait_for("/help lists the commands")
                self.assertEqual(b"\x1b[2m" in terminal.raw, colours, environment)


class Input(unittest.TestCase):
    def ask(self, text, *arguments):
        return subprocess.run([BINARY, "run", MODEL, *arguments, "--max-tokens", "8"], input=text, capture_output=True,
                              text=True, timeout=LIMIT, check=False)

    def test_standard_input_is_the_prompt_where_there_is_no_terminal(self):
        piped, given = self.ask("The fox\n"), self.ask("", "The fox")
        self.assertEqual((piped.returncode, piped.stderr), (0, ""))
        self.assertEqual(piped.stdout, given.stdout)
        self.assertTrue(given.stdout.strip())

    def test_nothing_at_all_is_an_error_that_says_what_to_do(self):
        done = self.ask(" \n")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("dovetail: run: there is no prompt, and nothing on standard input", done.stderr)


if __name__ == "__main__":
    unittest.main()
