// bf16 products by vdpbf16ps: each lane is one output, each instruction adds one pair of k; up to 6 rows by 4 panels of
// accumulators stay in registers.
#pragma once
#include "vec.h"

namespace FOREBAY_VARIANT {

constexpr int64_t PANEL_GROUP = 4;
constexpr int64_t ROW_BLOCK = 48;
constexpr int64_t PREFETCH_BYTES = 4096;

inline void begin_task() {}

struct Nothing {
    FB_INLINE void operator()() const {}
};

// `far`: additional distance of the second half of the panels. `meanwhile` is called twice for each pair of k.
template <int R, int P, class Meanwhile>
void mm_bf16_block(const bf16* a, int64_t lda, const bf16* b, int64_t panel_stride, int64_t k, float* c, int64_t ldc,
                   bool accumulate, int64_t far, const Meanwhile& meanwhile) {
    __m512 acc[R][P];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++)
            acc[r][p] = accumulate ? _mm512_loadu_ps(c + r * ldc + 16 * p) : _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 2) {
        __m512bh w[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const bf16* at = b + p * panel_stride + (P > 1 && p >= P / 2 ? far : 0) + i * 16;
            w[p] = (__m512bh)_mm512_loadu_si512(at);
            if (R == 1 || P == 1) _mm_prefetch((const char*)at + PREFETCH_BYTES, _MM_HINT_T0);
        }
        meanwhile();
        meanwhile();
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, a + r * lda + i, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], x, w[p]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) _mm512_storeu_ps(c + r * ldc + 16 * p, acc[r][p]);
}

template <int P, class Meanwhile = Nothing>
void mm_bf16_rows(const bf16* a, int64_t lda, int64_t rows, const bf16* b, int64_t panel_stride, int64_t k, float* c,
                  int64_t ldc, bool accumulate, int64_t far = 0, const Meanwhile& meanwhile = {}) {
    for (int64_t r = 0; r < rows;) {
        const int64_t left = rows - r;
        const int64_t take = ceil_div(left, ceil_div(left, 6));
        const bf16* ar = a + r * lda;
        float* cr = c + r * ldc;
        switch (take) {
            case 1: mm_bf16_block<1, P>(ar, lda, b, panel_stride, k, cr, ldc, accumulate, far, meanwhile); break;
            case 2: mm_bf16_block<2, P>(ar, lda, b, panel_stride, k, cr, ldc, accumulate, far, meanwhile); break;
            case 3: mm_bf16_block<3, P>(ar, lda, b, panel_stride, k, cr, ldc, accumulate, far, meanwhile); break;
            case 4: mm_bf16_block<4, P>(ar, lda, b, panel_stride, k, cr, ldc, accumulate, far, meanwhile); break;
            case 5: mm_bf16_block<5, P>(ar, lda, b, panel_stride, k, cr, ldc, accumulate, far, meanwhile); break;
            default: mm_bf16_block<6, P>(ar, lda, b, panel_stride, k, cr, ldc, accumulate, far, meanwhile); break;
        }
        r += take;
    }
}

inline __attribute__((noinline)) void mm(const bf16* a, int64_t lda, int64_t rows, const bf16* b, int64_t panel_stride, int64_t panels,
               int64_t k, float* c, int64_t ldc, bool accumulate) {
    int64_t p = 0;
    for (; p + 4 <= panels; p += 4)
        mm_bf16_rows<4>(a, lda, rows, b + p * panel_stride, panel_stride, k, c + 16 * p, ldc, accumulate);
    for (; p + 2 <= panels; p += 2)
        mm_bf16_rows<2>(a, lda, rows, b + p * panel_stride, panel_stride, k, c + 16 * p, ldc, accumulate);
    for (; p < panels; p++)
        mm_bf16_rows<1>(a, lda, rows, b + p * panel_stride, panel_stride, k, c + 16 * p, ldc, accumulate);
}

template <class Meanwhile>
void mm_few(const bf16* a, int64_t lda, int64_t rows, const bf16* b, int64_t panel_stride, int64_t panels, int64_t k, float* c,
            int64_t ldc, bool accumulate, const Meanwhile& meanwhile) {
    if (panels % 4 != 0) return mm(a, lda, rows, b, panel_stride, panels, k, c, ldc, accumulate);
    for (int64_t p = 0; p < panels; p += 4)
        mm_bf16_rows<4>(a, lda, rows, b + p * panel_stride, panel_stride, k, c + 16 * p, ldc, accumulate, 0, meanwhile);
}

// mm_two() for two panels of each in one pass: twice the accumulators of separate calls, so that neither loads nor latencies
// slow the products down.
#define FB_SIDE_BY_SIDE 1
inline __attribute__((noinline)) void mm_side_by_side(const bf16* a, int64_t lda, int64_t rows, const bf16* b, const bf16* other,
                                                      int64_t panel_stride, int64_t k, float* c, int64_t ldc) {
    mm_bf16_rows<4>(a, lda, rows, b, panel_stride, k, c, ldc, false, other - b - 2 * panel_stride);
}

}  // namespace FOREBAY_VARIANT
