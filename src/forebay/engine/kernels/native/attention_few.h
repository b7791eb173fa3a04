// Attention of few query rows (a decode step: the heads of one group), keys along the lanes.
//
// With one row per lane, as in prefill, three heads would fill three lanes of sixteen. Here S = Q K^T with
// sixteen keys per vector and O += P V with sixteen values per vector, where K is packed on the way and V is paired by
// key. Every product, maximum, exponential and sum is the same number in the same order as in attention.h, so a row has
// the same bits in both.
#pragma once
#include "attention_shape.h"
#include "transpose.h"

namespace FOREBAY_VARIANT {

constexpr int64_t FEW_ROWS = 8;

// Sums of a task's rows: out[row][values], one maximum and one sum per row.
struct RowSums {
    float* out;
    float* top;
    float* total;
    int64_t rows, values;

    RowSums(float* memory, int64_t rows, int64_t values)
        : out(memory), top(memory + FEW_ROWS * values), total(top + FEW_ROWS), rows(rows), values(values) {}
    static int64_t floats(int64_t values) { return FEW_ROWS * (values + 2); }
    void clear() {
        memset(out, 0, rows * values * sizeof(float));
        for (int64_t r = 0; r < rows; r++) {
            top[r] = FLOOR;
            total[r] = 0;
        }
    }
};

inline void merge(RowSums& into, const RowSums& from) {
    for (int64_t r = 0; r < into.rows; r++) {
        const vf old_top = set1(into.top[r]), new_top = set1(from.top[r]), top = vmax(old_top, new_top);
        const vf a = exp2v(old_top - top), b = exp2v(new_top - top);
        into.top[r] = top[0];
        into.total[r] = into.total[r] * a[0] + from.total[r] * b[0];
        float* out = into.out + r * into.values;
        const float* more = from.out + r * into.values;
        for (int64_t d = 0; d < into.values; d += 16) storeu(out + d, loadu(out + d) * a + loadu(more + d) * b);
    }
}

template <class T>
class FewRows : public AttentionShape<T> {
public:
    using Shape = AttentionShape<T>;
    using typename Shape::Ahead;
    using Shape::a, Shape::dim, Shape::factor, Shape::first_seen, Shape::position, Shape::query, Shape::token_of, Shape::values;
    explicit FewRows(const AttentionArgs& args) : Shape(args) {}

    // (rows, dim), padded with zeros.
    const T* queries(const AttentionTask& task) const {
        struct Tag {};
        T* rows = scratch<Tag>().template get<T>(FEW_ROWS * dim);
        for (int64_t r = 0; r < task.rows; r++) {
            memcpy(rows + r * dim, query(task, task.row + r), a.dim * sizeof(T));
            for (int64_t i = a.dim; i < dim; i++) rows[r * dim + i] = T{};
        }
        return rows;
    }

    void sum_chunk(const AttentionTask& task, const T* queries, int64_t chunk, RowSums& sums) const {
        struct KeyTag {};
        struct ValueTag {};
        alignas(64) float parts[FEW_ROWS * 16];
        T* keys = scratch<KeyTag>().template get<T>(KEY_BLOCK * dim);
        T* paired = scratch<ValueTag>().template get<T>(KEY_BLOCK * values);
        memset(parts, 0, task.rows * 16 * sizeof(float));
        sums.clear();
        const int64_t first = first_seen(position(task.seq, task.row));
        const int64_t end = position(task.seq, task.row + task.rows - 1) + 1;
        const int64_t chunk_end = least((chunk + 1) * KEY_CHUNK, end);
        for (int64_t block = most(chunk * KEY_CHUNK, first / KEY_BLOCK * KEY_BLOCK); block < chunk_end; block += KEY_BLOCK) {
            Ahead ahead(*this, task, block + KEY_BLOCK, end);
            for (int64_t i = 0; i < KEY_BLOCK; i += 16) pack(task, block, i, first, end, keys, paired, ahead);
            sum_block(task, queries, block, ahead, keys, paired, parts, sums);
        }
        for (int64_t r = 0; r < task.rows; r++) sums.total[r] = hsum(loadu(parts + r * 16));
    }

    void write(const AttentionTask& task, const RowSums& sums) const {
        for (int64_t r = 0; r < task.rows; r++) {
            T* to = this->output(task, task.row + r);
            const vf total = set1(sums.total[r]);
            for (int64_t d = 0; d < values; d += 16)
                store_n(to + d, loadu(sums.out + r * values + d) / total, least(16, a.v_dim - d));
        }
    }

private:
    // Sixteen keys become a panel of K and sixteen rows of V panels.
    void pack(const AttentionTask& task, int64_t block, int64_t i, int64_t first, int64_t end, T* keys, T* paired,
              Ahead& ahead) const {
        const int64_t key = block + i;
        const int32_t* pages = a.page_table + task.seq * a.max_pages;
        if (a.page_size % 16 == 0 && key >= first && key + 16 <= end && dim == a.dim && values == a.v_dim) {
            const int64_t token = token_of(pages, task, key);
            pack_panel(static_cast<const T*>(a.k_pool) + token * a.dim, dim, dim, keys + i * dim);
            pair_rows(static_cast<const T*>(a.v_pool) + token * a.v_row, a.v_row, i, paired, ahead);
            return;
        }
        struct KeyTag {};
        struct ValueTag {};
        T* k_rows = scratch<KeyTag>().template get<T>(16 * dim);
        T* v_rows = scratch<ValueTag>().template get<T>(16 * values);
        memset(k_rows, 0, 16 * dim * sizeof(T));
        memset(v_rows, 0, 16 * values * sizeof(T));
        for (int64_t j = most(0, first - key); j < least(16, end - key); j++) {
            const int64_t at = key + j;
            const int64_t token = token_of(pages, task, at);
            copy_values(k_rows + j * dim, static_cast<const T*>(a.k_pool) + token * a.dim, a.dim);
            copy_values(v_rows + j * values, static_cast<const T*>(a.v_pool) + token * a.v_row, a.v_dim);
        }
        pack_panel(k_rows, dim, dim, keys + i * dim);
        pair_rows(v_rows, values, i, paired, ahead);
    }

    // Rows i .. i + 15 of the block's V panels, which are [KEY_BLOCK / 2][16][2] for bf16 and [KEY_BLOCK][16] for fp32.
    void pair_rows(const bf16* rows, int64_t stride, int64_t i, bf16* paired, Ahead& ahead) const {
        for (int64_t j = 0; j < 16; j += 2)
            for (int64_t d = 0; d < values; d += 16) {
                ahead.fetch_line();
                interleave(rows + j * stride + d, rows + (j + 1) * stride + d, paired + d * KEY_BLOCK + (i + j) * 16);
            }
    }
    void pair_rows(const float* rows, int64_t stride, int64_t i, float* paired, Ahead&) const {
        for (int64_t j = 0; j < 16; j++)
            for (int64_t d = 0; d < values; d += 16) storeu(paired + d * KEY_BLOCK + (i + j) * 16, loadu(rows + j * stride + d));
    }

    void sum_block(const AttentionTask& task, const T* queries, int64_t block, Ahead& ahead, const T* keys, const T* paired,
                   float* parts, RowSums& sums) const {
        alignas(64) float scores[FEW_ROWS * KEY_BLOCK];
        alignas(64) T weights[FEW_ROWS * KEY_BLOCK];
        const auto meanwhile = [&] { ahead.fetch_line(); };
        mm_few(queries, dim, task.rows, keys, 16 * dim, KEY_BLOCK / 16, dim, scores, KEY_BLOCK, false, meanwhile);
        for (int64_t r = 0; r < task.rows; r++) {
            prepare_scores(task, block, r, scores + r * KEY_BLOCK);
            softmax(scores + r * KEY_BLOCK, sums, r, parts + r * 16, weights + r * KEY_BLOCK);
        }
        mm_few(weights, KEY_BLOCK, task.rows, paired, KEY_BLOCK * 16, values / 16, KEY_BLOCK, sums.out, values, true, meanwhile);
    }

    // Soft cap and mask, where they apply.
    void prepare_scores(const AttentionTask& task, int64_t block, int64_t row, float* scores) const {
        if (a.softcap > 0) {
            const float cap = static_cast<float>(a.softcap), inner = static_cast<float>(a.scale / a.softcap);
            for (int64_t i = 0; i < KEY_BLOCK; i += 16) storeu(scores + i, tanhv(loadu(scores + i) * inner) * cap);
        }
        const int64_t at = position(task.seq, task.row + row), from = first_seen(at);
        if (from <= block && block + KEY_BLOCK - 1 <= at) return;
        for (int64_t i = 0; i < KEY_BLOCK; i++)
            if (block + i < from || block + i > at) scores[i] = MASKED;
    }

    // One block's exponentials for one row; the sums so far are rescaled to the new maximum.
    void softmax(const float* scores, RowSums& sums, int64_t row, float* parts, T* weights) const {
        static_assert(KEY_BLOCK == 64, "four vectors of keys");
        const vf s[4] = {loadu(scores), loadu(scores + 16), loadu(scores + 32), loadu(scores + 48)};
        const float best_here = highest(vmax(vmax(s[0], s[1]), vmax(s[2], s[3])));
        const vf old = set1(sums.top[row]), best = vmax(old, set1(best_here) * factor);
        const vf change = exp2v(old - best), scale = set1(factor);
        sums.top[row] = best[0];
        vf part = loadu(parts) * change;
        for (int64_t i = 0; i < 4; i++) {
            const vf p = exp2v(fma(s[i], scale, -best));
            part += p;
            storeu(weights + i * 16, p);
        }
        storeu(parts, part);
        if (change[0] == 1.0f) return;
        float* out = sums.out + row * values;
        for (int64_t d = 0; d < values; d += 16) storeu(out + d, loadu(out + d) * change);
    }

    static float highest(vf v) {
        float t[16];
        storeu(t, v);
        for (int width = 8; width > 0; width /= 2)
            for (int i = 0; i < width; i++) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
        return t[0];
    }
};

}  // namespace FOREBAY_VARIANT
