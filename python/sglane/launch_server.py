"""Command line of the server: `python -m sglane.launch_server --model-path DIR`."""
import sys

from sglane.entrypoints.launcher import serve

if __name__ == "__main__":
    sys.exit(serve())
