// Sixteen fp32 lanes for every instruction set: GCC's vector extension for the arithmetic, and intrinsics where it generates
// slow code. Included once per variant, inside the variant's namespace.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <cmath>
#include <cstdint>
#include <cstring>

namespace FOREBAY_VARIANT {

constexpr int LANES = 16;
using vf = float __attribute__((vector_size(64)));
using vi = int32_t __attribute__((vector_size(64)));
using vu = uint32_t __attribute__((vector_size(64)));
using v16u = uint16_t __attribute__((vector_size(32)));
struct bf16 {
    uint16_t bits;
};

#define FB_INLINE inline __attribute__((always_inline))

FB_INLINE vf set1(float x) { return x - (vf){}; }
FB_INLINE vf zero() { return (vf){}; }

FB_INLINE vf loadu(const float* p) {
    vf v;
    memcpy(&v, p, 64);
    return v;
}
FB_INLINE void storeu(float* p, vf v) { memcpy(p, &v, 64); }

FB_INLINE vf loadu(const bf16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    v16u half;
    memcpy(&half, p, 32);
    return (vf)(__builtin_convertvector(half, vu) << 16);
#endif
}

// Round to nearest even; NaN stays NaN.
FB_INLINE v16u to_bf16(vf v) {
#if defined(__AVX512BF16__)
    return (v16u)_mm512_cvtneps_pbh((__m512)v);
#else
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu nan = (vu)(v != v);
    rounded = (rounded & ~nan) | (nan & 0x7fc0u);
    return __builtin_convertvector(rounded, v16u);
#endif
}
FB_INLINE void storeu(bf16* p, vf v) {
    v16u half = to_bf16(v);
    memcpy(p, &half, 32);
}

// Copies n values without a library call; usually about a hundred bytes.
template <class T>
FB_INLINE void copy_values(T* to, const T* from, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) memcpy(to + i, from + i, 16 * sizeof(T));
    for (; i < n; i++) to[i] = from[i];
}

// Writes a 64-byte line with a streaming store; pointers are 64-byte aligned. Call finish_streams() before another thread reads it.
FB_INLINE void stream_line(void* to, const void* line) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512(line));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) _mm256_stream_si256((__m256i*)to + i, _mm256_loadu_si256((const __m256i*)line + i));
#else
    memcpy(to, line, 64);
#endif
}
// A line of 32 bf16, or two of 16 fp32, from two vectors.
FB_INLINE void stream_pair(bf16* to, vf first, vf second) {
#if defined(__AVX512BF16__)
    _mm512_stream_si512((__m512i*)to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    alignas(64) bf16 line[32];
    storeu(line, first);
    storeu(line + 16, second);
    stream_line(to, line);
#endif
}
FB_INLINE void stream_pair(float* to, vf first, vf second) {
    stream_line(to, &first);
    stream_line(to + 16, &second);
}
FB_INLINE void finish_streams() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// The first n lanes; the others are read as zero and not written.
template <class T>
FB_INLINE vf load_n(const T* p, int64_t n) {
    if (n >= LANES) return loadu(p);
    T tmp[LANES] = {};
    for (int64_t i = 0; i < n; i++) tmp[i] = p[i];
    return loadu(tmp);
}
template <class T>
FB_INLINE void store_n(T* p, vf v, int64_t n) {
    if (n >= LANES) return storeu(p, v);
    T tmp[LANES];
    storeu(tmp, v);
    for (int64_t i = 0; i < n; i++) p[i] = tmp[i];
}

// Rounded to T and back.
template <class T>
FB_INLINE vf rounded(vf v);
template <>
FB_INLINE vf rounded<float>(vf v) {
    return v;
}
template <>
FB_INLINE vf rounded<bf16>(vf v) {
    return (vf)(__builtin_convertvector(to_bf16(v), vu) << 16);
}

FB_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

FB_INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// a * b + c, fused where the instruction set has it.
FB_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    union U {
        vf v;
        __m256 h[2];
    } x{a}, y{b}, z{c};
    z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
    z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
    return z.v;
#else
    return a * b + c;
#endif
}

FB_INLINE float hsum(vf v) {
    float t[16];
    storeu(t, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] += t[i + width];
    return t[0];
}

// 2^x within 2e-7, exactly 1 at 0, exactly 0 below -126 (denormal results are slow, and masked scores are in that range). The polynomial is the
// minimax fit of 2^f on [0, 1) with constant term 1.
FB_INLINE vf exp2v(vf x) {
    const vf c1 = set1(6.931513118e-1f), c2 = set1(2.401644498e-1f), c3 = set1(5.579991433e-2f),
             c4 = set1(9.017028676e-3f), c5 = set1(1.867130827e-3f), one = set1(1.0f);
#if defined(__AVX512F__)
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    const vf f = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
    vf p = fma(c5, f, c4);
    p = fma(p, f, c3);
    p = fma(p, f, c2);
    p = fma(p, f, c1);
    p = fma(p, f, one);
    return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
#else
    const vi normal = x >= -126.0f;
    x = vmin(vmax(x, set1(-126.0f)), set1(127.99f));
    vf n = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    n = n > x ? n - 1.0f : n;
    const vf f = x - n;
    vf p = fma(c5, f, c4);
    p = fma(p, f, c3);
    p = fma(p, f, c2);
    p = fma(p, f, c1);
    p = fma(p, f, one);
    const vi exponent = __builtin_convertvector(n, vi) << 23;
    return (vf)(((vi)p + exponent) & normal);
#endif
}

FB_INLINE vf expv(vf x) { return exp2v(x * 1.44269504f); }

FB_INLINE vf tanhv(vf x) { return 1.0f - 2.0f / (expv(vmin(x, set1(40.0f)) * 2.0f) + 1.0f); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace FOREBAY_VARIANT
