# SPDX-License-Identifier: Apache-2.0
"""A switch that takes its time: packets between hosts pass through a process that holds each for a while.

The hosts' cards are TUN devices, whose other end this process holds. Linux can delay packets itself (netem), but not
every kernel is built with it. TCP segments pass unsplit, so a few thousand reads and writes a second are a gigabit.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Self

TUN = Path("/dev/net/tun")
# From linux/if_tun.h.
TUNSETIFF, TUNSETOFFLOAD, TUNSETCARRIER = 0x400454CA, 0x400454D0, 0x400454E2
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
OFFLOADED = 0x1 | 0x2 | 0x4
"""Checksums, and segments of TCP over IPv4 and IPv6 that are larger than a packet: both stay as they are."""
VNET_HEADER_BYTES = 10
DESTINATION = slice(VNET_HEADER_BYTES + 16, VNET_HEADER_BYTES + 20)
"""Where an IPv4 packet says which host it is for."""
LARGEST_BYTES = VNET_HEADER_BYTES + 65536
READS_AT_ONCE = 64
END_SECONDS = 10.0


class Card:
    """The process's end of one host's card, and the packets on their way to it.

    Args:
        name: of the device, until it becomes the host's.
        delay_seconds: how long each packet is on its way.
        bytes_per_second: how fast the switch sends to this host; ``None`` for at once.
        queue_seconds: what would wait longer for its turn than this is dropped, as a switch does.
    """

    def __init__(self, name: str, delay_seconds: float, bytes_per_second: float | None, queue_seconds: float) -> None:
        self.delay_seconds = delay_seconds
        self.bytes_per_second = bytes_per_second
        self.queue_seconds = queue_seconds
        self.lose_one_in = 0
        """Of how many packets that the host sends one is lost; 0 for none."""
        self.is_cut = False
        self._draw = random.Random(0)
        self._coming: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0
        self.file = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
        fcntl.ioctl(self.file, TUNSETIFF, request)
        fcntl.ioctl(self.file, TUNSETOFFLOAD, OFFLOADED)

    def cut(self, *, is_cut: bool) -> None:
        """Pull the cable, with all that is on it, or put it back."""
        self.is_cut = is_cut
        self._coming.clear()
        fcntl.ioctl(self.file, TUNSETCARRIER, struct.pack("i", not is_cut))

    def read(self) -> bytes | None:
        """Return the next packet that the host has sent, if there is one."""
        try:
            return os.read(self.file, LARGEST_BYTES)
        except BlockingIOError:
            return None

    def loses(self) -> bool:
        """Return whether the next packet from this host is lost."""
        return self.lose_one_in > 0 and self._draw.randrange(self.lose_one_in) == 0

    def expect(self, packet: bytes, now: float) -> None:
        """Put a packet on its way to this host, or drop it."""
        if self.is_cut:
            return
        if self.bytes_per_second is not None:
            starts_at = max(now, self._free_at)
            if starts_at - now > self.queue_seconds:
                return
            self._free_at = now = starts_at + (len(packet) - VNET_HEADER_BYTES) / self.bytes_per_second
        self._coming.append((now + self.delay_seconds, packet))

    def deliver(self, now: float) -> float | None:
        """Give the host what has arrived. Return when the next packet does."""
        while self._coming and self._coming[0][0] <= now:
            os.write(self.file, self._coming.popleft()[1])
        return self._coming[0][0] if self._coming else None


def carry(cards: dict[bytes, Card]) -> None:
    """Carry packets between the cards, by IPv4 address, until the standard input ends."""
    by_number = list(cards.values())
    by_file = {card.file: card for card in by_number}
    waiting_for = [sys.stdin.fileno(), *by_file]
    while True:
        now = time.monotonic()
        next_arrivals = [at for at in (card.deliver(now) for card in by_number) if at is not None]
        # Packets of one millisecond are delivered together: an earlier look would find one at a time.
        timeout = max(min(next_arrivals) - time.monotonic(), 1e-3) if next_arrivals else None
        readable, _, _ = select.select(waiting_for, [], [], timeout)
        for file in readable:
            if file not in by_file:
                asked = sys.stdin.readline().split()
                if not asked:
                    return
                if asked[0] == "lose":
                    by_number[int(asked[1])].lose_one_in = int(asked[2])
                else:
                    by_number[int(asked[1])].cut(is_cut=asked[0] == "cut")
                _answer("done")
                continue
            source = by_file[file]
            now = time.monotonic()
            for _ in range(READS_AT_ONCE):
                if (packet := source.read()) is None:
                    break
                destination = cards.get(packet[DESTINATION])
                if destination is not None and not source.is_cut and not source.loses():
                    destination.expect(packet, now)


def _answer(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


class Relay:
    """The relay's process, for as long as the block lasts.

    Args:
        namespace: where the devices appear, named ``card0``, ``card1``, ...
        addresses: of the hosts.
        delay_seconds: how long each packet is on its way.
        mbit: how fast it sends to each host; ``None`` for at once.
        queue_seconds: what would wait longer for its turn is dropped.
    """

    def __init__(
        self, namespace: str, addresses: list[str], delay_seconds: float, mbit: float | None, queue_seconds: float
    ) -> None:
        options = [f"--delay-seconds={delay_seconds}", f"--queue-seconds={queue_seconds}"]
        options += [f"--mbit={mbit}"] if mbit is not None else []
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, __file__, *options, *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        try:
            self._wait_for("ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def link(self, host_index: int, *, up: bool) -> None:
        """Pull the host's cable, or put it back."""
        print("heal" if up else "cut", host_index, file=self._process.stdin, flush=True)
        self._wait_for("done")

    def lose(self, host_index: int, one_in: int) -> None:
        """Lose one in so many packets that the host sends, at random."""
        print("lose", host_index, one_in, file=self._process.stdin, flush=True)
        self._wait_for("done")

    def _wait_for(self, answer: str) -> None:
        said = self._process.stdout.readline().strip() if self._process.stdout is not None else ""
        if said != answer:
            raise RuntimeError(f"the relay between the hosts has ended: expected {answer!r}, got {said!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Carry packets between TUN devices, each after a while.")
    parser.add_argument("--delay-seconds", type=float, required=True)
    parser.add_argument("--queue-seconds", type=float, required=True)
    parser.add_argument("--mbit", type=float)
    parser.add_argument("addresses", nargs="+")
    options = parser.parse_args()
    # Ranks compute on the same processors. A network does not wait for them.
    os.nice(-10)
    speed = None if options.mbit is None else options.mbit * 1e6 / 8
    cards = {
        socket.inet_aton(address): Card(f"card{index}", options.delay_seconds, speed, options.queue_seconds)
        for index, address in enumerate(options.addresses)
    }
    _answer("ready")
    carry(cards)


if __name__ == "__main__":
    main()
