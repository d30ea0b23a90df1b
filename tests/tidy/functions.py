"""Finds functions in C++ and CUDA sources by their braces, without a compiler."""
import re

MAX_FUNCTION_LINES = 60
# Longer ones, as file and name: they may lose lines but gain none, and a line of this list that is not needed goes.
LONG_FUNCTIONS = {}

# Comments, texts, characters and preprocessor lines: their braces do not count.
NO_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
    r'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
# What has parentheses before a function's name, and is no part of it.
ATTRIBUTES = re.compile(r'\b(?:__launch_bounds__|__attribute__|alignas|requires|decltype|ABSL_\w+)'
                        r'\s*\([^()]*(?:\([^()]*\)[^()]*)*\)')
TEMPLATE = re.compile(r'template\s*<[^{}]*?>\s*(?=\w|~|\[)')
NO_FUNCTION = re.compile(r'^\s*(?:namespace\b|enum\b|extern\s*$|(?:class|struct|union)\b[^()]*(?::[^()]*)?$)')
NAME = re.compile(r'([~\w:]+|operator\s*\S+?)\s*\(')


def name_of(head):
    """The name of the function that `head`, the text before an open brace, declares, or None."""
    head = TEMPLATE.sub(' ', ATTRIBUTES.sub(' ', head))
    if NO_FUNCTION.search(head) or '(' not in head:
        return None
    before = head[:head.index('(')]
    if '=' in before and 'operator' not in before:
        return None  # a variable: its lambda or its fields
    found = NAME.search(head)
    return found[1] if found else None


def functions(text):
    """(first line, name, lines) of every function, from its head to its closing brace. Lambdas and local classes are part
    of the function that they lie in."""
    code = NO_CODE.sub(lambda found: re.sub(r'[^\n]', ' ', found[0]), text)
    found, open_braces, begin, line, parentheses, inside = [], [], 0, 1, 0, 0
    for at, char in enumerate(code):
        if char == '\n':
            line += 1
        elif char == '(':
            parentheses += 1
        elif char == ')':
            parentheses -= 1
        elif char == '{':
            head = code[begin:at]
            name = name_of(head) if not inside and parentheses == 0 else None
            open_braces.append((name, line - head.lstrip().count('\n'), parentheses))
            inside += name is not None
            parentheses, begin = 0, at + 1
        elif char == '}' and open_braces:
            name, first, parentheses = open_braces.pop()
            if name is not None:
                inside -= 1
                found.append((first, name, line - first + 1))
            begin = at + 1
        elif char == ';' and parentheses == 0:
            begin = at + 1
    return found


def check_functions(path, lines, allowed=None):
    """Yields (line, what is wrong) of each function that is too long."""
    allowed = LONG_FUNCTIONS if allowed is None else allowed
    longest = {}
    for first, name, count in functions('\n'.join(lines)):
        longest[name] = max(count, longest.get(name, 0))
        most = allowed.get((path, name), MAX_FUNCTION_LINES)
        if count > most:
            yield first, f'{name} has {count} lines; at most {most}: look for the function that is missing'
    for file, name in allowed:
        if file == path and longest.get(name, 0) <= MAX_FUNCTION_LINES:
            yield 1, f'{name} has at most {MAX_FUNCTION_LINES} lines by now: take it out of LONG_FUNCTIONS (tests/tidy/functions.py)'
