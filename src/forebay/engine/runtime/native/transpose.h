// Sixteen by sixteen transposes of 32-bit values, and the layouts attention makes with them.
#pragma once
#include "vec.h"

namespace FOREBAY_VARIANT {

// to[j * to_stride + i] = from[i * from_stride + j] for 16 x 16 values; strides in 32-bit units.
FB_INLINE void transpose16(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
#if defined(__AVX512F__)
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    // r[4 i + c] holds, in 128-bit lane l, column 4 l + c of rows 4 i .. 4 i + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512i low01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44), high01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
        const __m512i low23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44), high23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
        _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(low01, low23, 0x88));
        _mm512_storeu_si512(to + (4 + c) * to_stride, _mm512_shuffle_i32x4(low01, low23, 0xdd));
        _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(high01, high23, 0x88));
        _mm512_storeu_si512(to + (12 + c) * to_stride, _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

// Sixteen rows of k values become one packed panel ([k/2][16][2] or [k][16]); k a multiple of 32 and rows contiguous.
FB_INLINE void pack_panel(const bf16* rows, int64_t stride, int64_t k, bf16* panel) {
    for (int64_t i = 0; i < k; i += 32)
        transpose16(reinterpret_cast<const uint32_t*>(rows + i), stride / 2, reinterpret_cast<uint32_t*>(panel + i * 16), 16);
}
FB_INLINE void pack_panel(const float* rows, int64_t stride, int64_t k, float* panel) {
    for (int64_t i = 0; i < k; i += 16)
        transpose16(reinterpret_cast<const uint32_t*>(rows + i), stride, reinterpret_cast<uint32_t*>(panel + i * 16), 16);
}

// values (keys, dim) -> columns (dim, keys): keys and dim multiples of 32 and 16, strides in elements.
inline void columns(const bf16* values, int64_t stride, int64_t keys, int64_t dim, bf16* out) {
    for (int64_t key = 0; key < keys; key += 32)
        for (int64_t d = 0; d < dim; d += 16) {
            alignas(64) uint32_t pairs[16 * 16];
            for (int i = 0; i < 16; i++) {
                v16u even, odd;
                memcpy(&even, values + (key + 2 * i) * stride + d, 32);
                memcpy(&odd, values + (key + 2 * i + 1) * stride + d, 32);
                const vu both = __builtin_convertvector(even, vu) | (__builtin_convertvector(odd, vu) << 16);
                memcpy(pairs + 16 * i, &both, 64);
            }
            transpose16(pairs, 16, reinterpret_cast<uint32_t*>(out + d * keys + key), keys / 2);
        }
}
inline void columns(const float* values, int64_t stride, int64_t keys, int64_t dim, float* out) {
    for (int64_t key = 0; key < keys; key += 16)
        for (int64_t d = 0; d < dim; d += 16)
            transpose16(reinterpret_cast<const uint32_t*>(values + key * stride + d), stride,
                        reinterpret_cast<uint32_t*>(out + d * keys + key), keys);
}

}  // namespace FOREBAY_VARIANT
