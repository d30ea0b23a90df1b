#!/usr/bin/env python3
"""The release tarball: made of this build, unpacked elsewhere, serving from there.

Arguments: the project, the build.
"""
import glob
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

BUILD = sys.argv.pop(2)
PROJECT = sys.argv.pop(1)
sys.path.insert(0, os.path.join(PROJECT, "tests/control"))
import processes  # noqa: E402

DATA = os.environ.get("DOVETAIL_TEST_DATA")
MODEL = os.path.join(DATA, "models/stories260K/stories260K-f32.gguf") if DATA else None


class BundleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        tarball = os.path.join(cls.folder.name, "bundle.tar.xz")
        environment = dict(os.environ, XZ_OPT="-0 -T0")
        subprocess.run([os.path.join(PROJECT, "scripts/bundle"), BUILD, tarball], check=True, env=environment,
                       stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "-C", cls.folder.name, "-xJf", tarball], check=True)
        cls.root = pathlib.Path(glob.glob(os.path.join(cls.folder.name, "dovetail-*-linux-x86_64"))[0])
        cls.binary = str(cls.root / "bin/dovetail")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def loaded(self, file):
        """soname -> path."""
        listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True, env={}).stdout
        return dict(re.findall(r"^\s*(\S+) => (/\S+)", listed, re.MULTILINE))

    def test_what_the_system_does_not_bring_comes_from_the_tarball(self):
        from_system = re.compile(r"lib(c|m|dl|pthread|rt|resolv)\.so")
        for name, path in self.loaded(self.binary).items():
            if not from_system.match(name):
                self.assertTrue(os.path.realpath(path).startswith(os.path.realpath(self.root)), f"{name} => {path}")

    def test_ucx_is_the_builds_with_its_transports(self):
        built = self.loaded(os.path.join(BUILD, "dovetail"))["libucs.so.0"]
        beside = pathlib.Path(built).parent / "ucx"
        wanted = {path.name for path in beside.glob("libuct_*.so")}
        self.assertTrue(wanted)
        self.assertEqual({path.name for path in (self.root / "lib/ucx").glob("libuct_*.so")}, wanted)

    def test_it_lists_what_it_is_made_of(self):
        listed = json.loads((self.root / "share/dovetail/sbom.json").read_text(encoding="utf-8"))
        self.assertEqual((listed["bomFormat"], listed["metadata"]["component"]["name"]), ("CycloneDX", "dovetail"))
        versions = {each["name"]: each.get("version") for each in listed["components"]}
        self.assertLessEqual({"libstdc++6", "libprotobuf32", "libgrpc++1.51", "nlohmann-json3-dev", "xgrammar"},
                             set(versions))
        self.assertEqual([name for name in versions if "gtest" in name or "benchmark" in name], [])
        linked = [name for name in versions if "cudart" in name]
        self.assertEqual(len(linked), int((self.root / "lib/libdovetail_cuda.so").exists()), linked)
        installed = subprocess.run(["dpkg-query", "--show", "--showformat=${Version}", "libprotobuf32"],
                                   capture_output=True, text=True, check=True).stdout
        self.assertEqual(versions["libprotobuf32"], installed)

    @unittest.skipIf(MODEL is None, "needs DOVETAIL_TEST_DATA")
    def test_a_cluster_runs_from_it(self):
        with processes.Up(self.binary, MODEL, "--ignore-model-name", "--shutdown-timeout", "1") as up:
            text = "".join(processes.stream(up.url, "Once upon a time", max_tokens=20))
        self.assertGreater(len(text), 20)


if __name__ == "__main__":
    unittest.main(verbosity=2)
