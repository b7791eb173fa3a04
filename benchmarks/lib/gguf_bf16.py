"""A bf16 GGUF out of a quantised one, so that llama.cpp runs the same weights as everyone else.

python -m benchmarks.lib.gguf_bf16 SOURCE.gguf TARGET.gguf
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np


def convert(source: Path, target: Path) -> Path:
    """Write ``target`` with every matrix of ``source`` dequantised to bf16 and vectors in fp32; metadata is kept."""
    import gguf

    reader = gguf.GGUFReader(source)
    arch = reader.get_field("general.architecture").contents()
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    writer = gguf.GGUFWriter(temporary, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value_type = field.types[0]
        element_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, element_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if data.ndim >= 2:
            packed = gguf.quantize(data, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(target)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(convert(Path(sys.argv[1]), Path(sys.argv[2])))
