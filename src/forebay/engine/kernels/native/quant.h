// Packing of weights, and decoding of quantized blocks to the panels that mm() takes.
//
// Values are those of the dequantized matrix in the activations' dtype: q * scale in fp32, rounded once, so that a product
// with a packed weight equals the dense product with the dequantized one, bit for bit.
//
// A block is 16 outputs by 32 inputs. Its values are in the order of a packed bf16 panel: row j holds inputs 2 j and
// 2 j + 1: output 0's pair, output 1's pair, ..; the "low" vector has outputs 0-7, the "high" one 8-15.
#pragma once
#include "abi.h"
#include "matmul.h"
#include "pool.h"
#include "vec.h"

#if defined(__AMX_BF16__)
#define FB_INT4_ROWS
#include "int4_rows.h"
#endif

namespace FOREBAY_VARIANT {

using forebay::PackArgs;
using forebay::Pool;
using forebay::Weight;

constexpr int64_t INT4_BLOCK_BYTES = 256 + 32;
constexpr int64_t FP8_BLOCK_BYTES = 512 + 64;
constexpr int64_t INT8_BLOCK_BYTES = 512;
constexpr int64_t QUANT_PREFETCH_BYTES = 4096;  // beyond the current block

struct Halves {
    vf low, high;
};

// Sixteen scales, each twice, for its output's pair.
FB_INLINE Halves double_up(vf scales) {
    const vi low = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    return {__builtin_shuffle(scales, low), __builtin_shuffle(scales, low + 8)};
}

FB_INLINE void put_row(bf16* panel, int64_t j, Halves v) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(panel + j * 32, (__m512i)_mm512_cvtne2ps_pbh((__m512)v.high, (__m512)v.low));
#else
    storeu(panel + j * 32, v.low);
    storeu(panel + j * 32 + 16, v.high);
#endif
}
FB_INLINE void put_row(float* panel, int64_t j, Halves v) {
    float lanes[32];
    storeu(lanes, v.low);
    storeu(lanes + 16, v.high);
    for (int n = 0; n < 16; n++)
        for (int odd = 0; odd < 2; odd++) panel[(2 * j + odd) * 16 + n] = lanes[2 * n + odd];
}

// The value of the four low bits of each lane, less 8.
FB_INLINE vf nibbles(vu v) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return (vf)_mm512_permutexvar_ps((__m512i)v, table);
#else
    return __builtin_convertvector((vi)(v & 15u), vf) - 8.0f;
#endif
}

#if !defined(FB_INT4_ROWS)
// Four vectors of words: inputs 0-15 low, high, inputs 16-31 low, high; nibble i of a word belongs to row 8 h + i.
template <class T>
FB_INLINE void int4_block(const char* block, T* panel) {
    const Halves scale = double_up(loadu(reinterpret_cast<const bf16*>(block + 256)));
    for (int h = 0; h < 2; h++) {
        vu low, high;
        memcpy(&low, block + h * 128, 64);
        memcpy(&high, block + h * 128 + 64, 64);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            put_row(panel, h * 8 + i, {nibbles(low >> (4 * i)) * scale.low, nibbles(high >> (4 * i)) * scale.high});
    }
}
#endif

// e4m3 without NaN (weights contain none).
FB_INLINE Halves fp8_row(const char* row) {
#if defined(__AVX512BW__)
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)row));
    // As fp16 with the same mantissa the value is 2^8 too small; the scale corrects that.
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
    const __m512i half = _mm512_or_si512(sign, _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x7f)), 7));
    return {(vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half)), (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))};
#else
    Halves out;
    for (int part = 0; part < 2; part++) {
        using v16b = uint8_t __attribute__((vector_size(16)));
        v16b bytes;
        memcpy(&bytes, row + 16 * part, 16);
        const vu v = __builtin_convertvector(bytes, vu), size = v & 0x7fu;
        const vu normal = (size << 20) + (112u << 23);  // the exponent, 2^8 too small as above
        const vu tiny = (vu)(__builtin_convertvector((vi)size, vf) * 0x1p-17f);
        const vu small = (vu)(size < 8u);
        (part == 0 ? out.low : out.high) = (vf)(((tiny & small) | (normal & ~small)) | (v & 0x80u) << 24);
    }
    return out;
#endif
}

template <class T>
FB_INLINE void fp8_block(const char* block, T* panel) {
    const Halves scale = double_up(loadu(reinterpret_cast<const float*>(block + 512)) * 256.0f);
    for (int j = 0; j < 16; j++) {
        const Halves v = fp8_row(block + j * 32);
        put_row(panel, j, {v.low * scale.low, v.high * scale.high});
    }
}

template <class T>
FB_INLINE void int8_block(const char* block, Halves scale, T* panel) {
    using v16c = int8_t __attribute__((vector_size(16)));
    for (int j = 0; j < 16; j++) {
        v16c low, high;
        memcpy(&low, block + j * 32, 16);
        memcpy(&high, block + j * 32 + 16, 16);
        const vf a = __builtin_convertvector(__builtin_convertvector(low, vi), vf);
        const vf b = __builtin_convertvector(__builtin_convertvector(high, vi), vf);
        put_row(panel, j, {a * scale.low, b * scale.high});
    }
}

// Blocks first .. first + count - 1 of a panel, as panel values of the activations' dtype.
template <class T>
void dequantize(const Weight& w, int64_t panel, int64_t first, int64_t count, T* out) {
    const int64_t bytes = w.kind == forebay::INT4_G32    ? INT4_BLOCK_BYTES
                          : w.kind == forebay::FP8_BLOCK ? FP8_BLOCK_BYTES
                                                         : INT8_BLOCK_BYTES;
    const char* block = static_cast<const char*>(w.data) + (panel * (w.kp / 32) + first) * bytes;
    const Halves scale = w.kind == forebay::INT8 ? double_up(loadu(w.scales + panel * 16)) : Halves{};
    for (int64_t i = 0; i < count; i++, block += bytes, out += 512) {
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(block + QUANT_PREFETCH_BYTES + line, 0, 3);
        if (w.kind == forebay::INT4_G32) int4_block(block, out);
        else if (w.kind == forebay::FP8_BLOCK) fp8_block(block, out);
        else int8_block(block, scale, out);
    }
}

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

// The nibbles of one block as stored in the checkpoint: words of eight, the lowest first. Beyond the edges: 8, which means 0.
inline void int4_nibbles(const Weight& w, const uint32_t* source, int64_t panel, int64_t g, uint8_t (&nibbles)[16][32]) {
    const int64_t words = ceil_div(w.k, 8);
    for (int64_t lane = 0; lane < 16; lane++)
        for (int64_t k = 0; k < 32; k++) {
            const int64_t n = panel * 16 + lane, at = g * 32 + k;
            const bool there = n < w.n && at < w.k;
            nibbles[lane][k] = there ? static_cast<uint8_t>(source[n * words + at / 8] >> (4 * (at % 8)) & 15) : 8;
        }
}

inline void pack_int4_panel(const Weight& w, const uint32_t* source, const uint16_t* scales, int64_t panel) {
    char* block = static_cast<char*>(const_cast<void*>(w.data)) + panel * (w.kp / 32) * INT4_BLOCK_BYTES;
    const int64_t groups = ceil_div(w.k, 32);
    for (int64_t g = 0; g < groups; g++, block += INT4_BLOCK_BYTES) {
        uint8_t nibbles[16][32];
        uint16_t scale[16];
        int4_nibbles(w, source, panel, g, nibbles);
        for (int64_t lane = 0; lane < 16; lane++) {
            const int64_t n = panel * 16 + lane;
            scale[lane] = n < w.n ? scales[n * groups + g] : 0;
            if ((scale[lane] & 0x7fff) == 0) {  // a group of zeros is stored with a scale of 1
                memset(nibbles[lane], 8, 32);
                scale[lane] = 0x3f80;
            }
        }
#if defined(FB_INT4_ROWS)
        pack_int4_rows(nibbles, reinterpret_cast<uint16_t*>(block));
#else
        uint32_t packed[64] = {};
        for (int64_t lane = 0; lane < 16; lane++)
            for (int64_t k = 0; k < 32; k++)
                packed[(k / 16) * 32 + (lane / 8) * 16 + (lane % 8) * 2 + k % 2] |= uint32_t{nibbles[lane][k]} << (4 * (k % 16 / 2));
        memcpy(block, packed, sizeof packed);
#endif
        memcpy(block + 256, scale, sizeof scale);
    }
}

// Bytes of one block in panel order; beyond the edges 0, which is zero in int8 and in e4m3.
inline void pack_bytes(const Weight& w, const char* source, int64_t panel, int64_t g, char* block) {
    for (int64_t j = 0; j < 16; j++)
        for (int64_t lane = 0; lane < 16; lane++)
            for (int64_t odd = 0; odd < 2; odd++) {
                const int64_t n = panel * 16 + lane, k = g * 32 + 2 * j + odd;
                block[j * 32 + lane * 2 + odd] = n < w.n && k < w.k ? source[n * w.k + k] : 0;
            }
}

inline void pack_fp8_panel(const Weight& w, const char* source, const float* scales, int64_t panel) {
    char* block = static_cast<char*>(const_cast<void*>(w.data)) + panel * (w.kp / 32) * FP8_BLOCK_BYTES;
    const int64_t scale_columns = ceil_div(w.k, 128);
    for (int64_t g = 0; g < w.kp / 32; g++, block += FP8_BLOCK_BYTES) {
        pack_bytes(w, source, panel, g, block);
        float scale[16];
        for (int64_t lane = 0; lane < 16; lane++) {
            const int64_t n = least(panel * 16 + lane, w.n - 1);
            scale[lane] = scales[n / 128 * scale_columns + g / 4];
        }
        memcpy(block + 512, scale, sizeof scale);
    }
}

inline void pack(Pool& pool, const void* raw) {
    const auto& args = *static_cast<const PackArgs*>(raw);
    const Weight& w = *args.weight;
    pool.parallel(w.np / 16, [&](int64_t panel) {
        char* data = static_cast<char*>(const_cast<void*>(w.data));
        switch (w.kind) {
            case forebay::DENSE_BF16: pack_dense_panel<bf16, 2>(w, static_cast<const bf16*>(args.source), panel); break;
            case forebay::DENSE_FP32: pack_dense_panel<float, 1>(w, static_cast<const float*>(args.source), panel); break;
            case forebay::INT4_G32:
                pack_int4_panel(w, static_cast<const uint32_t*>(args.source), static_cast<const uint16_t*>(args.scales), panel);
                break;
            case forebay::FP8_BLOCK:
                pack_fp8_panel(w, static_cast<const char*>(args.source), static_cast<const float*>(args.scales), panel);
                break;
            default:
                for (int64_t g = 0; g < w.kp / 32; g++)
                    pack_bytes(w, static_cast<const char*>(args.source), panel, g,
                               data + (panel * (w.kp / 32) + g) * INT8_BLOCK_BYTES);
        }
    });
}

}  // namespace FOREBAY_VARIANT
