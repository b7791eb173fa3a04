// Transposes of 16 x 16 32-bit values, and the layouts that attention needs.
#pragma once
#include "vec.h"

namespace FOREBAY_VARIANT {

#if defined(__AVX512F__)
// Rows r become columns, stored at to + column * stride.
FB_INLINE void transpose_store(__m512i (&r)[16], uint32_t* to, int64_t stride) {
    __m512i t[16];
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
        const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44), b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
        _mm512_storeu_si512(to + c * stride, _mm512_shuffle_i32x4(a, d, 0x88));
        _mm512_storeu_si512(to + (4 + c) * stride, _mm512_shuffle_i32x4(a, d, 0xdd));
        _mm512_storeu_si512(to + (8 + c) * stride, _mm512_shuffle_i32x4(b, e, 0x88));
        _mm512_storeu_si512(to + (12 + c) * stride, _mm512_shuffle_i32x4(b, e, 0xdd));
    }
}
#endif

// to[j * to_stride + i] = from[i * from_stride + j] for 16 x 16 values; strides in 32-bit units.
FB_INLINE void transpose16(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
#if defined(__AVX512F__)
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * from_stride);
    transpose_store(r, to, to_stride);
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

#if defined(__AVX512F__)
// Interleaves: even[0], odd[0], even[1], odd[1], .. of sixteen each.
FB_INLINE __m512i interleaved(const bf16* even, const bf16* odd) {
    alignas(64) static const uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)even)),
                                            _mm256_loadu_si256((const __m256i*)odd), 1);
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both);
}
#endif
FB_INLINE void interleave(const bf16* even, const bf16* odd, bf16* to) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, interleaved(even, odd));
#else
    for (int i = 0; i < 16; i++) {
        to[2 * i] = even[i];
        to[2 * i + 1] = odd[i];
    }
#endif
}

// values (keys, dim) -> columns (dim, keys): keys and dim multiples of 32 and 16, strides in elements.
inline void columns(const bf16* values, int64_t stride, int64_t keys, int64_t dim, bf16* out) {
    for (int64_t key = 0; key < keys; key += 32)
        for (int64_t d = 0; d < dim; d += 16) {
            const bf16* from = values + key * stride + d;
            uint32_t* to = reinterpret_cast<uint32_t*>(out + d * keys + key);
#if defined(__AVX512F__)
            __m512i r[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) r[i] = interleaved(from + 2 * i * stride, from + (2 * i + 1) * stride);
            transpose_store(r, to, keys / 2);
#else
            uint16_t* halves = reinterpret_cast<uint16_t*>(to);
            for (int i = 0; i < 16; i++)
                for (int j = 0; j < 32; j++) halves[i * keys + j] = from[j * stride + i].bits;
#endif
        }
}
inline void columns(const float* values, int64_t stride, int64_t keys, int64_t dim, float* out) {
    for (int64_t key = 0; key < keys; key += 16)
        for (int64_t d = 0; d < dim; d += 16)
            transpose16(reinterpret_cast<const uint32_t*>(values + key * stride + d), stride,
                        reinterpret_cast<uint32_t*>(out + d * keys + key), keys);
}

}  // namespace FOREBAY_VARIANT
