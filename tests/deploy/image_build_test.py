#!/usr/bin/env python3
"""The image: built without a registry (deploy/images/without_registry) from the release tarball of this build, then
looked at, and run with a root file system that cannot be written, as its user, without capabilities.

Arguments: the project, the build. Skipped where it does not run as root with buildah and debootstrap. The base image is
kept for the next run.
"""
import contextlib
import filecmp
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.request

BUILD = os.path.abspath(sys.argv.pop(2))
PROJECT = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, os.path.join(PROJECT, "tests", "control"))
import processes  # noqa: E402

STORE = os.path.join(os.environ.get("DOVETAIL_CACHE") or os.path.expanduser("~/.cache/dovetail"), "images")
MODEL = os.path.join(PROJECT, "models", "tales-hybrid")
USER = "10001"
# In a mount namespace of its own: $1 is the image's root, $2 the model; the rest is the command.
READ_ONLY = r"""
set -euo pipefail
root=$1 model=$2; shift 2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir "$root/tmp/model"
mount --bind "$model" "$root/tmp/model"
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid USER --regid USER --clear-groups --bounding-set=-all --no-new-privs "$@"
""".replace("USER", USER)


def missing():
    if os.geteuid() != 0:
        return "does not run as root"
    tools = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
    return f"{' and '.join(tools)} not installed" if tools else None


def asked(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def buildah(*arguments):
    return asked("buildah", "--root", os.path.join(STORE, "root"), "--runroot", os.path.join(STORE, "run"), *arguments)


def contents(root):
    """Path -> what is there: mode, owner, and the hash or the target."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            what = ""
            if os.path.islink(path):
                what = os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    what = hashlib.sha256(file.read()).hexdigest()
            found[os.path.relpath(path, root)] = (oct(status.st_mode), status.st_uid, status.st_gid, what)
    return found


class Image(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.addClassCleanup(cls.stack.close)
        cls.folder = cls.stack.enter_context(tempfile.TemporaryDirectory())
        tarball = os.path.join(cls.folder, "release.tar.xz")
        release = os.path.join(cls.folder, "release")
        os.makedirs(os.path.join(release, "opt", "dovetail"))
        cls.tarballs = [tarball, os.path.join(cls.folder, "again.tar.xz")]
        for name in cls.tarballs:
            asked(os.path.join(PROJECT, "scripts", "bundle"), BUILD, name)
        asked("tar", "-xf", tarball, "-C", os.path.join(release, "opt", "dovetail"), "--strip-components=1")
        os.makedirs(STORE, exist_ok=True)
        cls.roots, cls.images = [], []
        for name in ("dovetail-test:one", "dovetail-test:two"):
            asked(os.path.join(PROJECT, "deploy", "images", "without_registry"), STORE, "--target", "cpu", "--no-cache",
                  "--timestamp", "0", "--build-arg", "REVISION=abc", "--build-context", f"build-cpu={release}",
                  "--tag", name)
            cls.stack.callback(buildah, "rmi", name)
            container = buildah("from", "--pull-never", name)
            cls.stack.callback(buildah, "rm", container)
            cls.roots.append(buildah("mount", container))
            cls.images.append(json.loads(buildah("inspect", "--type", "image", name))["Docker"])
        cls.config = cls.images[0]["config"]

    def inside(self, *command):
        return ("unshare", "--mount", "bash", "-c", READ_ONLY, "inside", self.roots[0], MODEL, "env", "-i",
                *self.config["Env"], *command)

    def test_it_says_what_it_is(self):
        self.assertEqual(self.config["User"], f"{USER}:{USER}")
        self.assertEqual(self.config["Entrypoint"], ["dovetail"])
        self.assertEqual(self.config["StopSignal"], "SIGTERM")
        self.assertEqual(self.config["Healthcheck"]["Test"], ["CMD", "healthcheck"])
        self.assertEqual(set(self.config["ExposedPorts"]), {"8000/tcp", "7100/tcp"})
        labels = {name.removeprefix("org.opencontainers.image."): value
                  for name, value in self.config["Labels"].items()}
        self.assertEqual((labels["title"], labels["revision"]), ("dovetail", "abc"))
        self.assertEqual(self.inside_text("dovetail", "--version").split()[-1].lstrip("v"), labels["version"])

    def inside_text(self, *command):
        return asked(*self.inside(*command))

    def test_it_lists_what_it_is_made_of(self):
        with open(os.path.join(self.roots[0], "opt/dovetail/share/dovetail/sbom.json"), encoding="utf-8") as file:
            listed = {each["name"] for each in json.load(file)["components"]}
        self.assertTrue({"libucx0", "libprotobuf32", "nlohmann-json3-dev"} <= listed, listed)
        self.assertTrue(os.path.getsize(os.path.join(self.roots[0], "var/lib/dpkg/status")))

    def test_two_tarballs_of_a_build_have_the_same_bytes(self):
        self.assertTrue(filecmp.cmp(*self.tarballs, shallow=False))

    def test_two_builds_of_a_tarball_have_the_same_layers_and_configuration(self):
        one, two = (contents(root) for root in self.roots)
        self.assertEqual({path for path in one.keys() | two.keys() if one.get(path) != two.get(path)}, set())
        # The image's id is another one: Docker's form, which HEALTHCHECK needs, names the container it was built in.
        for part in ("rootfs", "config", "created"):
            self.assertEqual(*(image[part] for image in self.images), part)

    def test_nothing_in_it_is_the_users(self):
        owned = [path for path, (_, owner, group, _) in contents(self.roots[0]).items()
                 if USER in (str(owner), str(group))]
        self.assertEqual(owned, [])
        self.assertEqual(glob.glob(os.path.join(self.roots[0], "opt/dovetail/bin/*")),
                         [os.path.join(self.roots[0], "opt/dovetail/bin/dovetail")])

    def test_it_serves_from_a_root_that_cannot_be_written(self):
        self.assertEqual(self.inside_text("bash", "-c", "id -u; touch /x 2>&1 || true").splitlines(),
                         [USER, "touch: cannot touch '/x': Read-only file system"])
        serve = self.inside("dovetail", "serve", "/tmp/model", "--port", "0", "--device", "cpu", "--threads", "1",
                            "--served-model-name", "tales")
        with processes.Process(*serve) as server:
            port = server.wait_for(r"listening on http://\S+:(\d+)").group(1)
            asked(*self.inside("env", f"DOVETAIL_PORT={port}", *self.config["Healthcheck"]["Test"][1:]))
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", headers={"Content-Type": "application/json"},
                data=json.dumps({"model": "tales", "prompt": "Once", "max_tokens": 8}).encode())
            with urllib.request.urlopen(request, timeout=60) as answer:
                self.assertEqual(json.load(answer)["usage"]["completion_tokens"], 8)
            self.assertEqual(server.stop(number=getattr(signal, self.config["StopSignal"])), 0)


if __name__ == "__main__":
    if reason := missing():
        print(f"skipped: {reason}")
        sys.exit(77)
    unittest.main(verbosity=2)
