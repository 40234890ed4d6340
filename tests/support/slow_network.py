"""Two network namespaces on one machine; every packet between them is delayed, and the connection can be cut.

Each side has only a tunnel device, so packets can take no other route. This process holds the other ends of both
devices and carries the packets between them. Needs Linux, root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_PLAIN_PACKETS = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_DEVICE = "tun0"


def missing_requirement() -> str | None:
    """Why this machine cannot make such a network; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists("/dev/net/tun") or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        return "no /dev/net/tun, ip, nsenter or unshare here"
    if subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        return "network namespaces are not allowed here"
    return None


class SlowNetwork:
    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.is_cut = False
        self.num_packets = self.num_dropped = 0
        self._namespaces, self._devices = [], []
        for ours, theirs in (ADDRESSES, ADDRESSES[::-1]):
            self._add_side(ours, theirs)
        for source, target in (self._devices, self._devices[::-1]):
            waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(source, waiting), daemon=True).start()
            threading.Thread(target=self._write, args=(target, waiting), daemon=True).start()

    def command(self, side: int, command: list[str]) -> list[str]:
        """The command line that runs `command` on one side."""
        return ["nsenter", f"--net=/proc/{self._namespaces[side].pid}/ns/net", *command]

    def close(self) -> None:
        for namespace in self._namespaces:
            namespace.stdin.close()
            namespace.wait(60)

    def _add_side(self, ours: str, theirs: str) -> None:
        here, there = socket.socketpair()
        command = [sys.executable, __file__, str(there.fileno()), ours, theirs]
        self._namespaces.append(subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.PIPE))
        there.close()
        _, (device,), _, _ = socket.recv_fds(here, 1, 1)
        here.close()
        self._devices.append(device)

    def _read(self, device: int, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            packet = os.read(device, 1 << 16)
            waiting.put((time.monotonic() + self.delay_s, packet))

    def _write(self, device: int, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            due, packet = waiting.get()
            time.sleep(max(due - time.monotonic(), 0.0))
            self.num_packets += 1
            if self.is_cut:
                self.num_dropped += 1
                continue
            try:
                os.write(device, packet)
            except OSError:  # the side was closed
                return


def hold_namespace(connection: int, ours: str, theirs: str) -> None:
    """Create one side's namespace, send its device to the parent, and keep both until standard input ends."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
        sys.exit("creating a network namespace failed")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", _DEVICE.encode(), _PLAIN_PACKETS))
    for command in (
        "link set lo up",
        f"addr add {ours} peer {theirs} dev {_DEVICE}",
        f"link set {_DEVICE} up",
        f"route add default dev {_DEVICE}",  # programs that look up their own address find this one
    ):
        subprocess.run(["ip", *command.split()], check=True)
    socket.send_fds(socket.socket(fileno=connection), [b"."], [device])
    os.close(device)
    sys.stdin.read()


if __name__ == "__main__":
    hold_namespace(int(sys.argv[1]), sys.argv[2], sys.argv[3])
