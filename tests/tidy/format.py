#!/usr/bin/env python3
"""Checks that C++ and CUDA sources are formatted as .clang-format says: tests/tidy/format.py [--root FOLDER] [--fix]

Needs clang-format 14, as Debian 12 has it: other versions format some lines differently.
"""
import argparse
import shutil
import subprocess
import sys

PATTERNS = ('*.cc', '*.h', '*.cu', '*.cuh')


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--root', default='.')
    parser.add_argument('--fix', action='store_true', help='format the files in place')
    arguments = parser.parse_args()
    program = shutil.which('clang-format-14')
    if program is None:
        print('clang-format-14 is not installed; scripts/install_dependencies installs it')
        return 1
    tracked = subprocess.run(['git', '-C', arguments.root, 'ls-files', *PATTERNS], capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        print('no git repository: nothing to compare')
        return 0
    command = [program, '-i'] if arguments.fix else [program, '--dry-run', '-Werror']
    formatted = subprocess.run([*command, *tracked.stdout.split()], cwd=arguments.root, stderr=subprocess.PIPE, text=True, check=False)
    if formatted.returncode != 0:
        print('\n'.join(line for line in formatted.stderr.splitlines() if 'error:' in line))
        print('tests/tidy/format.py --fix formats them')
    return formatted.returncode


if __name__ == '__main__':
    sys.exit(main())
