#!/usr/bin/env python3
"""Reports of `bench serve`, `bench cost` and `plan` in a real browser, light and dark, on a desk and on a phone:
nothing is wider than the page, no text lies on another or outside its picture, every text can be read, and nothing is
loaded.
Arguments: the dovetail binary, a model. DOVETAIL_PICTURES names a folder for pictures. Skipped (77) without Chromium.
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

PROJECT = pathlib.Path(__file__).resolve().parent.parent.parent
for folder in ("control", "server"):
    sys.path.insert(0, str(PROJECT / "tests" / folder))
import browser  # noqa: E402
import processes  # noqa: E402

PICTURES = os.environ.get("DOVETAIL_PICTURES")
DESK, PHONE = (1200, 900), (400, 800)
LEAST_CONTRAST = 4.5  # of text, as WCAG 2 asks for
SERVE, COST, PLAN = "serve", "cost", "plan"
FIGURES = {SERVE: 2, COST: 5, PLAN: 6}  # with data, of those that a report may have

# Functions of the page's own texts; each gives a list of what is wrong.
CHECKS = r"""
const shown = [...document.querySelectorAll('body *')].filter((e) => e.getClientRects().length > 0);
const name = (e) => e.outerHTML.slice(0, 120);
const box = (e) => e.getBoundingClientRect();
window.wide = () => shown.filter((e) => box(e).right > innerWidth + 1 && !e.closest('.scroll')).map(name);
window.outside = () => [...document.querySelectorAll('svg[role=img] text')].filter((text) => {
  const inner = box(text), outer = box(text.ownerSVGElement);
  return inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.top < outer.top - 2 ||
         inner.bottom > outer.bottom + 2; }).map(name);
window.overlapping = () => [...document.querySelectorAll('svg[role=img]')].flatMap((svg) => {
  const texts = [...svg.querySelectorAll('text')], found = [];
  texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
    const p = box(a), q = box(b);
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (across > 1 && down > 4) found.push(a.textContent + ' | ' + b.textContent);
  }));
  return found; });
const light = (color) => {
  const part = color.match(/[\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2]; };
const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const color = getComputedStyle(e).backgroundColor;
    if (color !== 'rgba(0, 0, 0, 0)') return color;
  }
  return 'rgb(255, 255, 255)'; };
window.faint = (least) => {
  const found = [];
  for (const e of shown) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e), svg = e.tagName === 'text';
    const under = e.classList.contains('inside')
        ? [...e.ownerSVGElement.querySelectorAll('rect')].map((r) => getComputedStyle(r).fill) : [behind(e)];
    for (const color of under)
      if (contrast(svg ? style.fill : style.color, color) < least) found.push(name(e) + ' on ' + color);
  }
  return found; };
window.unnamed = () => [...document.querySelectorAll('svg[role=img]')].filter((svg) =>
  svg.getAttribute('aria-labelledby').split(' ').some((id) => !document.getElementById(id)?.textContent) ||
  !svg.closest('section').querySelector('table')).map(name);
true
"""


def run(*arguments):
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def serve_report(binary, model, out):
    with processes.Process(binary, "serve", model, "--port", "0", "--served-model-name", "tales-hybrid") as server:
        url = server.wait_for(r"listening on (http://\S+)").group(1)
        processes.wait_until_ready(url)
        run(binary, "bench", "serve", "--base-url", url, "--num-prompts", "24", "--random-input-len", "64",
            "--random-output-len", "16", "--sweep-rates", "8:32", "--goodput", "ttft:2000", "tpot:200", "--report", out)


def result_of(folder, name, seconds, tokens, generator):
    """A file as --save-result --save-detailed and --append-result write it: three rates, with all requests."""
    lines = []
    for rate in (1, 2, 4):
        ttfts = [0.05 * generator.lognormvariate(0, 0.3) * (1 + rate / 4) for _ in range(200)]
        gaps = [[0.02 * generator.lognormvariate(0, 0.2) * (1 + rate / 8)] * 63 for _ in range(200)]
        ttft, tpot = sorted(ttfts), sorted(g[0] for g in gaps)
        lines.append(json.dumps({
            "duration": seconds, "total_input_tokens": 40000, "total_output_tokens": tokens, "request_rate": rate,
            "good_output_tokens": tokens // 2, "median_ttft_ms": 1e3 * ttft[100], "p99_ttft_ms": 1e3 * ttft[197],
            "median_tpot_ms": 1e3 * tpot[100], "p99_tpot_ms": 1e3 * tpot[197], "mean_ttft_ms": 1e3 * sum(ttft) / 200,
            "mean_e2el_ms": 1e3 * (sum(ttft) + 63 * sum(tpot)) / 200, "ttfts": ttfts, "itls": gaps,
            "output_lens": [64] * 200}))
    path = pathlib.Path(folder) / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def cost_report(binary, folder, out):
    generator = random.Random(1)
    whole = result_of(folder, "whole.json", 60, 12800, generator)
    split = result_of(folder, "split.json", 50, 12800, generator)
    run(binary, "bench", "cost", "--prices", PROJECT / "prices" / "2026-11-25.json", "--utilization", "0.65",
        "--layout", f"whole={whole}@compute.h100:4,host.cpu-machine:1", "--layout",
        f"split={split}@compute.h100:2,attention.h20:4,host.cpu-machine:1", "--report", out)


def profile(name, memory_gb, weight_s, read_rate):
    """A device of round numbers, as `dovetail bench device` would write it."""
    rates = [{"rows": 1, "s_per_weight": weight_s}, {"rows": 101, "s_per_weight": 2 * weight_s}]
    return {"dovetail_device_profile": 1, "name": name, "dated": "2026-11-28", "device": "a test's",
            "source": "a test", "threads": 1, "memory_gb": memory_gb, "load": 0,
            "reads": [{"threads": 1, "bytes_per_s": read_rate}],
            "products": [{"weights": "bf16", "bytes_per_weight": 2, "points": rates}],
            "attention": [{"kv": "bfloat16", "head_dim": 128, "group": 4, "decode_bytes_per_s": read_rate,
                           "prompt_flops_per_s": 1e14}],
            "states": [], "links": [{"lane": "shm", "latency_s": 1e-5, "bytes_per_s": 1e10}],
            "steps": {"step_s": 5e-4, "sequence_s": 1e-5, "layer_s": 1e-5, "layer_sequence_s": 1e-7,
                      "value_s": 1e-11, "choice_s": 1e-9}}


def plan_report(binary, folder, out):
    folder = pathlib.Path(folder)
    for one in (profile("fast", 40, 1e-12, 2e12), profile("roomy", 200, 1e-11, 1.5e12)):
        (folder / f"{one['name']}.json").write_text(json.dumps(one), encoding="utf-8")
    measured = folder / "measured.json"
    measured.write_text(json.dumps({"mean_ttft_ms": 30, "median_ttft_ms": 27, "p99_ttft_ms": 70, "mean_tpot_ms": 8.1,
                                    "median_tpot_ms": 8, "p99_tpot_ms": 11, "mean_e2el_ms": 300, "p99_e2el_ms": 420}),
                        encoding="utf-8")
    run(binary, "plan", PROJECT / "models" / "shapes" / "llama-3-8b", "--profile", folder / "fast.json", "--profile",
        folder / "roomy.json", "--price", "fast=2", "--price", "roomy=0.5", "--devices", "fast:2,roomy:2", "--workload",
        "200/40", "--request-rate", "4", "--num-prompts", "60", "--slo", "ttft:1000", "tpot:50", "--measured",
        f"compute.fast:1={measured}", "--report", out)


def looks_right(page, path, kind):
    backgrounds = set()
    for theme in ("light", "dark"):
        page.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        for place, size in (("desk", DESK), ("phone", PHONE)):
            page.resize(*size, mobile=place == "phone")
            page.open(path.as_uri())
            page.run(CHECKS)
            for check in ("wide()", "outside()", "overlapping()", f"faint({LEAST_CONTRAST})", "unnamed()"):
                assert page.run(check) == [], (kind, theme, place, check, page.run(check))
            assert page.run("document.querySelectorAll('section[id^=figure]').length") == FIGURES[kind], kind
            assert page.run("document.querySelectorAll('svg[role=img]').length >= 2"), kind
            assert page.run("performance.getEntriesByType('resource').length") == 0, "a report loads nothing"
            backgrounds.add(page.run("getComputedStyle(document.body).backgroundColor"))
            if PICTURES:
                height = page.run("document.documentElement.scrollHeight")
                page.resize(size[0], height, mobile=place == "phone")
                page.picture(os.path.join(PICTURES, f"report-{kind}-{theme}-{place}.png"))
    assert len(backgrounds) == 2, f"{kind}: light and dark are the same: {backgrounds}"


def main(binary, model):
    with tempfile.TemporaryDirectory() as folder, browser.Browser(*DESK) as page:
        paths = {kind: pathlib.Path(folder) / f"{kind}.html" for kind in (SERVE, COST, PLAN)}
        serve_report(binary, model, paths[SERVE])
        cost_report(binary, folder, paths[COST])
        plan_report(binary, folder, paths[PLAN])
        for kind, path in paths.items():
            looks_right(page, path, kind)
        assert not page.problems(), page.problems()


if __name__ == "__main__":
    if browser.BROWSER is None:
        print("skipped: no chromium")
        sys.exit(77)
    main(sys.argv[1], sys.argv[2])
