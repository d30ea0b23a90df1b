#!/usr/bin/env python3
"""The Dockerfile: hadolint takes it, its parts fit the chart and each other, and the health check tells a server that
is alive from one that is not. image_build_test.py builds an image.

Arguments: the dovetail binary. Run by with_tools.
"""
import os
import re
import subprocess
import sys
import unittest

import manifests

BINARY = os.path.abspath(sys.argv.pop(1))
IMAGES = os.path.join(manifests.PROJECT, "deploy", "images")
sys.path.insert(0, os.path.join(manifests.PROJECT, "tests", "control"))
import processes  # noqa: E402


def stages(text):
    """Name -> (what it is from, its instructions)."""
    found = {}
    for part in re.split(r"^FROM ", text, flags=re.M)[1:]:
        base, name = re.match(r"(\S+) AS (\S+)", part).groups()
        found[name] = (base, part)
    return found


class Dockerfile(unittest.TestCase):
    def setUp(self):
        with open(os.path.join(IMAGES, "Dockerfile"), encoding="utf-8") as file:
            self.text = file.read()
        self.stages = stages(self.text)

    def test_hadolint_takes_it(self):
        done = subprocess.run(["hadolint", "--no-color", os.path.join(IMAGES, "Dockerfile")], capture_output=True,
                              text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_both_images_run_as_the_user_of_the_chart_on_debian_slim(self):
        for name in ("cpu", "cuda"):
            base, part = self.stages[name]
            self.assertEqual(base, "runtime")
            self.assertIn(f"COPY --from=build-{name} /opt/dovetail /opt/dovetail", part)
        base, runtime = self.stages["runtime"]
        self.assertEqual(base, "debian:${DEBIAN}")
        self.assertIn("ARG DEBIAN=12-slim", self.text)
        (_, template), *_ = manifests.pod_templates(manifests.render())
        security = template["spec"]["securityContext"]
        self.assertIn(f"USER {security['runAsUser']}:{security['runAsGroup']}\n", runtime)
        self.assertEqual(manifests.container(template)["command"], ["dovetail"])
        self.assertIn('ENTRYPOINT ["dovetail"]', runtime)

    def test_what_is_copied_exists(self):
        for line in re.findall(r"^COPY (?!--from)(.*)$", self.text, flags=re.M):
            for path in [word for word in line.split()[:-1] if not word.startswith("--")]:
                self.assertTrue(os.path.exists(os.path.join(manifests.PROJECT, path)), path)

    def test_the_library_at_run_time_is_the_one_that_was_built_with(self):
        wheels = re.findall(r"(nvidia-cublas)==(\S+)", self.text)
        self.assertEqual(len(wheels), 2)
        self.assertEqual(len(set(wheels)), 1)


class Healthcheck(unittest.TestCase):
    def check(self, **variables):
        return subprocess.run([os.path.join(IMAGES, "healthcheck")], env={"PATH": os.environ["PATH"], **variables},
                              capture_output=True, timeout=60, check=False).returncode

    def test_it_tells_a_server_that_is_alive(self):
        model = os.path.join(manifests.PROJECT, "models", "tales-hybrid")
        with processes.Process(BINARY, "serve", model, "--port", "0", "--device", "cpu", "--threads", "1") as server:
            port = server.wait_for(r"listening on http://\S+:(\d+)").group(1)
            self.assertEqual(self.check(DOVETAIL_PORT=port), 0)
        self.assertNotEqual(self.check(DOVETAIL_PORT=port), 0)

    def test_it_runs_a_command_in_its_place(self):
        self.assertEqual(self.check(DOVETAIL_HEALTHCHECK="exit 3"), 3)
        self.assertEqual(self.check(DOVETAIL_HEALTHCHECK="true"), 0)


if __name__ == "__main__":
    unittest.main()
