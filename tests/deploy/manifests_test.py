#!/usr/bin/env python3
"""What the Helm chart and the Kustomize base say, without a cluster: schemas of three Kubernetes versions, and that
security, selectors, ports, secrets and command lines fit each other and the binary.

Arguments: the dovetail binary. Run by with_tools.
"""
import copy
import json
import os
import re
import subprocess
import sys
import unittest

import kubernetes_validate
import yaml

import kinds_of_others
import manifests
from manifests import container, flag, of_kind, pod_templates, role_of, selected_roles

BINARY = os.path.abspath(sys.argv.pop(1))
KUBERNETES = ("1.34", "1.35", "1.36")
VARIABLES = {"POD_NAME": "dovetail-pod-0", "POD_IP": "10.1.2.3", "DOVETAIL_THREADS": "8"}
TEXTS = {name: manifests.render_text(values) for name, values in manifests.SETTINGS.items()}
ALL = {name: manifests.documents(text) for name, text in TEXTS.items()}
YAMLLINT = """
extends: default
rules: {line-length: disable, document-start: disable, indentation: {indent-sequences: whatever},
        braces: {max-spaces-inside: 1},
        comments: {min-spaces-from-content: 1}, comments-indentation: disable, empty-lines: {max: 2}}
"""


def containers(template):
    return template["spec"]["containers"] + template["spec"].get("initContainers", [])


class Rendering(unittest.TestCase):
    def test_helm_lints_every_setting(self):
        for name, values in manifests.SETTINGS.items():
            with self.subTest(name):
                done = manifests.helm("lint", "--strict", values=values)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_three_versions_of_kubernetes_take_every_document(self):
        for name, docs in ALL.items():
            for doc in docs:
                with self.subTest(name, kind=doc["kind"], document=doc["metadata"]["name"]):
                    if (doc["apiVersion"], doc["kind"]) in kinds_of_others.SHAPES:
                        self.assertEqual(kinds_of_others.problems(doc, KUBERNETES[0]), [])
                        continue
                    for version in KUBERNETES:
                        kubernetes_validate.validate(doc, version, strict=True)

    def test_fields_that_kinds_of_others_lack_are_found(self):
        for name, kind, change, said in (
                ("given_secrets", "PodMonitor",
                 lambda spec: spec["podMetricsEndpoints"][0].update(ports="http"), "ports"),
                ("keda", "ScaledObject", lambda spec: spec.update(maxReplicaCount="16"), "16"),
                ("inference", "InferencePool", lambda spec: spec.pop("selector"), "selector"),
                ("inference", "InferencePool",
                 lambda spec: spec["endpointPickerRef"].update(failureMode="Ignore"), "Ignore")):
            doc = copy.deepcopy(of_kind(ALL[name], kind)[0])
            change(doc["spec"])
            self.assertIn(said, "\n".join(kinds_of_others.problems(doc, KUBERNETES[0])))

    def test_names_are_unique_and_short(self):
        for name, docs in ALL.items():
            names = [(doc["kind"], doc["metadata"]["name"]) for doc in docs]
            self.assertEqual(len(names), len(set(names)), name)
            self.assertTrue(all(len(one) <= 52 for _, one in names), name)  # a pod's name has a hash behind it

    def test_yamllint_takes_the_text(self):
        for name, text in TEXTS.items():
            done = subprocess.run(["yamllint", "-d", YAMLLINT, "-"], input=text, capture_output=True, text=True,
                                  check=False)
            self.assertEqual((done.returncode, done.stdout), (0, ""), name)
        files = [os.path.join(manifests.CHART, file) for file in ("values.yaml", "Chart.yaml")]
        done = subprocess.run(["yamllint", "-d", YAMLLINT, *files], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_values_that_cannot_work_are_refused(self):
        cpu = {"name": "cpu", "replicas": 1, "device": "cpu"}
        for values, said in (({"attention": {"pools": [cpu]}}, "kvCapacityGiB"),
                             ({"attention": {"pools": []}}, "minItems"),
                             ({"scheduler": {"replicas": 2}}, "replicas"),
                             ({"compute": {"pools": [{**cpu, "device": "tpu"}]}}, "device"),
                             ({"server": {"extraArgs": ["port 1"]}}, "extraArgs"),
                             ({"tls": {"mode": "off"}}, "tls/mode"),
                             ({"model": {"path": "/absolute"}}, "model/path"),
                             ({"model": {"source": "image"}}, "model.image.reference"),
                             ({"leaderWorkerSet": {"enabled": True, "computePool": "x"}}, "there is no pool x")):
            done = manifests.helm("template", "dovetail", values=values)
            self.assertNotEqual(done.returncode, 0, values)
            self.assertIn(said, done.stderr)


class Kustomize(unittest.TestCase):
    FOLDER = os.path.join(manifests.PROJECT, "deploy", "kustomize")

    def test_the_base_is_what_the_chart_gives(self):
        done = subprocess.run([os.path.join(self.FOLDER, "render"), "--check"], capture_output=True, text=True,
                              check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_kustomize_builds_it(self):
        done = subprocess.run(["kubectl", "kustomize", os.path.join(self.FOLDER, "base")], capture_output=True,
                              text=True, check=True)
        built = {(doc["kind"], doc["metadata"]["name"]): doc["spec"] for doc in manifests.documents(done.stdout)
                 if "spec" in doc}
        chart = {(doc["kind"], doc["metadata"]["name"]): doc["spec"] for doc in ALL["defaults"] if "spec" in doc}
        self.assertEqual(built.keys(), chart.keys())
        for key, spec in chart.items():
            for one in (spec, built[key]):
                one.get("template", {}).get("metadata", {}).get("labels", {}).pop("helm.sh/chart", None)
                one.get("template", {}).get("metadata", {}).get("labels", {}).pop("app.kubernetes.io/managed-by", None)
            self.assertEqual(built[key], spec, key)


class Security(unittest.TestCase):
    def pods(self):
        for name, docs in ALL.items():
            for _, template in pod_templates(docs):
                yield manifests.SETTINGS[name], template

    def test_pods_fit_the_restricted_profile_unless_rdma_is_asked_for(self):
        for values, template in self.pods():
            rdma = values.get("rdma", {}).get("enabled", False)
            server = role_of(template) == "server"
            spec = template["spec"]
            self.assertEqual(spec["securityContext"]["runAsNonRoot"], True)
            self.assertGreater(spec["securityContext"]["runAsUser"], 0)
            self.assertEqual(spec["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
            self.assertFalse(spec["automountServiceAccountToken"])
            self.assertEqual(spec.get("hostNetwork", False), rdma and not server)
            for forbidden in ("hostPID", "hostIPC", "shareProcessNamespace"):
                self.assertNotIn(forbidden, spec)
            for one in containers(template):
                context = dict(one["securityContext"])
                capabilities = context.pop("capabilities")
                self.assertEqual(context, {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True})
                self.assertEqual(capabilities["drop"], ["ALL"])
                locks = rdma and not server and one in spec["containers"]
                self.assertEqual(capabilities.get("add", []), ["IPC_LOCK"] if locks else [])
                self.assertIn("memory", one["resources"].get("limits", {}) or {"memory": None})
            allowed = {"emptyDir", "secret", "persistentVolumeClaim", "image"}
            for volume in spec["volumes"]:
                self.assertTrue(set(volume) - {"name"} <= allowed, volume)

    def test_every_file_that_a_command_names_is_mounted_from_a_secret(self):
        for _, template in self.pods():
            one = container(template)
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
            self.assertEqual(sorted(volumes), sorted({mount["name"] for c in containers(template)
                                                      for mount in c["volumeMounts"]}))
            for path in set(re.findall(r"/etc/dovetail/[\w./-]+", json.dumps(one))) - set(mounts):
                self.assertIn("secret", volumes[mounts[os.path.dirname(path)]], path)

    def test_each_role_gets_a_certificate_of_that_role(self):
        roles = {"scheduler": "scheduler", "server": "server", "compute": "compute-worker",
                 "attention": "attention-worker"}
        for name, docs in ALL.items():
            issued = {doc["spec"]["secretName"]: doc["spec"] for doc in of_kind(docs, "Certificate")}
            tls = manifests.SETTINGS[name].get("tls", {}).get("mode", "certManager")
            for _, template in pod_templates(docs):
                secrets = {volume["name"]: volume["secret"]["secretName"] for volume in template["spec"]["volumes"]
                           if "secret" in volume}
                if tls == "none":
                    self.assertNotIn("tls", secrets)
                if tls != "certManager":
                    continue
                role = role_of(template)
                self.assertEqual(issued[secrets["tls"]]["uris"], [f"dovetail://role/{roles[role]}"])
                self.assertEqual("operator" in secrets, role != "server")
                if "operator" in secrets:
                    self.assertEqual(issued[secrets["operator"]]["uris"], ["dovetail://role/operator"])
                if role == "scheduler":
                    host = issued[secrets["tls"]]["dnsNames"][0]
            if tls == "certManager":
                for _, template in pod_templates(docs):
                    address = flag(container(template)["args"], "scheduler")
                    self.assertIn(address, (None, f"{host}:7100"))
                    self.assertIn(host, [doc["metadata"]["name"] for doc in of_kind(docs, "Service")])

    def test_a_data_plane_without_tls_is_asked_for(self):
        for values, template in self.pods():
            if role_of(template) == "server":
                continue
            arguments = container(template)["args"]
            without = values.get("tls", {}).get("mode") == "none"
            self.assertEqual("--trust-network" in arguments, without)
            self.assertEqual(flag(arguments, "tls-cert") is None, without)


class Wiring(unittest.TestCase):
    def each(self):
        for name, docs in ALL.items():
            yield manifests.SETTINGS[name], docs

    def test_selectors_find_the_pods_that_they_mean(self):
        for values, docs in self.each():
            for doc in of_kind(docs, "Deployment"):
                labels = doc["spec"]["template"]["metadata"]["labels"]
                selector = doc["spec"]["selector"]["matchLabels"]
                owners = [maker for maker, template in pod_templates(docs)
                          if manifests.selects(selector, template["metadata"]["labels"])]
                self.assertEqual(owners, [doc["metadata"]["name"]])
                for spread in doc["spec"]["template"]["spec"]["topologySpreadConstraints"]:
                    self.assertTrue(manifests.selects(spread["labelSelector"]["matchLabels"], labels))
            for doc in of_kind(docs, "Service"):
                role = "scheduler" if doc["metadata"]["name"].endswith("-scheduler") else "server"
                self.assertEqual(selected_roles(doc["spec"]["selector"], docs), {role})
            for doc in of_kind(docs, "NetworkPolicy"):
                role = doc["metadata"]["labels"]["app.kubernetes.io/component"]
                self.assertEqual(selected_roles(doc["spec"]["podSelector"]["matchLabels"], docs), {role})
            for doc in of_kind(docs, "PodDisruptionBudget", "PodMonitor", "InferencePool"):
                role = doc["metadata"]["labels"]["app.kubernetes.io/component"]
                self.assertEqual(selected_roles(doc["spec"]["selector"]["matchLabels"], docs), {role})
            deployments = {doc["metadata"]["name"]: doc for doc in of_kind(docs, "Deployment")}
            for doc in of_kind(docs, "ScaledObject", "HorizontalPodAutoscaler"):
                self.assertNotIn("replicas", deployments[doc["spec"]["scaleTargetRef"]["name"]]["spec"])

    def test_at_most_one_attention_worker_drains_at_a_time(self):
        for values, docs in self.each():
            budgets = [doc["spec"] for doc in of_kind(docs, "PodDisruptionBudget")
                       if selected_roles(doc["spec"]["selector"]["matchLabels"], docs) == {"attention"}]
            if values.get("podDisruptionBudgets", {}).get("enabled", True):
                self.assertEqual([budget["maxUnavailable"] for budget in budgets], [1])
            for _, template in pod_templates(docs):
                if role_of(template) != "attention":
                    continue
                stop = container(template)["lifecycle"]["preStop"]["exec"]["command"]
                self.assertIn('drain "$POD_NAME" --alone', stop[-1])

    def test_grace_periods_hold_what_a_stop_takes(self):
        for _, docs in self.each():
            most = [(float(flag(container(template)["args"], "kv-capacity").removesuffix("GiB").replace("auto", "80")))
                    for _, template in pod_templates(docs) if role_of(template) == "attention"]
            for _, template in pod_templates(docs):
                grace = template["spec"]["terminationGracePeriodSeconds"]
                arguments = container(template)["args"]
                if role_of(template) == "attention":
                    self.assertGreater(grace, max(most) * 8.59 / 10 + 120)
                if role_of(template) == "server":
                    self.assertGreaterEqual(grace, 5 + 5 + int(flag(arguments, "shutdown-timeout")))

    def test_a_rollout_stops_no_attention_worker_while_another_moves_its_kv(self):
        for _, docs in self.each():
            capacities = {maker: flag(container(template)["args"], "kv-capacity")
                          for maker, template in pod_templates(docs) if role_of(template) == "attention"}
            for doc in of_kind(docs, "Deployment"):
                if kv := capacities.get(doc["metadata"]["name"]):
                    gib = float(kv.removesuffix("GiB").replace("auto", "80"))
                    self.assertGreater(doc["spec"]["minReadySeconds"], gib * 8.59 / 10)

    def test_a_cpu_pools_kv_fits_its_memory(self):
        for name in ("defaults", "groups"):
            for _, template in pod_templates(ALL[name]):
                if role_of(template) == "attention":
                    memory = container(template)["resources"]["limits"]["memory"]
                    kv = flag(container(template)["args"], "kv-capacity")
                    self.assertGreater(int(memory.removesuffix("Gi")), int(kv.removesuffix("GiB")) + 1)

    def test_gpus_and_what_they_need(self):
        for values, docs in self.each():
            claims = {doc["metadata"]["name"]: doc for doc in of_kind(docs, "ResourceClaimTemplate")}
            for _, template in pod_templates(docs):
                one = container(template)
                gpu = (flag(one["args"], "device") or "cpu").startswith("cuda")
                dra = values.get("gpu", {}).get("mode") == "dra"
                self.assertEqual("nvidia.com/gpu" in one["resources"]["limits"], gpu and not dra)
                self.assertEqual(one["image"].endswith("-cuda"), gpu)
                self.assertEqual(one["resources"].get("claims", []), [{"name": "gpu"}] if gpu and dra else [])
                for claim in template["spec"].get("resourceClaims", []):
                    self.assertIn(claim["resourceClaimTemplateName"], claims)


class Ports(unittest.TestCase):
    def allowed(self, policy, direction):
        """(roles or None for others, first port, last port)."""
        found = []
        for rule in policy["spec"][direction]:
            peers = rule.get("from", rule.get("to", []))
            roles = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in peers
                     if "podSelector" in peer}
            for port in rule["ports"]:
                found.append((frozenset(roles) or None, port["port"], port.get("endPort", port["port"])))
        return found

    def listens(self, docs):
        """Role -> {kind: (first, last)}, from the command lines."""
        ports = {}
        for _, template in pod_templates(docs):
            arguments = container(template)["args"]
            mine = ports.setdefault(role_of(template), {})
            for kind, value in (("control", flag(arguments, "listen")), ("http", flag(arguments, "port")),
                                ("grpc", flag(arguments, "grpc-listen"))):
                if value:
                    mine[kind] = (int(value.rsplit(":", 1)[-1]),) * 2
            if data := flag(arguments, "data-ports"):
                mine["data"] = tuple(int(port) for port in data.split("-"))
        return ports

    def test_network_policies_open_the_ports_that_roles_listen_on_to_who_needs_them(self):
        members = frozenset({"scheduler", "compute", "attention"})
        for name, docs in ALL.items():
            policies = {doc["metadata"]["labels"]["app.kubernetes.io/component"]: doc
                        for doc in of_kind(docs, "NetworkPolicy")}
            if name == "names":
                self.assertEqual(policies, {})
                continue
            self.assertEqual(policies.keys(), set(manifests.ROLES))
            listens = self.listens(docs)
            for role, policy in policies.items():
                with self.subTest(name, role=role):
                    self.assertEqual(policy["spec"]["policyTypes"], ["Ingress", "Egress"])
                    rdma = "data" not in listens["scheduler"]
                    wanted = set()
                    if role == "scheduler":
                        wanted.add((frozenset(manifests.ROLES), *listens[role]["control"]))
                    if role == "server":
                        wanted |= {(None, *listens[role][kind]) for kind in listens[role]}
                    else:
                        wanted.add((members, *(listens[role]["data"] if not rdma else (7200, 7263))))
                    self.assertEqual(set(self.allowed(policy, "ingress")), wanted)
                    out = set(self.allowed(policy, "egress"))
                    self.assertIn((frozenset({"scheduler"}), *listens["scheduler"]["control"]), out)
                    self.assertEqual(any(roles == members for roles, _, _ in out), role != "server")
                    self.assertEqual((None, 443, 443) in out, name == "fetched" and role == "compute")

    def test_services_and_probes_name_ports_that_containers_have(self):
        for name, docs in ALL.items():
            listens = self.listens(docs)
            for _, template in pod_templates(docs):
                one = container(template)
                ports = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
                for kind, port in ports.items():
                    self.assertEqual(port, listens[role_of(template)][kind][0], name)
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    action = one[probe].get("httpGet", one[probe].get("tcpSocket"))
                    if action:
                        self.assertIn(action["port"], ports)
                    if "httpGet" in one[probe]:
                        https = flag(one["args"], "ssl-certfile") is not None
                        self.assertEqual(action["scheme"], "HTTPS" if https else "HTTP")
                for doc in of_kind(docs, "Service"):
                    if selected_roles(doc["spec"]["selector"], docs) == {role_of(template)}:
                        for port in doc["spec"]["ports"]:
                            self.assertEqual(ports[port["targetPort"]], port["port"])
            for doc in of_kind(docs, "InferencePool"):
                self.assertEqual(doc["spec"]["targetPorts"], [{"number": listens["server"]["http"][0]}])


class Commands(unittest.TestCase):
    def test_the_binary_takes_every_command_line(self):
        seen = set()
        for name, docs in ALL.items():
            for maker, template in pod_templates(docs):
                one = container(template)
                self.assertEqual(one["command"], ["dovetail"])
                arguments = manifests.expanded(one["args"], VARIABLES)
                defined = {variable["name"] for variable in one["env"]}
                self.assertLessEqual(set(re.findall(r"\$\((\w+)\)", " ".join(one["args"]))), defined)
                if tuple(arguments) in seen:
                    continue
                seen.add(tuple(arguments))
                done = subprocess.run([BINARY, *arguments, "--check-flags"], capture_output=True, text=True, timeout=60,
                                      check=False)
                self.assertEqual((done.returncode, done.stderr), (0, ""), f"{name} {maker} {arguments}")
        self.assertGreater(len(seen), 20)

    def test_the_binary_takes_the_commands_of_probes_and_stops(self):
        """They end with 1, for there is no certificate or scheduler here; a flag that is none would give 2."""
        seen = set()
        for docs in ALL.values():
            for _, template in pod_templates(docs):
                one = container(template)
                actions = [one[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
                actions.append(one.get("lifecycle", {}).get("preStop", {}))
                for action in actions:
                    command = action.get("exec", {}).get("command", [])
                    if command[:2] == ["sh", "-c"]:
                        seen.add(re.sub(r"--scheduler \S+:\d+", "--scheduler 127.0.0.1:9", command[2]))
        self.assertTrue(any(" drain " in command for command in seen))
        for command in seen:
            self.assertTrue(command.startswith("exec dovetail "), command)
            shell = command.replace("exec dovetail", f"exec '{BINARY}'", 1)
            done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False,
                                  env={"POD_NAME": "attention-0", "PATH": "/usr/bin:/bin"})
            alive_and_unreachable = "--alive" in command and "--tls-cert" not in command
            token_missing = "--join-token-file" in command
            self.assertEqual(done.returncode, 0 if alive_and_unreachable and not token_missing else 1,
                             command + done.stderr)

    def test_a_flag_that_the_binary_lacks_is_found(self):
        done = subprocess.run([BINARY, "scheduler", "--no-such-flag=1", "--check-flags"], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 2)


if __name__ == "__main__":
    unittest.main()
