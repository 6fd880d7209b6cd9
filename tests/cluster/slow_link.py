"""A wire between two network interfaces on which all frames come late and some never.

`python slow_link.py <interface> <interface> <delay_s> <loss> <seed>`; it ends when its standard
input does. It does what `tc qdisc add … netem delay … loss …` does, for kernels without netem.
"""

import selectors
import socket
import sys
import time
from collections import deque
from random import Random

ALL_PROTOCOLS = 3  # ETH_P_ALL, linux/if_ether.h
# linux/socket.h and linux/if_packet.h
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
LARGEST_FRAME = 1 << 17


class End:
    """One of both interfaces, and what waits to be sent on it."""

    def __init__(self, interface: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        # With the header that says what the kernel has left to do: checksums, and cutting to size.
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        self.socket.bind((interface, 0))
        self.waiting: deque[tuple[float, bytes]] = deque()

    def send_what_is_due(self) -> float | None:
        """Seconds until the next frame is."""
        while self.waiting:
            due, frame = self.waiting[0]
            if (seconds := due - time.monotonic()) > 0:
                return seconds
            self.waiting.popleft()
            try:
                self.socket.send(frame)
            except OSError as error:  # as a wire that is cut: the frame is lost
                print(f"lost {len(frame)} bytes: {error}", file=sys.stderr, flush=True)
        return None


def relay(one: End, other: End, delay_s: float, loss: float, rng: Random) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(one.socket, selectors.EVENT_READ, other)
        selector.register(other.socket, selectors.EVENT_READ, one)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            next_s = [s for end in (one, other) if (s := end.send_what_is_due()) is not None]
            for key, _ in selector.select(min(next_s, default=None)):
                if key.data is None:
                    return
                assert isinstance(key.fileobj, socket.socket)
                frame = key.fileobj.recv(LARGEST_FRAME)
                if rng.random() >= loss:
                    key.data.waiting.append((time.monotonic() + delay_s, frame))


if __name__ == "__main__":
    first, second, delay_s, loss, seed = sys.argv[1:]
    ends = End(first), End(second)
    print("up", flush=True)
    relay(*ends, float(delay_s), float(loss), Random(int(seed)))
