"""Start the real sglang server on a CPU without AMX, from PyPI packages only.
Spawned children re-run this module as __mp_main__, so everything at top level is in force there too."""

import importlib.abc
import importlib.util
import sys

import torch

# 1. torchvision from PyPI is a CUDA build whose _C.so does not load beside torch 2.13.0+cpu; the two
#    ops it registers a fake for unconditionally are then missing.  Their schema is enough for the import.
_tv = torch.library.Library("torchvision", "DEF")
for _op in ("nms", "qnms"):
    _tv.define(_op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# 2. HiCache on the CPU: unpinned host pools, and torch copies in place of the CUDA kernels of
#    sgl_kernel.kvcacheio for the direct backend (layer_first and page_first_direct).
def _patch_mha(m):
    init = m.MHATokenToKVPoolHost.__init__

    def unpinned(self, *a, **k):  # no accelerator: neither cudaHostRegister nor torch pin_memory works
        return init(self, *a, **{**k, "pin_memory": False})

    m.MHATokenToKVPoolHost.__init__ = unpinned

    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
        for s, d in zip(src_layers, dst_layers):
            d[dst_indices] = s[src_indices]

    def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
        # src: K layers then V layers, each (tokens, heads, dim); dst: [K, V], each (pages, layers, page, heads, dim)
        n = len(src_ptrs) // len(dst_ptrs)
        page, off = dst_indices // page_size, dst_indices % page_size
        for j, dst in enumerate(dst_ptrs):
            for i in range(n):
                dst[page, i, off] = src_ptrs[j * n + i][src_indices]

    def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
        page, off = src_indices // page_size, src_indices % page_size
        for s, d in zip(src_ptrs, dst_ptrs):
            d[dst_indices] = s[page, layer_id, off]

    for f in (transfer_kv_direct, transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
        setattr(m, f.__name__, f)


_PATCHES = {
    "sglang.srt.mem_cache.pool_host.mha": _patch_mha,
}


class _PostImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        patch = _PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _PostImport())

if __name__ == "__main__":
    import runpy

    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
