"""A certificate authority for tests, and what it signs."""
import calendar
import os
import subprocess
import time


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificates:
    """A CA and what it signs, in a folder. The name of a certificate is its role, unless roles are given."""

    def __init__(self, folder, name="ca"):
        self.folder, self.name = folder, name
        openssl("req", "-x509", *NEW_KEY, "-keyout", self.path(f"{name}.key"), "-out",
                self.path(f"{name}.pem"), "-days", "2", "-subj", f"/CN={name}")

    def path(self, name):
        return os.path.join(self.folder, name)

    def issue(self, name, days="2", roles=None):
        key, request, cert = self.path(f"{name}.key"), self.path(f"{name}.csr"), self.path(f"{name}.pem")
        openssl("req", *NEW_KEY, "-keyout", key + ".new", "-out", request, "-subj",
                f"/CN={name}")
        uris = "".join(f",URI:dovetail://role/{role}" for role in ([name] if roles is None else roles))
        with open(self.path("san"), "w", encoding="ascii") as san:
            san.write(f"subjectAltName=IP:127.0.0.1,DNS:localhost{uris}\n")
        openssl("x509", "-req", "-in", request, "-CA", self.path(f"{self.name}.pem"), "-CAkey",
                self.path(f"{self.name}.key"), "-CAcreateserial", "-days", days, "-extfile", self.path("san"), "-out",
                cert + ".new")
        os.replace(key + ".new", key)
        os.replace(cert + ".new", cert)

    def issue_for_the_future(self, name):
        self.issue(name)  # the key and the request
        with open(self.path("ca.cnf"), "w", encoding="ascii") as config:
            config.write(f"[ca]\ndefault_ca=all\n[all]\nnew_certs_dir={self.folder}\ndatabase={self.path('index')}\n"
                         f"serial={self.path('serial')}\ndefault_md=sha256\npolicy=any\n[any]\ncommonName=supplied\n")
        for file, text in (("index", ""), ("serial", "77\n")):
            with open(self.path(file), "w", encoding="ascii") as out:
                out.write(text)
        openssl("ca", "-batch", "-config", self.path("ca.cnf"), "-cert", self.path(f"{self.name}.pem"), "-keyfile",
                self.path(f"{self.name}.key"), "-startdate", "20990101000000Z", "-enddate", "20991231000000Z", "-in",
                self.path(f"{name}.csr"), "-notext", "-out", self.path(f"{name}.pem"))

    def end(self, name):
        """When it ends to be valid, in seconds since 1970."""
        done = subprocess.run(["openssl", "x509", "-in", self.path(f"{name}.pem"), "-noout", "-enddate"], check=True,
                              capture_output=True, text=True)
        return calendar.timegm(time.strptime(done.stdout.strip(), "notAfter=%b %d %H:%M:%S %Y %Z"))

    def flags(self, name, ca=None):
        return ["--tls-cert", self.path(f"{name}.pem"), "--tls-key", self.path(f"{name}.key"), "--tls-ca",
                self.path(f"{ca or self.name}.pem")]
