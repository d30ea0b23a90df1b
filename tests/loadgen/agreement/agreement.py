#!/usr/bin/env python3
"""dovetail bench serve, guidellm and aiperf on one server: do they say the same? agreement.py DOVETAIL [MODEL]

Installs guidellm and aiperf from PyPI into environments of their own, kept below ~/.cache/dovetail (7 GB: guidellm
brings PyTorch). Serves MODEL (SmolLM2-135M-Instruct, which scripts/fetch_model fetches), then lets each tool send
prompts of one length, a request at a time, in turn.

Two comparisons, each within 3 %. The first takes the server's own times of the very requests that a tool has sent
(vllm:time_to_first_token_seconds, vllm:request_decode_time_seconds and vllm:e2e_request_latency_seconds of /metrics,
before and after): mean of the tool / mean of the server, the median over rounds. Other work on the machine makes both
longer, so it holds on a busy machine, too. The second takes the best mean of each tool over the rounds. Exits 77
(skipped) without the model or PyPI, and where the second fails while other work keeps the machine busy: what the tools
disagree about then is the machine.
"""
import argparse
import contextlib
import glob
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
PROJECT = HERE.parent.parent.parent
sys.path.insert(0, str(HERE.parent.parent / "control"))
import processes  # noqa: E402

TOLERANCE = 0.03
ROUNDS, REQUESTS, WORDS, TOKENS = 3, 8, 300, 64
BUSY = 2  # load per core; the server and a tool make one
MOST_ROUNDS = 8  # where the best of fewer do not agree
WORDS_TO_SAY = "time year people way day man thing woman life child world school state family student group".split()


def skip(why):
    print(f"skipped: loadgen agreement: {why}")
    sys.exit(77)


def environment(name):
    """The folder of the programs of an environment with what NAME.txt asks for."""
    requirements = HERE / f"{name}.txt"
    stamp = hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    cache = pathlib.Path(os.environ.get("DOVETAIL_CACHE") or
                         pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "dovetail")
    folder = cache / f"{name}-{stamp}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", folder], check=False).returncode == 0 and subprocess.run(
            [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements],
            check=False).returncode == 0
        if not made:
            skip(f"cannot install {name} from PyPI")
        (folder / "complete").touch()
    return folder / "bin"


def run(arguments, folder):
    done = subprocess.run([str(a) for a in arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=900, check=False,
                          env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, f"{arguments[0]} failed with {done.returncode}:\n{done.stdout[-4000:]}"


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def by_dovetail(binary, url, prompts, folder):
    data = write_lines(folder / "ours.jsonl", [{"prompt": p} for p in prompts])
    run([binary, "bench", "serve", "--base-url", url, "--model", "m", "--dataset-name", "custom", "--dataset-path",
         data, "--custom-output-len", TOKENS, "--num-prompts", len(prompts), "--max-concurrency", 1, "--ignore-eos",
         "--disable-shuffle", "--temperature", 0, "--save-result", "--result-dir", folder,
         "--result-filename", "ours.json"], folder)
    result = json.loads((folder / "ours.json").read_text(encoding="utf-8"))
    assert result["completed"] == len(prompts), result
    return {"ttft": result["mean_ttft_ms"], "tpot": result["mean_tpot_ms"], "e2el": result["mean_e2el_ms"],
            "tokens": result["total_output_tokens"] / len(prompts)}


def by_guidellm(programs, url, prompts, folder):
    data = write_lines(folder / "guidellm.jsonl", [{"prompt": p, "output_tokens_count": TOKENS} for p in prompts])
    out = folder / "guidellm.json"
    backend = {"kind": "openai_http", "target": url, "model": "m", "request_format": "/v1/completions",
               "extras": {"body": {"ignore_eos": True, "temperature": 0}}}
    run([programs / "guidellm", "run", "--backend", json.dumps(backend), "--profile",
         json.dumps({"kind": "concurrent", "streams": [1]}), "--constraint",
         json.dumps({"kind": "max_requests", "count": len(prompts)}), "--data",
         json.dumps({"kind": "json_file", "path": str(data)}), "--output",
         json.dumps({"kind": "json", "path": str(out)}),
         "--disable-console"], folder)
    metrics = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]
    mean = {name: metrics[key]["successful"]["mean"] for name, key in (
        ("ttft", "time_to_first_token_ms"), ("tpot", "inter_token_latency_ms"), ("e2el", "request_latency"),
        ("tokens", "output_token_count"))}
    mean["e2el"] *= 1000
    return mean


def by_aiperf(programs, url, prompts, folder):
    data = write_lines(folder / "aiperf.jsonl", [{"text": p, "output_length": TOKENS} for p in prompts])
    run([programs / "aiperf", "profile", "--model", "m", "--url", url, "--endpoint-type", "completions", "--streaming",
         "--input-file", data, "--custom-dataset-type", "single_turn", "--request-count", len(prompts), "--concurrency",
         1, "--tokenizer", PROJECT / "models" / "tales-hybrid", "--use-server-token-count",
         "--use-legacy-max-tokens", "--extra-inputs",
         json.dumps({"ignore_eos": True, "temperature": 0, "max_tokens": TOKENS}), "--output-artifact-dir",
         folder / "aiperf", "--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"], folder)
    found = glob.glob(str(folder / "aiperf" / "**" / "profile_export_aiperf.json"), recursive=True)
    result = json.loads(pathlib.Path(found[0]).read_text(encoding="utf-8"))
    return {"ttft": result["time_to_first_token"]["avg"], "tpot": result["inter_token_latency"]["avg"],
            "e2el": result["request_latency"]["avg"], "tokens": result["output_sequence_length"]["avg"]}


def prompts_of(generator):
    return [" ".join(generator.choices(WORDS_TO_SAY, k=WORDS)) for _ in range(REQUESTS)]


METRICS = ("ttft", "tpot", "e2el")
HISTOGRAMS = {"ttft": "time_to_first_token", "tpot": "request_decode_time", "e2el": "e2e_request_latency"}
PATIENCE_S = 60


def servers_sums(url):
    """Seconds of all requests that the server has ended, by metric, and their number."""
    with urllib.request.urlopen(url + "/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()

    def value(name):
        found = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)", text, re.MULTILINE)
        return sum(float(number) for number in found)
    sums = {metric: value(f"{name}_seconds_sum") for metric, name in HISTOGRAMS.items()}
    return sums | {"requests": value("e2e_request_latency_seconds_count")}


def servers_means(url, before):
    """Milliseconds of the REQUESTS that were sent since `before`, as the server has them."""
    end = time.monotonic() + PATIENCE_S
    while (after := servers_sums(url))["requests"] < before["requests"] + REQUESTS and time.monotonic() < end:
        time.sleep(0.05)
    count = after["requests"] - before["requests"]
    assert count == REQUESTS, f"the server has counted {count} requests, not {REQUESTS}"
    mean = {metric: 1e3 * (after[metric] - before[metric]) / count for metric in METRICS}
    return mean | {"tpot": mean["tpot"] / (TOKENS - 1)}


def spread(values):
    return max(values) / min(values) - 1


def check_ratios(ratios):
    """The first comparison: of {tool: {metric: [a ratio a round]}}."""
    for metric in METRICS:
        medians = {tool: statistics.median(of_tool[metric]) for tool, of_tool in ratios.items()}
        apart = spread(medians.values())
        print(f"{metric} by the tool / by the server: {', '.join(f'{n} {v:.4f}' for n, v in medians.items())}: "
              f"{100 * apart:.2f} % apart")
        assert apart <= TOLERANCE, f"{metric}: the tools see more than {TOLERANCE * 100:.0f} % different parts of it"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dovetail")
    parser.add_argument("model", nargs="?")
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        fetched = subprocess.run([PROJECT / "scripts" / "fetch_model"], stdout=subprocess.PIPE, text=True, check=False)
        model = fetched.stdout.strip() if fetched.returncode == 0 else skip("cannot fetch SmolLM2-135M-Instruct")
    guidellm, aiperf = environment("guidellm"), environment("aiperf")
    tools = {"dovetail": lambda *a: by_dovetail(os.path.abspath(arguments.dovetail), *a),
             "guidellm": lambda *a: by_guidellm(guidellm, *a), "aiperf": lambda *a: by_aiperf(aiperf, *a)}
    generator = random.Random(1)
    best, ratios = {}, {name: {metric: [] for metric in METRICS} for name in tools}
    with contextlib.ExitStack() as stack:
        # One thread, so that the tools have the other core.
        server = stack.enter_context(processes.Process(
            arguments.dovetail, "serve", model, "--port", "0", "--threads", "1", "--served-model-name", "m",
            "--no-enable-prefix-caching"))
        url = server.wait_for(r"(http://127\.0\.0\.1:\d+)").group(1)
        for number in range(MOST_ROUNDS):
            for name, measure in tools.items():
                before = servers_sums(url)
                with tempfile.TemporaryDirectory() as folder:
                    measured = measure(url, prompts_of(generator), pathlib.Path(folder))
                by_server = servers_means(url, before)
                shown = "  ".join(f"{k} {v:8.2f}" for k, v in measured.items())
                print(f"round {number + 1} {name:9} {shown}", flush=True)
                assert measured["tokens"] == TOKENS, f"{name} counted {measured['tokens']} tokens, not {TOKENS}"
                for metric in METRICS:
                    ratios[name][metric].append(measured[metric] / by_server[metric])
                known = best.setdefault(name, measured)
                best[name] = {k: min(v, known[k]) for k, v in measured.items()}
            agree = all(spread([one[m] for one in best.values()]) <= TOLERANCE for m in METRICS)
            if number + 1 >= ROUNDS and agree:
                break
    check_ratios(ratios)
    load = os.getloadavg()[0]
    for metric in METRICS:
        apart = spread([one[metric] for one in best.values()])
        print(f"{metric}: {', '.join(f'{n} {v[metric]:.2f} ms' for n, v in best.items())}: "
              f"{100 * apart:.2f} % apart")
        if apart > TOLERANCE and load > BUSY * os.cpu_count():
            skip(f"{metric}: the tools do not agree, and the machine is busy (a load of {load:.0f})")
        assert apart <= TOLERANCE, f"{metric}: the tools are more than {TOLERANCE * 100:.0f} % apart"
    print("OK")


if __name__ == "__main__":
    main()
