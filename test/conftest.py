"""Settings for every test: no hub access, few threads, reproducible random operation sequences."""
import os
from pathlib import Path

# Set before anything imports torch: tests share few cores with server processes, and spinning threads would starve them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Child processes find the package of this checkout, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1] / "python"), os.environ.get("PYTHONPATH")]))
os.environ["TRANSFORMERS_OFFLINE"] = "1"

from hypothesis import HealthCheck, settings  # noqa: E402

# No deadline: a busy machine is not a bug. `thorough` is for long searches by hand: HYPOTHESIS_PROFILE=thorough.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
