"""Two networks on one machine with a link between them that delays every packet, and that can be cut.

Each side is a network namespace with a tunnel device and nothing else: no other way leads from one to the other. This
process has the far ends of both devices and carries packets between them. Needs Linux, root and /dev/net/tun.
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


def why_not() -> str | None:
    """What is missing here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists("/dev/net/tun") or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        return "no /dev/net/tun, ip, nsenter or unshare here"
    if subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        return "network namespaces are not allowed here"
    return None


class Link:
    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.is_cut = False
        self.num_packets = self.num_dropped = 0
        self._holders, self._devices = [], []
        for ours, theirs in (ADDRESSES, ADDRESSES[::-1]):
            self._add_side(ours, theirs)
        for source, target in (self._devices, self._devices[::-1]):
            waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(source, waiting), daemon=True).start()
            threading.Thread(target=self._write, args=(target, waiting), daemon=True).start()

    def command(self, side: int, command: list[str]) -> list[str]:
        """The command as it is run on one side."""
        return ["nsenter", f"--net=/proc/{self._holders[side].pid}/ns/net", *command]

    def close(self) -> None:
        for holder in self._holders:
            holder.stdin.close()
            holder.wait(10)

    def _add_side(self, ours: str, theirs: str) -> None:
        here, there = socket.socketpair()
        command = [sys.executable, __file__, str(there.fileno()), ours, theirs]
        self._holders.append(subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.PIPE))
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
            except OSError:  # that side is closed
                return


def hold(connection: int, ours: str, theirs: str) -> None:
    """Be a network of its own until standard input ends."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
        sys.exit("no network namespace could be made")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", _DEVICE.encode(), _PLAIN_PACKETS))
    for command in (
        "link set lo up",
        f"addr add {ours} peer {theirs} dev {_DEVICE}",
        f"link set {_DEVICE} up",
        f"route add default dev {_DEVICE}",  # so that programs which look for their own address find this one
    ):
        subprocess.run(["ip", *command.split()], check=True)
    socket.send_fds(socket.socket(fileno=connection), [b"."], [device])
    os.close(device)
    sys.stdin.read()


if __name__ == "__main__":
    hold(int(sys.argv[1]), sys.argv[2], sys.argv[3])
