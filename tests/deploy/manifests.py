"""Manifests as the chart renders them, for tests: documents, pods, and what selects what."""
import copy
import json
import os
import re
import subprocess
import tempfile

import yaml

PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CHART = os.path.join(PROJECT, "deploy", "helm", "dovetail")
ROLES = ("scheduler", "server", "compute", "attention")


def gpu_pool(**more):
    limits = {"cpu": "8", "memory": "64Gi"}
    return {"name": "gpu", "replicas": 1, "device": "gpu", "resources": {"limits": limits}, **more}


# What operators choose; each is rendered and checked.
SETTINGS = {
    "defaults": {},
    "no_tls": {"tls": {"mode": "none"}, "joinToken": {"existingSecret": ""}, "apiKeys": {"existingSecret": ""}},
    "given_secrets": {"tls": {"mode": "secrets"}, "metricsApiKey": {"existingSecret": "metrics"},
                      "server": {"tls": {"existingSecret": "api-tls"}, "grpcPort": 50051},
                      "podMonitor": {"enabled": True}},
    "own_issuer": {"tls": {"certManager": {"issuerRef": {"name": "org", "kind": "ClusterIssuer"}}}},
    "gpus": {"compute": {"pools": [gpu_pool(gpuCount=2)]},
             "attention": {"pools": [gpu_pool(), {"name": "cpu", "replicas": 3, "device": "cpu", "kvCapacityGiB": 64,
                                                  "extraArgs": ["--kv-checksums"]}]},
             "gpu": {"runtimeClassName": "nvidia"}, "priorityClasses": {"create": True}},
    "dra_and_rdma": {"gpu": {"mode": "dra"}, "rdma": {"enabled": True}, "network": {"dataDevices": "mlx5_0:1"},
                     "compute": {"pools": [gpu_pool(hugepages={"size": "2Mi", "amount": "1Gi"})]},
                     "attention": {"pools": [gpu_pool(kvCapacityGiB=120, sharedMemory="8Gi")]}},
    "fetched": {"model": {"source": "fetch", "path": ".", "servedNames": ["small", "org/small"],
                          "fetch": {"image": "fetcher:1", "command": ["fetch", "model", "/models"]}}},
    "model_image": {"model": {"source": "image", "path": "model", "image": {"reference": "models/small:1"}}},
    "keda": {"autoscaling": {"mode": "keda"}},
    "hpa": {"autoscaling": {"mode": "hpa"}, "podDisruptionBudgets": {"enabled": False}},
    "groups": {"leaderWorkerSet": {"enabled": True, "groups": 2, "exclusiveTopologyKey": "rack"}},
    "inference": {"inferencePool": {"enabled": True, "objectives": [{"name": "interactive", "priority": 10}]},
                  "gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}],
                                            "hostnames": ["llm.example.com"]}}},
    "ipv6": {"network": {"ipFamily": "IPv6"}, "server": {"grpcPort": 50051}},
    "names": {"fullnameOverride": "llm", "networkPolicy": {"enabled": False},
              "scheduler": {"extraArgs": ["--unlike-workers"], "maxModelLen": 1048576}},
}


def helm(*arguments, values=None):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values or {}, file)
        file.flush()
        return subprocess.run(["helm", *arguments, CHART, "-f", file.name], capture_output=True, text=True, check=False)


def render_text(values=None, release="dovetail"):
    done = helm("template", release, "--namespace", "llm", values=values)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stdout


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def render(values=None, release="dovetail"):
    return documents(render_text(values, release))


def of_kind(docs, *kinds):
    return [doc for doc in docs if doc["kind"] in kinds]


def pod_templates(docs):
    """(name of what makes them, pod template) of everything that makes pods."""
    found = []
    for doc in docs:
        spec = doc.get("spec", {})
        name = doc["metadata"]["name"]
        if doc["kind"] == "Deployment":
            found.append((name, spec["template"]))
        if doc["kind"] == "LeaderWorkerSet":
            found += [(f"{name}-{part}", spec["leaderWorkerTemplate"][part])
                      for part in ("leaderTemplate", "workerTemplate")]
    return found


def role_of(template):
    return template["metadata"]["labels"]["app.kubernetes.io/component"]


def selects(selector, labels):
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def selected_roles(selector, docs):
    return {role_of(template) for _, template in pod_templates(docs)
            if selects(selector, template["metadata"]["labels"])}


def container(template):
    (only,) = template["spec"]["containers"]
    return only


def expanded(arguments, variables):
    """As Kubernetes expands $(NAME) in args."""
    return [re.sub(r"\$\((\w+)\)", lambda name: variables[name.group(1)], word) for word in arguments]


def flag(arguments, name):
    """The value of --name=value, or None."""
    for word in arguments:
        if word.startswith(f"--{name}="):
            return word.split("=", 1)[1]
    return None


def merged(base, over):
    result = copy.deepcopy(base)
    for key, value in over.items():
        result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else copy.deepcopy(value)
    return result
