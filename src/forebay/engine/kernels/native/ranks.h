// Sums and gathers over the ranks of one machine, through shared memory with the layout of distributed/collectives.py: one
// counter per rank, each in a cache line of its own, a word that ends the group, and two sets of slots used in turn (see
// SharedMemoryComm for why two are enough).
#pragma once
#include <sched.h>
#include <time.h>

#include "abi.h"
#include "pool.h"
#include "rowops.h"
#include "vec.h"

namespace FOREBAY_VARIANT {

using forebay::RanksView;

class Exchange {
public:
    explicit Exchange(const RanksView& view) : v(view) {}

    // Where this rank writes its part of the next exchange.
    char* mine() { return slot(next(), v.rank); }
    // Publishes it and waits for the other ranks; false: the group was ended.
    bool finish() {
        number = next();
        __atomic_store_n(counter(v.rank), number, __ATOMIC_RELEASE);
        return wait();
    }
    // A rank's part; valid until the exchange after the next.
    const char* part(int64_t rank) const { return slot(number, rank); }

private:
    const RanksView& v;
    int64_t number = 0;

    int64_t* counter(int64_t rank) const { return reinterpret_cast<int64_t*>(v.memory + rank * 64); }
    int64_t next() const { return *counter(v.rank) + 1; }
    char* slot(int64_t exchange, int64_t rank) const {
        return v.memory + v.header_bytes + (exchange % 2 * v.size + rank) * v.slot_bytes;
    }
    bool arrived() const {
        for (int64_t r = 0; r < v.size; r++)
            if (__atomic_load_n(counter(r), __ATOMIC_ACQUIRE) < number) return false;
        return true;
    }
    static int64_t microseconds() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000000 + t.tv_nsec / 1000;
    }
    // Spins at first, then yields the core between checks, then sleeps: the other ranks are busy for longer.
    bool wait() const {
        const int64_t began = microseconds();
        int64_t waited = 0;
        for (int64_t looks = 1; !arrived(); looks++) {
            if (looks % 64 == 0 || waited > 100) {
                if (__atomic_load_n(counter(v.size), __ATOMIC_RELAXED) != 0) return false;
                waited = microseconds() - began;
            }
            if (waited > 5000) {
                const timespec nap{0, 200000};
                nanosleep(&nap, nullptr);
            } else if (waited > 100) {
                sched_yield();
            } else {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            }
        }
        return true;
    }
};

template <class F>
void in_pieces(Pool& pool, int64_t count, const F& f) {
    const int64_t piece = 16384;
    if (count <= piece) return f(0, count);
    pool.parallel(ceil_div(count, piece), [&](int64_t i) { f(i * piece, least(count, (i + 1) * piece)); });
}

template <class Out>
void sum_ranks(Pool& pool, const forebay::AllReduceArgs& a) {
    Exchange exchange(a.ranks);
    const int64_t step = a.ranks.slot_bytes / 4;
    for (int64_t first = 0; first < a.count; first += step) {
        const int64_t n = least(step, a.count - first);
        const float* from = a.partial + first;
        float* mine = reinterpret_cast<float*>(exchange.mine());
        in_pieces(pool, n, [&](int64_t b, int64_t e) { memcpy(mine + b, from + b, (e - b) * sizeof(float)); });
        if (!exchange.finish()) return;
        Out* out = static_cast<Out*>(a.out) + first;
        in_pieces(pool, n, [&](int64_t b, int64_t e) {
            for (int64_t i = b; i < e; i += 16) {
                vf sum = load_n(reinterpret_cast<const float*>(exchange.part(0)) + i, e - i);
                for (int64_t r = 1; r < a.ranks.size; r++) sum += load_n(reinterpret_cast<const float*>(exchange.part(r)) + i, e - i);
                store_n(out + i, sum, e - i);
            }
        });
    }
}

inline void all_reduce(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::AllReduceArgs*>(raw);
    if (a.out_dtype == forebay::BF16) sum_ranks<bf16>(pool, a);
    else sum_ranks<float>(pool, a);
}

inline void gather_columns(Pool&, const void* raw) {
    const auto& a = *static_cast<const forebay::GatherColumnsArgs*>(raw);
    Exchange exchange(a.ranks);
    const int64_t step = most(1, a.ranks.slot_bytes / 4 / a.each);
    for (int64_t first = 0; first < a.m; first += step) {
        const int64_t rows = least(step, a.m - first);
        float* mine = reinterpret_cast<float*>(exchange.mine());
        for (int64_t r = 0; r < rows; r++) memcpy(mine + r * a.each, a.part + (first + r) * a.width, a.width * sizeof(float));
        if (!exchange.finish()) return;
        for (int64_t rank = 0; a.out != nullptr && rank < a.ranks.size; rank++) {
            const float* part = reinterpret_cast<const float*>(exchange.part(rank));
            const int64_t column = rank * a.each, n = least(a.each, a.columns - column);
            for (int64_t r = 0; r < rows && n > 0; r++)
                memcpy(a.out + (first + r) * a.columns + column, part + r * a.each, n * sizeof(float));
        }
    }
}

// This rank's rows of the token table, widened; zeros for the other ranks' tokens.
template <class T, int64_t PAIR>
void embed_part_of(Pool& pool, const forebay::EmbedPartArgs& a) {
    for_rows(pool, a.m, a.hidden * 64 / PAIR, [&](int64_t r) {
        const int64_t token = a.tokens[r] - a.first;
        float* to = a.out + r * a.hidden;
        if (token < 0 || token >= a.last - a.first) {
            memset(to, 0, a.hidden * sizeof(float));
            return;
        }
        const auto value = [&](int64_t k) {
            if (a.weight == nullptr) return static_cast<const T*>(a.table)[token * a.hidden + k];
            const T* row = static_cast<const T*>(a.weight->data) + token / 16 * a.weight->kp * 16 + token % 16 * PAIR;
            return row[k / PAIR * PAIR * 16 + k % PAIR];
        };
        T line[16];
        for (int64_t k = 0; k < a.hidden; k += 16) {
            const int64_t n = least(16, a.hidden - k);
            for (int64_t i = 0; i < n; i++) line[i] = value(k + i);
            store_n(to + k, load_n(line, n), n);
        }
    });
}

inline void embed_part(Pool& pool, const void* raw) {
    const auto& a = *static_cast<const forebay::EmbedPartArgs*>(raw);
    if (a.dtype == forebay::BF16) embed_part_of<bf16, 2>(pool, a);
    else embed_part_of<float, 1>(pool, a);
}

}  // namespace FOREBAY_VARIANT
