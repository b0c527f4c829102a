"""Network namespaces for tests: hosts of their own on one switch, whose links are cut for real. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess

_NOWHERE = "02:00:00:00:00:99"  # a link address that no host has


def ip(*words):
    """Run ip(8). Raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def unusable():
    """Why namespaces cannot be made here, or ""."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and ip(8)"
    name = f"nvrx-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "name", "sw0", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)
    return ""


class Network:
    """Hosts 0 .. `size`-1 with the addresses 10.77.0.1, ...; each has a link to a switch."""

    def __init__(self, size):
        self._size = size
        self._switch = self.host("switch")
        self._made: list[str] = []

    def host(self, name):
        """The namespace of a host."""
        return f"nvrx-{os.getpid()}-{name}"

    def inside(self, host):
        """The words before a command that is to run on this host."""
        return ("ip", "netns", "exec", self.host(host))

    def address(self, host):
        """Its IPv4 address."""
        return f"10.77.0.{host + 1}"

    def __enter__(self):
        self._make(self._switch)
        for bridge in ("sw0", "sw1"):
            ip("-n", self._switch, "link", "add", "name", bridge, "type", "bridge")
            ip("-n", self._switch, "link", "set", bridge, "up")
        for host in range(self._size):
            inside, port = self.host(host), f"port{host}"
            self._make(inside)
            ip("-n", self._switch, "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
            ip("-n", self._switch, "link", "set", port, "master", "sw0", "up")
            ip("-n", inside, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", inside, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        for name in self._made:
            ip("netns", "del", name)

    def _make(self, name):
        ip("netns", "add", name)
        self._made.append(name)

    def unplug(self, hosts):
        """The links of these hosts go down at the switch."""
        for host in hosts:
            ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def separate(self, hosts):
        """These hosts reach each other only."""
        for host in hosts:
            ip("-n", self._switch, "link", "set", f"port{host}", "master", "sw1")

    def deafen(self, hosts):
        """What the other hosts send to these is lost; what these send arrives."""
        for deaf, other in self._pairs(hosts):
            fixed = ("lladdr", _NOWHERE, "nud", "permanent")
            ip("-n", self.host(other), "neigh", "replace", self.address(deaf), *fixed, "dev", "eth0")

    def mute(self, hosts):
        """What these hosts send to the others is lost; what the others send arrives."""
        self.deafen(set(range(self._size)) - set(hosts))

    def heal(self):
        """All links work again."""
        for host in range(self._size):
            ip("-n", self._switch, "link", "set", f"port{host}", "master", "sw0", "up")
            ip("-n", self.host(host), "neigh", "flush", "dev", "eth0", "nud", "permanent")

    def _pairs(self, hosts):
        others = set(range(self._size)) - set(hosts)
        return ((host, other) for host in hosts for other in others)
