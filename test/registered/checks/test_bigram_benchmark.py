"""The benchmark of bigram keys compares them before anyone believes its times."""
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "benchmark" / "radix" / "benchmark_convert_to_bigram_key.py"


def test_check_compares_every_size() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check", "--num-tokens", "0", "1", "2", "513"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 8 and "DIFFERENT" not in done.stdout
