// Causal attention over paged keys and values.
//
// The query rows of one sequence and one kv head (tokens x heads of the group) are computed 16 per tile, one lane each.
// Keys come in blocks of 64 at absolute positions 0, 64, ..; scores are S^T = K Q^T (keys in rows, so K is
// used without a transpose), the softmax is computed per lane, and O^T += V^T P^T. Blocks are summed within chunks of 512 keys and chunks are
// merged in order, so that chunks may run on different threads. A row's sums depend on its own query and on keys' absolute
// positions only: a block or chunk in which it sees nothing adds exact zeros and multiplies by exactly one.
#pragma once
#include <vector>

#include "attention_few.h"
#include "attention_shape.h"
#include "pool.h"
#include "transpose.h"

namespace FOREBAY_VARIANT {

using forebay::Pool;

constexpr int64_t FETCHED_LINES = 256;  // of the next block's keys and values: all, if they are 64 wide

// Sums of the row tiles of a task, two tiles side by side: out[pair][value][32], one maximum and one sum per lane.
struct Sums {
    float* out;
    float* top;
    float* total;
    int64_t pairs, values;

    static int64_t floats(int64_t pairs, int64_t values) { return pairs * 32 * (values + 2); }
    Sums(float* memory, int64_t pairs, int64_t values)
        : out(memory), top(memory + pairs * 32 * values), total(top + pairs * 32), pairs(pairs), values(values) {}
    void clear() {
        memset(out, 0, pairs * 32 * values * sizeof(float));
        for (int64_t i = 0; i < pairs * 32; i++) {
            top[i] = FLOOR;
            total[i] = 0;
        }
    }
};

inline void merge(Sums& into, const Sums& from) {
    for (int64_t p = 0; p < into.pairs; p++)
        for (int64_t half = 0; half < 32; half += 16) {
            const int64_t lane = p * 32 + half;
            const vf old_top = loadu(into.top + lane), new_top = loadu(from.top + lane), top = vmax(old_top, new_top);
            const vf a = exp2v(old_top - top), b = exp2v(new_top - top);
            storeu(into.top + lane, top);
            storeu(into.total + lane, loadu(into.total + lane) * a + loadu(from.total + lane) * b);
            for (int64_t d = 0; d < into.values; d++) {
                const int64_t at = (p * into.values + d) * 32 + half;
                storeu(into.out + at, loadu(into.out + at) * a + loadu(from.out + at) * b);
            }
        }
}

template <class T>
class Attention : public AttentionShape<T> {
public:
    using Shape = AttentionShape<T>;
    using Shape::a, Shape::group, Shape::dim, Shape::values, Shape::factor, Shape::first_seen, Shape::position,
        Shape::query, Shape::queries_of, Shape::token_of;
    using typename Shape::Ahead;
    explicit Attention(const AttentionArgs& args) : Shape(args), few(args) {}

    // Row tiles per task: enough to share the work on a block of keys, few enough to stay in the L2 cache.
    int64_t tiles() const { return values <= 64 ? 16 : values <= 128 ? 8 : 4; }

    void run(Pool& pool) {
        plan(pool.threads());
        if (tasks.empty()) return;
        const int64_t floats = most(Sums::floats(tiles() / 2, values), RowSums::floats(values));
        struct Tag {};
        float* states = saved == 0 ? nullptr : scratch<Tag>().template get<float>(saved * floats);
        pool.parallel(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
            begin_task();
            const AttentionTask& task = tasks[i];
            struct TotalTag {};
            struct ChunkTag {};
            float* memory = task.state >= 0 ? states + task.state * floats : scratch<TotalTag>().template get<float>(floats);
            float* chunk = scratch<ChunkTag>().template get<float>(floats);
            if (task.rows <= FEW_ROWS)
                run_task(few, few.queries(task), task, RowSums(memory, task.rows, values), RowSums(chunk, task.rows, values));
            else
                run_task(*this, pack_queries(task), task, Sums(memory, pairs(task), values), Sums(chunk, pairs(task), values));
        });
        if (saved > 0) finish(pool, states, floats);
    }

private:
    const FewRows<T> few;
    std::vector<AttentionTask> tasks;
    std::vector<AttentionTask> wholes;  // one per split task; state: the first of its saved states
    int64_t saved = 0;

    static int64_t pairs(const AttentionTask& task) { return ceil_div(task.rows, 32); }

    template <class Way, class S>
    static void run_task(const Way& way, const T* queries, const AttentionTask& task, S total, S chunk) {
        total.clear();
        for (int64_t c = task.chunk; c < task.chunk + task.chunks; c++) {
            way.sum_chunk(task, queries, c, chunk);
            merge(total, chunk);
        }
        if (task.state < 0) way.write(task, total);
    }

    // The first state is already the result of a merge into an empty total, as in an unsplit task.
    template <class Way, class S>
    static void finish_task(const Way& way, const AttentionTask& task, float* states, int64_t floats, int64_t size, int64_t values) {
        S total(states + task.state * floats, size, values);
        for (int64_t c = 1; c < task.chunks; c++) merge(total, S(states + (task.state + c) * floats, size, values));
        way.write(task, total);
    }

    void plan(int threads) {
        const int64_t rows_a_task = tiles() * 16;
        for (int64_t seq = 0; seq < a.num_seqs; seq++) {
            const int64_t rows = queries_of(seq) * group;
            // The last rows have most keys: start with them.
            for (int64_t row = (ceil_div(rows, rows_a_task) - 1) * rows_a_task; row >= 0; row -= rows_a_task) {
                const int64_t here = least(rows_a_task, rows - row);
                const int64_t first = first_seen(position(seq, row)) / KEY_CHUNK;
                const int64_t chunks = position(seq, row + here - 1) / KEY_CHUNK + 1 - first;
                for (int64_t head = 0; head < a.kv_heads; head++)
                    tasks.push_back({static_cast<int32_t>(seq), static_cast<int32_t>(head), row, here, first, chunks, -1});
            }
        }
        if (static_cast<int64_t>(tasks.size()) >= 4 * threads || threads == 1) return;
        std::vector<AttentionTask> split;
        for (AttentionTask& task : tasks) {
            if (task.chunks == 1) {
                split.push_back(task);
                continue;
            }
            task.state = saved;
            wholes.push_back(task);
            for (int64_t c = 0; c < task.chunks; c++) {
                split.push_back({task.seq, task.head, task.row, task.rows, task.chunk + c, 1, saved});
                saved++;
            }
        }
        tasks.swap(split);
    }

    void finish(Pool& pool, float* states, int64_t floats) {
        pool.parallel(static_cast<int64_t>(wholes.size()), [&](int64_t i) {
            const AttentionTask& task = wholes[i];
            if (task.rows <= FEW_ROWS) finish_task<FewRows<T>, RowSums>(few, task, states, floats, task.rows, values);
            else finish_task<Attention, Sums>(*this, task, states, floats, pairs(task), values);
        });
    }

    const T* pack_queries(const AttentionTask& task) const {
        struct RowTag {};
        struct PanelTag {};
        const int64_t tiles_here = 2 * ceil_div(task.rows, 32);
        T* rows = scratch<RowTag>().template get<T>(16 * dim);
        T* panels = scratch<PanelTag>().template get<T>(tiles_here * 16 * dim);
        for (int64_t tile = 0; tile < tiles_here; tile++) {
            memset(rows, 0, 16 * dim * sizeof(T));
            for (int64_t r = 0; r < least(16, task.rows - tile * 16); r++)
                memcpy(rows + r * dim, query(task, task.row + tile * 16 + r), a.dim * sizeof(T));
            pack_panel(rows, dim, dim, panels + tile * 16 * dim);
        }
        return panels;
    }

    // Keys (KEY_BLOCK, dim) and values as columns (values, KEY_BLOCK) of one block; keys outside [first, end) are zero
    // and their pages are not read.
    void gather(const AttentionTask& task, int64_t block, int64_t first, int64_t end, T* keys, T* value_columns) const {
        struct Tag {};
        T* rows = scratch<Tag>().template get<T>(KEY_BLOCK * values);
        const int32_t* pages = a.page_table + task.seq * a.max_pages;
        for (int64_t i = 0; i < KEY_BLOCK;) {
            const int64_t key = block + i;
            if (key < first || key >= end) {
                const int64_t hidden = key < first ? least(first - key, KEY_BLOCK - i) : KEY_BLOCK - i;
                memset(keys + i * dim, 0, hidden * dim * sizeof(T));
                memset(rows + i * values, 0, hidden * values * sizeof(T));
                i += hidden;
                continue;
            }
            const int64_t offset = key % a.page_size;
            const int64_t run = least(least(a.page_size - offset, end - key), KEY_BLOCK - i);
            const int64_t token = token_of(pages, task, key);
            copy_rows(static_cast<const T*>(a.k_pool) + token * a.dim, a.dim, a.dim, keys + i * dim, dim, run);
            copy_rows(static_cast<const T*>(a.v_pool) + token * a.v_row, a.v_row, a.v_dim, rows + i * values, values, run);
            i += run;
        }
        columns(rows, values, KEY_BLOCK, values, value_columns);
    }

    static void copy_rows(const T* from, int64_t from_stride, int64_t n, T* to, int64_t to_stride, int64_t count) {
        if (n == to_stride && n == from_stride) {
            memcpy(to, from, count * n * sizeof(T));
            return;
        }
        for (int64_t r = 0; r < count; r++) {
            copy_values(to + r * to_stride, from + r * from_stride, n);
            for (int64_t i = n; i < to_stride; i++) to[r * to_stride + i] = T{};
        }
    }

    void sum_chunk(const AttentionTask& task, const T* queries, int64_t chunk, Sums& sums) const {
        struct KeyTag {};
        struct ValueTag {};
        struct PartTag {};
        T* keys = scratch<KeyTag>().template get<T>(KEY_BLOCK * dim);
        T* value_columns = scratch<ValueTag>().template get<T>(KEY_BLOCK * values);
        // Sums of exponentials, 16 per lane: key j is added to part j % 16.
        float* parts = scratch<PartTag>().template get<float>(sums.pairs * 32 * 16);
        memset(parts, 0, sums.pairs * 32 * 16 * sizeof(float));
        sums.clear();
        const int64_t first = first_seen(position(task.seq, task.row));
        const int64_t end = position(task.seq, task.row + task.rows - 1) + 1;
        const int64_t chunk_end = least((chunk + 1) * KEY_CHUNK, end);
        for (int64_t block = most(chunk * KEY_CHUNK, first / KEY_BLOCK * KEY_BLOCK); block < chunk_end; block += KEY_BLOCK) {
            gather(task, block, first, end, keys, value_columns);
            Ahead ahead(*this, task, block + KEY_BLOCK, end);
            for (int64_t p = 0; p < sums.pairs; p++) {
                for (int64_t line = 0; line < FETCHED_LINES / sums.pairs; line++) ahead.fetch_line();
                const int64_t last_row = least((p + 1) * 32, task.rows) - 1;
                if (block > position(task.seq, task.row + last_row)) continue;
                sum_block(task, queries + p * 32 * dim, block, p, keys, value_columns, parts + p * 512, sums);
            }
        }
        for (int64_t p = 0; p < sums.pairs; p++)
            for (int64_t half = 0; half < 2; half++) {
                vf tree[16];
                for (int j = 0; j < 16; j++) tree[j] = loadu(parts + ((p * 2 + half) * 16 + j) * 16);
                for (int width = 8; width > 0; width /= 2)
                    for (int j = 0; j < width; j++) tree[j] += tree[j + width];
                storeu(sums.total + p * 32 + half * 16, tree[0]);
            }
    }

    void sum_block(const AttentionTask& task, const T* queries, int64_t block, int64_t pair, const T* keys,
                   const T* value_columns, float* parts, Sums& sums) const {
        alignas(64) float scores[KEY_BLOCK * 32];
        alignas(64) T weights[KEY_BLOCK * 32];
        const int64_t panels = task.rows - pair * 32 > 16 ? 2 : 1;
        float* out = sums.out + pair * values * 32;
        mm(keys, dim, KEY_BLOCK, queries, 16 * dim, panels, dim, scores, 32, false);
        for (int64_t half = 0; half < panels; half++) {
            const int64_t row = task.row + pair * 32 + half * 16;
            prepare_scores(task, block, row, scores + 16 * half);
            float* top = sums.top + pair * 32 + half * 16;
            const vf change = softmax(scores + 16 * half, top, parts + half * 256, weights + half * KEY_BLOCK * 16);
            rescale(out + 16 * half, change);
        }
        mm(value_columns, KEY_BLOCK, values, weights, KEY_BLOCK * 16, panels, KEY_BLOCK, out, 32, true);
    }

    // Soft cap and mask, where they apply.
    void prepare_scores(const AttentionTask& task, int64_t block, int64_t row, float* scores) const {
        if (a.softcap > 0) {
            const float cap = static_cast<float>(a.softcap), inner = static_cast<float>(a.scale / a.softcap);
            for (int64_t key = 0; key < KEY_BLOCK; key++)
                storeu(scores + key * 32, tanhv(loadu(scores + key * 32) * inner) * cap);
        }
        const int64_t rows_end = task.row + task.rows;
        const int64_t lowest = position(task.seq, row), highest = position(task.seq, least(row + 16, rows_end) - 1);
        if (block + KEY_BLOCK - 1 <= lowest && block >= first_seen(highest) && row + 16 <= rows_end) return;
        alignas(64) int32_t from[16], to[16];
        for (int64_t lane = 0; lane < 16; lane++) {
            const bool real = row + lane < rows_end;
            const int64_t at = real ? position(task.seq, row + lane) : -1;
            from[lane] = real ? static_cast<int32_t>(first_seen(at) - block) : 0;
            to[lane] = real ? static_cast<int32_t>(at - block) : -1;
        }
        vi low, high;
        memcpy(&low, from, 64);
        memcpy(&high, to, 64);
        for (int32_t key = 0; key < KEY_BLOCK; key++) {
            const vi at = key - (vi){};
            const vi seen = (at >= low) & (at <= high);
            const vi bits = ((vi)loadu(scores + key * 32) & seen) | ((vi)set1(MASKED) & ~seen);
            storeu(scores + key * 32, (vf)bits);
        }
    }

    // One block's exponentials for 16 rows; returns the factor for the sums so far.
    vf softmax(const float* scores, float* top, float* parts, T* weights) const {
        vf m0 = set1(MASKED), m1 = m0, m2 = m0, m3 = m0;
        for (int64_t key = 0; key < KEY_BLOCK; key += 4) {
            m0 = vmax(m0, loadu(scores + key * 32));
            m1 = vmax(m1, loadu(scores + (key + 1) * 32));
            m2 = vmax(m2, loadu(scores + (key + 2) * 32));
            m3 = vmax(m3, loadu(scores + (key + 3) * 32));
        }
        const vf old = loadu(top);
        const vf best = vmax(old, vmax(vmax(m0, m1), vmax(m2, m3)) * factor);
        storeu(top, best);
        const vf change = exp2v(old - best), scale = set1(factor);
        for (int64_t j = 0; j < 16; j += 2) {
            vf even = loadu(parts + j * 16) * change, odd = loadu(parts + (j + 1) * 16) * change;
            for (int64_t key = j; key < KEY_BLOCK; key += 16) {
                const vf p = exp2v(fma(loadu(scores + key * 32), scale, -best));
                const vf q = exp2v(fma(loadu(scores + (key + 1) * 32), scale, -best));
                even += p;
                odd += q;
                store_pair(weights + key * 16, p, q);
            }
            storeu(parts + j * 16, even);
            storeu(parts + (j + 1) * 16, odd);
        }
        return change;
    }

    static void store_pair(float* to, vf p, vf q) {
        storeu(to, p);
        storeu(to + 16, q);
    }
    static void store_pair(bf16* to, vf p, vf q) {
        const vu even = __builtin_convertvector(to_bf16(p), vu), odd = __builtin_convertvector(to_bf16(q), vu);
        const vu both = even | (odd << 16);
        memcpy(to, &both, 64);
    }

    void rescale(float* out, vf change) const {
        float lanes[16];
        storeu(lanes, change);
        bool same = true;
        for (float lane : lanes) same &= lane == 1.0f;
        if (same) return;
        for (int64_t d = 0; d < values; d++) storeu(out + d * 32, loadu(out + d * 32) * change);
    }

    void write(const AttentionTask& task, const Sums& sums) const {
        alignas(64) uint32_t rows[256];
        for (int64_t first = 0; first < task.rows; first += 16) {
            const int64_t pair = first / 32, half = first % 32;
            float* out = sums.out + pair * values * 32 + half;
            const vf total = loadu(sums.total + pair * 32 + half);
            for (int64_t d = 0; d < values; d++) storeu(out + d * 32, loadu(out + d * 32) / total);
            for (int64_t d = 0; d < values; d += 16) {
                transpose16(reinterpret_cast<const uint32_t*>(out + d * 32), 32, rows, 16);
                for (int64_t r = 0; r < least(16, task.rows - first); r++) {
                    store_n(this->output(task, task.row + first + r) + d, loadu(reinterpret_cast<const float*>(rows) + r * 16), least(16, a.v_dim - d));
                }
            }
        }
    }
};

inline void attention(Pool& pool, const void* raw) {
    const auto& args = *static_cast<const AttentionArgs*>(raw);
    if (args.dtype == forebay::BF16) Attention<bf16>(args).run(pool);
    else Attention<float>(args).run(pool);
}

}  // namespace FOREBAY_VARIANT
