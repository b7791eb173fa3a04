// The one matrix product of this library: mm() adds A (rows, k) times packed B panels to fp32 C.
//
//   C[r][16 j + lane] (+)= sum over k of A[r][k] * B_j[k][lane]
//
// B panels are [k/2][16][2] for bf16 and [k][16] for fp32; k is a multiple of 32. Each output is one chain of sums over k
// in order, whatever the number of rows or panels, so a row's bits never depend on other rows. Splitting k over several
// accumulating calls at multiples of 32 does not change them either.
#pragma once
#include <type_traits>

#include "vec.h"

#if defined(__AMX_BF16__)
#include "matmul_amx.h"
#elif defined(__AVX512BF16__)
#include "matmul_avx512.h"
#else
#include "matmul_fma.h"
#endif

namespace FOREBAY_VARIANT {

template <int R, int P>
void mm_f32_block(const float* a, int64_t lda, const float* b, int64_t panel_stride, int64_t k, float* c, int64_t ldc,
                  bool accumulate) {
    vf acc[R][P];
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) acc[r][p] = accumulate ? loadu(c + r * ldc + 16 * p) : zero();
    for (int64_t i = 0; i < k; i++) {
        vf w[P];
        for (int p = 0; p < P; p++) w[p] = loadu(b + p * panel_stride + i * 16);
        for (int r = 0; r < R; r++) {
            const vf x = set1(a[r * lda + i]);
            for (int p = 0; p < P; p++) acc[r][p] = fma(x, w[p], acc[r][p]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) storeu(c + r * ldc + 16 * p, acc[r][p]);
}

inline __attribute__((noinline)) void mm(const float* a, int64_t lda, int64_t rows, const float* b, int64_t panel_stride, int64_t panels,
               int64_t k, float* c, int64_t ldc, bool accumulate) {
    for (int64_t p = 0; p < panels; p += 2) {
        const float* bp = b + p * panel_stride;
        float* cp = c + 16 * p;
        const bool two = p + 1 < panels;
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) {
            if (two) mm_f32_block<4, 2>(a + r * lda, lda, bp, panel_stride, k, cp + r * ldc, ldc, accumulate);
            else mm_f32_block<4, 1>(a + r * lda, lda, bp, panel_stride, k, cp + r * ldc, ldc, accumulate);
        }
        for (; r < rows; r++) {
            if (two) mm_f32_block<1, 2>(a + r * lda, lda, bp, panel_stride, k, cp + r * ldc, ldc, accumulate);
            else mm_f32_block<1, 1>(a + r * lda, lda, bp, panel_stride, k, cp + r * ldc, ldc, accumulate);
        }
    }
}

// mm() for few rows, which calls `meanwhile` (a prefetch) between products.
template <class T, class Meanwhile>
void mm_few(const T* a, int64_t lda, int64_t rows, const T* b, int64_t panel_stride, int64_t panels, int64_t k, float* c,
            int64_t ldc, bool accumulate, const Meanwhile& meanwhile) {
    for (int64_t i = 0; i < k; i++) meanwhile();
    mm(a, lda, rows, b, panel_stride, panels, k, c, ldc, accumulate);
}

// Up to two panels of each of two weights: those of `b` to the columns of C from 0 on, those of `other` from 32 on.
template <class T>
void mm_two(const T* a, int64_t lda, int64_t rows, const T* b, const T* other, int64_t panel_stride, int64_t panels, int64_t k,
            float* c, int64_t ldc) {
#if defined(FB_SIDE_BY_SIDE)
    if constexpr (std::is_same_v<T, bf16>)
        if (panels == 2) return mm_side_by_side(a, lda, rows, b, other, panel_stride, k, c, ldc);
#endif
    mm(a, lda, rows, b, panel_stride, panels, k, c, ldc, false);
    mm(a, lda, rows, other, panel_stride, panels, k, c + 32, ldc, false);
}

}  // namespace FOREBAY_VARIANT
