// The operations on rows: norms, rotary embedding with the cache write, gates, copies, argmax.
#pragma once
#include "abi.h"
#include "pool.h"
#include "vec.h"

namespace FOREBAY_VARIANT {

using forebay::Pool;

// Runs f(row) for every row, on several threads when there is enough work to wake one.
template <class F>
void for_rows(Pool& pool, int64_t rows, int64_t bytes_a_row, const F& f) {
    const int64_t worth = 32768;
    if (rows * bytes_a_row < 2 * worth) {
        for (int64_t r = 0; r < rows; r++) f(r);
        return;
    }
    const int64_t step = most(1, worth / most(1, bytes_a_row));
    pool.parallel(ceil_div(rows, step), [&](int64_t task) {
        const int64_t end = least(rows, (task + 1) * step);
        for (int64_t r = task * step; r < end; r++) f(r);
    });
}

template <class T>
float sum_squares(const T* x, int64_t n) {
    vf sum = zero();
    for (int64_t i = 0; i < n; i += 16) {
        const vf v = load_n(x + i, n - i);
        sum = fma(v, v, sum);
    }
    return hsum(sum);
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t n, float eps, bool gemma) {
    const vf scale = set1(1.0f / sqrtf(sum_squares(x, n) / static_cast<float>(n) + eps));
    for (int64_t i = 0; i < n; i += 16) {
        const vf v = load_n(x + i, n - i), w = load_n(weight + i, n - i);
        store_n(out + i, gemma ? v * scale * (w + 1.0f) : rounded<T>(v * scale) * w, n - i);
    }
}

template <class T>
void rms_norm_of(Pool& pool, const forebay::RmsNormArgs& a) {
    for_rows(pool, a.rows, a.dim * 3 * sizeof(T), [&](int64_t r) {
        const int64_t outer = r / a.inner, inner = r % a.inner;
        norm_row(static_cast<const T*>(a.x) + outer * a.x_stride + inner * a.dim, static_cast<const T*>(a.weight),
                 static_cast<T*>(a.out) + outer * a.out_stride + inner * a.dim, a.dim, static_cast<float>(a.eps),
                 a.gemma != 0);
    });
}

template <class T>
void add_rms_norm_of(Pool& pool, const forebay::AddRmsNormArgs& a) {
    for_rows(pool, a.rows, a.dim * 5 * sizeof(T), [&](int64_t r) {
        const T* x = static_cast<const T*>(a.x) + r * a.dim;
        T* residual = static_cast<T*>(a.residual) + r * a.dim;
        for (int64_t i = 0; i < a.dim; i += 16)
            store_n(residual + i, load_n(x + i, a.dim - i) + load_n(residual + i, a.dim - i), a.dim - i);
        norm_row(residual, static_cast<const T*>(a.weight), static_cast<T*>(a.out) + r * a.dim, a.dim,
                 static_cast<float>(a.eps), false);
    });
}

// Rotate-half on one head; `from` and `to` may be the same.
template <class T>
void rotate(const T* from, T* to, const T* cos, const T* sin, int64_t half, int64_t dim) {
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t n = half - i;
        const vf lo = load_n(from + i, n), hi = load_n(from + half + i, n);
        const vf c = load_n(cos + i, n), s = load_n(sin + i, n);
        store_n(to + i, rounded<T>(lo * c) - rounded<T>(hi * s), n);
        store_n(to + half + i, rounded<T>(hi * c) + rounded<T>(lo * s), n);
    }
    if (from != to && 2 * half < dim) memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(T));
}

template <class T>
void rope_store_of(Pool& pool, const forebay::RopeStoreArgs& a) {
    const int64_t bytes = (a.q_heads + 2 * a.kv_heads) * a.dim * 2 * sizeof(T);
    for_rows(pool, a.m, bytes, [&](int64_t r) {
        const int64_t position = a.positions[r], slot = a.slots[r];
        const int64_t page = slot / a.page_size, offset = slot % a.page_size;
        const T* cos = static_cast<const T*>(a.cos) + position * a.rope_half;
        const T* sin = static_cast<const T*>(a.sin) + position * a.rope_half;
        T* q = static_cast<T*>(a.q) + r * a.q_stride;
        for (int64_t h = 0; h < a.q_heads; h++) rotate(q + h * a.dim, q + h * a.dim, cos, sin, a.rope_half, a.dim);
        const T* k = static_cast<const T*>(a.k) + r * a.k_stride;
        const T* v = static_cast<const T*>(a.v) + r * a.v_stride;
        for (int64_t h = 0; h < a.kv_heads; h++) {
            const int64_t token = (page * a.kv_heads + h) * a.page_size + offset;
            rotate(k + h * a.dim, static_cast<T*>(a.k_pool) + token * a.dim, cos, sin, a.rope_half, a.dim);
            memcpy(static_cast<T*>(a.v_pool) + token * a.v_dim, v + h * a.v_dim, a.v_dim * sizeof(T));
        }
    });
}

// round(act(gate)) * up. The tanh form of gelu is g times a sigmoid: (1 + tanh y) / 2 = 1 / (1 + exp(-2 y)).
template <class T>
FB_INLINE vf gate_of(vf g, vf up, bool gelu) {
    const vf exponent = gelu ? -1.59576912f * (g + 0.044715f * g * g * g) : -g;
    const vf act = g / (1.0f + expv(exponent));
    return rounded<T>(act) * up;
}

template <class T>
void gated_of(Pool& pool, const forebay::GatedArgs& a) {
    for_rows(pool, a.m, a.inner * 6 * sizeof(T), [&](int64_t r) {
        const T* gate = static_cast<const T*>(a.x) + r * a.x_stride;
        const T* up = gate + a.inner;
        T* out = static_cast<T*>(a.out) + r * a.out_stride;
        for (int64_t i = 0; i < a.inner; i += 16) {
            const vf g = load_n(gate + i, a.inner - i), u = load_n(up + i, a.inner - i);
            store_n(out + i, gate_of<T>(g, u, a.gelu != 0), a.inner - i);
        }
    });
}

inline void rms_norm(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::RmsNormArgs*>(raw);
    if (a.dtype == forebay::BF16) rms_norm_of<bf16>(pool, a);
    else rms_norm_of<float>(pool, a);
}

inline void add_rms_norm(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::AddRmsNormArgs*>(raw);
    if (a.dtype == forebay::BF16) add_rms_norm_of<bf16>(pool, a);
    else add_rms_norm_of<float>(pool, a);
}

inline void rope_store(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::RopeStoreArgs*>(raw);
    if (a.dtype == forebay::BF16) rope_store_of<bf16>(pool, a);
    else rope_store_of<float>(pool, a);
}

inline void gated(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::GatedArgs*>(raw);
    if (a.dtype == forebay::BF16) gated_of<bf16>(pool, a);
    else gated_of<float>(pool, a);
}

inline void embed(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::EmbedArgs*>(raw);
    for_rows(pool, a.m, a.row_bytes, [&](int64_t r) {
        memcpy(static_cast<char*>(a.out) + r * a.row_bytes,
               static_cast<const char*>(a.table) + a.tokens[r] * a.row_bytes, a.row_bytes);
    });
}

// A packed row is scattered: PAIR values of it in every group of 16 outputs.
template <class T, int64_t PAIR>
void embed_packed_of(Pool& pool, const forebay::EmbedPackedArgs& a) {
    const forebay::Weight& w = *a.weight;
    for_rows(pool, a.m, w.k / PAIR * 64, [&](int64_t r) {
        const int64_t token = a.tokens[r];
        const T* from = static_cast<const T*>(w.data) + token / 16 * w.kp * 16 + token % 16 * PAIR;
        T* to = static_cast<T*>(a.out) + r * w.k;
        int64_t k = 0;
        for (; k + PAIR <= w.k; k += PAIR) memcpy(to + k, from + k * 16, PAIR * sizeof(T));
        if (k < w.k) to[k] = from[k * 16];
    });
}

inline void embed_packed(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::EmbedPackedArgs*>(raw);
    if (a.dtype == forebay::BF16) embed_packed_of<bf16, 2>(pool, a);
    else embed_packed_of<float, 1>(pool, a);
}

template <class T>
void combine_of(Pool& pool, const forebay::CombineArgs& a) {
    for_rows(pool, a.m, a.n * (a.k * sizeof(T) + 4), [&](int64_t r) {
        float* out = a.out + r * a.n;
        for (int64_t i = 0; i < a.n; i += 16) {
            vf sum = zero();
            for (int64_t j = 0; j < a.k; j++) {
                const T* row = static_cast<const T*>(a.rows) + a.place[r * a.k + j] * a.n;
                sum += load_n(row + i, a.n - i) * set1(a.weights[r * a.k + j]);
            }
            store_n(out + i, sum, a.n - i);
        }
    });
}

inline void combine(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::CombineArgs*>(raw);
    if (a.dtype == forebay::BF16) combine_of<bf16>(pool, a);
    else combine_of<float>(pool, a);
}

inline void latent_store(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::LatentStoreArgs*>(raw);
    for_rows(pool, a.m, a.row_bytes * 2, [&](int64_t r) {
        memcpy(static_cast<char*>(a.pool) + a.slots[r] * a.row_bytes, static_cast<const char*>(a.latent) + r * a.stride,
               a.row_bytes);
    });
}

// The first of equal maxima; NaN never wins.
inline void argmax(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::ArgmaxArgs*>(raw);
    for_rows(pool, a.m, a.n * sizeof(float), [&](int64_t r) {
        const float* x = a.x + r * a.stride;
        vf best = set1(-INFINITY);
        int64_t i = 0;
        for (; i + 16 <= a.n; i += 16) best = vmax(loadu(x + i), best);
        float lanes[16], top = -INFINITY;
        storeu(lanes, best);
        for (float lane : lanes) top = lane > top ? lane : top;
        for (; i < a.n; i++) top = x[i] > top ? x[i] : top;
        int64_t at = 0;
        while (at + 1 < a.n && !(x[at] == top)) at++;
        a.out[r] = at;
    });
}

}  // namespace FOREBAY_VARIANT
