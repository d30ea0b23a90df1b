#!/usr/bin/env python3
"""Checks what compilers do not: which folder includes which, and the small rules of the house.

  tests/tidy/tidy.py [--root FOLDER] [--update-long-lines]

Prints one line a finding, "file:line: what, and what to do", and exits 1 if there is any. Looks at the files that git tracks, or at all
files where there is no repository. long_lines.txt counts the over-long lines that files had when the limit came; a file may lose some
of them but gain none, and --update-long-lines writes what is left.
"""
import argparse
import os
import re
import subprocess
import sys

from functions import check_functions

MAX_LINES = 600
MAX_COLUMNS = 120
LONG_LINES = 'tests/tidy/long_lines.txt'

# folder: the folders that its files may include, besides itself and those below it that have no line of their own. The longest folder
# that a file lies in counts. architecture: docs/ARCHITECTURE.md.
ALLOWED = {
    'base': [],
    'proto': ['base'],
    'proto/control': [],
    'requests': ['base', 'proto'],
    'kernels': ['base'],
    'linear_attention': ['base', 'kernels', 'proto'],
    'transport': ['base', 'proto'],
    'transport/ucx': ['base', 'proto', 'transport'],
    'examples': ['base', 'kernels', 'proto', 'sequence_parallel', 'transport', 'transport/ucx'],
    'exchange': ['base', 'kernels', 'proto', 'transport'],
    'sequence_parallel': ['base', 'proto', 'transport'],
    'grammar': ['base'],
    'model': ['base', 'grammar', 'kernels'],
    'scheduler/core': ['base', 'proto', 'requests'],
    'scheduler/simulation': ['base', 'proto', 'requests', 'scheduler/core'],
    'attention_worker/core': ['base', 'proto'],
    'compute_worker/core': ['base', 'proto'],
    'control': ['base', 'proto', 'proto/control', 'requests', 'transport', 'transport/ucx'],
    'scheduler': ['base', 'control', 'proto', 'proto/control', 'requests', 'scheduler/core', 'transport'],
    'attention_worker': ['attention_worker/core', 'base', 'control', 'exchange', 'kernels', 'linear_attention', 'proto',
                         'transport'],
    'compute_worker': ['base', 'compute_worker/core', 'control', 'exchange', 'grammar', 'kernels', 'linear_attention',
                       'model', 'proto', 'transport'],
    'engine': ['attention_worker', 'base', 'compute_worker', 'control', 'exchange', 'kernels', 'model', 'plan', 'proto',
               'proto/control', 'requests', 'scheduler', 'scheduler/core', 'transport'],
    'http_client': ['base'],
    'loadgen': ['base', 'http_client', 'model'],
    'plan': ['base', 'proto', 'requests', 'scheduler/core', 'scheduler/simulation'],
    'report': ['base'],
    'tracing': ['base', 'http_client'],
    'server/http': ['base', 'engine', 'requests', 'server', 'server/metrics', 'server/openai', 'server/work'],
    'server/metrics': ['base', 'engine', 'requests', 'scheduler/core'],
    'server/openai': ['base', 'grammar', 'model', 'proto', 'requests'],
    'server/work': ['base', 'engine'],
    'server': ['attention_worker', 'base', 'compute_worker', 'control', 'engine', 'grammar', 'http_client',
               'kernels', 'loadgen', 'model', 'plan', 'proto', 'proto/control', 'report', 'requests', 'scheduler', 'scheduler/core', 'server/http',
               'server/metrics', 'server/openai', 'server/work', 'tracing', 'transport/ucx'],
}

# Headers of the outside world: which folders may include them.
OUTSIDE = [
    ('gRPC', re.compile(r'^(grpc|grpcpp|google/protobuf)/|\.pb\.h$'), re.compile(r'^(control|engine|scheduler|server|tests|bench)/')),
    ('xgrammar', re.compile(r'^(xgrammar|dlpack)/'), re.compile(r'^grammar/')),
    ('UCX', re.compile(r'^(ucp|ucs|uct|ucm)/'), re.compile(r'^((transport/ucx|tests/transport_ucx|bench/transport)/|kernels/cuda/exchange/peer_pointer\.cu$)')),
    ('CUDA', re.compile(r'^(cuda|cublas|cudnn|nccl|nvml)'), re.compile(r'(^|/)cuda/|^tests/emulated_gpu/')),
]
# What a core must not know: threads, clocks, sockets, devices, logs.
NOT_IN_CORE = re.compile(
    r'^(thread|mutex|shared_mutex|condition_variable|future|atomic|barrier|latch|semaphore|stop_token|chrono|ctime|time\.h|random'
    r'|pthread\.h|unistd\.h|fcntl\.h|sys/.*|netinet/.*|boost/.*|asio.*|absl/synchronization/.*|absl/time/clock\.h'
    r'|base/(clock|log)\.h|grpc.*|google/protobuf.*|ucp/.*|ucs/.*|uct/.*|cuda.*)$')

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
SOURCE = re.compile(r'\.(h|cc|cu|cuh)$')
TEXT = re.compile(r'(\.(h|cc|cu|cuh|cmake|txt|py|sh|md|json|proto|yaml|yml)|(^|/)(check|quickstart|run|render|install)|^scripts/\w+)$')
# Data of others' making, and this folder, whose patterns would find themselves.
SKIPPED = re.compile(r'^(tests/data/|tests/fuzz/corpus/|tests/golden/data/|tests/tidy/)')
FOREIGN = re.compile(r'\.(md|json|proto|yaml|yml|svg|html|css|js)$')  # no line or column limits

# A header of the product that declares one of these says which threads may call it (docs/ARCHITECTURE.md).
DECLARES = re.compile(r'^(class|struct) \w[^;]*$|^(?!#|//|using|namespace|static_assert)[A-Za-z].*\w\(')
USING = re.compile(r'^using (?!namespace)[\w:]*::(\w+);')
THREADS = re.compile(r'^\s*//\s*Threads:\s+\S')

UNFINISHED = re.compile(r'\b(TODO|FIXME|XXX|HACK)\b')
MACHINE = re.compile(r'(^|[\s"\'=(:,\[])/(work|root|home|mnt|Users|tmp/build[\w-]*)/\w')
REGISTRY = re.compile(r'--(extra-)?index-url|PIP_(EXTRA_)?INDEX_URL'
                      r'|https?://[^/\s]*(artifactory|nexus|registry|mirror|\.internal|\.corp\b|pypi\.org|pythonhosted\.org|npmjs\.org)')


def tracked_files(root):
    listed = subprocess.run(['git', '-C', root, 'ls-files', '-z'], capture_output=True, check=False)
    inside = subprocess.run(['git', '-C', root, 'rev-parse', '--show-toplevel'], capture_output=True, text=True, check=False)
    if listed.returncode == 0 and os.path.realpath(inside.stdout.strip()) == os.path.realpath(root):
        names = [os.fsdecode(name) for name in listed.stdout.split(b'\0') if name]
    else:
        names = []
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f != '.git' and not f.startswith('build')]
            names += [os.path.relpath(os.path.join(folder, f), root) for f in files]
    return sorted(name for name in names if os.path.isfile(os.path.join(root, name)))


def rule_folder(path):
    """The longest folder of ALLOWED that `path` lies in, or None."""
    parts = os.path.dirname(path).split('/')
    for length in range(len(parts), 0, -1):
        folder = '/'.join(parts[:length])
        if folder in ALLOWED:
            return folder
    return None


def cycle(allowed):
    """Top-level folders that depend on each other in a circle, or []."""
    edges = {}
    for folder, targets in allowed.items():
        top = folder.split('/')[0]
        edges.setdefault(top, set()).update(target.split('/')[0] for target in targets if target.split('/')[0] != top)

    def search(path):
        for target in sorted(edges.get(path[-1], ())):
            if target in path:
                return path[path.index(target):] + [target]
            found = search(path + [target])
            if found:
                return found
        return []

    for folder in edges:
        found = search([folder])
        if found:
            return found
    return []


def in_core(path):
    return '/core/' in path and path.split('/')[0] in ('scheduler', 'attention_worker', 'compute_worker')


def check_include(path, header, quoted):
    """Yields what is wrong with one include."""
    for name, pattern, where in OUTSIDE:
        if pattern.search(header) and not where.search(path):
            yield f'includes {header}: {name} headers stay out of here'
    if in_core(path) and NOT_IN_CORE.search(header):
        yield f'includes {header}: a core knows no thread, clock, socket, device or log; pass it events and times'
    folder, target = rule_folder(path), rule_folder(header)
    if not quoted or folder is None or folder == target:
        return
    if target is None:
        if header.split('/')[0] in ('tests', 'bench', 'deploy') and header.split('/')[0] not in ALLOWED[folder]:
            yield f'includes {header}: product code does not depend on {header.split("/")[0]}/'
        return
    if target not in ALLOWED[folder]:
        yield f'includes {header}: {folder}/ may not depend on {target}/ (docs/ARCHITECTURE.md lists the edges)'


def check_source(path, lines):
    for number, line in enumerate(lines, 1):
        found = INCLUDE.match(line)
        if found:
            for problem in check_include(path, found[2], found[1] == '"'):
                yield number, problem
    if path.endswith('.h'):
        directives = [line.strip() for line in lines if line.lstrip().startswith('#')]
        if not directives or directives[0] != '#pragma once':
            yield 1, 'a header begins with #pragma once'
        declared = next((number for number, line in enumerate(lines, 1) if DECLARES.search(line)), None)
        product = path.split('/')[0] not in ('tests', 'bench', 'cmake')
        if product and declared and not any(THREADS.match(line) for line in lines):
            yield declared, 'no line "// Threads:" says which threads may call this (docs/ARCHITECTURE.md has the words)'


def check_usings(lines):
    """Yields using-declarations of a source whose name it does not use."""
    code = [line.split('//')[0] for line in lines]
    names = re.findall(r'\w+', '\n'.join(code))
    for number, line in enumerate(code, 1):
        found = USING.match(line)
        if found and names.count(found[1]) == 1:
            yield number, f'nothing here uses {found[1]}'


def check_text(path, lines, long_allowed):
    if not FOREIGN.search(path):
        if len(lines) > MAX_LINES:
            yield MAX_LINES + 1, f'{len(lines)} lines; at most {MAX_LINES}: look for the idea that is missing'
        long = [n for n, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
        if len(long) > long_allowed:
            yield long[-1], f'{len(long)} lines of more than {MAX_COLUMNS} columns; {long_allowed} are allowed here ({LONG_LINES})'
    for number, line in enumerate(lines, 1):
        if UNFINISHED.search(line):
            yield number, 'unfinished work is not committed: do it or describe it in an issue'
        if MACHINE.search(line):
            yield number, 'names a path of one machine'
        if REGISTRY.search(line):
            yield number, "names a package registry: that is the installing machine's choice"


def read_lines(root, path):
    with open(os.path.join(root, path), encoding='utf-8', errors='replace') as file:
        return file.read().split('\n')[:-1] if os.path.getsize(os.path.join(root, path)) else []


def read_long_lines(root):
    allowed = {}
    if os.path.exists(os.path.join(root, LONG_LINES)):
        for line in read_lines(root, LONG_LINES):
            count, path = line.split(' ', 1)
            allowed[path] = int(count)
    return allowed


def write_long_lines(root):
    before = read_long_lines(root)
    with open(os.path.join(root, LONG_LINES), 'w', encoding='utf-8') as out:
        for path in tracked_files(root):
            if not TEXT.search(path) or SKIPPED.search(path) or FOREIGN.search(path):
                continue
            count = sum(len(line) > MAX_COLUMNS for line in read_lines(root, path))
            if before:
                count = min(count, before.get(path, 0))
            if count:
                out.write(f'{count} {path}\n')


def findings(root):
    circle = cycle(ALLOWED)
    if circle:
        yield f'tests/tidy/tidy.py:1: the folders depend on each other in a circle: {" -> ".join(circle)}'
    allowed = read_long_lines(root)
    for path in tracked_files(root):
        if not TEXT.search(path) or SKIPPED.search(path):
            continue
        lines = read_lines(root, path)
        problems = list(check_text(path, lines, allowed.get(path, 0)))
        if SOURCE.search(path):
            problems += check_source(path, lines)
            if not path.endswith(('.h', '.cuh')):
                problems += check_usings(lines)
            if path.split('/')[0] not in ('tests', 'bench'):
                problems += check_functions(path, lines)
        for number, problem in problems:
            yield f'{path}:{number}: {problem}'


def main():
    parser = argparse.ArgumentParser(description='Checks include edges and the small rules of the house.')
    parser.add_argument('--root', default=os.path.join(os.path.dirname(__file__), '..', '..'))
    parser.add_argument('--update-long-lines', action='store_true', help=f'write {LONG_LINES}')
    arguments = parser.parse_args()
    if arguments.update_long_lines:
        write_long_lines(arguments.root)
    found = list(findings(arguments.root))
    for line in found:
        print(line)
    if found:
        print(f'{len(found)} findings')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
