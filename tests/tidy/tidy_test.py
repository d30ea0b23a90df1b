#!/usr/bin/env python3
"""Shows that tidy.py finds each thing it looks for: a small tree without a fault, then one fault at a time."""
import os
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import functions
import tidy

HEADER = '#pragma once\n#include <vector>\n'


class TidyTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = self.folder.name
        self.write('base/status.h', HEADER)
        self.write('proto/frame.h', HEADER + '#include "base/status.h"\n')
        self.write('kernels/gemm.h', HEADER + '#include "base/status.h"\n')
        self.write('scheduler/core/scheduler.h', HEADER + '#include "proto/frame.h"\n')
        self.write('attention_worker/core/block_pool.h', HEADER)
        self.write('attention_worker/node.h', HEADER + '#include "attention_worker/core/block_pool.h"\n#include "kernels/gemm.h"\n')
        self.write('compute_worker/node.h', HEADER + '#include <thread>\n#include "kernels/gemm.h"\n')
        self.write('tests/kernels/gemm_test.cc', '#include "kernels/gemm.h"\n#include "compute_worker/node.h"\n')

    def tearDown(self):
        self.folder.cleanup()

    def write(self, path, text):
        full = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, 'w', encoding='utf-8') as file:
            file.write(text)

    def found(self):
        return list(tidy.findings(self.root))

    def assert_found(self, path, text, what):
        """Writing `text` to `path` gives exactly one finding: there, and about `what`."""
        self.write(path, text)
        found = self.found()
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(path + ':'), found[0])
        self.assertIn(what, found[0])

    def test_a_clean_tree_has_no_findings(self):
        self.assertEqual(self.found(), [])

    def test_folders_do_not_depend_on_each_other_in_a_circle(self):
        self.assertEqual(tidy.cycle(tidy.ALLOWED), [])
        self.assertEqual(tidy.cycle({'a': ['b'], 'b': ['c/core'], 'c': [], 'c/core': ['a']}), ['a', 'b', 'c', 'a'])

    def test_headers_say_which_threads_may_call(self):
        self.assert_found('base/clock.h', HEADER + 'class Clock {\n};\n', 'Threads')
        self.write('base/clock.h', HEADER)
        self.assert_found('base/trace.h', HEADER + 'int Spans(const char* name);\n', 'Threads')
        self.write('base/trace.h', HEADER + '// Spans of a trace.\n// Threads: pure.\nint Spans(const char* name);\n')
        self.write('base/limits.h', HEADER + 'inline constexpr int kMost = 8;\n')
        self.write('tests/support/clock.h', HEADER + 'class FakeClock {\n};\n')
        self.assertEqual(self.found(), [])

    def test_broken_edges(self):
        for path, header in [('base/log.cc', 'proto/frame.h'), ('proto/placement.cc', 'kernels/gemm.h'),
                             ('kernels/cpu/gemm.cc', 'proto/frame.h'), ('transport/inproc/fabric.cc', 'kernels/gemm.h'),
                             ('model/formats/gguf.cc', 'proto/frame.h'), ('attention_worker/node.cc', 'compute_worker/node.h'),
                             ('compute_worker/node.cc', 'attention_worker/node.h'), ('attention_worker/node.cc', 'model/config.h'),
                             ('attention_worker/core/table.cc', 'kernels/gemm.h'), ('scheduler/core/planning.cc', 'transport/fabric.h'),
                             ('server/openai/json.cc', 'compute_worker/node.h'), ('kernels/gemm.cc', 'tests/kernels/oracle.h')]:
            with self.subTest(path=path, header=header):
                self.assert_found(path, f'#include "{header}"\n', header)
                os.remove(os.path.join(self.root, path))

    def test_the_outside_world_stays_out_of_cores(self):
        for header in ['thread', 'mutex', 'condition_variable', 'atomic', 'chrono', 'sys/socket.h', 'boost/asio.hpp',
                       'absl/synchronization/mutex.h', 'absl/time/clock.h', 'random']:
            for path in ['scheduler/core/x.cc', 'attention_worker/core/x.cc', 'compute_worker/core/x.cc']:
                with self.subTest(path=path, header=header):
                    self.assert_found(path, f'#include <{header}>\n', 'a core knows no thread')
                    os.remove(os.path.join(self.root, path))
        self.assert_found('scheduler/core/x.cc', '#include "base/clock.h"\n', 'base/clock.h')

    def test_libraries_stay_in_their_folders(self):
        self.assert_found('transport/fabric.cc', '#include <ucp/api/ucp.h>\n', 'UCX')
        self.write('transport/fabric.cc', '')
        self.write('transport/ucx/port.cc', '#include <ucp/api/ucp.h>\n')
        self.assertEqual(self.found(), [])
        self.assert_found('kernels/device.cc', '#include <cuda_runtime.h>\n', 'CUDA')
        self.write('kernels/device.cc', '')
        self.write('kernels/cuda/device.cc', '#include <cuda_runtime.h>\n')
        self.assertEqual(self.found(), [])
        self.assert_found('compute_worker/node.cc', '#include <grpcpp/grpcpp.h>\n', 'gRPC')

    def test_headers_begin_with_pragma_once(self):
        self.assert_found('base/ids.h', '#include <vector>\n#pragma once\n', '#pragma once')

    def test_usings_that_nothing_uses(self):
        self.assert_found('kernels/a.cc', 'using base::Status;\nusing base::Clock;  // Clock\nStatus Run();\n', 'Clock')
        self.write('kernels/a.cc', 'using base::Status;\nusing namespace base;\nStatus Run();\n')
        self.write('kernels/a.h', HEADER + 'using base::Status;\n')
        self.assertEqual(self.found(), [])

    def test_files_and_lines_are_not_too_long(self):
        self.assert_found('base/long.cc', 'int x;\n' * 601, '601 lines')
        self.write('base/long.cc', 'int x;\n' * 600)
        self.assertEqual(self.found(), [])
        self.assert_found('base/long.cc', '//' + 'x' * 119 + '\n', 'more than 120 columns')
        self.write('base/long.cc', '//' + 'x' * 118 + '\n')
        self.assertEqual(self.found(), [])

    def test_long_lines_that_were_there_may_go_but_not_come(self):
        line = '//' + 'x' * 119 + '\n'
        self.write('tests/tidy/long_lines.txt', '2 base/old.cc\n')
        self.write('base/old.cc', line * 2)
        self.assertEqual(self.found(), [])
        self.assert_found('base/old.cc', line * 3, '3 lines of more than 120 columns; 2 are allowed')
        self.write('base/old.cc', line)
        tidy.write_long_lines(self.root)
        self.assertEqual(self.found(), [])
        self.write('base/new.cc', line)
        tidy.write_long_lines(self.root)
        self.assertEqual(len(self.found()), 1, 'an update takes up no new ones')
        self.write('base/new.cc', '')
        self.assert_found('base/old.cc', line * 2, '2 lines of more than 120 columns; 1 are allowed')

    def test_unfinished_work(self):
        for word in ['TO' + 'DO', 'FIX' + 'ME', 'XX' + 'X']:
            self.assert_found('base/status.cc', f'// {word}: later\n', 'unfinished')

    def test_machine_paths_and_registries(self):
        self.assert_found('base/status.cc', 'const char* p = "/' + 'work/shared/x";\n', 'path of one machine')
        self.assert_found('base/status.cc', 'const char* p = "/' + 'home/someone/x";\n', 'path of one machine')
        self.write('base/status.cc', '// GET /v1/models\n')
        self.assertEqual(self.found(), [])
        self.assert_found('scripts/get.sh', 'pip install --index' + '-url https://x/simple y\n', 'registry')
        self.write('scripts/get.sh', '')
        self.assert_found('scripts/get', 'curl https://files.python' + 'hosted.org/packages/x.tar.gz\n', 'registry')

    def test_long_functions(self):
        body = '  Call("}", \'{\');  // }\n  const auto f = [&] { return 1; };\n' * 28
        self.write('base/f.cc', 'namespace {\ntemplate <typename T>\nint A::F(int a) {\n' + body + '}\n}\n')
        self.assertEqual(self.found(), [])
        self.assert_found('base/f.cc', 'int A::F(int a,\n         int b) {\n' + body + '  G();\n' * 3 + '}\n', 'A::F has 62 lines; at most 60')
        self.write('base/f.cc', 'struct S {\n' + '  int a;\n' * 99 + '};\nconst int kTable[] = {\n' + '  1,\n' * 99 + '};\n')
        self.assertEqual(self.found(), [])
        self.write('tests/base/f_test.cc', 'int F() {\n' + body * 2 + '}\n')
        self.assertEqual(self.found(), [])

    def test_long_functions_of_the_list_only_shrink(self):
        long = ['int F() {'] + ['  G();'] * 60 + ['}']
        self.assertEqual(list(functions.check_functions('a.cc', long, {('a.cc', 'F'): 62})), [])
        self.assertEqual(len(list(functions.check_functions('a.cc', long, {('a.cc', 'F'): 61}))), 1)
        [[_, said]] = functions.check_functions('a.cc', long[:20] + ['}'], {('a.cc', 'F'): 62})
        self.assertIn('take it out', said)

    def test_only_tracked_files_count_in_a_repository(self):
        subprocess.run(['git', 'init', '-q', self.root], check=True)
        self.write('base/scratch.cc', '#include "proto/frame.h"\n')
        self.assertEqual(self.found(), [])
        subprocess.run(['git', '-C', self.root, 'add', 'base'], check=True)
        self.assertEqual(len(self.found()), 1)


if __name__ == '__main__':
    unittest.main()
