"""A process that serves S3 (moto's) on a free port of 127.0.0.1, prints the port, and ends when its stdin does."""

from __future__ import annotations

import sys

from moto.server import ThreadedMotoServer

if __name__ == "__main__":
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    server.stop()
