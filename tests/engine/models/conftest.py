"""Shared by the model tests: the tiny checkpoints' module on the path, and few threads."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
