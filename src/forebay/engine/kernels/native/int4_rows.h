// INT4 in rows, for instruction sets whose product takes the weights as rows (AMX): each output's 32 inputs are in one vector.
//
// A value is round(q * scale) in bf16, and a scale has 16 possible values. A scale is 1.m * 2^e with 7 bits of m, so its 16
// values are those of 1.m from a table, with e added to their exponents; a permutation by the stored nibbles then gives 32
// values. That takes less than half the instructions of converting, multiplying and rounding each, and gives the same bits.
#pragma once
#include "transpose.h"
#include "vec.h"

namespace FOREBAY_VARIANT {

// Values of (n - 8) * 1.m for nibble n, in bf16.
struct Int4Values {
    alignas(64) uint16_t of[128][16] = {};
    constexpr Int4Values() {
        for (int m = 0; m < 128; m++)
            for (int n = 0; n < 16; n++) of[m][n] = n == 8 ? 0 : value(n < 8 ? 8 - n : n - 8, m, n < 8);
    }
    // q * (128 + m) / 128, rounded to nearest even at 8 bits.
    static constexpr uint16_t value(int q, int m, bool negative) {
        const int product = q * (128 + m);
        int shift = 0;
        while (product >> shift >= 256) shift++;
        const int rest = product & ((1 << shift) - 1), half = shift > 0 ? 1 << (shift - 1) : 0;
        int kept = product >> shift;
        if (shift > 0 && (rest > half || (rest == half && (kept & 1)))) kept++;
        if (kept == 256) {
            kept = 128;
            shift++;
        }
        return static_cast<uint16_t>((negative ? 0x8000 : 0) | ((127 + shift) << 7) | (kept & 127));
    }
};

// Four vectors of words; nibble j of word k of vector g belongs to output 4 g + j, input k. Then 16 bf16 scales, none of them 0, a
// denormal, or beyond 2^-100 .. 2^100 (checked when packing).
FB_INLINE void pack_int4_rows(const uint8_t (&nibbles)[16][32], uint16_t* words) {
    memset(words, 0, 256);
    for (int n = 0; n < 16; n++)
        for (int k = 0; k < 32; k++) words[n / 4 * 32 + k] |= static_cast<uint16_t>(nibbles[n][k] << (4 * (n % 4)));
}

// Row n of the block: output n's 32 inputs.
FB_INLINE void int4_rows(const char* block, bf16* rows) {
    static constexpr Int4Values values{};
    const __m256i scales = _mm256_loadu_si256((const __m256i*)(block + 256));
    const __m512i wide = _mm512_cvtepu16_epi32(scales);
    alignas(64) uint32_t exponents[16], offsets[16];
    const __m512i exponent = _mm512_sub_epi16(_mm512_and_si512(wide, _mm512_set1_epi32(0xff80)), _mm512_set1_epi32(127 << 7));
    _mm512_store_si512(exponents, _mm512_or_si512(exponent, _mm512_slli_epi32(exponent, 16)));
    _mm512_store_si512(offsets, _mm512_slli_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(0x7f)), 5));
    // Otherwise the compiler extracts the lanes of the vectors one by one, which costs more than all the rest.
    __asm__ volatile("" : "+m"(exponents), "+m"(offsets));
    const __mmask32 nonzero = ~((1u << 8) | (1u << 24));
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        const __m512i words = _mm512_loadu_si512(block + g * 64);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const int n = 4 * g + j;
            const char* at = reinterpret_cast<const char*>(values.of) + offsets[n];
            const __m512i ones = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)at));
            const __m512i table = _mm512_mask_add_epi16(ones, nonzero, ones, _mm512_set1_epi32(static_cast<int>(exponents[n])));
            // The permutation uses five bits of an index, and both halves of the table are equal.
            _mm512_storeu_si512(rows + n * 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * j), table));
        }
    }
}

FB_INLINE void int4_block(const char* block, bf16* panel) {
    alignas(64) bf16 rows[512];
    int4_rows(block, rows);
    transpose16(reinterpret_cast<const uint32_t*>(rows), 16, reinterpret_cast<uint32_t*>(panel), 16);
}

FB_INLINE void int4_block(const char* block, float* panel) {
    const uint16_t* words = reinterpret_cast<const uint16_t*>(block);
    float scales[16];
    storeu(scales, loadu(reinterpret_cast<const bf16*>(block + 256)));
    for (int n = 0; n < 16; n++)
        for (int k = 0; k < 32; k++) {
            const int nibble = words[n / 4 * 32 + k] >> (4 * (n % 4)) & 15;
            panel[k * 16 + n] = static_cast<float>(nibble - 8) * scales[n];
        }
}

// Few rows of x by one panel of outputs: c[t] (16 outputs, columns) for each of T panels of x, `x_stride` apart (one row as it is,
// or 16 a panel). A block is decoded while the tiles multiply the one before it.
template <int T>
void mm_int4_rows(const char* blocks, int64_t count, int64_t block_bytes, int64_t prefetch, const bf16* x, int64_t x_stride,
                  int64_t columns, float* c) {
    alignas(64) static thread_local bf16 ring[4][512];
    configure_columns(columns);
    FB_TILE_ZERO(0);
    if (T > 1) FB_TILE_ZERO(1);
    if (T > 2) FB_TILE_ZERO(2);
    if (T > 3) FB_TILE_ZERO(3);
    int4_rows(blocks, ring[0]);
    for (int64_t i = 0; i < count; i++) {
        if (i + 1 < count) {
            const char* next = blocks + (i + 1) * block_bytes;
            for (int64_t line = 0; line < block_bytes; line += 64) __builtin_prefetch(next + prefetch + line, 0, 3);
            int4_rows(next, ring[(i + 1) & 3]);
        }
        const bf16* at = x + i * 32 * columns;
        FB_TILE_LOAD(4, ring[i & 3], 64);
        FB_TILE_LOAD(7, at, 4 * columns);
        FB_TILE_DP(0, 4, 7);
        if (T > 1) {
            FB_TILE_LOAD(6, at + x_stride, 64);
            FB_TILE_DP(1, 4, 6);
        }
        if (T > 2) {
            FB_TILE_LOAD(5, at + 2 * x_stride, 64);
            FB_TILE_DP(2, 4, 5);
        }
        if (T > 3) {
            FB_TILE_LOAD(7, at + 3 * x_stride, 64);
            FB_TILE_DP(3, 4, 7);
        }
    }
    FB_TILE_STORE(0, c, 4 * columns);
    if (T > 1) FB_TILE_STORE(1, c + 256, 64);
    if (T > 2) FB_TILE_STORE(2, c + 512, 64);
    if (T > 3) FB_TILE_STORE(3, c + 768, 64);
}

}  // namespace FOREBAY_VARIANT
