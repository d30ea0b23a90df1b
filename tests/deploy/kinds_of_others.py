"""Kinds that are not Kubernetes' own: which fields their specs have, of those that the chart writes. Written from their
references: cert-manager 1.21, KEDA 2.20, LeaderWorkerSet 0.10, the Prometheus operator 0.93, the Gateway API 1 and its
inference extension 1.6 (InferenceObjective: llm-d).

Where DOVETAIL_DEFINITIONS names a folder of their CustomResourceDefinitions, documents are checked against those, and a
field that they do not know is an error, too.
"""
import functools
import glob
import os

import jsonschema
import kubernetes_validate
import yaml

LABELS = {"*": str}
SELECTOR = {"matchLabels!": LABELS}
TEMPLATE = {"metadata": {"labels": LABELS}, "spec!": "a pod's spec"}
SHAPES = {  # a key that ends with "!" is required; a set holds the values that are allowed
    ("cert-manager.io/v1", "Certificate"): {
        "secretName!": str, "commonName": str, "dnsNames": [str], "uris": [str], "ipAddresses": [str], "isCA": bool,
        "duration": str, "renewBefore": str, "usages": [{"server auth", "client auth", "digital signature"}],
        "issuerRef!": {"name!": str, "kind": {"Issuer", "ClusterIssuer"}, "group": {"cert-manager.io"}},
        "privateKey": {"algorithm": {"RSA", "ECDSA", "Ed25519"}, "rotationPolicy": {"Always", "Never"}, "size": int}},
    ("cert-manager.io/v1", "Issuer"): {"ca": {"secretName!": str}, "selfSigned": {}},
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector!": SELECTOR,
        "podMetricsEndpoints": [{
            "port": str, "path": str, "scheme": {"http", "https"}, "interval": str, "tlsConfig": {"serverName": str},
            "authorization": {"type": str, "credentials": {"name": str, "key!": str}}}]},
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef!": {"apiVersion": str, "kind": str, "name!": str}, "minReplicaCount": int,
        "maxReplicaCount": int,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {
            "stabilizationWindowSeconds": int,
            "policies": [{"type!": {"Pods", "Percent"}, "value!": int, "periodSeconds!": int}]}}}},
        "triggers!": [{"type!": {"prometheus"}, "metricType": {"AverageValue", "Value", "Utilization"},
                       "metadata!": {"serverAddress!": str, "query!": str, "threshold!": str}}]},
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": int, "startupPolicy": {"LeaderCreated", "LeaderReady"},
        "rolloutStrategy": {"type!": {"RollingUpdate"},
                            "rollingUpdateConfiguration": {"maxUnavailable": int, "maxSurge": int}},
        "leaderWorkerTemplate!": {
            "size": int, "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
            "leaderTemplate": TEMPLATE, "workerTemplate!": TEMPLATE}},
    ("inference.networking.k8s.io/v1", "InferencePool"): {
        "selector!": SELECTOR, "targetPorts!": [{"number!": int}],
        "endpointPickerRef!": {"name!": str, "port": {"number!": int}, "failureMode": {"FailOpen", "FailClose"}}},
    ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"): {
        "priority": int, "poolRef!": {"group": str, "kind": str, "name!": str}},
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
        "hostnames": [str], "parentRefs": [{"name!": str, "namespace": str, "sectionName": str}],
        "rules": [{"backendRefs": [{"group": str, "kind": str, "name!": str, "port": int}]}]},
}


def problems(doc, version):
    """What is wrong with a document of such a kind, as texts. `version`: of Kubernetes, for the pods in it."""
    key = (doc["apiVersion"], doc["kind"])
    if (definition := definitions().get(key)) is not None:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"
                for error in jsonschema.Draft202012Validator(definition).iter_errors(doc)]
    if key not in SHAPES:
        return [f"{key} is not known here"]
    return list(_differences(doc["spec"], SHAPES[key], "spec", version))


def _differences(value, shape, path, version):
    if shape == "a pod's spec":
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": value}
        kubernetes_validate.validate(pod, version, strict=True)
    elif isinstance(shape, set):
        if value not in shape:
            yield f"{path} is {value!r}, none of {sorted(shape)}"
    elif isinstance(shape, list):
        for i, one in enumerate(value):
            yield from _differences(one, shape[0], f"{path}[{i}]", version)
    elif isinstance(shape, dict):
        fields = {name.rstrip("!"): one for name, one in shape.items()}
        for name, one in value.items():
            if name not in fields and "*" not in fields:
                yield f"{path}.{name} is no field"
            else:
                yield from _differences(one, fields.get(name, fields.get("*")), f"{path}.{name}", version)
        for name in shape:
            if name.endswith("!") and name[:-1] not in value:
                yield f"{path}.{name[:-1]} is missing"
    elif type(value) is not shape:
        yield f"{path} is {value!r}, no {shape.__name__}"


@functools.cache
def definitions():
    found = {}
    for file in glob.glob(os.path.join(os.environ.get("DOVETAIL_DEFINITIONS", "/nonexistent"), "*.yaml")):
        with open(file, encoding="utf-8") as text:
            for doc in filter(None, yaml.safe_load_all(text)):
                for version in doc["spec"]["versions"]:
                    schema = _strict(version["schema"]["openAPIV3Schema"])
                    schema["properties"]["metadata"] = {"type": "object"}
                    found[f"{doc['spec']['group']}/{version['name']}", doc["spec"]["names"]["kind"]] = schema
    return found


def _strict(schema):
    """The schema, but a field that it does not name is an error where the API server would drop it."""
    schema = {key: value for key, value in schema.items() if key not in ("description", "format")}
    if schema.get("x-kubernetes-int-or-string"):
        schema["type"] = ["integer", "string"]
    if "properties" in schema:
        schema["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            schema[inner] = _strict(schema[inner])
    return schema
