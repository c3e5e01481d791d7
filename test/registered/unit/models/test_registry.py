"""The registry knows every supported family, and a broken model module is an error, not a missing family."""
import subprocess
import sys

from sglane.configs.sizes import SUPPORTED_MODEL_TYPES
from sglane.models.registry import MODELS


def test_every_supported_type_has_a_class():
    assert set(MODELS) == set(SUPPORTED_MODEL_TYPES)


def test_import_errors_are_raised():
    """None in sys.modules makes `import sglane.models.deepseek` fail as a missing library would."""
    code = "import sys; sys.modules['sglane.models.deepseek'] = None; import sglane.models.registry"
    result = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
    assert result.returncode == 1 and "sglane.models.deepseek" in result.stderr
