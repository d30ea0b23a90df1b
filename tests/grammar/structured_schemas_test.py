#!/usr/bin/env python3
"""Texts under schemas drawn at random are valid, says PyPI's jsonschema; and whatever they are cut off at is the
beginning of a text that is valid.

Arguments: the binary structured_samples and the number of schemas.
"""
import json
import random
import subprocess
import sys

import jsonschema

SEED = 20260101
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def string(rng):
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "string"}
    if kind == 1:
        least = rng.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(8)}
    if kind == 2:
        return {"type": "string", "minLength": rng.randrange(5)}
    return {"type": "string", "pattern": rng.choice([
        "^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "[A-Z][^a-z]+", "^(foo|ba[rz]){1,3}$", "^\\w+@\\w+\\.com$", "a.b",
        "\\S+ \\S+",
        "^7(,\\d{1,6})?Z$", "^[^\\s,]*x$", "^.*$", "^[^\\d]{3}$", "^\\W\\D$", "^[a\\-z\\]^]+$",
        "^caf\u00e9(\u65e5|\u672c)?$", "^\\$\\{\\}$"])}


def integer(rng):
    low = rng.randrange(-1000, 1000)
    return rng.choice([{"type": "integer"}, {"type": "integer", "minimum": low, "maximum": low + rng.randrange(3000)},
                       {"type": "integer", "exclusiveMinimum": low}, {"type": "integer", "maximum": low},
                       {"minimum": low, "type": "integer", "exclusiveMaximum": low + 1 + rng.randrange(9)}])


FORMATS = ["date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "hostname", "email"]


def formatted(rng):
    return {"type": "string", "format": rng.choice(FORMATS)}


def one_of(rng, depth):
    """Alternatives of unlike types, or objects told apart by a constant."""
    if rng.random() < 0.3:
        return {"oneOf": rng.sample([string(rng), integer(rng), {"type": "null"}, {"type": "boolean"}], 3)}
    kinds = rng.sample(["cat", "dog", "fish", 7, None], 2 + rng.randrange(3))
    return {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}, "more": schema(rng, depth)},
                       "required": ["kind"]} for kind in kinds]}


def all_of(rng, depth):
    names = rng.sample(["a", "b", "c", "d", "e"], 2 + rng.randrange(4))
    cut = 1 + rng.randrange(len(names) - 1)
    parts = [{"properties": {name: schema(rng, depth) for name in part},
              "required": rng.sample(part, rng.randrange(len(part) + 1))} for part in (names[:cut], names[cut:])]
    if rng.random() < 0.3:
        return {"allOf": [schema(rng, depth)]}
    return {"type": "object", "allOf": parts} if rng.random() < 0.5 else {**parts[0], "allOf": parts[1:]}


def value(rng):
    return rng.choice([None, True, False, 0, -17, 123456789, "", "a b", "quote\"d",
                       "back\\slash", "tab\t", "\u00e9\u65e5", "{}"])


def schema(rng, depth):
    kinds = [string, integer, lambda r: {"type": rng.choice(["number", "boolean", "null"])},
             lambda r: {"enum": [value(r) for _ in range(1 + r.randrange(5))]}, lambda r: {"const": value(r)},
             formatted]
    if depth > 0:
        kinds += [record, record, array, array, mapping, union, one_of, all_of,
                  lambda r, d: {"type": ["string", "null", "integer"]}]
    kind = rng.choice(kinds)
    return kind(rng, depth - 1) if kinds.index(kind) >= 6 else kind(rng)


def record(rng, depth):
    names = rng.sample(["name", "id", "a b", "quote\"", "\u00e9", "items", "type", "x-y", "back\\"],
                       1 + rng.randrange(5))
    out = {"type": "object", "title": "T", "properties": {name: schema(rng, depth) for name in names},
           "required": rng.sample(names, rng.randrange(len(names) + 1))}
    if rng.random() < 0.5:
        out["additionalProperties"] = False
    return out


def array(rng, depth):
    out = {"type": "array", "items": schema(rng, depth)}
    if rng.random() < 0.5:
        out["minItems"] = rng.randrange(4)
    if rng.random() < 0.5:
        out["maxItems"] = out.get("minItems", 0) + rng.randrange(4)
    return out


def mapping(rng, depth):
    return {"type": "object", "additionalProperties": schema(rng, depth)}


def union(rng, depth):
    return {"anyOf": [schema(rng, depth) for _ in range(1 + rng.randrange(4))]}


def with_definitions(rng, depth):
    tree = {"type": "object", "required": ["value", "next"],
            "properties": {"value": schema(rng, 0), "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                           "all": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}}
    return {"$defs": {"tree": tree, "leaf": schema(rng, depth)}, "type": "object",
            "properties": {"tree": {"$ref": "#/$defs/tree"}, "leaf": {"$ref": "#/$defs/leaf"}}, "required": ["tree"]}


LONG = [{"type": "string", "maxLength": 60}, {"type": "string", "minLength": 100, "maxLength": 140},
        {"type": "string", "maxLength": 400}, {"type": "string", "minLength": 150},
        {"type": "string", "pattern": "^[a-z0-9-]{1,200}$"}, {"type": "string", "pattern": "^.{129,300}$"},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 150},
                                          "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 200}},
         "required": ["a", "b"], "additionalProperties": False}]


def text_of(text):
    """As the API decodes it: what xgrammar lets into strings without bounds and is not UTF-8 becomes U+FFFD."""
    return bytes.fromhex(text).decode(errors="replace")


def problem_of(text, validator):
    try:
        validator.validate(json.loads(text_of(text)))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)[:300]
    return None


def check_formats():
    """Each format is one that the validator knows, else it would accept anything."""
    for name in FORMATS:
        assert not CHECKER.conforms("no! such", name), name


def main():
    check_formats()
    binary, count = sys.argv[1], int(sys.argv[2])
    rng = random.Random(SEED)
    schemas = [rng.choice([schema, schema, with_definitions])(rng, 3) for _ in range(count)]
    schemas += [{}, True, {"type": "object"}, {"type": "array"}, {"properties": {"a": True}, "required": ["a"]}]
    schemas += LONG
    lines = "".join(json.dumps({"schema": s, "seed": i}) + "\n" for i, s in enumerate(schemas))
    ran = subprocess.run([binary], input=lines, capture_output=True, text=True, check=True)
    problems, complete, cut, ended, slowest = [], 0, 0, 0, 0.0
    for one, line in zip(schemas, ran.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        if "error" in answer:
            problems.append((one, answer["error"]))
            continue
        slowest = max(slowest, answer["ms"])
        validator = jsonschema.Draft202012Validator(one, format_checker=CHECKER)
        for text, whole in zip(answer["texts"], answer["complete"]):
            if not whole:
                cut += 1
                continue
            complete += 1
            if problem := problem_of(text, validator):
                problems.append((one, bytes.fromhex(text), problem))
        for beginning, text in zip(answer["cut"], answer["ended"]):
            if text is None:
                continue
            ended += 1
            if not text.startswith(beginning):
                problems.append((one, bytes.fromhex(text), "does not begin with what was cut"))
            elif problem := problem_of(text, validator):
                problems.append((one, bytes.fromhex(text), f"from {bytes.fromhex(beginning)!r}: {problem}"))
    print(f"seed {SEED}: {len(schemas)} schemas, {complete} whole texts, {cut} that did not end, {ended} cut and ended "
          f"from there, slowest to compile {slowest:.0f} ms, {len(problems)} problems")
    for problem in problems[:10]:
        print(*problem, sep="\n  ")
    sys.exit(1 if problems or min(complete, ended) < len(schemas) else 0)


if __name__ == "__main__":
    main()
