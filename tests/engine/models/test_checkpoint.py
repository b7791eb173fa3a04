"""Reading checkpoint files: what is asked for comes out, and what is broken is named before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import edit_config, make_tiny

from forebay.engine.checkpoint.checkpoint import Checkpoint
from forebay.engine.kernels.torch_fallback import TorchBackend
from forebay.engine.model_executor.load_model import inspect, load
from forebay.engine.model_import.resolve import resolve_model
from forebay.errors import UsageError

pytestmark = pytest.mark.engine

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_rows_and_columns_come_out_as_they_went_in(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(7 * 40).view(7, 40).to(dtype)
    save_file({"before": torch.ones(3), "m": tensor, "line": tensor[0].clone()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)

    def same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
        return ours.dtype == dtype and torch.equal(ours.float(), expected.float())

    assert same(checkpoint.read("m"), tensor)
    assert same(checkpoint.read("m", rows=(2, 5)), tensor[2:5])
    assert same(checkpoint.read("m", cols=(8, 24)), tensor[:, 8:24])
    assert same(checkpoint.read("m", rows=(1, 7), cols=(0, 8)), tensor[1:7, :8])
    assert same(checkpoint.read("line", rows=(3, 9)), tensor[0, 3:9])


def sharded(folder: Path) -> Path:
    """A checkpoint of two shards and an index."""
    make_tiny("llama", folder)
    whole = Checkpoint.open(folder)
    names = sorted(whole.names())
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: whole.read(name) for name in part}, folder / shard)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"model-00002-of-00002\.safetensors is truncated: [\d,]+ bytes, its header needs [\d,]+"),
        (garble, r"model-00002-of-00002\.safetensors is not a sound safetensors file"),
        (lengthen, r"model-00002-of-00002\.safetensors is too long"),
        (Path.unlink, r"lacks 1 of its 2 shards: model-00002-of-00002\.safetensors"),
    ],
)
def test_a_damaged_shard_is_named_before_loading(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    load(inspect(folder), TorchBackend())
    damage(folder / "model-00002-of-00002.safetensors")
    seen: list[int] = []
    with pytest.raises(UsageError, match=said):
        load(inspect(folder), TorchBackend(), progress=lambda done, total: seen.append(done))
    assert not seen


def test_progress_ends_at_the_language_models_bytes(tmp_path: Path) -> None:
    folder = make_tiny("kimi_k25", tmp_path / "m")
    seen: list[tuple[int, int]] = []
    load(inspect(folder), TorchBackend(), progress=lambda done, total: seen.append((done, total)))
    entries = Checkpoint.open(folder).entries
    ours = sum(entry.nbytes for name, entry in entries.items() if name.startswith("language_model."))
    assert seen[-1] == (ours, ours)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_architecture_we_do_not_have_is_refused_with_those_we_do(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    edit_config(folder, lambda config: config.update(architectures=["FalconForCausalLM"]))
    with pytest.raises(UsageError, match="FalconForCausalLM") as refused:
        inspect(folder)
    assert "LlamaForCausalLM" in str(refused.value.fix)
    assert "DeepseekV3ForCausalLM" in str(refused.value.fix)


@pytest.mark.parametrize(
    ("kind", "tp", "works"),
    [("llama", 3, "--tp 1 or 2 or 4"), ("deepseek_v3", 8, "--tp 1 or 2 or 4"), ("mixtral", 6, "--tp 1 or 2 or 4")],
)
def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(
    kind: str, tp: int, works: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"over {tp} ranks") as refused:
        inspect(make_tiny(kind, tmp_path / kind), tp=tp)
    assert works in str(refused.value.fix)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/nowhere/model", "no such folder"),
        ("./nowhere", "no such folder"),
        ("nowhere.gguf", "no such file"),
        ("owner/model", "cannot be fetched from the hub"),
    ],
)
def test_a_model_that_is_not_there_gets_one_clear_line(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=said) as refused:
        resolve_model(name)
    assert "\n" not in refused.value.message


_PEAK = """
import sys
from pathlib import Path
from forebay.engine.kernels.torch_fallback import TorchBackend
from forebay.engine.model_executor.load_model import inspect, load
import torch
torch.set_num_threads(1)
def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(what)))
found = inspect(Path(sys.argv[1]))
before = memory("VmRSS")
loaded = load(found, TorchBackend())
print(loaded.weight_bytes, memory("VmHWM") - before)
"""


def test_loading_peaks_at_the_weights_and_one_tensor(tmp_path: Path) -> None:
    """No memory map, no second copy of the model: fused parts,
    their whole and a part of the file buffer are all that comes on top.
    """
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    folder = make_tiny("llama", tmp_path / "m", num_hidden_layers=6, **wide)
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    weights, peak = map(int, done.stdout.split())
    largest = 2 * 4096 * 1024 * 2  # gate and up, fused
    assert 150_000_000 < weights < peak
    assert peak < weights + 2 * largest + 8_000_000
