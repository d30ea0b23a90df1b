#!/usr/bin/env python3
"""What each role's certificate may do on the control plane: real processes, and a gRPC client that calls everything.
Arguments: the dovetail binary, the client (call_each_rpc), a model.
"""
import shutil
import subprocess
import sys
import tempfile
import unittest

import processes
from certificates import Certificates

BINARY, CLIENT, MODEL = sys.argv[1:4]
del sys.argv[1:4]
PERMISSION_DENIED, OK = 7, 0
MAY = {
    "attention-worker": {"Join.attention", "Attend", "Leave"},
    "compute-worker": {"Join.compute", "PutModelFiles"},  # Attend and Leave: not for the attention worker asked about
    "server": {"GetModel", "GetModelFiles", "Open"},
    "operator": {"GetStatus", "ListWorkers", "DrainWorker"},
    "scheduler": set(),
    "none": set(),
}
FULL_NAMES = {"Join.attention": "Membership.Join", "Join.compute": "Membership.Join", "Attend": "Membership.Attend",
              "PutModelFiles": "Membership.PutModelFiles", "Leave": "Membership.Leave",
              "GetModel": "Generation.GetModel", "GetModelFiles": "Generation.GetModelFiles",
              "Open": "Generation.Open", "GetStatus": "Admin.GetStatus", "ListWorkers": "Admin.ListWorkers",
              "DrainWorker": "Admin.DrainWorker"}


class PermissionsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.certificates = Certificates(self.folder)
        for role in MAY:
            self.certificates.issue(role, roles=[] if role == "none" else [role])
        scheduler = self.start("scheduler", "--listen", "127.0.0.1:0", *self.certificates.flags("scheduler"))
        self.scheduler = scheduler
        self.address = scheduler.wait_for(r"^listening on (\S+)").group(1)

    def start(self, *arguments):
        process = processes.Process(BINARY, *arguments)
        self.addCleanup(process.stop)
        return process

    def control(self, role):
        return ["--scheduler", self.address, *self.certificates.flags(role)]

    def worker(self, role, name):
        return ("attention-worker", "--kv-capacity", "1MiB", "--threads", "1", "--name", name, *self.control(role))

    def calls(self, role):
        """RPC -> (code, message)."""
        path = self.certificates.path
        done = subprocess.run([CLIENT, self.address, path(f"{role}.pem"), path(f"{role}.key"), path("ca.pem"), "1"],
                              capture_output=True, text=True, timeout=60, check=True)
        found = {}
        for line in done.stdout.splitlines():
            rpc, code, message = line.split(" ", 2)
            found[rpc] = int(code), message
        return found

    def test_each_role_may_do_its_own_and_nothing_else(self):
        member = self.start(*self.worker("attention-worker", "a1"))
        member.wait_for("a1 is attention worker 1 of")
        for role, may in MAY.items():
            found = self.calls(role)
            self.assertEqual(found.keys(), FULL_NAMES.keys())
            for rpc, (code, message) in found.items():
                with self.subTest(role=role, rpc=rpc):
                    if rpc in may:
                        self.assertNotEqual(code, PERMISSION_DENIED, message)
                        continue
                    self.assertEqual(code, PERMISSION_DENIED, message)
                    self.assertIn(FULL_NAMES[rpc] + " is for ", message)
                    self.assertIn("has no role" if role == "none" else f"the certificate's role is {role}", message)
            if role == "operator":
                self.assertEqual([found["GetStatus"][0], found["ListWorkers"][0]], [OK, OK])
        status = subprocess.run([BINARY, "status", *self.control("operator")], capture_output=True, text=True,
                                timeout=60, check=True).stdout
        self.assertRegex(status, r"a1 +attention")  # other roles' streams and departures did not end it

    def test_processes_with_another_roles_certificate_are_told_so_and_end(self):
        worker = self.control("attention-worker")
        for arguments, rpc in ((("compute-worker", MODEL, "--threads", "1", *worker), "Membership.Join"),
                               (("server", "--port", "0", *worker), "Generation.GetModel"),
                               (("status", *worker), "Admin.GetStatus"),
                               (("drain", "a1", *worker), "Admin.DrainWorker"),
                               (self.worker("server", "a2"), "Membership.Join"),
                               (self.worker("none", "a3"), "Membership.Join")):
            with self.subTest(arguments=arguments[0], rpc=rpc):
                done = subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(f"{rpc} is for ", done.stderr.splitlines()[-1])

    def test_another_roles_certificate_cannot_stand_in_for_the_scheduler(self):
        imposter = self.start("scheduler", "--listen", "127.0.0.1:0", *self.certificates.flags("attention-worker"))
        self.address = imposter.wait_for(r"^listening on (\S+)").group(1)
        done = subprocess.run([BINARY, "status", *self.control("operator")], capture_output=True, text=True, timeout=60,
                              check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("without the role of a scheduler", done.stderr)


if __name__ == "__main__":
    unittest.main()
