#!/usr/bin/env python3
"""./quickstart builds what the machine can use and shows that it does: quickstart_test.py PROJECT

The script is copied into a folder of its own, with a cmake and an nvidia-smi that only say what they are asked, and
with a server that gives one answer.
"""
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

PROJECT = sys.argv.pop(1)

CMAKE = """#!/bin/bash
echo "$*" >> cmake.log
[[ "$*" == *"--target help"* ]] && { cat targets; exit; }
[[ "$*" == *"--target dovetail"* ]] && for n in $(seq 40); do echo "[$n/40] Building CXX object $n.o"; done
exit 0
"""
SERVER = """#!/usr/bin/env python3
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.answer(b"")
    def do_POST(self):
        self.answer(b'data: {"choices": [{"delta": {"content": "Paris."}}]}\\n\\ndata: [DONE]\\n\\n')
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


class Quickstart(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = self.folder.name
        shutil.copy(os.path.join(PROJECT, 'quickstart'), self.root)
        self.program('scripts/install_dependencies', '#!/bin/sh\n')
        self.program('scripts/fetch_model', '#!/bin/sh\necho model.gguf\n')
        self.program('build/dovetail', SERVER)
        self.program('bin/cmake', CMAKE)

    def tearDown(self):
        self.folder.cleanup()

    def program(self, path, text):
        full = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, 'w', encoding='utf-8') as file:
            file.write(text)
        os.chmod(full, 0o755)

    def run_it(self, gpu, nvcc):
        """The script's output, and what it asked cmake to build."""
        self.program('bin/nvidia-smi', '#!/bin/sh\necho "GPU 0: a GPU"\n' if gpu else '#!/bin/sh\nexit 9\n')
        with open(os.path.join(self.root, 'targets'), 'w', encoding='utf-8') as file:
            file.write('dovetail: phony\n' * 2000 + ('dovetail_cuda: phony\n' if nvcc else '') + 'all: phony\n' * 2000)
        environment = dict(os.environ, PATH=os.path.join(self.root, 'bin') + ':' + os.environ['PATH'],
                           PORT=str(free_port()))
        ran = subprocess.run([os.path.join(self.root, 'quickstart'), '--once'], env=environment, capture_output=True,
                             text=True, timeout=60, check=False)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertIn('Paris.', ran.stdout)
        with open(os.path.join(self.root, 'cmake.log'), encoding='utf-8') as file:
            return ran.stdout, [line.split('--target ')[1].split() for line in file if '--target dovetail' in line]

    def test_it_shows_that_it_builds(self):
        output, _ = self.run_it(gpu=False, nvcc=False)
        steps = [line for line in output.split('\n') if line.startswith('[')]
        self.assertGreaterEqual(len(steps), 10)
        self.assertLessEqual(len(steps), 12)
        self.assertEqual(steps[-1], '[40/40] Building CXX object 40.o')

    def test_a_gpu_and_nvcc_have_the_cuda_library_built(self):
        self.assertEqual(self.run_it(gpu=True, nvcc=True)[1], [['dovetail', 'dovetail_cuda']])

    def test_without_a_gpu_the_cuda_library_is_left_out(self):
        self.assertEqual(self.run_it(gpu=False, nvcc=True)[1], [['dovetail']])

    def test_a_gpu_without_nvcc_is_said(self):
        output, built = self.run_it(gpu=True, nvcc=False)
        self.assertEqual(built, [['dovetail']])
        self.assertIn('no nvcc was found', output)


if __name__ == '__main__':
    unittest.main()
